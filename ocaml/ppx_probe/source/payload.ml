(* What stands inside [%probe ...] and [%probe_is_enabled ...], checked. *)

open Ppxlib

type probe =
  { name : string
  ; enabled_at_init : bool
  ; handler : expression
  }

exception Malformed of Location.t * string

let fail loc fmt = Printf.ksprintf (fun msg -> raise (Malformed (loc, msg))) fmt

let usage =
  "expected [%probe \"name\" handler] or [%probe \"name\" \
   ~enabled_at_init:true handler]"

let test_usage = "expected [%probe_is_enabled \"name\"]"

let is_name_char = function
  | 'a' .. 'z' | 'A' .. 'Z' | '0' .. '9' | '_' -> true
  | _ -> false

let name_of ~usage expr =
  let loc = expr.pexp_loc in
  match expr.pexp_desc with
  | Pexp_constant (Pconst_string ("", _, _)) ->
    fail loc "the name of a probe cannot be empty"
  | Pexp_constant (Pconst_string (name, _, _)) ->
    if String.for_all is_name_char name then name
    else
      fail loc
        "\"%s\" is not the name of a probe: only letters, digits and _ are \
         allowed"
        name
  | _ -> fail loc "the name of a probe must be a literal string: %s" usage

let bool_of expr =
  match expr.pexp_desc with
  | Pexp_construct ({ txt = Lident "true"; _ }, None) -> true
  | Pexp_construct ({ txt = Lident "false"; _ }, None) -> false
  | _ ->
    fail expr.pexp_loc "enabled_at_init must be the literal true or false"

let single_expression ~loc ~usage = function
  | PStr [ { pstr_desc = Pstr_eval (expr, []); _ } ] -> expr
  | PStr [] -> fail loc "the probe has no name: %s" usage
  | PStr _ | PSig _ | PTyp _ | PPat _ -> fail loc "%s" usage

let probe_of_arguments name_expr arguments =
  let name = name_of ~usage name_expr in
  let add (enabled, handler) (label, (arg : expression)) =
    let loc = arg.pexp_loc in
    match (label, enabled, handler) with
    | Labelled "enabled_at_init", None, _ -> (Some (bool_of arg), handler)
    | Labelled "enabled_at_init", Some _, _ ->
      fail loc "enabled_at_init is given twice"
    | Optional "enabled_at_init", _, _ ->
      fail loc "write ~enabled_at_init, not ?enabled_at_init"
    | (Labelled label | Optional label), _, _ ->
      fail loc "unknown label %s: %s" label usage
    | Nolabel, _, None -> (enabled, Some arg)
    | Nolabel, _, Some _ ->
      fail loc
        "too many arguments: a probe has one handler; if it is an \
         application, put it in parentheses"
  in
  match List.fold_left add (None, None) arguments with
  | _, None ->
    fail name_expr.pexp_loc "the probe has no handler: %s" usage
  | enabled, Some handler ->
    { name; enabled_at_init = Option.value enabled ~default:false; handler }

let catch f = try Ok (f ()) with Malformed (loc, msg) -> Error (loc, msg)

let probe ~loc payload =
  catch @@ fun () ->
  let expr = single_expression ~loc ~usage payload in
  match expr.pexp_desc with
  | Pexp_apply (name_expr, arguments) -> probe_of_arguments name_expr arguments
  | _ -> probe_of_arguments expr []

let test ~loc payload =
  catch @@ fun () ->
  let usage = test_usage in
  let expr = single_expression ~loc ~usage payload in
  match expr.pexp_desc with
  | Pexp_apply (name_expr, (_, first) :: _) ->
    ignore (name_of ~usage name_expr : string);
    fail first.pexp_loc "too many arguments: %s" usage
  | _ -> name_of ~usage expr
