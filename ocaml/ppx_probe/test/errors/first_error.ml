let f x =
  print_endline x;
  [%probe "bad name" (print_endline x)]
