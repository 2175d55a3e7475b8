//! [`Role`]: what is to be results of the hits of a site. Pure.

use iced_x86::Register;

use crate::elf::arguments::{Argument, Place};

/// What the trampoline of a site does before it does what the site did.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Role {
    pub(crate) is_counted: bool,
    /// What it is in pairs: of one that it both ends and starts, the end comes first.
    pub(crate) ends: Vec<PairEnd>,
    pub(crate) watched: Option<WatchRole>,
}

/// What a site is in a pair, which has this number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum PairEnd {
    Start(u32),
    Stop(u32),
}

/// A site whose hits are watched one by one.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct WatchRole {
    /// Its index in the program.
    pub(crate) site: u32,
    pub(crate) arguments: Vec<ArgumentSource>,
}

/// Where a trampoline takes an argument from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum ArgumentSource {
    /// A general register.
    Register(Register),
    /// A vector register, of which the low 8 bytes are watched.
    Vector(Register),
    /// 8 bytes so far above the stack pointer of the site.
    Stack(u32),
    /// Somewhere else, where it is not read.
    Unknown,
}

/// How many arguments of a site are watched.
pub(crate) const MOST_ARGUMENTS: usize = 6;

/// How far above the stack pointer an argument is read, in bytes: frames are smaller.
const STACK: i32 = 1 << 16;

impl Role {
    pub(crate) fn is_empty(&self) -> bool {
        *self == Role::default()
    }

    /// Whether time stamps are applied.
    pub(crate) fn is_timed(&self) -> bool {
        !self.ends.is_empty() || self.watched.is_some()
    }
}

impl ArgumentSource {
    /// Of an argument of a note; `None` is one that is not understood.
    pub(crate) fn of(argument: Option<&Argument<'_>>) -> ArgumentSource {
        match argument.map(|argument| &argument.place) {
            Some(Place::Register(name)) => named(name),
            Some(&Place::Memory {
                offset,
                base: "rsp",
            }) if (0..STACK).contains(&offset) => ArgumentSource::Stack(offset as u32),
            _ => ArgumentSource::Unknown,
        }
    }
}

fn named(name: &str) -> ArgumentSource {
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

/// The whole of a general register, of which `name` may be a part; not the stack pointer.
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
}
