val run : unit -> unit
