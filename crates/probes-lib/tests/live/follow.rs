//! Following a program from the process that started it.

use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::process::ExitStatusExt;
use std::process::Command;
use std::time::{Duration, Instant};

use nix::fcntl::{Flock, FlockArg};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use probes_lib::{Action, Actions, Follow, FollowEvent, Options, Selector, Target};
use test_support::process;
use test_support::{DEADLINE, Guard, Talker, eventually, fixture, fixture_forms};

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
        assert!(!process::is_loader_changed(talker.pid()));
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

/// Has a followed process load a library whose constructor hits its own probes, and calls `meanwhile`. Returns the
/// hits.
fn hits_of_load(talker: &mut Talker, meanwhile: impl FnOnce()) -> String {
    talker.send(&format!("load {}", fixture("objects/eager.so").display()));
    meanwhile();
    talker.expect("loaded 0");
    talker.ask("plugins", "plugins")
}

/// Follows a process that loads libraries, and waits until its loader is hooked.
fn follow_host(talker: &Talker) -> Follow {
    let follow = follow(talker);
    eventually("its loader is hooked", || {
        process::is_loader_changed(talker.pid()).then_some(())
    });
    follow
}

// promise: Following: What is loaded while another tool changes the process waits for that tool, more than a second (2)
#[test]
fn load_waits_for_a_slow_tool() {
    for file in fixture_forms("objects/host") {
        let mut talker = Talker::start(&file);
        let _follow = follow_host(&talker);
        let memory = File::open(format!("/proc/{}/mem", talker.pid())).unwrap();
        // The update lock, as another tool holds it while it changes the process.
        let lock = Flock::lock(memory, FlockArg::LockExclusive).unwrap();
        let hits = hits_of_load(&mut talker, || {
            std::thread::sleep(Duration::from_millis(1500));
            drop(lock);
        });
        assert_eq!(hits, "plugins 0:ping=2,plug=4");
    }
}

// promise: Following: What is loaded while a tool that is stopped changes the process runs on soon, and that is reported (2)
#[test]
fn load_does_not_wait_for_a_stopped_tool() {
    for file in fixture_forms("objects/host") {
        let mut talker = Talker::start(&file);
        let follow = follow_host(&talker);
        let mut holder = Command::new("flock");
        holder.arg("--no-fork");
        holder.arg(format!("/proc/{}/mem", talker.pid()));
        let holder = Guard::spawn(holder.args(["sleep", "1000"]));
        eventually("it has the lock", || {
            let name = std::fs::read_to_string(format!("/proc/{}/comm", holder.pid())).unwrap();
            (name == "sleep\n").then_some(())
        });
        kill(Pid::from_raw(holder.pid()), Signal::SIGSTOP).unwrap();
        let begun = Instant::now();
        let hits = hits_of_load(&mut talker, || {});
        assert_eq!(hits, "plugins 0:ping=0,plug=0");
        assert!(begun.elapsed() < Duration::from_secs(9));
        let events = std::iter::from_fn(|| next(&follow));
        assert!(events.take(2).any(|event| event == "Failed"));
    }
}
