//! What functions of C, C++ and Rust are passed in general registers, and return there, as the debugging information
//! (DWARF) says.

use std::collections::hash_map::Entry;
use std::collections::{BTreeSet, HashMap};

use gimli::{
    AttributeValue, DebugInfoOffset, DebuggingInformationEntry, DwAt, Dwarf, DwarfSections,
    EndianSlice, LittleEndian, RawRngListEntry, SectionId, Unit, constants,
};

use crate::address::FileAddr;
use crate::elf::debug_units::{DebugUnits, UnitsByOffset};
use crate::elf::{DwarfBytes, ElfFile, MAX_SECTION};

/// How many entries are followed from one to the next at most, such as from a typedef to const to int.
const MAX_REFERENCES: usize = 16;

/// How many entries of a list of ranges are read at most: some say what the addresses of others are relative to.
const MAX_RANGES: usize = 4;

type DebugEntry<'e, 'd> = DebuggingInformationEntry<'e, 'e, DwarfBytes<'d>>;

/// What a function is passed in general registers, and what it returns in one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Signature {
    /// There may be more than there are registers.
    pub(crate) arguments: Vec<RegisterValue>,
    /// `None` if it has no result, or one elsewhere.
    pub(crate) result: Option<RegisterValue>,
}

/// A value in a general register, of which other bits are not defined.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RegisterValue {
    /// How many bytes it has: 1, 2, 4 or 8.
    pub(crate) size: u8,
    /// Whether it may be negative.
    pub(crate) signed: bool,
}

impl RegisterValue {
    /// Of 8 bytes: a pointer, or any number.
    pub(crate) const WORD: RegisterValue = RegisterValue {
        size: 8,
        signed: true,
    };

