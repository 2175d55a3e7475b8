(* This file is a module of both libraries. *)

let hit () =
  [%probe "copied" ~enabled_at_init:true (print_endline "copied")]
