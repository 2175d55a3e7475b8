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

/// Returns the offsets at which `name` is a string or the tail of one: linkers merge common tails.
fn places_of(strings: &[u8], name: &str) -> Vec<usize> {
    let with_end: Vec<u8> = name.bytes().chain([0]).collect();
    memchr::memmem::find_iter(strings, &with_end).collect()
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
