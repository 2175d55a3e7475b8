(* When another compilation unit inlines [hit], the copy must contain the probe site, too. *)

let[@inline always] hit from =
  [%probe "inlined" ~enabled_at_init:true (print_endline ("inlined in " ^ from))]
