(* The interface of plugins and libraries: each, when it is loaded, registers how to
   run it and how often its handlers have run. *)

type t =
  { run : int -> unit
  ; hits : unit -> (string * int) list
  }

let all : t list ref = ref []

let add one = all := !all @ [ one ]
