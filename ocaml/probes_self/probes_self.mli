(** Enables and disables the probes of the calling program, those of
    {{:../ppx_probe/README.md}ppx_probe} or of OxCaml, while it runs: from any thread or domain,
    from a signal handler ([Sys.signal]), and under a debugger.

    Each function is one call of [libprobes] (probes.h). *)

(** The probes of this process. A child after [Unix.fork] has its own: call {!current} there. *)
type t

(** The message says what failed, and why. *)
exception Error of string

(** [current ()] loads [libprobes.so], where dlopen(3) looks for it or from the file [library], and
    opens the probes of this process: those of the program and, at each call of one of the
    functions below, those of the plugins that it has loaded by then.

    @raise Error
      if there is no such library, no probe, or [/proc] is missing or not readable. *)
val current : ?library:string -> unit -> t

(** {1 Enabling and disabling}

    Probes are counted: [enable] adds one and [disable] takes one away, so that several can share a
    probe. Each of these functions makes its whole change, or raises {!Error} and changes nothing,
    unless the message says what has changed. A call takes about 0.3 ms; if another tool is updating
    the same process, at most half a second. No other thread of the same domain runs OCaml code
    meanwhile. *)

(** [enable t name] enables the probe of that name. *)
val enable : t -> string -> unit

(** [disable t name] disables the probe of that name, which has to be enabled. *)
val disable : t -> string -> unit

(** [enable_regexp t regexp] enables the probes whose name begins with a match of the regular expression
    (of Rust's [regex] crate). There has to be at least one. *)
val enable_regexp : t -> string -> unit

(** [disable_regexp t regexp] disables the same probes; those that are disabled already stay so. *)
val disable_regexp : t -> string -> unit

(** Enables all probes. *)
val enable_all : t -> unit

(** Disables all probes; those that are disabled already stay so. *)
val disable_all : t -> unit

(** [set t name on] sets the counters of a probe to 1 or 0 and switches all its sites, whatever their state:
    this repairs a probe that is {!Inconsistent}. *)
val set : t -> string -> bool -> unit

(** {!set} for all probes. *)
val set_all : t -> bool -> unit

(** {1 States} *)

type state =
  | Disabled
  | Enabled
  | Inconsistent
      (** Sites and counters disagree: an update was interrupted, or a plugin that also has the probe was
          loaded while the probe was enabled. *)

(** The state of the probe of that name. *)
val state : t -> string -> state

(** Name, state and counter of all probes, sorted by name. *)
val states : t -> (string * state * int) list
