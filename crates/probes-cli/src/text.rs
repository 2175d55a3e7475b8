//! Text for people: names escaped, lists cut short, numbers with their unit.

use std::fmt;

/// Untrusted text from a file: characters that could move the cursor, change colours or turn the direction
/// of writing are shown as escapes.
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

/// Control characters, line and paragraph separators, marks and overrides of direction, zero-width
/// characters.
pub(crate) fn is_unprintable(character: char) -> bool {
    character.is_control()
        || matches!(
            character,
            '\u{061c}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}'
        )
}

/// The first eight names and how many more there are; `None` if there are none.
pub(crate) fn join_first_few(names: &[impl AsRef<str>]) -> Option<String> {
    const FEW: usize = 8;
    let shown: Vec<&str> = names.iter().take(FEW).map(AsRef::as_ref).collect();
    let text = shown.join(", ");
    match names.len() - shown.len() {
        _ if shown.is_empty() => None,
        0 => Some(text),
        more => Some(format!("{text} and {more} more")),
    }
}

/// `1 site`, `2 sites`: a number and what it counts.
pub(crate) fn number_of(count: usize, noun: &str) -> String {
    let plural = match noun {
        _ if count == 1 => "",
        noun if noun.ends_with('s') => "es",
        _ => "s",
    };
    format!("{count} {noun}{plural}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_are_escaped_and_letters_are_not() {
        let escaped = Escaped("a\u{1b}[31m\n\u{202e}é\u{7f}\u{9b} z").to_string();
        assert_eq!(escaped, "a\\u{1b}[31m\\n\\u{202e}é\\u{7f}\\u{9b} z");
    }
}
