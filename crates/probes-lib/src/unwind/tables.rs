//! [`UnwindTables`]: what `.eh_frame` of one file says of each address, read by gimli (DWARF 5, section 6.4; Linux
//! Standard Base Core, 10.6).

use std::ops::Range;
use std::sync::OnceLock;

use gimli::{
    BaseAddresses, CfaRule, CieOrFde, EhFrame, EhFrameHdr, EhFrameOffset, Encoding,
    FrameDescriptionEntry, LittleEndian, Pointer, RegisterRule, UnwindContext, UnwindExpression,
    UnwindSection, X86_64,
};

use super::registers::RSP;
use crate::address::FileAddr;
use crate::elf::unwind_entry::is_short;
use crate::elf::{DwarfBytes, ElfFile};

/// The row of the table for an address: how the caller of a frame is found.
#[derive(Debug)]
pub(super) struct UnwindRow {
    /// The canonical frame address: the stack pointer of the caller.
    pub(super) cfa: Cfa,
    /// The registers whose values in the caller are not those that they have now.
    pub(super) registers: Vec<(usize, CallerValue)>,
    /// `None` in the outermost frame, which nothing has called.
    pub(super) return_address: Option<CallerValue>,
    pub(super) is_signal_frame: bool,
    /// The code of the entry that has the row, as addresses of the file.
    pub(super) function: Range<u64>,
}

#[derive(Debug)]
pub(super) enum Cfa {
    /// A register plus an offset.
    Register(usize, i64),
    Expression(DwarfExpression),
}

/// Where the value is found that a register has in the caller (DWARF 5, section 6.4.1).
#[derive(Debug)]
pub(super) enum CallerValue {
    Unknown,
    /// In memory, at this offset from the CFA.
    SavedAt(i64),
    /// It is the CFA plus this offset.
    CfaPlus(i64),
    /// In this register of the frame.
    InRegister(usize),
    /// In memory, at the address that the expression gives.
    SavedAtExpression(DwarfExpression),
    /// It is what the expression gives.
    ValueExpression(DwarfExpression),
}

/// A DWARF expression.
#[derive(Debug)]
pub(super) struct DwarfExpression {
    pub(super) bytes: Vec<u8>,
    pub(super) encoding: Encoding,
}

impl CallerValue {
    /// Returns whether it is in memory below the stack pointer, but fewer than `limit` bytes below.
    pub(super) fn is_saved_below(&self, cfa: u64, stack_pointer: u64, limit: u64) -> bool {
        let CallerValue::SavedAt(offset) = self else {
            return false;
        };
        let at = cfa.wrapping_add_signed(*offset);
        at < stack_pointer && stack_pointer - at < limit
    }
}

impl UnwindRow {
    pub(super) fn has_cfa_from(&self, register: usize) -> bool {
        matches!(self.cfa, Cfa::Register(it, _) if it == register)
    }

    /// Returns whether code of OCaml may have it: its frames save no registers.
    pub(super) fn is_as_in_ocaml(&self) -> bool {
        self.registers.is_empty() && self.has_cfa_from(RSP) && self.has_return_address_below_cfa()
    }

    pub(super) fn has_return_address_below_cfa(&self) -> bool {
        matches!(self.return_address, Some(CallerValue::SavedAt(-8)))
    }
}

/// An entry of the table (FDE).
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct SortedEntry {
    /// The address where its code begins.
    start: u64,
    /// Its offset in `.eh_frame`.
    offset: usize,
}

/// The unwind table of one file.
#[derive(Debug)]
pub(super) struct UnwindTables {
    /// The bytes of `.eh_frame`.
    eh_frame: Vec<u8>,
    /// The address of `.eh_frame` in the file.
    eh_frame_start: u64,
    bases: BaseAddresses,
    /// The bytes of `.eh_frame_hdr`: the offsets of the entries in `.eh_frame`, sorted by the addresses that they are for.
    eh_frame_hdr: Option<Vec<u8>>,
    /// The entries by address, found by reading all of `.eh_frame`, if `.eh_frame_hdr` is missing or damaged.
    sorted_entries: OnceLock<Vec<SortedEntry>>,
}

impl UnwindTables {
    /// Reads the sections; one that is missing or cannot be read is empty.
    pub(super) fn of(elf: &ElfFile) -> UnwindTables {
        let start = |name: &str| elf.section_range(name).map_or(0, |(start, _)| start.0);
        UnwindTables {
            eh_frame: elf.whole_section(".eh_frame").unwrap_or_default(),
            eh_frame_start: start(".eh_frame"),
            eh_frame_hdr: elf.whole_section(".eh_frame_hdr"),
            bases: BaseAddresses::default()
                .set_eh_frame(start(".eh_frame"))
                .set_eh_frame_hdr(start(".eh_frame_hdr"))
                .set_text(start(".text"))
                .set_got(start(".got")),
            sorted_entries: OnceLock::new(),
        }
    }

