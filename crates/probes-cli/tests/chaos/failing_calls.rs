//! Every call that an update makes fails in turn, with every error that it can give, alone or with
//! every call after it: the process is changed, or unchanged, or the error says in what state it
//! is.

use std::path::PathBuf;
use std::time::Duration;

use probes_lib::faults::{self, Record};
use probes_lib::{Action, Effect, Error, Options, Report, State};
use test_support::process::{Image, settle};
use test_support::{fixture_forms, program_forms};

use crate::case::Case;
use crate::subject::{Subject, after, all};

/// A tracee that is reported as gone is waited for in vain, so keep it short.
const DEADLINE: Duration = Duration::from_millis(200);

/// What fails, and whether restoring can work.
const SCRIPTS: [(&str, bool); 5] = [
    ("error", true),
    ("errors-write", false),
    ("error-within", true),
    ("errors-within", false),
    ("errors", false),
];

/// Which of its memory does not change by itself.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Rest {
    /// All: it waits for a line.
    Idle,
    /// Code and counters: its threads never pause.
    Busy,
}

/// One update with a fault, after which the process is checked.
struct Round<'s> {
    subject: &'s mut Subject,
    rest: Rest,
    action: Action,
    live: bool,
    script: String,
    can_restore: bool,
}

impl Round<'_> {
    fn image(&self) -> Image {
        if self.rest == Rest::Idle {
            settle(self.subject.pid());
        }
        Image::of(self.subject.pid())
    }

    /// Returns the calls that were made.
    fn make(mut self, case: &mut Case) -> Record {
        let before = self.image();
        let options = Options {
            deadline: DEADLINE,
            live: self.live,
            ..Options::default()
        };
        faults::arm(&self.script);
        let result = self.subject.try_apply(&all(self.action), options);
        let record = faults::disarm();
        self.subject.assert_released();
        let what = format!(
            "{} {:?} of {}, live {}: {record}: {}",
            self.script,
            self.action,
            self.subject.file.display(),
            self.live,
            match &result {
                Ok(_) => "done".to_owned(),
                Err(error) => error.to_string(),
            }
        );
        let kind = self.judge(&before, result, &what);
        if record.failed.is_some() {
            case.count(format!("calls failed: {kind}"));
        }
        record
    }

    fn judge(&mut self, before: &Image, result: Result<Report, Error>, what: &str) -> &'static str {
        let after = self.image();
        let undo = match self.action {
            Action::Enable => Action::Disable,
            Action::Disable => Action::Enable,
        };
        match result.map_err(|error| error.effect()) {
            Ok(_) => {
                let expected = self.subject.switched(before, self.action);
                self.assert_same(&after, &expected, what);
                self.assert_hit(self.action, what);
                self.subject.apply(&all(undo));
                "done nevertheless"
            }
            Err(Effect::HalfChanged) => {
                assert!(!self.can_restore, "{what}");
                // `states` compares what the process says itself with the bytes.
                let states = self.subject.states();
                let is_half = states
                    .values()
                    .any(|(_, state)| *state == State::Inconsistent);
                if is_half {
                    let error = self
                        .subject
                        .try_apply(&all(self.action), Options::default());
                    assert!(
                        error.is_err(),
                        "{what}: another update succeeds as if nothing were wrong"
                    );
                }
                self.subject.force(undo);
                if is_half {
                    "half changed"
                } else {
                    "may be half changed"
                }
            }
            Err(effect) => {
                self.assert_same(&after, before, what);
                self.assert_hit(undo, what);
                match effect {
                    Effect::Restored => "restored",
                    Effect::NothingChanged => "nothing changed",
                    _ => "said to have exited",
                }
            }
        }
    }

    fn assert_same(&self, found: &Image, expected: &Image, what: &str) {
        match self.rest {
            Rest::Idle => found.assert_same(expected, what),
            Rest::Busy => {
                found.text().assert_same(&expected.text(), what);
                let (found, expected) = (
                    self.subject.truth_of(found),
                    self.subject.truth_of(expected),
                );
                assert_eq!(found, expected, "{what}");
            }
        }
    }

    /// The process runs on, and runs its handlers or not.
    fn assert_hit(&mut self, state: Action, what: &str) {
        if self.rest == Rest::Idle {
            let hits = self.subject.run();
            assert_eq!(hits > 0, state == Action::Enable, "{what}: {hits} hits");
        } else {
            self.subject.talker.ask("counters", "sem");
        }
    }
}

