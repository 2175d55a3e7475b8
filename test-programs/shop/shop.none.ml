(* Where there is no cohttp. *)

let () =
  prerr_endline "shop: built without cohttp: install libcohttp-lwt-unix-ocaml-dev, and build it again";
  exit 1