    /// Of a size in bytes, if a value of that size can be.
    fn of(size: u64, signed: bool) -> Option<RegisterValue> {
        match size {
            1 | 2 | 4 | 8 => Some(RegisterValue {
                size: size as u8,
                signed,
            }),
            3 | 5..=7 => Some(RegisterValue::WORD),
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
        if self.result != other.result {
            self.result = Some(RegisterValue::WORD);
        }
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

/// Returns what these functions are passed in general registers. Functions for which this is not known are left out, and
/// those of Go, which passes arguments in other registers.
pub(crate) fn in_general_registers(
    elf: &ElfFile,
    functions: &BTreeSet<FileAddr>,
) -> HashMap<FileAddr, Signature> {
    read(
        |id| elf.debug_section(id, MAX_SECTION).unwrap_or_default(),
        functions,
    )
}

/// The same for a file with these sections.
fn read(
    section: impl Fn(SectionId) -> Vec<u8>,
    functions: &BTreeSet<FileAddr>,
) -> HashMap<FileAddr, Signature> {
    let Ok(sections) = DwarfSections::load(|id| Ok::<_, gimli::Error>(section(id))) else {
        return HashMap::new();
    };
    let dwarf = sections.borrow(|bytes| EndianSlice::new(bytes, LittleEndian));
    let mut found = HashMap::new();
    let mut units = DebugUnits::of(&dwarf);
    let all = UnitsByOffset::of(&dwarf);
    while let Some(unit) = units.next() {
        let unit = DwarfUnit {
            dwarf: &dwarf,
            unit: &unit,
            all: &all,
        };
        if unit.may_have(functions) && !unit.is_go() {
            unit.read(functions, &mut found);
        }
    }
    let known = found.into_iter();
    known
        .filter_map(|(at, signature)| Some((at, signature?)))
        .collect()
}

/// A compilation unit.
struct DwarfUnit<'u, 's, 'd> {
    dwarf: &'s Dwarf<DwarfBytes<'d>>,
    unit: &'u Unit<DwarfBytes<'d>>,
    /// It and all others.
    all: &'u UnitsByOffset<'s, 'd>,
}

/// A function whose parameters are read.
struct Subprogram {
    address: FileAddr,
    /// How deep its entry is in the tree.
    depth: isize,
    /// Whether the last entry below it is a pack of parameters of a C++ template.
    is_in_pack: bool,
    /// `None` if it is not known.
    signature: Option<Signature>,
}

impl Subprogram {
    /// Whether a parameter whose entry is so deep in the tree is its own.
    fn has_parameter_at(&self, depth: isize) -> bool {
        depth == self.depth + 1 || (self.is_in_pack && depth == self.depth + 2)
    }

    fn add_parameter(&mut self, passed: Passed) {
        match (passed, &mut self.signature) {
            (Passed::General(value), Some(signature)) => signature.arguments.push(value),
            (Passed::Elsewhere, _) => {}
            _ => self.signature = None,
        }
    }

    /// Adds it to those that are known.
    fn add_to(self, found: &mut HashMap<FileAddr, Option<Signature>>) {
        match found.entry(self.address) {
            Entry::Vacant(entry) => {
                entry.insert(self.signature);
            }
            // Two functions at one address, which the linker has merged.
            Entry::Occupied(mut entry) => {
                let known = entry.get_mut();
                let both = known.take().zip(self.signature);
                *known = both.and_then(|(one, other)| one.merge(other));
            }
        }
    }
}

/// An entry is in another file, or the information is damaged.
struct Unreadable;

impl<'d> DwarfUnit<'_, '_, 'd> {
    /// Returns whether its functions are of Go.
    fn is_go(&self) -> bool {
        let mut entries = self.unit.entries();
        let Ok(Some((_, root))) = entries.next_dfs() else {
            return false;
        };
        let language = root.attr_value(constants::DW_AT_language).ok().flatten();
        language == Some(AttributeValue::Language(constants::DW_LANG_Go))
    }

    /// Returns whether it may have code of one of these functions.
    fn may_have(&self, functions: &BTreeSet<FileAddr>) -> bool {
        let Ok(mut ranges) = self.dwarf.unit_ranges(self.unit) else {
            return true;
        };
        let mut has_ranges = false;
        while let Ok(Some(range)) = ranges.next() {
            has_ranges = true;
            let mut from = functions.range(FileAddr(range.begin)..);
            if from.next().is_some_and(|at| at.0 < range.end) {
                return true;
            }
        }
        !has_ranges
    }

    /// Adds the functions of the unit that are in `functions`, with `None` if their signature is not known.
    fn read(
        &self,
        functions: &BTreeSet<FileAddr>,
        found: &mut HashMap<FileAddr, Option<Signature>>,
    ) {
        // Those around the entry: one within another is a local function, or one of a local class.
        let mut around: Vec<Subprogram> = Vec::new();
        let mut depth = 0;
        let mut entries = self.unit.entries();
        loop {
            let (delta, entry) = match entries.next_dfs() {
                Ok(Some(next)) => next,
                Ok(None) => break,
                // Parameters may be missing.
                Err(_) => {
                    for function in &mut around {
                        function.signature = None;
                    }
                    break;
                }
            };
            depth += delta;
            let first_ended = around.partition_point(|it| it.depth < depth);
            for ended in around.drain(first_ended..) {
                ended.add_to(found);
            }
            let function = around.last_mut();
            let tag = entry.tag();
            if tag == constants::DW_TAG_formal_parameter {
                if let Some(function) = function.filter(|it| it.has_parameter_at(depth)) {
                    function.add_parameter(self.passed_as_parameter(entry));
                }
                continue;
            }
            if let Some(function) = function.filter(|it| depth == it.depth + 1) {
                function.is_in_pack = tag == constants::DW_TAG_GNU_formal_parameter_pack;
            }
            if tag == constants::DW_TAG_subprogram {
                let address = self.address(entry).map(FileAddr);
                if let Some(address) = address.filter(|it| functions.contains(it)) {
                    around.push(Subprogram {
                        address,
                        depth,
                        is_in_pack: false,
                        signature: self.without_arguments(entry),
                    });
                }
            }
        }
        for function in around {
            function.add_to(found);
        }
    }

    /// Returns the signature of a function before its arguments are added; `None` if it cannot be known.
    fn without_arguments(&self, entry: &DebugEntry<'_, 'd>) -> Option<Signature> {
        // The compiler may have removed arguments or the result, or may pass them in its own way.
        let convention = self.attribute(entry, constants::DW_AT_calling_convention, MAX_REFERENCES);
        let is_normal = match convention {
            Ok(None) => true,
            Ok(Some(AttributeValue::CallingConvention(it))) => it == constants::DW_CC_normal,
            _ => false,
        };
        // The address for a result in memory is passed in a general register as well.
        let result = match self.type_of(entry) {
            Ok(None) => Passed::Elsewhere,
            Ok(Some(at)) => self.passed(at, MAX_REFERENCES),
            Err(Unreadable) => Passed::Unknown,
        };
        let result = match result {
            Passed::General(value) => Some(value),
            Passed::Elsewhere => None,
            Passed::Unknown => return None,
        };
        let arguments = Vec::new();
        is_normal.then_some(Signature { arguments, result })
    }

    /// Returns where the code of a function begins.
    fn address(&self, entry: &DebugEntry<'_, '_>) -> Option<u64> {
        if let Some(value) = entry.attr_value(constants::DW_AT_low_pc).ok()? {
            return self.dwarf.attr_address(self.unit, value).ok()?;
        }
        // In several parts, of which the first has its entry.
        let ranges = entry.attr_value(constants::DW_AT_ranges).ok()??;
        let list = self.dwarf.attr_ranges_offset(self.unit, ranges).ok()??;
        let lists = &self.dwarf.ranges;
        let mut ranges = lists.raw_ranges(list, self.unit.encoding()).ok()?;
        let mut base = self.unit.low_pc;
        // A damaged file may have many long lists in which nothing is.
        for _ in 0..MAX_RANGES {
            match ranges.next().ok()?? {
                RawRngListEntry::BaseAddress { addr } => base = addr,
                RawRngListEntry::BaseAddressx { addr } => {
                    base = self.dwarf.address(self.unit, addr).ok()?;
                }
                RawRngListEntry::AddressOrOffsetPair { begin, .. }
                | RawRngListEntry::OffsetPair { begin, .. } => {
                    return Some(base.wrapping_add(begin));
                }
                RawRngListEntry::StartEnd { begin, .. }
                | RawRngListEntry::StartLength { begin, .. } => return Some(begin),
                RawRngListEntry::StartxEndx { begin, .. }
                | RawRngListEntry::StartxLength { begin, .. } => {
                    return self.dwarf.address(self.unit, begin).ok();
                }
            }
        }
        None
    }

    /// Reads the entry at this offset of the section, with the unit that it is in.
    fn at<T>(
        &self,
        at: DebugInfoOffset,
        read: impl FnOnce(&DwarfUnit<'_, '_, 'd>, &DebugEntry<'_, 'd>) -> T,
    ) -> Result<T, Unreadable> {
        if let Some(here) = at.to_unit_offset(&self.unit.header) {
            let entry = self.unit.entry(here).map_err(|_| Unreadable)?;
            return Ok(read(self, &entry));
        }
        let unit = self.all.containing(at).ok_or(Unreadable)?;
        let there = at.to_unit_offset(&unit.header).ok_or(Unreadable)?;
        let entry = unit.entry(there).map_err(|_| Unreadable)?;
        let unit = DwarfUnit {
            dwarf: self.dwarf,
            unit: &unit,
            all: self.all,
        };
        Ok(read(&unit, &entry))
    }

    /// Returns an attribute of an entry; one that refers to an entry of this unit is made to refer to it from anywhere.
    fn own_attribute(
        &self,
        entry: &DebugEntry<'_, 'd>,
        name: DwAt,
    ) -> Result<Option<AttributeValue<DwarfBytes<'d>>>, Unreadable> {
        match entry.attr_value(name).map_err(|_| Unreadable)? {
            Some(AttributeValue::UnitRef(offset)) => {
                let unit = self.unit.header.offset().as_debug_info_offset();
                let at = unit.and_then(|unit| unit.0.checked_add(offset.0));
                let at = DebugInfoOffset(at.ok_or(Unreadable)?);
                Ok(Some(AttributeValue::DebugInfoRef(at)))
            }
            value => Ok(value),
        }
    }

    /// Returns the entry to which an attribute of an entry refers; `None` if it does not have the attribute.
    fn reference(
        &self,
        entry: &DebugEntry<'_, 'd>,
        name: DwAt,
    ) -> Result<Option<DebugInfoOffset>, Unreadable> {
        referred(self.own_attribute(entry, name)?)
    }

    /// Returns an attribute of a parameter or a function; `None` if it does not have it. If the function is also inlined,
    /// or declared elsewhere, it is in another entry; up to `limit` are followed.
    fn attribute(
        &self,
        entry: &DebugEntry<'_, 'd>,
        name: DwAt,
        limit: usize,
    ) -> Result<Option<AttributeValue<DwarfBytes<'d>>>, Unreadable> {
        let own = self.own_attribute(entry, name)?;
        if own.is_some() {
            return Ok(own);
        }
        let origin = self.reference(entry, constants::DW_AT_abstract_origin)?;
        let declared = self.reference(entry, constants::DW_AT_specification)?;
        let Some(at) = origin.or(declared) else {
            return Ok(None);
        };
        let limit = limit.checked_sub(1).ok_or(Unreadable)?;
        self.at(at, |unit, entry| unit.attribute(entry, name, limit))?
    }

    /// Returns the type of a parameter, or that of the result of a function; `None` if it has none.
    fn type_of(&self, entry: &DebugEntry<'_, 'd>) -> Result<Option<DebugInfoOffset>, Unreadable> {
        referred(self.attribute(entry, constants::DW_AT_type, MAX_REFERENCES)?)
    }

    fn passed_as_parameter(&self, entry: &DebugEntry<'_, 'd>) -> Passed {
        match self.type_of(entry) {
            Ok(Some(at)) => self.passed(at, MAX_REFERENCES),
            _ => Passed::Unknown,
        }
    }

    /// Returns where values of a type are passed; up to `limit` other types are followed.
    fn passed(&self, at: DebugInfoOffset, limit: usize) -> Passed {
        let passed = self.at(at, |unit, entry| unit.passed_as(entry, limit));
        passed.unwrap_or(Passed::Unknown)
    }

    fn passed_as(&self, of: &DebugEntry<'_, 'd>, limit: usize) -> Passed {
        let next = || self.reference(of, constants::DW_AT_type);
        let next = match of.tag() {
            constants::DW_TAG_pointer_type
            | constants::DW_TAG_reference_type
            | constants::DW_TAG_rvalue_reference_type => {
                return Passed::General(RegisterValue::WORD);
            }
            constants::DW_TAG_base_type => return passed_as_base(of),
            constants::DW_TAG_enumeration_type => match next() {
                // Its values may be negative.
                Ok(None) => return Passed::General(RegisterValue::WORD),
                next => next,
            },
            constants::DW_TAG_typedef
            | constants::DW_TAG_const_type
            | constants::DW_TAG_volatile_type
            | constants::DW_TAG_restrict_type
            | constants::DW_TAG_atomic_type => next(),
            _ => return Passed::Unknown,
        };
        match (next, limit.checked_sub(1)) {
            (Ok(Some(at)), Some(limit)) => self.passed(at, limit),
            _ => Passed::Unknown,
        }
    }
}

/// Returns the entry to which an attribute refers; `None` if there is no attribute.
fn referred(
    attribute: Option<AttributeValue<DwarfBytes<'_>>>,
) -> Result<Option<DebugInfoOffset>, Unreadable> {
    match attribute {
        None => Ok(None),
        Some(AttributeValue::DebugInfoRef(at)) => Ok(Some(at)),
        Some(_) => Err(Unreadable),
    }
}

/// Returns where values of a base type are passed.
fn passed_as_base(entry: &DebugEntry<'_, '_>) -> Passed {
    let size = entry.attr_value(constants::DW_AT_byte_size).ok().flatten();
    let size = size.and_then(|it| it.udata_value()).unwrap_or(0);
    let fills_its_bytes = matches!(entry.attr_value(constants::DW_AT_bit_size), Ok(None));
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
        | constants::DW_ATE_UTF
        | constants::DW_ATE_signed
        | constants::DW_ATE_signed_char => {
            let is_signed = matches!(
                encoding,
                constants::DW_ATE_signed | constants::DW_ATE_signed_char
            );
            let value = RegisterValue::of(size, is_signed);
            // Of a `_BitInt`, the bits that it does not have are not defined.
            let value = value.map(|it| {
                if fills_its_bytes {
                    it
                } else {
                    RegisterValue::WORD
                }
            });
            value.map_or(Passed::Unknown, Passed::General)
        }
        _ => Passed::Unknown,
    }
}

