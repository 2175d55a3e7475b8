//! Where a function is left: its returns, and its jumps to other functions.

use std::collections::BTreeMap;
use std::ops::Range;

use iced_x86::{Code as Opcode, FlowControl, Instruction, Mnemonic, OpKind, Register};

use crate::address::{CodeRange, FileAddr, PAGE};
use crate::error::Refusal;
use crate::patch_plan::code::Body;
use crate::patch_plan::displaced::{DisplacedExit, ExitKind, has_call};
use crate::patch_plan::instruction::{has_near_target, is_call, is_straight};
use crate::patch_plan::jump::{JUMP_LEN, Jump, PREFIX_LEN, SHORT_LEN};
use crate::patch_plan::place::Swept;
use crate::patch_plan::site::PatchSite;
use crate::patch_plan::targets::JumpTargets;
use crate::patch_plan::{ExitPlan, flags, padding};

/// How many more instructions an entry may displace to reach an exit, the exit included.
const NEAR: usize = 8;

/// Returns the indexes of the instructions that leave a function which is entered at `entries`. The body is one of
/// its `parts`.
///
/// # Errors
///
/// If it jumps to code of which nothing is known, if it is unclear where an indirect jump leads, or if it runs on into
/// what follows it.
fn find(
    swept: &Swept,
    body: &Body,
    entries: [u64; 2],
    parts: &[CodeRange],
) -> Result<Vec<usize>, Refusal> {
    // A jump to the entry is a tail call of the function itself.
    let is_inside = |address: u64| {
        !entries.contains(&address) && parts.iter().any(|part| part.contains(address))
    };
    let last = body.instructions.last();
    if let Some(last) = last.filter(|_| falls_through(body) && !is_inside(body.range.end())) {
        let offset = body.offset(last);
        return Err(Refusal::FallsThrough { offset });
    }
    let mut exits = Vec::new();
    for (index, instruction) in body.instructions.iter().enumerate() {
        let is_exit = match instruction.flow_control() {
            FlowControl::Return => true,
            FlowControl::UnconditionalBranch | FlowControl::ConditionalBranch => {
                let target = instruction.near_branch_target();
                if !is_inside(target) && !swept.is_known(target) {
                    let offset = body.offset(instruction);
                    return Err(Refusal::UnknownCode { offset });
                }
                !is_inside(target)
            }
            FlowControl::IndirectBranch => {
                let offset = body.offset(instruction);
                match swept.targets.of_jump(instruction.ip()) {
                    JumpTargets::Inside => false,
                    JumpTargets::Outside => true,
                    JumpTargets::AnyTarget | JumpTargets::Untracked => {
                        return Err(Refusal::UnknownTargets { offset });
                    }
                }
            }
            _ => false,
        };
        if is_exit && !leaves_to_handler(body, index) {
            exits.push(index);
        }
    }
    Ok(exits)
}

/// Returns whether the instruction with this index leaves to an exception handler, as OCaml's `raise_notrace` does, or
/// to another stack: the stack pointer was loaded from memory. This is no exit, because the call does not return. A
/// load from the function's own frame does not count: code that has aligned its stack finds the earlier value there.
fn leaves_to_handler(body: &Body, index: usize) -> bool {
    /// How many instructions before it are looked at.
    const LEN: usize = 4;
    let before = &body.instructions[index.saturating_sub(LEN)..index];
    let straight = before.iter().rev().take_while(|it| is_straight(it));
    let mut straight = straight.filter(|it| it.op_count() > 0);
    straight.any(|it| {
        it.mnemonic() == Mnemonic::Mov
            && it.op0_kind() == OpKind::Register
            && it.op0_register() == Register::RSP
            && it.op1_kind() == OpKind::Memory
            && !matches!(it.memory_base(), Register::RSP | Register::RBP)
    })
}

/// Returns whether a function keeps data below the stack pointer (the red zone of the psABI).
fn uses_red_zone(body: &Body) -> bool {
    body.instructions.iter().any(|it| {
        let has_memory = it.op_kinds().any(|kind| kind == OpKind::Memory);
        let is_below = (it.memory_displacement64() as i64) < 0;
        let is_accessed = has_memory && it.mnemonic() != Mnemonic::Lea;
        is_accessed && it.memory_base() == Register::RSP && is_below
    })
}

/// Returns the offset of a jump whose targets are unknown.
pub(super) fn unknown_jump(swept: &Swept, body: &Body) -> Option<u64> {
    let unknown = body.instructions.iter().find(|it| {
        it.flow_control() == FlowControl::IndirectBranch
            && swept.targets.of_jump(it.ip()) == JumpTargets::Untracked
    });
    unknown.map(|instruction| body.offset(instruction))
}

