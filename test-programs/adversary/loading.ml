(* Loads plugins by Dynlink, and loads and unloads C libraries with probes. Its arguments
   are a plugin and a library. *)

external run_library : string -> int = "adversary_run_library"

let text n = "d" ^ string_of_int n

(* No plugin can be unloaded. *)
let most = 20

let copy file n =
  let name, channel = Filename.open_temp_file (Printf.sprintf "plugin%d" n) ".cmxs" in
  let read = open_in_bin file in
  output_string channel (really_input_string read (in_channel_length read));
  close_in read;
  close_out channel;
  name

let load n =
  let file = copy Sys.argv.(1) n in
  (* An ordinary user's tool cannot open what is deleted. *)
  at_exit (fun () -> Sys.remove file);
  Dynlink.loadfile_private file;
  Verdict.check (List.length !Registry.all = n) "a plugin registers itself"

let round n =
  let alive = text n in
  [%probe "rounds" (Verdict.check (alive = text n) "a text in a handler") [@probe.args n, alive]];
  if n <= most then load n;
  List.iter (fun { Registry.run; _ } -> run n) !Registry.all;
  for _ = 1 to 10 do
    Verdict.check (run_library Sys.argv.(2) = 0) "a library is loaded, run and unloaded"
  done;
  [%probe "loaded" (Gc.compact ()) [@probe.args n, alive]];
  Verdict.check (String.equal alive (text n)) "a text after its probes"

let () = Verdict.run round
