(* Two libraries and this program with one name in common, [shared], and a
   probe that is inlined from one into another. *)

let shared = ref 0

let only = ref 0

let counters =
  [ ("shared", shared)
  ; ("left.shared", Left.shared)
  ; ("right.shared", Right.shared)
  ; ("main_only", only)
  ; ("left_only", Left.only)
  ; ("right_only", Right.only)
  ; ("inlined", Left.inlined)
  ]

let round n =
  List.iter (fun (_, counter) -> counter := 0) counters;
  Left.run ();
  Right.run ();
  [%probe "shared" (incr shared)];
  if Left.bump n > 0 then [%probe "main_only" (incr only)];
  Printf.printf "round %d" n;
  List.iter (fun (name, counter) -> Printf.printf " %s=%d" name !counter) counters;
  Printf.printf " shared_enabled=%b\n" [%probe_is_enabled "shared"]

let () = Rounds.serve round
