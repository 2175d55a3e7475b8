(* Values of OCaml 4 that are addresses outside of its heap (naked pointers), of memory that is unmapped a moment before a site
   passes them. OCaml 5 forbids them: there, an int is passed. *)

external map_string : unit -> Obj.t = "adversary_map_string" [@@noalloc]

external unmap : Obj.t -> bool = "adversary_unmap" [@@noalloc]

let are_permitted = Sys.ocaml_version < "5"

let round n =
  for i = 1 to 100 do
    let naked = if are_permitted then map_string () else Obj.repr 0 in
    let alive = string_of_int (n + i) in
    [%probe "mapped" (ignore (naked, alive)) [@probe.args naked, alive]];
    let is_unmapped = (not are_permitted) || unmap naked in
    Verdict.check is_unmapped "memory is unmapped";
    [%probe "unmapped" (ignore (naked, alive)) [@probe.args naked, alive]];
    if i mod 10 = 0 then Gc.minor ();
    Verdict.check (String.equal alive (string_of_int (n + i))) "a string beside it"
  done

let () = Verdict.run round
