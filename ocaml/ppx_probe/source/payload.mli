(** What stands inside [[%probe ...]] and [[%probe_is_enabled ...]], checked.

    An error is a location and a message; [~loc] is that of the extension. *)

open Ppxlib

type probe =
  { name : string
  ; enabled_at_init : bool
  ; handler : expression
  }

val probe : loc:Location.t -> payload -> (probe, Location.t * string) result

(** The name that is tested. *)
val test : loc:Location.t -> payload -> (string, Location.t * string) result
