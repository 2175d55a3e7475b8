(* Domains, each with some system threads, that hit probes as fast as they can.

   Values that handlers allocate, and values that are live at the sites, are
   kept for a while and then checked. With a third argument, such as `collect`,
   minor heaps are small and one more domain does nothing but collect and compact.

   A report is made while every worker is paused between two rounds, so that its
   counts are those of whole rounds. *)

exception Hit

type kept =
  { seed : int
  ; numbers : int list
  ; text : string
  ; floats : float array
  }

type worker =
  { name : string
  ; kept : kept option array
  ; mutable rounds : int
  ; mutable hit : int
  ; mutable alloc : int
  ; mutable raised : int
  ; mutable broken : int
  }

let worker name =
  { name
  ; kept = Array.make 64 None
  ; rounds = 0
  ; hit = 0
  ; alloc = 0
  ; raised = 0
  ; broken = 0
  }

let keep seed =
  { seed
  ; numbers = List.init 20 (fun i -> seed + i)
  ; text = string_of_int seed
  ; floats = Array.init 5 (fun i -> float_of_int (seed * i))
  }

let is_whole { seed; numbers; text; floats } =
  List.length numbers = 20
  && List.for_all2 ( = ) numbers (List.init 20 (fun i -> seed + i))
  && String.equal text (string_of_int seed)
  && floats.(4) = float_of_int (seed * 4)

let check worker kept = if not (is_whole kept) then worker.broken <- worker.broken + 1

let round worker =
  let n = worker.rounds in
  let slot = n land 63 in
  let alive = keep n in
  [%probe "hit" (worker.hit <- worker.hit + 1) [@probe.args n, alive]];
  [%probe "alloc"
    (worker.alloc <- worker.alloc + 1;
     worker.kept.(slot) <- Some (keep (n * 3)))
    [@probe.args slot, alive]];
  (match [%probe "raise" (raise Hit)] with
  | () -> ()
  | exception Hit -> worker.raised <- worker.raised + 1);
  check worker (Sys.opaque_identity alive);
  Option.iter (check worker) worker.kept.(63 - slot);
  worker.rounds <- n + 1

(* ---- Pausing between two rounds ---- *)

let gate = Mutex.create ()

let arrival = Condition.create ()

let opening = Condition.create ()

let closed = Atomic.make false

let paused = ref 0

let stop = Atomic.make false

let pause () =
  Mutex.lock gate;
  incr paused;
  Condition.signal arrival;
  while Atomic.get closed do
    Condition.wait opening gate
  done;
  decr paused;
  Mutex.unlock gate

let while_all_paused count f =
  Mutex.lock gate;
  Atomic.set closed true;
  while !paused < count do
    Condition.wait arrival gate
  done;
  f ();
  Atomic.set closed false;
  Condition.broadcast opening;
  Mutex.unlock gate

let work worker =
  while not (Atomic.get stop) do
    if Atomic.get closed then pause ();
    round worker;
    (* The threads of a domain run in turn, for 50 ms unless one yields. *)
    if worker.rounds land 15 = 0 then Thread.yield ()
  done

let in_domain workers () =
  List.map (Thread.create work) (List.tl workers)
  |> (fun others ->
       work (List.hd workers);
       others)
  |> List.iter Thread.join

let rec collect () =
  if not (Atomic.get stop) then (
    Gc.full_major ();
    Gc.compact ();
    collect ())

let print { name; rounds; hit; alloc; raised; broken; _ } =
  Printf.printf "worker %s rounds=%d hit=%d alloc=%d raise=%d broken=%d\n" name
    rounds hit alloc raised broken

let report workers =
  while_all_paused (List.length workers) (fun () -> List.iter print workers);
  print_endline "report end"

(* The command `pause`: reports, and keeps the workers paused until the next line of
   input, which is discarded. *)
let keep_paused workers =
  while_all_paused (List.length workers) (fun () ->
      List.iter print workers;
      print_endline "report end";
      ignore (input_line stdin));
  print_endline "going"

(* ---- Domains that end ---- *)

let[@inline never] step n = Sys.opaque_identity (n + 1)

let rec steps n left = if left > 0 then steps (step n) (left - 1)

(* So many times: domains are spawned, call [step] at the same time as this one does,
   and end. *)
let generations times domains calls =
  for _ = 1 to times do
    let waiting = Atomic.make (domains + 1) in
    let work () =
      Atomic.decr waiting;
      while Atomic.get waiting > 0 do
        Domain.cpu_relax ()
      done;
      steps 0 calls
    in
    let running = List.init domains (fun _ -> Domain.spawn work) in
    work ();
    List.iter Domain.join running
  done;
  print_endline "generations"

let () =
  let argument i default =
    if Array.length Sys.argv > i then int_of_string Sys.argv.(i) else default
  in
  let domains = argument 1 8 and threads = argument 2 1 in
  let collects = Array.length Sys.argv > 3 in
  if collects then Gc.set { (Gc.get ()) with minor_heap_size = 4096 };
  let workers =
    List.init domains (fun d ->
        List.init threads (fun t -> worker (Printf.sprintf "%d.%d" d t)))
  in
  let running = List.map (fun workers -> Domain.spawn (in_domain workers)) workers in
  let running =
    if collects then Domain.spawn collect :: running else running
  in
  Rounds.ready ();
  Rounds.commands (function
    | "report" -> report (List.concat workers)
    | "pause" -> keep_paused (List.concat workers)
    | command -> (
      match Scanf.sscanf command "generations %d %d %d" generations with
      | () -> ()
      | exception Scanf.Scan_failure _ | exception End_of_file ->
        Rounds.unknown command));
  Atomic.set stop true;
  List.iter Domain.join running
