(* Timers whose signals come every 100 us: their handlers allocate, hit probes, and
   raise out of whatever runs, handlers of probes included. *)

exception Tick of int

let text n = "s" ^ string_of_int n

let ticks = ref 0

(* Whether an exception would be caught. *)
let inside = ref false

let tick _ =
  incr ticks;
  let n = !ticks in
  let alive = text n in
  [%probe "ticks" (Verdict.check (alive = text n) "a tick's text") [@probe.args n, alive]];
  let numbers = List.init 20 (fun i -> n + i) in
  Verdict.check (List.fold_left ( + ) 0 numbers = (20 * n) + 190) "a tick's numbers";
  Verdict.check (String.equal alive (text n)) "a tick's text after its probe";
  if !inside && n land 7 = 0 then (
    inside := false;
    raise (Tick n))

let attempt f n =
  match
    inside := true;
    f n;
    inside := false
  with
  | () -> ()
  | exception Tick n -> Verdict.check (n land 7 = 0) "the number of a raised tick"

let work n =
  let alive = text n and numbers = List.init 30 (fun i -> n + i) in
  let half = float_of_int n *. 0.5 in
  [%probe "works"
    (let copies = Array.make 300 alive in
     Verdict.check ((Sys.opaque_identity copies).(299 - (n land 7)) == alive) "a copy")
    [@probe.args n, alive]];
  [%probe "halves" (Verdict.check (half *. 2. = float_of_int n) "a half") [@probe.args n, alive, half]];
  Verdict.check (String.equal alive (text n)) "a text after its probes";
  Verdict.check (half +. half = float_of_int n) "a half after its probes";
  Verdict.check
    (List.fold_left ( + ) 0 numbers = (30 * n) + 435)
    "numbers after their probes"

(* A signal that the program sends to itself arrives, and no other does. *)

let received = ref 0

let expected = ref 0

let send () =
  incr expected;
  Unix.kill (Unix.getpid ()) Sys.sigusr1;
  let rec wait tries =
    if !received <> !expected && tries > 0 then (
      (try Unix.sleepf 0.001 with Unix.Unix_error (Unix.EINTR, _, _) -> ());
      wait (tries - 1))
  in
  wait 10_000;
  Verdict.check (!received = !expected) "each signal is handled once"

(* Where three handlers raise this often, OCaml 5.3 and 5.4 crash without a tool, in one run of
   three that lasts 3 s; with two, none of 22 runs of 5.3 and 22 of 5.4 did. *)
let timers =
  let two = [ Unix.ITIMER_REAL; ITIMER_VIRTUAL ] in
  if Sys.ocaml_version < "5" then Unix.ITIMER_PROF :: two else two

let set interval =
  let timer = { Unix.it_interval = interval; it_value = interval } in
  List.iter (fun which -> ignore (Unix.setitimer which timer)) timers

let round n =
  let before = !ticks in
  set 0.0001;
  for i = 1 to 100 do
    attempt work ((n * 100) + i)
  done;
  (* A sleep is no shorter for being interrupted. *)
  let start = Unix.gettimeofday () in
  Unix.sleepf 0.003;
  Verdict.check (Unix.gettimeofday () -. start >= 0.0029) "a sleep lasts";
  send ();
  Verdict.check (!ticks > before) "the timers tick";
  set 0.

let () =
  let on signal handler = Sys.set_signal signal (Signal_handle handler) in
  List.iter (fun signal -> on signal tick) [ Sys.sigalrm; Sys.sigvtalrm; Sys.sigprof ];
  on Sys.sigusr1 (fun _ -> incr received);
  Verdict.run round
