//! [`Point`]: a place in the code of a process whose executions, called hits, can be observed; and
//! [`Role`]: what is recorded of each hit. Only computes: no access to processes or files.
//!
//! A point is patched by a call of its trampoline. The trampoline records the hit, does what the
//! displaced bytes did, and continues where they continue. The only kind of point so far is the site
//! of a probe:
//!
//! ```text
//! address                    not observed                observed
//! +0            90           nop                         nop
//! +1 the patch  3d <rel32>   cmp: the probe is disabled  call trampoline, which ends with ret
//!               e8 <rel32>   call wrapper: enabled       call trampoline, which ends with jmp wrapper
//! +6                         both return to here
//! ```

use iced_x86::Register;

use crate::address::{LiveAddr, PAGE};
use crate::elf::arguments::{Argument, Operand};
use crate::observe::frame::Frame;
use crate::site::{CALL, CMP, OPCODE_OFFSET, SITE_LEN, SiteCode};

/// How many bytes the patch of a point overwrites: an opcode and a displacement.
pub(crate) const PATCH_LEN: usize = 5;

/// A place in the code of a process that can be observed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Point {
    /// Where it begins: at the nop of a probe's site.
    pub(crate) address: LiveAddr,
    /// The operand of the displaced instruction: the distance (rel32) from the end of the site to the
    /// wrapper. Whether the displaced opcode was `cmp` or `call` is recorded in the tail of the trampoline.
    pub(crate) operand: [u8; 4],
}

impl Point {
    /// Returns the point for the site of a probe.
    pub(crate) fn probe_site(address: LiveAddr, code: SiteCode) -> Point {
        let operand = code.operand();
        Point { address, operand }
    }

    /// Returns where its patch begins.
    pub(crate) fn patch_at(&self) -> LiveAddr {
        self.address.plus(OPCODE_OFFSET)
    }

    /// Returns the address of the next instruction, to which its trampoline returns.
    pub(crate) fn next(&self) -> LiveAddr {
        self.address.plus(SITE_LEN as u64)
    }

    /// Returns where its trampoline jumps to in the end if the probe is enabled: the wrapper that the
    /// displaced call calls.
    pub(crate) fn wrapper(&self) -> LiveAddr {
        let displacement = i64::from(i32::from_le_bytes(self.operand));
        self.next().plus(displacement as u64)
    }

    /// Returns the bytes of its patch: a call of the trampoline, which must be within reach of a rel32.
    pub(crate) fn patched(&self, trampoline: LiveAddr) -> [u8; PATCH_LEN] {
        let displacement = trampoline.0.wrapping_sub(self.next().0) as u32;
        let [a, b, c, d] = displacement.to_le_bytes();
        [CALL, a, b, c, d]
    }

    /// Returns the displaced bytes of a probe that is enabled or disabled.
    pub(crate) fn unpatched(&self, enabled: bool) -> [u8; PATCH_LEN] {
        let [a, b, c, d] = self.operand;
        [if enabled { CALL } else { CMP }, a, b, c, d]
    }

    /// Returns whether the code found in memory is the site of this point, without a patch.
    pub(crate) fn is_unpatched(&self, found: SiteCode) -> bool {
        found.is_pristine() && found.operand() == self.operand
    }

    /// Returns whether `found` is a half-written patch: the opcode is that of a disabled probe, and
    /// each byte of the operand is either the original one or that of `patched`. All four may be
    /// original only if the patch crosses a page boundary, where patches are always written in
    /// steps. There, the opcode may also be that of the patch, if the process has discarded the second page.
    pub(crate) fn is_half_patched(&self, found: [u8; PATCH_LEN], patched: [u8; PATCH_LEN]) -> bool {
        let [opcode, displacement @ ..] = found;
        let crosses = crosses(self.patch_at(), PAGE);
        let is_begun = match opcode {
            CMP => displacement != self.operand || crosses,
            CALL => displacement != self.operand && crosses,
            _ => false,
        };
        is_begun && self.is_mixed(displacement, patched)
    }

