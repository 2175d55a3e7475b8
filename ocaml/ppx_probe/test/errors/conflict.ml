(* One probe name with two values of [enabled_at_init], in two files. *)

let f x = [%probe "twice" ~enabled_at_init:false (g x)]
