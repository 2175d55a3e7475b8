//! [`Targets`]: every address that something may jump or return to, found by a linear sweep of all
//! functions, and of the code between them: stripped files do not list all functions, nor their cold parts. That is sound for compiled code: gcc, clang and ocamlopt keep tables out of the text.
//!
//! ```text
//! jmp, jcc, call L          L
//! call …                    the address behind it: callee, longjmp and unwinder return there
//! lea L(%rip), %r           L, if it is code (OCaml's exception handlers, computed gotos)
//! jmp *%r, jmp *T(,%r,8)    what the tables that the function refers to can yield (see `tables`)
//! functions, relocations, symbols: as given
//! ```
//!
//! A landing pad of C++ is either behind an instruction that does not fall through or behind a call, so
//! none is inside a displaced run of instructions.

use std::collections::BTreeSet;
use std::ops::Range;

use iced_x86::{FlowControl, Instruction, Mnemonic, OpKind, Register};

use crate::address::{CodeRange, FileAddr};
use crate::patch_plan::code::{Code, decode, ends_flow, is_call};

/// Entries of jump tables that are read of one object; real ones have far fewer. Without a limit, a file could
/// make each function read the same data.
const MAX_ENTRIES: u32 = 1 << 24;

/// A set of addresses of code.
#[derive(Clone, Debug)]
struct AddressSet(Vec<(Range<u64>, Vec<u64>)>);

impl AddressSet {
    /// Returns an empty set of addresses of the executable segments.
    fn new(code: &Code) -> AddressSet {
        let words = |range: &Range<u64>| (range.end - range.start).div_ceil(64) as usize;
        let empty = |range: Range<u64>| (range.clone(), vec![0; words(&range)]);
        AddressSet(code.executable().map(empty).collect())
    }

    fn insert(&mut self, address: u64) {
        if let Some((range, bits)) = self.0.iter_mut().find(|it| it.0.contains(&address)) {
            let at = address - range.start;
            bits[(at / 64) as usize] |= 1 << (at % 64);
        }
    }

    fn contains(&self, address: u64) -> bool {
        let part = self.0.iter().find(|it| it.0.contains(&address));
        part.is_some_and(|(range, bits)| {
            let at = address - range.start;
            bits[(at / 64) as usize] & 1 << (at % 64) != 0
        })
    }
}

/// The addresses that something may jump or return to, and what else the sweep finds.
#[derive(Clone, Debug)]
pub(super) struct Targets {
    all: AddressSet,
    /// Those of direct calls: each begins a function, whether it is known or not.
    called: AddressSet,
    /// Those of jump tables.
    of_tables: BTreeSet<u64>,
    /// How many more entries of tables are read; 0 means that some were not.
    entries_left: u32,
    /// The addresses behind the instructions that do not fall through, in order.
    behind_ends: Vec<u64>,
}

/// What functions that overlap or adjoin refer to.
#[derive(Default)]
struct References {
    has_indirect_jump: bool,
    /// Addresses of data that may be jump tables.
    data: Vec<u64>,
    /// Addresses of code that the entries of a table may be relative to.
    code: Vec<u64>,
}

/// A function that jumps through tables.
struct Switch {
    range: Range<u64>,
    references: References,
}

/// Whether code is known to be that of a function. Stripped files do not list all of theirs.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Place {
    Function,
    Between,
}

/// What is remembered during the sweep until tables are read.
#[derive(Default)]
struct Sweep {
    /// All addresses of data that any code refers to.
    mentioned: BTreeSet<u64>,
    switches: Vec<Switch>,
    group: References,
    group_start: u64,
}

impl Sweep {
    /// Ends a group of functions that overlap; the next one begins at `end`.
    fn end_group(&mut self, end: u64) {
        let references = std::mem::take(&mut self.group);
        self.mentioned.extend(references.data.iter().copied());
        let range = self.group_start..end;
        if references.has_indirect_jump {
            self.switches.push(Switch { range, references });
        }
        self.group_start = end;
    }
}

impl Targets {
    /// Sweeps all code; each byte is decoded once, even if the `ranges`, which are in order, overlap.
    pub(super) fn find(
        code: &Code,
        ranges: &[CodeRange],
        extra: impl IntoIterator<Item = FileAddr>,
    ) -> Targets {
        let mut targets = Targets {
            all: AddressSet::new(code),
            called: AddressSet::new(code),
            of_tables: BTreeSet::new(),
            entries_left: MAX_ENTRIES,
            behind_ends: Vec::new(),
        };
        for address in extra {
            targets.all.insert(address.0);
        }
        let mut sweep = Sweep::default();
        for segment in code.executable() {
            let first = ranges.partition_point(|it| it.start.0 < segment.start);
            let inside = &ranges[first..];
            let inside = &inside[..inside.partition_point(|it| it.start.0 < segment.end)];
            let mut end = segment.start;
            for (index, range) in inside.iter().enumerate() {
                targets.all.insert(range.start.0);
                if range.start.0 >= end {
                    sweep.end_group(end);
                    targets.sweep(code, end..range.start.0, Place::Between, &mut sweep);
                    sweep.end_group(range.start.0);
                }
                end = end.max(range.end().min(segment.end));
                let next = inside.get(index + 1).map_or(u64::MAX, |next| next.start.0);
                let piece = range.start.0..end.min(next);
                targets.sweep(code, piece, Place::Function, &mut sweep);
            }
            sweep.end_group(end);
            targets.sweep(code, end..segment.end, Place::Between, &mut sweep);
            sweep.end_group(segment.end);
        }
        targets.read_tables(code, &sweep);
        targets.behind_ends.sort_unstable();
        targets
    }

