(** One use of a probe in a source file, and its C symbols.

    The rewriter calls a symbol, the stub generator defines it: they run
    separately and agree because both compute it here, from the source
    alone. *)

open Ppxlib

type kind =
  | Site of
      { enabled_at_init : bool
      ; arguments : string list  (** the names of the values that are passed *)
      }  (** [[%probe]] *)
  | Is_enabled  (** [[%probe_is_enabled]] *)

type t =
  { kind : kind
  ; name : string
  ; loc : Location.t
  ; enclosing : string option
        (** the outermost named binding or method around the use *)
  }

(** The C function of this use.

    A site's symbol consists of the unit, the enclosing function and a digest of
    the file's base name, line, column, probe name, initial state and number of
    arguments. Two sites with the same symbol are therefore interchangeable
    (copies of one file in two libraries), and the weak definitions merge. A
    test's symbol depends only on the name of the probe. *)
val symbol : t -> string

(** The argument registers of a C function, in order; a site passes at most that
    many values. *)
val argument_registers : string list

(** The name of the primitive that every use calls in bytecode. It always
    returns false. *)
val bytecode_primitive : string

(** A function of the C file for the source file of this use, which each unit with probes calls: its name says what is
    missing if the linker does not find it. *)
val c_file_symbol : t -> string
