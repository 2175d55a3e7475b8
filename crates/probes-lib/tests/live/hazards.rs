//! Processes in conditions that break tools: stopped, frozen, under seccomp, with a thousand
//! threads, privileged, with the pid of an earlier process.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid};
use nix::unistd::{Pid, geteuid};
use probes_lib::{
    Action, Effect, ErrorKind, Observation, ObserveError, Options, ProcessError, Selector, Stacks,
    State, Target, ThreadState,
};
use test_support::process::{self, Image};
use test_support::{Guard, Scratch, Talker, as_ordinary_user, eventually, fixture_forms, output};

use crate::own_process::{rerun_command, role};
use crate::refusals::toggle_as_nobody;
use crate::session::{Session, all, heavy_test_lock, patient};

fn all_threads_are(pid: i32, state: char) -> Option<()> {
    let threads = process::threads(pid);
    let is_so = |tid: &i32| process::status(*tid, "State").starts_with(state);
    (!threads.is_empty() && threads.iter().all(is_so)).then_some(())
}

// promise: Stopping and resuming: The parent of a process in a group stop sees its stop and its
//    exit, and nothing else (2 × 4 signals × 40 updates, under a parent that polls)
#[test]
fn parent_of_a_stopped_process_sees_nothing_else() {
    // This process is the tool, started below. The parent is another process, whose waits do not
    // see the ptrace-stops.
    if let Some(pid) = role() {
        let target = Target::open(pid.parse().unwrap()).unwrap();
        for action in [Action::Enable, Action::Disable]
            .into_iter()
            .cycle()
            .take(40)
        {
            target.update_with(&all(action), patient()).unwrap();
        }
        return;
    }
    let this_test = || ();
    let _lock = heavy_test_lock();
    let wait_options = WaitPidFlag::WSTOPPED | WaitPidFlag::WCONTINUED | WaitPidFlag::WNOHANG;
    let stops = [
        Signal::SIGSTOP,
        Signal::SIGTSTP,
        Signal::SIGTTIN,
        Signal::SIGTTOU,
    ];
    for file in fixture_forms("threads_spin") {
        // In an orphaned process group, which ours may be, only SIGSTOP stops a process.
        let mut talker = Talker::spawn(Command::new(&file).arg("3").process_group(0));
        talker.expect("ready");
        let mut session = Session::of(talker);
        let pid = Pid::from_raw(session.pid());
        let seen = || waitid(Id::Pid(pid), wait_options).unwrap();
        for signal in stops {
            kill(pid, signal).unwrap();
            eventually("its parent sees that it has stopped", || {
                (seen() == WaitStatus::Stopped(pid, signal)).then_some(())
            });
            let mut command = rerun_command(&this_test, &pid.to_string());
            let mut tool = Guard::spawn(command.stdout(Stdio::null()));
            let mut polls = 0;
            while tool.is_running() {
                assert_eq!(seen(), WaitStatus::StillAlive, "{signal}");
                polls += 1;
            }
            assert!(tool.wait().success() && polls > 0);
            eventually("every thread is stopped again", || {
                all_threads_are(pid.as_raw(), 'T')
            });
            assert_eq!(seen(), WaitStatus::StillAlive, "{signal}");
            kill(pid, Signal::SIGCONT).unwrap();
            eventually("its parent sees that it continues", || {
                (seen() == WaitStatus::Continued(pid)).then_some(())
            });
            session.talker.ask("report", "report");
        }
        session.assert_all((0, State::Disabled));
        session.end();
    }
}

// promise: Processes that are hard to change: A process under a seccomp filter that forbids even
//    mmap is changed: everything is done from outside (2 × 40 updates)
#[test]
fn process_under_seccomp_filter_is_changed_from_outside() {
    for file in fixture_forms("seccomp") {
        let mut session = Session::start(&file);
        assert_eq!(process::status(session.pid(), "Seccomp"), "2");
        for _ in 0..20 {
            session.update(Action::Enable, Selector::All, |_| true);
            assert_eq!(session.run()["ping"], 3);
            session.update(Action::Disable, Selector::All, |_| true);
            assert_eq!(session.run()["ping"], 0);
        }
        session.end();
    }
}

