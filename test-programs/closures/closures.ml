(* Marshals a closure, and reads closures that other processes have marshalled. Commands on stdin, one a line:

   write FILE    marshals [work] to FILE
   read FILE     reads a closure from FILE, calls it with 41 and prints `got RESULT`; prints `refused` if
                 Marshal raises Failure *)

let work x =
  [%probe "work" (ignore (Sys.opaque_identity x))];
  x + 1

let write file =
  let channel = open_out_bin file in
  Marshal.to_channel channel work [ Marshal.Closures ];
  close_out channel;
  print_endline "written"

let read file =
  let channel = open_in_bin file in
  (match (Marshal.from_channel channel : int -> int) with
  | closure -> Printf.printf "got %d\n" (closure 41)
  | exception Failure _ -> print_endline "refused");
  close_in channel;
  flush stdout

let rec serve () =
  match input_line stdin with
  | exception End_of_file -> ()
  | line ->
    let space = String.index line ' ' in
    let file = String.sub line (space + 1) (String.length line - space - 1) in
    (match String.sub line 0 space with
    | "write" -> write file
    | "read" -> read file
    | command -> failwith ("unknown command: " ^ command));
    serve ()

let () =
  ignore (work 0);
  print_endline "ready";
  serve ()
