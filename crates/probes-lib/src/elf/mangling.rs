//! Linker symbol -> name in the source, for the mangling of each OCaml compiler, of Rust and of C++:
//! `camlFoo.bar_269` -> `Foo.bar`.
//!
//! | OCaml compiler | symbol |
//! |---|---|
//! | up to 5.0 | `camlFoo__bar_269`, operators as `$xx` in hex: `camlA__$2b$2b_7` |
//! | 5.1 and later | `camlFoo.bar_269`, wrapped by dune: `camlLib__Foo.bar_269` |
//! | OxCaml | `camlFoo__bar_1_2_code` |
//! | OxCaml, structured | `_CamlU3FooM3BarF3baz` |

use std::fmt::{self, Write};
use std::str;

/// The longest name that a symbol of Rust or C++ is demangled to, in bytes. Their mangling refers back to parts of
/// itself, so a short hostile symbol can stand for a name of gigabytes.
const MAX_NAME: usize = 8 << 10;

/// A language whose symbols are mangled.
///
/// [`FunctionName`](crate::FunctionName) has an example.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Language {
    /// OCaml.
    Ocaml,
    /// Rust.
    Rust,
    /// C++.
    Cpp,
}

/// Returns the name in the source of a linker symbol, or the symbol itself if it is not mangled.
pub(crate) fn demangle(symbol: &str) -> String {
    source_name(symbol).1
}

/// Returns the language of a linker symbol, if it is mangled, and its name in the source.
pub(crate) fn source_name(symbol: &str) -> (Option<Language>, String) {
    let found = ocaml(symbol)
        .map(|name| (Language::Ocaml, name))
        .or_else(|| rust(symbol).map(|name| (Language::Rust, name)))
        .or_else(|| cpp(symbol).map(|name| (Language::Cpp, name)));
    match found {
        Some((language, name)) => (Some(language), name),
        None => (None, symbol.to_owned()),
    }
}

/// Returns whether each word (letters and digits) of the name in the source is sure to be part of this linker symbol:
/// not in C++ and Rust, nor if characters are encoded.
pub(crate) fn keeps_words(symbol: &[u8]) -> bool {
    !symbol.starts_with(b"_Z") && !symbol.starts_with(b"_R") && !symbol.contains(&b'$')
}

fn ocaml(symbol: &str) -> Option<String> {
    let structured = symbol.strip_prefix("_Caml").and_then(structured);
    let classic = || {
        let path = symbol.strip_prefix("caml")?;
        path.starts_with(|c: char| c.is_ascii_uppercase())
            .then(|| classic(path))
    };
    structured.or_else(classic)
}

/// Returns the name in the source of a function that OCaml's backtraces call `name`: `Stdlib.List.map` for
/// `Stdlib__List.map`.
pub(crate) fn name_of_backtrace(name: &str) -> String {
    let name = match name.strip_prefix("Dune__exe__") {
        Some(wrapped) if wrapped.starts_with(|c: char| c.is_ascii_uppercase()) => wrapped,
        _ => name,
    };
    // Only a unit, which is before the first dot, is wrapped in this way.
    let (unit, rest) = name.split_at(name.find('.').unwrap_or(name.len()));
    let unit = unit.replace("__", ".");
    // Operators are without parentheses, as in symbols.
    let operator = rest
        .strip_suffix(')')
        .and_then(|rest| rest.rsplit_once(".("));
    match operator {
        Some((before, operator)) if !operator.starts_with(char::is_alphabetic) => {
            format!("{unit}{before}.{operator}")
        }
        _ => unit + rest,
    }
}

/// Demangles without the hash that tells versions of a crate apart.
fn rust(symbol: &str) -> Option<String> {
    if !symbol.starts_with("_R") && !symbol.starts_with("_ZN") {
        return None;
    }
    let demangled = rustc_demangle::try_demangle(symbol).ok()?;
    let mut name = BoundedName::default();
    write!(name, "{demangled:#}").ok()?;
    (!name.0.is_empty()).then_some(name.0)
}

fn cpp(symbol: &str) -> Option<String> {
    if !symbol.starts_with("_Z") {
        return None;
    }
    let demangled = cpp_demangle::Symbol::new(symbol).ok()?;
    let mut name = BoundedName::default();
    // Symbols of templates have the return type, others have not.
    let options = cpp_demangle::DemangleOptions::new().no_return_type();
    demangled.structured_demangle(&mut name, &options).ok()?;
    (!name.0.is_empty()).then_some(name.0)
}

/// A name of at most [`MAX_NAME`] bytes: writing more fails.
#[derive(Default)]
struct BoundedName(String);

