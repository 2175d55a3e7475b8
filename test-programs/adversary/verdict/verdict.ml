let failures = Atomic.make 0

let check holds what =
  if not holds then (
    let failure = 1 + Atomic.fetch_and_add failures 1 in
    if failure <= 20 then Printf.eprintf "does not hold: %s\n%!" what)

let is_good () = Atomic.get failures = 0

let rec retried f x =
  match f x with
  | y -> y
  | exception Unix.Unix_error (Unix.EINTR, _, _) -> retried f x

let input_has_ended () =
  let byte = Bytes.create 1 in
  match retried (fun () -> Unix.select [ Unix.stdin ] [] [] 0.) () with
  | [], _, _ -> false
  | _ -> retried (fun () -> Unix.read Unix.stdin byte 0 1) () = 0

let run round =
  Printf.printf "ready pid=%d\n%!" (Unix.getpid ());
  let rec rounds n =
    (match round n with
    | () -> ()
    | exception other -> check false ("no exception: " ^ Printexc.to_string other));
    if input_has_ended () then n else rounds (n + 1)
  in
  let rounds = rounds 1 in
  match Atomic.get failures with
  | 0 -> Printf.printf "verdict good rounds=%d\n%!" rounds
  | failures ->
    Printf.printf "verdict bad checks=%d rounds=%d\n%!" failures rounds;
    exit 1
