(* The first of two libraries that both have a probe named "shared". *)

let shared = ref 0

let only = ref 0

let inlined = ref 0

let[@inline always] bump n =
  [%probe "inlined" (incr inlined)];
  n + 1

let run () =
  [%probe "shared" (incr shared)];
  [%probe "left_only" (incr only)]
