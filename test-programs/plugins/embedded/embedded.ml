(* An OCaml library for programs in C, as one shared object with its runtime. *)

let calls = ref 0

let call n =
  [%probe "embedded_call" (calls := !calls + String.length (string_of_int n))];
  !calls

let () = Callback.register "call" call