    fn sweep(&mut self, code: &Code, piece: Range<u64>, place: Place, sweep: &mut Sweep) {
        let bytes = code.bytes(piece.start, piece.end - piece.start);
        for instruction in decode(bytes, piece.start) {
            if instruction.is_invalid() {
                continue;
            }
            if has_near_target(&instruction) {
                self.all.insert(instruction.near_branch_target());
            }
            if is_call(&instruction) {
                self.all.insert(instruction.next_ip());
                if has_near_target(&instruction) {
                    self.called.insert(instruction.near_branch_target());
                }
            }
            if ends_flow(&instruction) && place == Place::Function {
                self.behind_ends.push(instruction.next_ip());
            }
            let references = &mut sweep.group;
            if instruction.flow_control() == FlowControl::IndirectBranch {
                references.has_indirect_jump = true;
            }
            if let Some(address) = reference(&instruction) {
                if code.is_executable(address) {
                    self.all.insert(address);
                    references.code.push(address);
                } else {
                    references.data.push(address);
                }
            }
        }
    }

    /// Adds what jump tables can yield. A table is read until an entry does not lead into the function, or to
    /// the next address of data that any function refers to:
    ///
    /// ```text
    /// lea T(%rip), %b; movslq (%b,%i,4), %r; add %b, %r; jmp *%r     int32 entries, relative to T
    /// the same with another base (glibc's printf)                    … to an address of code
    /// jmp *T(,%i,8)                                                  addresses
    /// ```
    fn read_tables(&mut self, code: &Code, sweep: &Sweep) {
        /// Of code, that the entries of one table may be relative to.
        const MAX_BASES: usize = 4;
        for Switch { range, references } in &sweep.switches {
            let tables: BTreeSet<u64> = references.data.iter().copied().collect();
            let code_bases: BTreeSet<u64> = references.code.iter().copied().collect();
            for &table in &tables {
                let next = sweep.mentioned.range(table.saturating_add(1)..).next();
                let len = next.map_or(u64::MAX, |next| next - table);
                let bytes = code.bytes(table, len.min(1 << 20));
                let bases = code_bases.iter().copied().take(MAX_BASES);
                for base in bases.chain([table]) {
                    let offset = |word: &[u8]| word.try_into().map_or(0, i32::from_le_bytes);
                    let entry = |word| base.wrapping_add_signed(offset(word).into());
                    self.read_table(range, bytes.chunks_exact(4).map(entry));
                }
                let entry = |word: &[u8]| word.try_into().map_or(0, u64::from_le_bytes);
                self.read_table(range, bytes.chunks_exact(8).map(entry));
            }
        }
    }

    fn read_table(&mut self, function: &Range<u64>, entries: impl Iterator<Item = u64>) {
        for target in entries.take_while(|target| function.contains(target)) {
            let Some(left) = self.entries_left.checked_sub(1) else {
                return;
            };
            self.entries_left = left;
            self.all.insert(target);
            self.of_tables.insert(target);
        }
    }

    pub(super) fn contains(&self, address: u64) -> bool {
        self.all.contains(address)
    }

    /// Returns whether something may jump into the middle of an instruction, as over a `lock` prefix.
    pub(super) fn are_inside(&self, instruction: &Instruction) -> bool {
        (instruction.ip() + 1..instruction.next_ip()).any(|it| self.contains(it))
    }

    pub(super) fn is_called(&self, address: u64) -> bool {
        self.called.contains(address)
    }

    /// Returns whether the tables of a function that jumps through tables were read: they lead into it.
    pub(super) fn has_tables_of(&self, range: CodeRange) -> bool {
        let mut inside = self
            .of_tables
            .range(range.start.0..range.end().max(range.start.0));
        self.entries_left > 0 && inside.next().is_some()
    }

    /// Returns the addresses from `start` to `end` that are behind instructions which do not fall through.
    pub(super) fn behind_ends(&self, range: Range<u64>) -> impl Iterator<Item = u64> {
        let first = self.behind_ends.partition_point(|&it| it < range.start);
        let rest = self.behind_ends[first..].iter().copied();
        rest.take_while(move |&it| it < range.end)
    }
}

/// Returns whether the instruction is a branch or call whose target is in its bytes.
pub(super) fn has_near_target(instruction: &Instruction) -> bool {
    let kind = instruction.op0_kind();
    instruction.op_count() > 0 && matches!(kind, OpKind::NearBranch64 | OpKind::NearBranch32)
}

/// Returns the address that an instruction refers to without accessing it, or with an index: one of code, or of a table.
fn reference(instruction: &Instruction) -> Option<u64> {
    if instruction.is_ip_rel_memory_operand() {
        return (instruction.mnemonic() == Mnemonic::Lea)
            .then(|| instruction.ip_rel_memory_address());
    }
    let has_memory =
        (0..instruction.op_count()).any(|operand| instruction.op_kind(operand) == OpKind::Memory);
    if has_memory && instruction.memory_index() != Register::None {
        let displacement = instruction.memory_displacement64();
        return (instruction.memory_displ_size() >= 4).then_some(displacement);
    }
    if instruction.mnemonic() != Mnemonic::Mov {
        return None;
    }
    // In programs at fixed addresses: `mov $T, %r32`.
    matches!(
        instruction.op1_kind(),
        OpKind::Immediate32 | OpKind::Immediate32to64 | OpKind::Immediate64
    )
    .then(|| instruction.immediate(1))
}
