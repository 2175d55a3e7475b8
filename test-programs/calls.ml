(* A program without probes. Its functions count their own calls, in one thread or
   several; forked children do not report theirs. *)

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

let run threads n = List.iter Thread.join (List.init threads (fun _ -> Thread.create work n))

let fork n =
  match Unix.fork () with
  | 0 ->
      work n;
      Unix._exit 0
  | pid -> pid

let run_forks children n =
  let children = List.init children (fun _ -> fork n) in
  work n;
  List.iter (fun pid -> ignore (Unix.waitpid [] pid)) children

let () =
  Rounds.ready ();
  Rounds.commands (fun line ->
      match Scanf.sscanf line "%s %d %d%!" (fun what many n -> (what, many, n)) with
      | ("run" | "forks") as what, many, n ->
          (if what = "run" then run else run_forks) many n;
          Printf.printf "calls leaf=%d deep=%d raises=%d\n" !leaves !depths !raised
      | _ -> Rounds.unknown line
      | exception (Scanf.Scan_failure _ | Failure _ | End_of_file) ->
          Rounds.unknown line)
