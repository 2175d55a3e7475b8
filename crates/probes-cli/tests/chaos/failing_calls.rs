//! Every system call that an update makes is made to fail in turn, with every error that it can
//! return: either this call alone, or this call and every later one. Afterwards, the process is
//! changed or unchanged, or the error says in what state the process is.

use std::path::PathBuf;
use std::time::Duration;

use probes_lib::faults::{self, FaultRecord};
use probes_lib::{Action, Effect, Error, Options, Report, State};
use test_support::process::{Image, settle};
use test_support::{fixture_forms, program_forms};

use crate::case::Case;
use crate::subject::{Subject, all, state_after};

/// The time limit of an update. It is short, because an update waits until then for a tracee that an
/// injected error reports as gone.
const DEADLINE: Duration = Duration::from_millis(200);

/// What fails (see probes-lib, faults.rs), and whether restoring can work: `error` is one call, `errors`
/// that call and every later one; with `-write` only writes are counted and fail, with `-within` after
/// half of a write.
const SCRIPTS: [(&str, bool); 5] = [
    ("error", true),
    ("errors-write", false),
    ("error-within", true),
    ("errors-within", false),
    ("errors", false),
];

/// What the process does during a round, which decides what part of its memory stays the same.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Activity {
    /// All of its memory stays the same: it waits for a line of input.
    Idle,
    /// Only its code and counters stay the same: its threads never pause.
    Busy,
}

/// One update with a fault, after which the process is checked.
struct Round<'s> {
    subject: &'s mut Subject,
    activity: Activity,
    action: Action,
    live: bool,
    script: String,
    can_restore: bool,
}

impl Round<'_> {
    fn image(&self) -> Image {
        if self.activity == Activity::Idle {
            settle(self.subject.pid());
        }
        Image::of(self.subject.pid())
    }

    /// Runs it; returns the calls that were made.
    fn run(mut self, case: &mut Case) -> FaultRecord {
        let before = self.image();
        let options = Options {
            time_limit: DEADLINE,
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
        let kind = self.check_outcome(&before, result, &what);
        if record.first_failed.is_some() {
            case.count(format!("calls failed: {kind}"));
        }
        record
    }

    fn check_outcome(
        &mut self,
        before: &Image,
        result: Result<Report, Error>,
        what: &str,
    ) -> &'static str {
        let after = self.image();
        let undo = match self.action {
            Action::Enable => Action::Disable,
            Action::Disable => Action::Enable,
        };
        match result.map_err(|error| error.effect()) {
            Ok(_) => {
                let expected = self.subject.switched(before, self.action);
                self.assert_same(&after, &expected, what);
                self.assert_runs_on(self.action, what);
                self.subject.apply(&all(undo));
                "done nevertheless"
            }
            Err(Effect::HalfChanged) => {
                assert!(!self.can_restore, "{what}");
                // `states` compares what the process itself reports with the bytes in its memory.
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
                self.assert_runs_on(undo, what);
                match effect {
                    Effect::Restored => "restored",
                    Effect::NothingChanged => "nothing changed",
                    _ => "reported as exited",
                }
            }
        }
    }

    fn assert_same(&self, found: &Image, expected: &Image, what: &str) {
        match self.activity {
            Activity::Idle => found.assert_same(expected, what),
            Activity::Busy => {
                found.text().assert_same(&expected.text(), what);
                let (found, expected) = (
                    self.subject.states_in(found),
                    self.subject.states_in(expected),
                );
                assert_eq!(found, expected, "{what}");
            }
        }
    }

    /// Asserts that the process runs on, and, if it is idle, that handlers run only if the `last` update
    /// was `Enable`.
    fn assert_runs_on(&mut self, last: Action, what: &str) {
        if self.activity == Activity::Idle {
            let hits = self.subject.run();
            assert_eq!(hits > 0, last == Action::Enable, "{what}: {hits} hits");
        } else {
            self.subject.talker.ask("counters", "sem");
        }
    }
}

/// Makes the first call of an update fail, then the second of another update, and so on, until an
/// update makes fewer calls than that.
fn sweep(case: &mut Case, subject: &mut Subject, activity: Activity, action: Action, live: bool) {
    // If threads never pause, each update takes long.
    let few = activity == Activity::Busy && !case.is_long();
    for &(fault, can_restore) in &SCRIPTS[..if few { 2 } else { SCRIPTS.len() }] {
        for nth in 1.. {
            let mut calls = 0;
            for error in 0.. {
                let round = Round {
                    subject,
                    activity,
                    action,
                    live,
                    script: format!("{fault}:{nth}:#{error}"),
                    can_restore,
                };
                let record = round.run(case);
                calls = match fault {
                    "error" | "errors" => record.calls.len(),
                    _ => record.calls.iter().filter(|call| call.is_write()).count(),
                };
                // In the short form, only the first error is tried if all later calls fail too or if a
                // write is cut short.
                if record.first_failed.is_none()
                    || !(case.is_long() || matches!(fault, "error" | "errors-write"))
                {
                    break;
                }
            }
            // An update that makes fewer calls than that ends the sweep. The number of calls
            // varies, because some of them wait for tracees.
            if calls < nth {
                break;
            }
        }
    }
}

fn sweep_all(case: &mut Case, files: impl IntoIterator<Item = PathBuf>, activity: Activity) {
    let args: &[&str] = match activity {
        Activity::Idle => &[],
        Activity::Busy => &["2"],
    };
    for (number, file) in files.into_iter().enumerate() {
        if number > 0 && case.is_long() && !case.has_time() {
            break;
        }
        let mut subject = Subject::start(&file, args);
        // In the short form, only every second file is also updated without a stop (live), which
        // makes fewer calls.
        let live_modes = [false, true].into_iter();
        for live in live_modes.take(if case.is_long() || number % 2 == 0 {
            2
        } else {
            1
        }) {
            sweep(case, &mut subject, activity, Action::Enable, live);
            subject.apply(&all(Action::Enable));
            sweep(case, &mut subject, activity, Action::Disable, live);
            subject.assert_all(state_after(Action::Enable), "at the end");
            subject.apply(&all(Action::Disable));
        }
        if activity == Activity::Busy {
            subject.wait_for_round();
        }
        subject.end();
    }
}

// promise: All or nothing: If a system call of an update fails, the process is changed, unchanged,
//    or the error says that it is half changed (about 5,000 failed calls: each call
//    alone, with every error that it can give)
#[test]
fn failing_calls_leave_idle_process_in_known_state() {
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
    while case.has_another_round(sweeps, 1) {
        sweep_all(&mut case, files.clone(), Activity::Idle);
        sweeps += 1;
    }
    assert!(case.counted("calls failed: restored") > 0);
    assert!(case.counted("calls failed: half changed") > 0);
}

// promise: All or nothing: If a system call of an update fails under busy threads, they run on, and
//    the error names the state (about 1,100 failed calls)
#[test]
fn failing_calls_leave_busy_process_in_known_state() {
    let mut case = Case::begin("failing calls, busy process", 10);
    let mut sweeps = 0;
    while case.has_another_round(sweeps, 1) {
        sweep_all(&mut case, fixture_forms("threads_spin"), Activity::Busy);
        sweeps += 1;
    }
}
