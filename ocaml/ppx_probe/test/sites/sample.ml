(* Every place where a probe can be. Those that start enabled print; the others
   must not. The output depends only on the order in this file. *)

let operand = 20

let ( +++ ) a b =
  [%probe "operator" ~enabled_at_init:true (Printf.printf "operator %d %d\n" a b)];
  a + b

let silent () = [%probe "silent" (print_endline "never printed")]

let nested n =
  [%probe "outer" ~enabled_at_init:true
    (Printf.printf "outer %d\n" n;
     [%probe "inner" ~enabled_at_init:true (Printf.printf "inner %d\n" n)];
     [%probe "silent" (print_endline "never printed")])]

let rec countdown n =
  if n > 0 then (
    if n mod 2 = 0 then
      [%probe "one_armed" ~enabled_at_init:true (Printf.printf "even %d\n" n)];
    countdown (n - 1))

(* The same name twice on one line. (silent, above, is in two functions.) *)
let again () = [%probe "again" (ignore 1)]; [%probe "again" (ignore 2)]

let tested () = [%probe_is_enabled "operator"], [%probe_is_enabled "nowhere"]

let names'with_quotes () = [%probe "quotes" ()]

let raising () =
  try [%probe "raises" ~enabled_at_init:true (raise Exit)]
  with Exit -> print_endline "raised"

let () =
  ignore (1 +++ 2 : int);
  silent ();
  nested operand;
  countdown 4;
  again ();
  names'with_quotes ();
  raising ();
  let operator, nowhere = tested () in
  Printf.printf "operator=%b nowhere=%b\n" operator nowhere;
  [%probe "toplevel" ~enabled_at_init:true (print_endline "toplevel")];
  Shapes.run ();
  Printf.printf "tokens %d\n" (Lexer.count (Lexing.from_string "a b c"));
  Both.run ()
