//! [`TimeBudget`]: how long something is tried again.

use std::time::{Duration, Instant};

/// In how many parts a budget is spent, at least.
const PARTS: u32 = 8;

/// A limit on the time in which something is tried again, counted in steps from one try to the next. A step counts for
/// an eighth of the limit at most: time passes also while this tool is stopped (SIGSTOP) or has no processor, and
/// in that time it has not tried.
pub(crate) struct TimeBudget {
    left: Duration,
    longest_step: Duration,
    last_try: Instant,
}

impl TimeBudget {
    pub(crate) fn new(limit: Duration) -> TimeBudget {
        TimeBudget {
            left: limit,
            // At least 1 ns, so that a limit of a few nanoseconds can be spent, too.
            longest_step: (limit / PARTS).max(Duration::from_nanos(1)),
            last_try: Instant::now(),
        }
    }

    /// Returns whether the limit has been reached; to be called after each try that has failed.
    pub(crate) fn is_spent(&mut self) -> bool {
        let now = Instant::now();
        let step = now.saturating_duration_since(self.last_try);
        self.last_try = now;
        self.spend(step)
    }

    fn spend(&mut self, step: Duration) -> bool {
        self.left = self.left.saturating_sub(step.min(self.longest_step));
        self.left.is_zero()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn short_steps_count_in_full() {
        let mut budget = TimeBudget::new(8 * SECOND);
        let steps = (1..).find(|_| budget.spend(SECOND / 2));
        assert_eq!(steps, Some(16));
    }

    #[test]
    fn one_long_step_spends_a_part() {
        let mut budget = TimeBudget::new(8 * SECOND);
        assert!(!budget.spend(3600 * SECOND));
        assert_eq!(budget.left, 7 * SECOND);
        let steps = (1..).find(|_| budget.spend(3600 * SECOND));
        assert_eq!(steps, Some(7));
    }

    #[test]
    fn budget_of_nothing_is_spent_at_once() {
        assert!(TimeBudget::new(Duration::ZERO).is_spent());
    }
}
