(* Registers the rewriter.

   It runs before the rules of all other rewriters, as an instrumentation does,
   so that its input is the source as written, which is also the input of the
   stub generator. *)

open Ppxlib

let expand ast = Ppx_probe_source.Rewrite.(structure (create ()) ast)

let () =
  Driver.register_transformation "ppx_probe"
    ~instrument:(Driver.Instrument.make expand ~position:Before)
