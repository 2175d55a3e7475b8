(* Probes that pass values that are made of others, for tools that show them one level
   deep. The comments say what tools show. *)

let opaque = Sys.opaque_identity

let hits = ref 0

exception Own of int * string

exception Bare

type shape = ..

type shape += Circle of float

(* Not_found, Failure "boom", Own (3, "three"), Bare, Circle (2.5),
   Unix.Unix_error (1, "open", "file"); those of this program with its path. *)
let exceptions () =
  let none = opaque Not_found and failure = opaque (Failure "boom") in
  let own = opaque (Own (3, "three")) and bare = opaque Bare in
  let circle = opaque (Circle 2.5) in
  let system = opaque (Unix.Unix_error (Unix.EUNKNOWNERR 7, "open", "file")) in
  [%probe "exceptions"
    (ignore (none, failure, own, bare, circle, system);
     incr hits)
    [@probe.args none, failure, own, bare, circle, system]]

(* 3x4 of float64, 5 of char with the layout of Fortran, five dimensions, none; the
   first of them in a tuple *)
let bigarrays () =
  let open Bigarray in
  let matrix = opaque (Array2.create float64 c_layout 3 4) in
  let text = opaque (Array1.create char fortran_layout 5) in
  let five = opaque (Genarray.create int16_signed c_layout [| 1; 2; 3; 4; 5 |]) in
  let none = opaque (Genarray.create int32 c_layout [||]) in
  let pair = opaque (matrix, 1) in
  [%probe "bigarrays"
    (ignore (matrix, text, five, none, pair);
     incr hits)
    [@probe.args matrix, text, five, none, pair]]

let rec circle = 1 :: 2 :: circle

(* ["a"; "bc"], [5] as a pair, of 1000 the first 21, a circle, pairs, (1, (2, 3)) *)
let lists () =
  let texts = opaque [ "a"; "bc" ] and one = opaque [ 5 ] in
  let long = opaque (List.init 1000 Fun.id) in
  let pairs = opaque [ (1, 2); (3, 4) ] and nested = opaque (1, (2, 3)) in
  [%probe "lists"
    (ignore (texts, one, long, circle, pairs, nested);
     incr hits)
    [@probe.args texts, one, long, circle, pairs, nested]]

type mixed =
  { name : string
  ; ratio : float
  ; count : int64
  ; state : int option
  ; apply : int -> int
  }

(* Some "x", Error "bad", `Tag 3, a record of everything, a lazy value that has been
   evaluated, strings that are cut *)
let others () =
  let some = opaque (Some "x") and bad = opaque (Error "bad") in
  let tag = opaque (`Tag 3) and number = opaque 6 in
  let mixed =
    opaque
      { name = "it"
      ; ratio = 0.5
      ; count = 7L
      ; state = opaque (Some 1)
      ; apply = (fun n -> n + number)
      }
  in
  let later = opaque (lazy (number + 1)) in
  ignore (Lazy.force later);
  let long = String.make 31 'a' ^ "\xc3\xa9" in
  let strings = opaque [| long; long; long; long |] in
  [%probe "others"
    (ignore (some, bad, tag, mixed, later, strings);
     ignore (mixed.name, mixed.ratio, mixed.count, mixed.state, mixed.apply);
     incr hits)
    [@probe.args some, bad, tag, mixed, later, strings]]

let () =
  Rounds.serve (fun _ ->
      exceptions ();
      bigarrays ();
      lists ();
      others ();
      Printf.printf "hits %d\n" !hits)
