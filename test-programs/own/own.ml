(* A service that switches its own probes: SIGUSR1 switches [request] on or off, and
   commands on standard input call each function of Probes_self. Its argument is
   the file of libprobes. *)

let requests = ref 0

let serve () =
  incr requests;
  [%probe "request" (Printf.printf "probe request %d\n" !requests)];
  if !requests mod 2 = 0 then [%probe "even" (print_endline "probe even")]

let probes = Probes_self.current ~library:Sys.argv.(1) ()

let describe = function
  | Probes_self.Disabled -> "off"
  | Enabled -> "on"
  | Inconsistent -> "inconsistent"

let toggle _ =
  match Probes_self.state probes "request" with
  | Disabled -> Probes_self.enable probes "request"
  | Enabled | Inconsistent -> Probes_self.set probes "request" false

let states () =
  let row (name, state, counter) =
    Printf.sprintf "%s=%s/%d" name (describe state) counter
  in
  "states " ^ String.concat " " (List.map row (Probes_self.states probes))

let done_ () = "done"

(* Threads that all switch the same probes: how many updates were made, and how many have failed. *)
let in_threads count =
  let updates = Array.make count 0 in
  let failed = Array.make count 0 in
  let work thread =
    let update switch =
      match switch probes with
      | () -> updates.(thread) <- updates.(thread) + 1
      | exception Probes_self.Error _ -> failed.(thread) <- failed.(thread) + 1
    in
    for _ = 1 to 50 do
      update Probes_self.enable_all;
      serve ();
      Gc.minor ();
      update Probes_self.disable_all
    done
  in
  let threads = List.init count (Thread.create work) in
  List.iter Thread.join threads;
  let sum = Array.fold_left ( + ) 0 in
  Printf.sprintf "updates %d failed %d" (sum updates) (sum failed)

(* The child flushes its output before the parent continues. *)
let in_child () =
  match Unix.fork () with
  | 0 ->
    (match Probes_self.enable probes "request" with
     | () -> print_endline "child done"
     | exception Probes_self.Error message -> print_endline ("child " ^ message));
    Probes_self.enable_all (Probes_self.current ~library:Sys.argv.(1) ());
    serve ();
    flush stdout;
    Unix._exit 0
  | child -> ignore (Unix.waitpid [] child)

let obey line =
  match String.split_on_char ' ' line with
  | [ "serve" ] -> serve (); "served"
  | [ "states" ] -> states ()
  | [ "state"; name ] -> "state " ^ describe (Probes_self.state probes name)
  | [ "enable"; name ] -> Probes_self.enable probes name |> done_
  | [ "disable"; name ] -> Probes_self.disable probes name |> done_
  | [ "enable-regexp"; re ] -> Probes_self.enable_regexp probes re |> done_
  | [ "disable-regexp"; re ] -> Probes_self.disable_regexp probes re |> done_
  | [ "enable-all" ] -> Probes_self.enable_all probes |> done_
  | [ "disable-all" ] -> Probes_self.disable_all probes |> done_
  | [ "set"; name; on ] -> Probes_self.set probes name (on = "on") |> done_
  | [ "set-all"; on ] -> Probes_self.set_all probes (on = "on") |> done_
  | [ "zero" ] -> Probes_self.enable probes "request\000s" |> done_
  | [ "library"; file ] -> ignore (Probes_self.current ~library:file ()) |> done_
  | [ "threads"; count ] -> in_threads (int_of_string count)
  | [ "fork" ] -> in_child () |> done_
  | _ -> Printf.sprintf "unknown command %S" line

let rec read () =
  match input_line stdin with
  | line -> Some line
  | exception End_of_file -> None
  | exception Sys_error _ -> read ()

let () =
  Sys.set_signal Sys.sigusr1 (Signal_handle toggle);
  Printf.printf "ready pid=%d\n%!" (Unix.getpid ());
  let rec loop () =
    match read () with
    | None -> ()
    | Some line ->
      print_endline
        (try obey line with Probes_self.Error message -> "failed " ^ message);
      loop ()
  in
  loop ()
