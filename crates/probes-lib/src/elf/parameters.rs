//! What functions of C, C++ and Rust are passed in general registers, and return there, as the debugging information
//! (DWARF) says.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};

use gimli::{
    AttributeValue, DebuggingInformationEntry, DwAt, Dwarf, DwarfSections, EndianSlice,
    LittleEndian, SectionId, Unit, UnitOffset, constants,
};

use crate::address::FileAddr;
use crate::elf::{DwarfBytes, ElfFile};

/// How many entries are followed from one to the next at most, such as from a typedef to const to int.
const MAX_REFERENCES: usize = 16;

type DebugEntry<'e, 'd> = DebuggingInformationEntry<'e, 'e, DwarfBytes<'d>>;

/// What a function is passed in general registers, and what it returns in one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Signature {
    /// There may be more than there are registers.
    pub(crate) arguments: Vec<RegisterValue>,
    /// A word if it has no result, or one elsewhere.
    pub(crate) result: RegisterValue,
}

/// A value in a general register, of which other bits are not defined.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RegisterValue {
    /// How many bytes it has: 1, 2, 4 or 8.
    pub(crate) size: u8,
    /// Whether it may be negative; not known of 8 bytes, which may be a pointer.
    pub(crate) signed: bool,
}

impl RegisterValue {
    /// Of 8 bytes.
    pub(crate) const WORD: RegisterValue = RegisterValue {
        size: 8,
        signed: false,
    };

    /// Of a size in bytes, if a value of that size can be.
    fn of(size: u64, signed: bool) -> Option<RegisterValue> {
        match size {
            1 | 2 | 4 => Some(RegisterValue {
                size: size as u8,
                signed,
            }),
            3 | 5..=8 => Some(RegisterValue::WORD),
            _ => None,
        }
    }
}

impl Default for RegisterValue {
    fn default() -> RegisterValue {
        RegisterValue::WORD
    }
}

impl Signature {
    /// Combines those of two functions at one address; `None` if they have different numbers of arguments.
    fn merge(mut self, other: Signature) -> Option<Signature> {
        if self.arguments.len() != other.arguments.len() {
            return None;
        }
        let merge = |one: &mut RegisterValue, other| {
            if *one != other {
                *one = RegisterValue::WORD;
            }
        };
        for (one, other) in self.arguments.iter_mut().zip(other.arguments) {
            merge(one, other);
        }
        merge(&mut self.result, other.result);
        Some(self)
    }
}

/// Where a value is passed (psABI 3.2.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Passed {
    General(RegisterValue),
    /// In a vector register, or on the stack.
    Elsewhere,
    /// Not determined: a structure, which is classified by its members, or a type that is not read here.
    Unknown,
}

/// Returns what these functions are passed in general registers. Functions for which this is not known are left out.
pub(crate) fn in_general_registers(
    elf: &ElfFile,
    functions: &HashSet<FileAddr>,
) -> HashMap<FileAddr, Signature> {
    read(|id| elf.debug_section(id).unwrap_or_default(), functions)
}

/// The same for a file with these sections.
fn read(
    section: impl Fn(SectionId) -> Vec<u8>,
    functions: &HashSet<FileAddr>,
) -> HashMap<FileAddr, Signature> {
    let Ok(sections) = DwarfSections::load(|id| Ok::<_, gimli::Error>(section(id))) else {
        return HashMap::new();
    };
    let dwarf = sections.borrow(|bytes| EndianSlice::new(bytes, LittleEndian));
    let mut found = HashMap::new();
    let mut units = dwarf.units();
    while let Ok(Some(header)) = units.next() {
        if let Ok(unit) = dwarf.unit(header) {
            let unit = DwarfUnit {
                dwarf: &dwarf,
                unit: &unit,
            };
            if unit.may_have(functions) {
                unit.read(functions, &mut found);
            }
        }
    }
    let known = found.into_iter();
    known
        .filter_map(|(at, signature)| Some((at, signature?)))
        .collect()
}

/// A compilation unit.
struct DwarfUnit<'u, 'd> {
    dwarf: &'u Dwarf<DwarfBytes<'d>>,
    unit: &'u Unit<DwarfBytes<'d>>,
}

/// A function whose parameters are read.
struct Subprogram {
    address: FileAddr,
    /// How deep its entry is in the tree.
    depth: isize,
    /// `None` if it is not known.
    signature: Option<Signature>,
}

impl DwarfUnit<'_, '_> {
    /// Returns whether it may have code of one of these functions.
    fn may_have(&self, functions: &HashSet<FileAddr>) -> bool {
        let Ok(mut ranges) = self.dwarf.unit_ranges(self.unit) else {
            return true;
        };
        let mut has_ranges = false;
        while let Ok(Some(range)) = ranges.next() {
            has_ranges = true;
            let mut addresses = functions.iter();
            if addresses.any(|at| (range.begin..range.end).contains(&at.0)) {
                return true;
            }
        }
        !has_ranges
    }

