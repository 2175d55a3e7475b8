//! A process is stopped and resumed hundreds of times while its threads wait in system calls. Some of these calls fail
//! with `EINTR`; all others are restarted, and the program notices nothing.
//!
//! docs/eintr.md lists them for users; `INTERRUPTED` is the same list.

use std::collections::BTreeMap;

use probes_lib::Action;
use test_support::{Talker, eventually, fixture_forms, process, program_forms};

use crate::session::{Session, all};

const UPDATES: usize = 200;

/// The threads of `blocking_calls` whose call fails with `EINTR` when the thread is stopped. The kernel does that, and
/// no tool that stops threads can prevent it. signal(7) lists these calls, except `io_getevents` and `io_uring_enter`,
/// under "Interruption of system calls and library functions by stop signals".
const INTERRUPTED: [&str; 14] = [
    "accept_limited",
    "connect_limited",
    "epoll_pwait",
    "epoll_wait",
    "epoll_wait_for_ever",
    "epoll_wait_short",
    "io_getevents",
    "io_uring_enter",
    "recv_limited",
    "semop",
    "semtimedop",
    "send_limited",
    "sigtimedwait",
    "sigwaitinfo",
];

/// How often a call of one thread has returned, and why.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Returns {
    interrupted: usize,
    /// Before its timeout was over, or although nothing had happened that ends it.
    early: usize,
    /// Its timeout was over.
    timed_out: usize,
}

/// How each thread's call returned; `None` for those that this kernel does not allow.
fn report(session: &mut Session) -> BTreeMap<String, Option<Returns>> {
    let line = session.talker.ask("report", "report");
    let words = line.split_ascii_whitespace().skip(1);
    let one = |word: &str| {
        let (name, returns) = word.split_once('=').unwrap();
        let counts: Vec<usize> = returns.split('/').filter_map(|n| n.parse().ok()).collect();
        let returns = match counts[..] {
            [interrupted, early, timed_out] => Some(Returns {
                interrupted,
                early,
                timed_out,
            }),
            _ => {
                assert_eq!(returns, "unavailable");
                None
            }
        };
        (name.to_owned(), returns)
    };
    words.map(one).collect()
}

/// Waits until each thread has been seen waiting: an update tests only calls that are waiting.
fn let_all_wait(pid: i32) {
    let mut threads = process::threads(pid);
    eventually("every thread waits", || {
        threads.retain(|&tid| !process::status(tid, "State").starts_with('S'));
        threads.is_empty().then_some(())
    });
}

/// Updates a program again and again, each time when all of its threads wait; returns how their
/// calls returned.
fn update_while_all_wait(session: &mut Session) -> BTreeMap<String, Option<Returns>> {
    let pid = session.pid();
    for update in 0..UPDATES {
        let_all_wait(pid);
        let action = [Action::Enable, Action::Disable][update % 2];
        session.apply(&all(action)).unwrap();
    }
    let_all_wait(pid);
    report(session)
}

/// Asserts that exactly the calls for which `is_expected` is true were interrupted, and that no
/// call returned for a reason other than that or its timeout.
#[track_caller]
fn assert_interrupted(
    returns: &BTreeMap<String, Option<Returns>>,
    is_expected: impl Fn(&str) -> bool,
) {
    for (name, returns) in returns {
        let Some(returns) = returns else { continue };
        assert_eq!(
            returns.interrupted > 0,
            is_expected(name),
            "{name}: {returns:?}"
        );
        assert_eq!(returns.early, 0, "{name}: {returns:?}");
        // A call with a short timeout that is interrupted again and again may never reach its
        // timeout.
        let may_time_out = name.ends_with("_short");
        let must_time_out = may_time_out && returns.interrupted == 0;
        let is_right = if returns.timed_out > 0 {
            may_time_out
        } else {
            !must_time_out
        };
        assert!(is_right, "{name}: {returns:?}");
    }
}

// promise: Signals: A waiting system call is restarted, except for those that docs/eintr.md lists
//    (2 × 200 updates, 66 calls)
#[test]
fn interrupted_calls_are_exactly_the_documented_ones() {
    for file in fixture_forms("blocking_calls") {
        let mut session = Session::start(&file);
        let returns = update_while_all_wait(&mut session);
        assert_eq!(returns.len(), 66);
        assert_interrupted(&returns, |name| INTERRUPTED.contains(&name));
        for name in INTERRUPTED {
            assert!(returns.contains_key(name), "{name}");
        }
        session.end();
    }
}

// promise: Signals: A waiting call of OCaml's library is restarted, except for those that
//    docs/eintr.md lists (2 × 200 updates, 17 calls)
#[test]
fn only_recv_with_timeout_is_interrupted_in_ocaml() {
    for file in program_forms("waiting") {
        let mut session = Session::of(Talker::start(&file));
        let returns = update_while_all_wait(&mut session);
        assert_eq!(returns.len(), 17);
        assert_interrupted(&returns, |name| name == "recv_limited");
        session.end();
    }
}

// promise: Signals: With `-live`, no waiting call is interrupted (4 × 200 updates, 66 and 17 calls)
#[test]
fn without_a_stop_no_call_is_interrupted() {
    for file in fixture_forms("blocking_calls")
        .into_iter()
        .chain(program_forms("waiting"))
    {
        let mut session = Session::start(&file).live();
        let returns = update_while_all_wait(&mut session);
        assert_interrupted(&returns, |_| false);
        session.end();
    }
}

// promise: Signals: A signal keeps its information: sender, value, status, address, descriptor (2 ×
//    200 updates, 8 kinds of signals)
#[test]
fn signals_of_every_kind_keep_their_information() {
    for file in fixture_forms("siginfo") {
        let mut session = Session::start(&file);
        let counts = |session: &mut Session| -> BTreeMap<String, u64> {
            let line = session.talker.ask("report", "report");
            let words = line.split_ascii_whitespace();
            let counts = words.filter_map(|word| word.split_once('='));
            counts
                .map(|(name, count)| (name.to_owned(), count.parse().unwrap()))
                .collect()
        };
        let before = counts(&mut session);
        for update in 0..UPDATES {
            let action = [Action::Enable, Action::Disable][update % 2];
            session.apply(&all(action)).unwrap();
        }
        let mut after = counts(&mut session);
        assert_eq!(after.remove("wrong"), Some(0), "{after:?}");
        assert_eq!(after.len(), 8);
        for (kind, count) in &after {
            assert!(*count > before[kind], "{kind}: {before:?}, {after:?}");
        }
        session.end();
    }
}
