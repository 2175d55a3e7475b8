//! Linker symbol -> OCaml name, for the mangling of every compiler: `camlFoo.bar_269` -> `Foo.bar`.
//!
//! | compiler | symbol |
//! |---|---|
//! | up to 5.0 | `camlFoo__bar_269`, operators as `$xx` in hex: `camlA__$2b$2b_7` |
//! | 5.1 and later | `camlFoo.bar_269`, wrapped by dune: `camlLib__Foo.bar_269` |
//! | OxCaml | `camlFoo__bar_1_2_code` |
//! | OxCaml, structured | `_CamlU3FooM3BarF3baz` |

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
        } else if let Some((byte, after)) = rest.strip_prefix('$').and_then(hex_byte) {
            name.push(byte);
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

/// Decodes two hex digits as a printable character.
fn hex_byte(text: &str) -> Option<(char, &str)> {
    let byte = u8::from_str_radix(text.get(..2)?, 16).ok()?;
    byte.is_ascii_graphic()
        .then(|| (char::from(byte), &text[2..]))
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
    }

    proptest::proptest! {
        #![proptest_config(crate::testing::properties(1000))]

        #[test]
        fn any_symbol_has_a_name(symbol in "(_Caml|caml)?([A-Z][0-9]{0,3}|[a-zA-Z0-9_.$]|\\PC){0,20}") {
            assert!(!demangle(&symbol).is_empty() || symbol.is_empty());
        }
    }
}
