//! [`TimeRange`]: what an expression asks of `elapsed`, the time of a pair or call, which is known where that ends. The
//! rest of the expression is asked where it begins.

use std::time::Duration;

use super::lexer::{Operator, Wrong};
use super::problem::ExpressionProblem as Problem;
use super::syntax::{Node, NodeKind};
use super::typed::Relation;

/// Times from one to another. `elapsed > 10ms && elapsed <= 1s` is one; times are whole nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TimeRange {
    /// The least one.
    pub(crate) from: Duration,
    /// The least one that is longer than all of them.
    pub(crate) until: Duration,
}

impl TimeRange {
    const ALL: TimeRange = TimeRange {
        from: Duration::ZERO,
        until: Duration::from_nanos(u64::MAX),
    };

    /// Returns whether a time is one of them.
    #[cfg(test)]
    pub(crate) fn contains(self, time: Duration) -> bool {
        (self.from..self.until).contains(&time)
    }

    /// Returns those of the times that are in this relation to another one; `None` for `==` and `!=`, which are not
    /// asked of times.
    fn only(self, relation: Relation, nanoseconds: u64) -> Option<TimeRange> {
        let time = Duration::from_nanos(nanoseconds);
        let next = Duration::from_nanos(nanoseconds.saturating_add(1));
        let (from, until) = match relation {
            Relation::Less => (Duration::ZERO, time),
            Relation::AtMost => (Duration::ZERO, next),
            Relation::Greater => (next, TimeRange::ALL.until),
            Relation::AtLeast => (time, TimeRange::ALL.until),
            Relation::Equal | Relation::NotEqual => return None,
        };
        let from = self.from.max(from);
        Some(TimeRange {
            from,
            until: self.until.min(until).max(from),
        })
    }
}

/// Separates the comparisons of `elapsed` from the rest of a tree. Returns the rest, if there is any, and the range of
/// times, if there are such comparisons.
pub(super) fn split(tree: &Node) -> Result<(Option<Node>, Option<TimeRange>), Wrong> {
    if !tree.has_name(NAME) {
        return Ok((Some(tree.clone()), None));
    }
    let mut times = TimeRange::ALL;
    let rest = without_times(tree, &mut times)?;
    Ok((rest, Some(times)))
}

/// What the time is called in expressions.
pub(super) const NAME: &str = "elapsed";

/// Returns a tree without its comparisons of `elapsed`, each of which narrows `times`; `None` if nothing is left.
fn without_times(node: &Node, times: &mut TimeRange) -> Result<Option<Node>, Wrong> {
    if !node.has_name(NAME) {
        return Ok(Some(node.clone()));
    }
    let wrong = || (node.place.clone(), Problem::ElapsedElsewhere);
    let NodeKind::Binary(operator, left, right) = &node.kind else {
        return Err(wrong());
    };
    let compared = match (operator, &left.kind, &right.kind) {
        (Operator::And, ..) => {
            let (left, right) = (without_times(left, times)?, without_times(right, times)?);
            return Ok(match (left, right) {
                (Some(left), Some(right)) => Some(Node {
                    kind: NodeKind::Binary(Operator::And, Box::new(left), Box::new(right)),
                    ..node.clone()
                }),
                (left, right) => left.or(right),
            });
        }
        (Operator::Compare(relation), NodeKind::Name(_), NodeKind::Time(time)) => {
            times.only(*relation, *time)
        }
        (Operator::Compare(relation), NodeKind::Time(time), NodeKind::Name(_)) => {
            times.only(relation.reversed(), *time)
        }
        _ => None,
    };
    *times = compared.ok_or_else(wrong)?;
    Ok(None)
}
