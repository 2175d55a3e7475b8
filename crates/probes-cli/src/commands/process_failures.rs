//! [`ProcessFailures`]: what failed for the processes that a command works on.

use std::collections::HashSet;

use crate::failure::Failure;
use crate::flags::TargetSelection;
use crate::messages::Messages;

/// The end of the error message if only some processes could be observed.
pub(super) const OTHERS_WERE_OBSERVED: &str = "the others were observed";

/// The failures of the processes that a command works on. If it works on a single process, given by its
/// pid, the failure of that process is the failure of the command.
pub(super) struct ProcessFailures {
    total: usize,
    /// Whether messages and answers say which process they are about.
    shows_pid: bool,
    messages: Messages,
    /// The processes that were given by their pids: the others were selected by their names.
    given: Vec<i32>,
    /// The failures, each with its process. A process may have two: of a step, and of undoing it.
    list: Vec<(i32, Failure)>,
}

impl ProcessFailures {
    /// If processes are selected by name, the pid is shown even if there is only one, so that what is
    /// printed has the same form for any number of processes.
    pub(super) fn new(
        selection: &TargetSelection,
        total: usize,
        messages: Messages,
    ) -> ProcessFailures {
        ProcessFailures {
            total,
            shows_pid: total > 1 || selection.is_by_name(),
            messages,
            given: selection.given().to_vec(),
            list: Vec::new(),
        }
    }

    /// Of a command that works on a single process.
    pub(super) fn of_one(messages: Messages) -> ProcessFailures {
        ProcessFailures {
            total: 1,
            shows_pid: false,
            messages,
            given: Vec::new(),
            list: Vec::new(),
        }
    }

    /// The same, but messages name the process even if there is only one: others may come later.
    pub(super) fn of_any_number(self) -> ProcessFailures {
        ProcessFailures {
            shows_pid: true,
            ..self
        }
    }

    /// Counts one more process.
    pub(super) fn add_process(&mut self) {
        self.total += 1;
    }

    /// Whether messages and answers say which process they are about.
    pub(super) fn shows_pid(&self) -> bool {
        self.shows_pid
    }

    /// Returns the messages about one of the processes.
    pub(super) fn messages(&self, pid: i32) -> Messages {
        self.messages.about_one(pid, !self.shows_pid)
    }

    /// Records a failure. One of several is reported at once, because the others may take long.
    pub(super) fn add(&mut self, pid: i32, failure: Failure) {
        if self.shows_pid {
            self.messages(pid).failure(&failure);
        }
        self.list.push((pid, failure));
    }

    /// Returns the value of `result`, or records its failure and returns `None`.
    pub(super) fn record<T>(&mut self, pid: i32, result: Result<T, Failure>) -> Option<T> {
        result.map_err(|failure| self.add(pid, failure)).ok()
    }

    /// Same as [`ProcessFailures::record`], but a process that was selected by its name and has exited is no failure,
    /// and is not counted any more.
    pub(super) fn record_unless_exited<T>(
        &mut self,
        pid: i32,
        result: Result<T, Failure>,
    ) -> Option<T> {
        match result {
            Err(Failure::Target(_, error)) if error.is_gone() && !self.given.contains(&pid) => {
                self.total = self.total.saturating_sub(1);
                None
            }
            result => self.record(pid, result),
        }
    }

    /// Whether every process has failed.
    pub(super) fn are_of_all(&self) -> bool {
        self.failed() >= self.total
    }

    /// How many processes have failed.
    fn failed(&self) -> usize {
        let pids: HashSet<i32> = self.list.iter().map(|(pid, _)| *pid).collect();
        pids.len()
    }

    /// Fails if any process has failed; `others` says what became of the processes that have not
    /// failed, and is left out if there are none.
    pub(super) fn finish(&mut self, others: &'static str) -> Result<(), Failure> {
        self.finish_all(if self.are_of_all() { "" } else { others })
    }

    /// Same as [`ProcessFailures::finish`], but `outcome` says what became of all processes, and is used
    /// even if all have failed.
    pub(super) fn finish_all(&mut self, outcome: &'static str) -> Result<(), Failure> {
        if self.total == 0 {
            let note = "each process that was selected has exited: there is nothing to show";
            self.messages.note(note);
        }
        if self.shows_pid && !self.list.is_empty() {
            return Err(Failure::Several {
                failed: self.failed(),
                total: self.total,
                outcome,
            });
        }
        let last = self.list.pop();
        for (pid, failure) in &self.list {
            self.messages(*pid).failure(failure);
        }
        last.map_or(Ok(()), |(_, failure)| Err(failure))
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use probes_lib::Target;

    use super::*;
    use crate::flags::Checked;

    #[derive(Debug, Parser)]
    struct Flags {
        #[command(flatten)]
        selection: Checked<TargetSelection>,
    }

    #[test]
    fn only_exit_of_a_given_process_is_failure() {
        // Above the highest possible pid.
        const EXITED: i32 = i32::MAX;
        let of = |flags: &[&str]| {
            let words = ["test"].iter().chain(flags);
            let selection = Flags::try_parse_from(words).unwrap().selection;
            let mut failures = ProcessFailures::new(&selection, 1, Messages::default());
            let gone = Target::open_any(EXITED).map_err(Failure::of_process(EXITED));
            assert!(failures.record_unless_exited(EXITED, gone).is_none());
            failures.finish("").is_err()
        };
        assert!(!of(&["--name", "a"]));
        assert!(of(&["--pid", &EXITED.to_string()]));
        assert!(of(&["--name", "a", "--pid", &EXITED.to_string()]));
    }
}
