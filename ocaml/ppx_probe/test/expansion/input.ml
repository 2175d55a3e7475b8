let f x =
  if x > 0 then [%probe "one" (g x)];
  [%probe "two" ~enabled_at_init:true (h [%probe_is_enabled "one"])]
