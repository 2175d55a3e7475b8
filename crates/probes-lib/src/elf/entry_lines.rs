//! [`EntryLines`]: the source lines of functions of OCaml that begin with the code of another source file, inlined into them.
//!
//! The line table has two rows for the address of such a function: first that of the function, then that of the code. A search by
//! address finds the latter, and would show a function of `cafe.ml` in `list.ml`.

use std::collections::HashMap;

use gimli::{
    AttributeValue, DW_AT_language, DW_LANG_Mips_Assembler, Dwarf, IncompleteLineProgram, Unit,
};

use crate::address::FileAddr;
use crate::elf::line_tables::LineTables;
use crate::elf::lines::path_of;
use crate::elf::{DwarfBytes, ElfFile};

/// The most lines that are known. No program has so many functions.
const MAX_LINES: usize = 1 << 20;

/// The most bytes of paths of source files that are kept. The units of a large program have some megabytes.
const MAX_KEPT_PATHS: usize = 64 << 20;

/// The lines of the functions of one file.
#[derive(Debug, Default)]
pub(super) struct EntryLines {
    /// In the order of their addresses.
    lines: Vec<EntryLine>,
    files: Vec<String>,
}

#[derive(Debug)]
struct EntryLine {
    address: u64,
    /// An index of `files`.
    file: usize,
    line: u32,
}

/// What may still be read: the rows and paths of a hostile file may overlap.
struct LineLimits {
    rows: usize,
    /// In bytes.
    paths: usize,
}

/// The first row of an address, and the file of its last one.
#[derive(Clone, Copy)]
struct RowsOfAddress {
    address: u64,
    file: u64,
    line: u32,
    last_file: u64,
}

impl EntryLines {
    /// Reads them from the tables that can be read.
    pub(super) fn of(elf: &ElfFile) -> EntryLines {
        let mut found = EntryLines::default();
        let tables = LineTables::of(elf);
        let mut limits = LineLimits {
            rows: tables.max_rows(),
            paths: MAX_KEPT_PATHS,
        };
        tables.for_each(|dwarf, unit, table| {
            if is_assembled(unit) {
                found.read_rows(dwarf, unit, table, &mut limits);
            }
        });
        found.lines.sort_by_key(|it| it.address);
        found
    }

    /// Returns the source file and line of the function at `address`, if it begins with the code of another file.
    pub(super) fn at(&self, address: FileAddr) -> Option<(&str, u32)> {
        let lines = &self.lines;
        let found = lines.binary_search_by_key(&address.0, |it| it.address);
        let found = &lines[found.ok()?];
        Some((&self.files[found.file], found.line))
    }

    fn read_rows(
        &mut self,
        dwarf: &Dwarf<DwarfBytes<'_>>,
        unit: &Unit<DwarfBytes<'_>>,
        table: IncompleteLineProgram<DwarfBytes<'_>>,
        limits: &mut LineLimits,
    ) {
        let mut found = Vec::new();
        let mut same: Option<RowsOfAddress> = None;
        let mut rows = table.rows();
        while let Ok(Some((_, row))) = rows.next_row() {
            limits.rows = limits.rows.saturating_sub(1);
            if limits.rows == 0 || self.lines.len() + found.len() > MAX_LINES {
                break;
            }
            let (address, file) = (row.address(), row.file_index());
            match &mut same {
                Some(same) if same.address == address && !row.end_sequence() => {
                    same.last_file = file;
                }
                _ => {
                    found.extend(same.filter(|it| it.file != it.last_file));
                    let line = row.line().filter(|_| !row.end_sequence());
                    same = line.map(|line| RowsOfAddress {
                        address,
                        file,
                        line: u32::try_from(line.get()).unwrap_or(u32::MAX),
                        last_file: file,
                    });
                }
            }
        }
        let header = rows.header();
        let mut known: HashMap<u64, Option<usize>> = HashMap::new();
        for rows in found {
            let file = *known.entry(rows.file).or_insert_with(|| {
                let path = path_of(dwarf, unit, header, header.file(rows.file)?)?;
                limits.paths = limits.paths.checked_sub(path.len())?;
                self.files.push(path);
                Some(self.files.len() - 1)
            });
            self.lines.extend(file.map(|file| EntryLine {
                address: rows.address,
                file,
                line: rows.line,
            }));
        }
    }
}

/// Whether an assembler has made what there is of a unit, as of those of OCaml: units of other compilers say themselves what
/// was inlined.
fn is_assembled(unit: &Unit<DwarfBytes<'_>>) -> bool {
    let mut entries = unit.entries();
    let root = entries.next_dfs().ok().flatten();
    let language = root.and_then(|(_, root)| root.attr_value(DW_AT_language).ok()?);
    language == Some(AttributeValue::Language(DW_LANG_Mips_Assembler))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::process::Command;

    use test_support::Scratch;

    use super::*;
    use crate::elf::source::SourceMap;
    use crate::elf::symbols::SymbolTable;

    /// As OCaml writes it: the lines of a function, then that of its first instruction, which is of another file.
    const ASSEMBLY: &str = ".file 1 \"list.ml\"
.file 2 \"cafe.ml\"
.data
caml_frametable: .quad 0
.text
.globl main, own
main:
.loc 2 39 4
.loc 1 12 2
nop
.loc 2 40 2
ret
own:
.loc 2 50 1
.loc 2 51 3
ret
";

    #[test]
    fn functions_begin_in_their_own_files() {
        let scratch = Scratch::new();
        let (source, program) = (scratch.file("cafe.s"), scratch.file("cafe"));
        fs::write(&source, ASSEMBLY).unwrap();
        let mut gcc = Command::new("gcc");
        gcc.arg("-g").arg(&source).arg("-o").arg(&program);
        assert!(gcc.status().unwrap().success());
        let elf = ElfFile::open(&program).unwrap();
        let symbols = elf.symbols(SymbolTable::Static).unwrap().unwrap();
        let found = symbols.find(["main", "own"]).unwrap();
        let map = SourceMap::of(&elf).unwrap();
        let line = |name: usize| {
            let address = found[name][0].address;
            let (file, line) = map.line_of_entry(address);
            (
                file.unwrap().rsplit('/').next().unwrap().to_owned(),
                line,
                map.line(address).1,
            )
        };
        assert_eq!(line(0), ("cafe.ml".to_owned(), Some(39), Some(12)));
        // Of two lines of one file, that of the first instruction.
        assert_eq!(line(1), ("cafe.ml".to_owned(), Some(51), Some(51)));
    }
}
