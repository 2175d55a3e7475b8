(* Checks that what a program can see of itself and its environment is the same in each
   round as in the first. The first is written to the file given as argument. *)

external seen_by_c : unit -> string = "adversary_environment"

(* Not TracerPid: while the tool has the program stopped, it is the tracer. *)
let fields =
  [ "Name"; "Umask"; "Uid"; "Gid"; "FDSize"; "Groups"; "Threads"; "SigQ"
  ; "SigPnd"; "ShdPnd"; "SigBlk"; "SigIgn"; "SigCgt"; "CapInh"; "CapPrm"; "CapEff"
  ; "CapBnd"; "CapAmb"; "NoNewPrivs"; "Seccomp"; "Seccomp_filters"; "VmLck"; "VmPin"
  ; "Cpus_allowed"; "Mems_allowed"; "THP_enabled"; "CoreDumping"
  ]

let lines file =
  match open_in file with
  | exception Sys_error _ -> [ "none" ]
  | channel ->
    let rec read all =
      match input_line channel with
      | line -> read (line :: all)
      | exception (End_of_file | Sys_error _) -> List.rev all
    in
    let all = read [] in
    close_in channel;
    all

let is_shown line =
  match String.index_opt line ':' with
  | Some colon -> List.mem (String.sub line 0 colon) fields
  | None -> false

(* Only the limit: the number of queued signals includes the user's other processes. *)
let without_queue line =
  match String.index_opt line '/' with
  | Some slash when String.length line > 4 && String.sub line 0 4 = "SigQ" ->
    "SigQ" ^ String.sub line slash (String.length line - slash)
  | _ -> line

(* glibc's posix_spawn sets its internal signals, 32 and 33, to ignored in the child; a program
   cannot set them. *)
let without_internal line =
  match Scanf.sscanf line "%s@: %Lx" (fun name mask -> (name, mask)) with
  | (("SigIgn" | "SigCgt") as name), mask ->
    Printf.sprintf "%s %Lx" name (Int64.logand mask (Int64.lognot 0x180000000L))
  | _ -> line
  | exception (Scanf.Scan_failure _ | Failure _ | End_of_file) -> line

(* Without what differs between runs: the inode numbers of pipes, and the paths of files. *)
let descriptor name =
  let link = try Unix.readlink ("/proc/self/fd/" ^ name) with Unix.Unix_error _ -> "" in
  let kind = List.hd (String.split_on_char '[' link) in
  let kind = if int_of_string name < 3 && kind.[0] = '/' then "file" else kind in
  let flags = String.concat " " (List.filteri (fun i _ -> i = 1) (lines ("/proc/self/fdinfo/" ^ name))) in
  Printf.sprintf "fd %s %s %s" name kind flags

let descriptors () =
  let names = Sys.readdir "/proc/self/fd" in
  Array.sort compare names;
  (* Without the descriptor of /proc/self/fd itself, which is closed by now. *)
  let is_open name = Sys.file_exists ("/proc/self/fd/" ^ name) in
  List.map descriptor (List.filter is_open (Array.to_list names))

let seen () =
  let files =
    [ "limits"; "personality"; "timerslack_ns"; "oom_score_adj"; "coredump_filter"
    ; "cgroup"; "sessionid"; "loginuid"; "comm"
    ]
  in
  let file name = (name ^ ":") :: lines ("/proc/self/" ^ name) in
  let environment = Array.to_list (Unix.environment ()) in
  String.concat "\n"
    (descriptors ()
    @ List.concat_map file files
    @ List.map without_internal
        (List.map without_queue (List.filter is_shown (lines "/proc/self/status")))
    @ List.sort compare environment
    @ Array.to_list Sys.argv
    @ [ Sys.executable_name; Sys.getcwd (); seen_by_c () ])

let first_difference a b =
  let rec first = function
    | x :: a, y :: b -> if x = y then first (a, b) else x ^ " -> " ^ y
    | x :: _, [] -> x ^ " is gone"
    | [], y :: _ -> y ^ " is new"
    | [], [] -> "none"
  in
  first (String.split_on_char '\n' a, String.split_on_char '\n' b)

let () =
  [%probe "begins" (ignore (Sys.opaque_identity (ref 1)))];
  (* The first call may open files that the OCaml runtime then keeps open. *)
  ignore (seen ());
  let first = seen () in
  let channel = open_out Sys.argv.(1) in
  output_string channel first;
  close_out channel;
  Verdict.run (fun n ->
      let now = seen () in
      [%probe "sees" (ignore (Sys.opaque_identity (ref n))) [@probe.args n, now]];
      if now <> first then Verdict.check false ("the same, not " ^ first_difference first now);
      Unix.sleepf 0.001)
