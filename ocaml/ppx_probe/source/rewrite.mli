(** Finds, checks and expands the probes of one file after another.

    The rewriter needs the expansion of one file; the stub generator needs the
    list of uses and the errors of all files of a stanza. *)

open Ppxlib

type error =
  { loc : Location.t
  ; message : string
  }

(** The uses found so far. All sites of one name must have the same initial state,
    across all files that are expanded with the same [t]. *)
type t

val create : unit -> t

(** The expanded file; every malformed use is an error node. *)
val structure : t -> structure -> structure

(** In the order of the sources, and without the malformed ones. *)
val uses : t -> Use.t list

val errors : t -> error list
