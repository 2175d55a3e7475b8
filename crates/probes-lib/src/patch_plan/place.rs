//! The patch sites that are possible at an instruction.

use iced_x86::{FlowControl, Instruction, Mnemonic};

use crate::address::{CodeRange, FileAddr};
use crate::error::Refusal;
use crate::patch_plan::address_set::AddressSet;
use crate::patch_plan::code::{Body, Code, decode};
use crate::patch_plan::displaced::{self, has_call};
use crate::patch_plan::instruction::{ends_flow, has_near_target, is_call};
use crate::patch_plan::jump::{JUMP_LEN, Jump, SHORT_LEN};
use crate::patch_plan::site::PatchSite;
use crate::patch_plan::targets::{Ranges, Targets};
use crate::patch_plan::{flags, padding};

/// How many bytes of its own a punned jump has at least, if there are other candidates: with fewer, it reaches so few
/// addresses that one is seldom free.
const MIN_PUNNED: u64 = 3;

/// The code of an object, and the addresses in it that can be reached.
#[derive(Clone, Debug)]
pub(super) struct Swept {
    pub(super) code: Code,
    pub(super) targets: Targets,
    /// The bytes that other tools change: probe sites.
    foreign: AddressSet,
    /// The bytes of restartable sequences.
    restartable: AddressSet,
    /// The length of the longest functions that are planned.
    max_len: u64,
    /// The parts of functions that are elsewhere, in order.
    parts: Vec<CodeRange>,
    /// The functions and their parts, in order.
    ranges: Vec<CodeRange>,
    /// For each of `ranges`, the highest end among it and the ranges before it.
    ends: Vec<u64>,
}

/// The instructions that can be displaced together, from the one that is to be patched.
struct Movable {
    count: usize,
    /// How many bytes they have.
    len: u64,
    /// The index of the call among them, unless that is the first instruction: what follows a call is a branch target.
    call: Option<usize>,
    /// Why there are no more.
    stop: Stop,
}

/// Why no more instructions are displaced.
enum Stop {
    /// There is room for a jump.
    Enough,
    /// The last one does not fall through.
    End,
    /// The next one is a branch target, or the function ends.
    Target,
    /// The next one cannot be moved.
    Unmovable(&'static str),
}

impl Swept {
    /// Sweeps the code; see [`Targets::find`].
    pub(super) fn new(
        code: Code,
        functions: &[CodeRange],
        parts: &[CodeRange],
        extra: impl IntoIterator<Item = FileAddr>,
        wanted: Option<&[CodeRange]>,
    ) -> Swept {
        let mut ranges = [functions, parts].concat();
        ranges.sort_unstable();
        let mut parts = parts.to_vec();
        parts.sort_unstable();
        parts.dedup();
        let highest = |end: &mut u64, range: &CodeRange| {
            *end = range.end().max(*end);
            Some(*end)
        };
        Swept {
            targets: Targets::find(
                &code,
                Ranges {
                    all: &ranges,
                    parts: &parts,
                },
                extra,
                wanted,
            ),
            foreign: code.foreign(),
            restartable: code.restartable(),
            max_len: max_len(&code, &ranges),
            ends: ranges.iter().scan(0, highest).collect(),
            ranges,
            parts,
            code,
        }
    }

    fn ranges(&self) -> Ranges<'_> {
        Ranges {
            all: &self.ranges,
            parts: &self.parts,
        }
    }

    /// Returns the instructions of a function, or of a part of one.
    pub(super) fn body(&self, range: CodeRange) -> Result<Body, Refusal> {
        if range.len > self.max_len {
            return Err(Refusal::TooLarge { len: range.len });
        }
        self.code.body(range)
    }

    /// Returns whether a function is entered at `address`.
    pub(super) fn begins_function(&self, address: u64) -> bool {
        let is_part = self.parts.binary_search_by_key(&address, |it| it.start.0);
        let is_own = self.ranges().begins_function(address) && is_part.is_err();
        is_own || self.targets.is_called(address) || self.is_linkage(address)
    }

    pub(super) fn is_part(&self, range: CodeRange) -> bool {
        self.parts.binary_search(&range).is_ok()
    }

