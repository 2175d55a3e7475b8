//! [`Glob`]: a pattern for names of functions.

use std::fmt;
use std::str::FromStr;

use memchr::memmem;
use regex::Regex;

use crate::elf::mangling;

/// A pattern that matches whole names: `*` stands for any characters, `?` for one, `[ab]` for one of these,
/// `[!ab]` for any other one, `[a-c]` for one of a range; `\` before a character, not in brackets, takes it as it is.
/// A name that is the same text matches, too: `f [clone .isra.0]`. The brackets of C++'s `operator[]` stand for themselves.
///
/// ```
/// let glob: probes_lib::Glob = "Stdlib.List.*".parse().unwrap();
/// assert!(glob.matches("Stdlib.List.map") && !glob.matches("Stdlib.List"));
/// ```
#[derive(Clone, Debug)]
pub struct Glob {
    text: String,
    regex: Regex,
    /// Letters and digits that are part of each name that matches; empty if none are known.
    word: String,
}

/// Why a text is not a [`Glob`].
///
/// ```
/// use probes_lib::{BadGlob, Glob};
///
/// let error = "cache_[ab".parse::<Glob>().unwrap_err();
/// assert_eq!(error, BadGlob::Unclosed);
/// assert_eq!(error.to_string(), "not a glob: it has a [ without a ]");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BadGlob {
    /// A `[` has no `]`.
    #[error("not a glob: it has a [ without a ]")]
    Unclosed,
    /// It ends with a `\`, which stands before a character.
    #[error("not a glob: it ends with a \\, which takes the character after it as it is")]
    NothingEscaped,
    /// A range such as `[b-a]` ends before it starts.
    #[error("not a glob: it has a range that ends before it starts, such as [b-a]")]
    BadRange,
    /// It would take too much memory to match it.
    #[error("too long for a glob")]
    TooLong,
}

impl Glob {
    /// Whether the whole of `name` matches.
    pub fn matches(&self, name: &str) -> bool {
        name == self.text || self.regex.is_match(name)
    }

    /// Whether the name that a linker symbol stands for may match.
    pub(crate) fn may_match(&self, symbol: &[u8]) -> bool {
        memmem::find(symbol, self.word.as_bytes()).is_some() || !mangling::keeps_words(symbol)
    }

    /// Whether it matches only the name that it is itself.
    pub(crate) fn is_name(&self) -> bool {
        !self.text.contains(['*', '?', '[', '\\'])
    }

    /// The pattern as it was given.
    pub fn as_str(&self) -> &str {
        &self.text
    }
}

impl FromStr for Glob {
    type Err = BadGlob;

    fn from_str(text: &str) -> Result<Glob, BadGlob> {
        let regex = Regex::new(&regex_of(text)?).map_err(|error| match error {
            regex::Error::CompiledTooBig(_) => BadGlob::TooLong,
            // Everything else is escaped.
            _ => BadGlob::BadRange,
        })?;
        let word = word_of(text).to_owned();
        let text = text.to_owned();
        Ok(Glob { text, regex, word })
    }
}

