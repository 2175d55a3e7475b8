(* Pairs that interleave in a thread, and pairs that nest but could be taken for interleaving ones. A command
   is the name of one of these functions and its number of rounds; the answer is the name. *)

let handled = ref 0

(* Events that overlap, like those of a cooperative scheduler. *)

(* Each start is followed by the stop of the fourth event before it: starts and stops alternate, and only
   their numbers show which belong together. *)
let steady rounds =
  for number = 1 to rounds do
    [%probe "start" (incr handled) [@probe.args number]];
    let oldest = number - 4 in
    if oldest > 0 then [%probe "stop" (incr handled) [@probe.args oldest]]
  done

(* First in, first out; nothing has a number. *)
let bursts rounds =
  for round = 1 to rounds do
    let many = 2 + (round mod 4) in
    for _ = 1 to many do
      [%probe "start" (incr handled)]
    done;
    for _ = 1 to many do
      [%probe "stop" (incr handled)]
    done
  done

(* The same with numbers; the stops come in another order. *)
let numbered rounds =
  for round = 1 to rounds do
    let first = 10 * round in
    for number = first to first + 4 do
      [%probe "start" (incr handled) [@probe.args number]]
    done;
    List.iter
      (fun offset ->
        let number = first + offset in
        [%probe "stop" (incr handled) [@probe.args number]])
      [ 2; 0; 4; 1; 3 ]
  done

(* All events have the same number, which does not tell them apart. *)
let connection rounds =
  let connection = Sys.opaque_identity 7 in
  for _ = 1 to rounds do
    for _ = 1 to 3 do
      [%probe "start" (incr handled) [@probe.args connection]]
    done;
    for _ = 1 to 3 do
      [%probe "stop" (incr handled) [@probe.args connection]]
    done
  done

(* A loop runs tasks that are suspended between start and stop. *)
let tasks rounds =
  let queue = Queue.create () in
  let task () =
    [%probe "start" (incr handled)];
    Queue.add (fun () -> [%probe "stop" (incr handled)]) queue
  in
  for _ = 1 to rounds do
    for _ = 1 to 3 do
      Queue.add task queue
    done;
    while not (Queue.is_empty queue) do
      (Queue.pop queue) ()
    done
  done

(* One event starts first and never stops; after it, starts and stops alternate, without numbers. *)
let always_open rounds =
  [%probe "start" (incr handled)];
  for _ = 1 to rounds do
    [%probe "start" (incr handled)];
    [%probe "stop" (incr handled)]
  done

(* The same; all events have the same number. *)
let open_connection rounds =
  let connection = Sys.opaque_identity 7 in
  [%probe "start" (incr handled) [@probe.args connection]];
  for _ = 1 to rounds do
    [%probe "start" (incr handled) [@probe.args connection]];
    [%probe "stop" (incr handled) [@probe.args connection]]
  done

(* Two events overlap, and the second starts in a deeper frame. *)
let[@inline never] start_deeper () =
  [%probe "start" (incr handled)];
  incr handled

let deeper rounds =
  for _ = 1 to rounds do
    [%probe "start" (incr handled)];
    start_deeper ();
    [%probe "stop" (incr handled)];
    [%probe "stop" (incr handled)]
  done

(* Events that do not overlap. *)

(* A start has the argument of the call, its stop the result, which is also the argument of another call. *)
let rec fib n =
  [%probe "start" (incr handled) [@probe.args n]];
  let result = if n < 2 then n else fib (n - 1) + fib (n - 2) in
  [%probe "stop" (incr handled) [@probe.args result]];
  result

let recursion rounds =
  for round = 1 to rounds do
    ignore (fib (4 + (round mod 4)))
  done

