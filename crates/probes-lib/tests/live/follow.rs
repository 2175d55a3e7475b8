//! Following a program from the process that started it.

use std::os::fd::AsFd;
use std::os::unix::process::ExitStatusExt;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use probes_lib::{Action, Actions, Follow, FollowEvent, Options, Selector, Target};
use test_support::{DEADLINE, Talker, fixture_forms};

/// Follows a process, and enables all its probes.
fn follow(talker: &Talker) -> Follow {
    let target = Target::open_any(talker.pid()).unwrap();
    let actions = Actions::of(Action::Enable, Selector::All);
    Follow::start(vec![target], actions, Options::default()).unwrap()
}

/// The name of the next event, as `Debug` prints it; `None` if following is over.
fn next(follow: &Follow) -> Option<String> {
    let event = follow.next(DEADLINE);
    assert!(event.is_some() || follow.is_over(), "no event in time");
    let event = format!("{:?}", event?);
    let word = event.split([' ', '(']).next().unwrap_or_default();
    Some(word.to_owned())
}

fn is_readable(follow: &Follow, timeout: Duration) -> bool {
    let mut fds = [PollFd::new(follow.as_fd(), PollFlags::POLLIN)];
    poll(&mut fds, PollTimeout::try_from(timeout).unwrap()).unwrap() > 0
}

// promise: Following: The exit status of a followed child of our own process is left to the code
//    that waits for it (4)
#[test]
fn status_of_our_own_child_is_not_consumed() {
    for family in fixture_forms("family") {
        for is_killed in [false, true] {
            let mut talker = Talker::start(&family);
            let follow = follow(&talker);
            assert_eq!(talker.ask("fork", "child"), "child hits ping=3 pong=1");
            talker.expect("started 0");
            if is_killed {
                kill(Pid::from_raw(talker.pid()), Signal::SIGKILL).unwrap();
            } else {
                talker.send("quit");
            }
            // Following ends, because no process is left.
            let events: Vec<String> = std::iter::from_fn(|| next(&follow)).collect();
            assert_eq!(events, ["Set", "Forked", "Exited", "Exited"]);
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
    for (family, is_dropped) in fixture_forms("family").into_iter().zip([false, true]) {
        let mut talker = Talker::start(&family);
        let follow = follow(&talker);
        if is_dropped {
            drop(follow);
        } else {
            assert_eq!(next(&follow).as_deref(), Some("Set"));
            follow.stop();
            assert_eq!(next(&follow), None);
        }
        assert!(!test_support::process::is_loader_changed(talker.pid()));
        assert_eq!(talker.ask("fork", "child"), "child hits ping=3 pong=1");
        talker.expect("started 0");
        talker.send("quit");
        assert_eq!(talker.guard().wait().code(), Some(0));
    }
}

#[test]
fn descriptor_is_readable_while_events_wait_and_afterwards() {
    for family in fixture_forms("family") {
        let mut talker = Talker::start(&family);
        let follow = follow(&talker);
        assert!(is_readable(&follow, DEADLINE));
        assert_eq!(next(&follow).as_deref(), Some("Set"));
        assert!(follow.next(Duration::ZERO).is_none());
        assert!(!is_readable(&follow, Duration::ZERO) && !follow.is_over());
        talker.ask("fork", "child");
        assert!(is_readable(&follow, DEADLINE));
        talker.send("quit");
        while next(&follow).is_some() {}
        assert!(is_readable(&follow, Duration::ZERO));
        assert_eq!(talker.guard().wait().code(), Some(0));
    }
}

// promise: Following: A process that is killed while its probes are set has exited; that is no failure (2 × 100)
#[test]
fn kill_while_probes_are_set_is_no_failure() {
    for file in fixture_forms("exec_self") {
        for round in 0..100 {
            let mut talker = Talker::start(&file);
            let follow = follow(&talker);
            assert_eq!(next(&follow).as_deref(), Some("Set"));
            talker.send("exec");
            assert_eq!(next(&follow).as_deref(), Some("Executed"));
            // At another moment each time.
            let begun = Instant::now();
            while begun.elapsed() < round * Duration::from_micros(20) {}
            kill(Pid::from_raw(talker.pid()), Signal::SIGKILL).unwrap();
            let mut events = Vec::new();
            while let Some(event) = follow.next(DEADLINE) {
                events.push(event);
            }
            assert!(follow.is_over());
            let failed = |event: &FollowEvent| matches!(event, FollowEvent::Failed { .. });
            assert!(!events.iter().any(failed), "{round}: {events:?}");
            let exited = |event: &FollowEvent| matches!(event, FollowEvent::Exited { .. });
            assert_eq!(
                events.iter().filter(|it| exited(it)).count(),
                1,
                "{round}: {events:?}"
            );
        }
    }
}
