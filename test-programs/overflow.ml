(* Overflows the stack with probes in every frame: frames of several sizes, which
   begin at several distances from the end of the stack. *)

let handled = ref 0

let rec small n =
  [%probe "enter" (incr handled) [@probe.args n]];
  [%probe "leave" (incr handled)];
  1 + small (n + 1)

let rec middle a b c n =
  [%probe "enter" (incr handled) [@probe.args n, a]];
  [%probe "leave" (incr handled)];
  let r = middle b c a (n + 1) in
  r + a + b + c

let rec large a b c d e f g h n =
  [%probe "enter" (incr handled) [@probe.args n, h]];
  [%probe "leave" (incr handled)];
  let r = large b c d e f g h a (n + 1) in
  r + a + b + c + d + e + f + g + h

let functions =
  [ small; (fun n -> middle 1 2 3 n); (fun n -> large 1 2 3 4 5 6 7 8 n) ]

(* Calls [f] below [frames] small frames. *)
let rec below frames f =
  if frames = 0 then f 0 else 1 + below (frames - 1) f

let caught () =
  let count = ref 0 in
  let overflow f =
    for frames = 0 to 2 do
      match below frames f with
      | _ -> ()
      | exception Stack_overflow -> incr count
    done
  in
  List.iter overflow functions;
  !count

let rec descend n =
  [%probe "enter" (incr handled) [@probe.args n]];
  [%probe "leave" (incr handled)];
  if n = 0 then 0 else 1 + descend (n - 1)

(* With OCaml 5, all threads overflow their stacks at once. An OCaml 4 program crashes if a
   thread overflows while others run: there, only the main thread does, after they have ended. *)
let all_overflow = Sys.ocaml_version >= "5"

let thread counts index =
  if all_overflow then counts.(index) <- caught ()
  else
    for _ = 1 to 20 do
      ignore (descend 50_000)
    done

let overflow threads =
  let counts = Array.make (threads + 1) 0 in
  let others = List.init threads (fun index -> Thread.create (thread counts) (index + 1)) in
  if all_overflow then counts.(0) <- caught ();
  List.iter Thread.join others;
  if not all_overflow then counts.(0) <- caught ();
  let others = Array.fold_left ( + ) 0 counts - counts.(0) in
  let expected = if all_overflow then threads * counts.(0) else 0 in
  Printf.printf "overflow caught=%d others=%s\n%!" counts.(0)
    (if others = expected then "same" else string_of_int others)

let () =
  (* In words, so 2 MiB: OCaml 5 has its stacks on the heap, and would let them grow to 1 GiB. *)
  Gc.set { (Gc.get ()) with stack_limit = 1 lsl 18 };
  Rounds.ready ();
  Rounds.commands (fun command ->
      match String.split_on_char ' ' command with
      | [ "overflow"; threads ] -> overflow (int_of_string threads)
      | _ -> Rounds.unknown command)
