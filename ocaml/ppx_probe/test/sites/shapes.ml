(* Modules, functors and classes, hidden by an interface. *)

module type Size = sig
  val size : int
end

module Make (Size : Size) = struct
  module Inner = struct
    let area () =
      [%probe "functor" ~enabled_at_init:true
        (Printf.printf "functor %d\n" Size.size)];
      Size.size * Size.size
  end
end

module Small = Make (struct
  let size = 2
end)

module Large = Make (struct
  let size = 3
end)

class shape =
  object
    val mutable drawn = 0

    method draw factor =
      drawn <- drawn + factor;
      [%probe "method" ~enabled_at_init:true (Printf.printf "method %d\n" drawn)]
  end

(* Locally abstract types. *)
let polymorphic (type a) (show : a -> string) (value : a) =
  [%probe "polymorphic" ~enabled_at_init:true
    (Printf.printf "polymorphic %s\n" (show value))];
  value

let run () =
  let small = Small.Inner.area () in
  let large = Large.Inner.area () in
  (new shape)#draw (small + large);
  ignore (polymorphic string_of_int 5 : int);
  ignore (polymorphic Fun.id "text" : string)
