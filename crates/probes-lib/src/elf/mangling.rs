//! Linker symbol -> OCaml name, for the mangling of every compiler: `camlFoo.bar_269` -> `Foo.bar`.
//!
//! | compiler | symbol |
//! |---|---|
//! | up to 5.0 | `camlFoo__bar_269`, operators as `$xx` in hex: `camlA__$2b$2b_7` |
//! | 5.1 and later | `camlFoo.bar_269`, wrapped by dune: `camlLib__Foo.bar_269` |
//! | OxCaml | `camlFoo__bar_1_2_code` |
//! | OxCaml, structured | `_CamlU3FooM3BarF3baz` |

use std::str;

/// Returns the OCaml name of a linker symbol, or the symbol itself if it is not OCaml's.
pub(crate) fn demangle(symbol: &str) -> String {
    let structured = symbol.strip_prefix("_Caml").and_then(structured);
    let classic = || {
        let path = symbol.strip_prefix("caml")?;
        path.starts_with(|c: char| c.is_ascii_uppercase())
            .then(|| classic(path))
    };
    structured
        .or_else(classic)
        .unwrap_or_else(|| symbol.to_owned())
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

fn classic(path: &str) -> String {
    let path = without_stamp(path);
    let path = match path.strip_prefix("Dune__exe__") {
        Some(wrapped) if !wrapped.is_empty() => wrapped,
        _ => path,
    };
    let mut name = String::with_capacity(path.len());
    let mut rest = path;
    while let Some(next) = rest.chars().next() {
        // A separator is between names, never before the first or after the last.
        let separator = rest
            .strip_prefix("__")
            .filter(|after| !name.is_empty() && !after.is_empty());
        if let Some(after) = separator {
            // A third `_` belongs to the name that follows.
            name.push('.');
            rest = after;
        } else if let Some((character, after)) = hex_character(rest) {
            name.push(character);
            rest = after;
        } else {
            name.push(next);
            rest = &rest[next.len_utf8()..];
        }
    }
    name
}

/// Removes the number that makes the symbol unique: one, or two before OxCaml's `_code`.
fn without_stamp(path: &str) -> &str {
    let (path, stamps) = match path.strip_suffix("_code") {
        Some(path) => (path, 2),
        None => (path, 1),
    };
    (0..stamps).fold(path, |path, _| match path.rsplit_once('_') {
        Some((name, stamp)) if is_stamp(stamp) && !name.ends_with(['_', '.']) => name,
        _ => path,
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
            ("_CamlU3FooM3BarF3baz", "Foo.Bar.baz"),
        ] {
            assert_eq!(demangle(symbol), name, "{symbol}");
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
            "",
        ] {
            assert_eq!(demangle(symbol), symbol, "{symbol}");
        }
        assert_eq!(demangle("camlFoo__é$é_1"), "Foo.é$é");
        assert_eq!(demangle("camlFoo__$c3$zz$ff$1b_1"), "Foo.$c3$zz$ff$1b");
    }

    proptest::proptest! {
        #![proptest_config(crate::testing::properties(1000))]

        #[test]
        fn any_symbol_has_a_name(symbol in "(_Caml|caml)?([A-Z][0-9]{0,3}|[a-zA-Z0-9_.$]|\\PC){0,20}") {
            assert!(!demangle(&symbol).is_empty() || symbol.is_empty());
        }
    }
}
