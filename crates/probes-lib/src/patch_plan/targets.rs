//! [`Targets`]: every address that something may jump or return to, found by a linear sweep of all functions,
//! and of the code between them: stripped files do not list all functions, nor their cold parts.
//!
//! ```text
//! jmp, jcc, call L          L
//! call …                    the address after it: callee, longjmp and unwinder return there
//! lea L(%rip), %r           L, if it is code (OCaml's exception handlers, computed gotos)
//! endbr64                   its own address
//! jump tables of offsets    what they can yield (jumps.rs)
//! addresses in data         by relocations; at fixed addresses, any word
//! functions, symbols        as given
//! nop; call at an entry     the call: goroutines of Go return there (runtime.goexit + 1)
//! ```
//!
//! A landing pad of C++ is either after an instruction that does not fall through or after a call, so
//! none is inside a displaced run of instructions.

mod jumps;
mod sweep_filter;

use std::cell::OnceCell;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;

use iced_x86::{FlowControl, Instruction, Mnemonic, OpKind, Register};

use crate::address::{CodeRange, FileAddr};
use crate::patch_plan::address_set::AddressSet;
use crate::patch_plan::code::{Code, decode_function};
use crate::patch_plan::flags::AfterCall;
use crate::patch_plan::instruction::{ends_flow, has_near_target, is_call};
use crate::patch_plan::parts::PartOwners;
use crate::patch_plan::tables::{JumpSource, WINDOW};
pub(super) use jumps::JumpTargets;
use sweep_filter::SweepFilter;

/// The addresses that something may jump or return to, and what else the sweep finds.
#[derive(Clone, Debug)]
pub(super) struct Targets {
    all: AddressSet,
    /// The targets of direct calls: each begins a function, whether it is known or not.
    called: AddressSet,
    /// The addresses that tables, other data, relocations or symbols hold.
    labels: AddressSet,
    /// The entries of tables that jumps go through: no other pointer leads there.
    table_labels: AddressSet,
    /// The addresses after calls.
    returns: AddressSet,
    /// Where the indirect jumps at these addresses lead.
    jumps: BTreeMap<u64, JumpTargets>,
    /// How many more entries of tables are read; 0 means that some may be unread.
    entries_left: usize,
    pub(super) owners: PartOwners,
    /// The addresses after the instructions that do not fall through, in order.
    after_ends: Vec<u64>,
    /// Where the functions begin whose callers read the flags that they return with.
    flag_results: BTreeSet<u64>,
    /// Whether that may be so for any function, because too much code would have to be looked at.
    all_return_flags: bool,
}

/// How many indirect jumps are followed, and how many addresses are kept in `after_ends`; real objects have fewer. The
/// targets of further jumps are unknown.
const MAX_JUMPS: usize = 1 << 20;
const MAX_ENDS: usize = 1 << 22;

/// How many instructions may read flags that a called function has left; real objects have next to none.
const MAX_FLAG_READERS: usize = 1 << 12;

/// How `runtime.goexit` of Go begins. Each goroutine returns to the call: its address is calculated from that of the
/// function when the goroutine starts, so nothing in the file tells it.
const NOP_AND_CALL: [u8; 2] = [0x90, 0xe8];

/// Functions that overlap, or the code between two functions: what belongs to a jump is looked for here.
struct Group {
    range: Range<u64>,
    /// The addresses that its `lea` instructions load.
    leas: Vec<(Register, u64)>,
    /// Addresses among its displacements and immediates, if it is at fixed addresses.
    constants: Vec<u64>,
    /// The address of code that the last instruction has loaded, and into which register.
    loaded: Option<(Register, u64)>,
    /// The addresses in it that it loads, and does not push at once. (OCaml pushes its exception handlers.)
    own_labels: Vec<u64>,
    jumps: Vec<(u64, JumpSource)>,
    /// Where its jumps through pointers lead, once that is known.
    of_pointers: OnceCell<JumpTargets>,
    /// Whether one of `own_labels` is no address that a call returns to, once that is known.
    has_own_label: OnceCell<bool>,
}

