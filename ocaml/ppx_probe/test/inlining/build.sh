# build.sh OCAMLOPT STUBS: builds main.exe, runs it, and prints which units call
# the site, which is in unit.ml.
set -eu
ocamlopt=$1 stubs=$2

"$stubs" -o probes.c unit.ml
"$ocamlopt" -O3 -g -ppx "./ppx.exe -as-ppx" probes.c unit.ml main.ml -o main.exe 2>build.log || {
  cat build.log >&2
  exit 1
}
./main.exe

# Labels are camlUnit__name_12 up to OCaml 5.0, camlUnit.name_12 later.
objdump -d --no-show-raw-insn main.exe | awk '
  /^[0-9a-f]+ <caml/ { caller = $2; sub(/^<caml/, "", caller); sub(/(\.|__[a-z]).*/, "", caller); next }
  /<camlUnit__hit_[0-9]+>/ { print "the site is used by", caller }' | LC_ALL=C sort -u
