(* Writes runtime events: those of the collector in several domains, and its own.
   Prints what the consumer of its own compiler reads of them. *)

module Events = Runtime_events

type Events.User.tag += Unit | Int | Span | Text

let unit = Events.User.register "events.unit" Unit Events.Type.unit
let int = Events.User.register "events.int" Int Events.Type.int
let span = Events.User.register "events.span" Span Events.Type.span

let text_type =
  Events.Type.register
    ~encode:(fun buffer text ->
      Bytes.blit_string text 0 buffer 0 (String.length text);
      String.length text)
    ~decode:(fun buffer len -> Bytes.sub_string buffer 0 len)

let text = Events.User.register "events.text" Text text_type

(* Allocates, some of it for long, and writes one event of each kind. *)
let round number =
  Events.User.write unit ();
  Events.User.write span Begin;
  Events.User.write int (if number mod 2 = 0 then number else -number);
  let kept = Sys.opaque_identity (List.init 3_000 string_of_int) in
  if number mod 5 = 0 then Gc.minor ();
  Events.User.write text (String.make (number mod 20) 'x');
  ignore (Sys.opaque_identity (List.length kept));
  Events.User.write span End

let work domains rounds =
  (* The rings of those that have ended are used again. *)
  for _ = 1 to 2 do
    let spawn _ = Domain.spawn (fun () -> for i = 1 to rounds do round i done) in
    let spawned = List.init domains spawn in
    List.iter Domain.join spawned;
    (* With others, domains would write events without end while they wait. *)
    Gc.full_major ()
  done

let print_all () =
  let print ring time what =
    Printf.printf "event %d %Ld %s\n" ring (Events.Timestamp.to_int64 time) what
  in
  let user show ring time event value =
    let name = Events.User.name event in
    print ring time (Printf.sprintf "user %s %s" name (show value))
  in
  let edge = function Events.Type.Begin -> "begin" | End -> "end" in
  let callbacks =
    Events.Callbacks.create
      ~runtime_begin:(fun ring time phase ->
        print ring time ("begin " ^ Events.runtime_phase_name phase))
      ~runtime_end:(fun ring time phase ->
        print ring time ("end " ^ Events.runtime_phase_name phase))
      ~runtime_counter:(fun ring time counter value ->
        let name = Events.runtime_counter_name counter in
        print ring time (Printf.sprintf "counter %s %d" name value))
      ~lifecycle:(fun ring time event _ ->
        print ring time ("lifecycle " ^ Events.lifecycle_name event))
      ~lost_events:(fun ring words -> Printf.printf "lost %d %d\n" ring words)
      ()
    |> Events.Callbacks.add_user_event Events.Type.unit (user (fun () -> "unit"))
    |> Events.Callbacks.add_user_event Events.Type.int (user string_of_int)
    |> Events.Callbacks.add_user_event Events.Type.span (user edge)
    |> Events.Callbacks.add_user_event text_type (user (Printf.sprintf "%S"))
  in
  let cursor = Events.create_cursor None in
  while Events.read_poll cursor callbacks None > 0 do
    ()
  done;
  Events.free_cursor cursor;
  print_endline "events end"

(* The pipes to and from the child. *)
let child = ref None

(* A child that does a round when it is told to, and exits with its parent. *)
let fork () =
  let told, tell = Unix.pipe () in
  let finished, finish = Unix.pipe () in
  let byte = Bytes.create 1 in
  flush stdout;
  match Unix.fork () with
  | 0 ->
    Unix.close tell;
    while Unix.read told byte 0 1 = 1 do
      round 5;
      ignore (Unix.write finish byte 0 1)
    done;
    Unix._exit 0
  | pid ->
    Unix.close told;
    child := Some (tell, finished);
    Printf.printf "forked %d\n" pid

let tell_child () =
  let tell, finished = Option.get !child in
  let byte = Bytes.make 1 '.' in
  ignore (Unix.write tell byte 0 1);
  ignore (Unix.read finished byte 0 1);
  print_endline "told"

let () =
  Rounds.ready ();
  Rounds.commands (fun command ->
      match String.split_on_char ' ' command with
      | [ "start" ] ->
        Events.start ();
        print_endline "started"
      | [ "work"; domains; rounds ] ->
        work (int_of_string domains) (int_of_string rounds);
        print_endline "worked"
      | [ "chdir"; directory ] ->
        Sys.chdir directory;
        print_endline "changed"
      | [ "pause" ] ->
        Events.pause ();
        print_endline "paused"
      | [ "resume" ] ->
        Events.resume ();
        print_endline "resumed"
      | [ "fork" ] -> fork ()
      | [ "tell" ] -> tell_child ()
      | [ "print" ] ->
        (* What reading allocates would be read, too. *)
        Events.pause ();
        print_all ()
      | _ -> Rounds.unknown command)
