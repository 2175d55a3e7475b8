(* Requests that are under way at the same time: `start` and `stop` have the number of the request, and a text
   with the number. The answers have the sum of their times by the program's own clock: from before `start` to after
   `stop`, and from after `start` to before `stop`. *)

let handled = ref 0

let now = Own_clock.now

let pause () =
  let until = now () +. 2e-5 in
  while now () < until do
    ()
  done

type request =
  { number : int
  ; text : string
  ; began : float
  ; started : float
  }

let[@inline never] start number =
  let text = "request " ^ string_of_int number in
  let began = now () in
  [%probe "start" (incr handled) [@probe.args number, text]];
  { number; text; began; started = now () }

let[@inline never] stop { number; text; began; started } =
  let stopped = now () in
  [%probe "stop" (incr handled) [@probe.args number, text]];
  now () -. began, stopped -. started

let add (outer, inner) request =
  let from_before, from_after = stop request in
  outer +. from_before, inner +. from_after

let say name count (outer, inner) =
  Printf.printf "%s %d %.0f %.0f\n" name count (outer *. 1e9) (inner *. 1e9)

(* So many at a time in one thread; any of them ends next. *)
let flight width count =
  let random = Random.State.make [| width |] in
  let under_way = Array.init width start in
  let sums = ref (0., 0.) in
  for number = width to width + count - 1 do
    let index = Random.State.int random width in
    pause ();
    sums := add !sums under_way.(index);
    under_way.(index) <- start number
  done;
  say "flight" (count + width) (Array.fold_left add !sums under_way)

(* Each begins in one of four threads, and ends in another of four. *)
let moving count =
  let lock = Mutex.create () and filled = Condition.create () in
  let queue = Queue.create () and sums = ref (0., 0.) in
  let begin_some first () =
    for number = first to first + count - 1 do
      let request = start number in
      pause ();
      Mutex.lock lock;
      Queue.add request queue;
      Condition.signal filled;
      Mutex.unlock lock
    done
  and end_some () =
    for _ = 1 to count do
      Mutex.lock lock;
      while Queue.is_empty queue do
        Condition.wait filled lock
      done;
      let request = Queue.pop queue in
      Mutex.unlock lock;
      pause ();
      let outer, inner = stop request in
      Mutex.lock lock;
      sums := fst !sums +. outer, snd !sums +. inner;
      Mutex.unlock lock
    done
  in
  let threads index =
    [ Thread.create (begin_some (index * count)) (); Thread.create end_some () ]
  in
  List.iter Thread.join (List.concat_map threads [ 0; 1; 2; 3 ]);
  say "moving" (4 * count) !sums

(* Two threads by turns: each ends what the other has begun. *)
let handed count =
  let lock = Mutex.create () and turned = Condition.create () in
  let turn = ref 0 and begun = Array.make 2 None and sums = ref (0., 0.) in
  let in_turn own act =
    Mutex.lock lock;
    while !turn <> own do
      Condition.wait turned lock
    done;
    act ();
    turn := 1 - own;
    Condition.broadcast turned;
    Mutex.unlock lock
  in
  let work own =
    for round = 1 to count do
      in_turn own (fun () -> begun.(own) <- Some (start ((2 * round) + own)));
      in_turn own (fun () ->
          pause ();
          Option.iter (fun request -> sums := add !sums request) begun.(1 - own))
    done
  in
  List.iter Thread.join (List.init 2 (Thread.create work));
  say "handed" (2 * count) !sums

(* Those that `start` has begun. *)
let opened = ref []

let () =
  Rounds.ready ();
  Rounds.commands (fun command ->
      match String.split_on_char ' ' command with
      | [ "flight"; width; count ] -> flight (int_of_string width) (int_of_string count)
      | [ "moving"; count ] -> moving (int_of_string count)
      | [ "handed"; count ] -> handed (int_of_string count)
      | [ "start"; first; count ] ->
        let first = int_of_string first in
        opened := List.init (int_of_string count) (fun i -> start (first + i)) @ !opened;
        print_endline "start"
      | [ "stop" ] ->
        let sums = List.fold_left add (0., 0.) !opened in
        let count = List.length !opened in
        opened := [];
        say "stop" count sums
      | _ -> Rounds.unknown command)