impl Group {
    fn new(range: Range<u64>) -> Group {
        Group {
            range,
            leas: Vec::new(),
            constants: Vec::new(),
            loaded: None,
            own_labels: Vec::new(),
            jumps: Vec::new(),
            of_pointers: OnceCell::new(),
            has_own_label: OnceCell::new(),
        }
    }

    /// Adds the address that the last instruction has loaded, unless `next` pushes it.
    fn add_loaded(&mut self, next: Option<&Instruction>) {
        let Some((register, address)) = self.loaded.take() else {
            return;
        };
        let is_pushed =
            |it: &Instruction| it.mnemonic() == Mnemonic::Push && it.op0_register() == register;
        if self.is_inside(address) && !next.is_some_and(is_pushed) {
            self.own_labels.push(address);
        }
    }

    /// Returns whether an address is in it, and is not its start.
    fn is_inside(&self, address: u64) -> bool {
        address > self.range.start && address < self.range.end
    }

    /// Returns all addresses that it refers to.
    fn addresses(&self) -> impl Iterator<Item = u64> {
        let leas = self.leas.iter().map(|(_, address)| *address);
        leas.chain(self.constants.iter().copied())
    }
}

/// What is remembered during the sweep until tables are read.
struct Sweep<'c> {
    code: &'c Code,
    ranges: Ranges<'c>,
    /// Where instructions have been decoded.
    decoded: AddressSet,
    /// The addresses of data that functions with jumps through tables refer to. After the sweep: all such addresses, in
    /// order.
    references: Vec<u64>,
    /// Those that other functions refer to.
    other_references: Vec<u64>,
    /// The starts of tables whose offsets count from their own start. A table ends where the next one begins, at the
    /// latest.
    tables: BTreeSet<u64>,
    /// The groups with indirect jumps.
    groups: Vec<Group>,
    /// How many indirect jumps these have.
    jumps: usize,
    /// Where instructions read the flags shortly after a call: the address after the call, the address of the
    /// instruction, and the called function.
    flag_readers: Vec<(u64, u64, u64)>,
    /// Where jumps lead.
    jumped_to: AddressSet,
}

/// The functions of an object, and their parts.
#[derive(Clone, Copy)]
pub(super) struct Ranges<'r> {
    /// Both, in order.
    pub(super) all: &'r [CodeRange],
    /// The parts, in order.
    pub(super) parts: &'r [CodeRange],
}

impl Ranges<'_> {
    pub(super) fn begins_function(&self, address: u64) -> bool {
        let start = |range: &CodeRange| range.start.0;
        self.all.binary_search_by_key(&address, start).is_ok()
    }

    fn that_begins_at(&self, address: u64) -> Option<CodeRange> {
        let start = |range: &CodeRange| range.start.0;
        let found = self.all.binary_search_by_key(&address, start).ok()?;
        self.all.get(found).copied()
    }

    /// Returns whether an address is in the last range that begins at or before it; a range around that one is not
    /// looked at.
    fn contains(&self, address: u64) -> bool {
        let after = self.all.partition_point(|it| it.start.0 <= address);
        let last = after.checked_sub(1).and_then(|last| self.all.get(last));
        last.is_some_and(|it| it.contains(address))
    }

    pub(super) fn part_at(&self, address: u64) -> Option<CodeRange> {
        let after = self.parts.partition_point(|it| it.start.0 <= address);
        let part = *self.parts.get(after.checked_sub(1)?)?;
        part.contains(address).then_some(part)
    }
}

