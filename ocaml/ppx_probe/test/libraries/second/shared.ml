let hit () =
  [%probe "shared" ~enabled_at_init:true (print_endline "second")];
  First_library.Inlined.hit "second"

let enabled () = [%probe_is_enabled "shared"]
