(* A program that changes itself while it is observed: it closes descriptors, has a thousand
   maps, another personality, root directory and user, and forbids itself privileges, dumps
   and, in the end, executable memory. Its argument is a library, libprobes.so. *)

external map_much : unit -> bool = "adversary_map_much"

external close_all : unit -> bool = "adversary_close_all"

external set_personality : unit -> bool = "adversary_set_personality"

external change_root : string -> bool = "adversary_change_root"

external become_nobody : unit -> bool = "adversary_become_nobody"

external forbid : bool -> bool = "adversary_forbid"

external deny_write_execute : unit -> bool = "adversary_deny_write_execute"

external enter_namespace : string -> int = "adversary_enter_namespace"

let is_root = Unix.geteuid () = 0

let changes =
  [ ("a namespace of a child", fun () -> enter_namespace Sys.argv.(1) = 0)
  ; ("descriptors", close_all)
  ; ("a thousand maps", map_much)
  ; ("the personality", set_personality)
  ; ("the root directory", fun () -> change_root "/usr")
  ; ("the user", become_nobody)
  ; ("dumps and privileges", fun () -> forbid is_root)
  ; ("executable memory", deny_write_execute)
  ]

(* In one process they are 6 ms apart, in another 50 ms. *)
let rounds_between = 3 * (1 + (Unix.getpid () mod 8))

let pause = 0.002

let rest () =
  let start = Unix.gettimeofday () in
  if Random.bool () then Unix.sleepf pause else ignore (Unix.select [] [] [] pause);
  let took = Unix.gettimeofday () -. start in
  (* The clock may be set back. *)
  Verdict.check (took >= pause *. 0.99 || took < 0.) "a pause lasts"

let left = ref changes

let change () =
  match !left with
  | [] -> ()
  | (what, change) :: others ->
    left := others;
    [%probe "changes" (ignore (Sys.opaque_identity (ref what)))];
    Verdict.check (change ()) what

let round n =
  let text = "c" ^ string_of_int n in
  [%probe "begins" (Verdict.check (text.[0] = 'c') "a text in a handler") [@probe.args n, text]];
  rest ();
  if n mod rounds_between = 0 then change ();
  [%probe "ends" (Gc.minor ()) [@probe.args n, text]];
  Verdict.check (String.equal text ("c" ^ string_of_int n)) "a text after its probes"

let () = Verdict.run round
