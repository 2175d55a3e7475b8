//! [`Expression`]: what is asked of each hit, such as `arg0 > 5 && arg1 == "GET"`. Pure.
//!
//! ```text
//! text ─▶ tree        expression/syntax.rs      with places, for messages
//!      ─▶ times       expression/times.rs       what it asks of the time of a pair or call, apart from the rest
//!      ─▶ filter      expression/types.rs       for one point, whose arguments are known
//!      or integer     expression/types.rs       the same for a number instead of a condition
//!      or key         expression/types.rs       the same for what hits are counted by (expression/keys.rs)
//!      ─▶ answer      expression/interpret.rs   true, false, a number, or untyped; the reference for compiled code
//! ```

pub(crate) mod interpret;
mod keys;
mod lexer;
mod problem;
mod syntax;
pub(crate) mod times;
pub(crate) mod typed;
mod types;

use std::ops::Range;
use std::str::FromStr;
use std::sync::Arc;

pub use self::interpret::{Answer, Hit};
pub use self::keys::Keys;
pub use self::problem::{BadExpression, ExpressionProblem};
use self::syntax::Node;
use self::times::TimeRange;
use self::typed::{KeyPart, MAX_REGISTERS};
pub use self::types::{Filter, IntegerExpression, Parameter, ParameterKind, Scope};

/// How many arguments of a hit are recorded at most, and of how many of a function it is known where they are.
pub(crate) const MAX_ARGUMENTS: usize = 6;

/// The longest expression, in bytes.
pub(crate) const MAX_LEN: usize = 4096;

/// How deep an expression may be nested.
pub(crate) const MAX_DEPTH: u32 = 64;

/// What is asked of a hit: a number or a string made of its arguments, or whether a condition is true.
///
/// What its names mean, and whether it makes sense, is known for a point only: [`Expression::filter`],
/// [`Expression::integer`].
///
/// ```
/// use probes_lib::{Answer, Expression, Hit, Parameter, ParameterKind, Scope};
///
/// struct Call(u64);
///
/// impl Hit for Call {
///     fn argument(&self, index: usize) -> Option<u64> {
///         (index == 0).then_some(self.0)
///     }
///
///     fn word_at(&self, _: u64) -> Option<u64> {
///         None
///     }
/// }
///
/// let expression: Expression = "arg0 >= 10 && arg0 < 0x20".parse()?;
/// let value = Parameter { name: None, kind: ParameterKind::Value };
/// let filter = expression.filter(&Scope::of("probe tick", "tick", vec![value]))?;
/// // As OCaml has them in registers.
/// let int = |number: u64| Call(number << 1 | 1);
/// assert_eq!(filter.answer(&int(16)), Answer::True);
/// assert_eq!(filter.answer(&int(32)), Answer::False);
/// assert_eq!(filter.answer(&Call(0x7f00_1234_5678)), Answer::Untyped);
/// # Ok::<(), probes_lib::BadExpression>(())
/// ```
#[derive(Clone, Debug)]
pub struct Expression {
    text: Arc<str>,
    tree: Arc<Node>,
}

impl Expression {
    /// Its text, as it was written.
    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// Returns whether it asks for something in memory that a value points to: a string, a field.
    pub(crate) fn asks_for_memory(&self) -> bool {
        self.tree.asks_for_memory()
    }

    /// Returns what it asks of the hits of a point, as something that is true or false.
    ///
    /// # Errors
    ///
    /// If it is a value, not true or false; if a name is unknown; if two values of different types are compared.
    #[doc(hidden)]
    pub fn filter(&self, scope: &Scope) -> Result<Filter, BadExpression> {
        let filter = types::filter(&self.tree, &self.text, scope);
        filter.map_err(|(place, problem)| BadExpression::new(&self.text, place, problem))
    }

