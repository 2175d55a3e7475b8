(* Probes that are enabled from the start (~enabled_at_init:true), beside ordinary ones. *)

let on = ref 0

let on_twice = ref 0

let off = ref 0

let first () =
  [%probe "starts_on" ~enabled_at_init:true (incr on)];
  [%probe "starts_on_twice" ~enabled_at_init:true (incr on_twice)]

let second () =
  [%probe "starts_on_twice" ~enabled_at_init:true (incr on_twice)];
  [%probe "starts_off" (incr off)]

let round n =
  on := 0;
  on_twice := 0;
  off := 0;
  first ();
  second ();
  Printf.printf "round %d starts_on=%d starts_on_twice=%d starts_off=%d\n" n !on
    !on_twice !off;
  Printf.printf "enabled starts_on=%b starts_on_twice=%b starts_off=%b tested_only=%b\n"
    [%probe_is_enabled "starts_on"]
    [%probe_is_enabled "starts_on_twice"]
    [%probe_is_enabled "starts_off"]
    [%probe_is_enabled "tested_only"]

let () = Rounds.serve round
