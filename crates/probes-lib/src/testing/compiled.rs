//! Programs that tests compile.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use test_support::Scratch;

/// Compiles or assembles a program from one source file of this name.
pub(crate) fn compile(scratch: &Scratch, name: &str, text: &str, flags: &[&str]) -> PathBuf {
    let (source, program) = (scratch.file(name), scratch.file("program"));
    fs::write(&source, text).unwrap();
    let mut gcc = Command::new("gcc");
    gcc.args(flags).arg("-o").arg(&program).arg(&source);
    assert!(gcc.status().unwrap().success());
    program
}

/// Assembles a program whose only unit says by an index into `.debug_addr` where it begins (DW_FORM_addrx, DWARF 5), as clang
/// writes; line 2 of indexed.c begins at one place. If the unit `is_split`, the rest of it is in another file.
pub(crate) fn unit_with_indexed_address(scratch: &Scratch, is_split: bool) -> PathBuf {
    // DW_TAG_skeleton_unit, DW_UT_skeleton and its id; else DW_TAG_compile_unit and DW_UT_compile.
    let (tag, unit, id) = if is_split {
        (0x4a, 4, ".quad 0x1234")
    } else {
        (0x11, 1, "")
    };
    let text = format!(
        r#".file 0 "/tmp" "indexed.c"
.file 1 "indexed.c"
.globl _start
.type _start,@function
_start:
.loc 1 1
nop
.loc 1 2
nop
.Lend:
.size _start,.-_start
.section .debug_abbrev,"",@progbits
.byte 1,{tag},0
.byte 3,8, 0x1b,8, 0x10,0x17, 0x11,0x1b, 0x12,6
.uleb128 0x73
.byte 0x17
.uleb128 0x76
.byte 8
.byte 0,0,0
.section .debug_addr,"",@progbits
.long 2f-1f
1: .short 5
.byte 8,0
.Laddresses:
.quad _start
2:
.section .debug_info,"",@progbits
.long 2f-1f
1: .short 5
.byte {unit},8
.long .debug_abbrev
{id}
.byte 1
.asciz "indexed.c"
.asciz "/tmp"
.long .debug_line
.byte 0
.long .Lend-_start
.long .Laddresses
.asciz "rest.dwo"
2:
"#
    );
    compile(
        scratch,
        "indexed.s",
        &text,
        &["-nostdlib", "-static", "-no-pie"],
    )
}
