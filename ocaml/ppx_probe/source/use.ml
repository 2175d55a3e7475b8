(* One use of a probe in a source file, and its C symbols. *)

open Ppxlib

type kind =
  | Site of
      { enabled_at_init : bool
      ; arguments : string list
      }
  | Is_enabled

type t =
  { kind : kind
  ; name : string
  ; loc : Location.t
  ; enclosing : string option
  }

(* System V ABI, AMD64 supplement, 3.2.3. Ocamlopt follows it for externals. *)
let argument_registers = [ "rdi"; "rsi"; "rdx"; "rcx"; "r8"; "r9" ]

let bytecode_primitive = "ppx_probe_bytecode_false"

let position t = t.loc.loc_start

(* Dune runs the rewriter and ppx_probe_stubs in different directories, and a line directive
   may give yet another path: only the base name is always the same. *)
let file t = Filename.basename (position t).pos_fname

let unit_name t =
  match String.split_on_char '.' (file t) with
  | [] -> ""
  | stem :: _ -> String.capitalize_ascii stem

(* Ocamlopt escapes what an assembler does not accept as $xx, also in the names
   of externals: a name that needs it would be escaped twice. *)
let plain identifier =
  String.map
    (function
      | ('a' .. 'z' | 'A' .. 'Z' | '0' .. '9' | '_') as c -> c
      | _ -> '_')
    identifier

let c_file_symbol t =
  Printf.sprintf
    "the_C_file_of_ppx_probe_stubs_lacks__%s__see_the_README_of_ppx_probe"
    (plain (file t))

(* 60 bits, in decimal like ocamlopt's own stamps: a tool that demangles
   [camlUnit__function_12] then shows this symbol as [Unit.function], too. *)
let stamp parts =
  let hex = Digest.to_hex (Digest.string (String.concat "\000" parts)) in
  Int64.to_string (Int64.of_string ("0x" ^ String.sub hex 0 15))

let enclosing_name t = Option.value t.enclosing ~default:"entry"

let is_operator name = String.for_all (Char.equal '_') (plain name)

let function_name t =
  let name = enclosing_name t in
  if is_operator name then "operator" else plain name

let site_symbol t ~enabled_at_init ~arguments =
  let pos = position t in
  let parts =
    [ file t
    ; enclosing_name t
    ; t.name
    ; string_of_bool enabled_at_init
    ; string_of_int pos.pos_lnum
    ; string_of_int (pos.pos_cnum - pos.pos_bol)
    ]
    @
    match arguments with
    | [] -> []
    | _ :: _ -> [ string_of_int (List.length arguments) ]
  in
  Printf.sprintf "caml%s__%s_%s"
    (plain (unit_name t))
    (function_name t)
    (stamp parts)

let symbol t =
  match t.kind with
  | Site { enabled_at_init; arguments } ->
    site_symbol t ~enabled_at_init ~arguments
  | Is_enabled -> "caml_probes_is_enabled_" ^ t.name
