//! The compilation units of debugging information (DWARF), one after the other.

use std::collections::HashSet;
use std::sync::Arc;

use gimli::{
    Abbreviations, DebugAbbrevOffset, DebugInfoUnitHeadersIter, Dwarf, Reader, Section, Unit,
};

use crate::elf::DwarfBytes;

/// How many bytes of tables of abbreviations are read, in addition to [`MAX_PARSED_TIMES`] the section: no file of which
/// that is all takes long.
const MAX_PARSED: u64 = 16 << 20;

/// How often all abbreviations are read. Each unit has a table of its own, or that of the unit before it; those of a hostile file may
/// all have one that is as long as the file.
const MAX_PARSED_TIMES: u64 = 4;

/// Reads units one after the other.
pub(super) struct DebugUnits<'s, 'd> {
    dwarf: &'s Dwarf<DwarfBytes<'d>>,
    headers: DebugInfoUnitHeadersIter<DwarfBytes<'d>>,
    /// The last table of abbreviations. One kept for each place where a table begins could take far more memory than the file: these
    /// places may overlap.
    last: Option<(DebugAbbrevOffset, Arc<Abbreviations>)>,
    /// Where the tables begin that were read so far.
    begins: HashSet<DebugAbbrevOffset>,
    /// How many bytes all tables have that were read so far, each counted once.
    pub(super) tables_len: u64,
    /// How many bytes of tables may still be read.
    parsed_left: u64,
}

impl<'s, 'd> DebugUnits<'s, 'd> {
    pub(super) fn of(dwarf: &'s Dwarf<DwarfBytes<'d>>) -> DebugUnits<'s, 'd> {
        let abbreviations = dwarf.debug_abbrev.reader().len() as u64;
        DebugUnits {
            dwarf,
            headers: dwarf.units(),
            last: None,
            begins: HashSet::new(),
            tables_len: 0,
            parsed_left: MAX_PARSED + MAX_PARSED_TIMES * abbreviations,
        }
    }

    /// Whether there were more abbreviations than are read, so that there may be more units.
    pub(super) fn is_cut(&self) -> bool {
        self.parsed_left == 0
    }

    /// Returns the next unit that can be read.
    pub(super) fn next(&mut self) -> Option<Unit<DwarfBytes<'d>>> {
        while let Ok(Some(header)) = self.headers.next() {
            let abbreviations = self.table_at(header.debug_abbrev_offset());
            if self.is_cut() {
                return None;
            }
            let unit = abbreviations
                .and_then(|it| Unit::new_with_abbreviations(self.dwarf, header, it).ok());
            if unit.is_some() {
                return unit;
            }
        }
        None
    }

    fn table_at(&mut self, at: DebugAbbrevOffset) -> Option<Arc<Abbreviations>> {
        if let Some((_, last)) = self.last.as_ref().filter(|(last, _)| *last == at) {
            return Some(last.clone());
        }
        let len = table_len(self.dwarf, at);
        self.parsed_left = self.parsed_left.saturating_sub(len);
        if self.begins.insert(at) {
            self.tables_len += len;
        }
        if self.is_cut() {
            return None;
        }
        let table = Arc::new(self.dwarf.debug_abbrev.abbreviations(at).ok()?);
        self.last = Some((at, table.clone()));
        Some(table)
    }
}

/// Returns how many bytes a table of abbreviations has (DWARF 5, 7.5.3).
fn table_len(dwarf: &Dwarf<DwarfBytes<'_>>, at: DebugAbbrevOffset) -> u64 {
    let mut table = *dwarf.debug_abbrev.reader();
    if table.skip(at.0).is_err() {
        return 0;
    }
    let before = table.len();
    // Up to the first error, as far as gimli reads it as well.
    let _ = skip_table(&mut table);
    (before - table.len()) as u64
}

fn skip_table(table: &mut DwarfBytes<'_>) -> gimli::Result<()> {
    let implicit = u64::from(gimli::constants::DW_FORM_implicit_const.0);
    while table.read_uleb128()? != 0 {
        let _tag = table.read_uleb128()?;
        let _has_children = table.read_u8()?;
        loop {
            let attribute = (table.read_uleb128()?, table.read_uleb128()?);
            if attribute == (0, 0) {
                break;
            }
            if attribute.1 == implicit {
                table.read_sleb128()?;
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use gimli::{DwarfSections, EndianSlice, LittleEndian, SectionId};

    use super::*;

    /// How many bytes an entry of [`table`] has.
    const ENTRY: usize = 7;
    const FIRST_CODE: u32 = 20_000;

    /// A table of abbreviations, each of a compilation unit with no attribute.
    fn table(entries: u32) -> Vec<u8> {
        let mut table = Vec::new();
        for code in FIRST_CODE..FIRST_CODE + entries {
            table.extend(code_bytes(code));
            table.extend([gimli::constants::DW_TAG_compile_unit.0 as u8, 0, 0, 0]);
        }
        table.push(0);
        table
    }

    /// A number as three bytes of ULEB128.
    fn code_bytes(code: u32) -> [u8; 3] {
        let part = |shift: u32| (code >> shift & 0x7f) as u8;
        [part(0) | 0x80, part(7) | 0x80, part(14)]
    }

    /// Units of DWARF 4, each with the table that begins at this entry.
    fn units(tables: impl IntoIterator<Item = u32>) -> Vec<u8> {
        let units = tables.into_iter().map(|entry| {
            let mut unit = vec![11, 0, 0, 0, 4, 0];
            unit.extend((entry * ENTRY as u32).to_le_bytes());
            unit.push(8);
            unit.extend(code_bytes(FIRST_CODE + entry));
            // The attributes end here; this byte is no entry.
            unit.push(0);
            unit
        });
        units.flatten().collect()
    }

    /// Reads all units; returns how many there are, how many bytes their tables have and were read, and whether there may be more.
    fn read(entries: u32, tables: impl IntoIterator<Item = u32>) -> (usize, u64, u64, bool) {
        let (abbreviations, info) = (table(entries), units(tables));
        let section = |id: SectionId| match id {
            SectionId::DebugAbbrev => abbreviations.as_slice(),
            SectionId::DebugInfo => info.as_slice(),
            _ => &[],
        };
        let sections = DwarfSections::load(|id| Ok::<_, gimli::Error>(section(id))).unwrap();
        let dwarf = sections.borrow(|bytes| EndianSlice::new(bytes, LittleEndian));
        let mut units = DebugUnits::of(&dwarf);
        let before = units.parsed_left;
        let count = std::iter::from_fn(|| units.next()).count();
        let parsed = before - units.parsed_left;
        (count, units.tables_len, parsed, units.is_cut())
    }

    #[test]
    fn shared_table_is_read_once() {
        let len = 1000 * ENTRY as u64 + 1;
        assert_eq!(read(1000, [0; 5]), (5, len, len, false));
        // Each has its own, or they take turns.
        let rest = len - ENTRY as u64;
        assert_eq!(read(1000, [0, 0, 1]), (3, len + rest, len + rest, false));
        let (count, tables, parsed, is_cut) = read(1000, [0, 1, 0, 1]);
        assert_eq!((count, tables, is_cut), (4, len + rest, false));
        assert_eq!(parsed, 2 * (len + rest));
    }

    #[test]
    fn tables_that_take_turns_are_bounded() {
        let tables = |units: u32| (0..units).map(|unit| unit % 2);
        let (count, tables, _, is_cut) = read(30_000, tables(1000));
        assert!(is_cut && count < 200, "{count}");
        assert!(tables < 2 * 30_001 * ENTRY as u64, "{tables}");
    }
}
