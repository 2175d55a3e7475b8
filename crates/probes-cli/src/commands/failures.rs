//! [`Failures`]: what failed for some of several processes.

use crate::failure::Failure;
use crate::flags::TargetSelection;
use crate::say::Messages;

/// Which of several processes failed; the failure of a single one is that of the command.
pub(super) struct Failures {
    total: usize,
    /// Whether messages and answers say which process they are about.
    several: bool,
    messages: Messages,
    list: Vec<Failure>,
}

impl Failures {
    /// Processes that a name selects are several even if it is one: what is printed has one form.
    pub(super) fn new(selection: &TargetSelection, total: usize, messages: Messages) -> Failures {
        Failures {
            total,
            several: total > 1 || selection.is_by_name(),
            messages,
            list: Vec::new(),
        }
    }

    /// Whether messages and answers say which process they are about.
    pub(super) fn several(&self) -> bool {
        self.several
    }

    /// The messages about one of the processes.
    pub(super) fn messages(&self, pid: i32) -> Messages {
        if self.several {
            self.messages.about(pid)
        } else {
            self.messages
        }
    }

    /// Records a failure. One of several is reported at once, because the others may take long.
    pub(super) fn add(&mut self, pid: i32, failure: Failure) {
        if self.several {
            self.messages(pid).failure(&failure);
        }
        self.list.push(failure);
    }

    /// Records an error, or returns what there is without one.
    pub(super) fn record<T>(&mut self, pid: i32, result: probes_lib::Result<T>) -> Option<T> {
        match result {
            Ok(result) => Some(result),
            Err(error) => {
                self.add(pid, Failure::of_process(pid)(error));
                None
            }
        }
    }

    /// Fails if one has failed; `others` says what became of the others, if there are any.
    pub(super) fn finish(&mut self, others: &'static str) -> Result<(), Failure> {
        let all_failed = self.list.len() >= self.total;
        self.finish_all(if all_failed { "" } else { others })
    }

    /// Fails if one has failed; `rest` says what became of all.
    pub(super) fn finish_all(&mut self, rest: &'static str) -> Result<(), Failure> {
        match self.list.len() {
            0 => Ok(()),
            1 if !self.several => Err(self.list.remove(0)),
            failed => Err(Failure::Several {
                failed,
                total: self.total,
                rest,
            }),
        }
    }
}
