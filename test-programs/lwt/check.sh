# check.sh: checks the programs without a tool: linked both ways.
set -eu

readelf -h lwt_requests.exe | grep -q 'Type: *DYN ' || echo "lwt_requests.exe is not PIE"
readelf -h lwt_requests_nopie.exe | grep -q 'Type: *EXEC ' || echo "lwt_requests_nopie.exe is PIE"

for suffix in .exe _nopie.exe; do
  printf 'flight 3 4\nmoving 2\nnonsense\n' | ./lwt_requests$suffix
done | sed 's/ready pid=[0-9]*/ready pid=N/;s,\(.* [0-9]*\) [0-9]* [0-9]*$,\1 N,'
