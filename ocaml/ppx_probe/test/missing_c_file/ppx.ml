(* The rewriter on its own, as the compiler's -ppx option wants it. *)

let () = Ppxlib.Driver.standalone ()
