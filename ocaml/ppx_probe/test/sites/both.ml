(* Another rewriter copies a probe: both copies are one site. *)

let run () =
  [%twice [%probe "copied" ~enabled_at_init:true (print_endline "copied")]]
