(* Writes the units of the program [many]: 24 of them, 200 names, 220 sites.

   Name i is in unit i mod 24; every tenth name is in the next unit
   too. *)

let units = 24

let names = 200

let unit_name u = Printf.sprintf "unit_%02d" u

let stands_in u i =
  i mod units = u || (i mod 10 = 0 && (i + 1) mod units = u)

let with_file name f =
  let channel = open_out_bin name in
  f channel;
  close_out channel

let write_unit u =
  with_file (unit_name u ^ ".ml") @@ fun out ->
  output_string out "let run hits =\n";
  for i = 0 to names - 1 do
    if stands_in u i then
      Printf.fprintf out "  [%%probe \"many_%03d\" (incr hits)];\n" i
  done;
  output_string out "  ()\n"

let write_all () =
  with_file "all_units.ml" @@ fun out ->
  output_string out "let run hits =\n";
  for u = 0 to units - 1 do
    Printf.fprintf out "  %s.run hits;\n" (String.capitalize_ascii (unit_name u))
  done;
  output_string out "  ()\n"

let () =
  for u = 0 to units - 1 do
    write_unit u
  done;
  write_all ()
