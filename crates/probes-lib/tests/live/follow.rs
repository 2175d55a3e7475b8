//! Following, from the process that started the followed program.

use std::os::unix::process::ExitStatusExt;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use probes_lib::{Action, Actions, FollowEvent, Options, Selector, Target, follow};
use test_support::{Talker, eventually, fixture_forms};

/// Follows a program while `scenario` runs; returns the events in the words of `Debug`, without
/// their fields.
fn followed(talker: &mut Talker, scenario: impl FnOnce(&mut Talker, &AtomicBool)) -> Vec<String> {
    let target = Target::open(talker.pid()).unwrap();
    let (is_over, events) = (AtomicBool::new(false), Mutex::new(Vec::new()));
    let actions = Actions::of(Action::Enable, Selector::All);
    std::thread::scope(|scope| {
        let following = scope.spawn(|| {
            let mut tell = |event: FollowEvent| {
                let event = format!("{event:?}");
                let word = event.split([' ', '(']).next().unwrap_or_default();
                events.lock().unwrap().push(word.to_owned());
            };
            let is_over = || is_over.load(Ordering::Relaxed);
            follow(&[target], &actions, Options::default(), &mut tell, &is_over)
        });
        eventually("it is followed", || {
            (!events.lock().unwrap().is_empty()).then_some(())
        });
        scenario(talker, &is_over);
        following.join().unwrap().unwrap();
    });
    events.into_inner().unwrap()
}

// promise: Following: The exit status of a followed child of our own process is left to the code
//    that waits for it (4)
#[test]
fn status_of_our_own_child_is_not_consumed() {
    for family in fixture_forms("family") {
        for is_killed in [false, true] {
            let mut talker = Talker::start(&family);
            let events = followed(&mut talker, |talker, _| {
                assert_eq!(talker.ask("fork", "child"), "child hits ping=3 pong=1");
                talker.expect("started 0");
                if is_killed {
                    kill(Pid::from_raw(talker.pid()), Signal::SIGKILL).unwrap()
                } else {
                    talker.send("quit")
                }
            });
            // It has returned, as no process is left.
            assert_eq!(events, ["Set", "Forked", "Ended", "Ended"]);
            let status = talker.guard().wait();
            let expected = if is_killed {
                (None, Some(Signal::SIGKILL as i32))
            } else {
                (Some(0), None)
            };
            assert_eq!((status.code(), status.signal()), expected);
        }
    }
}

#[test]
fn own_child_runs_on_when_following_ends() {
    for family in fixture_forms("family") {
        let mut talker = Talker::start(&family);
        followed(&mut talker, |_, is_over| {
            is_over.store(true, Ordering::Relaxed)
        });
        assert!(!test_support::process::is_loader_changed(talker.pid()));
        assert_eq!(talker.ask("fork", "child"), "child hits ping=3 pong=1");
        talker.expect("started 0");
        talker.send("quit");
        assert_eq!(talker.guard().wait().code(), Some(0));
    }
}
