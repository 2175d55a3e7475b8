external now : unit -> float = "own_clock_now"