    /// Returns whether `found` is the site with its original bytes, or with some of them and some of the patch:
    /// it was patched, and is so no more.
    pub(crate) fn is_discarded(&self, found: [u8; PATCH_LEN], patched: [u8; PATCH_LEN]) -> bool {
        let [opcode, displacement @ ..] = found;
        let is_site = matches!(opcode, CMP | CALL) && self.is_mixed(displacement, patched);
        is_site && found != patched
    }

    /// Returns whether each byte of a displacement is either the original one or that of `patched`.
    fn is_mixed(&self, displacement: [u8; 4], patched: [u8; PATCH_LEN]) -> bool {
        let mut bytes = displacement.iter().zip(self.operand).zip(&patched[1..]);
        bytes.all(|((&byte, own), &patched)| byte == own || byte == patched)
    }
}

/// Returns whether the patch at an address crosses a border between blocks of this size.
pub(crate) fn crosses(patch_at: LiveAddr, block: u64) -> bool {
    patch_at.0 / block != patch_at.plus(PATCH_LEN as u64 - 1).0 / block
}

/// What the trampoline of a point records before it does what the displaced bytes did.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Role {
    pub(crate) is_counted: bool,
    /// Which ends of pairs it is: stops come before starts.
    pub(crate) ends: Vec<PairEnd>,
    /// Of a point that is an end of a pair.
    pub(crate) marks: Marks,
    pub(crate) watched: Option<WatchRole>,
}

/// By what the trampolines of a pair recognize that a stop belongs to another start than the last one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Marks {
    /// The general register of the first argument.
    pub(crate) argument: Option<Register>,
    pub(crate) frame: Frame,
}

/// An end of the pair of this number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum PairEnd {
    Start(u32),
    Stop(u32),
}

/// What is recorded of each hit of a point that is watched.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct WatchRole {
    /// The index of the point in its plan, which identifies its records.
    pub(crate) point: u32,
    pub(crate) arguments: Vec<ArgumentSource>,
}

/// Where a trampoline takes an argument from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum ArgumentSource {
    /// A general register.
    Register(Register),
    /// The low 8 bytes of a vector register.
    Vector(Register),
    /// 8 bytes on the stack, at this offset from the stack pointer at the point.
    Stack(u32),
    /// Somewhere else: it is not read.
    Unknown,
}

/// Only offsets from the stack pointer below this many bytes are read: frames are smaller.
const STACK_OFFSET_LIMIT: i32 = 1 << 16;

impl Role {
    /// Returns whether nothing is recorded.
    pub(crate) fn is_empty(&self) -> bool {
        *self == Role::default()
    }

    /// Returns whether the trampoline reads the time stamp counter.
    pub(crate) fn is_timed(&self) -> bool {
        !self.ends.is_empty() || self.watched.is_some()
    }
}

impl ArgumentSource {
    /// Returns the source of an argument of a note; `None` is one that could not be parsed.
    pub(crate) fn of(argument: Option<&Argument<'_>>) -> ArgumentSource {
        match argument.map(|argument| &argument.operand) {
            Some(Operand::Register(name)) => register_source(name),
            Some(&Operand::Memory {
                offset,
                base: "rsp",
            }) if (0..STACK_OFFSET_LIMIT).contains(&offset) => ArgumentSource::Stack(offset as u32),
            _ => ArgumentSource::Unknown,
        }
    }
}

/// Returns the source for a register of this name.
fn register_source(name: &str) -> ArgumentSource {
    if let Some(register) = general(name) {
        return ArgumentSource::Register(register);
    }
    let number = ["xmm", "ymm", "zmm"]
        .iter()
        .find_map(|kind| name.strip_prefix(kind)?.parse::<u32>().ok());
    match number {
        Some(number @ 0..16) => ArgumentSource::Vector(Register::XMM0 + number),
        _ => ArgumentSource::Unknown,
    }
}

