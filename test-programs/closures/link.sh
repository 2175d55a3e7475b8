# link.sh OCAMLOPT SOURCE STUBS FLAG OUTPUT: links a program whose sites, which are in a C object,
# lie between its OCaml units: the linker puts all objects of an archive, OCaml and C, before the
# standard library.
set -e
ocamlopt=$1 source=$(realpath "$2") stubs=$(realpath "$3") flag=$4 output=$(realpath "$5")
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
cd "$directory"
"$ocamlopt" -c -o closures.cmx -impl "$source"
"$ocamlopt" -a -o units.cmxa closures.cmx
cp "$stubs" stubs.c
"$ocamlopt" -c stubs.c
ar qs units.a stubs.o
"$ocamlopt" -linkall units.cmxa -ccopt "$flag" -o "$output"
