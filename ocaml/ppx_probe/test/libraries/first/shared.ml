let hit () = [%probe "shared" ~enabled_at_init:true (print_endline "first")]
