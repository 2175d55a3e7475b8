# link.sh OCAMLOPT: links unit.ml without its C file, and prints the symbols that the linker misses.
set -u
ocamlopt=$1

if LC_ALL=C "$ocamlopt" -ppx "./ppx.exe -as-ppx" unit.ml -o unit.exe 2>errors.log; then
  echo "it was linked"
fi
grep -o 'undefined reference to .*' errors.log | tr -d "\`'" | LC_ALL=C sort -u
