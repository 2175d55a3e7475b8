//! [`Failures`]: what could not be done to some of several processes.

use super::{Failure, Subject};
use crate::messages::Messages;
use crate::request::Whom;

/// What could not be done to some of several processes; of one alone it is the failure of all.
pub(super) struct Failures {
    total: usize,
    /// Whether it is to be said which process something is about.
    several: bool,
    messages: Messages,
    list: Vec<Failure>,
}

impl Failures {
    /// Those picked by a name are several even if it is one: what is printed has one form.
    pub(super) fn of(whom: &Whom, total: usize, messages: Messages) -> Failures {
        Failures {
            total,
            several: total > 1 || whom.name.is_some(),
            messages,
            list: Vec::new(),
        }
    }

    /// Whether it is to be said which process something is about.
    pub(super) fn several(&self) -> bool {
        self.several
    }

    /// Says things of one of the processes.
    pub(super) fn messages(&self, pid: i32) -> Messages {
        match self.several() {
            true => self.messages.about(pid),
            false => self.messages,
        }
    }

    /// Of several, each is told at once: it may be long until all is over.
    pub(super) fn add(&mut self, pid: i32, failure: Failure) {
        if self.several() {
            let messages = self.messages(pid);
            messages.error(&failure.to_string(), failure.hint());
        }
        self.list.push(failure);
    }

    /// What has come out of it, if it could be done.
    pub(super) fn but<T>(&mut self, pid: i32, result: probes_lib::Result<T>) -> Option<T> {
        match result {
            Ok(result) => Some(result),
            Err(error) => {
                self.add(pid, Failure::Target(Subject::Process(pid), error));
                None
            }
        }
    }

    /// Fails if one has; `others` says what became of the others, if there are any.
    pub(super) fn end(&mut self, others: &'static str) -> Result<(), Failure> {
        let rest = match self.list.len() < self.total {
            true => others,
            false => "",
        };
        self.end_with(rest)
    }

    /// Fails if one has; `rest` says what became of all.
    pub(super) fn end_with(&mut self, rest: &'static str) -> Result<(), Failure> {
        match self.list.len() {
            0 => Ok(()),
            1 if !self.several() => Err(self.list.remove(0)),
            failed => Err(Failure::Several {
                failed,
                total: self.total,
                rest,
            }),
        }
    }
}
