(* Finds, checks and expands the probes of one or more files; errors and initial states are
   collected over all of them. *)

open Ppxlib

type error =
  { loc : Location.t
  ; message : string
  }

type t =
  { initial_states : (string, bool * Location.t) Hashtbl.t
  ; mutable uses : Use.t list
  ; mutable errors : error list
  }

let create () =
  { initial_states = Hashtbl.create 16; uses = []; errors = [] }

let uses t = List.rev t.uses

let errors t = List.rev t.errors

let max_name_length = 100

let error_node t ~loc message =
  t.errors <- { loc; message } :: t.errors;
  Location.error_extensionf ~loc "%s" message

let error_expression t (loc, message) =
  Ast_builder.Default.pexp_extension ~loc (error_node t ~loc message)

let describe (loc : Location.t) =
  Printf.sprintf "%s, line %d" loc.loc_start.pos_fname loc.loc_start.pos_lnum

(* All sites of a name share its semaphore, which has one initial value: they
   must have the same initial state. *)
let check_initial_state t ~loc ~name enabled_at_init =
  match Hashtbl.find_opt t.initial_states name with
  | None ->
    Hashtbl.add t.initial_states name (enabled_at_init, loc);
    Ok ()
  | Some (first, _) when Bool.equal first enabled_at_init -> Ok ()
  | Some (first, first_loc) ->
    let message =
      Printf.sprintf
        "probe %S has enabled_at_init:%b here and enabled_at_init:%b in %s: \
         all sites of one name must agree"
        name enabled_at_init first (describe first_loc)
    in
    Error (loc, message)

(* A local module keeps the external out of the unit's signature, where it
   would have to be hidden by every .mli and could clash under [include]. Whatever
   their types, the arguments are passed as values, in registers. *)
let call_symbol ~loc symbol arguments =
  let loc = { loc with loc_ghost = true } in
  let open Ast_builder.Default in
  let noalloc =
    attribute ~loc ~name:{ txt = "noalloc"; loc } ~payload:(PStr [])
  in
  let arguments, types =
    match arguments with
    | [] -> ([ [%expr ()] ], [ [%type: unit] ])
    | _ :: _ ->
      let variable i _ = ptyp_var ~loc (Printf.sprintf "a%d" i) in
      (arguments, List.mapi variable arguments)
  in
  let type_ =
    List.fold_right (ptyp_arrow ~loc Nolabel) types [%type: bool]
  in
  let primitive =
    value_description ~loc ~name:{ txt = "call"; loc } ~type_
      ~prim:[ Use.bytecode_primitive; symbol ]
  in
  let primitive = { primitive with pval_attributes = [ noalloc ] } in
  pexp_letmodule ~loc
    { txt = Some "Ppx_probe"; loc }
    (pmod_structure ~loc [ pstr_primitive ~loc primitive ])
    (eapply ~loc [%expr Ppx_probe.call] arguments)

let call (use : Use.t) arguments =
  call_symbol ~loc:use.loc (Use.symbol use) arguments

(* If the C file is missing, or was made without this source, the linker names the
   symbols of the sites, which say nothing of it. This call, made once when the
   unit is initialised, adds a symbol to the linker's errors that does. *)
let reference_to_c_file (use : Use.t) =
  let loc = { use.loc with loc_ghost = true } in
  let called = call_symbol ~loc (Use.c_file_symbol use) [] in
  [%stri let (_ : bool) = [%e called]]

let site use arguments handler =
  let loc = use.Use.loc in
  [%expr if [%e call use arguments] then ([%e handler] : unit)]

let warn_about_length ~loc name expr =
  let length = String.length name in
  if length <= max_name_length then expr
  else
    let message =
      Printf.sprintf
        "the name of this probe has %d characters: more than %d may not be \
         portable"
        length max_name_length
    in
    let warning = attribute_of_warning loc message in
    { expr with pexp_attributes = warning :: expr.pexp_attributes }

let rec bound_name pattern =
  match pattern.ppat_desc with
  | Ppat_var { txt; _ } -> Some txt
  | Ppat_constraint (pattern, _) -> bound_name pattern
  | _ -> None

class rewriter t =
  object (self)
    inherit Ast_traverse.map as super

    val mutable enclosing = None

    method private inside : 'a. string option -> (unit -> 'a) -> 'a =
      fun name f ->
        let outer = enclosing in
        if Option.is_none outer then enclosing <- name;
        let result = f () in
        enclosing <- outer;
        result

    method private record ~loc kind name =
      let use = { Use.kind; name; loc; enclosing } in
      t.uses <- use :: t.uses;
      use

    method private probe ~loc payload =
      match Payload.probe ~loc payload with
      | Error error -> error_expression t error
      | Ok { name; enabled_at_init; arguments; handler } -> (
        match check_initial_state t ~loc ~name enabled_at_init with
        | Error error -> error_expression t error
        | Ok () ->
          let kind =
            Use.Site { enabled_at_init; arguments = List.map fst arguments }
          in
          let use = self#record ~loc kind name in
          warn_about_length ~loc name
            (site use (List.map snd arguments) (self#expression handler)))

    method private test ~loc payload =
      match Payload.test ~loc payload with
      | Error error -> error_expression t error
      | Ok name ->
        let use = self#record ~loc Is_enabled name in
        warn_about_length ~loc name (call use [])

    method! value_binding binding =
      self#inside (bound_name binding.pvb_pat) (fun () ->
          super#value_binding binding)

    method! class_field field =
      let name =
        match field.pcf_desc with
        | Pcf_method ({ txt; _ }, _, _) -> Some txt
        | _ -> None
      in
      self#inside name (fun () -> super#class_field field)

    method! expression expr =
      let loc = expr.pexp_loc in
      let keep_attributes expanded =
        { expanded with
          pexp_attributes = expanded.pexp_attributes @ expr.pexp_attributes
        }
      in
      match expr with
      | { pexp_attributes; _ } when List.exists Payload.is_args pexp_attributes
        ->
        List.find Payload.is_args pexp_attributes
        |> Payload.misplaced |> error_expression t
      | { pexp_desc = Pexp_extension ({ txt = "probe"; _ }, payload); _ } ->
        keep_attributes (self#probe ~loc payload)
      | { pexp_desc = Pexp_extension ({ txt = "probe_is_enabled"; _ }, payload)
        ; _
        } ->
        keep_attributes (self#test ~loc payload)
      | _ -> super#expression expr

    method! structure_item item =
      let loc = item.pstr_loc in
      match item.pstr_desc with
      | Pstr_extension (({ txt = ("probe" | "probe_is_enabled") as txt; _ }, _), _)
        ->
        let message =
          Printf.sprintf
            "[%%%%%s] is not an item of a structure: write let () = [%%%s ...]"
            txt txt
        in
        Ast_builder.Default.pstr_extension ~loc (error_node t ~loc message) []
      | _ -> super#structure_item item
  end

let structure t ast =
  let before = t.uses in
  let ast = (new rewriter t)#structure ast in
  match t.uses with
  | use :: _ as uses when uses != before ->
    ast @ [ reference_to_c_file use ]
  | _ -> ast