// promise: Stopping and resuming: Every one of a thousand threads is stopped and resumed (2 × 10
//    updates)
#[test]
fn a_thousand_threads_are_stopped_and_resumed() {
    for file in fixture_forms("idle_threads") {
        let mut session = Session::start(&file);
        assert_eq!(process::threads(session.pid()).len(), 1001);
        let hits = |session: &mut Session| {
            session.run();
            session.talker.ask("round", "round");
            let hits = session.run();
            // Each of the thousand threads and the first thread execute the sites once.
            (hits["ping"], hits["pong"])
        };
        for _ in 0..5 {
            session.update(Action::Enable, Selector::All, |_| true);
            assert_eq!(hits(&mut session), (3003, 1001));
            session.update(Action::Disable, Selector::All, |_| true);
            assert_eq!(hits(&mut session), (0, 0));
        }
        let pid = session.pid();
        assert_eq!(process::threads(pid).len(), 1001);
        eventually("every thread is detached", || {
            let is_traced = |tid| process::status(tid, "TracerPid") != "0";
            (!process::threads(pid).into_iter().any(is_traced)).then_some(())
        });
        session.end();
    }
}

/// What keeps a process from running.
enum Suspension {
    Stopped(i32),
    /// A control group of version 2, which can be frozen.
    Frozen(PathBuf),
    /// A control group of the freezer of version 1.
    FrozenV1(PathBuf),
}

impl Suspension {
    /// Each kind that we have permission for.
    fn all(pid: i32) -> Vec<Suspension> {
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
        // "… / /sys/fs/cgroup rw,… - cgroup2 cgroup2 rw"
        let find = |is_it: &dyn Fn(&str) -> bool| {
            let mount = mounts
                .lines()
                .find(|line| line.split_once(" - ").is_some_and(|(_, it)| is_it(it)))?;
            let directory = Path::new(mount.split(' ').nth(4)?);
            let group = directory.join(format!("ocaml-probes-test-{pid}"));
            fs::create_dir(&group).ok().map(|()| group)
        };
        let second = find(&|it| it.starts_with("cgroup2 ")).map(Suspension::Frozen);
        let first = find(&|it| it.starts_with("cgroup ") && it.contains("freezer"));
        let mut all = vec![Suspension::Stopped(pid)];
        all.extend(second);
        all.extend(first.map(Suspension::FrozenV1));
        all
    }

    fn begin(&self, pid: i32) {
        match self {
            Suspension::Stopped(pid) => kill(Pid::from_raw(*pid), Signal::SIGSTOP).unwrap(),
            Suspension::Frozen(group) => {
                fs::write(group.join("cgroup.procs"), pid.to_string()).unwrap();
                fs::write(group.join("cgroup.freeze"), "1").unwrap();
            }
            Suspension::FrozenV1(group) => {
                fs::write(group.join("cgroup.procs"), pid.to_string()).unwrap();
                fs::write(group.join("freezer.state"), "FROZEN").unwrap();
            }
        }
        eventually("every thread is suspended", || {
            self.is_complete(pid).then_some(())
        });
    }

    /// Whether no thread of the process runs.
    fn is_complete(&self, pid: i32) -> bool {
        let has_line = |group: &Path, file: &str, wanted: &str| {
            let text = fs::read_to_string(group.join(file)).unwrap();
            text.lines().any(|line| line == wanted)
        };
        match self {
            Suspension::Stopped(_) => all_threads_are(pid, 'T').is_some(),
            Suspension::Frozen(group) => has_line(group, "cgroup.events", "frozen 1"),
            Suspension::FrozenV1(group) => has_line(group, "freezer.state", "FROZEN"),
        }
    }

    fn end(&self) {
        match self {
            Suspension::Stopped(pid) => kill(Pid::from_raw(*pid), Signal::SIGCONT).unwrap(),
            Suspension::Frozen(group) => fs::write(group.join("cgroup.freeze"), "0").unwrap(),
            Suspension::FrozenV1(group) => {
                fs::write(group.join("freezer.state"), "THAWED").unwrap()
            }
        }
    }
}

