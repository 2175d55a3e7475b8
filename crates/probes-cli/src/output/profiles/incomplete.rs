//! [`IncompleteStacks`]: how much of the time in an answer is of stacks that are cut or guessed, and why.

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
    /// The thread waited: its registers are not known, as it was not stopped for them.
    NoRegisters,
    /// Something in the program.
    Program,
}

/// The stacks in an answer that are cut or guessed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct IncompleteStacks {
    /// How much of the time in the answer is theirs.
    pub(crate) percent: f64,
    /// Why most of that is.
    pub(crate) because: IncompleteBecause,
}

impl StackTimes {
    fn incomplete_because(&self) -> Option<IncompleteBecause> {
        match (self.stack, self.end) {
            (StackQuality::Complete | StackQuality::Unread, _) => None,
            // The return address of a running thread was below its stack pointer.
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
        let incomplete = time(&|it| it.incomplete_because().is_some());
        let percent = 100.0 * incomplete / all.max(1e-9);
        let reasons = [
            IncompleteBecause::NotCopied,
            IncompleteBecause::NoRegisters,
            IncompleteBecause::Program,
        ];
        let of = |because| time(&|it| it.incomplete_because() == Some(because));
        let mut by_time = reasons.map(|because| (of(because), because));
        by_time.sort_by(|(one, _), (other, _)| other.total_cmp(one));
        let because = by_time[0].1;
        (percent >= MIN_PERCENT).then_some(IncompleteStacks { percent, because })
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::time::Duration;

    use probes_lib::{Activity, LiveAddr, ProfiledStack};

    use super::super::tests::{OPTIONS, profile, stack};
    use super::*;

    fn found(stacks: Vec<ProfiledStack>, is_on_cpu: bool) -> Option<(f64, IncompleteBecause)> {
        let how = super::super::ProfileOptions {
            is_on_cpu,
            ..OPTIONS
        };
        let is_wanted = |activity| !is_on_cpu || activity == Activity::Running;
        let report = ProfileReport::new(
            1,
            Path::new("/srv/server"),
            &profile(stacks),
            how,
            is_wanted,
        );
        let found = report.incomplete_stacks()?;
        Some((found.percent, found.because))
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
        let stacks = vec![guessed, of(400, StackEnd::UnknownCode(code))];
        assert_eq!(found(stacks, false), Some((100.0, NotCopied)));
        let guessed_wait = ProfiledStack {
            is_guessed: true,
            ..waits
        };
        assert_eq!(found(vec![guessed_wait], false), Some((100.0, NoRegisters)));
        assert_eq!(found(Vec::new(), false), None);
    }
}
