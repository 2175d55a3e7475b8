(* Enables and disables its own probes while other tools observe and update them. Its
   argument is the path of libprobes.so. *)

let probes = Probes_self.current ~library:Sys.argv.(1) ()

let text n = "o" ^ string_of_int n

let handled = ref 0

let visit n =
  let alive = text n in
  [%probe "visits"
    (incr handled;
     Verdict.check (alive = text n) "a text in a handler")
    [@probe.args n, alive]];
  [%probe "others" (Gc.minor ()) [@probe.args n]];
  Verdict.check (String.equal alive (text n)) "a text after its probes"

let contains text part =
  let last = String.length text - String.length part in
  let rec at i = i <= last && (String.sub text i (String.length part) = part || at (i + 1)) in
  at 0

(* Waits for the update lock, again after its timeout: another update may take longer. *)
let rec tried what f =
  match f () with
  | () -> ()
  | exception Probes_self.Error message when contains message "is being changed by" -> tried what f
  | exception Probes_self.Error message -> Verdict.check false (what ^ ": " ^ message)

let round n =
  tried "switching on" (fun () -> Probes_self.enable probes "visits");
  for i = 1 to 50 do
    visit ((n * 50) + i)
  done;
  let others () =
    for _ = 1 to 5 do
      tried "switching on in a thread" (fun () -> Probes_self.enable probes "others");
      visit n;
      tried "switching off in a thread" (fun () -> Probes_self.disable probes "others")
    done
  in
  let threads = List.init 3 (fun _ -> Thread.create others ()) in
  List.iter Thread.join threads;
  Verdict.check (List.length (Probes_self.states probes) = 2) "both states";
  tried "switching off" (fun () -> Probes_self.disable probes "visits")

let () =
  Verdict.run (fun n ->
      let before = !handled in
      round n;
      Verdict.check (!handled - before >= 50) "handlers run while a probe is on")
