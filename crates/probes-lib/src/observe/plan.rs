//! [`Role`]: what is to be learnt of the hits of a site. Pure.

use iced_x86::Register;

use crate::elf::arguments::{Argument, Place};

/// What the stub of a site does before it does what the site did.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Role {
    pub(crate) is_counted: bool,
    /// What it is in pairs: of one that it both ends and starts, the end comes first.
    pub(crate) ends: Vec<End>,
    pub(crate) shown: Option<Shown>,
}

/// What a site is in a pair, which has this number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum End {
    Start(u32),
    Stop(u32),
}

/// A site whose hits are shown one by one.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Shown {
    /// Its index in the program.
    pub(crate) site: u32,
    pub(crate) arguments: Vec<Source>,
}

/// Where a stub takes an argument from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Source {
    /// A general register.
    Register(Register),
    /// A vector register, of which the low 8 bytes are shown.
    Vector(Register),
    /// 8 bytes so far above the stack pointer of the site.
    Stack(u32),
    /// Somewhere else, where it is not read.
    Unknown,
}

/// How many arguments of a site are shown.
pub(crate) const MOST_ARGUMENTS: usize = 6;

/// How far above the stack pointer an argument is read, in bytes: frames are smaller.
const STACK: i32 = 1 << 16;

impl Role {
    pub(crate) fn is_empty(&self) -> bool {
        *self == Role::default()
    }

    /// Whether time stamps are taken.
    pub(crate) fn is_timed(&self) -> bool {
        !self.ends.is_empty() || self.shown.is_some()
    }
}

impl Source {
    /// Of an argument of a note; `None` is one that is not understood.
    pub(crate) fn of(argument: Option<&Argument<'_>>) -> Source {
        match argument.map(|argument| &argument.place) {
            Some(Place::Register(name)) => named(name),
            Some(&Place::Memory {
                offset,
                base: "rsp",
            }) if (0..STACK).contains(&offset) => Source::Stack(offset as u32),
            _ => Source::Unknown,
        }
    }
}

fn named(name: &str) -> Source {
    if let Some(register) = general(name) {
        return Source::Register(register);
    }
    let number = ["xmm", "ymm", "zmm"]
        .iter()
        .find_map(|kind| name.strip_prefix(kind)?.parse::<u32>().ok());
    match number {
        Some(number @ 0..16) => Source::Vector(Register::XMM0 + number),
        _ => Source::Unknown,
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
    fn arguments_are_read_from_where_their_notes_say() {
        let of = |text| Source::of(Argument::parse(text).as_ref());
        assert_eq!(of("8@%rdi"), Source::Register(Register::RDI));
        assert_eq!(of("4@%edi"), Source::Register(Register::RDI));
        assert_eq!(of("1@%al"), Source::Register(Register::RAX));
        assert_eq!(of("8@%r15"), Source::Register(Register::R15));
        assert_eq!(of("4@%r15d"), Source::Register(Register::R15));
        assert_eq!(of("8@%xmm3"), Source::Vector(Register::XMM3));
        assert_eq!(of("16@%xmm15"), Source::Vector(Register::XMM15));
        assert_eq!(of("8@(%rsp)"), Source::Stack(0));
        assert_eq!(of("8@24(%rsp)"), Source::Stack(24));
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
            assert_eq!(of(text), Source::Unknown, "{text}");
        }
    }
}
