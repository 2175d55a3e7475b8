(** How a test drives a program without sleeping: it writes a line, the program
    does one round and answers with a line. *)

(** Prints [ready pid=N]. *)
val ready : unit -> unit

(** Calls the function with each line of the standard input; flushes after
    each; returns at the end of the input. *)
val commands : (string -> unit) -> unit

(** Answers a line that is not a command. *)
val unknown : string -> unit

(** [serve round] prints the ready line, then calls [round n] for the n-th line
    [run], counted from 1, until the input ends. *)
val serve : (int -> unit) -> unit
