//! The arguments of a USDT probe of another provider than OCaml's, from the string of its note:
//! `-4@%edi 8@-16(%rbp) 4@$7`. Pure.
//!
//! Each argument is SIZE@OPERAND: the size in bytes, with `-` before it for a signed integer and `f` after it for a
//! float, and the operand in the syntax of the assembler.

use std::str;

use crate::address::LiveAddr;
use crate::expression::{Parameter, ParameterKind};
use crate::observe::role::{
    ArgumentFormat, ArgumentSource, MemorySource, base_register, register_source,
};

/// An argument: where it is, and what it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct UsdtArgument {
    pub(crate) source: ArgumentSource,
    pub(crate) format: ArgumentFormat,
}

/// How many arguments of a note expressions can name: `arg0` to `arg9`.
const MAX_ASKED: usize = 10;

/// Reads the arguments of a note, [`MAX_ASKED`] at most. `symbol` is given the name of a symbol of the object, an
/// offset from it, and a size. It returns the address of that data in the process, if the object maps all of it.
pub(crate) fn usdt_arguments(
    text: &[u8],
    symbol: impl Fn(&str, i64, u8) -> Option<LiveAddr>,
) -> Vec<UsdtArgument> {
    let words = text.split(|byte| *byte == b' ');
    let words = words.filter(|word| !word.is_empty()).take(MAX_ASKED);
    let argument = |word| UsdtArgument::parse(str::from_utf8(word).ok()?, &symbol);
    words
        .map(|word| argument(word).unwrap_or(UsdtArgument::UNKNOWN))
        .collect()
}

impl UsdtArgument {
    const UNKNOWN: UsdtArgument = UsdtArgument {
        source: ArgumentSource::Unknown,
        format: ArgumentFormat::WORD,
    };

    fn parse(
        text: &str,
        symbol: &impl Fn(&str, i64, u8) -> Option<LiveAddr>,
    ) -> Option<UsdtArgument> {
        let (size, operand) = text.split_once('@')?;
        let (signed, size) = match size.strip_prefix('-') {
            Some(size) => (true, size),
            None => (false, size),
        };
        let (is_float, size) = match size.strip_suffix('f') {
            Some(size) => (true, size),
            None => (false, size),
        };
        let size: u8 = size.parse().ok()?;
        if !matches!(size, 1 | 2 | 4 | 8) || (is_float && size < 4) {
            return None;
        }
        let source = if let Some(number) = operand.strip_prefix('$') {
            ArgumentSource::Constant(integer(number)? as u64)
        } else if let Some(name) = operand.strip_prefix('%') {
            register_source(name)
        } else {
            ArgumentSource::Memory(memory(operand, size, symbol)?)
        };
        let is_vector = matches!(source, ArgumentSource::Vector(_));
        // There are floats of two bytes, which are not read.
        if is_vector && size < 4 {
            return None;
        }
        Some(UsdtArgument {
            source,
            format: ArgumentFormat {
                size,
                signed,
                is_float: is_float || is_vector,
            },
        })
    }

    /// Returns what expressions can ask of it. An argument that may be anywhere in memory is read only if the kernel
    /// may be asked whether that memory is readable.
    pub(crate) fn parameter(self, may_ask_kernel: bool) -> Parameter {
        let is_anywhere =
            matches!(self.source, ArgumentSource::Memory(memory) if memory.is_anywhere());
        let kind = match self.format.kind() {
            _ if self.source == ArgumentSource::Unknown => ParameterKind::Unread,
            ParameterKind::Unread => ParameterKind::Unread,
            _ if is_anywhere && !may_ask_kernel => ParameterKind::Unasked,
            kind => kind,
        };
        Parameter { name: None, kind }
    }
}