impl Drop for Suspension {
    fn drop(&mut self) {
        let (Suspension::Frozen(group) | Suspension::FrozenV1(group)) = &*self else {
            return;
        };
        self.end();
        let procs = group.parent().unwrap().join("cgroup.procs");
        for pid in fs::read_to_string(group.join("cgroup.procs"))
            .unwrap()
            .lines()
        {
            let _ = fs::write(&procs, pid);
        }
        let _ = fs::remove_dir(group);
    }
}

/// Root can create control groups on most machines, other users on none: they test only a process that
/// SIGSTOP has stopped.
// promise: Stopping and resuming: A process frozen by a cgroup stays frozen: changed in version 2,
//    reported as busy in version 1, and its stacks say that it is frozen (2 × 41 updates each; users who may create no
//    cgroup use SIGSTOP)
#[test]
fn frozen_process_stays_frozen_or_is_reported_busy() {
    let _lock = heavy_test_lock();
    let options = Options {
        time_limit: Duration::from_millis(100),
        ..Options::default()
    };
    for file in fixture_forms("threads_spin") {
        let mut session = Session::of(Talker::start_with(&file, ["3"]));
        let pid = session.pid();
        for suspension in Suspension::all(pid) {
            suspension.begin(pid);
            let expected = match suspension {
                Suspension::Stopped(_) => ThreadState::Stopped,
                Suspension::Frozen(_) | Suspension::FrozenV1(_) => ThreadState::Frozen,
            };
            let stacks = Stacks::of_process(pid).unwrap().read(false).unwrap();
            assert!(stacks.threads.len() > 3);
            for thread in stacks.threads {
                assert_eq!(thread.state, expected);
            }
            if matches!(suspension, Suspension::FrozenV1(_)) {
                // It is in uninterruptible sleep, and cannot be stopped.
                let enable = all(Action::Enable);
                let error = session.target.update_with(&enable, options).unwrap_err();
                let is_busy = matches!(
                    error.kind(),
                    ErrorKind::Process(ProcessError::Busy { state: 'D', .. })
                );
                assert!(is_busy, "{error}");
                assert_eq!(error.effect(), Effect::NothingChanged);
                session.assert_all((0, State::Disabled));
            } else {
                session.apply(&all(Action::Enable)).unwrap();
                // Includes the counts of hits, which would change if its threads ran.
                let image = Image::of(pid);
                for _ in 0..20 {
                    session.apply(&all(Action::Disable)).unwrap();
                    session.assert_all((0, State::Disabled));
                    session.apply(&all(Action::Enable)).unwrap();
                    session.assert_all((1, State::Enabled));
                }
                if let Suspension::Frozen(_) = suspension {
                    // None of its threads can be made to map memory.
                    let observation = Observation::new().count(Selector::All);
                    let options = Options {
                        time_limit: Duration::from_secs(2),
                        ..Options::default()
                    };
                    let observed = session.target.observe(&observation, options);
                    let error = observed.err().unwrap();
                    let kind = error.kind();
                    let is_reported = matches!(kind, ErrorKind::Observe(ObserveError::NotRunning));
                    assert!(is_reported, "{error}");
                    assert_eq!(error.effect(), Effect::NothingChanged);
                }
                Image::of(pid).assert_same(&image, "it has not run meanwhile");
            }
            eventually("every thread is suspended again", || {
                suspension.is_complete(pid).then_some(())
            });
            assert_eq!(process::status(pid, "TracerPid"), "0");
            suspension.end();
            let is_on = session.state("ping") == State::Enabled;
            let report = |session: &mut Session| session.talker.ask("report", "report");
            let before = report(&mut session);
            eventually(
                "its threads run, and hit the probes that are enabled",
                || {
                    let has_run = report(&mut session) != before;
                    (has_run && (!is_on || session.run()["ping"] > 3)).then_some(())
                },
            );
            if is_on {
                session.apply(&all(Action::Disable)).unwrap();
            }
        }
        session.end();
    }
}

