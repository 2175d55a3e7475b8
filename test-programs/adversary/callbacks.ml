(* OCaml called from C: by threads that C has created and registered, and by a qsort that the
   C code leaves by longjmp when OCaml raises; exceptions that pass through frames of C. *)

exception Refused of int

external in_threads : int -> int -> int = "adversary_in_threads"

external sort : int -> int = "adversary_sort"

external through : (int -> int) -> int -> int = "adversary_through"

let text n = "c" ^ string_of_int n

(* Called by C threads with n: doubles it, or raises if it is a multiple of 5. *)
let visit n =
  let alive = text n in
  [%probe "visits"
    (Verdict.check (alive = text n) "a text in a handler";
     if n mod 10 = 0 then raise (Refused n))
    [@probe.args n, alive]];
  if n mod 5 = 0 then raise (Refused n);
  Verdict.check (String.equal alive (text n)) "a text after its probe";
  2 * n

(* The C code leaves qsort by longjmp when this raises. *)
let compared = ref 0

let compare_in_c a b =
  incr compared;
  let n = !compared in
  let alive = text n in
  [%probe "compares" (Gc.minor ()) [@probe.args n, alive]];
  if n mod 50 = 0 then raise (Refused n);
  Verdict.check (String.equal alive (text n)) "a text after its probe";
  compare (a : int) b

let rec nested depth n =
  if depth = 0 then raise (Refused n)
  else
    through
      (fun n ->
        let alive = text n in
        let r = nested (depth - 1) n in
        [%probe "nested" (Verdict.check (alive <> "") "a text on the stack") [@probe.args n, alive]];
        r)
      n

let round n =
  Verdict.check (in_threads 3 50 = 0) "C threads call OCaml";
  for _ = 1 to 5 do
    let sorted = sort 40 in
    Verdict.check (sorted = 0 || sorted = 1) "a sort is sorted or left"
  done;
  match nested 10 n with
  | _ -> Verdict.check false "an exception passes C"
  | exception Refused m -> Verdict.check (m = n) "the number of an exception"

let () =
  ignore (Thread.self ());
  Callback.register "adversary visit" visit;
  Callback.register "adversary compare" compare_in_c;
  Verdict.run round
