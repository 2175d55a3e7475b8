(* Pairs of probes in fibers, each of which has a stack of its own. A command names what is done, and how often; the
   answer is its name. *)

open Effect
open Effect.Deep

type _ Effect.t += Yield : unit Effect.t

let handled = ref 0
let queue : (unit, unit) continuation Queue.t = Queue.create ()

let spawn f =
  match_with f ()
    { retc = Fun.id
    ; exnc = raise
    ; effc =
        (fun (type a) (performed : a Effect.t) ->
          match performed with
          | Yield -> Some (fun (k : (a, _) continuation) -> Queue.add k queue)
          | _ -> None)
    }

let event () =
  [%probe "start" (incr handled)];
  perform Yield;
  [%probe "stop" (incr handled)]

(* Eight fibers are suspended within their events, and go on in the order in which they began. *)
let overlapping rounds =
  for _ = 1 to rounds do
    for _ = 1 to 8 do
      spawn event
    done;
    while not (Queue.is_empty queue) do
      continue (Queue.pop queue) ()
    done
  done

(* Each event is within another one, which waits for its fiber. *)
let rec within depth =
  [%probe "start" (incr handled)];
  if depth > 0 then spawn (fun () -> within (depth - 1));
  [%probe "stop" (incr handled)]

let nested rounds =
  for _ = 1 to rounds do
    within 8
  done

(* The runtime moves the stack when it grows. *)
let rec descend n =
  [%probe "start" (incr handled)];
  let result = if n = 0 then 0 else 1 + descend (n - 1) in
  [%probe "stop" (incr handled)];
  result

let growing rounds =
  for _ = 1 to rounds do
    spawn (fun () -> ignore (descend 10_000))
  done

(* An exception ends the fiber within [depth + 1] calls. *)
let rec fails depth =
  if depth = 0 then raise Exit;
  fails (depth - 1);
  incr handled

let failing rounds =
  for _ = 1 to rounds do
    match spawn (fun () -> fails 3) with () -> assert false | exception Exit -> ()
  done

let all =
  [ ("overlapping", overlapping); ("nested", nested); ("growing", growing); ("failing", failing) ]

let () =
  Rounds.ready ();
  Rounds.commands (fun command ->
      match String.split_on_char ' ' command with
      | [ name; rounds ] when List.mem_assoc name all ->
        (List.assoc name all) (int_of_string rounds);
        print_endline name
      | _ -> Rounds.unknown command)
