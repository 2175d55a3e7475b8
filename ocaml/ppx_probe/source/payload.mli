(** Parses and checks the payloads of [[%probe ...]] and [[%probe_is_enabled ...]].

    An error is a location and a message; [~loc] is that of the extension. *)

open Ppxlib

type probe =
  { name : string
  ; enabled_at_init : bool
  ; arguments : (string * expression) list
        (** identifiers, each as it is written, at most six *)
  ; handler : expression
  }

(** Whether this is [[@probe.args]], which has a meaning only on the whole payload
    or on the handler, where [probe] reads it. *)
val is_args : attribute -> bool

(** The error for a [[@probe.args]] in any other place. *)
val misplaced : attribute -> Location.t * string

val probe : loc:Location.t -> payload -> (probe, Location.t * string) result

(** Parses the payload of [[%probe_is_enabled ...]]: the name of the probe that is tested. *)
val test : loc:Location.t -> payload -> (string, Location.t * string) result
