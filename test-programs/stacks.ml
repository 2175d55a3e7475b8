(* A program without probes. Its threads wait, each below other kinds of frames: of OCaml, of C, of exception handlers,
   finalisers and signal handlers. The name of the function says which. *)

external call_back : (int -> int) -> int -> int = "stacks_call_back"

external wait_in_alloca : Unix.file_descr -> int -> int = "stacks_wait_in_alloca"

external wait_noalloc : (int[@untagged]) -> (int[@untagged])
  = "stacks_no_bytecode" "stacks_wait_noalloc"
  [@@noalloc]

external many :
  (int -> int) -> int -> int -> int -> int -> int -> int -> int -> int -> int
  = "stacks_no_bytecode" "stacks_many"

type waiting

external waiting_value : unit -> waiting = "stacks_waiting_value"

let never = fst (Unix.pipe ~cloexec:true ())
let sink = ref 0

(* How many threads wait, or are about to, and do nothing before that lets another thread run. *)
let waiting = ref 0

let[@inline never] wait n =
  let byte = Bytes.create 1 in
  incr waiting;
  Unix.read never byte 0 1 + n

let[@inline never] rec deep n f =
  if n = 0 then f 1 + 1 else 1 + (try deep (n - 1) f with Exit -> n)

let[@inline never] plain n = deep 3 wait + n
let[@inline never] callback n = call_back (fun n -> deep 2 wait + n) n + 1

let[@inline never] in_alloca n =
  incr waiting;
  wait_in_alloca never n + 1

let[@inline never] arguments n = many wait n 2 3 4 5 6 7 8 + 1

let[@inline never] raised n =
  try
    ignore (Sys.opaque_identity (deep 2 (fun _ -> raise Not_found)));
    n
  with Not_found -> ( try deep 2 wait with Exit -> n)

let[@inline never] library n =
  let table = Hashtbl.create 1 in
  Hashtbl.replace table n n;
  List.length
    (List.sort
       (fun a b ->
         Hashtbl.iter (fun _ n -> Array.iter (fun n -> sink := wait n) [| n |]) table;
         compare a b)
       [ 2; 1 ])

let[@inline never] finaliser n =
  let finalised = ref (Bytes.create 100) in
  Gc.finalise_last (fun () -> sink := wait n) finalised;
  sink := Bytes.length !finalised;
  while true do
    Gc.full_major ()
  done;
  n

let ways = [ plain; callback; in_alloca; arguments; raised; library; finaliser ]

let[@inline never] callback_noalloc n = call_back (fun n -> deep 2 wait_noalloc + n) n + 1

(* The last to wait, as it keeps the lock of the runtime; until the input ends. *)
let[@inline never] in_signal n =
  let has_waited = ref false in
  let handle _ =
    sink := callback_noalloc n;
    has_waited := true
  in
  Sys.set_signal Sys.sigusr1 (Sys.Signal_handle handle);
  Unix.kill (Unix.getpid ()) Sys.sigusr1;
  while not !has_waited do
    sink := List.length (Sys.opaque_identity (List.init 3 Fun.id))
  done

(* Waits in a signal handler that an allocation within `try` has called; until the input ends. *)
let[@inline never] in_allocation n =
  try
    while Sys.opaque_identity n > 0 do
      sink := snd (Sys.opaque_identity (n, n))
    done
  with Exit -> sink := n

let[@inline never] allocate n =
  Sys.set_signal Sys.sigalrm (Sys.Signal_handle (fun _ -> sink := deep 2 wait));
  ignore (Unix.setitimer Unix.ITIMER_REAL { Unix.it_interval = 0.; it_value = 0.01 });
  in_allocation n;
  !sink

let () =
  Rounds.ready ();
  Rounds.commands (function
    | "wait" ->
      List.iter (fun way -> ignore (Thread.create (fun n -> sink := way n) 1)) ways;
      while !waiting < List.length ways do
        Thread.delay 0.001
      done;
      print_endline "waits";
      in_signal 1
    | "pause" ->
      ignore (Sys.opaque_identity (waiting_value ()));
      print_endline "pauses";
      Gc.minor ();
      print_endline "paused"
    | "allocate" ->
      print_endline "allocates";
      sink := deep 2 allocate
    | "collect" ->
      print_endline "collects";
      while true do
        Gc.full_major ()
      done
    | line -> Rounds.unknown line)
