type t

exception Error of string

let () = Callback.register_exception "Probes_self.Error" (Error "")

(* In the order of the cases in the stubs. *)
type update =
  | Enable
  | Disable
  | Enable_regexp
  | Disable_regexp
  | Enable_all
  | Disable_all
  | Set_on
  | Set_off
  | Set_all_on
  | Set_all_off

type state =
  | Disabled
  | Enabled
  | Inconsistent

external open_library : string -> t = "probes_self_current"
external update : t -> update -> string -> unit = "probes_self_update"
external state : t -> string -> state = "probes_self_state"
external rows : t -> (string * state * int) array = "probes_self_states"

let current ?(library = "libprobes.so") () = open_library library
let enable t name = update t Enable name
let disable t name = update t Disable name
let enable_regexp t regexp = update t Enable_regexp regexp
let disable_regexp t regexp = update t Disable_regexp regexp
let enable_all t = update t Enable_all ""
let disable_all t = update t Disable_all ""
let set t name on = update t (if on then Set_on else Set_off) name
let set_all t on = update t (if on then Set_all_on else Set_all_off) ""
let states t = Array.to_list (rows t)
