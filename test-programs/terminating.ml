(* Does a little work and exits. Its output depends only on the enabled
   probes. *)

let fooia = ref 0

let foobar = ref 0

let collatz = ref 0

let rec fold f acc n = if n = 0 then acc else fold f (f acc n) (n - 1)

let foo i acc =
  [%probe "fooia"
    (incr fooia;
     Printf.printf "handler fooia %d\n" i)];
  if i mod 2 = 0 then
    [%probe "foobar"
      (incr foobar;
       Printf.printf "handler foobar %d %d\n" i acc)];
  acc + (i * i)

let rec collatz_length n length =
  [%probe "collatz" (incr collatz)];
  if n = 1 then length
  else
    collatz_length (if n mod 2 = 0 then n / 2 else (3 * n) + 1) (length + 1)

let () =
  Printf.printf "squares %d\n" (fold (fun acc i -> foo i acc) 0 5);
  Printf.printf "collatz %d\n" (collatz_length 27 0);
  if [%probe_is_enabled "fooia"] then print_endline "fooia is enabled";
  Printf.printf "handlers fooia=%d foobar=%d collatz=%d\n" !fooia !foobar
    !collatz;
  [%probe "finished" (print_endline "handler finished")]