    /// The same, changed by a test.
    #[cfg(test)]
    pub(super) fn damaged(elf: &ElfFile, damage: impl Fn(&mut [u8])) -> UnwindTables {
        let mut tables = UnwindTables::of(elf);
        damage(&mut tables.eh_frame);
        if let Some(header) = &mut tables.eh_frame_hdr {
            damage(header);
        }
        tables
    }

    /// Returns the row for an address; `None` if the table has none, or it makes no sense.
    pub(super) fn row(&self, address: FileAddr) -> Option<UnwindRow> {
        let mut frames = EhFrame::new(&self.eh_frame, LittleEndian);
        frames.set_address_size(8);
        let fde = self.entry(&frames, address)?;
        if !is_short(&fde) {
            return None;
        }
        // In OCaml 5, the row for `caml_c_call_stack_args` is followed by a malformed one: rows are read until the first
        // malformed one, and the last row before it is used.
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
        let caller_value = |rule: &RegisterRule<usize>| -> Option<CallerValue> {
            Some(match rule {
                RegisterRule::Offset(offset) => CallerValue::SavedAt(*offset),
                RegisterRule::ValOffset(offset) => CallerValue::CfaPlus(*offset),
                RegisterRule::Register(register) => CallerValue::InRegister(register.0.into()),
                RegisterRule::Expression(it) => CallerValue::SavedAtExpression(expression(*it)?),
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
                rule if *register == X86_64::RA => return_address = Some(caller_value(rule)?),
                rule => registers.push((register.0.into(), caller_value(rule)?)),
            }
        }
        Some(UnwindRow {
            cfa,
            registers,
            return_address,
            is_signal_frame: fde.is_signal_trampoline(),
            function: fde.initial_address()..fde.initial_address().saturating_add(fde.len()),
        })
    }

    /// Returns the entry (FDE) whose code has an address.
    fn entry<'b>(
        &self,
        frames: &EhFrame<DwarfBytes<'b>>,
        address: FileAddr,
    ) -> Option<FrameDescriptionEntry<DwarfBytes<'b>>> {
        let offset = match self.offset_by_header(address) {
            Some(offset) => offset,
            None => {
                let entries = self
                    .sorted_entries
                    .get_or_init(|| sorted_entries(frames, &self.bases));
                let after = entries.partition_point(|entry| entry.start <= address.0);
                EhFrameOffset(entries.get(after.checked_sub(1)?)?.offset)
            }
        };
        let fde = frames
            .fde_from_offset(&self.bases, offset, EhFrame::cie_from_offset)
            .ok()?;
        fde.contains(address.0).then_some(fde)
    }

    /// Returns the offset of the entry for an address, as `.eh_frame_hdr` has it.
    fn offset_by_header(&self, address: FileAddr) -> Option<EhFrameOffset> {
        let header = self.eh_frame_hdr.as_deref()?;
        // The count of entries has 4 bytes, as linkers write it: with one of 8, gimli's computation may overflow.
        if header.get(2) != Some(&DW_EH_PE_UDATA4) {
            return None;
        }
        let header = EhFrameHdr::new(header, LittleEndian);
        let header = header.parse(&self.bases, 8).ok()?;
        let table = header.table()?;
        // gimli's own conversion of a pointer to an offset panics if the index is damaged.
        let Pointer::Direct(at) = table.lookup(address.0, &self.bases).ok()? else {
            return None;
        };
        let offset = usize::try_from(at.checked_sub(self.eh_frame_start)?).ok()?;
        (offset < self.eh_frame.len()).then_some(EhFrameOffset(offset))
    }
}

/// How `.eh_frame_hdr` has the count of its entries: as an unsigned number of 4 bytes.
const DW_EH_PE_UDATA4: u8 = 0x03;

/// Returns the entries by address; only those before the first one that is damaged.
fn sorted_entries(frames: &EhFrame<DwarfBytes<'_>>, bases: &BaseAddresses) -> Vec<SortedEntry> {
    let mut sorted = Vec::new();
    let mut entries = frames.entries(bases);
    while let Ok(Some(entry)) = entries.next() {
        let CieOrFde::Fde(partial) = entry else {
            continue;
        };
        let offset = partial.offset();
        let Ok(fde) = partial.parse(EhFrame::cie_from_offset) else {
            break;
        };
        sorted.push(SortedEntry {
            start: fde.initial_address(),
            offset,
        });
    }
    sorted.sort_unstable();
    sorted
}
