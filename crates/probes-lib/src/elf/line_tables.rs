//! [`LineTables`]: the tables of source lines of one file (DWARF, `.debug_line`).

use std::collections::HashSet;

use gimli::{
    Dwarf, DwarfSections, EndianSlice, IncompleteLineProgram, LittleEndian, Section, SectionId,
    Unit,
};

use crate::elf::debug_units::{DebugUnits, is_needed};
use crate::elf::{DwarfBytes, ElfFile, MAX_SECTION};

/// The sections in which these tables are, and the units that they belong to.
pub(super) struct LineTables(DwarfSections<Vec<u8>>);

impl LineTables {
    /// Returns those of a file; without any, if their sections cannot be read.
    pub(super) fn of(elf: &ElfFile) -> LineTables {
        LineTables::in_sections(|id| {
            let bytes = is_needed(id).then(|| elf.debug_section(id, MAX_SECTION));
            bytes.flatten().unwrap_or_default()
        })
    }

    /// The same, for a file with these sections.
    pub(super) fn in_sections(section: impl Fn(SectionId) -> Vec<u8>) -> LineTables {
        let sections = DwarfSections::load(|id| Ok::<_, gimli::Error>(section(id)));
        LineTables(sections.unwrap_or_default())
    }

    /// Returns how many rows they may have: each takes at least one byte. Those of a hostile file may overlap, and have more.
    pub(super) fn max_rows(&self) -> usize {
        let table = self
            .0
            .debug_line
            .borrow(|bytes| EndianSlice::new(bytes, LittleEndian));
        table.reader().slice().len()
    }

    /// Calls `each` for each table that can be read, with a unit that it belongs to.
    pub(super) fn for_each(
        &self,
        mut each: impl for<'s> FnMut(
            &Dwarf<DwarfBytes<'s>>,
            &Unit<DwarfBytes<'s>>,
            IncompleteLineProgram<DwarfBytes<'s>>,
        ),
    ) {
        let dwarf = self.0.borrow(|bytes| EndianSlice::new(bytes, LittleEndian));
        let mut seen = HashSet::new();
        let mut units = DebugUnits::of(&dwarf);
        while let Some(unit) = units.next() {
            if let Some(table) = unit.line_program.clone() {
                if seen.insert(table.header().offset().0) {
                    each(&dwarf, &unit, table);
                }
            }
        }
    }
}
