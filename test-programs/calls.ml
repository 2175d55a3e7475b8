(* A program without probes. Its functions count their own calls, in one thread or
   several. *)

exception Odd

let leaves = ref 0

let depths = ref 0

let raised = ref 0

let[@inline never] leaf x =
  incr leaves;
  x + 1

(* Calls itself, but not in tail position. *)
let[@inline never] rec deep n =
  incr depths;
  if n = 0 then 0 else 1 + deep (n - 1)

let[@inline never] raises n =
  incr raised;
  if n land 1 = 1 then raise Odd else leaf n

let work n =
  for i = 1 to n do
    ignore (Sys.opaque_identity (leaf i));
    ignore (Sys.opaque_identity (deep (i land 7)));
    (match raises i with _ -> () | exception Odd -> ());
    (* Threads take turns when they allocate. *)
    ignore (Sys.opaque_identity (ref i))
  done

let () =
  Rounds.ready ();
  Rounds.commands (fun line ->
      match Scanf.sscanf line "run %d %d%!" (fun threads n -> (threads, n)) with
      | threads, n ->
          List.iter Thread.join (List.init threads (fun _ -> Thread.create work n));
          Printf.printf "calls leaf=%d deep=%d raises=%d\n" !leaves !depths !raised
      | exception (Scanf.Scan_failure _ | Failure _ | End_of_file) ->
          Rounds.unknown line)
