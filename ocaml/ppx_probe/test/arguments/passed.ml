(* Values that sites pass: none to six, from registers, the stack and the heap,
   also during garbage collections. *)

module Outer = struct
  module Inner = struct
    let text = "qualified"
  end

  let cell = ref 7
end

let global = Sys.opaque_identity "global"

let none () = [%probe "none" (print_endline "never printed")]

let ints a b c d e f =
  [%probe "ints"
    (Printf.printf "%d %d %d %d %d %d\n" a b c d e f)
    [@probe.args a, b, c, d, e, f]];
  a + b + c + d + e + f

(* In reverse order, so that no value is already in the register that it is
   passed in. *)
let strings a b c d e =
  [%probe "strings"
    (List.iter print_endline [ a; b; c; d; e ])
    [@probe.args e, d, c, b, a]];
  String.length (a ^ b ^ c ^ d ^ e)

(* Values that the compiler does not keep as tagged OCaml values: an int in a
   loop, a sum, a constant. *)
let computed n =
  let seven = 7 in
  let sum = ref 0 in
  for i = 1 to n do
    let square = i * i in
    sum := !sum + square;
    let so_far = !sum in
    [%probe "computed"
      (Printf.printf "%d %d %d %d\n" i square so_far seven)
      [@probe.args i, square, so_far, seven]]
  done;
  !sum

let elsewhere () =
  [%probe "elsewhere"
    (print_endline (global ^ Outer.Inner.text))
    [@probe.args global, Outer.Inner.text]]

class counter =
  object
    val mutable count = 40

    method bump by =
      count <- count + by;
      [%probe "instance" (print_int count) [@probe.args count, by]];
      count
  end

let polymorphic (type a) (show : a -> string) (value : a) =
  [%probe "polymorphic" (print_endline (show value)) [@probe.args value]];
  value

(* The handler makes the collector move the values, which are used again after
   it. *)
let collecting n =
  let fresh = String.make n 'x' and list = List.init n string_of_int in
  let float = Sys.opaque_identity (float_of_int n) in
  [%probe "collecting" ~enabled_at_init:true
    (Gc.compact ();
     Printf.printf "%d %d %g\n" (String.length fresh) (List.length list) float)
    [@probe.args fresh, list, float]];
  String.equal fresh (String.make n 'x')
  && list = List.init n string_of_int
  && float = float_of_int n

(* A disabled site allocates nothing. *)
let allocated () =
  let text = Sys.opaque_identity "text" and list = Sys.opaque_identity [ 1 ] in
  let cell = Outer.cell in
  let before = Gc.minor_words () in
  for i = 1 to 1000 do
    [%probe "loop"
      (print_endline text)
      [@probe.args i, text, list, cell, global, Outer.Inner.text]]
  done;
  Gc.minor_words () -. before

(* But an unboxed float is boxed for a disabled site, too: that allocates two
   machine words. *)
let boxed () =
  let before = Gc.minor_words () in
  for i = 1 to 1000 do
    let half = float_of_int i /. 2. in
    [%probe "boxed" (print_float half) [@probe.args half]]
  done;
  Gc.minor_words () -. before

let () =
  none ();
  Printf.printf "ints %d\n" (ints 0 1 (-1) 42 max_int min_int);
  Printf.printf "strings %d\n"
    (strings "one" "two" "three" (String.make 3 'y') (global ^ " five"));
  Printf.printf "computed %d\n" (computed 3);
  elsewhere ();
  Printf.printf "instance %d\n" ((new counter)#bump 2);
  Printf.printf "polymorphic %d %s\n"
    (polymorphic string_of_int 5)
    (polymorphic Fun.id "text");
  Printf.printf "collecting %b\n" (collecting 100);
  if Sys.backend_type = Sys.Native then
    Printf.printf "allocated %g, boxed %g\n" (allocated ()) (boxed ())
