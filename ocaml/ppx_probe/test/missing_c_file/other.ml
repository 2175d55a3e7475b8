let miss () = [%probe "miss" (print_endline "miss")]

let () = miss ()
