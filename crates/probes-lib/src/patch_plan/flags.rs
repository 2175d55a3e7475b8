//! Whether the status flags are dead at a place, so that a trampoline may change them.

use iced_x86::{FlowControl, Instruction, Mnemonic, OpKind, Register, RflagsBits};

use crate::patch_plan::instruction::is_straight;

/// The status flags: those that arithmetic changes.
const STATUS: u32 = RflagsBits::OF
    | RflagsBits::SF
    | RflagsBits::ZF
    | RflagsBits::AF
    | RflagsBits::PF
    | RflagsBits::CF;

/// How many instructions are looked at, on all paths together.
const MAX_INSTRUCTIONS: usize = 64;

/// What happens to the status flags on the paths from an instruction, until each path has written all of them. A path
/// is unknown if it leaves the function other than by a return or a call, or is too long.
#[derive(Default)]
struct Fate {
    read: bool,
    /// Whether a path reaches a return or a call before it has written them.
    kept: bool,
    unknown: bool,
}

/// How other functions use the flags of a function. Only handwritten code does: by the x86-64 psABI (3.2.1), flags are
/// not preserved across calls and returns.
#[derive(Clone, Copy)]
pub(super) struct OtherCode<'o> {
    /// Whether callers of the function read the flags that it returns with.
    pub(super) reads_result: bool,
    /// Whether the code at an address reads flags before it writes them.
    pub(super) reads_first: &'o dyn Fn(u64) -> bool,
}

impl OtherCode<'_> {
    /// Code that keeps to the psABI.
    const ORDINARY: OtherCode<'static> = OtherCode {
        reads_result: false,
        reads_first: &|_| false,
    };
}

/// Returns whether, on each path from the instruction with this index of a function and its parts, every status flag is
/// written before it is read, or the function first returns or calls another one that does not read them. On an unknown
/// path, the flags count as read. So they do at calls and returns if nothing has read the result of a comparison before
/// the instruction: handwritten code may return it in the flags.
pub(super) fn are_dead(function: &[Instruction], index: usize, others: OtherCode<'_>) -> bool {
    let fate = fate(function, index, others);
    !(fate.read || fate.unknown || fate.kept && follows_comparison(function, index))
}

/// Returns whether a path from the instruction with this index on reads a status flag that it has not written.
pub(super) fn are_read_first(function: &[Instruction], index: usize) -> bool {
    fate(function, index, OtherCode::ORDINARY).read
}

/// Whether the code after a direct call reads the flags that the called function has left.
#[derive(Clone, Copy)]
pub(super) struct AfterCall {
    pub(super) function: u64,
    unwritten: u32,
    left: usize,
}

impl AfterCall {
    /// How many instructions after a call are looked at.
    const LEN: usize = 4;

    pub(super) fn new(function: u64) -> AfterCall {
        AfterCall {
            function,
            unwritten: STATUS,
            left: AfterCall::LEN,
        }
    }

    /// Looks at the next instruction. Returns whether it reads the flags; `None` if neither it nor any that follows does.
    pub(super) fn next(&mut self, instruction: &Instruction) -> Option<bool> {
        if reads_unwritten(instruction, &mut self.unwritten) {
            return Some(true);
        }
        self.left -= 1;
        let goes_on = is_straight(instruction) && self.left > 0 && self.unwritten != 0;
        goes_on.then_some(false)
    }
}

