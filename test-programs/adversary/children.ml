(* Processes that fork, stop, exit and execute, seen by their parent: every status is
   the one that was meant, at the time when it is due. *)

let waited flags child = snd (Verdict.retried (Unix.waitpid flags) child)

let exits n =
  match Unix.fork () with
  | 0 ->
    [%probe "exits" (ignore (Sys.opaque_identity (string_of_int n))) [@probe.args n]];
    Unix._exit (n land 127)
  | child -> Verdict.check (waited [] child = WEXITED (n land 127)) "an exit status"

let is_killed n =
  match Unix.fork () with
  | 0 ->
    [%probe "killed" (ignore (Sys.opaque_identity (ref n))) [@probe.args n]];
    Unix.kill (Unix.getpid ()) Sys.sigkill;
    Unix._exit 1
  | child -> Verdict.check (waited [] child = WSIGNALED Sys.sigkill) "a status of a killed child"

let stops () =
  match Unix.fork () with
  | 0 ->
    Unix.kill (Unix.getpid ()) Sys.sigstop;
    [%probe "continued" (ignore (Sys.opaque_identity (ref 1)))];
    Unix._exit 9
  | child ->
    Verdict.check (waited [ WUNTRACED ] child = WSTOPPED Sys.sigstop) "a stop is reported";
    Unix.kill child Sys.sigcont;
    Verdict.check (waited [ WUNTRACED ] child = WEXITED 9) "an exit after a stop"

let ended = ref 0

(* Once SIGCHLD has come, the child can be waited for without waiting. *)
let signals_its_end () =
  let before = !ended in
  match Unix.fork () with
  | 0 -> Unix._exit 3
  | child ->
    while !ended = before do
      try Unix.sleepf 0.001 with Unix.Unix_error (Unix.EINTR, _, _) -> ()
    done;
    let found, status = Verdict.retried (Unix.waitpid [ WNOHANG ]) child in
    Verdict.check (found = child && status = WEXITED 3) "a child has exited at its SIGCHLD";
    if found = 0 then ignore (waited [] child)

let chain = "chain"

let executes links =
  let command = [| Sys.executable_name; chain; string_of_int links |] in
  let child = Unix.create_process command.(0) command Unix.stdin Unix.stdout Unix.stderr in
  Verdict.check (waited [] child = WEXITED 42) "the status at the end of a chain"

let link links =
  [%probe "links" (ignore (Sys.opaque_identity (ref links))) [@probe.args links]];
  if links = 0 then exit 42;
  at_exit (fun () -> Unix._exit 41);
  Unix.execv Sys.executable_name [| Sys.argv.(0); chain; string_of_int (links - 1) |]

let shells n =
  let status = Sys.command (Printf.sprintf "exit %d" (n land 63)) in
  Verdict.check (status = n land 63) "the status of a shell"

let round n =
  for i = 1 to 5 do
    exits ((n * 5) + i)
  done;
  is_killed n;
  stops ();
  signals_its_end ();
  executes 3;
  shells n;
  [%probe "rounds" (Verdict.check (Verdict.is_good ()) "all that before") [@probe.args n]]

let () =
  match Sys.argv with
  | [| _; word; links |] when word = chain -> link (int_of_string links)
  | _ ->
    Sys.set_signal Sys.sigchld (Signal_handle (fun _ -> incr ended));
    Verdict.run round