// promise: Processes that are hard to change: A setuid program is changed by root, not by the user
//    who started it, and keeps its privilege (2 × 10 updates)
#[test]
fn setuid_program_is_changed_and_keeps_its_privilege() {
    for file in fixture_forms("forker") {
        let scratch = Scratch::new();
        let copy = scratch.copy(&file, "setuid");
        fs::set_permissions(&copy, fs::Permissions::from_mode(0o4755)).unwrap();
        // Another user than its owner gains the owner's privilege; for its owner it is an ordinary
        // program.
        let mut talker = Talker::spawn(&mut as_ordinary_user(&copy));
        talker.expect("ready");
        let mut session = Session::of(talker);
        let pid = session.pid();
        let owner = geteuid().as_raw();
        let effective = |pid| {
            let uids = process::status(pid, "Uid");
            uids.split('\t').nth(1).unwrap().parse::<u32>().unwrap()
        };
        assert_eq!(effective(pid), owner);
        for _ in 0..5 {
            session.update(Action::Enable, Selector::All, |_| true);
            assert_eq!(session.run()["ping"], 3);
            session.update(Action::Disable, Selector::All, |_| true);
        }
        assert_eq!(effective(pid), owner);
        if owner == 0 {
            // The user who started it, and who lacks its privilege.
            let image = session.image();
            let message = toggle_as_nobody(pid);
            assert!(
                message.contains("NotDumpable") || message.contains("MorePrivileged"),
                "{message}"
            );
            session.image().assert_same(&image, "after that user's try");
        }
        session.end();
    }
}

/// Starts `file` again and again until it gets the pid `pid`, which must be free. Other threads of this test
/// may take it first.
fn start_as(file: &Path, pid: i32) -> Talker {
    let last = (pid - 1).to_string();
    for _ in 0..1000 {
        fs::write("/proc/sys/kernel/ns_last_pid", &last).unwrap();
        let talker = Talker::start(file);
        if talker.pid() == pid {
            return talker;
        }
    }
    panic!("no process gets the pid {pid}");
}

/// Asserts that an update of a process that has exited fails, even if `next` starts another one with its pid.
fn assert_exited_process_is_not_mistaken(next: impl Fn(&Path, i32) -> Option<Talker>) {
    for file in fixture_forms("gen_ocaml_2") {
        let mut session = Session::start(&file);
        let pid = session.pid();
        session.apply(&all(Action::Enable)).unwrap();
        session.talker.close_input();
        session.talker.guard().wait();
        // The other process even runs the same program.
        let mut other = next(&file, pid);
        let image = other.as_ref().map(|_| {
            process::settle(pid);
            Image::of(pid)
        });
        for live in [false, true] {
            let options = Options { live, ..patient() };
            let enable = all(Action::Enable);
            let error = session.target.update_with(&enable, options).unwrap_err();
            let is_gone = matches!(error.kind(), ErrorKind::Process(ProcessError::Exited));
            assert!(is_gone, "{error}");
        }
        assert!(session.target.states().is_err());
        if let (Some(other), Some(image)) = (&mut other, image) {
            Image::of(pid).assert_same(&image, "the other process");
            assert!(other.hits().iter().all(|&(_, hits)| hits == 0));
        }
    }
}

/// Containers may refuse the pid namespace that this needs: there, only a process that has exited is tested.
// promise: Exit, exec and fork of the process: A new process with the pid of an earlier one is not
//    mistaken for it (2 × 2 updates)
#[test]
fn reused_pid_is_not_mistaken() {
    // This process is in the pid namespace, where pids can be chosen.
    if role().is_some() {
        return assert_exited_process_is_not_mistaken(|file, pid| Some(start_as(file, pid)));
    }
    let unshare = || {
        let mut unshare = Command::new("unshare");
        if !geteuid().is_root() {
            unshare.args(["--user", "--map-root-user"]);
        }
        unshare.args(["--pid", "--fork", "--kill-child", "--mount-proc", "--"]);
        unshare
    };
    if !output(unshare().arg("true")).status.success() {
        return assert_exited_process_is_not_mistaken(|_, _| None);
    }
    let this_test = || ();
    let test = rerun_command(&this_test, "in a namespace");
    let mut unshare = unshare();
    unshare.arg(test.get_program()).args(test.get_args());
    let variables = test.get_envs();
    unshare.envs(variables.filter_map(|(name, value)| Some((name, value?))));
    let output = output(&mut unshare);
    let stdout = String::from_utf8_lossy(&output.stdout);
    let has_run = output.status.success() && stdout.contains("1 passed");
    assert!(has_run, "{output:?}");
}
