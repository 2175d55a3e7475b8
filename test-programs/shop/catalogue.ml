(* What the shop sells: each article with its number, name, and price in cents. *)

type article = { number : int; name : string; price : int }

let adjectives = [| "blue"; "green"; "heavy"; "light"; "old"; "red"; "small"; "wooden" |]

let nouns = [| "bottle"; "chair"; "clock"; "hammer"; "lamp"; "pencil"; "shelf"; "table" |]

let article number =
  let adjective = adjectives.(number mod 8) and noun = nouns.(number / 8 mod 8) in
  { number; name = Printf.sprintf "%s %s %d" adjective noun number; price = 100 + (number * 7 mod 900) }

let all = List.init 500 article

let by_number : (int, article) Hashtbl.t =
  let table = Hashtbl.create 500 in
  List.iter (fun it -> Hashtbl.replace table it.number it) all;
  table

let find number = Hashtbl.find_opt by_number number

let contains word text =
  let last = String.length text - String.length word in
  let rec at index = index <= last && (String.sub text index (String.length word) = word || at (index + 1)) in
  at 0

(* The articles whose names contain [word]. *)
let search word = List.filter (fun it -> contains word (String.lowercase_ascii it.name)) all