/// Makes the first call fail, the second, and so on, until an update makes fewer.
fn sweep(case: &mut Case, subject: &mut Subject, rest: Rest, action: Action, live: bool) {
    // If threads never pause, everything takes long.
    let few = rest == Rest::Busy && !case.is_long();
    for &(what, can_restore) in &SCRIPTS[..if few { 2 } else { SCRIPTS.len() }] {
        for nth in 1.. {
            let mut calls = 0;
            for error in 0.. {
                let round = Round {
                    subject,
                    rest,
                    action,
                    live,
                    script: format!("{what}:{nth}:#{error}"),
                    can_restore,
                };
                let record = round.make(case);
                calls = match what {
                    "error" | "errors" => record.calls.len(),
                    _ => record.calls.iter().filter(|call| call.is_write()).count(),
                };
                // What fails from then on fails with the first error of each; and where a write was
                // cut short, the reason does not matter.
                if record.failed.is_none()
                    || !(case.is_long() || matches!(what, "error" | "errors-write"))
                {
                    break;
                }
            }
            // The number of calls that wait for a tracee varies.
            if calls < nth {
                break;
            }
        }
    }
}

fn sweep_all(case: &mut Case, files: impl IntoIterator<Item = PathBuf>, rest: Rest) {
    let args: &[&str] = match rest {
        Rest::Idle => &[],
        Rest::Busy => &["2"],
    };
    for (number, file) in files.into_iter().enumerate() {
        if number > 0 && case.is_long() && !case.has_time() {
            break;
        }
        let mut subject = Subject::start(&file, args);
        // Without a stop fewer calls are made.
        let lives = [false, true].into_iter();
        for live in lives.take(if case.is_long() || number % 2 == 0 {
            2
        } else {
            1
        }) {
            sweep(case, &mut subject, rest, Action::Enable, live);
            subject.apply(&all(Action::Enable));
            sweep(case, &mut subject, rest, Action::Disable, live);
            subject.assert_all(after(Action::Enable), "at the end");
            subject.apply(&all(Action::Disable));
        }
        if rest == Rest::Busy {
            subject.wait_for_round();
        }
        subject.end();
    }
}

// promise: All or nothing: If a system call of an update fails, the process is changed, unchanged,
//    or the error says that it is half changed (about 5,000 failed calls, each alone with every
//    error it can give)
#[test]
fn every_failing_call_leaves_a_known_idle_process() {
    let mut case = Case::begin("failing calls, idle process", 15);
    let mut files: Vec<PathBuf> = fixture_forms("multi_semaphore").into();
    files.extend(program_forms("twolibs"));
    if case.is_long() {
        files.extend(
            ["segments", "page_borders", "gen_ocaml_2"]
                .map(fixture_forms)
                .into_iter()
                .flatten(),
        );
        files.extend(program_forms("many"));
    }
    let mut sweeps = 0;
    while case.is_due(sweeps, 1) {
        sweep_all(&mut case, files.clone(), Rest::Idle);
        sweeps += 1;
    }
    assert!(case.counted("calls failed: restored") > 0);
    assert!(case.counted("calls failed: half changed") > 0);
}

// promise: All or nothing: If a system call of an update fails under busy threads, they run on, and
//    the error names the state (about 1,100 failed calls)
#[test]
fn every_failing_call_leaves_a_known_busy_process() {
    let mut case = Case::begin("failing calls, busy process", 10);
    let mut sweeps = 0;
    while case.is_due(sweeps, 1) {
        sweep_all(&mut case, fixture_forms("threads_spin"), Rest::Busy);
        sweeps += 1;
    }
}
