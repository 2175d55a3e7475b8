(* Requests of Lwt: many are under way in one thread, and some end in another. `start` and `stop` have the number of the request,
   and a text with the number. The answers have the sum of their times by the program's own clock: from before `start` to after
   `stop`, and from after `start` to before `stop`. *)

open Lwt.Syntax

let handled = ref 0

let now = Own_clock.now

let text number = "request " ^ string_of_int number

let[@inline never] start number text = [%probe "start" (incr handled) [@probe.args number, text]]

(* Returns when it came. *)
let[@inline never] stop number text =
  let came = now () in
  [%probe "stop" (incr handled) [@probe.args number, text]];
  came

let request finish number =
  let text = text number in
  let began = now () in
  start number text;
  let started = now () in
  let* () = Lwt_unix.sleep (0.001 *. float_of_int (1 + (number mod 5))) in
  let* () = Lwt.pause () in
  let* stopped = finish number text in
  Lwt.return (now () -. began, stopped -. started)

let here number text = Lwt.return (stop number text)

let elsewhere number text = Lwt_preemptive.detach (stop number) text

(* So many at a time, each of which has so many after it. *)
let flight finish width count =
  let outer = ref 0. and inner = ref 0. in
  let rec requests number left =
    if left = 0 then Lwt.return_unit
    else
      let* from_before, from_after = request finish number in
      outer := !outer +. from_before;
      inner := !inner +. from_after;
      requests (number + 1) (left - 1)
  in
  let all = List.init width (fun index -> requests (index * count) count) in
  let* () = Lwt.join all in
  Lwt.return (width * count, !outer, !inner)

let say name work =
  let count, outer, inner = Lwt_main.run (work ()) in
  Printf.printf "%s %d %.0f %.0f\n" name count (outer *. 1e9) (inner *. 1e9)

let () =
  Rounds.ready ();
  Rounds.commands (fun command ->
      match String.split_on_char ' ' command with
      | [ "flight"; width; count ] ->
        say "flight" (fun () -> flight here (int_of_string width) (int_of_string count))
      | [ "moving"; count ] -> say "moving" (fun () -> flight elsewhere 4 (int_of_string count))
      | _ -> Rounds.unknown command)
