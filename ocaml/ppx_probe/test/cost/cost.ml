(* The cost of a disabled site, by the number of values that it passes: medians
   of alternating samples, in ns, without the loop around it. Run by hand:
   dune exec ./ocaml/ppx_probe/test/cost/cost.exe *)

let hits = 10_000_000

let samples = 31

let opaque = Sys.opaque_identity

let a, b, c, d, e = opaque ("a", "b", "c", "d", "e")

let bare a b c d e =
  for i = 1 to hits do
    ignore (opaque i)
  done;
  ignore (opaque (a, b, c, d, e))

let no_values a b c d e =
  for i = 1 to hits do
    ignore (opaque i);
    [%probe "no_values" (ignore i)]
  done;
  ignore (opaque (a, b, c, d, e))

let two_values a b c d e =
  for i = 1 to hits do
    ignore (opaque i);
    [%probe "two_values" (ignore i) [@probe.args i, a]]
  done;
  ignore (opaque (a, b, c, d, e))

let six_values a b c d e =
  for i = 1 to hits do
    ignore (opaque i);
    [%probe "six_values" (ignore i) [@probe.args i, a, b, c, d, e]]
  done;
  ignore (opaque (a, b, c, d, e))

(* The compiler keeps the float [half] in a register, so it has to be boxed in each
   iteration. *)
let unboxed_float a b c d e =
  for i = 1 to hits do
    let half = float_of_int (opaque i) /. 2. in
    [%probe "unboxed_float" (ignore half) [@probe.args half]]
  done;
  ignore (opaque (a, b, c, d, e))

let kinds =
  [ ("bare", bare)
  ; ("no values", no_values)
  ; ("two values", two_values)
  ; ("six values", six_values)
  ; ("an unboxed float", unboxed_float)
  ]

let sample (_, run) =
  let begun = Unix.gettimeofday () in
  run a b c d e;
  (Unix.gettimeofday () -. begun) *. 1e9 /. float_of_int hits

let median values = List.nth (List.sort compare values) (List.length values / 2)

let () =
  let rounds = List.init samples (fun _ -> List.map sample kinds) in
  let medians =
    List.mapi (fun i _ -> median (List.map (fun r -> List.nth r i) rounds)) kinds
  in
  let bare = List.hd medians in
  List.iter2
    (fun (name, _) ns -> Printf.printf "%s: %.2f (%+.2f)\n" name ns (ns -. bare))
    kinds medians