(* The stop of each call has the number of another call's start: 5 for 0, 4 for 1, and so on. *)
let rec len list index =
  [%probe "start" (incr handled) [@probe.args index]];
  let len = match list with [] -> 0 | _ :: rest -> 1 + len rest (index + 1) in
  [%probe "stop" (incr handled) [@probe.args len]];
  len

let lengths rounds =
  for _ = 1 to rounds do
    ignore (len (Sys.opaque_identity [ 1; 2; 3; 4; 5 ]) 0)
  done

(* Called with 100, it has more starts that wait for their stop than are kept, which is 64. *)
let rec deep n =
  [%probe "start" (incr handled)];
  let result = if n = 0 then 0 else 1 + deep (n - 1) in
  [%probe "stop" (incr handled)];
  result

(* Start and stop are in two functions that `request` calls, at different depths of the stack. *)
let[@inline never] begin_request number =
  let alive = Sys.opaque_identity [| number; number |] in
  [%probe "start" (incr handled) [@probe.args number]];
  alive.(0) + alive.(1)

let[@inline never] end_request () = [%probe "stop" (incr handled)]

let rec request depth =
  let number = begin_request depth in
  let result = if depth = 0 then 1 else request (depth - 1) + request (depth - 1) in
  end_request ();
  result + number

let requests rounds =
  for _ = 1 to rounds do
    ignore (request 3)
  done

let[@inline never] finish result =
  [%probe "stop" (incr handled)];
  result

let[@inline never] rec started n =
  [%probe "start" (incr handled)];
  finish (n + 1)

and tail_calls n =
  if n > 0 then (
    ignore (started n);
    [%probe "start" (incr handled) [@probe.args n]];
    [%probe "stop" (incr handled) [@probe.args n]];
    tail_calls (n - 1))

(* An exception leaves a start without a stop. *)
let[@inline never] failing n =
  [%probe "start" (incr handled) [@probe.args n]];
  if n mod 10 = 0 then raise Exit;
  [%probe "stop" (incr handled) [@probe.args n]]

let exceptions rounds =
  for n = 1 to rounds do
    try failing n with Exit -> ()
  done

let unnumbered_exceptions rounds =
  for n = 1 to rounds do
    try
      [%probe "start" (incr handled)];
      if n mod 10 = 5 then raise_notrace Exit;
      [%probe "stop" (incr handled)]
    with Exit -> ()
  done

(* Two nested events in one function, with numbers that tell them apart. *)
let spans rounds =
  for round = 1 to rounds do
    let outer = 2 * round in
    let inner = outer + 1 in
    [%probe "start" (incr handled) [@probe.args outer]];
    [%probe "start" (incr handled) [@probe.args inner]];
    [%probe "stop" (incr handled) [@probe.args inner]];
    [%probe "stop" (incr handled) [@probe.args outer]]
  done

(* The start has a state as its argument, the stop the state after it. *)
let states rounds =
  let state = ref 0 in
  for round = 1 to rounds do
    let from = !state in
    [%probe "start" (incr handled) [@probe.args from]];
    let next = (from + 1 + (round mod 2)) mod 5 in
    state := next;
    [%probe "stop" (incr handled) [@probe.args next]]
  done

(* The start has the size asked for, the stop the size given; each is one of eight, at random. *)
let sizes rounds =
  let random = Random.State.make [| 4242 |] in
  for _ = 1 to rounds do
    let asked = Random.State.int random 8 in
    [%probe "start" (incr handled) [@probe.args asked]];
    let given = Random.State.int random 8 in
    [%probe "stop" (incr handled) [@probe.args given]]
  done

let threads rounds =
  let pairs () =
    for number = 1 to rounds do
      [%probe "start" (incr handled) [@probe.args number]];
      if number mod 100 = 0 then Thread.yield ();
      [%probe "stop" (incr handled) [@probe.args number]]
    done
  in
  List.iter Thread.join (List.init 4 (fun _ -> Thread.create pairs ()))

let all =
  [ ("steady", steady)
  ; ("bursts", bursts)
  ; ("numbered", numbered)
  ; ("connection", connection)
  ; ("tasks", tasks)
  ; ("always_open", always_open)
  ; ("open_connection", open_connection)
  ; ("deeper", deeper)
  ; ("recursion", recursion)
  ; ("lengths", lengths)
  ; ("deep", fun rounds -> for _ = 1 to rounds do ignore (deep 100) done)
  ; ("requests", requests)
  ; ("tail_calls", tail_calls)
  ; ("exceptions", exceptions)
  ; ("unnumbered_exceptions", unnumbered_exceptions)
  ; ("spans", spans)
  ; ("states", states)
  ; ("sizes", sizes)
  ; ("threads", threads)
  ]

let () =
  Rounds.ready ();
  Rounds.commands (fun command ->
      match String.split_on_char ' ' command with
      | [ name; rounds ] when List.mem_assoc name all ->
        (List.assoc name all) (int_of_string rounds);
        print_endline name
      | _ -> Rounds.unknown command)
