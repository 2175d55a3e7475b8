(* The book of orders: a file. *)

let file = lazy (open_out_gen [ Open_append; Open_creat ] 0o600 (Filename.temp_file "shop" ".ledger"))

(* The disk is slow: one in a hundred writes takes a while. *)
let sync number = if number mod 1000 = 5 then Unix.sleepf 0.06

let written = ref 0

let write number =
  let file = Lazy.force file in
  Printf.fprintf file "%d\n%!" number;
  sync number;
  incr written
