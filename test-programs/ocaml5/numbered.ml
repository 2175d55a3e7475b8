(* A program without probes. Threads of several domains wait, each for a pipe of its own, and it says which thread of which
   domain waits for which. *)

(* Domains 1 to [domains], with so many threads besides the first one. *)
let domains = 3
let threads = 2
let lock = Mutex.create ()
let added = Condition.create ()
let waiting : (string * int * int) list ref = ref []
let number : Unix.file_descr -> int = Obj.magic

let wait what =
  let mine = fst (Unix.pipe ~cloexec:true ()) in
  Mutex.protect lock (fun () ->
      waiting := (what, Domain.self_index (), number mine) :: !waiting;
      Condition.signal added);
  ignore (Unix.read mine (Bytes.create 1) 0 1)

let with_threads count what =
  for _ = 1 to count do
    ignore (Thread.create wait "systhread")
  done;
  wait what

let start () =
  (* Its number is given to the next one, its identity is not. *)
  Domain.join (Domain.spawn ignore);
  ignore (Thread.create wait "systhread");
  for _ = 1 to domains do
    ignore (Domain.spawn (fun () -> with_threads threads "domain"))
  done;
  Mutex.protect lock (fun () ->
      while List.length !waiting < 1 + (domains * (1 + threads)) do
        Condition.wait added lock
      done);
  List.iter
    (fun (what, index, descriptor) -> Printf.printf "%s %d %d\n" what index descriptor)
    (List.sort compare !waiting);
  print_endline "numbered"

let () =
  Rounds.ready ();
  Rounds.commands (function
    | "start" -> start ()
    | command -> Rounds.unknown command);
  (* The others never end. *)
  Unix._exit 0
