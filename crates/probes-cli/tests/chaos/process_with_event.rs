//! [`ProcessWithEvent`]: a process that is killed, exits or execs just before a system call of the tool.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use probes_lib::faults;
use test_support::process::processes;
use test_support::{Talker, eventually};

use crate::subject::Subject;

/// What happens to the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Event {
    Kill,
    Exit,
    Exec,
}

/// A process to which something happens.
pub(crate) struct ProcessWithEvent {
    pub(crate) pid: i32,
    event: Event,
    talker: Arc<Mutex<Talker>>,
}

impl ProcessWithEvent {
    pub(crate) fn of(subject: Subject, event: Event) -> ProcessWithEvent {
        ProcessWithEvent {
            pid: subject.pid(),
            event,
            talker: Arc::new(Mutex::new(subject.talker)),
        }
    }

    /// Makes the event happen before the nth system call of `run`; returns the result of `run`, and how many calls it made.
    pub(crate) fn run_with_event_before<T>(
        &self,
        nth: usize,
        run: impl FnOnce() -> T,
    ) -> (T, usize) {
        let (pid, event, talker) = (self.pid, self.event, Arc::clone(&self.talker));
        let send = move |line: &str| locked(&talker).send(line);
        faults::arm_event(nth, move || match event {
            Event::Kill => kill(Pid::from_raw(pid), Signal::SIGKILL).unwrap(),
            Event::Exit => send("quit"),
            Event::Exec => send("exec"),
        });
        let result = run();
        (result, faults::disarm().calls.len())
    }

    pub(crate) fn talker(&self) -> MutexGuard<'_, Talker> {
        locked(&self.talker)
    }

    /// Makes the process exit, and asserts that it was killed if [`Event::Kill`] `has_happened`, or else exited with success.
    pub(crate) fn end(&self, has_happened: bool, what: &str) {
        let mut talker = self.talker();
        talker.close_input();
        let status = talker.guard().wait();
        let is_killed = self.event == Event::Kill && has_happened;
        assert_eq!(status.success(), !is_killed, "{what}: {status}");
        assert_gone(self.pid);
    }
}

fn locked(talker: &Mutex<Talker>) -> MutexGuard<'_, Talker> {
    talker.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Asserts that there is no process with this pid, and no zombie.
pub(crate) fn assert_gone(pid: i32) {
    eventually("the process is gone", || {
        (!processes().contains(&pid)).then_some(())
    });
}
