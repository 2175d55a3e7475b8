use std::process::Command;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use test_support::process::{state, status};
use test_support::{Talker, eventually, fixture};

use super::*;
use crate::trace::tracer::with_tracer;

const LIMIT: Duration = test_support::DEADLINE;

/// Returns the next event of the set.
fn next_event(tracees: &mut TraceeSet<'_>) -> TraceEvent {
    eventually("there is an event", || {
        let event = tracees.next(Instant::now() + FOLLOW_TICK);
        if event.is_none() {
            tracees.wait();
        }
        event
    })
}

#[test]
fn child_that_was_not_reported_precedes_the_execve() {
    let mut perl = Command::new("perl");
    let script = "$| = 1; print qq(ready\\n); $_ = <STDIN>; if (!fork) { sleep 1000; exit } \
                  $_ = <STDIN>; exec 'sleep', 1000";
    let mut parent = Talker::spawn(perl.args(["-e", script]));
    parent.expect("ready");
    let pid = parent.pid();
    let process = Process::open(pid).unwrap();
    let child = with_tracer(&[&process], |tracer| {
        let mut tracees = TraceeSet::new(tracer);
        let stopped = tracees.stop_and_keep(&process, LIMIT)?;
        tracees.resume(&process, stopped);
        tracees.resume_now(pid);
        parent.send("fork");
        let child = eventually("it has forked", || match ptrace::peek_state(pid) {
            TraceeState::Cloned(child) => Some(child),
            state => {
                resume_unless_it_reports(pid);
                assert_ne!(state, TraceeState::Gone);
                None
            }
        });
        // Both stops are consumed before the set sees them, as if an execve had ended the thread that forked.
        eventually("the child has stopped", || {
            (ptrace::peek_state(child) == TraceeState::EventStopped).then_some(())
        });
        ptrace::resume(child, 0);
        ptrace::resume(pid, 0);
        parent.send("exec");
        assert_eq!(
            next_event(&mut tracees),
            TraceEvent::Forked {
                parent: pid,
                pid: child
            }
        );
        assert_eq!(next_event(&mut tracees), TraceEvent::Executed { pid });
        tracees.detach_executed(pid);
        Ok(child)
    });
    kill(Pid::from_raw(child.unwrap()), Signal::SIGKILL).unwrap();
}

#[test]
fn process_of_a_new_thread_needs_no_files() {
    let talker = Talker::start(&fixture("idle_threads.pie"));
    let other = Talker::start(&fixture("idle_threads.pie"));
    let (pid, other) = (talker.pid(), other.pid());
    let process = Process::open(pid).unwrap();
    let tids = process.threads().unwrap().read().unwrap();
    assert!(tids.len() > 1);
    with_tracer(&[], |tracer| {
        let mut tracees = TraceeSet::new(tracer);
        tracees.threads.insert(other, other);
        tracees.threads.insert(pid, pid);
        for tid in tids {
            assert_eq!(tracees.process_of_new(tid), Some(pid), "{tid}");
        }
        assert_eq!(tracees.process_of_new(i32::MAX), None);
        Ok(())
    })
    .unwrap();
}

#[test]
fn threads_run_while_one_is_kept_stopped() {
    let talker = Talker::start(&fixture("idle_threads.pie"));
    let pid = talker.pid();
    let process = Process::open(pid).unwrap();
    let tids = process.threads().unwrap().read().unwrap();
    with_tracer(&[&process], |tracer| {
        tracer.stop(&process, LIMIT)?.keep_only(pid);
        for &tid in &tids {
            let is_first = tid == pid;
            assert_eq!(state(tid) == Some('t'), is_first, "{tid}");
            assert_eq!(status(tid, "TracerPid") == "0", !is_first, "{tid}");
        }
        assert!(tids.len() > 1);
        ptrace::detach(pid, 0).unwrap();
        Ok(())
    })
    .unwrap();
}

#[test]
fn new_process_waits_until_its_event_is_handled() {
    for _ in 0..20 {
        let mut talker = Talker::start(&fixture("family.pie"));
        let pid = talker.pid();
        let process = Process::open(pid).unwrap();
        with_tracer(&[&process], |tracer| {
            let mut tracees = TraceeSet::new(tracer);
            let stopped = tracees.stop_and_keep(&process, LIMIT)?;
            tracees.resume(&process, stopped);
            tracees.resume_now(pid);
            talker.send("fork");
            let forked = next_event(&mut tracees);
            let TraceEvent::Forked { pid: child, .. } = forked else {
                panic!("{forked:?}");
            };
            // If it ran, it would exit soon. The stop of its parent may be handled before its own stop.
            eventually("the child has stopped", || {
                let is_stopped = ptrace::peek_state(child) == TraceeState::EventStopped;
                assert!(is_stopped || matches!(state(child), Some('R' | 'S' | 'D' | 't')));
                is_stopped.then_some(())
            });
            let exited = TraceEvent::Exited { pid: child };
            let mut event = next_event(&mut tracees);
            if event == forked {
                // The stop of its parent reports the fork once more.
                event = next_event(&mut tracees);
            }
            assert_eq!(event, exited);
            Ok(())
        })
        .unwrap();
        talker.expect("started 0");
    }
}

#[test]
fn process_exits_though_reaped_threads_are_listed() {
    let talker = Talker::start(&fixture("family.pie"));
    let pid = talker.pid();
    let process = Process::open(pid).unwrap();
    with_tracer(&[&process], |tracer| {
        let mut tracees = TraceeSet::new(tracer);
        let stopped = tracees.stop_and_keep(&process, LIMIT)?;
        tracees.resume(&process, stopped);
        // As after a stop of a process whose first thread had exited: the set has only a thread that was reaped
        // meanwhile.
        tracees.threads = HashMap::from([(i32::MAX, pid)]);
        kill(Pid::from_raw(pid), Signal::SIGKILL).unwrap();
        assert_eq!(next_event(&mut tracees), TraceEvent::Exited { pid });
        assert!(tracees.is_empty());
        Ok(())
    })
    .unwrap();
}

#[test]
fn new_process_may_have_a_reaped_threads_tid() {
    let (earlier, new) = (
        Talker::start(&fixture("family.pie")),
        Talker::start(&fixture("family.pie")),
    );
    let (pid, parent) = (new.pid(), std::process::id() as i32);
    let earlier = earlier.pid();
    with_tracer(&[], |tracer| {
        let mut tracees = TraceeSet::new(tracer);
        tracees.threads.insert(pid, earlier);
        let forked = TraceEvent::Forked { parent, pid };
        assert_eq!(tracees.register(pid, None), Some(forked));
        assert_eq!(tracees.register(pid, None), None);
        Ok(())
    })
    .unwrap();
}
