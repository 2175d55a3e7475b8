(* Memory that is limited or locked: its argument says how. [Out_of_memory] is caught,
   and what was allocated before stays as it was. *)

external limit_address_space : int -> unit = "adversary_limit_address_space"

external limit_data : int -> unit = "adversary_limit_data"

external lock_all : unit -> unit = "adversary_lock_all"

let mebibytes n = n lsl 20

(* As much as the program has already, in MiB. *)
let used field =
  let status = open_in "/proc/self/status" in
  let rec find () =
    let line = input_line status in
    match Scanf.sscanf line "%s@: %d kB" (fun name number -> (name, number)) with
    | name, number when name = field -> (number / 1024) + 1
    | _ -> find ()
    | exception (Scanf.Scan_failure _ | Failure _ | End_of_file) -> find ()
  in
  let used = find () in
  close_in status;
  used

(* How much more may be mapped, in MiB. Pages that are never written to take no memory. *)
let room = 256

let piece = mebibytes 8

let ends = [ 0; piece - 1 ]

let mark n bytes = List.iter (fun i -> Bytes.set bytes i (Char.chr n)) ends

let is_marked n bytes = List.for_all (fun i -> Char.code (Bytes.get bytes i) = n) ends

let fill () =
  let rec fill pieces =
    let n = List.length pieces in
    [%probe "allocates" (ignore (Sys.opaque_identity (ref n))) [@probe.args n]];
    match Bytes.create piece with
    | fresh ->
      mark n fresh;
      if n > room then pieces else fill (fresh :: pieces)
    | exception Out_of_memory -> pieces
  in
  let pieces = fill [] in
  [%probe "checks" (Verdict.check (pieces <> []) "some memory")];
  List.iteri
    (fun i bytes ->
      Verdict.check (is_marked (List.length pieces - 1 - i) bytes) "what was allocated")
    pieces;
  List.length pieces

let child () =
  match Unix.fork () with
  | 0 ->
    [%probe "forked" (ignore (Sys.opaque_identity (ref 1)))];
    Unix._exit 3
  | child ->
    Verdict.check
      (snd (Verdict.retried (Unix.waitpid []) child) = WEXITED 3)
      "the status of a child"

let () =
  let mode = Sys.argv.(1) in
  (match mode with
  | "address_space" -> limit_address_space (mebibytes (used "VmSize" + room))
  | "data" -> limit_data (mebibytes (used "VmData" + room))
  | "locked" -> lock_all ()
  | other -> invalid_arg other);
  Verdict.run (fun n ->
      if mode = "locked" then (
        let bytes = Bytes.create piece in
        mark 1 bytes;
        [%probe "allocates" (ignore (Sys.opaque_identity (ref n))) [@probe.args n]];
        Verdict.check (is_marked 1 bytes) "what was allocated")
      else (
        let pieces = fill () in
        (* Fewer than 32 pieces fit while the program is observed: the arena counts, too. *)
        Verdict.check
          (pieces >= 16 && pieces <= 32)
          (Printf.sprintf "memory up to the limit, not %d pieces" pieces);
        Gc.compact ());
      child ())
