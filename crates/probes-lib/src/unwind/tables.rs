//! [`UnwindTables`]: what `.eh_frame` of one file says of each address, read by gimli (DWARF 5, section 6.4; Linux
//! Standard Base Core, 10.6).

use std::ops::Range;
use std::sync::OnceLock;

use gimli::{
    BaseAddresses, CfaRule, CieOrFde, EhFrame, EhFrameHdr, EhFrameOffset, Encoding,
    FrameDescriptionEntry, LittleEndian, Pointer, RegisterRule, UnwindContext, UnwindExpression,
    UnwindSection, X86_64,
};

use crate::address::FileAddr;
use crate::elf::{DwarfBytes, ElfFile};

/// How the caller of a frame is found.
#[derive(Debug)]
pub(super) struct Rule {
    /// Where the frame ends (canonical frame address).
    pub(super) cfa: Cfa,
    /// The registers whose values in the caller are not those that they have now.
    pub(super) registers: Vec<(usize, CallerValue)>,
    /// `None` if nothing has called this code.
    pub(super) return_address: Option<CallerValue>,
    pub(super) is_signal_frame: bool,
    /// The function that the rule is for, in the file.
    pub(super) function: Range<u64>,
}

#[derive(Debug)]
pub(super) enum Cfa {
    Register(usize, i64),
    Expression(DwarfExpression),
}

/// Where the value is that a register has in the caller; offsets are from the CFA.
#[derive(Debug)]
pub(super) enum CallerValue {
    Unknown,
    At(i64),
    Value(i64),
    Register(usize),
    AtExpression(DwarfExpression),
    ValueExpression(DwarfExpression),
}

/// A DWARF expression.
#[derive(Debug)]
pub(super) struct DwarfExpression {
    pub(super) bytes: Vec<u8>,
    pub(super) encoding: Encoding,
}

impl CallerValue {
    /// Returns whether it is in the memory below the stack pointer, and less than `most` bytes below.
    pub(super) fn is_below(&self, cfa: u64, stack_pointer: u64, most: u64) -> bool {
        let CallerValue::At(offset) = self else {
            return false;
        };
        let at = cfa.wrapping_add_signed(*offset);
        at < stack_pointer && stack_pointer - at < most
    }
}

impl Rule {
    pub(super) fn is_addressed_by(&self, register: usize) -> bool {
        matches!(self.cfa, Cfa::Register(it, _) if it == register)
    }

    pub(super) fn returns_to_the_word_below_cfa(&self) -> bool {
        matches!(self.return_address, Some(CallerValue::At(-8)))
    }
}

/// The unwind table of one file.
#[derive(Debug)]
pub(super) struct UnwindTables {
    /// The bytes of `.eh_frame`.
    frames: Vec<u8>,
    /// The address of `.eh_frame` in the file.
    start: u64,
    /// `.eh_frame_hdr`, which leads from addresses to entries.
    index: Option<Vec<u8>>,
    bases: BaseAddresses,
    /// Where each entry begins, and its offset: made by reading all entries, if the file has no index or a damaged one.
    own_index: OnceLock<Vec<(u64, usize)>>,
}

impl UnwindTables {
    /// Reads the sections; a file without them has an empty table.
    pub(super) fn of(elf: &ElfFile) -> UnwindTables {
        let start = |name: &str| elf.section_range(name).map_or(0, |(start, _)| start.0);
        UnwindTables {
            frames: elf.whole_section(".eh_frame").unwrap_or_default(),
            start: start(".eh_frame"),
            index: elf.whole_section(".eh_frame_hdr"),
            bases: BaseAddresses::default()
                .set_eh_frame(start(".eh_frame"))
                .set_eh_frame_hdr(start(".eh_frame_hdr"))
                .set_text(start(".text"))
                .set_got(start(".got")),
            own_index: OnceLock::new(),
        }
    }

    /// The same, changed by a test.
    #[cfg(test)]
    pub(super) fn damaged(elf: &ElfFile, damage: impl Fn(&mut [u8])) -> UnwindTables {
        let mut tables = UnwindTables::of(elf);
        damage(&mut tables.frames);
        if let Some(index) = &mut tables.index {
            damage(index);
        }
        tables
    }

