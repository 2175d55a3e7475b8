(* Requests of Lwt: many are under way in one thread, and some end in another. `start` and `stop` have the number of the request,
   and a text with the number. The answers have the sum of their times by the program's own clock. *)

open Lwt.Syntax

let handled = ref 0

let now = Unix.gettimeofday

let text number = "request " ^ string_of_int number

let[@inline never] start number text = [%probe "start" (incr handled) [@probe.args number, text]]

let[@inline never] stop number text = [%probe "stop" (incr handled) [@probe.args number, text]]

let request finish number =
  let text = text number in
  let began = now () in
  start number text;
  let* () = Lwt_unix.sleep (0.001 *. float_of_int (1 + (number mod 5))) in
  let* () = Lwt.pause () in
  let* () = finish number text in
  Lwt.return (now () -. began)

let here number text =
  stop number text;
  Lwt.return_unit

let elsewhere number text = Lwt_preemptive.detach (stop number) text

(* So many at a time, each of which has so many after it. *)
let flight finish width count =
  let sum = ref 0. in
  let rec requests number left =
    if left = 0 then Lwt.return_unit
    else
      let* time = request finish number in
      sum := !sum +. time;
      requests (number + 1) (left - 1)
  in
  let all = List.init width (fun index -> requests (index * count) count) in
  let* () = Lwt.join all in
  Lwt.return (width * count, !sum)

let say name work =
  let count, sum = Lwt_main.run (work ()) in
  Printf.printf "%s %d %.0f\n" name count (sum *. 1e9)

let () =
  Rounds.ready ();
  Rounds.commands (fun command ->
      match String.split_on_char ' ' command with
      | [ "flight"; width; count ] ->
        say "flight" (fun () -> flight here (int_of_string width) (int_of_string count))
      | [ "moving"; count ] -> say "moving" (fun () -> flight elsewhere 4 (int_of_string count))
      | _ -> Rounds.unknown command)
