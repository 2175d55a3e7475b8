(* Registers the rewriter.

   It runs before the rules of all other rewriters, like an instrumentation:
   its input is then that of the stub generator, the source as written. *)

open Ppxlib

let expand ast = Ppx_probe_source.Rewrite.(structure (create ()) ast)

let () =
  Driver.register_transformation "ppx_probe"
    ~instrument:(Driver.Instrument.make expand ~position:Before)
