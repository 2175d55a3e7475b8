//! What is wrong with an expression, and where.

use std::fmt;
use std::ops::Range;

use crate::expression::MAX_ARGUMENTS;
use crate::expression::{Keys, MAX_DEPTH, MAX_LEN};

/// Why a text is not an expression, or not one for a point.
///
/// ```
/// use probes_lib::{Expression, ExpressionProblem};
///
/// let error = "arg0 = 5".parse::<Expression>().unwrap_err();
/// assert_eq!(error.place(), 5..6);
/// assert_eq!(error.to_string(), "= is no operator: == compares");
/// assert_eq!(error.marked(), "    arg0 = 5\n         ^");
/// assert!(matches!(error.problem(), ExpressionProblem::NoOperator { typed: "=", .. }));
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BadExpression {
    text: String,
    place: Range<usize>,
    problem: ExpressionProblem,
}

impl BadExpression {
    pub(super) fn new(
        text: &str,
        place: Range<usize>,
        problem: ExpressionProblem,
    ) -> BadExpression {
        BadExpression {
            text: text.to_owned(),
            place,
            problem,
        }
    }

    /// What is wrong.
    pub fn problem(&self) -> &ExpressionProblem {
        &self.problem
    }

    /// Returns whether the expression may fit other points: this one lacks an argument, or its arguments are not known, or
    /// cannot be read.
    pub(crate) fn is_about_arguments(&self) -> bool {
        let problem = &self.problem;
        matches!(
            problem,
            ExpressionProblem::NoArgument { .. }
                | ExpressionProblem::UnknownArguments { .. }
                | ExpressionProblem::UnreadArgument { .. }
                | ExpressionProblem::UnaskedArgument { .. }
        )
    }

    /// Where, in bytes of the text. It may be empty, at the end.
    pub fn place(&self) -> Range<usize> {
        self.place.clone()
    }

    /// Returns two lines: the expression, and a mark below the place. Of a long one, the part around the place.
    pub fn marked(&self) -> String {
        BadExpression::mark(&self.text, self.place())
    }

    /// Returns two lines: a text, and a mark below a place in it, which is in bytes. Of a long text, the part around the
    /// place; of one that has nothing but spaces there, nothing.
    ///
    /// ```
    /// use probes_lib::BadExpression;
    ///
    /// assert_eq!(BadExpression::mark("stack, tid", 0..5), "    stack, tid\n    ^^^^^");
    /// ```
    pub fn mark(text: &str, place: Range<usize>) -> String {
        /// How many characters are shown before the place and after its beginning.
        const SHOWN: usize = 60;
        let (start, end) = (place.start, place.end.max(place.start));
        let before = text.get(..start).unwrap_or_default();
        let marked = text.get(start..end).unwrap_or_default();
        let from = before.char_indices().rev().nth(SHOWN - 1);
        let from = from.map_or(0, |(at, _)| at);
        let rest = text.get(from..).unwrap_or_default();
        // A control character would move the mark.
        let shown = rest.chars().take(2 * SHOWN);
        let shown = shown.map(|it| if it.is_control() { ' ' } else { it });
        let left_out = |is_left_out: bool| is_left_out.then_some('…');
        let begin = left_out(from > 0);
        let end = left_out(rest.chars().nth(2 * SHOWN).is_some());
        let shown: String = shown.collect();
        if shown.trim().is_empty() {
            return String::new();
        }
        let shown: String = begin.into_iter().chain(shown.chars()).chain(end).collect();
        let indent = before.get(from..).unwrap_or_default().chars().count();
        let indent = indent + usize::from(from > 0);
        let marks = marked.chars().count().clamp(1, SHOWN);
        format!(
            "    {}\n    {:indent$}{:^<marks$}",
            shown.trim_end(),
            "",
            ""
        )
    }
}

impl std::error::Error for BadExpression {}

impl fmt::Display for BadExpression {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.problem.fmt(f)
    }
}