    /// Returns the function that a part belongs to; `None` if it is not known, or several jump to the part.
    pub(super) fn owner_of(&self, part: CodeRange) -> Option<CodeRange> {
        let start = FileAddr(self.targets.owners.only_owner(part)?);
        let first = self.ranges.partition_point(|it| it.start < start);
        let owner = *self.ranges.get(first)?;
        (owner.start == start && !self.is_part(owner)).then_some(owner)
    }

    /// Returns the parts of a function that it jumps to.
    ///
    /// # Errors
    ///
    /// If some of them may be those of other functions.
    pub(super) fn parts_of(&self, body: &Body) -> Result<Vec<CodeRange>, Refusal> {
        let jumps = body.instructions.iter();
        let jumps = jumps.filter(|it| !is_call(it) && has_near_target(it));
        let mut parts = Vec::new();
        for jump in jumps {
            let part = self.ranges().part_at(jump.near_branch_target());
            if part.is_some_and(|part| self.targets.owners.is_shared(part)) {
                let offset = body.offset(jump);
                return Err(Refusal::UnknownCode { offset });
            }
            parts.extend(part);
        }
        let start = body.range.start.0;
        let Some(by_table) = self.targets.owners.by_table(start) else {
            let is_jump = |it: &&Instruction| it.flow_control() == FlowControl::IndirectBranch;
            let jump = body.instructions.iter().find(is_jump);
            let offset = jump.map_or(0, |jump| body.offset(jump));
            return Err(Refusal::UnknownTargets { offset });
        };
        let by_table = by_table.into_iter();
        parts.extend(by_table.filter_map(|start| self.ranges().part_at(start)));
        parts.sort_unstable();
        parts.dedup();
        Ok(parts)
    }

    /// Returns whether the status flags are dead before the instruction with this index of a function and its parts.
    pub(super) fn flags_are_dead(&self, function: &[Instruction], index: usize) -> bool {
        let others = flags::OtherCode {
            reads_result: self.targets.are_flags_read_after(function),
            reads_first: &|address| self.reads_flags_first(address),
        };
        flags::are_dead(function, index, others)
    }

    /// Returns whether the code at an address reads status flags before it writes them.
    pub(super) fn reads_flags_first(&self, address: u64) -> bool {
        /// How many bytes are looked at.
        const LEN: u64 = 64;
        let code: Vec<Instruction> = decode(self.code.bytes(address, LEN), address).collect();
        flags::are_read_first(&code, 0)
    }

    /// Returns whether `address` is in a known function, is called like one, or is one of the jumps of the procedure
    /// linkage table, which lead to functions of other objects.
    pub(super) fn is_known(&self, address: u64) -> bool {
        let after = self.ranges.partition_point(|it| it.start.0 <= address);
        let end = after.checked_sub(1).and_then(|last| self.ends.get(last));
        if end.is_some_and(|end| address < *end) || self.targets.is_called(address) {
            return true;
        }
        self.is_linkage(address)
    }

    fn is_linkage(&self, address: u64) -> bool {
        let first = decode(self.code.bytes(address, 32), address)
            .find(|it| it.mnemonic() != Mnemonic::Endbr64);
        first.is_some_and(|it| {
            it.flow_control() == FlowControl::IndirectBranch && it.is_ip_rel_memory_operand()
        })
    }

