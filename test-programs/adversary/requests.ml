(* Requests of which a tool may time the wrong end: they are nested deeper than it can follow, end
   by an exception instead of their second probe, or end in another thread. *)

exception Dropped of int

let text n = "r" ^ string_of_int n

let starts n alive = [%probe "starts" (ignore (Sys.opaque_identity (ref n))) [@probe.args n, alive]]

let finishes n alive = [%probe "finishes" (Gc.minor ()) [@probe.args n, alive]]

(* Each request makes the next; the last raises, and one far above catches that. *)
let last = 140

let rec nested n =
  let alive = text n in
  starts n alive;
  if n = last then raise (Dropped n);
  (match nested (n + 1) with
  | () -> ()
  | exception Dropped dropped when n mod 50 = 0 ->
    Verdict.check (dropped = last) "the number of an exception");
  Verdict.check (String.equal alive (text n)) "a text of a request";
  finishes n alive

let requests = Queue.create ()

let mutex = Mutex.create ()

let arrived = Condition.create ()

let finished = Atomic.make 0

let rec worker () =
  Mutex.lock mutex;
  while Queue.is_empty requests do
    Condition.wait arrived mutex
  done;
  let n, alive = Queue.pop requests in
  Mutex.unlock mutex;
  Verdict.check (String.equal alive (text n)) "a text from another thread";
  finishes n alive;
  Atomic.incr finished;
  worker ()

let send n =
  let alive = text n in
  starts n alive;
  Mutex.lock mutex;
  Queue.add (n, alive) requests;
  Condition.signal arrived;
  Mutex.unlock mutex

let sent = 20

let round n =
  nested 1;
  let before = Atomic.get finished in
  for i = 1 to sent do
    send ((n * sent) + i)
  done;
  while Atomic.get finished < before + sent do
    Thread.delay 0.0005
  done;
  Verdict.check (Atomic.get finished = before + sent) "each request is finished once"

let () =
  ignore (Thread.create worker ());
  ignore (Thread.create worker ());
  Verdict.run round
