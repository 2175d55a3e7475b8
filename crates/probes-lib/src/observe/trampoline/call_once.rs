//! The trampoline of a C function: before the first call of this function, it calls another one.
//!
//! ```text
//! first hit    unless in a forked child: push the address of the entry; push that of a `ret`; jmp callee
//!              the callee returns to the `ret`, which returns to the entry, as if the function was called only now
//! later hits   the displaced instructions; jmp to what follows them
//! ```
//!
//! So the callee never returns into the trampoline, which may be removed while the callee runs. The two words keep
//! the stack aligned to 16 bytes, as the psABI requires (3.2.2). Only registers are used that a caller does not
//! expect to be preserved, and that hold no argument, as there are none.

use iced_x86::code_asm::{CodeAssembler, eax, rax, rcx};
use iced_x86::{Code, Instruction, Register};

use super::DoesNotFit;
use super::emit::at_address;
use super::function::with_displaced;
use crate::address::{LiveAddr, LoadBias};
use crate::observe::layout::arena::LINE;
use crate::observe::observation::CallOnce;
use crate::patch_plan::displaced::DisplacedCopy;
use crate::patch_plan::site::PatchSite;

/// Room for the longest one, in bytes: 76, and displaced instructions with what replaces those that cannot be moved.
pub(super) const LEN: u64 = 4 * LINE;

/// Returns the trampoline at `at` of a function that is entered at `entry`, and the copy of the displaced instructions
/// in it. `counter` is that of its hits.
///
/// # Errors
///
/// If it is too far from what it refers to.
pub(super) fn code(
    at: LiveAddr,
    (site, bias): (&PatchSite, LoadBias),
    entry: LiveAddr,
    once: &CallOnce,
    counter: LiveAddr,
) -> Result<(Vec<u8>, DisplacedCopy), DoesNotFit> {
    let mut a = CodeAssembler::new(64)?;
    let mut later = a.create_label();
    a.mov(eax, 1)?;
    let counter = at_address(counter);
    let mut increment = Instruction::with2(Code::Xadd_rm64_r64, counter, Register::RAX)?;
    increment.set_has_lock_prefix(true);
    a.add_instruction(increment)?;
    a.test(rax, rax)?;
    a.jne(later)?;
    a.mov(eax, libc::SYS_getpid as i32)?;
    a.syscall()?;
    a.cmp(eax, once.pid)?;
    a.jne(later)?;
    for address in [entry, once.ret] {
        a.mov(rcx, address.0)?;
        a.push(rcx)?;
    }
    a.mov(rcx, once.callee.0)?;
    a.jmp(rcx)?;
    a.set_label(&mut later)?;
    // A label needs an instruction.
    a.nop()?;
    with_displaced(a.assemble(at.0)?, at, (site, bias))
}
