//! [`ValuePages`]: the table by which trampolines know whether memory that a value of OCaml points to can be read.
//! Only reads files.
//!
//! A value of OCaml 4 may be an address outside of its heap (a *naked pointer*), of memory that may be unmapped at any
//! moment. Its runtime has a hash table of the pages of its values, which a trampoline in OCaml code can rely on: it
//! only changes while a thread has the lock of the runtime, and a thread that executes OCaml code has that lock. The
//! table is found in the code of the function that looks pages up, which a runtime has unless it was configured without
//! naked pointers:
//!
//! ```text
//! caml_page_table_lookup   mov  shift(%rip), %ecx       runtime/memory.c of OCaml 4
//!                          mov  $0x9e3779b97f4a7c16, %rax
//!                          mov  entries(%rip), %rsi
//!                          mov  mask(%rip), %r8
//! ```

use iced_x86::{Decoder, DecoderOptions, Instruction, OpKind, Register};
use memchr::memmem;

use crate::address::{FileAddr, LiveAddr, LoadBias};
use crate::elf::ElfFile;
use crate::elf::symbols::SymbolTable;

/// The table that says which memory of values can be read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) enum ValuePages {
    /// The table of readable pages, which the observer writes
    /// ([`ReadablePages`](super::layout::readable_pages::ReadablePages)).
    #[default]
    TableOfObserver,
    /// The one of the OCaml runtime, [`runtime_pages`], at this address.
    TableOfRuntime(LiveAddr),
    /// The runtime has one, which was not found: nothing is read.
    NoTable,
}

/// The table of the runtime, `struct page_table`: offsets in bytes. An entry has the address of a page, and in its low
/// bits what the page holds; 0 ends a search. The entry of a page is the one at its hash, or after it.
pub(crate) mod runtime_pages {
    /// Four bytes: by how many bits the product of the number of a page and [`HASH_FACTOR`] is shifted.
    pub(crate) const SHIFT: u64 = 8;
    /// The number of entries minus one.
    pub(crate) const MASK: u64 = 16;
    /// The address of the entries.
    pub(crate) const ENTRIES: u64 = 32;
    pub(crate) const HASH_FACTOR: u64 = 0x9e37_79b9_7f4a_7c16;
    /// The bits of a page of values: on the heap, in the minor heap, or static (caml/address_class.h).
    pub(crate) const OF_VALUES: u32 = 1 | 2 | 4;
}

impl ValuePages {
    /// Returns the table of a process that has loaded these files.
    pub(crate) fn of<'e>(files: impl Iterator<Item = (&'e ElfFile, LoadBias)>) -> ValuePages {
        let mut found = files.filter_map(|(elf, bias)| {
            let table = match lookup_function(elf) {
                Some(lookup) => code_at(elf, lookup).and_then(|code| table_in(&code, lookup)),
                // Its runtime has no such function, or it has no runtime.
                None if has_static_symbols(elf) => return None,
                None => table_without_symbols(elf)?,
            };
            Some(table.map_or(ValuePages::NoTable, |table| {
                ValuePages::TableOfRuntime(bias.live(table))
            }))
        });
        match (found.next(), found.next()) {
            (None, _) => ValuePages::TableOfObserver,
            (Some(only), None) => only,
            // It is not known which runtime a value belongs to.
            (Some(_), Some(_)) => ValuePages::NoTable,
        }
    }
}

/// Returns the address of the function that looks pages up, if the file has it.
fn lookup_function(elf: &ElfFile) -> Option<FileAddr> {
    // ocamlopt makes most executables export their symbols, and strip(1) keeps dynamic symbols.
    let mut tables = [SymbolTable::Static, SymbolTable::Dynamic].into_iter();
    tables.find_map(|table| {
        let symbols = elf.symbols(table).ok().flatten()?;
        let [found] = symbols.find(["caml_page_table_lookup"]).ok()?;
        let mut defined = found.iter().map(|symbol| symbol.address);
        defined.find(|address| address.0 != 0)
    })
}

fn has_static_symbols(elf: &ElfFile) -> bool {
    matches!(elf.symbols(SymbolTable::Static), Ok(Some(_)))
}

/// Returns the address of the table in a file without symbols, found by the factor of the hash in its code; `None` if its code
/// does not have that factor, and so no table; `Some(None)` if it has, and the table is not found.
fn table_without_symbols(elf: &ElfFile) -> Option<Option<FileAddr>> {
    /// How many bytes are read at a time.
    const PIECE: u64 = 1 << 20;
    let mov = [&[0x48, 0xb8], &runtime_pages::HASH_FACTOR.to_le_bytes()[..]].concat();
    let mut has_factor = false;
    for segment in elf.loaded().filter(|it| it.executable) {
        let end = segment.start.0.saturating_add(segment.file_len);
        let mut at = segment.start.0;
        while at < end {
            let mut piece = vec![0; PIECE.min(end - at) as usize];
            if elf.read_loaded(&segment, FileAddr(at), &mut piece).is_err() {
                break;
            }
            for found in memmem::find_iter(&piece, &mov) {
                has_factor = true;
                let address = FileAddr(at + found as u64);
                let table = table_around(elf, address);
                if table.is_some() {
                    return Some(table);
                }
            }
            if piece.len() < mov.len() {
                break;
            }
            // The next piece begins with what may be the beginning of the instruction.
            at += (piece.len() - (mov.len() - 1)) as u64;
        }
    }
    has_factor.then_some(None)
}

