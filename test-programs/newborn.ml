(* Four chains of system threads: each thread starts the next one of its chain and exits,
   so a tool always encounters some that are just being created or exiting.

     run      answers `hits born=N second=N`, the hits so far
     report   answers `report A B C D`: threads that each chain has had so far *)

let chains = Array.make 4 0

let born = ref 0

let second = ref 0

let rec live chain =
  chains.(chain) <- chains.(chain) + 1;
  [%probe "born" (incr born)];
  if chains.(chain) land 1 = 0 then [%probe "second" (second := !second + List.length [ chain ])];
  Thread.delay 0.0002;
  ignore (Thread.create live chain)

let () =
  Array.iteri (fun chain _ -> ignore (Thread.create live chain)) chains;
  Rounds.ready ();
  Rounds.commands (function
    | "run" -> Printf.printf "hits born=%d second=%d\n" !born !second
    | "report" ->
      print_string "report";
      Array.iter (Printf.printf " %d") chains;
      print_newline ()
    | command -> Rounds.unknown command)
