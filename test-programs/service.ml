(* A service that ticks: each tick serves a few requests, and the probes show
   them. *)

let starts = ref 0

let ends = ref 0

let misses = ref 0

let cache : (int, string) Hashtbl.t = Hashtbl.create 16

let render key =
  match Hashtbl.find_opt cache key with
  | Some page -> page
  | None ->
    [%probe "cache_miss"
      (incr misses;
       Printf.printf "probe cache_miss key=%d\n%!" key)
      [@probe.args key]];
    if Hashtbl.length cache > 6 then Hashtbl.reset cache;
    let page = Printf.sprintf "<p>%d</p>" key in
    Hashtbl.add cache key page;
    page

let serve request =
  [%probe "req_start"
    (incr starts;
     Printf.printf "probe req_start request=%d\n%!" request)
    [@probe.args request]];
  let page = render (request mod 7) in
  [%probe "req_end"
    (incr ends;
     Printf.printf "probe req_end request=%d bytes=%d\n%!" request
       (String.length page))
    [@probe.args request, page]]

let requests_per_tick = 3

let print_counts () =
  Printf.printf "handlers req_start=%d req_end=%d cache_miss=%d\n%!" !starts
    !ends !misses

(* Set by SIGUSR1. A signal handler may run in the middle of a print, so it must
   not print: [answer] does, later. *)
let asked = ref false

let answer () =
  if !asked then (
    asked := false;
    print_counts ())

let rec sleep seconds =
  let until = Unix.gettimeofday () +. seconds in
  (try Unix.sleepf seconds with Unix.Unix_error (Unix.EINTR, _, _) -> ());
  answer ();
  let left = until -. Unix.gettimeofday () in
  if left > 0. then sleep left

let tick n =
  [%probe "tick" (Printf.printf "probe tick n=%d\n%!" n) [@probe.args n]];
  for i = 0 to requests_per_tick - 1 do
    serve ((n * requests_per_tick) + i)
  done;
  if [%probe_is_enabled "req_start"] then
    Printf.printf "tick %d (requests are being watched)\n%!" n
  else Printf.printf "tick %d\n%!" n

let () =
  let argument i default =
    if Array.length Sys.argv > i then int_of_string Sys.argv.(i) else default
  in
  let interval = float_of_int (argument 1 100) /. 1000. in
  let ticks = argument 2 max_int in
  Sys.set_signal Sys.sigusr1 (Signal_handle (fun _ -> asked := true));
  at_exit print_counts;
  Printf.printf "ready pid=%d\n%!" (Unix.getpid ());
  for n = 1 to ticks do
    tick n;
    sleep interval
  done