impl Write for BoundedName {
    fn write_str(&mut self, part: &str) -> fmt::Result {
        if self.0.len() + part.len() > MAX_NAME {
            return Err(fmt::Error);
        }
        self.0.push_str(part);
        Ok(())
    }
}

/// `U3FooM3BarF3baz`: a letter for the kind, the length of the name, the name.
fn structured(mut rest: &str) -> Option<String> {
    let mut names = Vec::new();
    while let Some(kind) = rest.chars().next() {
        if !kind.is_ascii_uppercase() {
            // A suffix that distinguishes instances.
            break;
        }
        let digits = rest[1..].find(|c: char| !c.is_ascii_digit())? + 1;
        let len: usize = rest[1..digits].parse().ok().filter(|&len| len > 0)?;
        names.push(rest.get(digits..digits.checked_add(len)?)?);
        rest = &rest[digits + len..];
    }
    (!names.is_empty()).then(|| names.join("."))
}

/// Modules, each with a capital letter, then the name of a value: `Lib__Foo__bar_269`, `Foo.bar_269`.
fn classic(path: &str) -> String {
    let path = match path.strip_prefix("Dune__exe__") {
        Some(wrapped) if !wrapped.is_empty() => wrapped,
        _ => path,
    };
    let mut name = String::with_capacity(path.len());
    let mut rest = path;
    while rest.starts_with(char::is_uppercase) {
        let Some((module, after)) = split_at_separator(rest) else {
            break;
        };
        push_decoded(&mut name, module);
        name.push('.');
        rest = after;
    }
    push_decoded(&mut name, without_stamp(rest));
    name
}

/// Splits a path after its first module. A third `_` belongs to the name that follows.
fn split_at_separator(path: &str) -> Option<(&str, &str)> {
    let mut separators = path.match_indices(['_', '.']);
    separators.find_map(|(at, separator)| {
        let (module, after) = (&path[..at], &path[at..]);
        let after = if separator == "." {
            &after[1..]
        } else {
            after.strip_prefix("__")?
        };
        // It is between names.
        (!module.is_empty() && !after.is_empty()).then_some((module, after))
    })
}

/// Adds a name to another one, with the characters that it stands for.
fn push_decoded(name: &mut String, encoded: &str) {
    let mut rest = encoded;
    while let Some(next) = rest.chars().next() {
        let (character, after) = hex_character(rest).unwrap_or((next, &rest[next.len_utf8()..]));
        name.push(character);
        rest = after;
    }
}

/// Removes the number that makes the symbol of a name unique: one, or two before OxCaml's `_code`.
fn without_stamp(name: &str) -> &str {
    let (name, stamps) = match name.strip_suffix("_code") {
        Some(name) => (name, 2),
        None => (name, 1),
    };
    (0..stamps).fold(name, |name, _| match name.rsplit_once('_') {
        Some((unique, stamp)) if is_stamp(stamp) && !unique.is_empty() => unique,
        _ => name,
    })
}

fn is_stamp(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit())
}

