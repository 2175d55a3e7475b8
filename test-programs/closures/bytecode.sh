# bytecode.sh OCAMLC SOURCE STUBS OUTPUT: links a program in bytecode with its runtime.
set -e
ocamlc=$1 source=$(realpath "$2") stubs=$(realpath "$3") output=$(realpath "$4")
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
cd "$directory"
cp "$stubs" stubs.c
"$ocamlc" -c stubs.c
"$ocamlc" -c -o closures.cmo -impl "$source"
"$ocamlc" -custom closures.cmo stubs.o -o "$output"