/// Returns the address of the table, from the code of the function that loads the factor of the hash at `factor`; the instruction
/// before it reads the first field.
fn table_around(elf: &ElfFile, factor: FileAddr) -> Option<FileAddr> {
    /// The lengths of an instruction that reads a word at a fixed address: with `%rip`, and without.
    const LENGTHS: [u64; 2] = [6, 7];
    LENGTHS.into_iter().find_map(|len| {
        let at = FileAddr(factor.0.checked_sub(len)?);
        table_in(&code_at(elf, at)?, at)
    })
}

/// Returns the code at an address of a file: as much as the function can have.
fn code_at(elf: &ElfFile, address: FileAddr) -> Option<Vec<u8>> {
    const LONGEST: u64 = 256;
    let segment = elf
        .loaded()
        .find(|it| it.executable && it.holds_in_file(address, 1))?;
    let end = segment.start.0.checked_add(segment.file_len)?;
    let mut code = vec![0; LONGEST.min(end.checked_sub(address.0)?) as usize];
    elf.read_loaded(&segment, address, &mut code).ok()?;
    Some(code)
}

/// Returns the address of the table, from the code of the function: it multiplies by the factor of the hash, and reads
/// the three fields.
fn table_in(code: &[u8], at: FileAddr) -> Option<FileAddr> {
    let decoder = Decoder::with_ip(64, code, at.0, DecoderOptions::NONE);
    let instructions: Vec<Instruction> = decoder
        .into_iter()
        .take_while(|it| !it.is_invalid())
        .collect();
    let has_factor = |it: &Instruction| {
        it.op_kinds().any(|kind| kind == OpKind::Immediate64)
            && it.immediate64() == runtime_pages::HASH_FACTOR
    };
    if !instructions.iter().any(has_factor) {
        return None;
    }
    let read: Vec<u64> = instructions.iter().filter_map(fixed_address).collect();
    let has = |address: Option<u64>| address.is_some_and(|address| read.contains(&address));
    let mut tables = read
        .iter()
        .filter_map(|shift| shift.checked_sub(runtime_pages::SHIFT));
    let is_table = |table: &u64| {
        has(table.checked_add(runtime_pages::MASK))
            && has(table.checked_add(runtime_pages::ENTRIES))
    };
    tables.find(is_table).map(FileAddr)
}

/// Returns the address of the memory that an instruction refers to, if that is the same each time.
fn fixed_address(instruction: &Instruction) -> Option<u64> {
    if instruction.is_ip_rel_memory_operand() {
        return Some(instruction.ip_rel_memory_address());
    }
    let is_memory = instruction.op_kinds().any(|kind| kind == OpKind::Memory);
    let is_fixed = instruction.memory_base() == Register::None
        && instruction.memory_index() == Register::None
        && instruction.segment_prefix() == Register::None;
    (is_memory && is_fixed).then(|| instruction.memory_displacement64())
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;
    use std::process::Command;

    use test_support::{Scratch, program_forms};

    use super::*;

    /// The code of Debian's OCaml 4.13.1.
    const LOOKUP: [u8; 0x25] = [
        0x48, 0x89, 0xfa, 0x8b, 0x0d, 0x7f, 0x0d, 0x07, 0x00, 0x48, 0xb8, 0x16, 0x7c, 0x4a, 0x7f,
        0xb9, 0x79, 0x37, 0x9e, 0x48, 0x8b, 0x35, 0x86, 0x0d, 0x07, 0x00, 0x48, 0xc1, 0xea, 0x0c,
        0x4c, 0x8b, 0x05, 0x6b, 0x0d, 0x07, 0x00,
    ];

    #[test]
    fn table_is_found_in_the_code() {
        assert_eq!(
            table_in(&LOOKUP, FileAddr(0x94160)),
            Some(FileAddr(0x0010_4ee0))
        );
    }

    #[test]
    fn stripped_programs_have_the_same_table() {
        let scratch = Scratch::new();
        for (index, program) in program_forms("service").into_iter().enumerate() {
            let stripped: PathBuf = scratch.file(&format!("stripped{index}"));
            let mut objcopy = Command::new("objcopy");
            objcopy.arg("--strip-all").arg(&program).arg(&stripped);
            assert!(objcopy.status().unwrap().success());
            let table = |path: &PathBuf| {
                let elf = ElfFile::open(path).unwrap();
                let lookup = lookup_function(&elf);
                let by_name = lookup.and_then(|at| table_in(&code_at(&elf, at)?, at));
                (
                    by_name,
                    table_without_symbols(&elf),
                    has_static_symbols(&elf),
                )
            };
            let (by_name, by_code, has_symbols) = table(&program);
            assert!(has_symbols);
            // OCaml 5 has none.
            assert_eq!(by_code, by_name.map(Some), "{}", program.display());
            let (_, of_stripped, has_symbols) = table(&stripped);
            assert!(!has_symbols);
            assert_eq!(of_stripped, by_code, "{}", stripped.display());
        }
    }

    #[test]
    fn other_code_has_no_table() {
        let other_factor = LOOKUP.map(|byte| if byte == 0x7c { 0x7d } else { byte });
        assert_eq!(table_in(&other_factor, FileAddr(0x94160)), None);
        assert_eq!(table_in(&LOOKUP[..0x1e], FileAddr(0x94160)), None);
        assert_eq!(table_in(&[], FileAddr(0)), None);
    }
}
