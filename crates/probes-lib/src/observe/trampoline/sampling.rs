//! The part of a trampoline that lets every Nth hit of its point through.
//!
//! The hits are counted by one locked instruction, and each thread checks whether the number of its own hit is a
//! multiple of N: so exactly one in N is let through, however many threads hit the point at once. (A counter that
//! counts down, and is set to N again by the thread that reaches 0, would lose its step if that thread is interrupted
//! for more than N hits of others.)
//!
//! A division would take longer than all else here. A number n is a multiple of N = 2^k · d, with d odd, if and only if
//! n · d⁻¹ modulo 2^64, rotated right by k bits, is at most (2^64 - 1) / N. (Granlund and Montgomery, "Division by
//! invariant integers using multiplication", 1994, section 9.)

use std::num::NonZeroU64;

use iced_x86::code_asm::{CodeAssembler, CodeLabel, eax, rax, rdx};
use iced_x86::{Code, IcedError, Instruction, Register};

use super::emit::at_address;
use crate::address::LiveAddr;

/// Emits the code that counts the hit in the counter at `counter`, and jumps to `otherwise` unless its number is a
/// multiple of `every`. The code uses rax and rdx.
pub(super) fn unless_chosen(
    a: &mut CodeAssembler,
    every: NonZeroU64,
    counter: LiveAddr,
    otherwise: CodeLabel,
) -> Result<(), IcedError> {
    let multiple = MultipleOf::new(every);
    a.mov(eax, 1)?;
    let counter = at_address(counter);
    let mut add = Instruction::with2(Code::Xadd_rm64_r64, counter, Register::RAX)?;
    add.set_has_lock_prefix(true);
    a.add_instruction(add)?;
    a.inc(rax)?;
    a.mov(rdx, multiple.inverse)?;
    a.imul_2(rax, rdx)?;
    a.ror(rax, multiple.shift)?;
    a.mov(rdx, multiple.most)?;
    a.cmp(rax, rdx)?;
    a.ja(otherwise)
}

/// What it takes to see whether a number is a multiple of another.
#[derive(Clone, Copy, Debug)]
struct MultipleOf {
    /// What it is multiplied by.
    inverse: u64,
    /// By how many bits the product is rotated right.
    shift: u32,
    /// What the result is at most.
    most: u64,
}

impl MultipleOf {
    fn new(number: NonZeroU64) -> MultipleOf {
        let shift = number.trailing_zeros();
        let odd = number.get() >> shift;
        // Newton's method: 3 bits are right at first, and twice as many after each step.
        let step =
            |inverse: u64| inverse.wrapping_mul(2_u64.wrapping_sub(odd.wrapping_mul(inverse)));
        MultipleOf {
            inverse: (0..5).fold(odd, |inverse, _| step(inverse)),
            shift,
            most: u64::MAX / number,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_multiple(number: u64, of: u64) -> bool {
        let it = MultipleOf::new(NonZeroU64::new(of).unwrap());
        number.wrapping_mul(it.inverse).rotate_right(it.shift) <= it.most
    }

    #[test]
    fn multiples_are_those_that_division_finds() {
        let edges = [1 << 32, (1 << 32) + 1, 1 << 63, u64::MAX / 3, u64::MAX];
        let divisors = (1..=1000).chain([1_000_000, 6_000_000_007]).chain(edges);
        for of in divisors {
            let around = edges.map(|it| it / of * of);
            let around = around
                .into_iter()
                .flat_map(|it| it.saturating_sub(2)..=it.saturating_add(2));
            for number in (0..3000).chain(around) {
                assert_eq!(is_multiple(number, of), number % of == 0, "{number} {of}");
            }
        }
    }
}