/// Returns whether execution goes on after the last instruction of a body. If that is a call, it does not return:
/// nothing follows it.
fn falls_through(body: &Body) -> bool {
    let is_padding = |it: &&Instruction| it.mnemonic() == Mnemonic::Nop;
    let last = body.instructions.iter().rev().find(|it| !is_padding(it));
    last.is_some_and(|last| {
        let goes_on = is_straight(last) || last.flow_control() == FlowControl::ConditionalBranch;
        goes_on && !is_call(last)
    })
}

/// Chooses the patches of all exits of one function, which overlap neither each other nor that of its entry.
pub(super) struct Exits<'s> {
    pub(super) swept: &'s Swept,
    /// The patch of the entry, which displaces more if an exit follows it closely.
    pub(super) entry: PatchSite,
    pub(super) sites: Vec<PatchSite>,
    /// Where the function is entered: with an instruction such as `endbr64`, and after it.
    entries: [u64; 2],
    /// The starts and ends of the ranges that the sites reserve; these do not overlap.
    taken: BTreeMap<FileAddr, FileAddr>,
}

impl Exits<'_> {
    pub(super) fn new<'s>(swept: &'s Swept, entry: &PatchSite) -> Exits<'s> {
        Exits {
            swept,
            entry: entry.clone(),
            sites: Vec::new(),
            entries: [entry.address.0; 2],
            taken: BTreeMap::new(),
        }
    }

    /// Adds the exits of the body of a function that begins at `start`, or of another of its `parts`.
    pub(super) fn add(
        &mut self,
        body: &Body,
        start: FileAddr,
        parts: &[CodeRange],
    ) -> Result<(), Refusal> {
        self.entries = [start.0, self.entry.address.0];
        let uses_red_zone = uses_red_zone(body);
        for index in find(self.swept, body, self.entries, parts)? {
            let exit = &body.instructions[index];
            // An indirect jump may be no exit after all: then the red zone is still in use.
            let is_indirect = exit.flow_control() == FlowControl::IndirectBranch;
            if uses_red_zone && is_indirect && !exit.is_ip_rel_memory_operand() {
                let offset = body.offset(exit);
                return Err(Refusal::UnknownTargets { offset });
            }
            let displaced = self.entry.address.0..self.displaced_end();
            if displaced.contains(&exit.ip()) {
                let found = self.displaced_exit(body, index, self.entry.address.0);
                self.entry.exits.push(found);
            } else if let Some(site) = self.site(body, index) {
                self.taken
                    .extend(site.reserved().map(|it| (it.start, it.end)));
                self.sites.push(site);
            } else if !self.extend_entry(body, index) {
                let offset = body.offset(exit);
                let candidates = self.swept.candidates(body, index);
                let candidates = candidates.map_err(|refusal| refusal.of_exit(offset))?;
                let is_possible = candidates.iter().any(PatchSite::is_on_one_page);
                return Err(if is_possible {
                    Refusal::Overlap { offset }
                } else {
                    Refusal::PageBorder
                });
            }
        }
        Ok(())
    }

    fn displaced_end(&self) -> u64 {
        self.entry.address.0 + self.entry.displaced.len() as u64
    }

    /// Returns whether a patch would overlap that of the entry or of an earlier exit.
    fn overlaps(&self, site: &PatchSite) -> bool {
        site.reserved().any(|range| {
            let before = self.taken.range(..range.end).next_back();
            let overlaps = |it: Range<FileAddr>| it.start < range.end && range.start < it.end;
            before.is_some_and(|(_, end)| range.start < *end) || self.entry.reserved().any(overlaps)
        })
    }

    /// Returns the patch of an exit. Instructions before it are displaced, too, if it is too short itself.
    fn site(&self, body: &Body, index: usize) -> Option<PatchSite> {
        let exit = &body.instructions[index];
        let fits = |site: &PatchSite| {
            site.is_on_one_page()
                && !self.overlaps(site)
                && self.swept.code.may_have_room(&site.window())
        };
        let is_conditional = exit.flow_control() == FlowControl::ConditionalBranch;
        if self.swept.unmovable(exit).is_some() {
            return None;
        }
        let with_before = (!is_conditional)
            .then(|| self.with_before(body, index))
            .flatten();
        if let Some(site) = with_before.filter(fits) {
            return Some(site);
        }
        // Short jumps come before punned ones, which reach few addresses: all of them may be taken.
        let candidates = self.swept.candidates(body, index).unwrap_or_default();
        let mut candidates: Vec<_> = candidates.into_iter().filter(fits).collect();
        for candidate in &mut candidates {
            candidate.exits = vec![self.displaced_exit(body, index, exit.ip())];
        }
        let shorts = self.short_with_before(body, index);
        candidates.extend(shorts.into_iter().flatten().filter(fits));
        // The padding after the previous function may be needed for a patch of that function.
        let end = body.range.end();
        candidates.sort_by_key(|candidate| match candidate.jump {
            Jump::Near { .. } | Jump::Prefixed => 0,
            Jump::Short { island } if island.0 >= end => 1,
            Jump::Short { .. } => 2,
            Jump::Punned { chosen, .. } => 6 - chosen,
        });
        candidates.into_iter().next()
    }

    /// Returns the near jump over the exit and the fewest instructions before it that make room for the jump.
    fn with_before(&self, body: &Body, index: usize) -> Option<PatchSite> {
        let exit = &body.instructions[index];
        let padding = padding::len_at(&self.swept.code, &self.swept.targets, exit.next_ip());
        let end = exit.next_ip() + padding;
        let first = self.first_before(body, index, |it| end - it.ip() >= JUMP_LEN)?;
        let len = exit.next_ip() - body.instructions[first].ip();
        let padding = JUMP_LEN.saturating_sub(len) as u8;
        Some(self.made(body, first, index, Jump::Near { padding }))
    }

    /// Returns the short jumps over the exit and the instruction before it, one for each island.
    fn short_with_before(
        &self,
        body: &Body,
        index: usize,
    ) -> Option<impl Iterator<Item = PatchSite>> {
        let exit = &body.instructions[index];
        let first = self.first_before(body, index, |it| exit.next_ip() - it.ip() >= 2)?;
        let candidates = self.swept.candidates(body, first).ok()?;
        let of_candidate = move |candidate: PatchSite| match candidate.jump {
            Jump::Short { .. } => Some(self.made(body, first, index, candidate.jump)),
            _ => None,
        };
        Some(candidates.into_iter().filter_map(of_candidate))
    }

    /// Returns the index of the last instruction, at or before the exit, that `has_room`; `None` if an instruction
    /// after it, up to the exit, is a branch target, or one cannot be moved.
    fn first_before(
        &self,
        body: &Body,
        index: usize,
        has_room: impl Fn(&Instruction) -> bool,
    ) -> Option<usize> {
        let mut first = index;
        loop {
            let instruction = &body.instructions[first];
            if self.swept.targets.are_inside(instruction) {
                return None;
            }
            if has_room(instruction) {
                break;
            }
            if self.swept.targets.contains(instruction.ip()) {
                return None;
            }
            first = first.checked_sub(1)?;
            let before = &body.instructions[first];
            if !is_straight(before) || self.swept.unmovable(before).is_some() {
                return None;
            }
        }
        Some(first)
    }

    fn made(&self, body: &Body, first: usize, last: usize, jump: Jump) -> PatchSite {
        let displaced = &body.instructions[first..=last];
        let start = displaced[0].ip();
        let exit = &body.instructions[last];
        PatchSite {
            address: FileAddr(start),
            displaced: self
                .swept
                .code
                .bytes(start, exit.next_ip() - start)
                .to_vec(),
            jump,
            moves_call: has_call(displaced),
            flags_are_dead: self.swept.flags_are_dead(&body.instructions, first),
            exits: vec![self.displaced_exit(body, last, start)],
            mmx_is_free: !body.uses_mmx && !body.may_pass_on_result(first),
        }
    }

    /// Returns an exit among instructions that are displaced from `start` on.
    fn displaced_exit(&self, body: &Body, index: usize, start: u64) -> DisplacedExit {
        let exit = &body.instructions[index];
        // The flags are dead where a function is entered or returned to, unless they are what is passed or returned.
        let (function, _) = body.flow(index);
        let are_returned = self.swept.targets.are_flags_read_after(function);
        let flags_are_dead = match exit.flow_control() {
            FlowControl::ConditionalBranch | FlowControl::UnconditionalBranch => {
                let target = exit.near_branch_target();
                let begins_function = has_near_target(exit) && self.swept.begins_function(target);
                begins_function && !self.swept.reads_flags_first(target)
            }
            _ => !flags::follows_comparison(&body.instructions, index),
        };
        DisplacedExit {
            offset: (exit.ip() - start) as usize,
            flags_are_dead: flags_are_dead && !are_returned,
            kind: match exit.flow_control() {
                FlowControl::Return => ExitKind::Return,
                _ => ExitKind::Jump,
            },
            begins_again: has_near_target(exit)
                && self.entries.contains(&exit.near_branch_target()),
        }
    }

    /// Makes the entry displace what is between it and an exit, with the exit; returns false if it cannot.
    fn extend_entry(&mut self, body: &Body, index: usize) -> bool {
        let exit = &body.instructions[index];
        if exit.flow_control() == FlowControl::ConditionalBranch
            || self.swept.unmovable(exit).is_some()
        {
            return false;
        }
        let Some(first) = body.index_at(self.displaced_end()) else {
            return false;
        };
        let Some(between) = body.instructions.get(first..=index) else {
            return false;
        };
        let last_displaced = first.checked_sub(1).map(|last| &body.instructions[last]);
        let is_followed = last_displaced.is_some_and(is_straight);
        let targets = &self.swept.targets;
        let is_reached = |it: &Instruction| targets.contains(it.ip()) || targets.are_inside(it);
        let (_, straight) = between.split_last().unwrap_or((exit, &[]));
        let can_move = |it: &Instruction| is_straight(it) && self.swept.unmovable(it).is_none();
        if between.len() > NEAR
            || !is_followed
            || between.iter().any(is_reached)
            || !straight.iter().all(can_move)
        {
            return false;
        }
        let start = self.entry.address.0;
        self.entry.displaced = self
            .swept
            .code
            .bytes(start, exit.next_ip() - start)
            .to_vec();
        let found = self.displaced_exit(body, index, start);
        self.entry.exits.push(found);
        true
    }
}

