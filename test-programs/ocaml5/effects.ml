(* Probe handlers that perform effects, which are handled around the site or in
   the probe handler itself, and sites in effect handlers. As in [handlers], the
   probes must not change the work: it is the same in every round, whichever
   probes are enabled. *)

open Effect
open Effect.Deep

type _ Effect.t +=
  | Ask : int -> int Effect.t
  | Give_up : unit Effect.t
  | Park : int -> unit Effect.t

exception Given_up

let names =
  [ "asks"
  ; "inner"
  ; "in_branch"
  ; "gives_up"
  ; "later"
  ; "deep"
  ; "collects"
  ; "finaliser"
  ]

let counts : (string, int) Hashtbl.t = Hashtbl.create 16

let count name =
  Hashtbl.replace counts name
    (1 + Option.value (Hashtbl.find_opt counts name) ~default:0)

type parked = (unit, unit) continuation Queue.t

let resumed = Atomic.make 0

(* Handles the effects [Ask] and [Give_up]. *)
let handled f =
  match_with f ()
    { retc = Fun.id
    ; exnc = raise
    ; effc =
        (fun (type a) (performed : a Effect.t) ->
          match performed with
          | Ask n ->
            Some
              (fun (k : (a, _) continuation) ->
                [%probe "in_branch" (if n > 0 then count "in_branch")];
                continue k (n + 1))
          | Give_up -> Some (fun (k : (a, _) continuation) -> discontinue k Given_up)
          | _ -> None)
    }

let parking (parked : parked) f =
  match_with f ()
    { retc = Fun.id
    ; exnc = raise
    ; effc =
        (fun (type a) (performed : a Effect.t) ->
          match performed with
          | Park _ -> Some (fun (k : (a, _) continuation) -> Queue.add k parked)
          | _ -> None)
    }

let asking n =
  let alive = string_of_int n in
  [%probe "asks" (if perform (Ask n) = n + 1 then count "asks")];
  String.length alive + perform (Ask n)

let inner n =
  [%probe "inner" (if handled (fun () -> perform (Ask n)) = n + 1 then count "inner")];
  n

let giving_up n =
  match
    [%probe "gives_up"
      (count "gives_up";
       perform Give_up)]
  with
  | () -> n
  | exception Given_up -> n

(* The runtime moves the stack of a fiber when it grows. *)
let growing n =
  let rec depth n = if n = 0 then 0 else 1 + depth (n - 1) in
  let alive = [ n; n ] in
  [%probe "deep" (if depth (Sys.opaque_identity 200_000) = 200_000 then count "deep")];
  List.fold_left ( + ) 0 alive

let collecting n =
  let alive = List.init n string_of_int in
  [%probe "collects"
    (Gc.full_major ();
     Gc.compact ();
     count "collects")];
  String.length (String.concat "" alive)

(* The runtime calls the finaliser from C, and effects cannot be performed through a
   frame of C; an effect that is handled in the probe handler itself works. *)
let finalising n =
  let finalised = ref 0 in
  let finaliser _ =
    incr finalised;
    [%probe "finaliser"
      (if handled (fun () -> perform (Ask n)) = n + 1 then
        match perform (Ask n) with
        | _ -> ()
        | exception Unhandled _ -> count "finaliser")]
  in
  handled (fun () -> Gc.finalise finaliser (Sys.opaque_identity (ref n)));
  Gc.full_major ();
  !finalised

(* The handler is suspended in the middle until it is resumed. *)
let later n =
  let alive = string_of_int n in
  [%probe "later"
    (let seen = List.init n Fun.id in
     perform (Park n);
     if List.length seen = n then (
       count "later";
       Atomic.incr resumed))];
  if String.length alive = 0 then print_endline "broken"

let resume parked =
  while not (Queue.is_empty parked) do
    continue (Queue.pop parked) ()
  done

let round n =
  Hashtbl.reset counts;
  let work =
    handled (fun () ->
        asking 1 + inner 2 + giving_up 3 + growing 4 + collecting 100)
    + finalising 5
  in
  let parked = Queue.create () in
  parking parked (fun () -> later 7);
  resume parked;
  Printf.printf "round %d work=%d" n work;
  List.iter
    (fun name ->
      Printf.printf " %s=%d" name
        (Option.value (Hashtbl.find_opt counts name) ~default:0))
    names;
  print_newline ()

let () =
  let rounds = ref 0 and parked = Queue.create () in
  Rounds.ready ();
  Rounds.commands (function
    | "run" ->
      incr rounds;
      round !rounds
    | "park" ->
      parking parked (fun () -> later 7);
      Printf.printf "parked %d\n" (Queue.length parked)
    | "resume" ->
      (* In another domain than that where it was parked. *)
      Atomic.set resumed 0;
      Domain.join (Domain.spawn (fun () -> resume parked));
      Printf.printf "resumed %d\n" (Atomic.get resumed)
    | command -> Rounds.unknown command)
