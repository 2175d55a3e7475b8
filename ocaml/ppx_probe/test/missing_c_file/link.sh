# link.sh OCAMLOPT PPX_PROBE_STUBS: links unit.ml and other.ml, first without their C file, then with that of unit.ml only;
# prints the symbols that the linker misses.
set -u
ocamlopt=$1 stubs=$2

link() {
  if LC_ALL=C "$ocamlopt" -ppx "./ppx.exe -as-ppx" unit.ml other.ml "$@" -o unit.exe 2>errors.log; then
    echo "it was linked"
  fi
  grep -o 'undefined reference to .*' errors.log | tr -d "\`'" | LC_ALL=C sort -u
}

link
echo "with the C file of unit.ml:"
"$stubs" -o unit_probes.c unit.ml
link unit_probes.c
