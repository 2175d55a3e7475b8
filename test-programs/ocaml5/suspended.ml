(* A program without probes. Its threads and domains wait in fibers, below C code, handlers of effects, and fibers that were
   suspended. The name of the function says where. *)

open Effect
open Effect.Deep

type _ Effect.t +=
  | Ask : int -> int Effect.t
  | Pass : int Effect.t
  | Yield : unit Effect.t

external call_back : (int -> int) -> int -> int = "stacks_call_back"

external wait_in_alloca : Unix.file_descr -> int -> int = "stacks_wait_in_alloca"

external many :
  (int -> int) -> int -> int -> int -> int -> int -> int -> int -> int -> int
  = "stacks_no_bytecode" "stacks_many"

let never = fst (Unix.pipe ~cloexec:true ())
let sink = Atomic.make 0
let[@inline never] wait n = Unix.read never (Bytes.create 1) 0 1 + n
let[@inline never] rec deep n f = if n = 0 then f 1 + 1 else 1 + deep (n - 1) f

(* Runs [f] in a fiber of its own; [answer] computes the answers to [Ask]. *)
let[@inline never] fiber ?(answer = succ) f n =
  match_with
    (fun n -> deep 2 f + n)
    n
    { retc = succ
    ; exnc = raise
    ; effc =
        (fun (type a) (performed : a Effect.t) ->
          match performed with
          | Ask k ->
            Some
              (fun (c : (a, _) continuation) ->
                let answered = answer k in
                continue c answered)
          | _ -> None)
    }

let[@inline never] plain n = fiber wait n + 1
let[@inline never] nested n = fiber (fiber (fiber wait)) n + 1
let[@inline never] called_back n = fiber (fun n -> call_back (fiber wait) n + 1) n + 1
let[@inline never] in_alloca n = fiber (fun n -> call_back (fiber (wait_in_alloca never)) n + 1) n + 1
let[@inline never] arguments n = fiber (fun n -> many (fiber wait) n 2 3 4 5 6 7 8 + 1) n + 1

(* In the handler of an effect, which runs on the stack of the parent. *)
let[@inline never] in_handler n = fiber ~answer:wait (fun n -> perform (Ask n) + 1) n + 1

(* In a fiber that was suspended, and goes on below other frames. *)
let[@inline never] resumed n =
  let suspended = ref None in
  match_with
    (fun () ->
      perform Yield;
      Atomic.set sink (deep 2 wait))
    ()
    { retc = Fun.id
    ; exnc = raise
    ; effc =
        (fun (type a) (performed : a Effect.t) ->
          match performed with
          | Yield ->
            Some
              (fun (c : (a, unit) continuation) -> suspended := Some (fun () -> continue c ()))
          | _ -> None)
    };
  deep 3 (fun n -> Option.get !suspended (); n) + n

(* The inner handler does not know the effect, and passes it on. *)
let[@inline never] passed_on n =
  match_with
    (fun n -> fiber (fun n -> perform Pass + n) n)
    n
    { retc = succ
    ; exnc = raise
    ; effc =
        (fun (type a) (performed : a Effect.t) ->
          match performed with
          | Pass ->
            Some
              (fun (c : (a, _) continuation) ->
                let answered = wait 1 in
                continue c answered)
          | _ -> None)
    }
  + 1

(* The runtime has moved the stack. *)
let[@inline never] grown n = fiber (fun n -> deep 400 (fiber wait) + n) n + 1

let ways =
  [ plain; nested; called_back; in_alloca; arguments; in_handler; resumed; passed_on; grown ]

let () =
  let start way = ignore (Thread.create (fun n -> Atomic.set sink (way n)) 1) in
  Rounds.ready ();
  Rounds.commands (function
    | "wait" ->
      List.iter start ways;
      for _ = 1 to 2 do
        ignore
          (Domain.spawn (fun () ->
               start called_back;
               Atomic.set sink (nested 1)))
      done;
      print_endline "waits";
      ignore (plain 1)
    | line -> Rounds.unknown line)
