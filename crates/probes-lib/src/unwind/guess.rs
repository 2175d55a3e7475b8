//! Guesses the caller of a frame whose CFA is relative to rbp, where rbp is not known: of a blocked thread, only the stack
//! pointer is known, and functions that call alloca(3), for example, have their CFA relative to rbp.

use super::memory::StackMemory;
use super::registers::{FrameRegisters, RBP, RSP};
use super::tables::{Cfa, UnwindRow};
use super::{RawStack, StackEnd, Unwinder};
use crate::address::LiveAddr;
use crate::site::{JUMP_LEN, LONGEST_CALL, direct_call_target, ends_with_call};
use std::ops::Range;

/// How many bytes above the stack pointer the return address is searched in.
const MAX_SEARCHED: u64 = 64 << 10;

/// The most return addresses that are tried.
const MAX_TRIED: usize = 64;

/// How many frames, at most, are found from those that are tried: the process may be stopped meanwhile.
const MAX_FRAMES_TRIED: usize = 1 << 16;

/// Returns the frames of the callers. The return address is taken to be the first word above the stack pointer that is the
/// address after a direct call of this function, and from which the stack can be unwound to its end; if there is none,
/// the first such word after any call, if each frame may have been called by the next one: return addresses of earlier
/// calls may be among the words.
pub(super) fn caller(
    unwinder: &mut Unwinder,
    row: &UnwindRow,
    registers: FrameRegisters,
    is_exact: bool,
    memory: &mut impl StackMemory,
) -> Option<RawStack> {
    let Cfa::Register(_, offset) = row.cfa else {
        return None;
    };
    let stack_pointer = registers.get(RSP)?;
    let end = stack_pointer.saturating_add(MAX_SEARCHED);
    let function = unwinder.object(registers.ip)?.live(&row.function);
    let mut frames = 0;
    for callee in [Some(&function), None] {
        let mut tried = 0;
        for at in (stack_pointer..end).step_by(8) {
            let Some(word) = memory.word(at) else {
                break;
            };
            if !unwinder.has_code(LiveAddr(word)) || !follows_call(word, callee, memory) {
                continue;
            }
            if tried == MAX_TRIED || frames >= MAX_FRAMES_TRIED {
                break;
            }
            tried += 1;
            let mut with_base = registers;
            with_base.set(RBP, Some(at.wrapping_add(8).wrapping_sub(offset as u64)));
            let mut rest = unwinder.unwind_from(with_base, is_exact, false, memory);
            frames += rest.frames.len();
            let is_direct = callee.is_some();
            if rest.end == StackEnd::Outermost
                && (is_direct || unwinder.are_called(&rest.frames, memory))
            {
                rest.frames.remove(0);
                return Some(rest);
            }
        }
    }
    None
}

/// Returns what the instruction before `at` calls, if it is a direct call.
pub(super) fn direct_call_before(at: u64, memory: &mut impl StackMemory) -> Option<u64> {
    let mut code = [0; JUMP_LEN];
    memory.read(at.wrapping_sub(code.len() as u64), &mut code)?;
    direct_call_target(code, at)
}

/// Returns whether the instruction before `at` is a call; if a `callee` is given, a direct call of that function.
pub(super) fn follows_call(
    at: u64,
    callee: Option<&Range<u64>>,
    memory: &mut impl StackMemory,
) -> bool {
    if let Some(target) = direct_call_before(at, memory) {
        return callee.is_none_or(|function| function.contains(&target));
    }
    let mut code = [0; LONGEST_CALL];
    let is_read = memory.read(at.wrapping_sub(code.len() as u64), &mut code);
    callee.is_none() && is_read.is_some() && ends_with_call(&code)
}
