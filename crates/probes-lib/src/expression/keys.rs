//! [`Keys`]: what hits are counted by.

use std::str::FromStr;

use super::problem::ExpressionProblem as Problem;
use super::typed::{KeyPart, MAX_REGISTERS};
use super::{BadExpression, Expression, Scope};
use crate::expression::MAX_ARGUMENTS;

/// What hits are counted by: one or several expressions, such as `len(page), caller`.
///
/// Each is an integer, a string (`str(arg0)`), or one of `probe`, `caller` and `tid`. What they mean depends on the
/// point whose hits are counted.
///
/// ```
/// use probes_lib::Keys;
///
/// let keys: Keys = "str(arg0), arg1 >> 10".parse()?;
/// let texts: Vec<&str> = keys.expressions().map(|it| it.as_str()).collect();
/// assert_eq!(texts, ["str(arg0)", "arg1 >> 10"]);
/// assert!("arg0,".parse::<Keys>().is_err());
/// # Ok::<(), probes_lib::BadExpression>(())
/// ```
#[derive(Clone, Debug)]
pub struct Keys(Vec<Expression>);

impl Keys {
    /// The most keys.
    pub(crate) const MAX: usize = 4;
    /// The most keys whose values are calculated from arguments: registers hold these.
    pub(crate) const MAX_HELD: usize = 2;

    /// Returns whether one asks for something in memory that a value points to.
    pub(crate) fn ask_for_memory(&self) -> bool {
        self.0.iter().any(Expression::asks_for_memory)
    }

    /// Splits a list at its commas, except those in quotes. A quote that a name ends with (`x'`) opens nothing.
    ///
    /// ```
    /// use probes_lib::Keys;
    ///
    /// assert_eq!(Keys::split(r#"str(arg0) == "a,b",tid"#), [r#"str(arg0) == "a,b""#, "tid"]);
    /// ```
    pub fn split(list: &str) -> Vec<&str> {
        let (mut parts, mut start) = (Vec::new(), 0);
        let (mut quote, mut is_escaped) = (None, false);
        let mut is_in_name = false;
        for (at, byte) in list.bytes().enumerate() {
            let follows_name = is_in_name && quote.is_none();
            is_in_name =
                byte.is_ascii_alphanumeric() || byte == b'_' || follows_name && byte == b'\'';
            match (quote, byte) {
                (None, b'\'') if follows_name => {}
                (Some(_), _) if is_escaped => is_escaped = false,
                (Some(_), b'\\') => is_escaped = true,
                (Some(open), _) if byte == open => quote = None,
                (None, b'"' | b'\'') => quote = Some(byte),
                (None, b',') => {
                    parts.push(&list[start..at]);
                    start = at + 1;
                }
                _ => {}
            }
        }
        parts.push(&list[start..]);
        parts
    }

    /// Returns the expressions in their order, at least one.
    pub fn expressions(&self) -> impl ExactSizeIterator<Item = &Expression> {
        self.0.iter()
    }

    /// Returns the keys at one end of a pair, by which a stop finds its start. `probe` and `caller` differ between the
    /// two ends, so they are refused.
    pub(crate) fn parts_of_pair(&self, scope: &Scope) -> Result<Vec<KeyPart>, BadExpression> {
        let parts = self.parts(scope)?;
        let differs = |part: &KeyPart| matches!(part, KeyPart::Probe | KeyPart::Caller);
        self.refuse(&parts, differs, Problem::DiffersAtEnds)?;
        Ok(parts)
    }

    /// Fails if one of these parts is of a kind that is not possible here.
    fn refuse(
        &self,
        parts: &[KeyPart],
        is_refused: impl Fn(&KeyPart) -> bool,
        why: Problem,
    ) -> Result<(), BadExpression> {
        let mut both = parts.iter().zip(&self.0);
        match both.find(|(part, _)| is_refused(part)) {
            None => Ok(()),
            Some((_, expression)) => Err(expression.bad(why)),
        }
    }

