//! Checks whether each frame of a stack may have been called by the next one, as far as the code tells. If not, parts
//! of the stack may have been read at different moments.

use std::ops::Range;

use iced_x86::{Decoder, DecoderOptions, FlowControl, Instruction, Mnemonic};

use super::memory::StackMemory;
use super::{RawFrame, Unwinder, guess};
use crate::address::LiveAddr;

/// A longer function, in bytes, is assumed to jump anywhere.
const MAX_LEN: u64 = 1 << 16;

/// How many jumps are followed from the function that is called to one that has a frame.
const MAX_JUMPS: u32 = 3;

/// How many functions are looked at to find out whether a call leads to code.
const MAX_TARGETS: u32 = 4096;

/// The most bytes of an instruction.
const MAX_INSTRUCTION: usize = 15;

/// How many functions are kept with their jumps.
const MAX_KEPT: usize = 1 << 14;

/// Where a function may jump to (tail calls): the code there then returns to the caller of this function.
#[derive(Clone, Debug)]
pub(super) enum JumpsOut {
    /// To an address that is not known from its code.
    Anywhere,
    /// To these addresses.
    To(Vec<u64>),
}

impl Unwinder {
    /// Returns whether each of these frames may have been called by the next one, or the next one was interrupted by a
    /// signal.
    pub(crate) fn are_called(
        &mut self,
        frames: &[RawFrame],
        memory: &mut impl StackMemory,
    ) -> bool {
        frames.windows(2).all(|pair| {
            let [callee, caller] = pair else { return true };
            let is_interrupted = caller.within == caller.address;
            is_interrupted || self.may_have_called(*caller, *callee, memory)
        })
    }

    fn may_have_called(
        &mut self,
        caller: RawFrame,
        callee: RawFrame,
        memory: &mut impl StackMemory,
    ) -> bool {
        let mut trampolines = self.trampolines().iter();
        if trampolines.any(|it| it.may_return_to(caller.address)) {
            // A patch has overwritten the call.
            return true;
        }
        match guess::direct_call_before(caller.address.0, memory) {
            Some(target) => {
                let mut left = MAX_TARGETS;
                self.leads_to(target, callee.within, MAX_JUMPS, &mut left, memory)
            }
            None => guess::follows_call(caller.address.0, None, memory),
        }
    }

    /// Returns whether a call of the function at `target` may lead to code at `within` without another call. True if
    /// more than `left` functions would have to be looked at.
    fn leads_to(
        &mut self,
        target: u64,
        within: LiveAddr,
        jumps: u32,
        left: &mut u32,
        memory: &mut impl StackMemory,
    ) -> bool {
        if *left == 0 {
            return true;
        }
        *left -= 1;
        let mut function = self.function_at(target, memory);
        let is_in = |function: &Option<Range<u64>>| {
            function.as_ref().is_some_and(|it| it.contains(&within.0))
        };
        if is_in(&function) {
            return true;
        }
        if let Some(jump) = indirect_jump_at(target, memory) {
            let slot = jump.is_ip_rel_memory_operand();
            let slot = slot.then(|| jump.ip_rel_memory_address());
            let Some(target) = slot.and_then(|slot| memory.word(slot)) else {
                return true;
            };
            function = self.function_at(target, memory);
            if is_in(&function) {
                return true;
            }
        }
        let Some(function) = function else {
            // A patch leads to a trampoline; what it has overwritten may lead anywhere.
            return self.trampolines_at(target).is_some();
        };
        match self.jumps_out(&function, memory) {
            JumpsOut::Anywhere => true,
            JumpsOut::To(targets) => targets
                .into_iter()
                .any(|target| jumps > 0 && self.leads_to(target, within, jumps - 1, left, memory)),
        }
    }

    fn jumps_out(&mut self, function: &Range<u64>, memory: &mut impl StackMemory) -> JumpsOut {
        if let Some(known) = self.jumps_out.get(&function.start) {
            return known.clone();
        }
        let found = jumps_out_of(function, memory);
        if self.jumps_out.len() >= MAX_KEPT {
            self.jumps_out.clear();
        }
        self.jumps_out.insert(function.start, found.clone());
        found
    }
}

/// Returns the indirect jump that the code at an address begins with, behind `endbr64` or not. Stubs of the PLT do so,
/// and jump to what the GOT says; their function, as unwind tables have it, is the whole PLT, or is not described.
fn indirect_jump_at(at: u64, memory: &mut impl StackMemory) -> Option<Instruction> {
    let mut code = [0; 2 * MAX_INSTRUCTION];
    memory.read(at, &mut code)?;
    let mut instructions = Decoder::with_ip(64, &code, at, DecoderOptions::NONE).into_iter();
    let first = instructions.find(|it| it.mnemonic() != Mnemonic::Endbr64)?;
    (first.flow_control() == FlowControl::IndirectBranch).then_some(first)
}

fn jumps_out_of(function: &Range<u64>, memory: &mut impl StackMemory) -> JumpsOut {
    let len = function.end.saturating_sub(function.start);
    let mut code = vec![0; len.min(MAX_LEN) as usize];
    if len > MAX_LEN || memory.read(function.start, &mut code).is_none() {
        return JumpsOut::Anywhere;
    }
    let mut targets = Vec::new();
    for instruction in &mut Decoder::with_ip(64, &code, function.start, DecoderOptions::NONE) {
        match instruction.flow_control() {
            FlowControl::IndirectBranch => return JumpsOut::Anywhere,
            FlowControl::UnconditionalBranch | FlowControl::ConditionalBranch => {
                let target = instruction.near_branch_target();
                if !function.contains(&target) {
                    targets.push(target);
                }
            }
            _ => {}
        }
    }
    targets.sort_unstable();
    targets.dedup();
    JumpsOut::To(targets)
}
