(** One use of a probe in a source file, and the C symbols that stand for it.

    The rewriter calls a symbol, the stub generator defines it: they run on
    their own and agree because both compute it here, from nothing but the
    source. *)

open Ppxlib

type kind =
  | Site of
      { enabled_at_init : bool
      ; arguments : int  (** how many values are passed *)
      }  (** [[%probe]] *)
  | Test  (** [[%probe_is_enabled]] *)

type t =
  { kind : kind
  ; name : string
  ; loc : Location.t
  ; enclosing : string option
        (** the outermost named binding or method around the use *)
  }

(** The C function of this use.

    A site's is made of the unit, the enclosing function and a digest of the
    file's base name, line, column, probe name, initial state and number of
    arguments. Two sites with one symbol are therefore interchangeable (copies of one file in two
    libraries), and the weak definitions merge. A test's depends on the name
    of the probe alone. *)
val symbol : t -> string

(** Where a C function finds its arguments, in order: as many as a site may
    have. *)
val argument_registers : string list

(** The primitive that stands for every use in bytecode: always false. *)
val bytecode_primitive : string
