let f x = [%probe "name" (g x)