#[cfg(test)]
mod tests {
    use gimli::write;
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
            // Of each argument, then of the result: its size, negative if it may be; 0 if it has none.
            type Sizes = (&'static [i8], i8);
            let expected: [(&str, Option<Sizes>); 8] = [
                ("numbers", Some((&[-4, -8, 8, -2, -1, -8], -8))),
                ("texts", Some((&[-8, -8, -8, -8, -8, -4], -8))),
                ("narrow", Some((&[-4, 4, -2, 2, -1, 1], -4))),
                ("floats", Some((&[-4], 0))),
                ("scales", Some((&[-4], 0))),
                ("takes", Some((&[-8], 0))),
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
                    result: (result != 0).then(|| value(result)),
                });
                assert_eq!(found.get(&at), signature.as_ref(), "{name}");
            }
        }
    }

    /// Entries of debugging information.
    struct Entries {
        dwarf: write::Dwarf,
        unit: write::UnitId,
        int: write::UnitEntryId,
    }

    impl Entries {
        /// With a type of C, `int`.
        fn new() -> Entries {
            let encoding = gimli::Encoding {
                format: gimli::Format::Dwarf32,
                version: 5,
                address_size: 8,
            };
            let mut dwarf = write::Dwarf::new();
            let program = write::LineProgram::none();
            let unit = dwarf.units.add(write::Unit::new(encoding, program));
            let root = dwarf.units.get(unit).root();
            let mut entries = Entries {
                dwarf,
                unit,
                int: root,
            };
            entries.int = entries.integer(constants::DW_ATE_signed);
            entries
        }

        /// Adds another unit, to which the next entries belong.
        fn add_unit(&mut self) {
            let encoding = self.unit().encoding();
            let program = write::LineProgram::none();
            self.unit = self.dwarf.units.add(write::Unit::new(encoding, program));
        }

        fn unit(&mut self) -> &mut write::Unit {
            self.dwarf.units.get_mut(self.unit)
        }

        fn add(
            &mut self,
            parent: Option<write::UnitEntryId>,
            tag: gimli::DwTag,
        ) -> write::UnitEntryId {
            let unit = self.unit();
            unit.add(parent.unwrap_or(unit.root()), tag)
        }

        fn set(&mut self, entry: write::UnitEntryId, name: DwAt, value: write::AttributeValue) {
            self.unit().get_mut(entry).set(name, value);
        }

        /// A type of four bytes.
        fn integer(&mut self, encoding: gimli::DwAte) -> write::UnitEntryId {
            let entry = self.add(None, constants::DW_TAG_base_type);
            self.set(
                entry,
                constants::DW_AT_byte_size,
                write::AttributeValue::Udata(4),
            );
            let encoding = write::AttributeValue::Encoding(encoding);
            self.set(entry, constants::DW_AT_encoding, encoding);
            entry
        }

        fn function(&mut self, parent: Option<write::UnitEntryId>, at: u64) -> write::UnitEntryId {
            let entry = self.add(parent, constants::DW_TAG_subprogram);
            let at = write::AttributeValue::Address(write::Address::Constant(at));
            self.set(entry, constants::DW_AT_low_pc, at);
            entry
        }

        fn parameter(&mut self, parent: write::UnitEntryId, of: write::UnitEntryId) {
            let entry = self.add(Some(parent), constants::DW_TAG_formal_parameter);
            self.set(
                entry,
                constants::DW_AT_type,
                write::AttributeValue::UnitRef(of),
            );
        }

        /// What is read of the functions at these addresses: of each argument, its size, negative if it may be.
        fn read(mut self, functions: &[u64]) -> Vec<Option<Vec<i8>>> {
            let mut sections = write::Sections::new(write::EndianVec::new(LittleEndian));
            self.dwarf.write(&mut sections).unwrap();
            let section = |id| {
                sections
                    .get(id)
                    .map(|it| it.slice().to_vec())
                    .unwrap_or_default()
            };
            let wanted = functions.iter().copied().map(FileAddr).collect();
            let found = read(section, &wanted);
            let size = |it: &RegisterValue| {
                if it.signed {
                    -(it.size as i8)
                } else {
                    it.size as i8
                }
            };
            let sizes = |it: &Signature| it.arguments.iter().map(size).collect();
            let functions = functions.iter();
            functions
                .map(|at| found.get(&FileAddr(*at)).map(sizes))
                .collect()
        }
    }

    #[test]
    fn parameters_of_go_are_not_known() {
        for (language, is_known) in [
            (constants::DW_LANG_C99, true),
            (constants::DW_LANG_Go, false),
        ] {
            let mut entries = Entries::new();
            let function = entries.function(None, 0x1000);
            entries.parameter(function, entries.int);
            let root = entries.unit().root();
            let language = write::AttributeValue::Language(language);
            entries.set(root, constants::DW_AT_language, language);
            assert_eq!(entries.read(&[0x1000]), [is_known.then(|| vec![-4])]);
        }
    }

    #[test]
    fn other_calling_conventions_are_not_known() {
        for (convention, is_known) in [
            (constants::DW_CC_normal, true),
            (constants::DW_CC_nocall, false),
        ] {
            let mut entries = Entries::new();
            let function = entries.function(None, 0x1000);
            let convention = write::AttributeValue::CallingConvention(convention);
            entries.set(function, constants::DW_AT_calling_convention, convention);
            entries.parameter(function, entries.int);
            assert_eq!(entries.read(&[0x1000]), [is_known.then(|| vec![-4])]);
        }
    }

    #[test]
    fn packs_of_parameters_are_read_in_order() {
        let mut entries = Entries::new();
        let function = entries.function(None, 0x1000);
        let unsigned = entries.integer(constants::DW_ATE_unsigned);
        entries.parameter(function, unsigned);
        let pack = entries.add(Some(function), constants::DW_TAG_GNU_formal_parameter_pack);
        entries.parameter(pack, entries.int);
        entries.parameter(pack, unsigned);
        entries.parameter(function, entries.int);
        // Parameters of a function that is inlined in it are not its own.
        let inlined = entries.add(Some(function), constants::DW_TAG_inlined_subroutine);
        entries.parameter(inlined, entries.int);
        assert_eq!(entries.read(&[0x1000]), [Some(vec![4, -4, 4, -4])]);
    }

    #[test]
    fn functions_within_others_have_their_own_parameters() {
        let mut entries = Entries::new();
        let outer = entries.function(None, 0x1000);
        let unsigned = entries.integer(constants::DW_ATE_unsigned);
        entries.parameter(outer, entries.int);
        let local = entries.function(Some(outer), 0x2000);
        entries.parameter(local, unsigned);
        let class = entries.add(Some(outer), constants::DW_TAG_class_type);
        let method = entries.function(Some(class), 0x3000);
        entries.parameter(method, unsigned);
        entries.parameter(method, entries.int);
        entries.parameter(outer, unsigned);
        let expected = [vec![-4, 4], vec![4], vec![4, -4]].map(Some);
        assert_eq!(entries.read(&[0x1000, 0x2000, 0x3000]), expected);
    }

    #[test]
    fn entries_of_other_units_are_followed() {
        // As GCC writes it with -flto: what was declared is in the unit of the source file, the code in another one.
        let mut entries = Entries::new();
        let (declaring, unsigned) = (entries.unit, entries.integer(constants::DW_ATE_unsigned));
        let declared = entries.add(None, constants::DW_TAG_subprogram);
        let name = entries.add(None, constants::DW_TAG_typedef);
        let of = write::AttributeValue::UnitRef(unsigned);
        entries.set(name, constants::DW_AT_type, of);
        entries.parameter(declared, name);
        let parameter = entries.unit().get(declared).children().next().copied();
        let elsewhere = |entry| {
            let entry = write::Reference::Entry(declaring, entry);
            write::AttributeValue::DebugInfoRef(entry)
        };
        entries.add_unit();
        let function = entries.function(None, 0x1000);
        let origin = constants::DW_AT_abstract_origin;
        entries.set(function, origin, elsewhere(declared));
        let first = entries.add(Some(function), constants::DW_TAG_formal_parameter);
        entries.set(first, origin, elsewhere(parameter.unwrap()));
        // As LLVM does: only the type is in another unit.
        let second = entries.add(Some(function), constants::DW_TAG_formal_parameter);
        entries.set(second, constants::DW_AT_type, elsewhere(entries.int));
        assert_eq!(entries.read(&[0x1000]), [Some(vec![4, -4])]);
    }

    #[test]
    fn types_that_are_nowhere_are_not_known() {
        // The result may be in memory, whose address is passed first.
        for is_result in [true, false] {
            let mut entries = Entries::new();
            let function = entries.function(None, 0x1000);
            entries.parameter(function, entries.int);
            let of = if is_result {
                function
            } else {
                entries.add(Some(function), constants::DW_TAG_formal_parameter)
            };
            // In another file.
            let elsewhere = write::AttributeValue::DebugInfoRefSup(gimli::DebugInfoOffset(11));
            entries.set(of, constants::DW_AT_type, elsewhere);
            assert_eq!(entries.read(&[0x1000]), [None]);
        }
    }

    #[test]
    fn function_in_parts_is_known_by_the_first() {
        let mut entries = Entries::new();
        let function = entries.add(None, constants::DW_TAG_subprogram);
        let range = |begin| write::Range::StartEnd {
            begin: write::Address::Constant(begin),
            end: write::Address::Constant(begin + 16),
        };
        let ranges = write::RangeList(vec![range(0x2000), range(0x1000)]);
        let ranges = entries.unit().ranges.add(ranges);
        let ranges = write::AttributeValue::RangeListRef(ranges);
        entries.set(function, constants::DW_AT_ranges, ranges);
        entries.parameter(function, entries.int);
        assert_eq!(entries.read(&[0x1000, 0x2000]), [None, Some(vec![-4])]);
    }

    #[test]
    fn numbers_with_undefined_bits_are_words() {
        let mut entries = Entries::new();
        let function = entries.function(None, 0x1000);
        let bits = write::AttributeValue::Udata(17);
        entries.set(entries.int, constants::DW_AT_bit_size, bits);
        entries.parameter(function, entries.int);
        assert_eq!(entries.read(&[0x1000]), [Some(vec![-8])]);
    }

    #[test]
    fn merged_functions_have_what_both_have() {
        let value = |size, signed| RegisterValue { size, signed };
        let (int, byte) = (value(4, true), value(1, false));
        let of = |arguments: &[RegisterValue], result| Signature {
            arguments: arguments.to_vec(),
            result,
        };
        let merged = of(&[int, byte], Some(int)).merge(of(&[int, int], Some(byte)));
        let word = RegisterValue::WORD;
        assert_eq!(merged, Some(of(&[int, word], Some(word))));
        let merged = of(&[int], None).merge(of(&[int], Some(int)));
        assert_eq!(merged, Some(of(&[int], Some(word))));
        assert_eq!(of(&[int], None).merge(of(&[], None)), None);
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
        assert_ne!(RegisterValue::of(8, false), Some(RegisterValue::WORD));
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
                let mut bytes = elf.debug_section(id, MAX_SECTION).unwrap_or_default();
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
