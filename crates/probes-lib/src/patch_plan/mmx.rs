//! Whether a function leaves the MMX registers alone, so that a trampoline in it may use them. They are those of the
//! x87 unit.

use iced_x86::{CpuidFeature, Instruction, OpKind, Register};

/// Returns whether an instruction uses the MMX registers or the x87 unit. By the x86-64 psABI (3.2.1), these hold
/// nothing when a function is called, and only a result of type `long double`, complex or not, when it returns.
pub(super) fn is_used_by(instruction: &Instruction) -> bool {
    let is_x87 = |feature: &CpuidFeature| {
        matches!(
            feature,
            CpuidFeature::FPU
                | CpuidFeature::FPU287
                | CpuidFeature::FPU287XL_ONLY
                | CpuidFeature::FPU387
                | CpuidFeature::FPU387SL_ONLY
                | CpuidFeature::MMX
        )
    };
    let is_mmx = |operand: u32| {
        let register = instruction.op_register(operand);
        instruction.op_kind(operand) == OpKind::Register
            && (Register::MM0..=Register::MM7).contains(&register)
    };
    instruction.cpuid_features().iter().any(is_x87) || (0..instruction.op_count()).any(is_mmx)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::patch_plan::code::decode;

    fn is_used(bytes: &[u8]) -> bool {
        decode(bytes, 0x1000).any(|instruction| is_used_by(&instruction))
    }

    #[test]
    fn x87_and_mmx_are_recognized() {
        // fld1; fldt (%rax); fnstcw (%rax); fisttp (%rax); fcomi; emms; movq %mm0,%rax; movdq2q %xmm0,%mm0; pshufw
        for code in [
            &b"\xd9\xe8"[..],
            b"\xdb\x28",
            b"\xd9\x38",
            b"\xdf\x08",
            b"\xdb\xf1",
            b"\x0f\x77",
            b"\x48\x0f\x7e\xc0",
            b"\xf2\x0f\xd6\xc0",
            b"\x0f\x70\xc1\x00",
        ] {
            assert!(is_used(code), "{code:x?}");
        }
        // mov %rax,%rbx; movq %xmm0,%rax; stmxcsr (%rax); vaddpd; call; ret
        for code in [
            &b"\x48\x89\xc3"[..],
            b"\x66\x48\x0f\x7e\xc0",
            b"\x0f\xae\x18",
            b"\xc5\xf5\x58\xc2",
            b"\xe8\0\0\0\0\xc3",
        ] {
            assert!(!is_used(code), "{code:x?}");
        }
    }
}