/// Follows the paths until one reads a flag.
fn fate(function: &[Instruction], index: usize, others: OtherCode<'_>) -> Fate {
    let mut fate = Fate::default();
    let mut paths = vec![(index, STATUS)];
    let mut left = MAX_INSTRUCTIONS;
    while let Some((mut index, mut unwritten)) = paths.pop() {
        while unwritten != 0 {
            let Some(instruction) = function.get(index).filter(|_| left > 0) else {
                fate.unknown = true;
                break;
            };
            left -= 1;
            if reads_unwritten(instruction, &mut unwritten) {
                fate.read = true;
                return fate;
            }
            if is_near_return(instruction) || calls_function(instruction) {
                fate.kept = true;
                fate.read |= if is_near_return(instruction) {
                    others.reads_result
                } else {
                    let target = instruction.near_branch_target();
                    instruction.is_call_near() && (others.reads_first)(target)
                };
                break;
            }
            // What follows the end of a part in memory is other code.
            let next = function.get(index + 1);
            let next = next.filter(|it| it.ip() == instruction.next_ip());
            let next = next.map_or(function.len(), |_| index + 1);
            if is_straight(instruction) {
                index = next;
                continue;
            }
            if instruction.flow_control() == FlowControl::ConditionalBranch {
                paths.push((next, unwritten));
            }
            let target = instruction.near_branch_target();
            let found = function.binary_search_by_key(&target, Instruction::ip);
            let (Ok(target), true) = (found, is_jump(instruction)) else {
                fate.unknown = true;
                break;
            };
            index = target;
        }
    }
    fate
}

/// Returns whether an instruction reads a flag that is still `unwritten`; otherwise removes those that it writes.
fn reads_unwritten(instruction: &Instruction, unwritten: &mut u32) -> bool {
    let is_read = reads(instruction) & *unwritten != 0;
    if !is_read && writes_surely(instruction) {
        *unwritten &= !instruction.rflags_modified();
    }
    is_read
}

/// Returns the flags that an instruction reads. That a system call copies them to `r11` does not count.
fn reads(instruction: &Instruction) -> u32 {
    match instruction.mnemonic() {
        Mnemonic::Syscall => 0,
        _ => instruction.rflags_read(),
    }
}

/// Returns whether the flags are the result of an instruction that only sets flags, and nothing has read them before
/// the instruction with this index. Compilers leave no such instruction without a reader.
pub(super) fn follows_comparison(function: &[Instruction], index: usize) -> bool {
    let before = function.get(..index).unwrap_or_default();
    let before = before.iter().rev().take(MAX_INSTRUCTIONS);
    let mut next = function.get(index).map(Instruction::ip);
    for instruction in before {
        let goes_on = is_straight(instruction) && Some(instruction.next_ip()) == next;
        if !goes_on || instruction.rflags_read() & STATUS != 0 {
            return false;
        }
        if instruction.rflags_modified() & STATUS != 0 {
            return only_sets_flags(instruction);
        }
        next = Some(instruction.ip());
    }
    false
}

fn only_sets_flags(instruction: &Instruction) -> bool {
    matches!(
        instruction.mnemonic(),
        Mnemonic::Cmp
            | Mnemonic::Test
            | Mnemonic::Bt
            | Mnemonic::Stc
            | Mnemonic::Clc
            | Mnemonic::Sahf
            | Mnemonic::Comiss
            | Mnemonic::Comisd
            | Mnemonic::Ucomiss
            | Mnemonic::Ucomisd
            | Mnemonic::Vcomiss
            | Mnemonic::Vcomisd
            | Mnemonic::Vucomiss
            | Mnemonic::Vucomisd
            | Mnemonic::Ptest
            | Mnemonic::Vptest
    )
}

/// Returns whether it is a jump whose target is in its bytes, conditional or not.
fn is_jump(instruction: &Instruction) -> bool {
    matches!(
        instruction.flow_control(),
        FlowControl::UnconditionalBranch | FlowControl::ConditionalBranch
    )
}

fn is_near_return(instruction: &Instruction) -> bool {
    instruction.mnemonic() == Mnemonic::Ret
}

/// Returns whether it calls a function. A call to the next instruction does not: old code reads the program counter
/// this way.
fn calls_function(instruction: &Instruction) -> bool {
    instruction.mnemonic() == Mnemonic::Call
        && (!instruction.is_call_near()
            || instruction.near_branch_target() != instruction.next_ip())
}

