# check.sh DIR: checks the programs without a tool: linked both ways, with only
# those probes on that start enabled.
set -eu
cd "$1"

for program in terminating service handlers init threads newborn overflow interleaved requests waiting shown compound parked twolibs many calls backtraces stacks; do
  readelf -h $program.exe | grep -q 'Type: *DYN ' || echo "$program.exe is not PIE"
  readelf -h ${program}_nopie.exe | grep -q 'Type: *EXEC ' || echo "${program}_nopie.exe is PIE"
done

for suffix in .exe _nopie.exe; do
  ./terminating$suffix
  ./service$suffix 1 2
  for program in handlers init compound twolibs many; do
    printf 'run\nnonsense\n' | ./$program$suffix
  done
  printf 'report\nquit\n' | ./threads$suffix 2
  printf 'report\n' | ./parked$suffix 2
  printf 'report\n' | ./waiting$suffix
  printf 'overflow 0\noverflow 3\n' | ./overflow$suffix
  printf 'wait\nlonger\n' | ./backtraces$suffix
  printf 'run 3 10\nrun 1 2\nrun 1\n' | ./calls$suffix
  printf 'tasks 2\nspans 2\n' | ./interleaved$suffix
  printf 'start 1 3\nstop\nflight 3 5\nmoving 2\n' | ./requests$suffix | sed 's,\(.* [0-9]*\) [0-9]* [0-9]*$,\1 N,'
  printf 'run\nhit 2\nhit texts 3\ncollect 2\nthreads 3 100\nhit no 1\n' | ./shown$suffix
done | sed 's/ready pid=[0-9]*/ready pid=N/;s/iterations=[0-9]*/iterations=N/;s/rounds=[0-9]*/rounds=N/;s,_short=0/0/[0-9]*,_short=0/0/N,g'
