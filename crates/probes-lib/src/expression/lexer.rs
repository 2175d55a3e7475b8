//! Splits an expression into tokens: names, numbers, strings, operators.

use std::iter::Peekable;
use std::ops::Range;
use std::str::CharIndices;

use super::problem::ExpressionProblem as Problem;
use super::typed::Relation;

/// The last field that can be asked for.
const MAX_FIELD: u32 = 0xffff;

/// What is wrong, and where in the text.
pub(super) type Wrong = (Range<usize>, Problem);

/// A token of an expression.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Token {
    Name(String),
    Number(u64),
    Float(f64),
    /// In nanoseconds.
    Time(u64),
    Text(Vec<u8>),
    /// `.1`
    Field(u32),
    Operator(Operator),
    Not,
    Open,
    Close,
}

/// An operator between two values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Operator {
    Or,
    And,
    Compare(Relation),
    BeginsWith,
    BitAnd,
    ShiftRight,
    Add,
    Subtract,
    Multiply,
}

impl Operator {
    /// Returns its precedence: an operator with a higher one binds more tightly.
    pub(super) fn precedence(self) -> u32 {
        match self {
            Operator::Or => 1,
            Operator::And => 2,
            Operator::Compare(_) | Operator::BeginsWith => 3,
            Operator::BitAnd => 4,
            Operator::ShiftRight => 5,
            Operator::Add | Operator::Subtract => 6,
            Operator::Multiply => 7,
        }
    }

    pub(super) fn is_comparison(self) -> bool {
        matches!(self, Operator::Compare(_) | Operator::BeginsWith)
    }
}

/// Operators of two characters come first, because the first one that matches is taken: `<=` before `<`.
const OPERATORS: [(&str, Operator); 14] = [
    ("==", Operator::Compare(Relation::Equal)),
    ("!=", Operator::Compare(Relation::NotEqual)),
    ("<=", Operator::Compare(Relation::AtMost)),
    (">=", Operator::Compare(Relation::AtLeast)),
    ("^=", Operator::BeginsWith),
    (">>", Operator::ShiftRight),
    ("&&", Operator::And),
    ("||", Operator::Or),
    ("<", Operator::Compare(Relation::Less)),
    (">", Operator::Compare(Relation::Greater)),
    ("+", Operator::Add),
    ("-", Operator::Subtract),
    ("*", Operator::Multiply),
    ("&", Operator::BitAnd),
];

/// Operators of other languages that expressions do not have, and what a message suggests instead. If one of these and
/// one of [`OPERATORS`] match, the longer one is meant: `===` is refused, `^=` is not.
const OTHERS: [(&str, &str); 9] = [
    ("<<", "* multiplies"),
    ("<>", "!= compares"),
    ("===", "== compares"),
    ("=", "== compares"),
    ("|", "|| means or"),
    ("/", "there is no division; >> shifts to the right"),
    (
        "%",
        "there is no division; arg0 & 7 is the remainder of a division by 8",
    ),
    ("~", "! means not"),
    ("^", "^= means begins with"),
];

/// Splits an expression into tokens, each with its place: a range of bytes in `text`.
pub(super) fn tokens(text: &str) -> Result<Vec<(Range<usize>, Token)>, Wrong> {
    let mut tokens = Vec::new();
    let mut at = 0;
    while let Some(next) = text[at..].chars().next() {
        if next.is_ascii_whitespace() {
            at += 1;
            continue;
        }
        let (end, token) = token(text, at, next)?;
        tokens.push((at..end, token));
        at = end;
    }
    Ok(tokens)
}

