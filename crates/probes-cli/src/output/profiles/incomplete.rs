//! [`IncompleteStacks`]: how much of the time in an answer is of stacks that are cut or guessed, and why.

use std::fmt;

use probes_lib::StackEnd;

use super::{ProfileReport, StackTimes};
use crate::output::stack_quality::StackQuality;

/// Less rounds to 0.0 %.
const MIN_PERCENT: f64 = 0.05;

/// Why stacks are not complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum IncompleteBecause {
    /// The kernel copies only the innermost part of a stack for a sample.
    NotCopied,
    /// The thread waited: its registers are not known, because it was not stopped to read them.
    NoRegisters,
    /// Something in the program.
    Program,
}

/// The stacks in an answer that are cut or guessed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct IncompleteStacks {
    /// How much of the time in the answer is of stacks that are cut, in percent.
    pub(crate) cut: f64,
    /// The same of those that are guessed.
    pub(crate) guessed: f64,
    /// The reason of most of that time.
    pub(crate) because: IncompleteBecause,
}

impl fmt::Display for IncompleteStacks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parts = [(self.cut, "cut"), (self.guessed, "guessed")];
        let mut parts = parts.into_iter().filter(|(it, _)| *it >= MIN_PERCENT);
        if let Some((percent, what)) = parts.next() {
            write!(f, "{percent:.1} % of the time is of stacks that are {what}")?;
        }
        match parts.next() {
            Some((percent, what)) => write!(f, ", and {percent:.1} % of ones that are {what}"),
            None => Ok(()),
        }
    }
}

impl StackTimes {
    fn incomplete_because(&self) -> Option<IncompleteBecause> {
        match (self.stack, self.end) {
            (StackQuality::Complete | StackQuality::Unread, _) => None,
            // What a copy lacks was read later: frames of other stacks, or a return address below the stack pointer.
            (StackQuality::Guessed, _) if self.is_running => Some(IncompleteBecause::NotCopied),
            (StackQuality::Guessed, _) | (_, Some(StackEnd::UnknownRegister(_))) => {
                Some(IncompleteBecause::NoRegisters)
            }
            (_, Some(StackEnd::NotCopied)) => Some(IncompleteBecause::NotCopied),
            _ => Some(IncompleteBecause::Program),
        }
    }
}

impl ProfileReport {
    /// `None` if all stacks in the answer are complete, or nearly all.
    pub(crate) fn incomplete_stacks(&self) -> Option<IncompleteStacks> {
        let time = |is_meant: &dyn Fn(&StackTimes) -> bool| -> f64 {
            let stacks = self.stacks.iter().filter(|it| is_meant(it));
            stacks.map(|it| it.seconds).sum()
        };
        let all = time(&|_| true);
        let percent =
            |is_meant: &dyn Fn(&StackTimes) -> bool| 100.0 * time(is_meant) / all.max(1e-9);
        let guessed = percent(&|it| it.stack == StackQuality::Guessed);
        let cut = percent(&|it| it.incomplete_because().is_some()) - guessed;
        let reasons = [
            IncompleteBecause::NotCopied,
            IncompleteBecause::NoRegisters,
            IncompleteBecause::Program,
        ];
        let of = |because| time(&|it| it.incomplete_because() == Some(because));
        let mut by_time = reasons.map(|because| (of(because), because));
        by_time.sort_by(|(one, _), (other, _)| other.total_cmp(one));
        let because = by_time[0].1;
        (cut.max(guessed) >= MIN_PERCENT).then_some(IncompleteStacks {
            cut,
            guessed,
            because,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::time::Duration;

    use probes_lib::{Activity, LiveAddr, ProfiledStack};

    use super::super::tests::{OPTIONS, profile, stack};
    use super::*;

    fn report(stacks: Vec<ProfiledStack>, is_on_cpu: bool) -> ProfileReport {
        let how = super::super::ProfileOptions {
            is_on_cpu,
            ..OPTIONS
        };
        let is_wanted = |activity| !is_on_cpu || activity == Activity::Running;
        ProfileReport::new(
            1,
            Path::new("/srv/server"),
            &profile(stacks),
            how,
            is_wanted,
        )
    }

    fn found(stacks: Vec<ProfiledStack>, is_on_cpu: bool) -> Option<(f64, IncompleteBecause)> {
        let found = report(stacks, is_on_cpu).incomplete_stacks()?;
        Some((found.cut + found.guessed, found.because))
    }

    fn of(milliseconds: u64, end: StackEnd) -> ProfiledStack {
        ProfiledStack {
            end: Some(end),
            ..stack(Duration::from_millis(milliseconds), 0.0)
        }
    }

    #[test]
    fn incomplete_stacks_are_a_share_of_the_answer() {
        use IncompleteBecause::{NoRegisters, NotCopied, Program};
        let code = LiveAddr(0x1000);
        let waits = ProfiledStack {
            activity: Activity::Blocked(0),
            ..of(3000, StackEnd::Outermost)
        };
        let stacks = || {
            vec![
                of(500, StackEnd::NotCopied),
                of(500, StackEnd::Outermost),
                waits.clone(),
            ]
        };
        assert_eq!(found(stacks(), true), Some((50.0, NotCopied)));
        assert_eq!(found(stacks(), false), Some((12.5, NotCopied)));
        let cut_wait = ProfiledStack {
            end: Some(StackEnd::UnknownCode(code)),
            ..waits.clone()
        };
        let stacks = || vec![of(1000, StackEnd::Outermost), cut_wait.clone()];
        assert_eq!(found(stacks(), true), None);
        assert_eq!(found(stacks(), false), Some((75.0, Program)));
        let guessed = ProfiledStack {
            is_guessed: true,
            ..of(600, StackEnd::Outermost)
        };
        let stacks = || vec![guessed.clone(), of(400, StackEnd::UnknownCode(code))];
        assert_eq!(found(stacks(), false), Some((100.0, NotCopied)));
        let text = |stacks| {
            report(stacks, false)
                .incomplete_stacks()
                .unwrap()
                .to_string()
        };
        let both =
            "40.0 % of the time is of stacks that are cut, and 60.0 % of ones that are guessed";
        assert_eq!(text(stacks()), both);
        assert_eq!(
            text(vec![guessed.clone()]),
            "100.0 % of the time is of stacks that are guessed"
        );
        let guessed_wait = ProfiledStack {
            is_guessed: true,
            ..waits
        };
        assert_eq!(found(vec![guessed_wait], false), Some((100.0, NoRegisters)));
        assert_eq!(found(Vec::new(), false), None);
    }
}
