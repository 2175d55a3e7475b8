//! Where functions are according to `.eh_frame`, the table with which debuggers and C++ unwind the stack. It has no
//! names, but strip(1) keeps it, and compilers write an entry (FDE) for each function.

use gimli::{
    BaseAddresses, CfaRule, CieOrFde, EhFrame, LittleEndian, Register, UnwindContext, UnwindSection,
};

use crate::address::FileAddr;
use crate::elf::ElfFile;
use crate::elf::unwind_entry::is_short;

/// `rsp` in DWARF.
const RSP: Register = Register(7);

/// Where a function, or a part of one, is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct UnwindRange {
    pub(super) address: FileAddr,
    /// In bytes.
    pub(super) len: u64,
    /// Whether nothing but the return address is on the stack at its first instruction: not so in a part of a
    /// function that the compiler has moved away.
    pub(super) is_entry: bool,
}

/// Returns the ranges in the file's order, without those at known addresses; none if the file has no such table, and
/// only those before the first damaged entry.
pub(super) fn unwind_ranges(
    elf: &ElfFile,
    is_known: impl Fn(FileAddr) -> bool,
) -> Vec<UnwindRange> {
    let table = elf.whole_section(".eh_frame");
    let (Some(bytes), Some((address, _))) = (table, elf.section_range(".eh_frame")) else {
        return Vec::new();
    };
    let text = elf.section_range(".text").map_or(0, |(text, _)| text.0);
    ranges_in(&bytes, address, text, is_known)
}

/// The same for a table with these bytes that is loaded at `address`.
fn ranges_in(
    bytes: &[u8],
    address: FileAddr,
    text: u64,
    is_known: impl Fn(FileAddr) -> bool,
) -> Vec<UnwindRange> {
    let table = EhFrame::new(bytes, LittleEndian);
    let bases = BaseAddresses::default()
        .set_eh_frame(address.0)
        .set_text(text);
    let mut context = UnwindContext::new();
    let mut ranges = Vec::new();
    let mut entries = table.entries(&bases);
    while let Ok(Some(entry)) = entries.next() {
        let CieOrFde::Fde(partial) = entry else {
            continue;
        };
        let Ok(fde) = partial.parse(EhFrame::cie_from_offset) else {
            break;
        };
        let address = FileAddr(fde.initial_address());
        if is_known(address) || !is_short(&fde) {
            continue;
        }
        let mut rows = match fde.rows(&table, &bases, &mut context) {
            Ok(rows) => rows,
            Err(_) => break,
        };
        let first = rows.next_row().ok().flatten();
        let at_entry = CfaRule::RegisterAndOffset {
            register: RSP,
            offset: 8,
        };
        ranges.push(UnwindRange {
            address,
            len: fde.len(),
            is_entry: first.is_some_and(|row| *row.cfa() == at_entry),
        });
    }
    ranges
}

#[cfg(test)]
mod tests {
    use goblin::elf::Sym;
    use test_support::program_forms;

    use super::*;
    use crate::elf::symbols::SymbolTable;
    use crate::testing::properties;

    #[test]
    fn every_function_of_ocaml_has_a_range() {
        for file in program_forms("service") {
            let elf = ElfFile::open(&file).unwrap();
            let ranges = unwind_ranges(&elf, |_| false);
            let table = crate::elf::functions::FunctionTable::of(&elf).unwrap();
            let mut compared = 0;
            for function in table.functions() {
                let name = function.name().unwrap();
                if name.text.starts_with("Stdlib.List.") {
                    let range = UnwindRange {
                        address: function.address(),
                        len: function.len(),
                        is_entry: true,
                    };
                    assert!(ranges.contains(&range), "{name} {range:?}");
                    compared += 1;
                }
            }
            assert!(compared > 50);
        }
    }

    #[test]
    fn part_that_was_moved_away_is_no_entry() {
        let elf = ElfFile::open(&program_forms("service")[0]).unwrap();
        let mut parts = Vec::new();
        let visit = |symbol: &Sym, name: &[u8]| {
            if name.ends_with(b".cold") {
                parts.push(FileAddr(symbol.st_value));
            }
        };
        elf.each_symbol(SymbolTable::Static, visit).unwrap();
        assert!(!parts.is_empty());
        let ranges = unwind_ranges(&elf, |_| false);
        let of_parts = ranges.iter().filter(|it| parts.contains(&it.address));
        assert!(of_parts.filter(|it| !it.is_entry).count() > 0);
    }

    proptest::proptest! {
        #![proptest_config(properties(256))]

        #[test]
        fn damaged_tables_are_read(
            damages in proptest::collection::vec((proptest::prelude::any::<proptest::sample::Index>(), proptest::prelude::any::<u8>()), 1..20),
        ) {
            let elf = ElfFile::open(&test_support::fixture("gen_ocaml_2.pie")).unwrap();
            let mut bytes = elf.whole_section(".eh_frame").unwrap();
            for (index, byte) in damages {
                let at = index.index(bytes.len());
                bytes[at] = byte;
            }
            // An entry has at least a length and an identity.
            proptest::prop_assert!(ranges_in(&bytes, FileAddr(0x1000), 0, |_| false).len() <= bytes.len() / 8);
        }
    }
}
