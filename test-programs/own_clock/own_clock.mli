(** The clock by which programs measure what they do. *)

(** Seconds of CLOCK_MONOTONIC. The time of day may be set meanwhile, as that of a virtual machine that was paused. *)
val now : unit -> float
