(* Loads plugins by Dynlink.

     load PATH   answers `loaded`
     run         executes the probe of this program and runs each plugin, answers
                 `round NAME=HITS ...` with the hits of each probe so far
     fork        does the same in a child, which then prints `at exit` and exits
     create PATH executes a program in a child, which has stdin and stdout until it exits
     system PATH the same, through a shell
       `fork`, `create` and `system` answer `started S`: S is the child's exit status
     exec PATH   executes a program in this process
     quit *)

let shared = ref 0

let hits () =
  ("host.shared", !shared)
  :: List.concat_map (fun { Registry.hits; _ } -> hits ()) !Registry.all

let round n =
  [%probe "shared" (incr shared)];
  List.iter (fun { Registry.run; _ } -> run n) !Registry.all;
  print_string "round";
  List.iter (fun (name, count) -> Printf.printf " %s=%d" name count) (hits ());
  print_newline ()

let started = function
  | Unix.WEXITED status -> Printf.printf "started %d\n%!" status
  | Unix.WSIGNALED _ | Unix.WSTOPPED _ -> print_endline "started and killed"

let wait pid = started (snd (Unix.waitpid [] pid))

let () =
  let count = ref 0 in
  Rounds.ready ();
  Rounds.commands (fun line ->
      match String.index_opt line ' ' with
      | None when line = "run" ->
        incr count;
        round !count
      | Some i when String.sub line 0 i = "load" ->
        let path = String.sub line (i + 1) (String.length line - i - 1) in
        Dynlink.loadfile_private path;
        print_endline "loaded"
      | None when line = "quit" -> exit 0
      | None when line = "fork" -> (
        match Unix.fork () with
        | 0 ->
          at_exit (fun () -> print_endline "at exit");
          round 1;
          exit 0
        | child -> wait child)
      | Some i -> (
        let path = String.sub line (i + 1) (String.length line - i - 1) in
        match String.sub line 0 i with
        | "create" ->
          wait (Unix.create_process path [| path |] Unix.stdin Unix.stdout Unix.stderr)
        | "system" -> started (Unix.WEXITED (Sys.command (Filename.quote path)))
        | "exec" -> Unix.execv path [| path |]
        | _ -> Printf.printf "unknown command %S\n" line)
      | _ -> Printf.printf "unknown command %S\n" line)