/// Returns false for instructions that leave the flags alone if a count is zero, which is known only when they are
/// executed: shifts by `cl`, and repeated comparisons of strings.
fn writes_surely(instruction: &Instruction) -> bool {
    let last = instruction.op_count().saturating_sub(1);
    let is_shift = matches!(
        instruction.mnemonic(),
        Mnemonic::Shl
            | Mnemonic::Sal
            | Mnemonic::Shr
            | Mnemonic::Sar
            | Mnemonic::Rol
            | Mnemonic::Ror
            | Mnemonic::Rcl
            | Mnemonic::Rcr
            | Mnemonic::Shld
            | Mnemonic::Shrd
    );
    let by_cl = instruction.op_count() > 0
        && instruction.op_kind(last) == OpKind::Register
        && instruction.op_register(last) == Register::CL;
    let is_repeated = instruction.has_rep_prefix() || instruction.has_repne_prefix();
    !(is_shift && by_cl || is_repeated)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::patch_plan::code::decode;

    fn dead(bytes: &[u8]) -> bool {
        let function: Vec<_> = decode(bytes, 0x1000).collect();
        are_dead(&function, 0, OtherCode::ORDINARY)
    }

    #[test]
    fn flags_are_dead_once_all_are_written() {
        // mov $1,%eax; sub $8,%rsp; je
        assert!(dead(b"\xb8\x01\0\0\0\x48\x83\xec\x08\x74\x00"));
        // inc leaves the carry flag, which jc reads.
        assert!(!dead(b"\xff\xc0\x72\x00"));
        assert!(dead(b"\xff\xc0\x48\x39\xc8\x72\x00"));
        // sete; adc; pushf
        assert!(!dead(b"\x0f\x94\xc0\xc3"));
        assert!(!dead(b"\x11\xc8\xc3"));
        assert!(!dead(b"\x9c\x5b\xc3"));
    }

    #[test]
    fn flags_live_where_a_path_ends() {
        // mov %rax,%rbx; then a jump elsewhere, an indirect one, a call of what follows, nothing.
        for end in [&b"\xeb\x70"[..], b"\xff\xe0", b"\xe8\0\0\0\0", b""] {
            assert!(!dead(&[b"\x48\x89\xc3", end].concat()), "{end:x?}");
        }
        // ret; a call; an indirect call.
        for end in [&b"\xc3"[..], b"\xe8\0\x01\0\0", b"\xff\xd0"] {
            assert!(dead(&[b"\x48\x89\xc3", end].concat()), "{end:x?}");
        }
    }

    #[test]
    fn comparisons_may_be_what_is_returned() {
        let dead_at_end = |bytes: &[u8]| {
            let function: Vec<_> = decode(bytes, 0x1000).collect();
            are_dead(&function, function.len() - 1, OtherCode::ORDINARY)
        };
        // cmp; ret. stc; mov; ret. cmp; mov; call.
        for live in [
            &b"\x48\x39\xc8\xc3"[..],
            b"\xf9\x48\x89\xc3\xc3",
            b"\x48\x39\xc8\x48\x89\xc3\xe8\0\x01\0\0",
        ] {
            assert!(!dead_at_end(live), "{live:x?}");
        }
        // sub; ret. cmp; sete; ret. cmp; je; ret. cmp, which is not reached; ret. xor; cmp; add; ret.
        for dead in [
            &b"\x48\x29\xc8\xc3"[..],
            b"\x48\x39\xc8\x0f\x94\xc0\xc3",
            b"\x48\x39\xc8\x74\x00\xc3",
            b"\x48\x39\xc8\xc3\xc3",
            b"\x48\x39\xc8\x48\x01\xc0\xc3",
        ] {
            assert!(dead_at_end(dead), "{dead:x?}");
        }
    }

    #[test]
    fn flags_live_where_other_code_reads_them() {
        let dead = |bytes: &[u8], reads_result: bool, reader: u64| {
            let function: Vec<_> = decode(bytes, 0x1000).collect();
            let reads_first = |address: u64| address == reader;
            let others = OtherCode {
                reads_result,
                reads_first: &reads_first,
            };
            are_dead(&function, 0, others)
        };
        // mov %rax,%rbx; ret. The same and a call of 0x1108.
        let (returning, calling) = (b"\x48\x89\xc3\xc3", b"\x48\x89\xc3\xe8\0\x01\0\0");
        assert!(dead(returning, false, 0) && !dead(returning, true, 0));
        assert!(dead(calling, true, 0x1000) && !dead(calling, false, 0x1108));
    }

    #[test]
    fn flags_are_read_shortly_after_calls() {
        let read = |bytes: &[u8]| {
            let mut after = AfterCall::new(0);
            let mut found = decode(bytes, 0x1000).map(|it| after.next(&it));
            found.find(|it| *it != Some(false)).flatten().is_some()
        };
        // setc; mov, jc; inc, jc. sub, jc; ret, jc; a call, jc; five times mov, jc.
        for first in [
            &b"\x0f\x92\xc0"[..],
            b"\x48\x89\xc3\x72\0",
            b"\xff\xc0\x72\0",
        ] {
            assert!(read(first), "{first:x?}");
        }
        for first in [
            &b"\x48\x83\xec\x08\x72\0"[..],
            b"\xc3\x72\0",
            b"\xff\xd0\x72\0",
            &[&b"\x48\x89\xc3".repeat(5)[..], b"\x72\0"].concat(),
        ] {
            assert!(!read(first), "{first:x?}");
        }
    }

    #[test]
    fn flags_of_callers_may_be_read() {
        let read = |bytes: &[u8]| are_read_first(&decode(bytes, 0x1000).collect::<Vec<_>>(), 0);
        // setc; mov, adc; jc; inc, jc; pushf; jmp to setc; jmp to adc.
        for first in [
            &b"\x0f\x92\xc0"[..],
            b"\x48\x89\xc3\x11\xc8",
            b"\x72\x00",
            b"\xff\xc0\x72\x00",
            b"\x9c",
            b"\xeb\0\x0f\x92\xc0",
            b"\xeb\x02\x0f\x0b\x48\x11\xc0",
        ] {
            assert!(read(&[first, b"\xc3"].concat()), "{first:x?}");
        }
        // sub, jc; ret, setc; jmp elsewhere; syscall; a call, setc.
        for other in [
            &b"\x48\x83\xec\x08\x72\x00"[..],
            b"\xc3\x0f\x92\xc0",
            b"\xeb\x70\x0f\x92\xc0",
            b"\x0f\x05\x48\x39\xc8",
            b"\xe8\0\x01\0\0\x0f\x92\xc0",
        ] {
            assert!(!read(&[other, b"\xc3"].concat()), "{other:x?}");
        }
    }

    #[test]
    fn each_path_is_followed() {
        // jmp over ud2; add; ret
        assert!(dead(b"\xeb\x02\x0f\x0b\x48\x01\xc0\xc3"));
        // jmp to adc
        assert!(!dead(b"\xeb\x02\x0f\x0b\x48\x11\xc0\xc3"));
        // A loop that ends nowhere.
        assert!(!dead(b"\xeb\xfe"));
        // jrcxz over ret; then add, or sete.
        assert!(dead(b"\xe3\x01\xc3\x48\x01\xc0\xc3"));
        assert!(!dead(b"\xe3\x01\xc3\x0f\x94\xc0\xc3"));
        // loop reads no flags: both ways are followed.
        assert!(!dead(b"\xe2\x03\x0f\x94\xc0\xc3"));
    }

    #[test]
    fn counts_of_zero_leave_flags_alone() {
        // shl %cl,%eax; shld %cl,%eax,%eax; repz cmpsb; then jc.
        for maybe in [&b"\xd3\xe0"[..], b"\x0f\xa5\xc0", b"\xf3\xa6"] {
            assert!(!dead(&[maybe, b"\x72\x00"].concat()), "{maybe:x?}");
        }
        // shl $1 and shl $3 write all of them; shl $0 writes none.
        assert!(dead(b"\xc1\xe0\x03\x72\x00"));
        assert!(!dead(b"\xc1\xe0\x00\x72\x00"));
    }
}