/// Returns the token that begins at `at` with the character `first`, and where it ends.
fn token(text: &str, at: usize, first: char) -> Result<(usize, Token), Wrong> {
    let rest = &text[at..];
    match first {
        '(' => return Ok((at + 1, Token::Open)),
        ')' => return Ok((at + 1, Token::Close)),
        '"' => {
            let (end, bytes) = quoted(text, at, '"')?;
            return Ok((end, Token::Text(bytes)));
        }
        '\'' => {
            let (end, bytes) = quoted(text, at, '\'')?;
            let [byte] = bytes[..] else {
                return Err((at..end, Problem::NotOneCharacter));
            };
            return Ok((end, Token::Number(byte.into())));
        }
        '.' => {
            let digits = length(&rest[1..], |it| it.is_ascii_alphanumeric() || it == '_');
            let end = at + 1 + digits;
            return match text[at + 1..end].parse() {
                Ok(field @ 0..=MAX_FIELD) => Ok((end, Token::Field(field))),
                _ => Err((at..end, Problem::NoField)),
            };
        }
        '0'..='9' => return number(text, at),
        _ => {}
    }
    if may_begin_name(first) {
        let end = at + name_len(rest);
        return Ok((end, Token::Name(text[at..end].to_owned())));
    }
    let other = OTHERS.iter().find(|(typed, _)| rest.starts_with(typed));
    let operator = OPERATORS.iter().find(|(typed, _)| rest.starts_with(typed));
    match (operator, other) {
        (Some((typed, _)), Some((other, instead))) if other.len() > typed.len() => {
            Err((at..at + other.len(), no_operator(other, instead)))
        }
        (Some((typed, operator)), _) => Ok((at + typed.len(), Token::Operator(*operator))),
        (None, _) if first == '!' => Ok((at + 1, Token::Not)),
        (None, Some((other, instead))) => Err((at..at + other.len(), no_operator(other, instead))),
        (None, None) => Err((
            at..at + first.len_utf8(),
            Problem::UnexpectedCharacter(first),
        )),
    }
}

fn no_operator(typed: &'static str, instead: &'static str) -> Problem {
    Problem::NoOperator { typed, instead }
}

fn may_begin_name(it: char) -> bool {
    it.is_ascii_alphabetic() || it == '_'
}

/// Returns the length of the name at the beginning of `text`, in bytes. A dot is part of it only after a module's name
/// (`M.x`, as in OCaml): `x.1` is the name `x` and a field.
fn name_len(text: &str) -> usize {
    let len = length(text, |it| {
        may_begin_name(it) || it.is_ascii_digit() || it == '\''
    });
    let inside = text[len..].strip_prefix('.');
    match inside.filter(|it| {
        text.starts_with(|first: char| first.is_ascii_uppercase()) && it.starts_with(may_begin_name)
    }) {
        Some(inside) => len + 1 + name_len(inside),
        None => len,
    }
}

/// Returns the length, in bytes, of the longest prefix of `text` whose characters all satisfy `is_like`.
fn length(text: &str, is_like: impl Fn(char) -> bool) -> usize {
    text.find(|it| !is_like(it)).unwrap_or(text.len())
}

