(* Loads plugins by Dynlink.

     load PATH   answers `loaded`
     run         runs the plugins and this program, answers `round NAME=HITS ...`
                 with the hits so far of each in turn *)

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
      | _ -> Printf.printf "unknown command %S\n" line)