    /// Adds the functions of the unit that are in `functions`, with `None` if their signature is not known.
    fn read(
        &self,
        functions: &HashSet<FileAddr>,
        found: &mut HashMap<FileAddr, Option<Signature>>,
    ) {
        let mut add = |function: Subprogram| {
            let Subprogram {
                address, signature, ..
            } = function;
            match found.entry(address) {
                Entry::Vacant(entry) => {
                    entry.insert(signature);
                }
                // Two functions at one address, which the linker has merged.
                Entry::Occupied(mut entry) => {
                    let known = entry.get_mut();
                    let merged = known.take().zip(signature);
                    *known = merged.and_then(|(one, other)| one.merge(other));
                }
            }
        };
        let mut function: Option<Subprogram> = None;
        let mut depth = 0;
        let mut entries = self.unit.entries();
        while let Ok(Some((delta, entry))) = entries.next_dfs() {
            depth += delta;
            if let Some(ended) = function.take_if(|it| depth <= it.depth) {
                add(ended);
            }
            match (&mut function, entry.tag()) {
                (Some(outer), constants::DW_TAG_formal_parameter) if depth == outer.depth + 1 => {
                    let passed = self.type_of(entry).map(|it| self.passed(it));
                    match (passed, &mut outer.signature) {
                        (Some(Passed::General(value)), Some(signature)) => {
                            signature.arguments.push(value);
                        }
                        (Some(Passed::Elsewhere), _) => {}
                        _ => outer.signature = None,
                    }
                }
                (None, constants::DW_TAG_subprogram) => {
                    let address = self.address(entry).map(FileAddr);
                    if let Some(address) = address.filter(|it| functions.contains(it)) {
                        // The address for a result in memory is passed in a general register as well.
                        let result = self.type_of(entry).map(|it| self.passed(it));
                        let result = match result {
                            Some(Passed::General(value)) => Some(value),
                            Some(Passed::Elsewhere) | None => Some(RegisterValue::WORD),
                            Some(Passed::Unknown) => None,
                        };
                        function = Some(Subprogram {
                            address,
                            depth,
                            signature: result.map(|result| Signature {
                                arguments: Vec::new(),
                                result,
                            }),
                        });
                    }
                }
                _ => {}
            }
        }
        if let Some(ended) = function {
            add(ended);
        }
    }

    /// Returns where the code of a function begins.
    fn address(&self, entry: &DebugEntry<'_, '_>) -> Option<u64> {
        let value = entry.attr_value(constants::DW_AT_low_pc).ok()??;
        self.dwarf.attr_address(self.unit, value).ok()?
    }

    /// Returns the entry that an attribute of an entry refers to, in this unit.
    fn reference(&self, entry: &DebugEntry<'_, '_>, name: DwAt) -> Option<UnitOffset> {
        match entry.attr_value(name).ok()?? {
            AttributeValue::UnitRef(offset) => Some(offset),
            _ => None,
        }
    }

    /// Returns the type of a parameter, or that of the result of a function. If the function is also inlined, or
    /// declared elsewhere, that is in another entry.
    fn type_of(&self, entry: &DebugEntry<'_, '_>) -> Option<UnitOffset> {
        const OTHERS: [DwAt; 2] = [
            constants::DW_AT_abstract_origin,
            constants::DW_AT_specification,
        ];
        let mut at = None;
        for _ in 0..MAX_REFERENCES {
            let other = at.map(|at| self.unit.entry(at)).transpose().ok()?;
            let entry = other.as_ref().unwrap_or(entry);
            if let Some(found) = self.reference(entry, constants::DW_AT_type) {
                return Some(found);
            }
            let mut others = OTHERS.into_iter();
            at = Some(others.find_map(|name| self.reference(entry, name))?);
        }
        None
    }

    /// Returns where values of a type are passed.
    fn passed(&self, mut at: UnitOffset) -> Passed {
        for _ in 0..MAX_REFERENCES {
            let Ok(entry) = self.unit.entry(at) else {
                return Passed::Unknown;
            };
            match entry.tag() {
                constants::DW_TAG_pointer_type
                | constants::DW_TAG_reference_type
                | constants::DW_TAG_rvalue_reference_type => {
                    return Passed::General(RegisterValue::WORD);
                }
                constants::DW_TAG_base_type => return passed_as_base(&entry),
                constants::DW_TAG_enumeration_type => {
                    match self.reference(&entry, constants::DW_AT_type) {
                        Some(next) => at = next,
                        // Its values may be negative.
                        None => return Passed::General(RegisterValue::WORD),
                    }
                }
                constants::DW_TAG_typedef
                | constants::DW_TAG_const_type
                | constants::DW_TAG_volatile_type
                | constants::DW_TAG_restrict_type
                | constants::DW_TAG_atomic_type => {
                    match self.reference(&entry, constants::DW_AT_type) {
                        Some(next) => at = next,
                        None => return Passed::Unknown,
                    }
                }
                _ => return Passed::Unknown,
            }
        }
        Passed::Unknown
    }
}

