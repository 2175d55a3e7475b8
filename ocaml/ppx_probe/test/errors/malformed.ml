(* One malformed use a line. *)

let f x = [%probe]
let f x = [%probe "name"]
let f x = [%probe name (g x)]
let f x = [%probe 12 (g x)]
let f x = [%probe "" (g x)]
let f x = [%probe "req-start" (g x)]
let f x = [%probe "naïve" (g x)]
let f x = [%probe "name" ~enabled_at_init:true]
let f x = [%probe "name" ~enabled_at_init:x (g x)]
let f x = [%probe "name" ~enabled_at_init (g x)]
let f x = [%probe "name" ?enabled_at_init:true (g x)]
let f x = [%probe "name" ~enabled_at_init:true ~enabled_at_init:true (g x)]
let f x = [%probe "name" ~enabled:true (g x)]
let f x = [%probe "name" g x]
let f x = [%probe let y = x]
let f x = [%probe: int]
let f x = [%probe "outer" [%probe "inner"]]
let f x = [%probe_is_enabled]
let f x = [%probe_is_enabled name]
let f x = [%probe_is_enabled ""]
let f x = [%probe_is_enabled "a b"]
let f x = [%probe_is_enabled "name" x]
let f x = [%probe_is_enabled "name"; x]

[%%probe "name" (g ())]

(* One name, two values, in one file; the second one is wrong. *)

let f x = [%probe "twice" ~enabled_at_init:true (g x)]
let f x = [%probe "twice" ~enabled_at_init:true (g x)]
let f x = [%probe "twice" (g x)]
