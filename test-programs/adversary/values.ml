(* Values of every kind, made anew for each hit and moved by compactions. All of them follow
   from a number, the first argument, so what a tool shows of a hit can be checked. Probe
   handlers and the code after a site check the values themselves. *)

let text n = "v" ^ string_of_int n

(* Longer than what a tool shows. *)
let long n = text n ^ String.make 100 '.'

type shape =
  | Circle of int
  | Square of int * int

let visit n =
  let alive = text n in
  let half = Sys.opaque_identity (float_of_int n /. 2.) in
  let wide = Sys.opaque_identity (Int64.of_int n) in
  let short = Sys.opaque_identity (Int32.of_int n) in
  let native = Sys.opaque_identity (Nativeint.of_int n) in
  [%probe "numbers"
    (Verdict.check (half *. 2. = float_of_int n && Int64.to_int wide = n) "numbers in a handler")
    [@probe.args n, alive, half, wide, short, native]];
  let far = long n and list = [ n; n + 1 ] and floats = [| half; half |] in
  let square = Sys.opaque_identity (Square (n, n)) in
  [%probe "blocks"
    (Verdict.check (List.hd list = n && far = long n) "blocks in a handler")
    [@probe.args n, alive, far, list, floats, square]];
  let suspended = lazy (text n) and shown () = text n in
  let bytes = Bytes.of_string alive and circle = Sys.opaque_identity (Circle n) in
  [%probe "others"
    (Verdict.check (Bytes.to_string bytes = shown ()) "others in a handler")
    [@probe.args n, alive, bytes, suspended, shown, circle]];
  Verdict.check (String.equal alive (text n) && String.equal far (long n)) "texts after their probes";
  Verdict.check (half = float_of_int n /. 2. && floats = [| half; half |]) "floats after their probes";
  Verdict.check
    (Int64.to_int wide = n && Int32.to_int short = n && Nativeint.to_int native = n)
    "boxed numbers after their probes";
  Verdict.check
    (list = [ n; n + 1 ] && square = Square (n, n) && circle = Circle n)
    "blocks after their probes";
  Verdict.check (Lazy.force suspended = shown ()) "a suspended text"

let threads = 3

let visits = 40

let work round index () =
  for i = 0 to visits - 1 do
    visit ((((round * threads) + index) * visits) + i);
    if i land 7 = 0 then Thread.yield ()
  done

let round n =
  let all = List.init threads (fun index -> Thread.create (work n index) ()) in
  Gc.compact ();
  List.iter Thread.join all;
  Gc.compact ()

let () =
  Gc.set { (Gc.get ()) with minor_heap_size = 4096 };
  Verdict.run round
