//! Where a function is left: its returns, and its jumps to other functions.

use iced_x86::{FlowControl, Instruction, Mnemonic, OpKind, Register};

use crate::address::{CodeRange, FileAddr};
use crate::patch_plan::code::{Body, is_straight};
use crate::patch_plan::displaced::{immovable, moves_call};
use crate::patch_plan::padding;
use crate::patch_plan::place::Swept;
use crate::patch_plan::refusal::Refusal;
use crate::patch_plan::site::{JUMP_LEN, Jump, PatchSite};

/// How many instructions are searched for where the register of an indirect jump comes from, and how many an entry
/// may displace beyond its jump.
const NEAR: usize = 8;

/// Returns the indexes of the instructions that leave a function, whose parts elsewhere are `parts`.
///
/// # Errors
///
/// If it jumps to code of which nothing is known.
fn find(swept: &Swept, body: &Body, parts: &[CodeRange]) -> Result<Vec<usize>, Refusal> {
    let is_inside = |address: u64| {
        // A jump to the first instruction is a tail call of the function itself.
        let is_own = body.range.contains(address) && address != body.range.start.0;
        is_own || parts.iter().any(|part| part.contains(address))
    };
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
                let before = &body.instructions[index.saturating_sub(NEAR)..index];
                match table_jump(before, instruction) {
                    Table::No => true,
                    Table::Maybe => !swept.targets.has_tables_of(body.range),
                    Table::Yes => false,
                }
            }
            _ => false,
        };
        if is_exit {
            exits.push(index);
        }
    }
    Ok(exits)
}

/// Returns the offset of a jump whose table was not found.
pub(super) fn unknown_jump(swept: &Swept, body: &Body) -> Option<u64> {
    let unknown = body.instructions.iter().enumerate().find(|(index, it)| {
        let before = &body.instructions[index.saturating_sub(NEAR)..*index];
        it.flow_control() == FlowControl::IndirectBranch
            && table_jump(before, it) == Table::Yes
            && !swept.targets.has_tables_of(body.range)
    });
    unknown.map(|(_, instruction)| body.offset(instruction))
}

/// Whether an indirect jump goes through a table of the function itself.
#[derive(PartialEq, Eq)]
enum Table {
    Yes,
    /// Through a table of addresses, which may be those of other functions.
    Maybe,
    No,
}

fn table_jump(before: &[Instruction], jump: &Instruction) -> Table {
    if jump.op0_kind() == OpKind::Memory {
        return if jump.memory_index() == Register::None {
            Table::No
        } else {
            Table::Maybe
        };
    }
    let register = jump.op0_register();
    let is_source = |it: &&Instruction| {
        it.op_count() > 0
            && it.op0_kind() == OpKind::Register
            && it.op0_register().full_register() == register
    };
    match before
        .iter()
        .rev()
        .take_while(|it| is_straight(it))
        .find(is_source)
    {
        Some(source) if source.mnemonic() == Mnemonic::Add => Table::Yes,
        Some(source)
            if source.mnemonic() == Mnemonic::Mov && source.memory_index() != Register::None =>
        {
            Table::Maybe
        }
        _ => Table::No,
    }
}

/// Chooses the patches of all exits of one function, which do not overlap each other or its entry's.
pub(super) struct Exits<'s> {
    pub(super) swept: &'s Swept,
    /// The patch of the entry, which displaces more if an exit follows it closely.
    pub(super) entry: PatchSite,
    pub(super) sites: Vec<PatchSite>,
    /// Exits among what the entry displaces.
    pub(super) in_entry: usize,
}

impl Exits<'_> {
    /// Adds the exits of the function's body, or of another part of it.
    pub(super) fn add(&mut self, body: &Body, parts: &[CodeRange]) -> Result<(), Refusal> {
        for index in find(self.swept, body, parts)? {
            let exit = &body.instructions[index];
            let displaced = self.entry.address.0..self.displaced_end();
            if displaced.contains(&exit.ip()) {
                self.in_entry += 1;
            } else if let Some(site) = self.site(body, index) {
                self.sites.push(site);
            } else if !self.extend_entry(body, index) {
                let offset = body.offset(exit);
                return Err(self
                    .swept
                    .ways(body, index)
                    .err()
                    .unwrap_or(Refusal::Overlap { offset }));
            }
        }
        Ok(())
    }

    fn displaced_end(&self) -> u64 {
        self.entry.address.0 + self.entry.displaced.len() as u64
    }

    /// Returns whether a patch would overlap an earlier one.
    fn overlaps(&self, site: &PatchSite) -> bool {
        let islands = |site: &PatchSite| match site.jump {
            Jump::Short { island } => Some(island..FileAddr(island.0 + JUMP_LEN)),
            _ => None,
        };
        let ranges = |site: &PatchSite| [Some(site.reserved()), islands(site)];
        let earlier = self.sites.iter().chain([&self.entry]).flat_map(ranges);
        earlier.flatten().any(|taken| {
            let overlaps =
                |it: &std::ops::Range<FileAddr>| it.start < taken.end && taken.start < it.end;
            ranges(site).iter().flatten().any(overlaps)
        })
    }

    /// Returns the patch of an exit: instructions before it are displaced, too, if it is too short itself.
    fn site(&self, body: &Body, index: usize) -> Option<PatchSite> {
        let exit = &body.instructions[index];
        let fits = |site: &PatchSite| {
            !self.overlaps(site) && self.swept.code.may_have_room(&site.window())
        };
        let is_conditional = exit.flow_control() == FlowControl::ConditionalBranch;
        if immovable(exit).is_some() {
            return None;
        }
        let with_before = (!is_conditional)
            .then(|| self.with_before(body, index))
            .flatten();
        if let Some(site) = with_before.filter(fits) {
            return Some(site);
        }
        // Short jumps before the others: the window of a punned one may be taken.
        let ways = self.swept.ways(body, index).unwrap_or_default();
        let mut ways: Vec<_> = ways.into_iter().filter(fits).collect();
        let shorts = self.short_with_before(body, index);
        ways.extend(shorts.into_iter().flatten().filter(fits));
        ways.sort_by_key(|way| match way.jump {
            Jump::Near { .. } => 0,
            Jump::Short { .. } => 1,
            Jump::Punned { chosen, .. } => 5 - chosen,
        });
        ways.into_iter().next()
    }

    /// Returns the near jump over the exit and the least instructions before it that make room for it.
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
        let ways = self.swept.ways(body, first).ok()?;
        let of_way = move |way: PatchSite| match way.jump {
            Jump::Short { .. } => Some(self.made(body, first, index, way.jump)),
            _ => None,
        };
        Some(ways.into_iter().filter_map(of_way))
    }

    /// Returns the last instruction, at or before the exit, with which there is `room`, if nothing is reached
    /// between the two.
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
            if !is_straight(before) || immovable(before).is_some() {
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
            moves_call: moves_call(displaced),
            // Those of a function that is entered or returned to.
            flags_are_dead: exit.flow_control() != FlowControl::ConditionalBranch,
        }
    }

    /// Makes the entry displace what is between it and an exit, with the exit; returns false if it cannot.
    fn extend_entry(&mut self, body: &Body, index: usize) -> bool {
        let exit = &body.instructions[index];
        if exit.flow_control() == FlowControl::ConditionalBranch || immovable(exit).is_some() {
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
        let can_move = |it: &Instruction| is_straight(it) && immovable(it).is_none();
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
        self.in_entry += 1;
        true
    }
}
