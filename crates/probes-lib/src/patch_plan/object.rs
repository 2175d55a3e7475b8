//! What a planner is made of, read from an ELF file: its code, its functions and their cold parts, and the
//! addresses of code that its data hold.

use crate::address::{CodeRange, FileAddr};
use crate::elf::functions::{FunctionTable, is_part};
use crate::elf::{ElfFile, Linking, SymbolTable};
use crate::error::{ElfDefect, Error, FileError, Result};
use crate::patch_plan::PatchPlanner;
use crate::patch_plan::code::Code;

/// Of all segments together, in bytes. The largest programs have 200 MB of code and data.
const MAX_LEN: u64 = 512 << 20;

impl PatchPlanner {
    /// Reads the code of a file, whose functions are those of `table`.
    ///
    /// # Errors
    ///
    /// If the file cannot be read, or is damaged.
    pub(crate) fn read(elf: &ElfFile, table: &FunctionTable) -> Result<PatchPlanner> {
        let mut code = Code::default();
        let mut len = 0_u64;
        for segment in elf.loaded() {
            len = len.saturating_add(segment.file_len);
            if len > MAX_LEN {
                let what = "the code";
                let defect = ElfDefect::TooLarge { what, size: len };
                return Err(Error::of_file(elf.path(), FileError::Elf(defect)));
            }
            let bytes = elf.read_segment(&segment)?;
            code.add(segment.start, bytes, segment.executable);
        }
        let mut extra = relocated(elf);
        if elf.linking() == Linking::Fixed {
            // There are no relocations: any word may be the address of a label.
            code.set_fixed();
            extra.extend(code.data_words());
        }
        let mut parts = Vec::new();
        for symbols in [SymbolTable::Static, SymbolTable::Dynamic] {
            let (symbols, names) = elf.symbol_table(symbols)?;
            for symbol in symbols {
                extra.push(FileAddr(symbol.st_value));
                let name = names.get(symbol.st_name..).unwrap_or_default();
                let name = &name[..memchr::memchr(0, name).unwrap_or(0)];
                if symbol.is_function() && is_part(name) {
                    parts.push(CodeRange {
                        start: FileAddr(symbol.st_value),
                        len: symbol.st_size,
                    });
                }
            }
        }
        let functions: Vec<CodeRange> = table.functions().map(|it| it.range()).collect();
        Ok(PatchPlanner::new(code, &functions, &parts, extra))
    }
}

/// Returns the addresses that the dynamic loader adds the load bias to: elf(5), `Elf64_Rela`, and the generic ABI's
/// `SHT_RELR`.
fn relocated(elf: &ElfFile) -> Vec<FileAddr> {
    /// Offset, type and symbol, addend.
    const RELA_LEN: usize = 24;
    let mut addresses = Vec::new();
    let words = elf.whole_section(".rela.dyn").unwrap_or_default();
    for rela in words.chunks_exact(RELA_LEN) {
        addresses.push(FileAddr(word(&rela[16..])));
    }
    // Addresses of words, each followed by bitmaps of which of the next 63 words are relocated as well.
    let mut next = 0_u64;
    let words = elf.whole_section(".relr.dyn").unwrap_or_default();
    let mut relocate = |at: u64| {
        let mut bytes = [0; 8];
        let segment = elf.loaded().find(|it| it.holds_in_file(FileAddr(at), 8));
        let read = segment.map(|it| elf.read_loaded(&it, FileAddr(at), &mut bytes));
        if let Some(Ok(())) = read {
            addresses.push(FileAddr(u64::from_le_bytes(bytes)));
        }
    };
    for entry in words.chunks_exact(8).map(word) {
        if entry % 2 == 0 {
            relocate(entry);
            next = entry.wrapping_add(8);
            continue;
        }
        for bit in (1..64).filter(|bit| entry & 1 << bit != 0) {
            relocate(next.wrapping_add(8 * (bit - 1)));
        }
        next = next.wrapping_add(8 * 63);
    }
    addresses
}

fn word(bytes: &[u8]) -> u64 {
    let first = bytes.first_chunk();
    first.map_or(0, |word| u64::from_le_bytes(*word))
}