/// Reads `DISPLACEMENT(%BASE,%INDEX,SCALE)`, of which parts may be missing. The displacement is a number, or a symbol
/// with an offset.
fn memory(
    text: &str,
    size: u8,
    symbol: &impl Fn(&str, i64, u8) -> Option<LiveAddr>,
) -> Option<MemorySource> {
    let (displacement, registers) = match text.strip_suffix(')') {
        Some(text) => text.split_once('(')?,
        None => (text, ""),
    };
    let mut registers = registers.split(',');
    let base = registers.next().filter(|base| !base.is_empty());
    let index = registers.next();
    let scale = registers.next().map_or(Some(1), |scale| scale.parse().ok());
    let scale = scale.filter(|scale| matches!(scale, 1 | 2 | 4 | 8))?;
    if registers.next().is_some() {
        return None;
    }
    let is_relative = base == Some("%rip");
    let register = |name: &str| base_register(name.strip_prefix('%')?);
    let base = match base.filter(|_| !is_relative) {
        Some(base) => Some(register(base)?),
        None => None,
    };
    let index = match index {
        Some(index) => Some((register(index)?, scale)),
        None => None,
    };
    if is_relative && index.is_some() {
        return None;
    }
    let has_registers = base.is_some() || index.is_some();
    let displacement = if displacement.is_empty() {
        has_registers.then_some(0)?
    } else if let Some(number) = integer(displacement) {
        // Without a base, a number is relative to an unknown instruction, or is an address that may not be mapped.
        base.and(i32::try_from(number).ok())?.into()
    } else if !has_registers {
        let end = displacement.find(['+', '-']).unwrap_or(displacement.len());
        let (name, offset) = displacement.split_at(end);
        if name.is_empty() {
            return None;
        }
        let offset = match offset {
            "" => 0,
            offset => integer(offset.strip_prefix('+').unwrap_or(offset))?,
        };
        symbol(name, offset, size)?.0 as i64
    } else {
        return None;
    };
    Some(MemorySource {
        base,
        index,
        displacement,
        size,
    })
}

/// Reads a decimal or hexadecimal number of 64 bits.
fn integer(text: &str) -> Option<i64> {
    let (is_negative, digits) = match text.strip_prefix('-') {
        Some(digits) => (true, digits),
        None => (false, text),
    };
    let (digits, radix) = match digits.strip_prefix("0x") {
        Some(digits) => (digits, 16),
        None => (digits, 10),
    };
    if digits.starts_with('+') {
        return None;
    }
    let number = u64::from_str_radix(digits, radix).ok()?;
    if is_negative {
        0_i64.checked_sub_unsigned(number)
    } else {
        Some(number as i64)
    }
}

#[cfg(test)]
mod tests {
    use iced_x86::Register;

    use super::*;

    fn parse(text: &str) -> Vec<UsdtArgument> {
        usdt_arguments(text.as_bytes(), |name, offset, _| {
            (name == "table").then(|| LiveAddr(0x5000).plus(offset as u64))
        })
    }

    fn memory_of(
        base: Option<Register>,
        index: Option<(Register, u8)>,
        displacement: i64,
        size: u8,
    ) -> ArgumentSource {
        ArgumentSource::Memory(MemorySource {
            base,
            index,
            displacement,
            size,
        })
    }

