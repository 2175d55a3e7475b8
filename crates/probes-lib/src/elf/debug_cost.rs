//! What debugging information takes in memory once it is loaded, found before it is: a few bytes of a file may become gigabytes. And
//! whether it says that there is more in other files.

use gimli::{
    AttributeValue, Dwarf, DwarfSections, EndianSlice, FileEntry, LittleEndian, Reader, SectionId,
    Unit, UnitType,
};

use super::debug_units::{DebugUnits, is_needed};
use super::{DwarfBytes, ElfFile};

/// How many bytes addr2line keeps of each unit.
const UNIT_MEMORY: u64 = 640;

/// How many bytes of paths a unit has that do not count: those of a real unit, whose paths are only in memory if a line in
/// it was looked up.
const USUAL_PATHS: u64 = 256 << 10;

/// The largest section that is read here.
const MAX_READ: u64 = 1 << 30;

/// What debugging information takes.
#[derive(Default)]
pub(super) struct DebugCost {
    /// How many bytes it takes in memory beside the file: sections that are decompressed, units, tables of abbreviations, paths of
    /// source files. If that is more than was asked about, not all are counted.
    pub(super) bytes: u64,
    /// Whether a unit says that the rest of it is in another file.
    pub(super) has_split_units: bool,
}

impl DebugCost {
    /// Returns what the debugging information of a file takes; if that is more than `most` bytes, not how much more.
    pub(super) fn of(elf: &ElfFile, most: u64) -> DebugCost {
        let decompressed = elf.sections.iter().scan(0_u64, |sum, section| {
            let len = elf.decompressed_len(section, most.saturating_sub(*sum));
            *sum = sum.saturating_add(len);
            Some(*sum)
        });
        let mut cost = DebugCost {
            bytes: decompressed.last().unwrap_or(0),
            has_split_units: false,
        };
        if cost.bytes <= most {
            let section = |id| {
                let bytes = is_needed(id)
                    .then(|| elf.debug_section(id, MAX_READ))
                    .flatten();
                bytes.unwrap_or_default()
            };
            cost.add_units(section, most);
        }
        cost
    }

    fn add_units(&mut self, section: impl Fn(SectionId) -> Vec<u8>, most: u64) {
        let Ok(sections) = DwarfSections::load(|id| Ok::<_, gimli::Error>(section(id))) else {
            return;
        };
        let dwarf = sections.borrow(|bytes| EndianSlice::new(bytes, LittleEndian));
        let before = self.bytes;
        let mut units = DebugUnits::of(&dwarf);
        let (mut paths, mut unit_memory) = (0, 0);
        while let Some(unit) = units.next() {
            self.has_split_units |= unit.dwo_id.is_some();
            // No lines are looked up in other units, such as those of types.
            if matches!(
                unit.header.type_(),
                UnitType::Compilation | UnitType::Skeleton(_)
            ) {
                let len = paths_len(&dwarf, &unit, most.saturating_add(USUAL_PATHS));
                paths += len.saturating_sub(USUAL_PATHS);
            }
            unit_memory += UNIT_MEMORY;
            self.bytes = before.saturating_add(units.tables_memory + paths + unit_memory);
            if self.bytes > most {
                return;
            }
        }
        // One that cannot be read here may be split.
        self.has_split_units |= units.has_unreadable;
        if units.is_cut() {
            self.bytes = u64::MAX;
        }
    }
}

/// Returns how many bytes the paths of the source files of a unit have, each as a whole; stops when they are more than `most`.
fn paths_len(dwarf: &Dwarf<DwarfBytes<'_>>, unit: &Unit<DwarfBytes<'_>>, most: u64) -> u64 {
    let Some(program) = &unit.line_program else {
        return 0;
    };
    let header = program.header();
    let len = |value: AttributeValue<DwarfBytes<'_>>| {
        dwarf.attr_string(unit, value).map_or(0, |text| text.len())
    };
    let path = |file: &FileEntry<DwarfBytes<'_>>| {
        let directory = file.directory(header).map_or(0, len);
        (directory + len(file.path_name())) as u64
    };
    let root = unit.comp_dir.map_or(0, |it| it.len()) as u64;
    let mut paths = 0;
    for file in header.file_names() {
        paths += root + path(file) + size_of::<String>() as u64;
        if paths > most {
            break;
        }
    }
    paths
}