/// What is wrong with an expression.
///
/// [`BadExpression`] has an example.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ExpressionProblem {
    /// It has nothing but spaces.
    #[error("the expression is empty")]
    Empty,
    /// It is too long.
    #[error("the expression is longer than {MAX_LEN} bytes")]
    TooLong,
    /// What is asked takes too much code at a point; this is the expression with the longest text.
    #[error("the expression takes {given} bytes of code at a point: at most {most} are possible")]
    TooMuchCode {
        /// How many it takes, with what is counted and with the other expressions.
        given: u64,
        /// How many there can be.
        most: u64,
    },
    /// Its parts are nested too deep.
    #[error("the expression is nested more than {MAX_DEPTH} deep")]
    TooDeep,
    /// A character that begins nothing.
    #[error("unexpected character {0:?}")]
    UnexpectedCharacter(char),
    /// Something that looks like an operator of another language.
    #[error("{typed} is no operator: {instead}")]
    NoOperator {
        /// As it was written.
        typed: &'static str,
        /// What there is.
        instead: &'static str,
    },
    /// The closing quote is missing.
    #[error("the string does not end: a {0} is missing")]
    Unclosed(char),
    /// Single quotes around no byte, or around several.
    #[error("a character in quotes is one byte: 'c', or a string: \"text\"")]
    NotOneCharacter,
    /// A backslash that begins none of the escapes, which are OCaml's except `\o101` and `\u{e9}`.
    #[error("no escape of OCaml: \\n \\t \\r \\b \\\\ \\\" \\' \\065 \\x41")]
    BadEscape,
    /// A number of more than 64 bits.
    #[error("the number is too large")]
    TooLarge,
    /// A number that goes on with letters.
    #[error("{0:?} is no number")]
    NoNumber(String),
    /// A number with letters after it that are no unit of time.
    #[error("{0:?} is no unit of time: ns, us, ms, s")]
    NoUnit(String),
    /// A value is missing.
    #[error("a value is missing {}", missing_at(.before.as_deref()))]
    NoValue {
        /// What is there instead; `None` at the end.
        before: Option<String>,
    },
    /// Two values without an operator between them.
    #[error("an operator is missing before {0}")]
    OperatorMissing(String),
    /// A parenthesis that is not closed.
    #[error("a ) is missing")]
    ParenthesisMissing,
    /// `a < b < c`.
    #[error("comparisons cannot be chained: a < b && b < c")]
    Chained,
    /// A field that is no number, or one above 65535.
    #[error("a field is a number up to 65535: arg0.1")]
    NoField,
    /// No function has this name.
    #[error("unknown function {name}{}", suggested(.near))]
    UnknownFunction {
        /// Its name.
        name: String,
        /// Similar names.
        near: Vec<String>,
    },
    /// Nothing has this name.
    #[error("unknown name {name}: {}", suggested_name(.near, .name, .arguments))]
    UnknownName {
        /// The name.
        name: String,
        /// Similar names.
        near: Vec<String>,
        /// What the arguments of the point are called, in words; empty if they have no names.
        arguments: String,
    },
    /// The point does not have so many arguments, or they are not known.
    #[error("{point} has no {name}{}", known(point, *.has))]
    NoArgument {
        /// The point.
        point: String,
        /// The argument.
        name: String,
        /// How many it has that are known.
        has: usize,
    },
    /// It is not known how many arguments the point has.
    #[error("it is not known which arguments {point} has")]
    UnknownArguments {
        /// The point.
        point: String,
    },
    /// An argument in a place of an unknown kind.
    #[error("{name} of {point} cannot be asked for: it is in a place of an unknown kind")]
    UnreadArgument {
        /// The point.
        point: String,
        /// The argument.
        name: String,
    },
    /// An argument anywhere in memory, in a process whose seccomp filter may forbid to find out whether it can be read.
    #[error(
        "{name} of {point} is not read in a process that has set itself a seccomp filter: the kernel is asked whether its memory can be, and might kill it"
    )]
    UnaskedArgument {
        /// The point.
        point: String,
        /// The argument.
        name: String,
    },
    /// Something that is known elsewhere only.
    #[error("{name} is not known here: {why}")]
    NotHere {
        /// What.
        name: &'static str,
        /// Where it is known.
        why: &'static str,
    },
    /// An argument of a function, asked together with its result.
    #[error("{name} is not known where a function returns, which is where retval is asked")]
    GoneAtExit {
        /// The argument.
        name: String,
    },
    /// The time of a pair or call, used in another way than is possible.
    #[error(
        "elapsed is compared with a time by <, <=, > or >=, by itself or beside &&: elapsed > 10ms && arg0 == 5"
    )]
    ElapsedElsewhere,
    /// Two things of different kinds are compared.
    #[error("{text} compares {left} with {right}")]
    Mismatch {
        /// The comparison.
        text: String,
        /// The kind of its left side.
        left: &'static str,
        /// The kind of its right side.
        right: &'static str,
    },
    /// Something is used as what it is not.
    #[error("{text} is {is}, where {wanted} is needed")]
    WrongKind {
        /// The part, as it was written.
        text: String,
        /// Its kind.
        is: &'static str,
        /// The kind that is needed.
        wanted: &'static str,
    },
    /// A string of C, in a process whose seccomp filter may forbid to find out whether it can be read.
    #[error(
        "strings of C are not read in a process that has set itself a seccomp filter: the kernel is asked whether they can be, and might kill it"
    )]
    UnreadText,
    /// Strings have no order.
    #[error("strings are compared by ==, != and ^=")]
    NoOrder,
    /// A string that is compared with another one of the process.
    #[error("a string is compared with one in quotes")]
    NoLiteral,
    /// A string that is compared is too long.
    #[error("a string that is compared has at most {0} bytes")]
    LongLiteral(usize),
    /// A number with a sign is compared with one without.
    #[error("{text} compares a number with one without a sign: u64(…) on both sides, or on none")]
    MixedSigns {
        /// The comparison.
        text: String,
    },
    /// A number without a sign is compared with a negative one.
    #[error("u64(…) is never negative")]
    NeverNegative,
    /// It would take more registers than there are.
    #[error("too many numbers are calculated at a time")]
    TooManyNumbers,
    /// Nothing between two commas, or before or after one.
    #[error("a key is missing")]
    NoKey,
    /// More keys than are possible.
    #[error("at most {} keys are possible", Keys::MAX)]
    TooManyKeys,
    /// The key of pairs is something that is not the same at their two ends.
    #[error(
        "this is not the same at the start and the stop of a pair: use an argument that identifies what is timed"
    )]
    DiffersAtEnds,
    /// The key of pairs is to be found by what is recorded of hits, which does not have it.
    #[error(
        "this is not recorded of each hit: of the first {MAX_ARGUMENTS} arguments, ints, strings and ints in fields are, and tid"
    )]
    NotRecorded,
    /// More keys are calculated from arguments than registers can hold.
    #[error("at most {} keys can be made of arguments", Keys::MAX_HELD)]
    TooManyHeld,
    /// More than one key of the times of a pair is calculated from arguments.
    #[error("only one key of the times of a pair can be made of arguments")]
    TooManyHeldAtStop,
    /// The distance of a shift is not a number, or too large.
    #[error("a number is shifted by 0 to 63 bits")]
    BadShift,
}