    #[test]
    fn documented_operands_are_read() {
        let (rbp, rsp) = (Some(Register::RBP), Some(Register::RSP));
        let rax = Register::RAX;
        for (text, source, size, signed, is_float) in [
            (
                "-4@%edi",
                ArgumentSource::Register(Register::RDI),
                4,
                true,
                false,
            ),
            (
                "8@%r12",
                ArgumentSource::Register(Register::R12),
                8,
                false,
                false,
            ),
            ("8@-16(%rbp)", memory_of(rbp, None, -16, 8), 8, false, false),
            ("-4@112(%rsp)", memory_of(rsp, None, 112, 4), 4, true, false),
            (
                "2@(%rax)",
                memory_of(Some(rax), None, 0, 2),
                2,
                false,
                false,
            ),
            ("4@$7", ArgumentSource::Constant(7), 4, false, false),
            ("-8@$-1", ArgumentSource::Constant(u64::MAX), 8, true, false),
            (
                "8f@%xmm0",
                ArgumentSource::Vector(Register::XMM0),
                8,
                false,
                true,
            ),
            ("4f@-8(%rbp)", memory_of(rbp, None, -8, 4), 4, false, true),
            (
                "8@-16(%rbp,%rax,8)",
                memory_of(rbp, Some((rax, 8)), -16, 8),
                8,
                false,
                false,
            ),
            (
                "8@(%rbp,%rax)",
                memory_of(rbp, Some((rax, 1)), 0, 8),
                8,
                false,
                false,
            ),
            (
                "8@table(%rip)",
                memory_of(None, None, 0x5000, 8),
                8,
                false,
                false,
            ),
            (
                "1@table+16(%rip)",
                memory_of(None, None, 0x5010, 1),
                1,
                false,
                false,
            ),
            (
                "4@table-8(%rip)",
                memory_of(None, None, 0x4ff8, 4),
                4,
                false,
                false,
            ),
            ("4@table", memory_of(None, None, 0x5000, 4), 4, false, false),
        ] {
            let format = ArgumentFormat {
                size,
                signed,
                is_float,
            };
            assert_eq!(parse(text), [UsdtArgument { source, format }], "{text}");
        }
    }

    #[test]
    fn expressions_ask_for_what_can_be_read() {
        let number = |bits, signed| ParameterKind::Number { bits, signed };
        let unasked = ParameterKind::Unasked;
        for (text, asking, not_asking) in [
            ("-4@%edi", number(32, true), number(32, true)),
            ("1@(%rcx)", number(8, false), unasked),
            ("8@(%rdx,%rax,8)", ParameterKind::Word, unasked),
            ("8f@(%rdx)", ParameterKind::Float, unasked),
            ("2@-16(%rbp)", number(16, false), number(16, false)),
            ("8@table(%rip)", ParameterKind::Word, ParameterKind::Word),
            ("8f@%xmm0", ParameterKind::Float, ParameterKind::Float),
            ("4f@(%rdx)", ParameterKind::Single, unasked),
            ("4f@%xmm0", ParameterKind::Single, ParameterKind::Single),
            ("8@(%eax)", ParameterKind::Unread, ParameterKind::Unread),
        ] {
            let [argument] = parse(text)[..] else {
                panic!("{text}");
            };
            let kinds = [true, false].map(|may_ask| argument.parameter(may_ask).kind);
            assert_eq!(kinds, [asking, not_asking], "{text}");
        }
    }

    #[test]
    fn unsupported_operands_are_unknown() {
        for text in [
            "3@%eax",
            "16@%xmm0",
            "2f@%xmm0",
            "2@%xmm0",
            "8@(%rip,%rax,8)",
            "8@+8(%rip)",
            "4@$0x+8",
            "8@$-18446744073709551615",
            "8@",
            ":x",
            "@",
            "8@$_ZTIi",
            "8@other(%rip)",
            "8@16(%rip)",
            "8@4096",
            "8@table(%rbx)",
            "8@(%rax,%rbx,3)",
            "8@(%rax,%rbx,8,1)",
            "8@(%eax)",
            "8@%fs:0",
            "8@table@GOTPCREL(%rip)",
            "8@4294967296(%rax)",
        ] {
            let [argument] = parse(text)[..] else {
                panic!("{text}");
            };
            assert_eq!(argument.source, ArgumentSource::Unknown, "{text}");
        }
        let eleven = parse("8@%rax  4@$1 bad 8@%rbx 8@%rcx 8@%rdx 8@%rsi 1@%dil 4@$8 8@%r8 8@%r9");
        assert_eq!(eleven.len(), MAX_ASKED);
        assert_eq!(eleven[2].source, ArgumentSource::Unknown);
        assert_eq!(eleven[8].source, ArgumentSource::Constant(8));
    }
}
