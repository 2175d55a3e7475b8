#!/bin/sh
# Makes corpus/ from the fixtures: their note sections, and the smallest programs that can be linked
# from their sources. Run it in this folder, after `dune build ./test-programs/fixtures`.

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
gcc -nostdlib -static -Wl,-N,--build-id=none,-e,0 -o corpus/functions/symbols -x assembler - <<-END
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
strip -s -o corpus/functions/frametable corpus/functions/symbols

# Code of the first functions of a fixture, and of a jump through a table, with its functions' ranges before it.
mkdir -p corpus/code
objcopy -O binary --only-section=.text "$built/gen_ocaml_2.pie" corpus/code/text
{ printf '\004\000\020\020\020\040\060\000\200'; head -c 800 corpus/code/text; } >corpus/code/gen_ocaml_2
rm corpus/code/text
printf '\001\000\010\110\215\025\371\017\000\000\110\143\004\202\110\001\320\377\340\220\220\270\001\000\000\000\303\270\002\000\000\000\303\314\314\022\360\377\377' >corpus/code/jump_table
