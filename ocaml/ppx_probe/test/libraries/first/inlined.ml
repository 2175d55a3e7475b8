(* What other units inline must take its site along. *)

let[@inline always] hit from =
  [%probe "inlined" ~enabled_at_init:true (print_endline ("inlined in " ^ from))]