#[cfg(test)]
mod tests {
    use std::fs::OpenOptions;
    use std::os::unix::fs::FileExt;

    use test_support::Scratch;

    use super::*;
    use crate::elf::compression::has_compression_flag;
    use crate::elf::source::SourceMap;
    use crate::testing::{compile, unit_with_indexed_address};

    #[test]
    fn split_units_with_indexed_addresses_are_seen() {
        let scratch = Scratch::new();
        for is_split in [false, true] {
            let program = unit_with_indexed_address(&scratch, is_split);
            let elf = ElfFile::open(&program).unwrap();
            assert_eq!(DebugCost::of(&elf, u64::MAX).has_split_units, is_split);
        }
    }

    #[test]
    fn compressed_sections_count_in_full() {
        const HUGE: u64 = 1 << 40;
        let scratch = Scratch::new();
        let text = "#include <stdio.h>\nint main(void) { return puts(\"\"); }";
        let program = compile(&scratch, "program.c", text, &["-g", "-gz=zlib"]);
        let elf = ElfFile::open(&program).unwrap();
        let cost = DebugCost::of(&elf, u64::MAX);
        let mut sections = elf.sections.iter();
        let section = sections.find(|it| has_compression_flag(it)).unwrap();
        let len = elf.decompressed_len(section, u64::MAX);
        assert!(len > section.sh_size && cost.bytes > len, "{len}");
        assert!(elf.debug_section(SectionId::DebugInfo, MAX_READ).is_some());
        assert!(SourceMap::of(&elf).is_ok());
        let file = OpenOptions::new().write(true).open(&program).unwrap();
        // ch_size (elf(5)).
        file.write_all_at(&HUGE.to_le_bytes(), section.sh_offset + 8)
            .unwrap();
        let elf = ElfFile::open(&program).unwrap();
        assert!(DebugCost::of(&elf, u64::MAX).bytes >= HUGE);
        let error = SourceMap::of(&elf).err().unwrap().to_string();
        assert!(error.contains("too much"), "{error}");
        assert!(SourceMap::left_out().contains(&program));
    }

    /// The paths of source files, all with one long name.
    #[test]
    fn paths_count_as_often_as_used() {
        const FILES: u64 = 1000;
        const NAME: u64 = 10_000;
        let scratch = Scratch::new();
        let text = format!(
            r#".globl _start
_start: nop
.Lend:
.section .debug_abbrev,"",@progbits
.byte 1,0x11,0,0x10,0x17,0,0,0
.section .debug_info,"",@progbits
.long 2f-1f
1: .short 5
.byte 1,8
.long 0
.byte 1
.long 0
2:
.section .debug_line_str,"MS",@progbits,1
.fill {NAME},1,0x61
.byte 0
.section .debug_line,"",@progbits
.long 4f-3f
3: .short 5
.byte 8,0
.long 6f-5f
5: .byte 1,1,1,-5,14,13,0,1,1,1,1,0,0,0,1,0,0,1
.byte 1,1,0x1f,1
.long 0
.byte 1,1,0x1f
.uleb128 {FILES}
.fill {},1,0
6: .byte 0,9,2
.quad _start
.byte 1,2,1,0,1,1
4:
"#,
            4 * FILES
        );
        let program = compile(&scratch, "program.s", &text, &["-nostdlib", "-no-pie"]);
        let elf = ElfFile::open(&program).unwrap();
        let cost = DebugCost::of(&elf, u64::MAX).bytes;
        assert!((FILES * NAME..4 * FILES * NAME).contains(&cost), "{cost}");
        assert!(DebugCost::of(&elf, FILES).bytes > FILES);
    }
}
