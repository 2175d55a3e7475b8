//! Tells apart the two layouts of semaphores that notes of the provider `ocaml` may name.
//!
//! ```text
//! compiler   symbol                          bytes
//! 4.11.0     caml<Unit>__semaphore_<name>    2   one counter, of OCaml and of SystemTap
//! 4.11.1     caml_probes_semaphore_<name>    4   SystemTap's counter, OCaml's counter
//! ```
//!
//! The notes of both are the same. A semaphore has
//!
//! - the length that its symbol says;
//! - 4 bytes if a note of a later generation names it, too: objects of two compilers share the symbol;
//! - 2 bytes if the next semaphore, of any provider, or the end of the section is nearer than 4;
//! - 4 bytes if it has no symbol, but the units of the file export theirs: compilers make the symbols of
//!   2 bytes as visible as those of the unit, and hide those of 4;
//! - 4 bytes if the section has more than one semaphore, and they fill it with 4 bytes each. (One
//!   alone may have 2 bytes, followed by a semaphore that no note names.)
//!
//! If none of these holds, or two of the first three contradict each other, the file is refused:
//! the wrong choice would change the counter of SystemTap, or of another probe.

use std::collections::{BTreeMap, BTreeSet};

use crate::address::FileAddr;
use crate::elf::ElfFile;
use crate::elf::symbols::SymbolTable;
use crate::error::{Error, FileError, Result};

use super::{COUNTER_LEN, Generation};

pub(super) struct FoundSemaphore {
    pub(super) name: Box<str>,
    pub(super) counter: FileAddr,
    pub(super) generation: Generation,
}

/// Length of a semaphore of two counters, in bytes.
const PAIR_LEN: u64 = 2 * COUNTER_LEN;

/// What is known of a semaphore that notes of the provider `ocaml` name.
#[derive(Default)]
struct Evidence {
    name: Box<str>,
    /// Something says that it has 2 bytes.
    is_counter: bool,
    /// Something says that it has 4 bytes.
    is_pair: bool,
}

/// Adjusts the counters of the provider `ocaml`, which are given as if each were its whole semaphore.
/// `foreign` are the semaphores of other providers in `section`, which holds those of OCaml, too.
///
/// # Errors
///
/// If the file does not show the layout of a semaphore, or its symbols cannot be read.
pub(super) fn adjust(
    elf: &ElfFile,
    found: &mut [FoundSemaphore],
    foreign: &[FileAddr],
    section: (FileAddr, u64),
) -> Result<()> {
    let mut all: BTreeSet<u64> = foreign.iter().map(|semaphore| semaphore.0).collect();
    let mut evidence = BTreeMap::<u64, Evidence>::new();
    let (oldest, later): (Vec<_>, Vec<_>) =
        (found.iter()).partition(|one| one.generation == Generation::Ocaml);
    for semaphore in oldest {
        let one = evidence.entry(semaphore.counter.0).or_default();
        one.name = semaphore.name.clone();
    }
    if evidence.is_empty() {
        return Ok(());
    }
    all.extend(evidence.keys());
    for semaphore in later {
        // Any address may be in a file.
        let offset = semaphore.generation.counter_offset();
        let start = semaphore.counter.0.wrapping_sub(offset);
        all.insert(start);
        if let Some(one) = evidence.get_mut(&start) {
            one.is_pair = true;
        }
    }
    let end = section.0.0.saturating_add(section.1);
    for (&start, one) in &mut evidence {
        let next = all.range(start.saturating_add(1)..).next().copied();
        let end = next.unwrap_or(end).min(end);
        one.is_counter = end.saturating_sub(start) < PAIR_LEN;
    }
    let has_exported_units = read_symbols(elf, &mut evidence)?;
    let fills_by_pairs = all.len() > 1
        && foreign.is_empty()
        && evidence.values().all(|one| !one.is_counter)
        && (all.iter().copied()).eq((section.0.0..end).step_by(PAIR_LEN as usize));
    for (&start, one) in &mut evidence {
        match (one.is_counter, one.is_pair) {
            (false, false) if has_exported_units || fills_by_pairs => one.is_pair = true,
            (false, false) | (true, true) => {
                let (name, address) = (one.name.to_string(), FileAddr(start));
                let kind = FileError::UnknownLayout { name, address };
                return Err(Error::of_file(elf.path(), kind));
            }
            _ => {}
        }
    }
    for semaphore in found {
        let is_oldest = semaphore.generation == Generation::Ocaml;
        let evidence = evidence.get(&semaphore.counter.0).filter(|_| is_oldest);
        if evidence.is_some_and(|one| one.is_pair) {
            semaphore.counter.0 += COUNTER_LEN;
        }
    }
    Ok(())
}

/// Adds what symbols say; returns whether units of OCaml export theirs.
fn read_symbols(elf: &ElfFile, evidence: &mut BTreeMap<u64, Evidence>) -> Result<bool> {
    let mut has_exported_units = false;
    for table in [SymbolTable::Static, SymbolTable::Dynamic] {
        elf.each_symbol(table, |symbol, name| {
            let unit = name.strip_prefix(b"caml");
            let is_dynamic = table == SymbolTable::Dynamic;
            has_exported_units |=
                is_dynamic && unit.is_some_and(|unit| unit.ends_with(b"__code_begin"));
            let Some(one) = evidence.get_mut(&symbol.st_value) else {
                return;
            };
            let name = one.name.as_bytes();
            let before = unit.and_then(|unit| unit.strip_suffix(name));
            match before {
                Some(b"_probes_semaphore_") => one.is_pair = true,
                Some(before) => one.is_counter |= before.ends_with(b"__semaphore_"),
                None => {}
            }
        })?;
    }
    Ok(has_exported_units)
}
