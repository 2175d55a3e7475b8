#!/bin/sh
# Makes corpus/ from the fixtures: their note sections, and the smallest programs that can be linked
# from their sources. Run it in this directory, after `dune build ./test-programs/fixtures`.

set -eu
sources=../test-programs/fixtures
built=../_build/default/test-programs/fixtures
mkdir -p corpus/notes corpus/elf corpus/functions

for fixture in gen_ocaml gen_ocaml_2 foreign multi_semaphore arguments \
    corrupt/note_random_bytes corrupt/note_descsz_9 corrupt/note_descsz_huge \
    corrupt/note_namesz_huge corrupt/note_strings_without_nul corrupt/note_truncated; do
    objcopy -O binary --only-section=.note.stapsdt \
        --set-section-flags .note.stapsdt=alloc \
        "$built/$fixture.pie" "corpus/notes/$(basename $fixture)"
done

# Without page alignment, symbols and the C code of the fixture.
for fixture in gen_ocaml_1 gen_ocaml_2 mixed_generations multi_semaphore prelinked; do
    seed=corpus/elf/$fixture
    gcc -nostdlib -static -Wl,-N,--build-id,-e,0,--unresolved-symbols=ignore-all \
        -o "$seed" "$sources/$fixture.S" 2>/dev/null
    strip -s -R .comment -R .note.gnu.property -R .eh_frame "$seed"
done
cp "$built"/corrupt/elf_32_bit "$built"/corrupt/elf_big_endian \
    "$built"/corrupt/elf_header_truncated corpus/elf

# A function of OCaml with its frametable, with and without its symbol.
work=$(mktemp -d)
trap 'rm -r "$work"' EXIT
cat >"$work/ocaml.s" <<-END
	.text
	.globl camlA__go_1
	.type camlA__go_1, @function
	camlA__go_1:
	.cfi_startproc
	call camlA__go_1
	1: ret
	.cfi_endproc
	.size camlA__go_1, . - camlA__go_1
	.data
	.quad 1, 1b
	.short 17, 1, 1
	.balign 4
	.long 2f - .
	.balign 8
	2: .long 3f - ., 9 << 12
	3: .long 4f - 3b
	.asciz "A.go"
	4: .asciz "a.ml"
END
gcc -nostdlib -static -Wl,-N,--build-id=none,-e,0 -o corpus/functions/symbols "$work/ocaml.s"
strip -s -o corpus/functions/frametable corpus/functions/symbols

# Code of the first functions of a fixture, and of a jump through a table, with its functions' ranges before it.
mkdir -p corpus/code
objcopy -O binary --only-section=.text "$built/gen_ocaml_2.pie" corpus/code/text
{ printf '\004\000\020\020\020\040\060\000\200'; head -c 800 corpus/code/text; } >corpus/code/gen_ocaml_2
rm corpus/code/text
printf '\001\000\010\110\215\025\371\017\000\000\110\143\004\202\110\001\320\377\340\220\220\270\001\000\000\000\303\270\002\000\000\000\303\314\314\022\360\377\377' >corpus/code/jump_table

# Files as their sections: code of C with its unwind table and lines; that of OCaml with its frametable, and with its
# symbols or without.
mkdir -p corpus/sections corpus/names
link="gcc -nostdlib -static -Wl,-N,--build-id=none,-e,0,-Ttext=0x400000,-Tdata=0x420000,--section-start=.eh_frame=0x410000"

# pack SEED FILE: two bytes for the length of each section but the last one, then the sections.
pack() {
    printf '\000' >"$1"
    : >"$work/all"
    for section in .text .eh_frame .data .rela.dyn .symtab .strtab .debug_line .debug_info .debug_abbrev; do
        # Offset and length, in hexadecimal digits.
        place=$(readelf -SW "$2" | sed -n "s/.* $section  *[A-Z_]*  *[0-9a-f]* \([0-9a-f]*\) \([0-9a-f]*\) .*/\1 \2/p")
        offset=$((0x0${place% *}))
        tail -c +$((offset + 1)) "$2" | head -c $((0x0${place#* })) >"$work/section"
        len=$(wc -c <"$work/section")
        if [ $section != .debug_abbrev ]; then
            # shellcheck disable=SC2059
            printf "$(printf '\\%03o\\%03o' $((len % 256)) $((len / 256)))" >>"$1"
        fi
        cat "$work/section" >>"$work/all"
    done
    cat "$work/all" >>"$1"
}

printf '%s\n' 'static int g(int n) { return n > 3 ? n * 7 : n; }' 'int f(int n) {' '  int sum = 0;' \
    '  for (int i = 0; i < n; i++) sum += g(i);' '  return sum;' '}' >"$work/a.c"
(cd "$work" && $link -Os -gdwarf-4 -o c a.c)
strip -K f "$work/c" -o "$work/stripped" --keep-section=.debug_line --keep-section=.debug_info --keep-section=.debug_abbrev
pack corpus/sections/c "$work/stripped"
$link -o "$work/ocaml" "$work/ocaml.s"
pack corpus/sections/ocaml "$work/ocaml"
strip -s "$work/ocaml"
pack corpus/sections/stripped "$work/ocaml"

name() { printf '%s' "$2" >"corpus/names/$1"; }
name ocaml 'camlStdlib__List__map_480'
name operator 'camlA__$2b$2b_7'
name ocaml_5 'camlLib__Foo.bar_269'
name oxcaml '_CamlU3FooM3BarF3baz'
name rust '_RNvMs_NtCs1234_7mycrate3fooNtB4_3Bar3baz'
name rust_legacy '_ZN4core3fmt9Formatter3pad17h0123456789abcdefE'
name cpp '_ZNSt6vectorIiSaIiEE9push_backEOi'
