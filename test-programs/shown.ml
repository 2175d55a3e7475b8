(* Probes that pass values of every kind, for tools that show them. The comments
   say what each value is; words in capitals are tags. *)

let opaque = Sys.opaque_identity

let counts : (string, int) Hashtbl.t = Hashtbl.create 16

let count name =
  Hashtbl.replace counts name
    (1 + Option.value (Hashtbl.find_opt counts name) ~default:0)

(* Immediate values. *)

let answer = opaque 42

let ints _ _ =
  let zero = 0 and one = 1 and minus_one = -1 in
  [%probe "ints"
    (ignore (zero, one, minus_one, answer);
     count "ints")
    [@probe.args zero, one, minus_one, answer, max_int, min_int]]

type colour =
  | Red
  | Green
  | Mixed of int * int * int
  | Named of string

let constants _ _ =
  let unit = () and none = None and nil = [] and yes = true and char = 'c' in
  let green = opaque Green in
  [%probe "constants"
    (ignore (unit, none, nil, yes, char, green);
     count "constants")
    [@probe.args unit, none, nil, yes, char, green]]

(* STRING of 0, 5, 8, 64, 65 and 100000 bytes. *)

let sixty_four = String.init 64 (fun i -> Char.chr (Char.code '0' + (i mod 10)))

let sixty_five = sixty_four ^ "!"

let large = String.make 100_000 'x'

let strings _ _ =
  let empty = opaque "" and hello = opaque "hello" and word = opaque "8 bytes." in
  [%probe "strings"
    (ignore (empty, hello, word);
     count "strings")
    [@probe.args empty, hello, word, sixty_four, sixty_five, large]]

(* STRING: what has to be escaped and what need not be, a character that ends at the
   65th byte, and Bytes, which has the same tag. *)

let split = String.make 63 'a' ^ "\xc3\xa9"

let changing = Bytes.of_string "bytes"

let texts _ _ =
  let lines = opaque "one\ntwo\ttab\r\n" and latin = opaque "caf\xe9 \xff\xfe" in
  let zeros = opaque "a\000b\000" in
  let quoted = opaque "\"\\ \027[31m\127 caf\u{e9} \u{9b}31m\u{202e}" in
  [%probe "texts"
    (ignore (lines, latin, zeros, quoted);
     count "texts")
    [@probe.args lines, latin, zeros, quoted, split, changing]]

(* DOUBLE *)

let floats _ _ =
  let tenth = opaque 0.1 and minus_zero = opaque (-0.) in
  let huge = opaque 1e300 and tiny = opaque 5e-324 in
  [%probe "floats"
    (ignore (tenth, minus_zero, huge, tiny);
     count "floats")
    [@probe.args tenth, minus_zero, infinity, nan, huge, tiny]]

(* CUSTOM, with the identifiers _j _j _i _n _chan _mutex. *)

let mutex = Mutex.create ()

let customs _ _ =
  let long = opaque 5_000_000_000L and least = opaque Int64.min_int in
  let short = opaque (-7l) and native = opaque 99n in
  [%probe "customs"
    (ignore (long, least, short, native);
     count "customs")
    [@probe.args long, least, short, native, stdout, mutex]]

(* Tag and size: 0 2, 0 2, 0 1, 0 3, 0 3, 1 1. *)

type point =
  { name : string
  ; column : int
  ; row : int
  }

let origin = { name = "origin"; column = 0; row = opaque 0 }

let blocks _ _ =
  let pair = opaque (1, "two") and list = opaque [ 1; 2; 3 ] in
  let some = opaque (Some 3) and mixed = opaque (Mixed (1, 2, 3)) in
  let named = opaque (Named "blue") in
  [%probe "blocks"
    (ignore (pair, list, some, mixed, named);
     count "blocks")
    [@probe.args pair, list, some, origin, mixed, named]]

(* Tag and size: 0 3, 0 0, 0 1000, DOUBLE_ARRAY 2 (an array), DOUBLE_ARRAY 2 (a record),
   0 1 (a ref). *)

type vector =
  { x : float
  ; y : float
  }

let thousand = Array.init 1000 Fun.id

let cell = ref (opaque 7)

let arrays _ _ =
  let three = opaque [| 1; 2; 3 |] and empty = opaque [||] in
  let floats = opaque [| 1.5; 2.5 |] and vector = opaque { x = 1.; y = -1. } in
  [%probe "arrays"
    (ignore (three, empty, floats, vector);
     count "arrays")
    [@probe.args three, empty, thousand, floats, vector, cell]]

(* CLOSURE that captures nothing, CLOSURE that captures one variable, INFIX, LAZY, OBJECT,
   and a module. *)

module type Size = sig
  val size : int
end

let code _ _ =
  let captured = opaque 5 in
  let add n = n + captured in
  let rec even n = n = captured || odd (n - 1)
  and odd n = n <> captured && even (n - 1) in
  let closure = opaque add and infix = opaque odd in
  let suspended = opaque (lazy (captured + 1)) in
  let instance =
    opaque
      (object
         method size = captured
      end)
  in
  let packed : (module Size) =
    (module struct
      let size = captured
    end)
  in
  [%probe "code"
    (ignore (closure, infix, suspended, instance, packed);
     count "code")
    [@probe.args count, closure, infix, suspended, instance, packed]]

