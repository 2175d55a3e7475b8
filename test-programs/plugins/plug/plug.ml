(* A plugin. Its host has a probe [shared], too. *)

let shared = ref 0

let mine = ref 0

let run n =
  [%probe "shared" (incr shared)];
  if n > 0 then [%probe "plug_only" (mine := !mine + String.length "x")]

let () =
  (* Runs when it is loaded. *)
  run 0;
  Registry.add
    { run; hits = (fun () -> [ ("shared", !shared); ("plug_only", !mine) ]) }
