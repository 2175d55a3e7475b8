(* Has no probes itself: plain bytecode, which loads the libraries' stubs. *)

let () =
  First_library.Shared.hit ();
  Second_library.Shared.hit ();
  Printf.printf "shared=%b\n" (Second_library.Shared.enabled ())
