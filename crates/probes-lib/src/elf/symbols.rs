//! Symbols of a file's tables (`.symtab`, `.dynsym`), local ones included, looked up by name, with their lengths. To
//! look up a name, the tables are read part by part, and not kept: they may be large, and most files do not have it.

use goblin::elf::Sym;
use goblin::elf::sym::STT_TLS;
use goblin::elf::sym::sym64::SIZEOF_SYM;
use memchr::memmem::Finder;

use crate::address::FileAddr;
use crate::elf::{ElfFile, SectionContents};
use crate::error::{ErrorKind, FileError, Result};
use crate::numbers::u32_at;

/// The two symbol tables of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SymbolTable {
    /// All symbols; stripped files have none.
    Static,
    /// Those that the file exports or imports.
    Dynamic,
}

/// A function or variable of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Symbol {
    pub(crate) address: FileAddr,
    /// In bytes.
    pub(crate) len: u64,
}

/// A symbol table, and the strings that its names are in.
pub(crate) struct Symbols<'e> {
    table: SectionContents<'e>,
    strings: SectionContents<'e>,
}

/// Symbols with longer names are left out: of each, a file could make a whole string table be searched.
const MAX_NAME: usize = 1 << 17;

/// How many bytes of a table are read at once: a whole number of symbols, and few enough to stay in the processor's
/// cache.
const PART_LEN: usize = 1024 * SIZEOF_SYM;

impl ElfFile {
    /// Returns a symbol table; `None` if the file has no such table: it may be stripped. The symbols of a stripped file are in its
    /// separate debug file, if that is there.
    ///
    /// # Errors
    ///
    /// If the table is not within the file.
    pub(crate) fn symbols(&self, table: SymbolTable) -> Result<Option<Symbols<'_>>> {
        let elf = match table {
            SymbolTable::Static => self.with_symbols(),
            SymbolTable::Dynamic => self,
        };
        elf.symbols_of_this_file(table)
    }

    /// Same as [`ElfFile::symbols`], without the separate debug file.
    pub(super) fn symbols_of_this_file(&self, table: SymbolTable) -> Result<Option<Symbols<'_>>> {
        let (symbols, strings) = match table {
            SymbolTable::Static => (".symtab", ".strtab"),
            SymbolTable::Dynamic => (".dynsym", ".dynstr"),
        };
        let Some(table) = self.contents(symbols)? else {
            return Ok(None);
        };
        let strings = self.contents(strings)?;
        let strings = strings.unwrap_or(SectionContents { len: 0, ..table });
        Ok(Some(Symbols { table, strings }))
    }

    /// Calls `visit` with each defined symbol of a table, and its name; never, if the table is damaged or missing.
    ///
    /// # Errors
    ///
    /// If reading the file fails.
    pub(crate) fn each_symbol(
        &self,
        table: SymbolTable,
        mut visit: impl FnMut(&Sym, &[u8]),
    ) -> Result<()> {
        let mut read = || {
            let Some(symbols) = self.symbols(table)? else {
                return Ok(());
            };
            let names = symbols.names()?;
            symbols.each(|symbol| {
                let name = names.get(symbol.st_name..).unwrap_or_default();
                let name = &name[..name.len().min(MAX_NAME)];
                if let Some(len) = memchr::memchr(0, name) {
                    visit(symbol, &name[..len]);
                }
                Ok(())
            })
        };
        match read() {
            Err(error) if matches!(error.kind(), ErrorKind::File(FileError::Elf(_))) => Ok(()),
            done => done,
        }
    }

    /// Returns whether the file exports a symbol. Of most files that do not, only a few bytes are read.
    pub(crate) fn exports(&self, name: &str) -> bool {
        let hashes = self.contents(".gnu.hash").ok().flatten();
        let may_export = hashes.is_none_or(|hashes| {
            let read = |offset, bytes: &mut [u8]| hashes.read(offset, bytes).ok();
            may_hold(name, hashes.len, read)
        });
        may_export && self.exported(name).is_some()
    }

    /// Returns the address of the only symbol of this name that the file defines, local ones included.
    pub(crate) fn data_symbol(&self, name: &str) -> Option<FileAddr> {
        let tables = [SymbolTable::Static, SymbolTable::Dynamic];
        let mut found = tables.into_iter().filter_map(|table| {
            let [found] = self.symbols(table).ok()??.find([name]).ok()?;
            let first = found.first()?.address;
            // Two files that it was linked from may each have their own.
            let is_only = found.iter().all(|it| it.address == first);
            Some(is_only.then_some(first))
        });
        found.next()?
    }

    /// Returns the offset of the only thread-local variable of this name that the file defines, local ones included.
    pub(crate) fn thread_local(&self, name: &str) -> Option<FileAddr> {
        let mut offsets = Vec::new();
        let visit = |symbol: &Sym, of_symbol: &[u8]| {
            if symbol.st_type() == STT_TLS && of_symbol == name.as_bytes() {
                offsets.push(FileAddr(symbol.st_value));
            }
        };
        let has_name = self
            .symbols(SymbolTable::Static)
            .ok()??
            .has_name_ending(name);
        if has_name {
            self.each_symbol(SymbolTable::Static, visit).ok()?;
        }
        match offsets[..] {
            [offset] => Some(offset),
            _ => None,
        }
    }

    /// Returns the address of a symbol that the file exports.
    pub(crate) fn exported(&self, name: &str) -> Option<FileAddr> {
        let symbols = self.symbols(SymbolTable::Dynamic).ok()??;
        let [found] = symbols.find([name]).ok()?;
        found.first().map(|symbol| symbol.address)
    }
}