    /// Returns the integer that it is at the hits of a point.
    ///
    /// ```
    /// use probes_lib::{Expression, Parameter, ParameterKind, Scope};
    ///
    /// let value = Parameter { name: Some("bytes".to_owned()), kind: ParameterKind::Value };
    /// let scope = Scope::of("probe reply", "reply", vec![value]);
    /// let kilobytes: Expression = "bytes >> 10".parse()?;
    /// assert!(kilobytes.integer(&scope)?.is_signed());
    /// let truth: Expression = "bytes > 10".parse()?;
    /// let error = truth.integer(&scope).unwrap_err();
    /// assert_eq!(error.to_string(), "bytes > 10 is a comparison, where an integer is needed");
    /// # Ok::<(), probes_lib::BadExpression>(())
    /// ```
    ///
    /// # Errors
    ///
    /// If it is something else: a float, a string, a time, true or false; or as [`Expression::filter`].
    #[doc(hidden)]
    pub fn integer(&self, scope: &Scope) -> Result<IntegerExpression, BadExpression> {
        let integer = types::integer(&self.tree, &self.text, scope);
        integer.map_err(|(place, problem)| BadExpression::new(&self.text, place, problem))
    }

    /// Same as [`Expression::integer`], where the hits have keys as well, which leave it one register less.
    ///
    /// # Errors
    ///
    /// Also if it calculates too many numbers at a time.
    pub(crate) fn integer_beside_keys(
        &self,
        scope: &Scope,
    ) -> Result<IntegerExpression, BadExpression> {
        let integer = self.integer(scope)?;
        if integer.number.registers() < MAX_REGISTERS {
            return Ok(integer);
        }
        Err(self.bad(ExpressionProblem::TooManyNumbers))
    }

    /// Returns where it asks for the time of a pair or call, which is known at its end only; `None` if it does not. The
    /// place is in bytes of the text.
    ///
    /// ```
    /// use probes_lib::Expression;
    ///
    /// let slow: Expression = "tid == 7 && elapsed > 10ms".parse()?;
    /// assert_eq!(slow.place_of_time(), Some(12..19));
    /// # Ok::<(), probes_lib::BadExpression>(())
    /// ```
    pub fn place_of_time(&self) -> Option<Range<usize>> {
        self.tree.place_of(times::NAME)
    }

    /// Returns an error about the whole expression.
    pub(crate) fn bad(&self, problem: ExpressionProblem) -> BadExpression {
        BadExpression::new(&self.text, 0..self.text.len(), problem)
    }

    /// Returns whether it asks for the thread of a hit.
    pub(crate) fn asks_for_thread(&self) -> bool {
        self.tree.has_name("tid")
    }

    /// Splits it into what it asks where a pair or call begins, if anything, and the range of times that it asks for,
    /// if it asks for time.
    ///
    /// # Errors
    ///
    /// If the time is used other than in comparisons that are joined to the rest by `&&`.
    pub(crate) fn split_times(
        &self,
    ) -> Result<(Option<Expression>, Option<TimeRange>), BadExpression> {
        let (rest, times) = times::split(&self.tree)
            .map_err(|(place, problem)| BadExpression::new(&self.text, place, problem))?;
        let rest = rest.map(|tree| Expression {
            text: self.text.clone(),
            tree: Arc::new(tree),
        });
        Ok((rest, times))
    }

    /// Returns whether it asks for the result of a function.
    pub(crate) fn asks_for_result(&self) -> bool {
        self.tree.has_name("retval")
    }

    /// Returns what it is as a key of the hits of a point.
    fn key(&self, scope: &Scope) -> Result<KeyPart, BadExpression> {
        let key = types::key(&self.tree, &self.text, scope);
        key.map_err(|(place, problem)| BadExpression::new(&self.text, place, problem))
    }
}

impl FromStr for Expression {
    type Err = BadExpression;

    fn from_str(text: &str) -> Result<Expression, BadExpression> {
        match syntax::parse(text) {
            Ok(tree) => Ok(Expression {
                text: text.into(),
                tree: Arc::new(tree),
            }),
            Err((place, problem)) => Err(BadExpression::new(text, place, problem)),
        }
    }
}

#[cfg(test)]
mod tests;
