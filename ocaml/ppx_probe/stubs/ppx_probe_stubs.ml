(* Reads the OCaml sources of a library or an executable and prints the C file
   that holds their probes. *)

open Ppxlib
open Ppx_probe_source

let usage = "usage: ppx_probe_stubs [-o FILE.c] FILE.ml ..."

(* Some versions of dune write %{deps} as ./a.ml; debuggers show the path in the C file. *)
let without_dot path =
  if String.length path > 2 && String.equal (String.sub path 0 2) "./" then
    String.sub path 2 (String.length path - 2)
  else path

let parse path =
  let channel = open_in_bin path in
  Fun.protect
    ~finally:(fun () -> close_in channel)
    (fun () ->
      let lexbuf = Lexing.from_channel channel in
      Lexing.set_filename lexbuf (without_dot path);
      Parse.implementation lexbuf)

(* Dune's (glob_files *.ml) matches its own intermediate files too: the output
   of the rewriter, beside the sources. *)
let is_source path = not (Filename.check_suffix path ".pp.ml")

let report { Rewrite.loc; message } =
  Format.eprintf "%a@\nError: %s@." Location.print loc message

(* Every file is read before errors are reported, so that all errors are reported. *)
let read_all paths =
  let rewrite = Rewrite.create () in
  let read ok path =
    match parse path with
    | ast ->
      ignore (Rewrite.structure rewrite ast : structure);
      ok
    | exception Sys_error message ->
      Format.eprintf "ppx_probe_stubs: %s@." message;
      false
    | exception exn ->
      Location.report_exception Format.err_formatter exn;
      false
  in
  let ok = List.fold_left read true paths in
  let errors = Rewrite.errors rewrite in
  List.iter report errors;
  if ok && errors = [] then Some (Rewrite.uses rewrite) else None

let write output uses =
  match output with
  | None -> C_file.print stdout uses
  | Some path ->
    let channel = open_out_bin path in
    C_file.print channel uses;
    close_out channel

let () =
  let output = ref None and paths = ref [] in
  let spec =
    [ ( "-o"
      , Arg.String (fun path -> output := Some path)
      , "FILE.c write there instead of to the standard output" )
    ]
  in
  Arg.parse spec (fun path -> paths := path :: !paths) usage;
  if !paths = [] then (
    prerr_endline usage;
    exit 2);
  match read_all (List.filter is_source (List.rev !paths)) with
  | None -> exit 1
  | Some uses -> (
    try write !output uses
    with Sys_error message ->
      Format.eprintf "ppx_probe_stubs: %s@." message;
      exit 1)
