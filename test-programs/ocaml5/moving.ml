(* Requests in fibers, which a scheduler of four domains suspends, and resumes in whichever domain is free. `start` and `stop` have
   the number of the request, and a text with the number. The answers have the sum of their times by the program's own clock: from before
   `start` to after `stop`, and from after `start` to before `stop`. *)

open Effect
open Effect.Deep

type _ Effect.t += Suspend : unit Effect.t

let handled = Atomic.make 0

let now = Own_clock.now

let[@inline never] start number text =
  [%probe "start" (Atomic.incr handled) [@probe.args number, text]]

let[@inline never] stop number text =
  [%probe "stop" (Atomic.incr handled) [@probe.args number, text]]

let pause () =
  let until = now () +. 1e-5 in
  while now () < until do
    Domain.cpu_relax ()
  done

(* Both times, in nanoseconds. *)
let request number =
  let text = "request " ^ string_of_int number in
  let began = now () in
  start number text;
  let started = now () in
  for _ = 0 to number mod 4 do
    pause ();
    perform Suspend
  done;
  let stopped = now () in
  stop number text;
  let nanoseconds seconds = int_of_float (seconds *. 1e9) in
  nanoseconds (now () -. began), nanoseconds (stopped -. started)

let moving count =
  let lock = Mutex.create () and queue = Queue.create () in
  let finished = Atomic.make 0 in
  let outer = Atomic.make 0 and inner = Atomic.make 0 in
  let add task = Mutex.protect lock (fun () -> Queue.add task queue) in
  let next () = Mutex.protect lock (fun () -> Queue.take_opt queue) in
  let begin_request number () =
    match_with request number
      { retc =
          (fun (from_before, from_after) ->
            ignore (Atomic.fetch_and_add outer from_before);
            ignore (Atomic.fetch_and_add inner from_after);
            Atomic.incr finished)
      ; exnc = raise
      ; effc =
          (fun (type a) (performed : a Effect.t) ->
            match performed with
            | Suspend -> Some (fun (k : (a, _) continuation) -> add (fun () -> continue k ()))
            | _ -> None)
      }
  in
  for number = 1 to count do
    add (begin_request number)
  done;
  let work () =
    while Atomic.get finished < count do
      match next () with
      | Some task -> task ()
      | None -> Domain.cpu_relax ()
    done
  in
  let domains = List.init 3 (fun _ -> Domain.spawn work) in
  work ();
  List.iter Domain.join domains;
  Printf.printf "moving %d %d %d\n" count (Atomic.get outer) (Atomic.get inner)

let () =
  Rounds.ready ();
  Rounds.commands (fun command ->
      match String.split_on_char ' ' command with
      | [ "moving"; count ] -> moving (int_of_string count)
      | _ -> Rounds.unknown command)