(* Words that are no valid OCaml values: 0, an address below all memory, one above
   what a process may map, one that is not canonical, and two that are not multiples
   of 8. None of them may be live during a collection. *)

let words =
  let words =
    [| 0n; 0x10n; 0x7fff_ffff_f010n; 0x8000_0000_0000_0000n; 0x1002n; 0x7ffcn |]
  in
  let block = Obj.new_block Obj.abstract_tag (Array.length words) in
  Array.iteri (Obj.set_raw_field block) words;
  block

let naked _ _ =
  let null = Obj.field words 0 and low = Obj.field words 1 in
  let high = Obj.field words 2 and no_address = Obj.field words 3 in
  let odd = Obj.field words 4 and even = Obj.field words 5 in
  [%probe "naked"
    (ignore null;
     ignore low;
     ignore high;
     ignore no_address;
     ignore odd;
     ignore even;
     count "naked")
    [@probe.args null, low, high, no_address, odd, even]]

(* The number of the thread (0 is the main one), the number of the hit, and values
   that are allocated for each hit. For hit 5 of thread 2, these are "2:5", 2.5 (half
   of 5), [5; 2]. *)
let numbered thread number =
  let text = Printf.sprintf "%d:%d" thread number in
  let half = opaque (float_of_int number /. 2.) in
  let list = opaque [ number; thread ] in
  [%probe "numbered"
    (ignore (thread, number, text, half, list);
     count "numbered")
    [@probe.args thread, number, text, half, list]]

let nothing _ _ = [%probe "nothing" (count "nothing")]

(* Functions that take and return values of several kinds. *)

let[@inline never] takes_ints a b c = opaque (a + b + c)

let[@inline never] takes_texts text number = opaque (text ^ string_of_int number)

let[@inline never] takes_blocks (one, other) colour =
  match opaque colour with
  | Red | Green -> opaque (one, other)
  | Mixed (n, _, _) -> (n, other)
  | Named name -> (String.length name, other)

let[@inline never] takes_floats x y = opaque (x +. y)

let[@inline never] takes_unit () = opaque Green

let[@inline never] takes_seven a b c d e f g = opaque (a + b + c + d + e + f + g)

(* Each round of a recursive function, and one that is ended by an exception. *)
let[@inline never] rec takes_depth n = if n = 0 then 0 else 1 + takes_depth (n - 1)

let[@inline never] raises text = if opaque true then failwith text else text

(* A closure that captures a variable. *)
let[@inline never] closes n =
  let[@inline never] adds x = opaque (x + n) in
  opaque adds

let pass times =
  for number = 1 to times do
    ignore (takes_ints number (-2) max_int);
    ignore (takes_texts "hello" number);
    ignore (takes_blocks (number, 'c') (Named "blue"));
    ignore (takes_floats (float_of_int number /. 2.) 1e300);
    ignore (takes_unit ());
    ignore (takes_seven 1 2 3 4 5 6 7);
    ignore (takes_depth 3);
    (try ignore (raises "gone") with Failure _ -> ());
    ignore (closes number 1)
  done

let probes =
  [ ("ints", ints)
  ; ("constants", constants)
  ; ("strings", strings)
  ; ("texts", texts)
  ; ("floats", floats)
  ; ("customs", customs)
  ; ("blocks", blocks)
  ; ("arrays", arrays)
  ; ("code", code)
  ; ("naked", naked)
  ; ("numbered", numbered)
  ; ("nothing", nothing)
  ]

(* Hits each of [probes] [times] times, as the thread with the number [thread]; calls
   [then_] after each round. *)
let hit ?(then_ = ignore) probes thread times =
  for number = 1 to times do
    List.iter (fun (_, probe) -> probe thread number) probes;
    then_ ()
  done

let from_threads threads times =
  List.init threads (fun i -> Thread.create (hit probes (i + 1)) times)
  |> List.iter Thread.join

let report () =
  print_string "hits";
  List.iter
    (fun (name, _) ->
      Printf.printf " %s=%d" name
        (Option.value (Hashtbl.find_opt counts name) ~default:0))
    probes;
  print_newline ()

let named name = List.filter (fun (other, _) -> other = name) probes

(* A child obeys from then on. *)
let fork () =
  match Unix.fork () with
  | 0 -> ()
  | pid ->
    ignore (Unix.waitpid [] pid);
    exit 0

let obey command =
  match String.split_on_char ' ' command with
  | [ "run" ] ->
    hit probes 0 1;
    report ()
  | words -> (
    (match words with
    | [ "hit"; times ] -> hit probes 0 (int_of_string times)
    | [ "hit"; name; times ] when named name <> [] ->
      hit (named name) 0 (int_of_string times)
    | [ "pass"; times ] -> pass (int_of_string times)
    | [ "pass"; threads; times ] ->
      let passes _ = Thread.create pass (int_of_string times) in
      List.init (int_of_string threads) passes |> List.iter Thread.join
    | [ "collect"; times ] ->
      hit ~then_:Gc.compact probes 0 (int_of_string times)
    | [ "threads"; threads; times ] ->
      from_threads (int_of_string threads) (int_of_string times)
    | [ "child" ] -> fork ()
    | _ -> failwith command);
    Printf.printf "done %s\n" command)

let () =
  ignore (Red, origin.name, origin.column, origin.row);
  Rounds.ready ();
  Rounds.commands (fun command ->
      try obey command with Failure _ -> Rounds.unknown command)