/// Decodes `$xx` for each byte of a character in UTF-8, if it is printable.
fn hex_character(text: &str) -> Option<(char, &str)> {
    const LONGEST: usize = 4;
    let mut bytes = Vec::with_capacity(LONGEST);
    let mut rest = text;
    while bytes.len() < LONGEST {
        let digits = rest.strip_prefix('$')?;
        bytes.push(u8::from_str_radix(digits.get(..2)?, 16).ok()?);
        rest = &digits[2..];
        if let Ok(decoded) = str::from_utf8(&bytes) {
            let character = decoded.chars().next()?;
            let is_printable = !character.is_control() && !character.is_whitespace();
            return is_printable.then_some((character, rest));
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::demangle;

    #[test]
    fn symbols_of_every_compiler_become_ocaml_names() {
        for (symbol, name) in [
            ("camlFoo__bar_269", "Foo.bar"),
            ("camlA__$2b$2b_7", "A.++"),
            ("camlStdlib__List__map_480", "Stdlib.List.map"),
            ("camlFoo.bar_269", "Foo.bar"),
            ("camlFoo.caf$c3$a9_269", "Foo.café"),
            ("camlLib__Foo.bar_269", "Lib.Foo.bar"),
            ("camlFoo.Inner.go_1_300", "Foo.Inner.go_1"),
            ("camlFoo__bar_1_2_code", "Foo.bar"),
            ("camlFoo__x_1_269", "Foo.x_1"),
            ("camlDune__exe__Service__serve_12345", "Service.serve"),
            ("camlFoo__entry", "Foo.entry"),
            ("camlFoo___private_3", "Foo._private"),
            ("camlFoo__f__82", "Foo.f_"),
            ("camlFoo__x__y_83", "Foo.x__y"),
            ("camlFoo__g$27__167", "Foo.g'_"),
            ("camlFoo.f__275", "Foo.f_"),
            ("camlFoo.Inner_.x__y_276", "Foo.Inner_.x__y"),
            ("camlFoo__Inner__f__1_2_code", "Foo.Inner.f_"),
            // Of data.
            ("camlFoo__12", "Foo.12"),
            ("camlFoo___7", "Foo._7"),
            ("_CamlU3FooM3BarF3baz", "Foo.Bar.baz"),
        ] {
            assert_eq!(demangle(symbol), name, "{symbol}");
        }
    }

    #[test]
    fn names_of_backtraces_become_source_names() {
        for (name, expected) in [
            ("Stdlib__List.map", "Stdlib.List.map"),
            ("Dune__exe__Service.serve", "Service.serve"),
            ("Foo.bar.(fun)", "Foo.bar.(fun)"),
            ("Stdlib.(^^)", "Stdlib.^^"),
            ("Foo.Bar.(>>=)", "Foo.Bar.>>="),
            ("Foo.)", "Foo.)"),
            ("Foo.a__b", "Foo.a__b"),
            ("Lib__Foo", "Lib.Foo"),
            ("Dune__exe__", "Dune.exe."),
        ] {
            assert_eq!(super::name_of_backtrace(name), expected);
        }
    }

    #[test]
    fn foreign_and_broken_symbols_are_left_unchanged() {
        for symbol in [
            "main",
            "caml_main",
            "caml",
            "_Caml",
            "_CamlU0",
            "_CamlU99Foo",
            "_CamlU99999999999999999999Foo",
            "_CamlUé",
            // A path of no names.
            "_ZNE",
            "",
        ] {
            assert_eq!(demangle(symbol), symbol, "{symbol}");
        }
        assert_eq!(demangle("camlFoo__é$é_1"), "Foo.é$é");
        assert_eq!(demangle("camlFoo__$c3$zz$ff$1b_1"), "Foo.$c3$zz$ff$1b");
    }

    #[test]
    fn symbols_of_rust_and_cpp_become_source_names() {
        use super::{Language, source_name};
        for (symbol, language, name) in [
            (
                "_ZNSt6vectorIiE9push_backEOi",
                Language::Cpp,
                "std::vector<int>::push_back(int&&)",
            ),
            ("_Znwm", Language::Cpp, "operator new(unsigned long)"),
            (
                "_ZN1N3varIlEEiT_z",
                Language::Cpp,
                "N::var<long>(long, ...)",
            ),
            (
                "_ZN1NL3twoIcEEiT_S1_Pi.constprop.0.isra.0",
                Language::Cpp,
                "N::two<char>(char, char, int*) [clone .constprop.0] [clone .isra.0]",
            ),
            ("_ZNK1N1ScviEv", Language::Cpp, "N::S::operator int() const"),
            (
                "_ZN4core3ptr13drop_in_place17h0123456789abcdefE",
                Language::Rust,
                "core::ptr::drop_in_place",
            ),
            ("_RNvC6_123foo3bar", Language::Rust, "123foo::bar"),
            ("camlFoo__bar_269", Language::Ocaml, "Foo.bar"),
        ] {
            assert_eq!(source_name(symbol), (Some(language), name.to_owned()));
        }
        for symbol in ["memcpy", "_Z", "_ZN", "_R", "_Zqq", "caml_alloc"] {
            assert_eq!(source_name(symbol), (None, symbol.to_owned()));
        }
    }

    #[test]
    fn name_without_end_is_left_mangled() {
        // Each type is a pair of the one before; S_ is the template, S0_ the first pair, and so on.
        let mut symbol = String::from("_Z1fSt4pairIiiE");
        for digit in "02468ACEGIKMOQSUWY".chars() {
            symbol += &format!("St4pairIS{digit}_S{digit}_E");
        }
        assert_eq!(demangle(&symbol), symbol);
    }

    proptest::proptest! {
        #![proptest_config(crate::testing::properties(1000))]

        #[test]
        fn any_mangled_symbol_has_a_name(symbol in "(_Z|_ZN|_R|_RNv)([0-9A-Za-z_$.]|\\PC){0,40}") {
            let name = demangle(&symbol);
            assert!(!name.is_empty() && name.len() <= super::MAX_NAME);
        }

        #[test]
        fn any_symbol_has_a_name(symbol in "(_Caml|caml)?([A-Z][0-9]{0,3}|[a-zA-Z0-9_.$]|\\PC){0,20}") {
            assert!(!demangle(&symbol).is_empty() || symbol.is_empty());
        }
    }
}