/// Plans the patches of one of OCaml 5's wrappers of C functions: straight code, perhaps a call, and a return. The
/// return becomes a short jump back to an island among the displaced instructions. Its second byte is padding, or the
/// first byte of the next function, whose jump has to be [prefixed](Jump::Prefixed). `entry` is a candidate for the
/// patch of its entry.
///
/// ```text
/// f   e9 d d d d . . . . e9 d d d d . eb│f8 e9 d d d d   g
///                        ▲ the island ▲ ──┘ clc, if g is entered
/// ```
pub(super) fn leaning(swept: &Swept, body: &Body, entry: &PatchSite) -> Option<ExitPlan> {
    let last = body.instructions.len().checked_sub(1)?;
    let first = body.index_at(entry.address.0)?;
    let (exit, moved) = body.instructions.get(first..)?.split_last()?;
    let padding = padding::len_at(&swept.code, &swept.targets, exit.next_ip());
    let is_end = padding > 0 || exit.next_ip() == body.range.end();
    let is_single = exit.code() == Opcode::Retnq && exit.len() == 1;
    let is_near = entry.jump == Jump::Near { padding: 0 } && entry.exits.is_empty();
    // Everything is written at once, with the jump of the next function.
    let end_of_next = exit.next_ip() + PREFIX_LEN + JUMP_LEN;
    let is_on_one_page = entry.address.0 / PAGE == (end_of_next - 1) / PAGE;
    let can_be_patched = is_end && is_single && swept.unmovable(exit).is_none();
    let can_be_entered = is_near && is_on_one_page && can_be_displaced(swept, moved);
    if !can_be_patched || !can_be_entered || leaves_to_handler(body, last) {
        return None;
    }
    let start = entry.address.0;
    let mut exits = Exits::new(swept, entry);
    let jump = Jump::Short {
        island: FileAddr(island(start, exit, padding)?),
    };
    exits.sites.push(exits.made(body, last, last, jump));
    exits.entry.displaced = swept.code.bytes(start, exit.ip() - start).to_vec();
    exits.entry.moves_call = has_call(moved);
    Some(ExitPlan {
        entry: exits.entry,
        sites: exits.sites,
        overwrites_next: padding == 0,
    })
}

