(* One name, two values, in two files. *)

let f x = [%probe "twice" ~enabled_at_init:false (g x)]
