let ready () = Printf.printf "ready pid=%d\n%!" (Unix.getpid ())

let commands handle =
  let rec next () =
    match input_line stdin with
    | exception End_of_file -> ()
    | line ->
      handle (String.trim line);
      flush stdout;
      next ()
  in
  next ()

let unknown command = Printf.printf "unknown command %S\n" command

let serve round =
  let count = ref 0 in
  ready ();
  commands (function
    | "run" ->
      incr count;
      round !count
    | command -> unknown command)
