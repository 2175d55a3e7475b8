(** Finds, checks and expands the probes of one file after another.

    The rewriter uses the expansion of one file, the stub generator the uses
    and the errors of all files of a stanza. *)

open Ppxlib

type error =
  { loc : Location.t
  ; message : string
  }

(** The uses found so far. Names are checked across all files given to one
    value. *)
type t

val create : unit -> t

(** The expanded file; every malformed use is an error node. *)
val structure : t -> structure -> structure

(** In the order of the sources, and without the malformed ones. *)
val uses : t -> Use.t list

val errors : t -> error list
