//! Recognises the functions that ppx_probe makes for probe sites. Each has the name of the function that the site is in,
//! so that tools show `Server.handle`, and the code
//!
//! ```text
//! b8 01 00 00 00       mov  $1,%eax
//! 90 3d xx xx xx xx    the site; 90 e8 … if the probe is enabled from the start
//! c3                   ret
//! ```
//!
//! The sites of OxCaml are in the functions themselves.

use crate::address::FileAddr;
use crate::elf::ElfFile;
use crate::elf::table::{Generation, each_placed_note};

/// How many bytes of such a function are before its site.
const BEFORE_SITE: u64 = 5;

const LEN: usize = 12;

/// Returns where the OCaml probes in the notes of a file have sites that may be in such functions: the address at which
/// the function would begin. Malformed notes are left out.
pub(super) fn possible_starts(elf: &ElfFile) -> Vec<FileAddr> {
    let mut starts = Vec::new();
    // Notes after a malformed one are not read; what needs them says so.
    let _ = each_placed_note(elf, |note, shift| {
        if note.pc != 0 && Generation::of_provider(note.provider).is_some() {
            let site = note.pc.wrapping_add(shift);
            starts.push(FileAddr(site.wrapping_sub(BEFORE_SITE)));
        }
        Ok(())
    });
    starts
}

/// Returns whether a function of `len` bytes at `start`, where a probe may have its site, is such a function.
pub(super) fn is_of_site(elf: &ElfFile, start: FileAddr, len: u64) -> bool {
    // gcc appends an instruction that is never executed (ud2).
    const MAX_LEN: u64 = 16;
    let mut code = [0; LEN];
    (LEN as u64..=MAX_LEN).contains(&len)
        && elf.read_address(start, &mut code).is_some()
        && matches!(
            code,
            [0xb8, 1, 0, 0, 0, 0x90, 0x3d | 0xe8, _, _, _, _, 0xc3]
        )
}
