//! [`SeccompFilter`]: a seccomp filter (seccomp(2)), a classic BPF program that decides on system calls. Pure.
//!
//! The kernel runs every filter of a thread on each of its system calls, and does what the most
//! restrictive one says. Classic BPF jumps only forwards, so every program ends.

use libc::{
    BPF_A, BPF_ABS, BPF_ADD, BPF_ALU, BPF_AND, BPF_DIV, BPF_IMM, BPF_JA, BPF_JEQ, BPF_JGE, BPF_JGT,
    BPF_JMP, BPF_JSET, BPF_K, BPF_LD, BPF_LDX, BPF_LEN, BPF_LSH, BPF_MEM, BPF_MISC, BPF_MUL,
    BPF_NEG, BPF_OR, BPF_RET, BPF_RSH, BPF_ST, BPF_STX, BPF_SUB, BPF_TAX, BPF_TXA, BPF_W, BPF_X,
    BPF_XOR,
};

use crate::error::SeccompAction;

/// `AUDIT_ARCH_X86_64` of linux/audit.h.
const ARCHITECTURE: u32 = 0xc000_003e;

/// The length of `struct seccomp_data` in bytes.
const DATA_LEN: u32 = 64;

/// How many words of memory a program has (`BPF_MEMWORDS`).
const MEMORY_LEN: usize = 16;

/// A system call as filters see it: `struct seccomp_data` of linux/seccomp.h. They do
/// not see what pointers point to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SeccompData {
    pub(crate) number: u32,
    /// The address after the `syscall` instruction.
    pub(crate) instruction_pointer: u64,
    pub(crate) arguments: [u64; 6],
}

impl SeccompData {
    /// Returns the word at an offset of `struct seccomp_data`.
    fn word(&self, offset: u32) -> Option<u32> {
        if offset % 4 != 0 {
            return None;
        }
        let half = |number: u64| {
            if offset % 8 == 0 {
                number as u32
            } else {
                (number >> 32) as u32
            }
        };
        match offset {
            0 => Some(self.number),
            4 => Some(ARCHITECTURE),
            8 | 12 => Some(half(self.instruction_pointer)),
            _ => {
                let argument = self.arguments.get((offset / 8) as usize - 2)?;
                Some(half(*argument))
            }
        }
    }
}

/// A seccomp filter.
#[derive(Clone, Debug)]
pub(crate) struct SeccompFilter(pub(crate) Vec<libc::sock_filter>);

/// A filter that no kernel would have accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Invalid;

/// Returns what happens instead of a system call under these filters, which are in the order in which they were set.
/// `None` if they allow the call, whether it is logged or not.
///
/// # Errors
///
/// If one of them is invalid.
pub(crate) fn refusal(
    filters: &[SeccompFilter],
    call: &SeccompData,
) -> Result<Option<SeccompAction>, Invalid> {
    let mut result = libc::SECCOMP_RET_ALLOW;
    // The kernel runs the filter that was set last first. If several return the same action, the data of the filter
    // that was run first count.
    for filter in filters.iter().rev() {
        let returned = filter.run(call).ok_or(Invalid)?;
        // linux/seccomp.h: actions are compared as signed numbers, the least is the most restrictive.
        if action_of(returned) < action_of(result) {
            result = returned;
        }
    }
    Ok(decode(result))
}

fn action_of(returned: u32) -> i32 {
    (returned & libc::SECCOMP_RET_ACTION_FULL) as i32
}

fn decode(returned: u32) -> Option<SeccompAction> {
    /// The kernel's `MAX_ERRNO`, to which it limits errors.
    const MAX_ERRNO: u32 = 4095;
    let data = returned & libc::SECCOMP_RET_DATA;
    match returned & libc::SECCOMP_RET_ACTION_FULL {
        libc::SECCOMP_RET_ALLOW | libc::SECCOMP_RET_LOG => None,
        libc::SECCOMP_RET_TRACE => Some(SeccompAction::Trace),
        libc::SECCOMP_RET_USER_NOTIF => Some(SeccompAction::Notify),
        libc::SECCOMP_RET_ERRNO => Some(SeccompAction::Errno(data.min(MAX_ERRNO) as i32)),
        libc::SECCOMP_RET_TRAP => Some(SeccompAction::Trap),
        // seccomp(2): "If an action value other than one of the above is specified, then the filter action is treated
        // as either SECCOMP_RET_KILL_PROCESS (since Linux 4.14) or SECCOMP_RET_KILL_THREAD".
        _ => Some(SeccompAction::Kill),
    }
}