impl Symbols<'_> {
    /// Calls `visit` with each symbol that the file defines.
    ///
    /// # Errors
    ///
    /// If reading the file fails; or the first one of `visit`, which is not called again then.
    pub(crate) fn each(&self, mut visit: impl FnMut(&Sym) -> Result<()>) -> Result<()> {
        each_part(&self.table, 0, |_, part| {
            let entries = part.chunks_exact(SIZEOF_SYM);
            let symbols = entries.filter_map(|entry| entry.first_chunk().map(parse));
            let mut defined = symbols.filter(|symbol| symbol.st_shndx != 0);
            defined.try_for_each(|symbol| visit(&symbol))
        })
    }

    /// Reads the strings that names are in, each followed by a NUL.
    ///
    /// # Errors
    ///
    /// If reading the file fails.
    pub(crate) fn names(&self) -> Result<Vec<u8>> {
        let mut names = vec![0; self.strings.len];
        self.strings.read(0, &mut names)?;
        Ok(names)
    }

    /// Returns the symbols of each name that the file defines.
    ///
    /// # Errors
    ///
    /// If reading the file fails.
    pub(crate) fn find<const N: usize>(&self, names: [&str; N]) -> Result<[Vec<Symbol>; N]> {
        let places = self.places(&names.map(with_nul))?;
        let mut found = [const { Vec::new() }; N];
        if places.is_empty() {
            return Ok(found);
        }
        self.each(|symbol| {
            if let Ok(at) = places.binary_search_by_key(&symbol.st_name, |place| place.0) {
                found[places[at].1].push(Symbol {
                    address: FileAddr(symbol.st_value),
                    len: symbol.st_size,
                });
            }
            Ok(())
        })?;
        Ok(found)
    }

    /// Returns whether the name of some symbol may contain `part`.
    pub(crate) fn has_name_with(&self, part: &str) -> bool {
        self.has(part.into())
    }

    /// Returns whether the name of some symbol may end with `end`.
    pub(crate) fn has_name_ending(&self, end: &str) -> bool {
        self.has(with_nul(end))
    }

    fn has(&self, text: Vec<u8>) -> bool {
        let places = self.places(&[text]);
        places.is_ok_and(|places| !places.is_empty())
    }

    /// Returns where in the strings each of `texts` is: an offset and the index of the text, in the order of the
    /// offsets. With its NUL, a name is a string or the tail of one there: linkers merge common tails.
    fn places(&self, texts: &[Vec<u8>]) -> Result<Vec<(usize, usize)>> {
        let finders: Vec<Finder<'_>> = texts.iter().map(Finder::new).collect();
        let longest = texts.iter().map(Vec::len).max().unwrap_or(0);
        let mut places = Vec::new();
        each_part(&self.strings, longest, |at, part| {
            for (index, finder) in finders.iter().enumerate() {
                // The next part has the others.
                let found = finder.find_iter(part).take_while(|&place| place < PART_LEN);
                places.extend(found.map(|place| (at + place, index)));
            }
            Ok(())
        })?;
        places.sort_unstable();
        Ok(places)
    }
}