/// Returns the 64-bit register that `name` is or is a part of, unless it is the stack pointer.
fn general(name: &str) -> Option<Register> {
    if let Some(number) = name.strip_prefix('r') {
        let number = number.trim_end_matches(['d', 'w', 'b']);
        if let Ok(number @ 8..16) = number.parse::<u32>() {
            return Some(Register::RAX + number);
        }
    }
    Some(match name {
        "rax" | "eax" | "ax" | "al" => Register::RAX,
        "rbx" | "ebx" | "bx" | "bl" => Register::RBX,
        "rcx" | "ecx" | "cx" | "cl" => Register::RCX,
        "rdx" | "edx" | "dx" | "dl" => Register::RDX,
        "rsi" | "esi" | "si" | "sil" => Register::RSI,
        "rdi" | "edi" | "di" | "dil" => Register::RDI,
        "rbp" | "ebp" | "bp" | "bpl" => Register::RBP,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const POINT: Point = Point {
        address: LiveAddr(0x1000),
        operand: [0xfa, 0x0f, 0, 0],
    };
    const TRAMPOLINE: LiveAddr = LiveAddr(0x806);

    #[test]
    fn probe_site_is_patched_with_a_trampoline_call() {
        let code = SiteCode([0x90, CMP, 0xfa, 0x0f, 0, 0]);
        assert_eq!(Point::probe_site(POINT.address, code), POINT);
        assert_eq!(
            (POINT.patch_at(), POINT.next()),
            (LiveAddr(0x1001), LiveAddr(0x1006))
        );
        assert_eq!(POINT.wrapper(), LiveAddr(0x2000));
        assert_eq!(POINT.patched(TRAMPOLINE), [CALL, 0, 0xf8, 0xff, 0xff]);
        assert_eq!(POINT.unpatched(true), [CALL, 0xfa, 0x0f, 0, 0]);
        assert_eq!(POINT.unpatched(false), [CMP, 0xfa, 0x0f, 0, 0]);
        assert!(POINT.is_unpatched(code));
        assert!(!POINT.is_unpatched(SiteCode([0xcc, CMP, 0xfa, 0x0f, 0, 0])));
        assert!(!POINT.is_unpatched(SiteCode([0x90, CMP, 0xfa, 0x0f, 0, 1])));
    }

    #[test]
    fn half_written_patch_is_recognized() {
        let patched = POINT.patched(TRAMPOLINE);
        let is_half = |point: Point, found| point.is_half_patched(found, patched);
        assert!(is_half(POINT, [CMP, 0, 0xf8, 0xff, 0xff]));
        assert!(is_half(POINT, [CMP, 0, 0x0f, 0, 0]));
        assert!(!is_half(POINT, [CALL, 0, 0x0f, 0, 0]));
        assert!(!is_half(POINT, [CMP, 1, 0x0f, 0, 0]));
        // Still all original bytes: half written only if the patch crosses a page boundary.
        let own = POINT.unpatched(false);
        assert!(!is_half(POINT, own));
        for (address, crosses) in [(0xffa, false), (0xffb, true), (0xffe, true), (0xfff, false)] {
            let address = LiveAddr(address);
            assert_eq!(
                is_half(Point { address, ..POINT }, own),
                crosses,
                "{address}"
            );
        }
    }

    #[test]
    fn discarded_second_page_leaves_a_half_patch() {
        let patched = POINT.patched(TRAMPOLINE);
        let at = |address| Point {
            address: LiveAddr(address),
            ..POINT
        };
        let half = [CALL, 0, 0xf8, 0, 0];
        assert!(at(0xffc).is_half_patched(half, patched));
        assert!(!at(0xffa).is_half_patched(half, patched));
        assert!(!at(0xffc).is_half_patched(POINT.unpatched(true), patched));
        assert!(!at(0xffc).is_half_patched([0xcc, 0, 0xf8, 0, 0], patched));
    }

    #[test]
    fn site_with_original_bytes_is_discarded() {
        let patched = POINT.patched(TRAMPOLINE);
        let is_discarded = |found| POINT.is_discarded(found, patched);
        assert!(is_discarded(POINT.unpatched(false)));
        assert!(is_discarded(POINT.unpatched(true)));
        // Only one of its two pages was discarded.
        assert!(is_discarded([CMP, 0, 0xf8, 0xff, 0xff]));
        assert!(is_discarded([CALL, 0, 0xf8, 0, 0]));
        assert!(!is_discarded(patched));
        // A breakpoint of a debugger, and code of another object.
        assert!(!is_discarded([0xcc, 0, 0xf8, 0xff, 0xff]));
        assert!(!is_discarded([CALL, 1, 2, 3, 4]));
    }

    #[test]
    fn arguments_are_read_from_their_noted_places() {
        let of = |text| ArgumentSource::of(Argument::parse(text).as_ref());
        assert_eq!(of("8@%rdi"), ArgumentSource::Register(Register::RDI));
        assert_eq!(of("4@%edi"), ArgumentSource::Register(Register::RDI));
        assert_eq!(of("1@%al"), ArgumentSource::Register(Register::RAX));
        assert_eq!(of("8@%r15"), ArgumentSource::Register(Register::R15));
        assert_eq!(of("4@%r15d"), ArgumentSource::Register(Register::R15));
        assert_eq!(of("8@%xmm3"), ArgumentSource::Vector(Register::XMM3));
        assert_eq!(of("16@%xmm15"), ArgumentSource::Vector(Register::XMM15));
        assert_eq!(of("8@(%rsp)"), ArgumentSource::Stack(0));
        assert_eq!(of("8@24(%rsp)"), ArgumentSource::Stack(24));
        for text in [
            "8@-8(%rsp)",
            "8@65536(%rsp)",
            "8@8(%rbp)",
            "8@%rsp",
            "8@%xmm16",
            "8@%xyz",
            "8@$5",
            "nothing",
        ] {
            assert_eq!(of(text), ArgumentSource::Unknown, "{text}");
        }
    }

    #[test]
    fn register_is_known_by_all_its_names() {
        for (names, register) in [
            ("rax eax ax al", Register::RAX),
            ("rbx ebx bx bl", Register::RBX),
            ("rcx ecx cx cl", Register::RCX),
            ("rdx edx dx dl", Register::RDX),
            ("rsi esi si sil", Register::RSI),
            ("rdi edi di dil", Register::RDI),
            ("rbp ebp bp bpl", Register::RBP),
            ("r8 r8d r8w r8b", Register::R8),
            ("r15 r15d r15w r15b", Register::R15),
        ] {
            for name in names.split(' ') {
                assert_eq!(general(name), Some(register), "{name}");
            }
        }
        for name in ["r7", "r16", "rsp", "esp", "r", ""] {
            assert_eq!(general(name), None, "{name}");
        }
        assert_eq!(
            register_source("ymm0"),
            ArgumentSource::Vector(Register::XMM0)
        );
        assert_eq!(
            register_source("zmm15"),
            ArgumentSource::Vector(Register::XMM15)
        );
    }

    #[test]
    fn role_tells_if_it_is_empty_or_timed() {
        let counted = Role {
            is_counted: true,
            ..Role::default()
        };
        let timed = Role {
            ends: vec![PairEnd::Start(0)],
            ..Role::default()
        };
        let watched = Role {
            watched: Some(WatchRole::default()),
            ..Role::default()
        };
        let what = |role: &Role| (role.is_empty(), role.is_timed());
        assert_eq!(what(&Role::default()), (true, false));
        assert_eq!(what(&counted), (false, false));
        assert_eq!(what(&timed), (false, true));
        assert_eq!(what(&watched), (false, true));
    }
}
