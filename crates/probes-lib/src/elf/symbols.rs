//! Symbols of a file's own table (`.symtab`), local ones included, looked up by name, with their lengths.

use std::cell::OnceCell;

use goblin::elf::Sym;
use goblin::elf::sym::sym64::SIZEOF_SYM;

use crate::address::FileAddr;
use crate::elf::{CTX, ElfFile};

/// A function or variable of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Symbol {
    pub(crate) address: FileAddr,
    /// In bytes.
    pub(crate) len: u64,
}

/// The symbols of a file. The table itself is read when a name is found in its strings: most files have none
/// of those that are looked for.
pub(crate) struct Symbols<'e> {
    elf: &'e ElfFile,
    strings: Vec<u8>,
    table: OnceCell<Vec<Sym>>,
}

impl ElfFile {
    /// Returns the symbols of the file; `None` if it has none that can be read: it may be stripped.
    pub(crate) fn symbols(&self) -> Option<Symbols<'_>> {
        Some(Symbols {
            elf: self,
            strings: self.whole_section(".strtab")?,
            table: OnceCell::new(),
        })
    }
}

impl Symbols<'_> {
    /// Returns the symbols of each name that the file defines.
    pub(crate) fn find<const N: usize>(&self, names: [&str; N]) -> [Vec<Symbol>; N] {
        let places = names.map(|name| places_of(&self.strings, name));
        let mut found = [const { Vec::new() }; N];
        if places.iter().all(Vec::is_empty) {
            return found;
        }
        // What cannot be read has no symbols.
        let read = || defined(&self.elf.whole_section(".symtab").unwrap_or_default());
        for symbol in self.table.get_or_init(read) {
            for (found, places) in found.iter_mut().zip(&places) {
                if places.contains(&symbol.st_name) {
                    found.push(Symbol {
                        address: FileAddr(symbol.st_value),
                        len: symbol.st_size,
                    });
                }
            }
        }
        found
    }

    /// Returns whether the name of some symbol may contain `part`.
    pub(crate) fn has_name_with(&self, part: &str) -> bool {
        memchr::memmem::find(&self.strings, part.as_bytes()).is_some()
    }

    /// Returns whether the name of some symbol may end with `end`.
    pub(crate) fn has_name_ending(&self, end: &str) -> bool {
        !places_of(&self.strings, end).is_empty()
    }
}

/// Parses a symbol table, elf(5); returns the symbols that the file defines.
pub(super) fn defined(table: &[u8]) -> Vec<Sym> {
    let mut symbols = Sym::parse(table, 0, table.len() / SIZEOF_SYM, CTX).unwrap_or_default();
    symbols.retain(|symbol| symbol.st_shndx != 0);
    symbols
}

/// Returns whether a `.gnu.hash` section of `len` bytes may have a name: false only if its Bloom filter says that
/// it does not. `read` reads the section from an offset.
///
/// The section is four 32-bit words (of which the third is the length of the filter in 64-bit words, the
/// fourth a shift), the filter, and the hash table itself.
pub(super) fn may_hold(
    name: &str,
    len: usize,
    read: impl Fn(usize, &mut [u8]) -> Option<()>,
) -> bool {
    const HEADER_LEN: usize = 16;
    let mut header = [0; HEADER_LEN];
    if len < HEADER_LEN || read(0, &mut header).is_none() {
        return true;
    }
    let [_, _, words, shift] =
        [0, 4, 8, 12].map(|at| header[at..][..4].try_into().map_or(0, u32::from_le_bytes));
    let add = |hash: u32, byte| hash.wrapping_mul(33).wrapping_add(u32::from(byte));
    let hash = name.bytes().fold(5381, add);
    let Some(index) = (hash / 64).checked_rem(words) else {
        return true;
    };
    let at = HEADER_LEN + index as usize * 8;
    let mut word = [0; 8];
    if at + word.len() > len || read(at, &mut word).is_none() {
        return true;
    }
    let second = hash.checked_shr(shift).unwrap_or(0);
    let bits = 1_u64 << (hash % 64) | 1 << (second % 64);
    u64::from_le_bytes(word) & bits == bits
}

/// Returns the offsets at which `name` is a string or the tail of one: linkers merge common tails.
fn places_of(strings: &[u8], name: &str) -> Vec<usize> {
    let with_nul: Vec<u8> = name.bytes().chain([0]).collect();
    memchr::memmem::find_iter(strings, &with_nul).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use test_support::fixture;

    #[test]
    fn symbols_are_found_by_whole_names() {
        let elf = ElfFile::open(&fixture("spin_10.pie")).unwrap();
        let symbols = elf.symbols().unwrap();
        let [main, ain, none] = symbols.find(["main", "ain", "no_such_symbol"]);
        assert_eq!(main.len(), 1);
        assert!(main[0].len > 0 && ain.is_empty() && none.is_empty());
        assert!(symbols.has_name_ending("ain") && !symbols.has_name_ending("mai"));
        let stripped = ElfFile::open(&fixture("gen_ocaml_2_stripped.pie")).unwrap();
        assert!(stripped.symbols().is_none());
    }

    #[test]
    fn name_at_the_end_of_another_is_found() {
        let strings = b"\0caml_main\0main_loop\0";
        assert_eq!(places_of(strings, "main"), [6]);
        assert_eq!(places_of(strings, "main_loop"), [11]);
        assert!(places_of(strings, "loop_").is_empty());
        assert!(defined(&[0; 20]).is_empty());
    }
}
