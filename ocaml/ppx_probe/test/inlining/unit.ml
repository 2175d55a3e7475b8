let[@inline always] hit from =
  [%probe "inlined" ~enabled_at_init:true (print_endline ("hit in " ^ from))];
  [%probe_is_enabled "inlined"]