/// Parses an entry of a symbol table: `Elf64_Sym` of elf(5).
fn parse(entry: &[u8; SIZEOF_SYM]) -> Sym {
    let [n0, n1, n2, n3, info, other, s0, s1, ref numbers @ ..] = *entry;
    let (value, size) = numbers.split_at(8);
    let number = |bytes: &[u8]| bytes.try_into().map_or(0, u64::from_le_bytes);
    Sym {
        st_name: u32::from_le_bytes([n0, n1, n2, n3]) as usize,
        st_info: info,
        st_other: other,
        st_shndx: u16::from_le_bytes([s0, s1]).into(),
        st_value: number(value),
        st_size: number(size),
    }
}

fn with_nul(name: &str) -> Vec<u8> {
    name.bytes().chain([0]).collect()
}

/// Calls `visit` with the offset of each part of a section, and its bytes, followed by the first `more` bytes of the
/// next part.
fn each_part(
    section: &SectionContents<'_>,
    more: usize,
    mut visit: impl FnMut(usize, &[u8]) -> Result<()>,
) -> Result<()> {
    let mut bytes = vec![0; section.len.min(PART_LEN + more)];
    for at in (0..section.len).step_by(PART_LEN) {
        let len = bytes.len().min(section.len - at);
        section.read(at, &mut bytes[..len])?;
        visit(at, &bytes[..len])?;
    }
    Ok(())
}