/// Codes of instructions.
const LOAD_DATA: u32 = BPF_LD | BPF_W | BPF_ABS;
const LOAD_LEN: u32 = BPF_LD | BPF_W | BPF_LEN;
const LOAD_X_LEN: u32 = BPF_LDX | BPF_W | BPF_LEN;
const LOAD: u32 = BPF_LD | BPF_IMM;
const LOAD_X: u32 = BPF_LDX | BPF_IMM;
const LOAD_MEMORY: u32 = BPF_LD | BPF_MEM;
const LOAD_X_MEMORY: u32 = BPF_LDX | BPF_MEM;
const A_TO_X: u32 = BPF_MISC | BPF_TAX;
const X_TO_A: u32 = BPF_MISC | BPF_TXA;
const NEGATE: u32 = BPF_ALU | BPF_NEG;
const JUMP: u32 = BPF_JMP | BPF_JA;
const RETURN: u32 = BPF_RET | BPF_K;
const RETURN_A: u32 = BPF_RET | BPF_A;

/// The bits of a code that say which operation it does.
const OPERATION: u32 = 0xf0;

impl SeccompFilter {
    /// Returns what the filter returns for a system call; `None` if it is invalid.
    fn run(&self, call: &SeccompData) -> Option<u32> {
        let (mut a, mut x) = (0_u32, 0_u32);
        let mut memory = [0_u32; MEMORY_LEN];
        let mut at = 0_usize;
        loop {
            let &libc::sock_filter { code, jt, jf, k } = self.0.get(at)?;
            let code = u32::from(code);
            let index = k as usize;
            at += 1;
            match code {
                LOAD_DATA => a = call.word(k)?,
                LOAD_LEN => a = DATA_LEN,
                LOAD_X_LEN => x = DATA_LEN,
                LOAD => a = k,
                LOAD_X => x = k,
                LOAD_MEMORY => a = *memory.get(index)?,
                LOAD_X_MEMORY => x = *memory.get(index)?,
                BPF_ST => *memory.get_mut(index)? = a,
                BPF_STX => *memory.get_mut(index)? = x,
                A_TO_X => x = a,
                X_TO_A => a = x,
                NEGATE => a = a.wrapping_neg(),
                JUMP => at = at.checked_add(index)?,
                RETURN => return Some(k),
                RETURN_A => return Some(a),
                _ => {
                    let operand = if code & BPF_X == 0 { k } else { x };
                    let operation = code & OPERATION;
                    match code & !OPERATION & !BPF_X {
                        // The kernel ends a program that divides by zero, as if it returned 0.
                        BPF_ALU if operation == BPF_DIV && operand == 0 => return Some(0),
                        BPF_ALU => a = calculate(operation, a, operand)?,
                        BPF_JMP => {
                            let is_so = compare(operation, a, operand)?;
                            at += usize::from(if is_so { jt } else { jf });
                        }
                        _ => return None,
                    }
                }
            }
        }
    }
}

fn calculate(operation: u32, a: u32, operand: u32) -> Option<u32> {
    Some(match operation {
        BPF_ADD => a.wrapping_add(operand),
        BPF_SUB => a.wrapping_sub(operand),
        BPF_MUL => a.wrapping_mul(operand),
        BPF_DIV => a.checked_div(operand)?,
        BPF_OR => a | operand,
        BPF_AND => a & operand,
        BPF_XOR => a ^ operand,
        // As the processor does: by the operand modulo 32.
        BPF_LSH => a.wrapping_shl(operand),
        BPF_RSH => a.wrapping_shr(operand),
        _ => return None,
    })
}

fn compare(operation: u32, a: u32, operand: u32) -> Option<bool> {
    Some(match operation {
        BPF_JEQ => a == operand,
        BPF_JGT => a > operand,
        BPF_JGE => a >= operand,
        BPF_JSET => a & operand != 0,
        _ => return None,
    })
}

#[cfg(test)]
mod tests;
