let caller () = Unit.hit "main"

let () = Printf.printf "%b\n" (caller ())