fn suggested(near: &[String]) -> String {
    match near {
        [] => String::new(),
        near => format!(": did you mean {}?", near.join(" or ")),
    }
}

fn suggested_name(near: &[String], name: &str, arguments: &str) -> String {
    match near {
        // No argument is called so.
        _ if name == "pid" => {
            "-by 'pid,EXPR' has it as a key, alone; it has no value in an expression".to_owned()
        }
        [] if arguments.is_empty() => format!(
            "text is \"{name}\", in quotes, and arguments without a name are arg0, arg1, ..."
        ),
        [] => format!("{arguments}; text is \"{name}\", in quotes"),
        near => format!("did you mean {}?", near.join(" or ")),
    }
}

fn missing_at(before: Option<&str>) -> String {
    match before {
        None => "at the end".to_owned(),
        Some(before) => format!("before {before}"),
    }
}

fn known(point: &str, has: usize) -> String {
    match has {
        0 => ": it has no arguments".to_owned(),
        1 => ": it has arg0 only".to_owned(),
        2 => ": it has arg0 and arg1".to_owned(),
        // It may have more.
        MAX_ARGUMENTS if point.starts_with("function") => {
            format!(
                " that is known: at most arg0 to arg{} are",
                MAX_ARGUMENTS - 1
            )
        }
        has => format!(": it has arg0 to arg{}", has - 1),
    }
}
