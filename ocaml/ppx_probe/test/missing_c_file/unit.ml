let hit () = [%probe "hit" (print_endline "hit")]

let () = hit ()
