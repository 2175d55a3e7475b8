(* A rewriter other than ppx_probe: [%twice e] expands to e; e. *)

open Ppxlib

let twice =
  Extension.V3.declare "twice" Extension.Context.expression
    Ast_pattern.(single_expr_payload __)
    (fun ~ctxt e ->
      let loc = Expansion_context.Extension.extension_point_loc ctxt in
      [%expr
        [%e e];
        [%e e]])

let () =
  Driver.register_transformation "twice"
    ~rules:[ Context_free.Rule.extension twice ]
