(* System threads that hit probes, wait for each other, raise out of handlers, fork,
   and exit in a handler. *)

exception Out of int

let text n = "t" ^ string_of_int n

let leave n alive =
  [%probe "leaves"
    (Verdict.check (alive = text n) "a text in a handler";
     if n land 3 = 0 then raise (Out n))
    [@probe.args n, alive]]

(* The exception unwinds frames of functions that have sites. *)
let rec below depth alive f =
  if depth = 0 then f ()
  else (
    below (depth - 1) alive f;
    [%probe "below" (Verdict.check (alive <> "") "a text on the stack") [@probe.args depth]])

let lock = Mutex.create ()

let changed = Condition.create ()

(* Whose turn it is: each thread waits for the one before it. *)
let turn = ref 0

let take_turn threads index =
  Mutex.lock lock;
  while !turn mod threads <> index do
    Condition.wait changed lock
  done;
  [%probe "turns" (Thread.yield ())];
  incr turn;
  Condition.broadcast changed;
  Mutex.unlock lock

let exit_status n alive =
  match Unix.fork () with
  | 0 ->
    (try leave n alive with Out _ -> ());
    Unix._exit (if String.equal alive (text n) && Verdict.is_good () then 7 else 8)
  | child -> Verdict.retried (Unix.waitpid []) child |> snd

let ended = Atomic.make 0

let ends_in_a_handler n =
  let alive = text n in
  Fun.protect
    ~finally:(fun () -> Atomic.incr ended)
    (fun () ->
      [%probe "ends" ((Thread.exit [@ocaml.alert "-deprecated"]) ())];
      Verdict.check (String.equal alive (text n)) "a text of a short thread")

let worker threads index round =
  for i = 1 to 20 do
    let n = (round * 20) + i in
    let alive = text n in
    (match leave n alive with
    | () -> ()
    | exception Out m -> Verdict.check (m = n) "the number of an exception");
    (match below 40 alive (fun () -> raise Exit) with
    | () -> Verdict.check false "an exception passes sites"
    | exception Exit -> ());
    below 10 alive ignore;
    Verdict.check (String.equal alive (text n)) "a text after its probes"
  done;
  take_turn threads index;
  match (round + index) mod 4 with
  | 0 -> Verdict.check (exit_status round (text round) = WEXITED 7) "the status of a forked child"
  | 1 -> Thread.join (Thread.create ends_in_a_handler round)
  | 2 -> Gc.full_major ()
  | _ -> Thread.delay 0.001

let threads = 5

let round n =
  turn := 0;
  let all = List.init threads (fun index -> Thread.create (worker threads index) n) in
  List.iter Thread.join all;
  Verdict.check (!turn = threads) "each thread has its turn"

let () =
  Gc.set { (Gc.get ()) with minor_heap_size = 4096; space_overhead = 20 };
  Verdict.run round
