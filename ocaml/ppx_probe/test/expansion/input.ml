let f x =
  if x > 0 then [%probe "one" (g x)];
  [%probe "two" ~enabled_at_init:true (h [%probe_is_enabled "one"])]

let f x = [%probe "one" (g x) [@probe.args x, M.y]]
let f x = [%probe "one" (g x) [@other] [@probe.args x]]
let f x = [%probe "one" (g x [@other] [@probe.args x])]
let f x = [%probe "one" (g x) [@probe.args]]