/// Returns whether these instructions, which precede a return, can be displaced together. If the last one is a call,
/// its return address stays that of the return.
fn can_be_displaced(swept: &Swept, moved: &[Instruction]) -> bool {
    /// The longest wrappers load ten arguments.
    const MOST: usize = 16;
    let Some((last, straight)) = moved.split_last() else {
        return false;
    };
    let is_entered = moved
        .iter()
        .skip(1)
        .any(|it| swept.targets.contains(it.ip()))
        || moved.iter().any(|it| swept.targets.are_inside(it));
    moved.len() <= MOST
        && !is_entered
        && moved.iter().all(|it| swept.unmovable(it).is_none())
        && straight.iter().all(is_straight)
        && (is_straight(last) || is_call(last))
}

/// Returns where an island can be among instructions that are displaced from `start` up to a return: after the jump
/// at the entry, even if that is prefixed.
fn island(start: u64, exit: &Instruction, padding: u64) -> Option<u64> {
    /// These displacements are instructions that change nothing but the carry flag: `clc`, `stc` and `cmc`.
    const FLAG_INSTRUCTIONS: [u8; 3] = [0xf8, 0xf9, 0xf5];
    let origin = exit.ip() + SHORT_LEN;
    let is_free = |it: &u64| *it >= start + PREFIX_LEN + JUMP_LEN && it + JUMP_LEN <= exit.ip();
    if padding > 0 {
        return exit.ip().checked_sub(JUMP_LEN).filter(is_free);
    }
    let reached = FLAG_INSTRUCTIONS.map(|it| origin.wrapping_add_signed((it as i8).into()));
    reached.into_iter().find(is_free)
}