    /// Returns what an instruction is, if it cannot be moved.
    pub(super) fn unmovable(&self, instruction: &Instruction) -> Option<&'static str> {
        let mut bytes = instruction.ip()..instruction.next_ip();
        if bytes.any(|it| self.foreign.contains(it)) {
            Some("a probe site")
        } else {
            self.unmovable_code(instruction)
        }
    }

    /// Same as [`Swept::unmovable`], without regard to probe sites.
    fn unmovable_code(&self, instruction: &Instruction) -> Option<&'static str> {
        if self.restartable.contains(instruction.ip()) {
            Some("an instruction of a restartable sequence")
        } else {
            displaced::unmovable(instruction)
        }
    }

    /// Returns the candidates for a patch of the instruction with this index, the best one first.
    pub(super) fn candidates(&self, body: &Body, index: usize) -> Result<Vec<PatchSite>, Refusal> {
        self.candidates_of(body, index, false)
    }

    /// Returns the index of the instruction after a `nop`, if it is executed as often: nothing else leads to it.
    pub(super) fn after_nop(&self, body: &Body, index: usize) -> Option<usize> {
        let [site, next] = body.instructions.get(index..index + 2)? else {
            return None;
        };
        let is_nop = site.code() == iced_x86::Code::Nopd && site.len() == 1;
        (is_nop && !self.targets.contains(next.ip())).then_some(index + 1)
    }

    /// Same as [`Swept::candidates`], for an instruction that is a probe site.
    pub(super) fn candidates_at_site(
        &self,
        body: &Body,
        index: usize,
    ) -> Result<Vec<PatchSite>, Refusal> {
        self.candidates_of(body, index, true)
    }

    fn candidates_of(
        &self,
        body: &Body,
        index: usize,
        is_site: bool,
    ) -> Result<Vec<PatchSite>, Refusal> {
        let instructions = body.instructions.get(index..).unwrap_or_default();
        let Some(first) = instructions.first() else {
            return Err(Refusal::NotCode);
        };
        let start = first.ip();
        let movable = self.movable(instructions, is_site);
        let Movable {
            count, len, call, ..
        } = movable;
        let padding_len = match movable.stop {
            Stop::End => padding::len_at(&self.code, &self.targets, start + len),
            _ => 0,
        };
        let (flow, at) = body.flow(index);
        let flags_are_dead = self.flags_are_dead(flow, at);
        let site = |count: usize, jump: Jump| {
            let displaced = &instructions[..count];
            let end = displaced.last().map_or(start, |last| last.next_ip());
            PatchSite {
                address: FileAddr(start),
                displaced: self.code.bytes(start, end - start).to_vec(),
                jump,
                moves_call: has_call(displaced),
                flags_are_dead,
                exits: Vec::new(),
                mmx_is_free: !body.uses_mmx && !body.may_pass_on_result(index),
            }
        };
        let mut candidates = Vec::new();
        // A call is better not displaced: its return would cost more.
        if let Some(before) = call {
            let own = instructions[before].ip() - start;
            candidates.extend(self.punned(start, own).map(|jump| site(before, jump)));
        }
        if len + padding_len >= JUMP_LEN {
            let padding = JUMP_LEN.saturating_sub(len) as u8;
            let near = site(count, Jump::Near { padding });
            if near.moves_call {
                candidates.push(near);
            } else {
                candidates.insert(0, near);
            }
            // Jumps that displace fewer instructions.
            let fewer = (1..count.min(call.unwrap_or(count))).rev();
            candidates.extend(fewer.filter_map(|fewer| {
                let own = instructions[fewer].ip() - start;
                let jump = self.punned(start, own).filter(|_| own >= MIN_PUNNED)?;
                Some(site(fewer, jump))
            }));
            // Where no call may be displaced, a jump that displaces only what is before it.
            if let Some(before) = call {
                let end = instructions[before].ip();
                candidates.extend(self.short(&instructions[..before], end, site));
            }
        } else if count > 0 {
            let own = len + padding_len;
            candidates.extend(self.punned(start, own).map(|jump| site(count, jump)));
            candidates.extend(self.short(&instructions[..count], start + own, site));
        }
        candidates.retain(|candidate| self.code.may_have_room(&candidate.window()));
        if candidates.is_empty() {
            return Err(self.refusal(body, body.offset(first), &movable, padding_len));
        }
        Ok(candidates)
    }

    /// Returns how many of these instructions can be displaced together: no more than a jump needs. `is_site`: the
    /// first is a probe site.
    fn movable(&self, instructions: &[Instruction], is_site: bool) -> Movable {
        let start = instructions.first().map_or(0, Instruction::ip);
        let (mut count, mut len, mut call) = (0, 0, None);
        let stop = loop {
            let Some(next) = instructions.get(count) else {
                break Stop::Target;
            };
            let is_target = count > 0 && self.targets.contains(next.ip());
            if is_target || self.targets.are_inside(next) {
                break Stop::Target;
            }
            let unmovable = if count == 0 && is_site {
                self.unmovable_code(next)
            } else {
                self.unmovable(next)
            };
            if let Some(what) = unmovable {
                break Stop::Unmovable(what);
            }
            if count > 0 && is_call(next) {
                call = Some(count);
            }
            count += 1;
            len = next.next_ip() - start;
            if len >= JUMP_LEN {
                break Stop::Enough;
            }
            if ends_flow(next) {
                break Stop::End;
            }
        };
        Movable {
            count,
            len,
            call,
            stop,
        }
    }

    /// Returns why there is no room for a jump at the instruction at `offset` in its function; `padding_len` is how many
    /// bytes of padding follow the displaced instructions.
    fn refusal(&self, body: &Body, offset: u64, movable: &Movable, padding_len: u64) -> Refusal {
        let offset = offset + movable.len;
        match movable.stop {
            Stop::Unmovable(what) => Refusal::Unmovable { offset, what },
            Stop::Target => {
                // The branch target is the next instruction, or inside it. That the first one is a target does not
                // matter.
                let from = offset + u64::from(movable.count == 0);
                let is_target = |it: &u64| self.targets.contains(body.range.start.0 + it);
                let offset = (from..offset + 16).find(is_target).unwrap_or(offset);
                Refusal::BranchTarget { offset }
            }
            Stop::End | Stop::Enough => Refusal::TooShort {
                len: (movable.len + padding_len) as u8,
                exit: None,
            },
        }
    }

    /// Returns the punned jump at `start` that writes only the first `own` of its five bytes.
    fn punned(&self, start: u64, own: u64) -> Option<Jump> {
        let chosen = own.checked_sub(1)? as usize;
        let bytes = self.code.bytes(start, JUMP_LEN);
        let mut operand: [u8; 4] = bytes.get(1..)?.try_into().ok()?;
        let kept = start + own..start + JUMP_LEN;
        if kept.into_iter().any(|it| self.foreign.contains(it)) {
            return None;
        }
        operand.get_mut(..chosen)?.fill(0);
        Some(Jump::Punned {
            chosen: chosen as u8,
            displacement: i32::from_le_bytes(operand),
        })
    }

    /// Returns the sites of short jumps at the first of these instructions, which may be displaced; `site` makes one,
    /// given how many are. No island is in the patched place, which ends at `end`.
    fn short(
        &self,
        instructions: &[Instruction],
        end: u64,
        site: impl Fn(usize, Jump) -> PatchSite,
    ) -> Vec<PatchSite> {
        let Some(start) = instructions.first().map(Instruction::ip) else {
            return Vec::new();
        };
        let is_enough = |it: &Instruction| it.next_ip() - start >= SHORT_LEN;
        let Some(least) = instructions.iter().position(is_enough) else {
            return Vec::new();
        };
        let islands = self.islands(start, end);
        let short = islands.map(|island| site(least + 1, Jump::Short { island }));
        short.collect()
    }

    /// Returns the places for islands that a short jump at `start` reaches, except in the patched place, which ends at
    /// `end`.
    fn islands(&self, start: u64, end: u64) -> impl Iterator<Item = FileAddr> {
        /// How far before the site the padding with an island can begin.
        const BEFORE: u64 = 256;
        let origin = start.saturating_add(SHORT_LEN);
        let is_reached =
            move |island: u64| i8::try_from(island.wrapping_sub(origin) as i64).is_ok();
        let near = start.saturating_sub(BEFORE)..origin.saturating_add(128);
        self.targets.after_ends(near).flat_map(move |padding| {
            let len = padding::len_at(&self.code, &self.targets, padding);
            let starts = (0..len / JUMP_LEN).map(move |index| padding + index * JUMP_LEN);
            let is_free = move |island: &u64| *island >= end || island + JUMP_LEN <= start;
            starts
                .filter(move |island| is_reached(*island))
                .filter(is_free)
                .map(FileAddr)
        })
    }
}

/// Returns the length of the longest functions that are planned: if ranges overlap so much that together they are
/// many times as long as the code, the longest ones are not planned.
fn max_len(code: &Code, ranges: &[CodeRange]) -> u64 {
    /// How many times the code is decoded at most.
    const TIMES: u64 = 8;
    let mut lens: Vec<u64> = ranges.iter().map(|it| it.len).collect();
    lens.sort_unstable();
    let mut left = (code.len() * TIMES).saturating_add(1 << 20);
    for len in lens {
        let Some(rest) = left.checked_sub(len) else {
            return len - 1;
        };
        left = rest;
    }
    u64::MAX
}
