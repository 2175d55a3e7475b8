(* Gc.Memprof with callbacks that allocate and hit probes; they run wherever memory is
   allocated. With compilers that lack it (5.0 to 5.2), the work runs without callbacks. *)

let text n = "m" ^ string_of_int n

let sampled = Atomic.make 0

let called n =
  let alive = text n in
  [%probe "sampled"
    (Verdict.check (alive = text n) "a text in a handler")
    [@probe.args n, alive]];
  Verdict.check (String.equal alive (text n)) "a text in a callback"

let tracker =
  let allocated (_ : Gc.Memprof.allocation) =
    let n = 1 + Atomic.fetch_and_add sampled 1 in
    called n;
    Some n
  in
  let promoted n =
    called n;
    Some (text n)
  in
  { Gc.Memprof.alloc_minor = allocated
  ; alloc_major = (fun allocation -> Option.map text (allocated allocation))
  ; promote = promoted
  ; dealloc_minor = called
  ; dealloc_major = (fun alive -> called (int_of_string (String.sub alive 1 (String.length alive - 1))))
  }

let work n =
  let alive = text n in
  let kept = List.init 50 (fun i -> text (n + i)) in
  [%probe "works"
    (let copies = Array.init 300 (fun i -> (i, alive)) in
     Verdict.check (snd (Sys.opaque_identity copies).(299) == alive) "a copy")
    [@probe.args n, alive]];
  List.iteri (fun i kept -> Verdict.check (String.equal kept (text (n + i))) "a kept text") kept

let is_supported =
  match ignore (Gc.Memprof.start ~sampling_rate:0.01 ~callstack_size:20 tracker) with
  | () -> Gc.Memprof.stop (); true
  | exception Failure _ -> false

let round n =
  if is_supported then ignore (Gc.Memprof.start ~sampling_rate:0.01 ~callstack_size:20 tracker);
  for i = 1 to 100 do
    work ((n * 100) + i)
  done;
  Gc.full_major ();
  if is_supported then (
    Gc.Memprof.stop ();
    Verdict.check (Atomic.get sampled > 0) "something is sampled")

let () =
  Gc.set { (Gc.get ()) with minor_heap_size = 4096 };
  Verdict.run round
