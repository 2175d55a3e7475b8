(** The main loop and the output of a program that checks itself. It prints
    [ready pid=N] first, works in rounds until its input ends, and then prints
    [verdict good rounds=N] and exits with 0, or [verdict bad checks=N rounds=N]
    and exits with 1. It prints the checks that failed on standard error. *)

(** [check holds what] reports the check called [what] as failed, unless [holds]. Any
    thread and any domain may call it. *)
val check : bool -> string -> unit

(** Whether all checks have held so far. *)
val is_good : unit -> bool

(** [run round] calls [round n], counted from 1, until the input ends, but at
    least once, prints the verdict and exits. An exception is a check that failed. *)
val run : (int -> unit) -> unit

(** [retried f x] is [f x], tried again if a signal interrupts it. *)
val retried : ('a -> 'b) -> 'a -> 'b
