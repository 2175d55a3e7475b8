(* Handlers in which threads stay for a while: they sleep, collect garbage, raise
   exceptions, and wait for each other. Values that live across a site, and values
   that handlers made, must not change: [broken] counts those that did. *)

exception Hit of int

type worker =
  { number : int
  ; kept : string list array
  ; mutable rounds : int
  ; mutable slept : int
  ; mutable collected : int
  ; mutable raised : int
  ; mutable waited : int
  ; mutable broken : int
  }

let worker number =
  { number
  ; kept = Array.make 16 []
  ; rounds = 0
  ; slept = 0
  ; collected = 0
  ; raised = 0
  ; waited = 0
  ; broken = 0
  }

let stop = ref false

let mutex = Mutex.create ()

let made n = List.init 10 (fun i -> string_of_int (n + i))

let check worker n kept =
  if kept <> [] && kept <> made n then worker.broken <- worker.broken + 1

let round worker =
  let n = worker.rounds in
  let alive = made n and text = Printf.sprintf "%d:%d" worker.number n in
  [%probe "begins"
    (worker.kept.(n land 15) <- made (n * 3))
    [@probe.args n, text, alive]];
  if n land 7 = 0 then
    [%probe "sleeps"
      (worker.slept <- worker.slept + 1;
       Thread.delay 0.001)
      [@probe.args n, text]];
  if n land 63 = 0 then
    [%probe "collects"
      (worker.collected <- worker.collected + 1;
       if n land 1023 = 0 then Gc.compact () else Gc.full_major ())
      [@probe.args alive]];
  (match [%probe "raises" (raise (Hit n)) [@probe.args n, text]] with
  | () -> ()
  | exception Hit m ->
    worker.raised <- worker.raised + 1;
    if m <> n then worker.broken <- worker.broken + 1);
  [%probe "waits"
    (Mutex.lock mutex;
     worker.waited <- worker.waited + 1;
     Thread.yield ();
     Mutex.unlock mutex)];
  [%probe "ends" (ignore (Sys.opaque_identity (made n))) [@probe.args n, text, alive]];
  check worker n (Sys.opaque_identity alive);
  let other = 15 - (n land 15) in
  (match worker.kept.(other) with
  | [] -> ()
  | first :: _ as kept -> check worker (int_of_string first) kept);
  worker.rounds <- n + 1

let work worker =
  while not !stop do
    round worker;
    if worker.rounds land 15 = 0 then Thread.yield ()
  done

let report workers =
  List.iter
    (fun { number; rounds; slept; collected; raised; waited; broken; _ } ->
      Printf.printf
        "worker %d rounds=%d slept=%d collected=%d raised=%d waited=%d broken=%d\n"
        number rounds slept collected raised waited broken)
    workers;
  print_endline "report end"

let () =
  let count =
    if Array.length Sys.argv > 1 then int_of_string Sys.argv.(1) else 4
  in
  let workers = List.init count worker in
  let threads = List.map (Thread.create work) workers in
  Rounds.ready ();
  Rounds.commands (function
    | "report" -> report workers
    | command -> Rounds.unknown command);
  stop := true;
  List.iter Thread.join threads;
  report workers
