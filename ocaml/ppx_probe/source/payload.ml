(* Parses and checks the payloads of [%probe ...] and [%probe_is_enabled ...]. *)

open Ppxlib

type probe =
  { name : string
  ; enabled_at_init : bool
  ; arguments : (string * expression) list
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

let args = "probe.args"

let is_args attribute = String.equal attribute.attr_name.txt args

let misplaced attribute =
  ( attribute.attr_loc
  , "[@probe.args] has no meaning here: it belongs inside a probe, after \
     the handler, as in [%probe \"name\" (handler) [@probe.args x, y]]" )

let variable expr =
  match expr.pexp_desc with
  | Pexp_ident { txt; _ } -> (Longident.name txt, expr)
  | _ ->
    fail expr.pexp_loc
      "only a variable can be passed, x or M.x, because the site computes \
       nothing: bind this with let and name the variable"

let arguments_of attribute =
  let most = List.length Use.argument_registers in
  match attribute.attr_payload with
  | PStr [] -> []
  | PStr [ { pstr_desc = Pstr_eval (expr, []); _ } ] ->
    let values =
      match expr.pexp_desc with Pexp_tuple values -> values | _ -> [ expr ]
    in
    (match List.nth_opt values most with
    | None -> List.map variable values
    | Some surplus ->
      fail surplus.pexp_loc
        "too many values: %d are named, and a site passes at most %d, in \
         registers"
        (List.length values) most)
  | PStr _ | PSig _ | PTyp _ | PPat _ ->
    fail attribute.attr_loc
      "expected [@probe.args x, y, ...], with at most %d variables" most

(* A misspelt one would be ignored silently. *)
let check_attribute attribute =
  let { txt; loc } = attribute.attr_name in
  if String.starts_with ~prefix:"probe." txt && not (is_args attribute) then
    fail loc "unknown attribute %s: a probe has [@probe.args x, y] only" txt

(* [%probe "name" (handler) [@probe.args x]] has it on the application,
   [%probe "name" (handler [@probe.args x])] on the handler. *)
let arguments_and_handler payload handler =
  let attributes = payload.pexp_attributes @ handler.pexp_attributes in
  List.iter check_attribute attributes;
  let named, others = List.partition is_args handler.pexp_attributes in
  let handler = { handler with pexp_attributes = others } in
  match List.filter is_args payload.pexp_attributes @ named with
  | [] -> ([], handler)
  | [ attribute ] -> (arguments_of attribute, handler)
  | _ :: second :: _ ->
    fail second.attr_loc
      "[@probe.args] is given twice: name all values in one"

let single_expression ~loc ~usage = function
  | PStr [ { pstr_desc = Pstr_eval (expr, []); _ } ] -> expr
  | PStr [ { pstr_desc = Pstr_eval (_, attribute :: _); _ } ]
    when is_args attribute ->
    fail attribute.attr_loc "write [@probe.args ...], with one @"
  | PStr [] -> fail loc "the probe has no name: %s" usage
  | PStr _ | PSig _ | PTyp _ | PPat _ -> fail loc "%s" usage

let probe_of_arguments payload name_expr arguments =
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
    let arguments, handler = arguments_and_handler payload handler in
    { name
    ; enabled_at_init = Option.value enabled ~default:false
    ; arguments
    ; handler
    }

let catch f = try Ok (f ()) with Malformed (loc, msg) -> Error (loc, msg)

let probe ~loc payload =
  catch @@ fun () ->
  let expr = single_expression ~loc ~usage payload in
  match expr.pexp_desc with
  | Pexp_apply (name_expr, arguments) ->
    probe_of_arguments expr name_expr arguments
  | _ -> probe_of_arguments expr expr []

let test ~loc payload =
  catch @@ fun () ->
  let usage = test_usage in
  let expr = single_expression ~loc ~usage payload in
  if List.exists is_args expr.pexp_attributes then
    fail loc "[%%probe_is_enabled] passes no values: %s" usage;
  match expr.pexp_desc with
  | Pexp_apply (name_expr, (_, first) :: _) ->
    ignore (name_of ~usage name_expr : string);
    fail first.pexp_loc "too many arguments: %s" usage
  | _ -> name_of ~usage expr
