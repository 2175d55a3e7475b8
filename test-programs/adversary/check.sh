# Runs the programs without a tool, as PIE and as non-PIE: each has to print a good verdict.
# Those whose arguments are files of other directories (self, loading, changes) are run by the tests.
set -eu

for program in signals systhreads children limits environment self memprof loading callbacks values naked changes requests; do
  readelf -h $program.exe | grep -q 'Type: *DYN ' || echo "$program.exe is not PIE"
  readelf -h ${program}_nopie.exe | grep -q 'Type: *EXEC ' || echo "${program}_nopie.exe is PIE"
done

alone() {
  "$@" </dev/null || echo "$1 exits with $?"
}

for suffix in .exe _nopie.exe; do
  for program in signals systhreads children memprof callbacks values naked requests; do
    alone ./$program$suffix
  done
  for mode in address_space data locked; do
    alone ./limits$suffix $mode
  done
  alone ./environment$suffix /dev/null
done | sed 's/ready pid=[0-9]*/ready pid=N/'
