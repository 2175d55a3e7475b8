(* The second library; it inlines a probe of the first. *)

let shared = ref 0

let only = ref 0

let run () =
  [%probe "shared" (incr shared)];
  if Left.bump 1 = 2 then [%probe "right_only" (incr only)]
