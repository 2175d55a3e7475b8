{
(* The line directives of a generated file lead to the file as written. *)
}

rule token = parse
  | ' '  { token lexbuf }
  | ['a'-'z']  { [%probe "token" ~enabled_at_init:true (print_endline "token")]; true }
  | eof  { false }

{
let rec count lexbuf = if token lexbuf then 1 + count lexbuf else 0
}
