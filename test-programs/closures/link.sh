# link.sh OCAMLOPT SOURCE STUBS FLAG OUTPUT: links a program whose sites lie between its OCaml units: those of
# an archive come before those of the standard library, and C objects in the archive, too.
set -e
ocamlopt=$1 source=$(realpath "$2") stubs=$(realpath "$3") flag=$4 output=$(realpath "$5")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"$ocamlopt" -c -o closures.cmx -impl "$source"
"$ocamlopt" -a -o units.cmxa closures.cmx
cp "$stubs" stubs.c
"$ocamlopt" -c stubs.c
ar qs units.a stubs.o
"$ocamlopt" -linkall units.cmxa -ccopt "$flag" -o "$output"
