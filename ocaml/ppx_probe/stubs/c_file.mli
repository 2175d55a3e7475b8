(** The C file that holds the sites, the notes and the semaphores. *)

val print : out_channel -> Ppx_probe_source.Use.t list -> unit