/// Reads a number, or a time.
fn number(text: &str, at: usize) -> Result<(usize, Token), Wrong> {
    let rest = &text[at..];
    let is_digit = |it: char| it.is_ascii_digit();
    if let Some(digits) = rest.strip_prefix("0x").or(rest.strip_prefix("0X")) {
        let end = at + 2 + length(digits, |it| it.is_ascii_alphanumeric() || it == '_');
        let typed = &text[at + 2..end];
        if typed.is_empty() || !typed.bytes().all(|it| it.is_ascii_hexdigit()) {
            return Err((at..end, Problem::NoNumber(text[at..end].to_owned())));
        }
        let number = u64::from_str_radix(typed, 16);
        let number = number.map_err(|_| (at..end, Problem::TooLarge))?;
        return Ok((end, Token::Number(number)));
    }
    let mut len = length(rest, is_digit);
    let mut is_float = false;
    if let Some(fraction) = rest[len..].strip_prefix('.') {
        is_float = true;
        len += 1 + length(fraction, is_digit);
    }
    if let Some(exponent) = rest[len..].strip_prefix(['e', 'E']) {
        let digits = exponent.strip_prefix(['+', '-']).unwrap_or(exponent);
        let many = length(digits, is_digit);
        if many > 0 {
            is_float = true;
            len += 1 + (exponent.len() - digits.len()) + many;
        }
    }
    let unit_len = length(&rest[len..], |it| it.is_ascii_alphanumeric() || it == '_');
    let (typed, unit) = (&rest[..len], &rest[len..len + unit_len]);
    let end = at + len + unit_len;
    let whole = || at..end;
    let nanoseconds: u64 = match unit {
        "" => 1,
        "ns" => 1,
        "us" => 1_000,
        "ms" => 1_000_000,
        "s" => 1_000_000_000,
        unit if unit.bytes().all(|it| it.is_ascii_alphabetic()) => {
            return Err((at + len..end, Problem::NoUnit(unit.to_owned())));
        }
        _ => return Err((whole(), Problem::NoNumber(text[whole()].to_owned()))),
    };
    let token = if is_float {
        // It has digits, at most one point and an exponent: Rust reads all of these.
        let number: f64 = typed.parse().unwrap_or(f64::INFINITY);
        if unit.is_empty() {
            if number.is_infinite() {
                return Err((whole(), Problem::TooLarge));
            }
            return Ok((end, Token::Float(number)));
        }
        let time = (number * nanoseconds as f64).round();
        Token::Time(
            (time < MAX_TIME as f64)
                .then_some(time as u64)
                .ok_or((whole(), Problem::TooLarge))?,
        )
    } else {
        let number: u64 = typed.parse().map_err(|_| (whole(), Problem::TooLarge))?;
        if unit.is_empty() {
            return Ok((end, Token::Number(number)));
        }
        let time = number.checked_mul(nanoseconds);
        let time = time.filter(|time| *time < MAX_TIME);
        Token::Time(time.ok_or((whole(), Problem::TooLarge))?)
    };
    Ok((end, token))
}

/// All times are shorter than this, in nanoseconds: 292 years.
const MAX_TIME: u64 = i64::MAX as u64;

/// Reads what is between two quotes; `at` is the place of the first one. The escapes are OCaml's, except `\o101`,
/// `\u{e9}`, and a backslash before a space or a line break.
fn quoted(text: &str, at: usize, quote: char) -> Result<(usize, Vec<u8>), Wrong> {
    let mut bytes = Vec::new();
    let mut rest = text[at + 1..].char_indices().peekable();
    while let Some((offset, next)) = rest.next() {
        let here = at + 1 + offset;
        match next {
            '\\' => {
                let byte = escaped(&mut rest);
                let end = rest
                    .peek()
                    .map_or(text.len(), |(offset, _)| at + 1 + offset);
                bytes.push(byte.ok_or((here..end, Problem::BadEscape))?);
            }
            next if next == quote => return Ok((here + 1, bytes)),
            next => bytes.extend(next.encode_utf8(&mut [0; 4]).bytes()),
        }
    }
    Err((at..text.len(), Problem::Unclosed(quote)))
}

/// Reads what follows a backslash, and returns the byte that it stands for; `None` if it is no escape.
fn escaped(rest: &mut Peekable<CharIndices<'_>>) -> Option<u8> {
    let first = rest.next()?.1;
    let mut digits = |first: Option<char>, radix, many| {
        let mut number = first.map_or(Some(0), |first| first.to_digit(radix))?;
        for _ in first.iter().count()..many {
            let (_, next) = rest.next_if(|(_, it)| it.is_digit(radix))?;
            number = number * radix + next.to_digit(radix)?;
        }
        u8::try_from(number).ok()
    };
    Some(match first {
        'n' => b'\n',
        't' => b'\t',
        'r' => b'\r',
        'b' => 8,
        it @ ('\\' | '"' | '\'') => it as u8,
        'x' => return digits(None, 16, 2),
        it @ '0'..='9' => return digits(Some(it), 10, 3),
        _ => return None,
    })
}