impl Targets {
    /// Sweeps all code; each instruction is decoded once, even if ranges overlap. If only patches of `wanted` functions
    /// are planned, and not of all their exits, code that cannot matter for these is left out.
    pub(super) fn find(
        code: &Code,
        ranges: Ranges<'_>,
        extra: impl IntoIterator<Item = FileAddr>,
        wanted: Option<&[CodeRange]>,
    ) -> Targets {
        let mut targets = Targets {
            all: AddressSet::new(code.executable()),
            called: AddressSet::new(code.executable()),
            labels: AddressSet::new(code.executable()),
            table_labels: AddressSet::new(code.executable()),
            returns: AddressSet::new(code.executable()),
            jumps: BTreeMap::new(),
            entries_left: jumps::MAX_ENTRIES,
            owners: PartOwners::default(),
            after_ends: Vec::new(),
            flag_results: BTreeSet::new(),
            all_return_flags: false,
        };
        let words = code.is_fixed().then(|| code.data_words());
        for address in extra.into_iter().chain(words.into_iter().flatten()) {
            targets.all.insert(address.0);
            targets.labels.insert(address.0);
        }
        let mut sweep = Sweep {
            code,
            ranges,
            decoded: AddressSet::new(code.executable()),
            references: Vec::new(),
            other_references: Vec::new(),
            tables: BTreeSet::new(),
            groups: Vec::new(),
            jumps: 0,
            flag_readers: Vec::new(),
            jumped_to: AddressSet::new(code.executable()),
        };
        let filter = wanted.and_then(|wanted| SweepFilter::of(code, wanted));
        let is_needed = |range: &Range<u64>| filter.as_ref().is_none_or(|it| it.needs(range));
        let (needed, others): (Vec<_>, Vec<_>) = groups(code, ranges)
            .into_iter()
            .partition(|(range, _)| is_needed(range));
        for (range, functions) in needed {
            targets.sweep_group(&mut sweep, range, functions);
        }
        let reads_all = targets.reads_all(&sweep);
        if reads_all {
            // Any code may refer to a table.
            for (range, functions) in others {
                targets.sweep_group(&mut sweep, range, functions);
            }
        }
        for segment in code.executable() {
            let marks = memchr::memmem::find_iter(
                code.bytes(segment.start, segment.end - segment.start),
                b"\xf3\x0f\x1e\xfa",
            );
            for offset in marks {
                targets.all.insert(segment.start + offset as u64);
            }
        }
        targets.read_tables(&mut sweep, reads_all);
        targets.find_flag_results(&sweep);
        targets.after_ends.sort_unstable();
        targets.after_ends.dedup();
        targets
    }

    /// Sweeps functions that overlap, or the code between two functions if there are none. Each function is decoded
    /// from its start, until its instructions are those of another one.
    fn sweep_group(&mut self, sweep: &mut Sweep<'_>, range: Range<u64>, functions: &[CodeRange]) {
        for function in functions {
            self.add_entry(sweep.code, function.start.0);
        }
        let mut group = Group::new(range.clone());
        let mut decode_from = |targets: &mut Targets, start: u64| {
            // Also after its end, where its last instruction may go on.
            let bytes = sweep.code.bytes(start, u64::MAX);
            let mut before: VecDeque<Instruction> = VecDeque::with_capacity(WINDOW);
            let mut after_call: Option<(u64, AfterCall)> = None;
            for instruction in decode_function(bytes, start) {
                let address = instruction.ip();
                if address >= range.end || sweep.decoded.contains(address) {
                    break;
                }
                sweep.decoded.insert(address);
                if instruction.is_invalid() {
                    continue;
                }
                if let Some((at, mut call)) = after_call.take() {
                    match call.next(&instruction) {
                        Some(true) if sweep.flag_readers.len() < MAX_FLAG_READERS => {
                            sweep.flag_readers.push((at, address, call.function));
                        }
                        Some(true) => targets.all_return_flags = true,
                        Some(false) => after_call = Some((at, call)),
                        _ => {}
                    }
                }
                if is_call(&instruction) && has_near_target(&instruction) {
                    let call = AfterCall::new(instruction.near_branch_target());
                    after_call = Some((instruction.next_ip(), call));
                }
                let is_jump = instruction.flow_control() == FlowControl::IndirectBranch;
                if is_jump && sweep.jumps < MAX_JUMPS {
                    sweep.jumps += 1;
                    let source = JumpSource::of(before.make_contiguous(), &instruction);
                    group.jumps.push((address, source));
                }
                targets.add(sweep, &instruction, &mut group, functions.len());
                if before.len() == WINDOW {
                    before.pop_front();
                }
                before.push_back(instruction);
            }
        };
        for function in functions {
            decode_from(self, function.start.0);
        }
        if functions.is_empty() {
            decode_from(self, range.start);
        }
        group.add_loaded(None);
        sweep.tables.extend(
            group
                .jumps
                .iter()
                .filter_map(|(_, source)| source.own_table()),
        );
        let data = group.addresses().filter(|it| sweep.code.is_data(*it));
        let references = if group.jumps.iter().any(|(_, it)| it.needs_offsets()) {
            &mut sweep.references
        } else {
            &mut sweep.other_references
        };
        references.extend(data);
        if !group.jumps.is_empty() {
            sweep.groups.push(group);
        }
    }

