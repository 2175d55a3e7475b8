//! What an instruction does with the flow of control.

use iced_x86::{FlowControl, Instruction, Mnemonic, OpKind};

/// Returns whether the instruction that follows in memory is never executed after this one.
pub(super) fn ends_flow(instruction: &Instruction) -> bool {
    matches!(
        instruction.flow_control(),
        FlowControl::Return
            | FlowControl::UnconditionalBranch
            | FlowControl::IndirectBranch
            | FlowControl::Exception
    ) || instruction.mnemonic() == Mnemonic::Hlt
}

/// Returns whether this is a call of a function. (iced-x86 counts system calls as calls.)
pub(super) fn is_call(instruction: &Instruction) -> bool {
    instruction.mnemonic() == Mnemonic::Call
}

/// Returns whether execution goes on with the instruction that follows in memory, and nowhere else.
pub(super) fn is_straight(instruction: &Instruction) -> bool {
    instruction.flow_control() == FlowControl::Next && instruction.mnemonic() != Mnemonic::Hlt
}

/// Returns whether the instruction is a branch or call whose target is in its bytes.
pub(super) fn has_near_target(instruction: &Instruction) -> bool {
    let kind = instruction.op0_kind();
    instruction.op_count() > 0 && matches!(kind, OpKind::NearBranch64 | OpKind::NearBranch32)
}
