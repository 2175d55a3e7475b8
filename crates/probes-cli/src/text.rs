//! Text for people: untrusted names escaped, long lists shortened, counts with a noun in singular
//! or plural.

use std::fmt::{self, Display};
use std::str::FromStr;

use tabled::grid::util::string::get_string_width;

/// The number of lines that a terminal usually has.
pub(crate) const TERMINAL_LINES: usize = 24;

/// Untrusted text from a file: characters that could move the cursor, change colours or the text
/// direction are shown as escapes.
pub(crate) struct Escaped<'a>(pub(crate) &'a str);

impl fmt::Display for Escaped<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut rest = self.0;
        if rest.bytes().all(|byte| (b' '..0x7f).contains(&byte)) {
            return f.write_str(rest);
        }
        while let Some((at, character)) = rest.char_indices().find(|&(_, c)| is_unprintable(c)) {
            write!(f, "{}{}", &rest[..at], character.escape_default())?;
            rest = &rest[at + character.len_utf8()..];
        }
        f.write_str(rest)
    }
}

/// Control characters, line and paragraph separators, bidirectional formatting characters, and characters that
/// are not visible, or of which a terminal may show nothing.
pub(crate) fn is_unprintable(character: char) -> bool {
    character.is_control()
        || matches!(
            character,
            '\u{ad}' | '\u{61c}' | '\u{115f}' | '\u{1160}' | '\u{17b4}' | '\u{17b5}' | '\u{180e}'
                | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}'
                | '\u{3164}' | '\u{feff}' | '\u{ffa0}' | '\u{fff0}'..='\u{fffb}' | '\u{fffe}' | '\u{ffff}'
                | '\u{1d173}'..='\u{1d17a}' | '\u{e0000}'..='\u{e0fff}'
        )
}

/// The beginning of a line that is at most so many columns wide.
pub(crate) fn beginning(line: &str, columns: usize) -> &str {
    if get_string_width(line) <= columns {
        return line;
    }
    let ends = line.char_indices().map(|(at, _)| at);
    let fitting = ends.take_while(|&at| get_string_width(&line[..at]) <= columns);
    &line[..fitting.last().unwrap_or(0)]
}

/// The names of functions with `;` between them, as one line of the folded format that flamegraph.pl and inferno
/// read; in names, `;` is shown as `:`. They are escaped: some control characters are not permitted in XML (1.0,
/// section 2.2).
pub(crate) fn folded_path(names: impl IntoIterator<Item = impl AsRef<str>>) -> String {
    let names = names.into_iter();
    let names = names.map(|name| Escaped(name.as_ref()).to_string().replace(';', ":"));
    names.collect::<Vec<_>>().join(";")
}

/// Bytes as a string literal of OCaml: text is shown as it is; bytes that are not UTF-8, and characters that a
/// terminal would not show, as escapes.
pub(crate) fn ocaml_string(bytes: &[u8]) -> String {
    let mut literal = String::from("\"");
    for chunk in bytes.utf8_chunks() {
        for character in chunk.valid().chars() {
            match character {
                '"' => literal.push_str("\\\""),
                '\\' => literal.push_str("\\\\"),
                '\n' => literal.push_str("\\n"),
                '\t' => literal.push_str("\\t"),
                '\r' => literal.push_str("\\r"),
                control if control.is_ascii_control() => push_byte(control as u8, &mut literal),
                hidden if is_unprintable(hidden) => {
                    literal.extend(hidden.escape_unicode());
                }
                visible => literal.push(visible),
            }
        }
        for &byte in chunk.invalid() {
            push_byte(byte, &mut literal);
        }
    }
    literal.push('"');
    literal
}

/// A byte as three decimal digits, which OCaml reads as that byte.
fn push_byte(byte: u8, literal: &mut String) {
    literal.push_str(&format!("\\{byte:03}"));
}

/// A number to three digits, in the unit that fits. `units` have a name and a size each, the smallest first; in a unit
/// of size 1, the number has no fraction.
pub(crate) fn three_digits(number: f64, units: [(&str, f64); 4]) -> String {
    // 999.6 would be rounded to 1000: it is shown in the next unit.
    let fits = |(_, unit): &&(&str, f64)| number / unit < 999.5;
    let (name, unit) = units.iter().find(fits).unwrap_or(&units[3]);
    let number = number / unit;
    let digits = match number {
        _ if *unit == 1.0 => 0,
        ..9.995 => 2,
        ..99.95 => 1,
        _ => 0,
    };
    format!("{number:.digits$} {name}")
}

