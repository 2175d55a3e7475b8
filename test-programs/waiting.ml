(* Threads that wait, each in one blocking call, to check whether a tool that stops
   and patches the program makes any of them return. *)

type waiter =
  { name : string
  ; limit : float  (* in seconds; infinite if the call has none *)
  ; wait : unit -> unit
  ; mutable interrupted : int  (* failed with EINTR *)
  ; mutable early : int  (* returned early *)
  ; mutable over : int  (* timed out *)
  }

let long = 1000.

let short = 0.02

let waiter name limit wait =
  { name; limit; wait; interrupted = 0; early = 0; over = 0 }

let rec again w =
  let begun = Unix.gettimeofday () in
  (match w.wait () with
  | () when Unix.gettimeofday () -. begun < w.limit -> w.early <- w.early + 1
  | () -> w.over <- w.over + 1
  | exception Unix.Unix_error (Unix.EINTR, _, _) ->
    w.interrupted <- w.interrupted + 1);
  [%probe "returned" (ignore w)];
  again w

let never = fst (Unix.pipe ~cloexec:true ())

let socket () = fst (Unix.socketpair ~cloexec:true PF_UNIX SOCK_STREAM 0)

let limited_socket () =
  let socket = socket () in
  Unix.setsockopt_float socket SO_RCVTIMEO long;
  socket

let listener () =
  let socket = Unix.socket ~cloexec:true PF_UNIX SOCK_STREAM 0 in
  (* unix(7): the kernel finds a name *)
  Unix.bind socket (ADDR_UNIX "");
  Unix.listen socket 1;
  socket

let select limit () = ignore (Unix.select [ never ] [] [] limit)

(* Exits at the end of its input, when this program has exited. *)
let child () =
  let reader, _writer = Unix.pipe ~cloexec:true () in
  Unix.create_process "/bin/cat" [| "cat" |] reader Unix.stdin Unix.stderr

let waiters =
  let byte = Bytes.create 1 in
  let socket = socket () and limited = limited_socket () in
  let listener = listener () in
  let pipe = fst (Unix.pipe ~cloexec:true ()) in
  let channel = Unix.in_channel_of_descr (fst (Unix.pipe ~cloexec:true ())) in
  let mutex = Mutex.create () and condition = Condition.create () in
  let locked = Mutex.create () in
  let events = Event.new_channel () in
  let child = child () in
  Mutex.lock locked;
  let read fd () = ignore (Unix.read fd byte 0 1) in
  let sleep limit () = Unix.sleepf limit in
  let delay limit () = Thread.delay limit in
  [ waiter "read" infinity (read pipe)
  ; waiter "input_char" infinity (fun () -> ignore (input_char channel))
  ; waiter "recv" infinity (fun () -> ignore (Unix.recv socket byte 0 1 []))
  ; waiter "recv_limited" long (fun () ->
        ignore (Unix.recv limited byte 0 1 []))
  ; waiter "accept" infinity (fun () -> ignore (Unix.accept listener))
  ; waiter "select_for_ever" infinity (select (-1.))
  ; waiter "select" long (select long)
  ; waiter "select_short" short (select short)
  ; waiter "sleepf" long (sleep long)
  ; waiter "sleepf_short" short (sleep short)
  ; waiter "delay" long (delay long)
  ; waiter "delay_short" short (delay short)
  ; waiter "condition" infinity (fun () ->
        Mutex.lock mutex;
        Condition.wait condition mutex;
        Mutex.unlock mutex)
  ; waiter "mutex" infinity (fun () -> Mutex.lock locked)
  ; waiter "event" infinity (fun () -> Event.sync (Event.receive events))
  ; waiter "waitpid" infinity (fun () -> ignore (Unix.waitpid [] child))
  ; waiter "sigwait" infinity (fun () -> ignore (Thread.wait_signal [ Sys.sigusr2 ]))
  ]

let report () =
  print_string "report";
  List.iter
    (fun { name; interrupted; early; over; _ } ->
      Printf.printf " %s=%d/%d/%d" name interrupted early over)
    waiters;
  print_newline ()

let () =
  ignore (Thread.sigmask SIG_BLOCK [ Sys.sigusr2 ]);
  List.iter (fun w -> ignore (Thread.create again w)) waiters;
  Rounds.ready ();
  Rounds.commands (function
    | "report" -> report ()
    | command -> Rounds.unknown command);
  exit 0
