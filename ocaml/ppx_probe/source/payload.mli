(** What stands inside [[%probe ...]] and [[%probe_is_enabled ...]], checked.

    An error is a location and a message; [~loc] is that of the extension. *)

open Ppxlib

type probe =
  { name : string
  ; enabled_at_init : bool
  ; arguments : expression list  (** identifiers, at most six *)
  ; handler : expression
  }

(** Whether this is [[@probe.args]], which has no meaning but where [probe]
    looks for it: on the whole payload or on the handler. *)
val is_args : attribute -> bool

(** What is wrong with one elsewhere. *)
val misplaced : attribute -> Location.t * string

val probe : loc:Location.t -> payload -> (probe, Location.t * string) result

(** The name that is tested. *)
val test : loc:Location.t -> payload -> (string, Location.t * string) result
