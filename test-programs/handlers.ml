(* Handlers that do what handlers of real programs do: allocate, collect,
   raise, print, and contain probes. The probes must not change the work:
   [work] is the same in every round, whatever is enabled. *)

exception Interrupted of int

let names =
  [ "alloc"
  ; "collect"
  ; "compact"
  ; "raise"
  ; "print"
  ; "outer"
  ; "inner"
  ; "recursive"
  ; "one_armed"
  ; "closure"
  ; "guarded"
  ]

let counts : (string, int) Hashtbl.t = Hashtbl.create 16

let count name =
  Hashtbl.replace counts name
    (1 + Option.value (Hashtbl.find_opt counts name) ~default:0)

let allocating values =
  let sum = List.fold_left ( + ) 0 values in
  [%probe "alloc"
    (let copies = List.init 1000 (fun i -> (i, values)) in
     if List.length (Sys.opaque_identity copies) = 1000 then count "alloc")];
  sum + List.length values

(* Values that are live across the site must survive a collection that moves them. *)
let collecting n =
  let fresh = List.init n string_of_int in
  let pair = (Array.make n 1.5, fresh) in
  [%probe "collect"
    (Gc.full_major ();
     count "collect")];
  [%probe "compact"
    (Gc.compact ();
     count "compact")];
  let floats, strings = pair in
  int_of_float (Array.fold_left ( +. ) 0. floats)
  + String.length (String.concat "" strings)
  + List.length fresh

let raising n =
  match
    [%probe "raise"
      (count "raise";
       raise (Interrupted n))]
  with
  | () -> n
  | exception Interrupted m -> m

let printing round =
  [%probe "print"
    (Printf.printf "handler print round=%d\n" round;
     count "print")]

let nesting n =
  [%probe "outer"
    (count "outer";
     [%probe "inner" (count "inner")])];
  n + 1

let rec recursive n =
  if n = 0 then 0
  else (
    [%probe "recursive" (count "recursive")];
    1 + recursive (n - 1))

let one_armed n =
  if n mod 3 = 0 then [%probe "one_armed" (count "one_armed")];
  n

let closing_over ~a ~b ~c ~d ~x ~label =
  let e = a * b and f = c - d and y = x *. 2. in
  [%probe "closure"
    (let show () =
       Printf.sprintf "%d %d %d %d %d %d %g %g %s" a b c d e f x y label
     in
     if String.length (show ()) > 0 then count "closure")];
  a + b + c + d + e + f + int_of_float (x +. y) + String.length label

let guarded n =
  if [%probe_is_enabled "guarded"] then
    [%probe "guarded" (count "guarded")];
  n

let sum f n = List.fold_left (fun acc i -> acc + f i) 0 (List.init n Fun.id)

let round n =
  Hashtbl.reset counts;
  printing n;
  let work =
    allocating [ 1; 2; 3 ] + collecting 100
    + sum raising 2
    + nesting 1 + recursive 10 + sum one_armed 9
    + closing_over ~a:1 ~b:2 ~c:3 ~d:4 ~x:0.5 ~label:"label"
    + guarded 1
  in
  Printf.printf "round %d work=%d" n work;
  List.iter
    (fun name ->
      Printf.printf " %s=%d" name
        (Option.value (Hashtbl.find_opt counts name) ~default:0))
    names;
  print_newline ()

let () = Rounds.serve round
