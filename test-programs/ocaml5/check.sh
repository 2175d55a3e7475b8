# Runs the programs without a tool, as PIE and as non-PIE: no probe is enabled.
set -eu

for program in domains effects events fibers moving numbered suspended; do
  readelf -h $program.exe | grep -q 'Type: *DYN ' || echo "$program.exe is not PIE"
  readelf -h ${program}_nopie.exe | grep -q 'Type: *EXEC ' || echo "${program}_nopie.exe is PIE"
done

for suffix in .exe _nopie.exe; do
  printf 'report\nnonsense\n' | ./domains$suffix 2 2
  printf 'report\n' | ./domains$suffix 3 1 collect
  printf 'generations 2 3 10\n' | ./domains$suffix 0
  printf 'run\npark\nresume\nnonsense\n' | ./effects$suffix
  printf 'work 2 3\nnonsense\n' | ./events$suffix
  printf 'overlapping 2\nnested 2\ngrowing 1\n' | ./fibers$suffix
  printf 'moving 20\n' | ./moving$suffix | sed 's/^\(moving [0-9]*\) [0-9]* [0-9]*$/\1 N/'
done | sed 's/ready pid=[0-9]*/ready pid=N/;s/rounds=[0-9]*/rounds=N/'