    /// Same as [`Keys::parts_of_pair`]. Also refuses keys that are not in the record of a hit.
    pub(crate) fn parts_of_recorded_pair(
        &self,
        scope: &Scope,
    ) -> Result<Vec<KeyPart>, BadExpression> {
        let parts = self.parts_of_pair(scope)?;
        let is_left_out = |part: &KeyPart| !part.is_recorded(MAX_ARGUMENTS);
        self.refuse(&parts, is_left_out, Problem::NotRecorded)?;
        Ok(parts)
    }

    /// Returns the keys at the stop of a pair, where the time takes one register: only one key may be held in a
    /// register, and one register fewer is left to calculate it.
    pub(crate) fn parts_at_stop(&self, scope: &Scope) -> Result<Vec<KeyPart>, BadExpression> {
        let parts = self.parts(scope)?;
        let mut held = parts.iter().zip(&self.0).filter(|(it, _)| it.is_held());
        let bad = |(_, expression): (&KeyPart, &Expression), problem| Err(expression.bad(problem));
        match (held.next(), held.next()) {
            (_, Some(second)) => bad(second, Problem::TooManyHeldAtStop),
            (Some(only), None) if only.0.registers() >= MAX_REGISTERS => {
                bad(only, Problem::TooManyNumbers)
            }
            _ => Ok(parts),
        }
    }

    /// Returns the parts of the keys at the hits of a point.
    pub(crate) fn parts(&self, scope: &Scope) -> Result<Vec<KeyPart>, BadExpression> {
        let mut held = 0;
        let parts = self.0.iter().map(|expression| {
            let part = expression.key(scope)?;
            if part.is_held() {
                if held == Keys::MAX_HELD {
                    return Err(expression.bad(Problem::TooManyHeld));
                }
                if part.registers() > MAX_REGISTERS - held {
                    return Err(expression.bad(Problem::TooManyNumbers));
                }
                held += 1;
            }
            Ok(part)
        });
        parts.collect()
    }
}

impl FromStr for Keys {
    type Err = BadExpression;

    fn from_str(text: &str) -> Result<Keys, BadExpression> {
        let parts = Keys::split(text);
        if parts.len() > Keys::MAX {
            return Err(BadExpression::new(
                text,
                0..text.len(),
                Problem::TooManyKeys,
            ));
        }
        let is_list = parts.len() > 1;
        let keys = parts.into_iter().map(|part| {
            let key = part.trim();
            // Errors show the whole list.
            let start = key.as_ptr().addr() - text.as_ptr().addr();
            if key.is_empty() && is_list {
                let end = part.as_ptr().addr() - text.as_ptr().addr() + part.len();
                return Err(BadExpression::new(text, end..end, Problem::NoKey));
            }
            key.parse().map_err(|bad: BadExpression| {
                let place = bad.place();
                let place = start + place.start..start + place.end;
                BadExpression::new(text, place, bad.problem().clone())
            })
        });
        keys.collect::<Result<_, _>>().map(Keys)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_point_at_their_place_in_the_list() {
        for (list, message, mark) in [
            ("tid,", "a key is missing", "    tid,\n        ^"),
            (" , tid", "a key is missing", "     , tid\n     ^"),
            (
                "tid,  arg0 = 5",
                "= is no operator: == compares",
                "    tid,  arg0 = 5\n               ^",
            ),
            ("", "the expression is empty", ""),
        ] {
            let bad = list.parse::<Keys>().unwrap_err();
            assert_eq!(bad.to_string(), message, "{list:?}");
            assert_eq!(bad.marked(), mark, "{list:?}");
        }
    }

    #[test]
    fn lists_are_split_outside_of_quotes() {
        for (list, expected) in [
            ("arg0", &["arg0"][..]),
            ("arg0,tid", &["arg0", "tid"]),
            (
                r#"arg0 + ',' , "a\",b",c"#,
                &["arg0 + ',' ", r#" "a\",b""#, "c"],
            ),
            ("acc', x'', tid", &["acc'", " x''", " tid"]),
            (
                r#"arg0=='a',a1' , ",'", b"#,
                &["arg0=='a'", "a1' ", r#" ",'""#, " b"],
            ),
            (",", &["", ""]),
        ] {
            assert_eq!(Keys::split(list), expected, "{list}");
        }
    }
}
