# semaphores.sh PROGRAM: prints the number of semaphores and sites of each name.
set -eu

readelf -n "$1" | awk '
  /Name: / { name = $2; sites[name]++ }
  /Semaphore: / { if (!((name, $NF) in seen)) { seen[name, $NF] = 1; semaphores[name]++ } }
  END { for (name in sites) print name, "sites:", sites[name], "semaphores:", semaphores[name] }' |
  LC_ALL=C sort