/// Returns whether a `.gnu.hash` section of `len` bytes may have a name: false only if its Bloom filter says that
/// it does not. `read` reads the section from an offset.
///
/// The section is four 32-bit words (of which the third is the length of the filter in 64-bit words, the
/// fourth a shift), the filter, and the hash table itself.
fn may_hold(name: &str, len: usize, read: impl Fn(usize, &mut [u8]) -> Option<()>) -> bool {
    const HEADER_LEN: usize = 16;
    let mut header = [0; HEADER_LEN];
    if len < HEADER_LEN || read(0, &mut header).is_none() {
        return true;
    }
    let [words, shift] = [8, 12].map(|at| u32_at(&header, at).unwrap_or(0));
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

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use test_support::{DEADLINE, fixture};

    use super::*;
    use crate::testing::{ProgramSpec, memory_file};

    /// A file with these symbols; the address of each is its index, from 1.
    fn file(names: impl IntoIterator<Item = String>) -> ElfFile {
        let mut made = ProgramSpec::new(&[], &[]);
        made.symbols = names.into_iter().zip(1..).collect();
        ElfFile::read(memory_file(&made.bytes()), PathBuf::from("made")).unwrap()
    }

    fn addresses(found: &[Symbol]) -> Vec<u64> {
        found.iter().map(|symbol| symbol.address.0).collect()
    }

    #[test]
    fn symbols_are_found_by_whole_names() {
        let elf = ElfFile::open(&fixture("spin_10.pie")).unwrap();
        let symbols = elf.symbols(SymbolTable::Static).unwrap().unwrap();
        let names = ["main", "ain", "no_such_symbol"];
        let [main, ain, none] = symbols.find(names).unwrap();
        assert_eq!(main.len(), 1);
        assert!(main[0].len > 0 && ain.is_empty() && none.is_empty());
        assert!(symbols.has_name_ending("ain") && !symbols.has_name_ending("mai"));
        let stripped = ElfFile::open(&fixture("gen_ocaml_2_stripped.pie")).unwrap();
        assert!(stripped.symbols(SymbolTable::Static).unwrap().is_none());
    }

    #[test]
    fn name_at_the_end_of_another_is_found() {
        let elf = file(["caml_main", "main_loop", "main"].map(str::to_owned));
        let symbols = elf.symbols(SymbolTable::Static).unwrap().unwrap();
        let texts = ["main", "main_loop", "loop_"].map(with_nul);
        let places = symbols.places(&texts).unwrap();
        assert_eq!(places, [(6, 0), (11, 1), (21, 0)]);
        let found = symbols.find(["main"]).unwrap();
        assert_eq!(addresses(&found[0]), [3]);
    }

    #[test]
    fn names_across_parts_are_found_once() {
        // Ten bytes with its NUL, and the length of a part is no multiple of that.
        let name = |index: u64| format!("name_{index:04}");
        let elf = file((1..8_000).map(name));
        let symbols = elf.symbols(SymbolTable::Static).unwrap().unwrap();
        let strings = symbols.names().unwrap();
        let mut split = 0;
        for part_end in (PART_LEN..strings.len()).step_by(PART_LEN) {
            for at in [part_end - 9, part_end, part_end + 9] {
                let start = strings[..at].iter().rposition(|&byte| byte == 0);
                let start = start.unwrap() + 1;
                let text = strings[start..start + 10].to_vec();
                let longer = vec![b'x'; 40];
                let places = symbols.places(&[text, longer]).unwrap();
                assert_eq!(places, [(start, 0)]);
                split += usize::from((start + 1..start + 10).contains(&part_end));
            }
        }
        assert_eq!(split, 3);
        let found = symbols.find([&*name(1), &*name(4_000), &*name(7_999)]);
        let found = found.unwrap().map(|one| addresses(&one));
        assert_eq!(found, [[1], [4_000], [7_999]]);
    }

    #[test]
    fn symbols_are_those_of_goblin() {
        let elf = ElfFile::open(&fixture("spin_10.pie")).unwrap();
        let mut symbols = Vec::new();
        let visit = |symbol: &Sym, name: &[u8]| {
            symbols.push((*symbol, String::from_utf8_lossy(name).into_owned()));
        };
        elf.each_symbol(SymbolTable::Static, visit).unwrap();
        let bytes = std::fs::read(elf.path()).unwrap();
        let theirs = goblin::elf::Elf::parse(&bytes).unwrap();
        let defined = theirs.syms.iter().filter(|symbol| symbol.st_shndx != 0);
        let defined = defined.map(|it| (it, theirs.strtab.get_at(it.st_name).unwrap().to_owned()));
        assert_eq!(symbols, defined.collect::<Vec<_>>());
    }

    #[test]
    fn many_symbols_of_one_name_are_found_fast() {
        const COUNT: usize = 600_000;
        let elf = file(std::iter::repeat_n("main".to_owned(), COUNT));
        let symbols = elf.symbols(SymbolTable::Static).unwrap().unwrap();
        let start = std::time::Instant::now();
        let [found] = symbols.find(["main"]).unwrap();
        assert_eq!(found.len(), COUNT);
        // To look at each place of the name for each symbol takes minutes.
        assert!(start.elapsed() < DEADLINE / 4, "{:?}", start.elapsed());
    }

    #[test]
    fn table_without_strings_has_no_names() {
        let mut made = ProgramSpec::new(&[], &[]);
        made.symbols = vec![("main".to_owned(), 1)];
        let mut bytes = made.bytes();
        let at = bytes.windows(8).position(|it| it == b".strtab\0").unwrap();
        bytes[at] = b'_';
        let elf = ElfFile::read(memory_file(&bytes), PathBuf::from("made")).unwrap();
        let symbols = elf.symbols(SymbolTable::Static).unwrap().unwrap();
        let mut count = 0;
        let visit = |_: &Sym| {
            count += 1;
            Ok(())
        };
        symbols.each(visit).unwrap();
        assert_eq!(count, 1);
        assert!(symbols.find(["main"]).unwrap()[0].is_empty() && !symbols.has_name_with(""));
    }
}
