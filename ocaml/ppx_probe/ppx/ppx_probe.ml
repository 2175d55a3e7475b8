(* Registers the rewriter.

   It is registered as an instrumentation pass, which runs before all other
   rewriters, so that its input is the source as written, which is also the input
   of ppx_probe_stubs. *)

open Ppxlib

let expand ast = Ppx_probe_source.Rewrite.(structure (create ()) ast)

let () =
  Driver.register_transformation "ppx_probe"
    ~instrument:(Driver.Instrument.make expand ~position:Before)