/// `118 MB`, with three digits.
pub(crate) fn bytes_text(bytes: f64) -> String {
    three_digits(bytes, [("B", 1.0), ("kB", 1e3), ("MB", 1e6), ("GB", 1e9)])
}

/// The first eight names and how many more there are; `None` if there are none.
pub(crate) fn join_first_few(names: &[impl AsRef<str>]) -> Option<String> {
    join_first(8, names)
}

/// The first names, `few` at most, and how many more there are; `None` if there are none.
pub(crate) fn join_first(few: usize, names: &[impl AsRef<str>]) -> Option<String> {
    let shown: Vec<&str> = names.iter().take(few).map(AsRef::as_ref).collect();
    let text = shown.join(", ");
    match names.len() - shown.len() {
        _ if shown.is_empty() => None,
        0 => Some(text),
        more => Some(format!("{text} and {more} more")),
    }
}

/// Whether text is a whole number without a sign.
pub(crate) fn is_number(typed: &str) -> bool {
    !typed.is_empty() && typed.bytes().all(|byte| byte.is_ascii_digit())
}

/// Reads a whole number. [`str::parse`] would also take a sign.
pub(crate) fn unsigned<T: FromStr>(typed: &str) -> Option<T> {
    typed.parse().ok().filter(|_| is_number(typed))
}

/// Shown where something is not known.
pub(crate) const UNKNOWN: &str = "-";

/// What is known, or `-` if it is not.
pub(crate) fn or_dash(known: Option<impl ToString>) -> String {
    known.map_or(UNKNOWN.to_owned(), |known| known.to_string())
}

/// `1 site`, `2 sites`: a number and what it counts. The library has one of its own, for `usize` only: how it words its
/// errors is no part of what it offers.
pub(crate) fn number_of(count: impl Display + PartialEq + From<u8>, noun: &str) -> String {
    let plural = match noun {
        _ if count == 1.into() => "",
        noun if noun.ends_with('s') => "es",
        _ => "s",
    };
    format!("{count} {noun}{plural}")
}

/// `1 hit was`, `2 hits were`: the same, with a verb.
pub(crate) fn number_that_were(count: impl Display + PartialEq + From<u8>, noun: &str) -> String {
    let were = if count == 1.into() { "was" } else { "were" };
    format!("{} {were}", number_of(count, noun))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nouns_and_verbs_agree_with_numbers() {
        let said = [0, 1, 2].map(|many: u64| number_that_were(many, "hit"));
        assert_eq!(said, ["0 hits were", "1 hit was", "2 hits were"]);
        assert_eq!(number_of(1_usize, "process"), "1 process");
        assert_eq!(number_of(2_usize, "more process"), "2 more processes");
    }

    #[test]
    fn unsigned_numbers_have_digits_only() {
        assert_eq!(unsigned("0"), Some(0_u8));
        assert_eq!(unsigned("007"), Some(7_u64));
        for typed in ["", "+3", "-3", " 3", "3 ", "3.0", "0x3", "٣", "256"] {
            assert_eq!(unsigned::<u8>(typed), None, "{typed}");
        }
    }

    #[test]
    fn control_characters_are_escaped_and_letters_are_not() {
        let escaped = Escaped("a\u{1b}[31m\n\u{202e}é\u{7f}\u{9b} z").to_string();
        assert_eq!(escaped, "a\\u{1b}[31m\\n\\u{202e}é\\u{7f}\\u{9b} z");
    }

    #[test]
    fn folded_names_have_no_separators_or_control_characters() {
        assert_eq!(
            folded_path(["a;b", "c\n\u{1}", "é d"]),
            "a:b;c\\n\\u{1};é d"
        );
    }

    #[test]
    fn strings_are_written_as_in_ocaml() {
        for (bytes, literal) in [
            (b"a \"b\"\\\t\r\n".as_slice(), r#""a \"b\"\\\t\r\n""#),
            (
                "naïve 日本 e\u{301} 🐫".as_bytes(),
                "\"naïve 日本 e\u{301} 🐫\"",
            ),
            (b"\0\x1b[31m\x7f", r#""\000\027[31m\127""#),
            (
                "\u{9b}31m\u{202e}\u{e0041}".as_bytes(),
                r#""\u{9b}31m\u{202e}\u{e0041}""#,
            ),
            // Latin-1, and a truncated UTF-8 sequence.
            (b"caf\xe9 \xff", r#""caf\233 \255""#),
            (b"\xe6\x97", r#""\230\151""#),
            (b"", r#""""#),
        ] {
            assert_eq!(ocaml_string(bytes), literal);
        }
    }
}
