# build.sh README: builds the example of the README as a reader would, with the
# installed package; runs it and lists its probes with readelf and gdb.
set -eu

rm -rf example
mkdir example
awk -f extract.awk "$1"
# Isolates the reader's dune from the dune that runs this test.
unset INSIDE_DUNE DUNE_BUILD_DIR DUNE_WORKSPACE DUNE_PROFILE || true
dune build --root example ./server.exe 2>build.log || {
  cat build.log >&2
  exit 1
}
server=example/_build/default/server.exe
"$server"
readelf -n "$server" | awk '/Provider: / { provider = $2 } /Name: / { print "readelf:", provider, $2 }'
gdb -batch -nx -ex 'info probes stap' "$server" | awk '$1 == "stap" { print "gdb:", $2, $3 }'
