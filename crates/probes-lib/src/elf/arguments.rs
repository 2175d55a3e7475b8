//! `8@16(%rsp)` -> [`Argument`]: where the free variables of a probe's handler are at a site.
//!
//! Format: the SystemTap SDT argument string, space-separated `N@LOC`; OCaml uses `%reg` and
//! `OFF(%rsp)`, where rsp is its value at the site.

use std::fmt;

/// One argument of a site: a free variable of its handler, without its name.
///
/// ```
/// use probes_lib::{Argument, Operand};
///
/// let argument = Argument::parse("8@16(%rsp)").unwrap();
/// assert_eq!(argument.size, 8);
/// assert_eq!(argument.operand, Operand::Memory { offset: 16, base: "rsp" });
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Argument<'a> {
    /// Size in bytes: 8 for OCaml values; 16, 32 or 64 for vector registers.
    pub size: u8,
    /// Whether the value is signed (written `-N@…`; OCaml emits unsigned).
    pub signed: bool,
    /// Where the value is when a thread reaches the site.
    pub operand: Operand<'a>,
}

/// Where an argument is when a thread reaches its site.
///
/// [`Argument`] has an example.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Operand<'a> {
    /// In a register, named without its `%`.
    Register(&'a str),
    /// In memory, at this many bytes from the value of a register (named without its `%`).
    Memory {
        /// Signed offset in bytes.
        offset: i32,
        /// The register that holds the base address, `rsp` for OCaml.
        base: &'a str,
    },
    /// Any other operand, as written (other languages' probes have constants and expressions).
    Other(&'a str),
}

impl<'a> Argument<'a> {
    /// Parses one `N@LOC`; returns `None` if it is not of that form.
    pub fn parse(text: &'a str) -> Option<Argument<'a>> {
        let (size, operand) = text.split_once('@')?;
        let (signed, size) = match size.strip_prefix('-') {
            Some(size) => (true, size),
            None => (false, size),
        };
        let size: u8 = size.parse().ok()?;
        if !size.is_power_of_two() || size > 64 || operand.is_empty() {
            return None;
        }
        Some(Argument {
            size,
            signed,
            operand: Operand::parse(operand),
        })
    }
}

impl<'a> Operand<'a> {
    fn parse(text: &'a str) -> Operand<'a> {
        if let Some(register) = text.strip_prefix('%').filter(|r| is_register(r)) {
            return Operand::Register(register);
        }
        let memory = text.strip_suffix(')').and_then(|text| {
            let (offset, base) = text.split_once("(%")?;
            let offset = if offset.is_empty() {
                Some(0)
            } else {
                offset.parse().ok()
            }?;
            is_register(base).then_some(Operand::Memory { offset, base })
        });
        memory.unwrap_or(Operand::Other(text))
    }
}

fn is_register(name: &str) -> bool {
    !name.is_empty() && name.bytes().all(|b| b.is_ascii_alphanumeric())
}

impl fmt::Display for Argument<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sign = if self.signed { "-" } else { "" };
        write!(f, "{sign}{}@", self.size)?;
        match self.operand {
            Operand::Register(name) => write!(f, "%{name}"),
            Operand::Memory { offset, base } => write!(f, "{offset}(%{base})"),
            Operand::Other(text) => f.write_str(text),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ocaml_arguments_are_parsed_and_printed_back() {
        let parsed: Vec<_> = "8@%rdx 8@%rsi 8@16(%rsp) 16@%xmm0 -4@-8(%rbp)"
            .split(' ')
            .map(|text| Argument::parse(text).unwrap())
            .collect();
        assert_eq!(parsed[0].operand, Operand::Register("rdx"));
        let stack = Operand::Memory {
            offset: 16,
            base: "rsp",
        };
        assert_eq!((parsed[2].size, &parsed[2].operand), (8, &stack));
        assert!(parsed[4].signed && !parsed[0].signed);
        let written: Vec<_> = parsed.iter().map(Argument::to_string).collect();
        assert_eq!(
            written.join(" "),
            "8@%rdx 8@%rsi 8@16(%rsp) 16@%xmm0 -4@-8(%rbp)"
        );
    }

    #[test]
    fn operands_of_other_languages_are_kept_as_written() {
        for text in ["8@$5", "4@foo+8(%rip)", "8@(%rax,%rbx,8)"] {
            let argument = Argument::parse(text).unwrap();
            assert!(matches!(argument.operand, Operand::Other(_)), "{text}");
            assert_eq!(argument.to_string(), text);
        }
    }

    #[test]
    fn invalid_argument_is_none() {
        for text in [
            "",
            "8",
            "@%rax",
            "8@",
            "x@%rax",
            "3@%rax",
            "128@%zmm0",
            "--8@%rax",
        ] {
            assert_eq!(Argument::parse(text), None, "{text:?}");
        }
    }
}
