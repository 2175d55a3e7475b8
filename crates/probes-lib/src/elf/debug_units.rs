//! The compilation units of debugging information (DWARF): one after the other, and by what they contain.

use std::cell::{Cell, OnceCell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;

use gimli::{
    Abbreviations, DebugAbbrevOffset, DebugInfoOffset, DebugInfoUnitHeadersIter, Dwarf, Reader,
    Section, SectionId, Unit, UnitHeader,
};

use crate::elf::DwarfBytes;

/// How many bytes of tables of abbreviations are read, in addition to [`MAX_PARSED_TIMES`] the section: no file of which
/// that is all takes long.
const MAX_PARSED: u64 = 16 << 20;

/// How often all abbreviations are read. Each unit has a table of its own, or one that others have too; those of a hostile file
/// may all have one that is as long as the file.
const MAX_PARSED_TIMES: u64 = 4;

/// How many bytes of tables are kept in memory with the units that entries of others refer to.
const MAX_KEPT: u64 = 64 << 20;

/// Returns whether a section is needed to read units and the tables of their source lines. `.debug_addr` is: without it, a unit
/// that says by an index where it begins (DW_FORM_addrx, as clang writes) cannot be read.
pub(super) fn is_needed(id: SectionId) -> bool {
    matches!(
        id,
        SectionId::DebugAbbrev
            | SectionId::DebugAddr
            | SectionId::DebugInfo
            | SectionId::DebugLine
            | SectionId::DebugLineStr
            | SectionId::DebugStr
            | SectionId::DebugStrOffsets
    )
}

/// Reads units one after the other.
pub(super) struct DebugUnits<'s, 'd> {
    dwarf: &'s Dwarf<DwarfBytes<'d>>,
    headers: DebugInfoUnitHeadersIter<DwarfBytes<'d>>,
    /// The last tables of abbreviations. They have no more bytes than the section: those of a hostile file may overlap, and
    /// could take far more memory than the file.
    tables: HashMap<DebugAbbrevOffset, Arc<Abbreviations>>,
    /// How many bytes these have in the file.
    kept_len: u64,
    /// How many bytes all tables that were read so far take in memory at most.
    pub(super) tables_memory: u64,
    /// Whether there was a unit that cannot be read.
    pub(super) has_unreadable: bool,
    /// How many bytes of tables may still be read.
    parsed_left: u64,
}

impl<'s, 'd> DebugUnits<'s, 'd> {
    pub(super) fn of(dwarf: &'s Dwarf<DwarfBytes<'d>>) -> DebugUnits<'s, 'd> {
        let abbreviations = dwarf.debug_abbrev.reader().len() as u64;
        DebugUnits {
            dwarf,
            headers: dwarf.units(),
            tables: HashMap::new(),
            kept_len: 0,
            tables_memory: 0,
            has_unreadable: false,
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
            let unit = self.read(header);
            if self.is_cut() {
                return None;
            }
            if unit.is_some() {
                return unit;
            }
            self.has_unreadable = true;
        }
        None
    }

    /// Returns the unit with this header; `None` if it cannot be read.
    fn read(&mut self, header: UnitHeader<DwarfBytes<'d>>) -> Option<Unit<DwarfBytes<'d>>> {
        let abbreviations = self.table_at(header.debug_abbrev_offset())?;
        Unit::new_with_abbreviations(self.dwarf, header, abbreviations).ok()
    }

    fn table_at(&mut self, at: DebugAbbrevOffset) -> Option<Arc<Abbreviations>> {
        if let Some(known) = self.tables.get(&at) {
            return Some(known.clone());
        }
        if self.is_cut() {
            return None;
        }
        let size = table_size(self.dwarf, at);
        self.parsed_left = self.parsed_left.saturating_sub(size.len);
        self.tables_memory += size.memory;
        if self.is_cut() {
            return None;
        }
        let table = Arc::new(self.dwarf.debug_abbrev.abbreviations(at).ok()?);
        self.kept_len += size.len;
        if self.kept_len > self.dwarf.debug_abbrev.reader().len() as u64 {
            self.tables.clear();
            self.kept_len = size.len;
        }
        self.tables.insert(at, table.clone());
        Some(table)
    }
}

/// The units of a file by what they contain: entries refer to those of other units where the linker has optimized (LTO).
pub(super) struct UnitsByOffset<'s, 'd> {
    dwarf: &'s Dwarf<DwarfBytes<'d>>,
    /// Where they begin, in the order in which they are in the file.
    starts: OnceCell<Vec<DebugInfoOffset>>,
    /// Those that were read last; `None` if one cannot be read. Their tables of abbreviations are kept with them.
    read: RefCell<HashMap<DebugInfoOffset, Option<Rc<Unit<DwarfBytes<'d>>>>>>,
    reader: RefCell<DebugUnits<'s, 'd>>,
    /// How much memory of tables the reader had taken when `read` was cleared.
    cleared_at: Cell<u64>,
}

impl<'s, 'd> UnitsByOffset<'s, 'd> {
    pub(super) fn of(dwarf: &'s Dwarf<DwarfBytes<'d>>) -> UnitsByOffset<'s, 'd> {
        UnitsByOffset {
            dwarf,
            starts: OnceCell::new(),
            read: RefCell::default(),
            reader: RefCell::new(DebugUnits::of(dwarf)),
            cleared_at: Cell::new(0),
        }
    }

    /// Returns the unit that contains this offset of `.debug_info`, without its source lines; `None` if there is none, or it
    /// cannot be read.
    pub(super) fn containing(&self, at: DebugInfoOffset) -> Option<Rc<Unit<DwarfBytes<'d>>>> {
        let starts = self.starts.get_or_init(|| {
            let mut headers = self.dwarf.units();
            let next = || headers.next().ok()?.map(|header| header.offset());
            let starts = std::iter::from_fn(next);
            starts
                .filter_map(|start| start.as_debug_info_offset())
                .collect()
        });
        let index = starts.partition_point(|start| *start <= at);
        let start = starts[index.checked_sub(1)?];
        let mut read = self.read.borrow_mut();
        let mut reader = self.reader.borrow_mut();
        if reader.tables_memory - self.cleared_at.get() > MAX_KEPT {
            self.cleared_at.set(reader.tables_memory);
            read.clear();
        }
        let unit = read.entry(start).or_insert_with(|| {
            let header = self.dwarf.debug_info.header_from_offset(start).ok()?;
            let mut unit = reader.read(header)?;
            // Those of a hostile file may all have one table of names that is as long as the file.
            unit.line_program = None;
            Some(Rc::new(unit))
        });
        unit.clone()
    }
}

/// How many bytes an abbreviation takes in memory at most: it has 112, in a vector that may be half empty.
const ABBREVIATION_MEMORY: u64 = 224;

/// How many bytes each attribute of an abbreviation takes in memory at most, from the sixth one on. The others are in the
/// abbreviation.
const ATTRIBUTE_MEMORY: u64 = 32;

/// How long a table of abbreviations is.
#[derive(Default)]
struct TableSize {
    /// In the file, in bytes.
    len: u64,
    /// In memory, in bytes, at most.
    memory: u64,
}

/// Returns how long a table of abbreviations is (DWARF 5, 7.5.3).
fn table_size(dwarf: &Dwarf<DwarfBytes<'_>>, at: DebugAbbrevOffset) -> TableSize {
    let mut size = TableSize::default();
    let mut table = *dwarf.debug_abbrev.reader();
    if table.skip(at.0).is_err() {
        return size;
    }
    let before = table.len();
    // Up to the first error: gimli reads no further, either.
    let _ = skip_table(&mut table, &mut size.memory);
    size.len = (before - table.len()) as u64;
    size
}

/// Skips a table, and adds what it takes to `memory`.
fn skip_table(table: &mut DwarfBytes<'_>, memory: &mut u64) -> gimli::Result<()> {
    let implicit = u64::from(gimli::constants::DW_FORM_implicit_const.0);
    while table.read_uleb128()? != 0 {
        let _tag = table.read_uleb128()?;
        let _has_children = table.read_u8()?;
        *memory += ABBREVIATION_MEMORY;
        for index in 0.. {
            let attribute = (table.read_uleb128()?, table.read_uleb128()?);
            if attribute == (0, 0) {
                break;
            }
            if index >= 5 {
                *memory += ATTRIBUTE_MEMORY;
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
    use gimli::{DwarfSections, EndianSlice, LittleEndian};

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

    /// Reads all units; returns how many there are, how many bytes their tables take in memory, how many bytes of tables were
    /// read, and whether there may be more.
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
        (count, units.tables_memory, parsed, units.is_cut())
    }

    #[test]
    fn shared_table_is_read_once() {
        let len = 1000 * ENTRY as u64 + 1;
        let memory = 1000 * ABBREVIATION_MEMORY;
        assert_eq!(read(1000, [0; 5]), (5, memory, len, false));
        // Two that overlap are not kept together.
        let len_of_both = 2 * len - ENTRY as u64;
        let of_both = 2 * memory - ABBREVIATION_MEMORY;
        assert_eq!(read(1000, [0, 0, 1]), (3, of_both, len_of_both, false));
        let twice = (4, 2 * of_both, 2 * len_of_both, false);
        assert_eq!(read(1000, [0, 1, 0, 1]), twice);
    }

    #[test]
    fn reading_of_overlapping_tables_is_limited() {
        let tables = |units: u32| (0..units).map(|unit| unit % 2);
        let (count, _, _, is_cut) = read(30_000, tables(1000));
        assert!(is_cut && count < 200, "{count}");
    }
}