/// Returns where values of a base type are passed.
fn passed_as_base(entry: &DebugEntry<'_, '_>) -> Passed {
    let size = entry.attr_value(constants::DW_AT_byte_size).ok().flatten();
    let size = size.and_then(|it| it.udata_value()).unwrap_or(0);
    let encoding = entry.attr_value(constants::DW_AT_encoding).ok().flatten();
    let Some(AttributeValue::Encoding(encoding)) = encoding else {
        return Passed::Unknown;
    };
    match encoding {
        constants::DW_ATE_float | constants::DW_ATE_complex_float => Passed::Elsewhere,
        constants::DW_ATE_address
        | constants::DW_ATE_boolean
        | constants::DW_ATE_unsigned
        | constants::DW_ATE_unsigned_char
        | constants::DW_ATE_UTF => general(size, false),
        constants::DW_ATE_signed | constants::DW_ATE_signed_char => general(size, true),
        _ => Passed::Unknown,
    }
}

fn general(size: u64, signed: bool) -> Passed {
    RegisterValue::of(size, signed).map_or(Passed::Unknown, Passed::General)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use test_support::{fixture, fixture_forms};

    use super::*;
    use crate::Functions;
    use crate::testing::properties;

    #[test]
    fn arguments_in_general_registers_are_known() {
        for file in fixture_forms("passing") {
            let elf = ElfFile::open(&file).unwrap();
            let functions = Functions::of_file(&file).unwrap();
            let address = |name: &str| {
                let glob = crate::FunctionSelector::Glob(name.parse().unwrap());
                functions.select(&[glob]).unwrap()[0].function.range().start
            };
            // Of each argument, then of the result: its size, negative if it may be.
            type Sizes = (&'static [i8], i8);
            let expected: [(&str, Option<Sizes>); 8] = [
                ("numbers", Some((&[-4, 8, 8, -2, -1, 8], 8))),
                ("texts", Some((&[8, 8, 8, 8, 8, -4], 8))),
                ("narrow", Some((&[-4, 4, -2, 2, -1, 1], -4))),
                ("floats", Some((&[-4], 8))),
                ("scales", Some((&[-4], 8))),
                ("takes", Some((&[8], 8))),
                ("pairs", None),
                ("pair", None),
            ];
            let addresses = expected.map(|(name, _)| address(name));
            let found = in_general_registers(&elf, &addresses.into_iter().collect());
            let value = |size: i8| RegisterValue {
                size: size.unsigned_abs(),
                signed: size < 0,
            };
            for ((name, expected), at) in expected.into_iter().zip(addresses) {
                let signature = expected.map(|(arguments, result)| Signature {
                    arguments: arguments.iter().map(|it| value(*it)).collect(),
                    result: value(result),
                });
                assert_eq!(found.get(&at), signature.as_ref(), "{name}");
            }
        }
    }

    #[test]
    fn merged_functions_have_what_both_have() {
        let value = |size, signed| RegisterValue { size, signed };
        let (int, byte) = (value(4, true), value(1, false));
        let of = |arguments: &[RegisterValue], result| Signature {
            arguments: arguments.to_vec(),
            result,
        };
        let merged = of(&[int, byte], int).merge(of(&[int, int], byte));
        let word = RegisterValue::WORD;
        assert_eq!(merged, Some(of(&[int, word], word)));
        assert_eq!(of(&[int], int).merge(of(&[], int)), None);
    }

    #[test]
    fn values_of_odd_sizes_are_words() {
        for (size, expected) in [
            (0, None),
            (1, Some(1)),
            (2, Some(2)),
            (3, Some(8)),
            (4, Some(4)),
        ] {
            assert_eq!(RegisterValue::of(size, false).map(|it| it.size), expected);
        }
        assert_eq!(RegisterValue::of(8, true), Some(RegisterValue::WORD));
        assert_eq!(RegisterValue::of(16, false), None);
    }

    proptest! {
        #![proptest_config(properties(128))]

        #[test]
        fn damaged_information_is_read_or_ignored(
            damages in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..20),
            damages_abbreviations in any::<bool>(),
        ) {
            let elf = ElfFile::open(&fixture("passing.pie")).unwrap();
            let damaged = if damages_abbreviations {
                SectionId::DebugAbbrev
            } else {
                SectionId::DebugInfo
            };
            let section = |id: SectionId| {
                let mut bytes = elf.debug_section(id).unwrap_or_default();
                if id == damaged {
                    for (at, byte) in &damages {
                        let at = at.index(bytes.len());
                        bytes[at] = *byte;
                    }
                }
                bytes
            };
            let functions = (0x1000..0x2000).map(FileAddr).collect();
            // It neither panics nor hangs.
            read(section, &functions);
        }
    }
}