impl fmt::Display for Glob {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// The longest word that is certainly part of what matches; an empty one if there is none.
fn word_of(glob: &str) -> &str {
    let end = glob.find(['[', '\\']).unwrap_or(glob.len());
    let words = glob[..end].split(|it: char| !it.is_ascii_alphanumeric());
    words.max_by_key(|word| word.len()).unwrap_or_default()
}

/// The same pattern as a regular expression.
fn regex_of(glob: &str) -> Result<String, BadGlob> {
    let mut regex = String::from(r"(?s)\A");
    let mut rest = glob.chars();
    while let Some(next) = rest.next() {
        match next {
            '*' => regex.push_str(".*"),
            '?' => regex.push('.'),
            '[' if is_of_operator(&glob[..glob.len() - rest.as_str().len()], rest.as_str()) => {
                push_literally('[', &mut regex);
            }
            '[' => {
                regex.push('[');
                let mut inside = rest.clone();
                if inside.next() == Some('!') {
                    rest = inside;
                    regex.push('^');
                }
                // A `]` that comes first is one of the characters.
                let mut members = Vec::new();
                loop {
                    match rest.next().ok_or(BadGlob::Unclosed)? {
                        ']' if !members.is_empty() => break,
                        member => members.push(member),
                    }
                }
                push_members(&members, &mut regex);
                regex.push(']');
            }
            '\\' => push_literally(rest.next().ok_or(BadGlob::NothingEscaped)?, &mut regex),
            literal => push_literally(literal, &mut regex),
        }
    }
    Ok(regex + r"\z")
}

/// Whether a text ends with the `[` of an operator of C++, which `rest` follows.
fn is_of_operator(text: &str, rest: &str) -> bool {
    let operators = ["operator[", "operator new[", "operator delete["];
    rest.starts_with(']') && operators.iter().any(|operator| text.ends_with(operator))
}

/// Adds the characters of a class: single ones, and ranges such as `a-z`.
fn push_members(mut members: &[char], regex: &mut String) {
    while let [first, rest @ ..] = members {
        push_literally(*first, regex);
        members = match rest {
            ['-', last, rest @ ..] => {
                regex.push('-');
                push_literally(*last, regex);
                rest
            }
            rest => rest,
        };
    }
}

fn push_literally(character: char, regex: &mut String) {
    let mut buffer = [0; 4];
    regex.push_str(&regex::escape(character.encode_utf8(&mut buffer)));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_match_are_never_passed_over() {
        for (glob, symbol) in [
            ("Stdlib.List.map", "camlStdlib__List__map_480"),
            ("*.List.m?p*", "camlStdlib__List.map_480"),
            ("Stdlib.List[.]map", "camlStdlib__List__map_480"),
            (r"Sys\.big", "camlSys__big_1"),
            ("A.++", "camlA__$2b$2b_7"),
            ("A.Z", "camlA__$5a_7"),
            ("Foo.Bar.baz", "_CamlU3FooM3BarF3baz"),
            ("std::string::*", "_ZNSs6appendEPKc"),
            ("*", "anything"),
            ("*é*", "caf\u{e9}"),
        ] {
            let glob: Glob = glob.parse().unwrap();
            assert!(glob.may_match(symbol.as_bytes()), "{glob} {symbol}");
        }
        let glob: Glob = "Stdlib.List.map".parse().unwrap();
        assert!(!glob.may_match(b"camlFoo__map_1") && !glob.may_match(b"malloc"));
    }

    #[test]
    fn globs_match_whole_names() {
        for (glob, matching, others) in [
            (
                "Stdlib.List.*",
                &["Stdlib.List.map", "Stdlib.List."][..],
                &["Stdlib.ListLabels.map"][..],
            ),
            (
                "caml_?lloc",
                &["caml_alloc"],
                &["caml_lloc", "caml_alloc_small"],
            ),
            ("*.[mi]*", &["A.map", "A.iter"], &["A.fold"]),
            ("A.[!a-y]", &["A.z", "A.é"], &["A.b", "A."]),
            ("A.[]^-]", &["A.]", "A.^", "A.-"], &["A.a"]),
            (r"Stdlib.\*", &["Stdlib.*"], &["Stdlib.+", "Stdlib.**"]),
            ("Stdlib.[*]", &["Stdlib.*"], &["Stdlib.+"]),
            ("f(int)|.", &["f(int)|."], &["f(int)", "x"]),
            ("x[+--]y", &["x,y", "x+y", "x-y"], &["x.y"]),
            ("x[a&&b~~-]", &["x&", "x~", "x-", "xa"], &["xc"]),
            ("*", &["", "a b\nc"], &[]),
            (
                "f(int) [clone .isra.0]",
                &["f(int) [clone .isra.0]", "f(int) ."],
                &["f(int)"],
            ),
            (
                "V::operator[](*",
                &["V::operator[](int) const"],
                &["V::operator(int)"],
            ),
            ("operator new[](*)", &["operator new[](unsigned long)"], &[]),
        ] {
            let glob: Glob = glob.parse().unwrap();
            for name in matching {
                assert!(glob.matches(name), "{glob} {name}");
            }
            for name in others {
                assert!(!glob.matches(name), "{glob} {name}");
            }
        }
    }

    #[test]
    fn broken_globs_are_refused() {
        let long = "?".repeat(1 << 20);
        for (text, why) in [
            ("[", BadGlob::Unclosed),
            ("[]", BadGlob::Unclosed),
            ("a[!", BadGlob::Unclosed),
            (r"a\", BadGlob::NothingEscaped),
            ("[b-a]", BadGlob::BadRange),
            ("[z--]", BadGlob::BadRange),
            (&long, BadGlob::TooLong),
        ] {
            assert_eq!(text.parse::<Glob>().unwrap_err(), why);
        }
    }

    proptest::proptest! {
        #![proptest_config(crate::testing::properties(500))]

        #[test]
        fn any_name_matches_itself_escaped(name in "\\PC{0,12}") {
            let escaped: String = name.chars().flat_map(|c| ['\\', c]).collect();
            let glob: Glob = escaped.parse().unwrap();
            assert!(glob.matches(&name));
        }

        #[test]
        fn any_text_is_read_or_refused(text in "([*?\\[\\]!\\-^&~\\\\]|\\PC){0,12}") {
            if let Ok(glob) = text.parse::<Glob>() {
                glob.matches(&text);
            }
        }
    }
}
