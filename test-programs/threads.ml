(* System threads that hit probes as fast as they can. *)

type worker =
  { mutable iterations : int
  ; mutable hits : int
  ; mutable even_hits : int
  }

let stop = ref false

(* Before OCaml 4.14 a loop that does not allocate never releases the master
   lock: hence the allocation of a ref. *)
let work worker =
  while not !stop do
    worker.iterations <- worker.iterations + 1;
    [%probe "worker" (worker.hits <- worker.hits + 1)];
    if worker.iterations land 1 = 0 then
      [%probe "worker_even" (worker.even_hits <- worker.even_hits + 1)];
    ignore (Sys.opaque_identity (ref worker.iterations))
  done

let report workers =
  List.iteri
    (fun i { iterations; hits; even_hits } ->
      Printf.printf "thread %d iterations=%d worker=%d worker_even=%d\n" i
        iterations hits even_hits)
    workers;
  print_endline "report end"

let () =
  let count =
    if Array.length Sys.argv > 1 then int_of_string Sys.argv.(1) else 4
  in
  let workers =
    List.init count (fun _ -> { iterations = 0; hits = 0; even_hits = 0 })
  in
  let threads = List.map (Thread.create work) workers in
  Rounds.ready ();
  let quit () =
    stop := true;
    List.iter Thread.join threads;
    report workers;
    exit 0
  in
  Rounds.commands (function
    | "report" -> report workers
    | "quit" -> quit ()
    | command -> Rounds.unknown command);
  quit ()