    /// Returns the rule for an address; `None` if the table has none, or it makes no sense.
    pub(super) fn rule(&self, address: FileAddr) -> Option<Rule> {
        let mut frames = EhFrame::new(&self.frames, LittleEndian);
        frames.set_address_size(8);
        let fde = self.entry(&frames, address)?;
        // The row for `caml_c_call_stack_args` of OCaml 5 is followed by a malformed one, which changes the offset of
        // an expression: what was said before still holds.
        let mut context = UnwindContext::new();
        let mut rows = fde.rows(&frames, &self.bases, &mut context).ok()?;
        let mut row = None;
        while let Ok(Some(next)) = rows.next_row() {
            if next.start_address() > address.0 {
                break;
            }
            row = Some(next.clone());
        }
        let row = row?;
        let encoding = fde.cie().encoding();
        let expression = |expression: UnwindExpression<usize>| -> Option<DwarfExpression> {
            let bytes = expression.get(&frames).ok()?.0.slice().to_vec();
            Some(DwarfExpression { bytes, encoding })
        };
        let saved = |rule: &RegisterRule<usize>| -> Option<CallerValue> {
            Some(match rule {
                RegisterRule::Offset(offset) => CallerValue::At(*offset),
                RegisterRule::ValOffset(offset) => CallerValue::Value(*offset),
                RegisterRule::Register(register) => CallerValue::Register(register.0.into()),
                RegisterRule::Expression(it) => CallerValue::AtExpression(expression(*it)?),
                RegisterRule::ValExpression(it) => CallerValue::ValueExpression(expression(*it)?),
                _ => CallerValue::Unknown,
            })
        };
        let cfa = match row.cfa() {
            CfaRule::RegisterAndOffset { register, offset } => {
                Cfa::Register(register.0.into(), *offset)
            }
            CfaRule::Expression(it) => Cfa::Expression(expression(*it)?),
        };
        let (mut registers, mut return_address) = (Vec::new(), None);
        for (register, rule) in row.registers() {
            match rule {
                RegisterRule::SameValue => {}
                RegisterRule::Undefined if *register == X86_64::RA => {}
                rule if *register == X86_64::RA => return_address = Some(saved(rule)?),
                rule => registers.push((register.0.into(), saved(rule)?)),
            }
        }
        Some(Rule {
            cfa,
            registers,
            return_address,
            is_signal_frame: fde.is_signal_trampoline(),
            function: fde.initial_address()..fde.initial_address().saturating_add(fde.len()),
        })
    }

    fn entry<'b>(
        &self,
        frames: &EhFrame<DwarfBytes<'b>>,
        address: FileAddr,
    ) -> Option<FrameDescriptionEntry<DwarfBytes<'b>>> {
        let offset = match self.by_index(address) {
            Some(offset) => offset,
            None => {
                let own = self
                    .own_index
                    .get_or_init(|| own_index(frames, &self.bases));
                let after = own.partition_point(|(start, _)| *start <= address.0);
                EhFrameOffset(own.get(after.checked_sub(1)?)?.1)
            }
        };
        let fde = frames
            .fde_from_offset(&self.bases, offset, EhFrame::cie_from_offset)
            .ok()?;
        fde.contains(address.0).then_some(fde)
    }

    fn by_index(&self, address: FileAddr) -> Option<EhFrameOffset> {
        let index = EhFrameHdr::new(self.index.as_deref()?, LittleEndian);
        let index = index.parse(&self.bases, 8).ok()?;
        let table = index.table()?;
        // gimli's own conversion of a pointer to an offset panics if the index is damaged.
        let Pointer::Direct(at) = table.lookup(address.0, &self.bases).ok()? else {
            return None;
        };
        let offset = usize::try_from(at.checked_sub(self.start)?).ok()?;
        (offset < self.frames.len()).then_some(EhFrameOffset(offset))
    }
}

/// Returns where each entry begins, and its offset in the table, by address; only of those before the first one that is
/// damaged.
fn own_index(frames: &EhFrame<DwarfBytes<'_>>, bases: &BaseAddresses) -> Vec<(u64, usize)> {
    let mut own = Vec::new();
    let mut entries = frames.entries(bases);
    while let Ok(Some(entry)) = entries.next() {
        let CieOrFde::Fde(partial) = entry else {
            continue;
        };
        let offset = partial.offset();
        let Ok(fde) = partial.parse(EhFrame::cie_from_offset) else {
            break;
        };
        own.push((fde.initial_address(), offset));
    }
    own.sort_unstable();
    own
}
