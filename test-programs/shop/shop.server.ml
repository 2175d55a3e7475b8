(* A web shop on Lwt and cohttp, with three pages, one of which has a fault that docs/tutorial.md finds while it runs. *)

open Lwt.Syntax
module Server = Cohttp_lwt_unix.Server

let page body = Server.respond_string ~status:`OK ~body:(body ^ "\n") ()

let price number =
  match Catalogue.find number with
  | Some article -> page (Printf.sprintf "%s: %d cents" article.name article.price)
  | None -> Server.respond_not_found ()

let search word =
  let found = Catalogue.search word in
  page (String.concat "\n" (List.map (fun (it : Catalogue.article) -> it.name) found))

(* The bank answers after five milliseconds, in which other requests are served. *)
let pay () = Lwt_unix.sleep 0.005

let order number =
  let* () = pay () in
  Ledger.write number;
  page (Printf.sprintf "ordered %d" number)

let answer path =
  match String.split_on_char '/' path with
  | [ ""; "price"; number ] -> price (int_of_string number)
  | [ ""; "search"; word ] -> search word
  | [ ""; "order"; number ] -> order (int_of_string number)
  | _ -> Server.respond_not_found ()

let requests = ref 0

let handle _ request _ =
  incr requests;
  let number = !requests and path = Cohttp.Request.resource request in
  [%probe "request_start" (Printf.printf "start %d %s\n%!" number path) [@probe.args number, path]];
  let* response = answer path in
  [%probe "request_end" (Printf.printf "end %d %s\n%!" number path) [@probe.args number, path]];
  Lwt.return response

let listen port =
  let socket = Lwt_unix.socket PF_INET SOCK_STREAM 0 in
  Lwt_unix.setsockopt socket SO_REUSEADDR true;
  let* () = Lwt_unix.bind socket (ADDR_INET (Unix.inet_addr_loopback, port)) in
  Lwt_unix.listen socket 128;
  Lwt.return socket

let () =
  let port = if Array.length Sys.argv > 1 then int_of_string Sys.argv.(1) else 8080 in
  Lwt_main.run
    (let* socket = listen port in
     Printf.printf "shop: http://127.0.0.1:%d\n%!" port;
     Server.create ~mode:(`TCP (`Socket socket)) (Server.make ~callback:handle ()))
