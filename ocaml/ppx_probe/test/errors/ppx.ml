(* The rewriter as a program for the compiler's -ppx option. *)

let () = Ppxlib.Driver.standalone ()