    /// Adds where callers enter a function, and where else Go does.
    fn add_entry(&mut self, code: &Code, entry: u64) {
        self.all.insert(entry);
        if code.bytes(entry, 2) == NOP_AND_CALL {
            self.all.insert(entry + 1);
        }
    }

    /// Adds what one instruction refers to.
    fn add(
        &mut self,
        sweep: &mut Sweep<'_>,
        instruction: &Instruction,
        group: &mut Group,
        functions: usize,
    ) {
        let code = sweep.code;
        group.add_loaded(Some(instruction));
        if has_near_target(instruction) {
            self.all.insert(instruction.near_branch_target());
            if !is_call(instruction) {
                sweep.jumped_to.insert(instruction.near_branch_target());
            }
            if functions > 0 && !is_call(instruction) {
                self.add_part(sweep.ranges, instruction, group, functions == 1);
            }
        }
        if is_call(instruction) {
            self.all.insert(instruction.next_ip());
            self.returns.insert(instruction.next_ip());
            if has_near_target(instruction) {
                self.called.insert(instruction.near_branch_target());
            }
        }
        if ends_flow(instruction) && functions > 0 && self.after_ends.len() < MAX_ENDS {
            self.after_ends.push(instruction.next_ip());
        }
        if instruction.mnemonic() == Mnemonic::Lea && instruction.is_ip_rel_memory_operand() {
            let address = instruction.ip_rel_memory_address();
            if code.is_executable(address) || code.is_data(address) {
                self.all.insert(address);
                let register = instruction.op0_register().full_register();
                group.leas.push((register, address));
                group.loaded = Some((register, address));
            }
        }
        if code.is_fixed() {
            for address in constants(instruction) {
                if code.is_executable(address) || code.is_data(address) {
                    self.all.insert(address);
                    group.constants.push(address);
                    if let Some(register) = register_of_load(instruction) {
                        group.loaded = Some((register, address));
                    } else if group.is_inside(address) {
                        group.own_labels.push(address);
                    }
                }
            }
        }
    }

    /// Adds a jump to `owners` if it leads from a function to a part, or back.
    fn add_part(&mut self, ranges: Ranges<'_>, jump: &Instruction, group: &Group, is_alone: bool) {
        let target = jump.near_branch_target();
        if (group.range.start..group.range.end).contains(&target) {
            return;
        }
        match (ranges.part_at(jump.ip()), ranges.part_at(target)) {
            (None, Some(part)) => self.owners.add_jump(part, group.range.start, is_alone),
            (Some(part), None) => self.owners.add_jump_back(part, target),
            _ => {}
        }
    }

