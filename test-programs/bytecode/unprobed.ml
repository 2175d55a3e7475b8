(* Has no commands; exits at the end of its input. *)

let () =
  print_endline "ready";
  try
    while true do
      Printf.printf "unknown command %S\n%!" (read_line ())
    done
  with End_of_file -> ()
