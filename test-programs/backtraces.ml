(* A program without probes. It prints the backtrace of an exception that goes through
   several functions, and waits for a line within several calls. *)

exception Odd of int

let[@inline never] rec raises n =
  if n = 0 then raise (Odd (Sys.opaque_identity 3)) else 1 + raises (n - 1)

(* Catches it, and raises it again. *)
let[@inline never] again n =
  match raises n with
  | found -> found + 1
  | exception Odd i when i < 0 -> i

let[@inline never] called_back n = 1 + List.fold_left (fun sum n -> sum + again n) 0 [ n ]

let[@inline never] rec waits n =
  if n = 0 then (
    print_endline "waiting";
    String.length (input_line stdin))
  else 1 + waits (n - 1)

let () =
  Printexc.record_backtrace true;
  Rounds.ready ();
  Rounds.commands (function
    | "raise" ->
      (try ignore (Sys.opaque_identity (called_back 3)) with
       | Odd _ -> print_string (Printexc.get_backtrace ()));
      print_endline "raised"
    | "wait" -> Printf.printf "waited %d\n" (waits 4)
    | line -> Rounds.unknown line)