    /// Finds the functions that return something in the flags: their callers read it, and so do the callers of functions
    /// that jump to them.
    fn find_flag_results(&mut self, sweep: &Sweep<'_>) {
        let mut found = Vec::new();
        for &(after, reader, function) in &sweep.flag_readers {
            // If something jumps there, the called function may never return, and the flags are those at the jump.
            let is_label = |it: u64| sweep.jumped_to.contains(it) || self.labels.contains(it);
            if !(after..=reader).any(is_label) {
                found.push(function);
            }
        }
        // Functions may overlap.
        let mut left = sweep.code.len();
        while let Some(function) = found.pop() {
            if !self.flag_results.insert(function) {
                continue;
            }
            let Some(range) = sweep.ranges.that_begins_at(function) else {
                continue;
            };
            let Some(rest) = left.checked_sub(range.len) else {
                self.all_return_flags = true;
                return;
            };
            left = rest;
            let code = decode_function(sweep.code.bytes(function, range.len), function);
            let jumps = code.filter(|it| has_near_target(it) && !is_call(it));
            let targets = jumps.map(|it| it.near_branch_target());
            found.extend(targets.filter(|it| !range.contains(*it)));
        }
    }

    /// Returns whether callers of a function read the flags that it returns with.
    pub(super) fn are_flags_read_after(&self, function: &[Instruction]) -> bool {
        let (Some(first), Some(last)) = (function.first(), function.last()) else {
            return self.all_return_flags;
        };
        let mut functions = self.flag_results.range(first.ip()..=last.ip());
        let begins = |it: &u64| function.binary_search_by_key(it, Instruction::ip).is_ok();
        self.all_return_flags || functions.any(begins)
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

    /// Returns where the indirect jump at an address leads.
    pub(super) fn of_jump(&self, address: u64) -> JumpTargets {
        let found = self.jumps.get(&address).copied();
        found.unwrap_or(JumpTargets::Untracked)
    }

    /// Returns the addresses in a range that are after instructions which do not fall through.
    pub(super) fn after_ends(&self, range: Range<u64>) -> impl Iterator<Item = u64> {
        let first = self.after_ends.partition_point(|&it| it < range.start);
        let rest = self.after_ends[first..].iter().copied();
        rest.take_while(move |&it| it < range.end)
    }
}

/// Returns the code that is swept together: functions that overlap, or the code between two functions.
fn groups<'r>(code: &Code, ranges: Ranges<'r>) -> Vec<(Range<u64>, &'r [CodeRange])> {
    let start = |it: &CodeRange| it.start.0;
    let mut groups = Vec::new();
    for segment in code.executable() {
        let first = ranges.all.partition_point(|it| start(it) < segment.start);
        let mut inside = &ranges.all[first..];
        inside = &inside[..inside.partition_point(|it| start(it) < segment.end)];
        let mut end = segment.start;
        while let Some(first) = inside.first() {
            groups.push((end..start(first), &inside[..0]));
            end = start(first);
            let mut count = 0;
            while let Some(next) = inside.get(count).filter(|it| count == 0 || start(it) < end) {
                end = next.end().min(segment.end).max(end);
                count += 1;
            }
            let (together, rest) = inside.split_at(count);
            groups.push((start(first)..end, together));
            inside = rest;
        }
        groups.push((end..segment.end, &inside[..0]));
    }
    groups
}

/// Returns the register that an instruction loads its immediate into.
fn register_of_load(instruction: &Instruction) -> Option<Register> {
    let loads = instruction.mnemonic() == Mnemonic::Mov
        && instruction.op0_kind() == OpKind::Register
        && instruction.op1_kind() != OpKind::Memory;
    loads.then(|| instruction.op0_register().full_register())
}

/// Returns the numbers in an instruction that may be addresses if code is at fixed ones: displacements and
/// immediates of four bytes at least.
fn constants(instruction: &Instruction) -> impl Iterator<Item = u64> + use<> {
    let instruction = *instruction;
    (0..instruction.op_count()).filter_map(move |operand| match instruction.op_kind(operand) {
        OpKind::Memory if instruction.is_ip_rel_memory_operand() => None,
        OpKind::Memory => {
            let is_long = instruction.memory_displ_size() >= 4;
            is_long.then(|| instruction.memory_displacement64())
        }
        OpKind::Immediate32 | OpKind::Immediate32to64 | OpKind::Immediate64 => {
            Some(instruction.immediate(operand))
        }
        _ => None,
    })
}
