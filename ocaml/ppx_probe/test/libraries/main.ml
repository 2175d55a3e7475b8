(* Two libraries in one executable, which has probes of its own. *)

let () =
  First_library.Shared.hit ();
  Second_library.Shared.hit ();
  [%probe "shared" ~enabled_at_init:true (print_endline "main")];
  First_library.Copy.hit ();
  Second_library.Copy.hit ();
  First_library.Inlined.hit "main";
  Printf.printf "shared=%b %b\n"
    [%probe_is_enabled "shared"]
    (Second_library.Shared.enabled ())
