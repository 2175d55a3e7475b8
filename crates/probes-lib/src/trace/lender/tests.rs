use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::thread::JoinHandle;

use nix::sys::signal::{Signal, kill};
use nix::unistd::{Pid, geteuid};
use test_support::process::state;
use test_support::{Guard, Talker, eventually, fixture};

use super::*;
use crate::address::LiveAddr;
use crate::error::{ErrorKind, FOLLOWER_LOST, ObserveError, Result};
use crate::inject::permissions::Permissions;
use crate::inject::redirect::{Left, RedirectTarget, redirectable};
use crate::memory::{ReadMemory, WriteMemory};
use crate::process::maps::read_maps;
use crate::process::memory::random_bytes_at;
use crate::process::status::Status;
use crate::trace::lease::{Lease, NoLease};
use crate::trace::stopped::Stopped;
use crate::trace::tracee_set::{FOLLOW_TICK, TraceEvent};
use crate::trace::tracer::with_tracer;

mod times;

const LIMIT: Duration = test_support::DEADLINE;

/// No tool takes so long, however slow the machine is.
const PATIENT: Limits = Limits {
    silence: LIMIT,
    stopped: LIMIT,
    idle: LIMIT,
};

/// A thread that follows processes, and lends them.
struct Follower {
    tid: i32,
    stop: Arc<AtomicBool>,
    thread: JoinHandle<()>,
}

impl Follower {
    fn of(pid: i32) -> Follower {
        Follower::with(&[pid], Limits::USUAL)
    }

    fn patient(pid: i32) -> Follower {
        Follower::with(&[pid], PATIENT)
    }

    fn with(pids: &[i32], limits: Limits) -> Follower {
        let pids = pids.to_vec();
        let (started, is_started) = channel();
        let stop = Arc::new(AtomicBool::new(false));
        let is_to_stop = stop.clone();
        let thread = std::thread::spawn(move || follow(&pids, limits, started, &is_to_stop));
        Follower {
            tid: is_started.recv().unwrap(),
            stop,
            thread,
        }
    }

    fn end(self) {
        self.stop.store(true, Ordering::SeqCst);
        self.thread.join().unwrap();
    }
}

fn follow(pids: &[i32], limits: Limits, started: Sender<i32>, stop: &AtomicBool) {
    let processes: Vec<Process> = pids
        .iter()
        .map(|pid| Process::open(*pid).unwrap())
        .collect();
    let processes: Vec<&Process> = processes.iter().collect();
    let followed = with_tracer(&processes, |tracer| {
        let mut tracees = TraceeSet::new(tracer);
        let mut lender = Lender::with(limits);
        for process in &processes {
            add(&mut tracees, process);
        }
        started.send(gettid().as_raw()).unwrap();
        while !stop.load(Ordering::SeqCst) {
            while let Some(event) = tracees.next(Instant::now() + FOLLOW_TICK) {
                if let TraceEvent::Executed { pid } = event {
                    tracees.resume_thread(pid);
                }
            }
            lender.serve(&mut tracees);
            tracees.wait();
        }
        Ok(())
    });
    followed.unwrap();
}

/// Begins to trace a process.
fn add(tracees: &mut TraceeSet<'_>, process: &Process) {
    let stopped = tracees.stop_and_keep(process, LIMIT).unwrap();
    tracees.resume(process, stopped);
    tracees.resume_now(process.pid());
}

fn hello(pid: i32, holds_lock: bool) -> Vec<u8> {
    Hello::Process { pid, holds_lock }.to_bytes()
}

/// Opens the memory of a process to read and write it.
fn memory_file(pid: i32) -> File {
    let mut options = File::options();
    let options = options.read(true).write(true);
    options.open(format!("/proc/{pid}/mem")).unwrap()
}

fn is_stopped(tid: i32) -> bool {
    state(tid) == Some('t')
}

/// Returns an address in the code of a process, and a byte of it.
fn some_code(process: &Process) -> (LiveAddr, u8) {
    let maps = read_maps(process).unwrap();
    let code = maps.iter().find(|mapping| mapping.executable).unwrap();
    let mut byte = [0];
    let memory = ProcessMemory::open(process, OFlag::O_RDONLY).unwrap();
    memory.read(code.start, &mut byte).unwrap();
    (code.start, byte[0])
}

#[test]
fn process_is_stopped_until_resumed_or_abandoned() {
    let mut talker = Talker::start(&fixture("idle_threads.pie"));
    let pid = talker.pid();
    let follower = Follower::patient(pid);
    let process = Process::open(pid).unwrap();
    let (code, byte) = some_code(&process);
    for is_resumed in [true, false, true] {
        let lease = Lease::connect(follower.tid, &process, true, LIMIT).unwrap();
        assert!(!lease.has_stopped());
        let mut tids = lease.stop(LIMIT).unwrap().unwrap();
        tids.sort_unstable();
        let mut threads = process.threads().unwrap().read().unwrap();
        threads.sort_unstable();
        assert_eq!(tids, threads);
        assert!(tids.iter().all(|tid| is_stopped(*tid)));
        let registers = lease.answer(&Request::Registers(pid), Some).unwrap();
        assert!(matches!(&registers, Reply::Registers(it) if it.rip != 0));
        lease.write(code, &[byte]).unwrap();
        lease.poke(pid, code, &[byte]).unwrap();
        // A second stop, as after one of its threads was resumed.
        assert_eq!(lease.stop(LIMIT).unwrap().unwrap().len(), tids.len());
        if is_resumed {
            lease.resume_all();
            assert!(!lease.is_lost());
            // Each was resumed before the answer.
            assert!(!tids.iter().any(|tid| is_stopped(*tid)));
        } else {
            drop(lease);
        }
        talker.hits();
    }
    follower.end();
    talker.hits();
}

#[test]
fn requests_for_threads_of_other_processes_fail() {
    let talker = Talker::start(&fixture("idle_threads.pie"));
    let other = Talker::start(&fixture("idle_threads.pie"));
    let pid = talker.pid();
    let follower = Follower::patient(pid);
    let not_followed = Process::open(other.pid()).unwrap();
    let refused = Lease::connect(follower.tid, &not_followed, true, LIMIT);
    assert_eq!(refused.err(), Some(NoLease::Refused));
    let lease = Lease::connect(follower.tid, &Process::open(pid).unwrap(), true, LIMIT).unwrap();
    lease.stop(LIMIT).unwrap().unwrap();
    for tid in [other.pid(), 1, -1, 0] {
        let state = lease.answer(&Request::State(tid), Some);
        assert_eq!(state, Err(Errno::ESRCH), "{tid}");
        assert!(lease.call(&Request::ResumeThread(tid)).is_err());
    }
    assert!(!lease.is_lost());
    lease.resume_all();
    follower.end();
}

/// Sends a message, with the descriptor of the file if there is one; returns the reply, or `None` if the connection is
/// closed without one.
fn answer(socket: &PacketSocket, bytes: &[u8], file: Option<&File>) -> Option<Vec<u8>> {
    socket.send(bytes, file.map(File::as_fd)).unwrap();
    socket.wait_for_message(LIMIT).unwrap();
    let mut answer = vec![0; MAX_LEN];
    let (len, _) = socket.receive(&mut answer).ok()?;
    answer.truncate(len);
    Some(answer)
}

#[test]
fn message_out_of_order_ends_the_connection() {
    let mut talker = Talker::start(&fixture("idle_threads.pie"));
    let pid = talker.pid();
    let follower = Follower::patient(pid);
    let connect = || PacketSocket::connect(&lease::address(follower.tid)).unwrap();
    let memory = memory_file(pid);
    let hello = hello(pid, true);
    let stop = Request::Stop(LIMIT.as_millis() as u64).to_bytes();
    let state = Request::State(pid).to_bytes();
    let welcome = |answer: Option<Vec<u8>>| answer.and_then(|it| Welcome::parse(&it));

    // Before anything was proved.
    for first in [&stop, &state, &vec![0], &vec![7; 64]] {
        assert_eq!(answer(&connect(), first, None), None);
    }
    // With no proof, or a wrong one.
    let own = memory_file(std::process::id() as i32);
    let to_read = File::open(format!("/proc/{pid}/mem")).unwrap();
    for file in [None, Some(&own), Some(&to_read)] {
        let refused = welcome(answer(&connect(), &hello, file));
        assert_eq!(refused, Some(Welcome::Refused));
    }
    // A tool of another version is sent our version number.
    let later = Hello::OtherVersion(lease::message::VERSION + 1).to_bytes();
    let ours = Welcome::OtherVersion(lease::message::VERSION).to_bytes();
    assert_eq!(answer(&connect(), &later, Some(&memory)), Some(ours));
    // Calls before it is stopped, a second greeting, and descriptors that were not asked for.
    for second in [&state, &hello] {
        let socket = connect();
        let accepted = welcome(answer(&socket, &hello, Some(&memory)));
        assert_eq!(accepted, Some(Welcome::Accepted));
        assert_eq!(answer(&socket, second, None), None);
    }
    let socket = connect();
    answer(&socket, &hello, Some(&memory)).unwrap();
    assert_eq!(answer(&socket, &stop, Some(&memory)), None);
    // While the process is stopped: the connection is closed, and the process is resumed.
    for (message, file) in [(&vec![7; 64], None), (&state, Some(&memory))] {
        let socket = connect();
        answer(&socket, &hello, Some(&memory)).unwrap();
        answer(&socket, &stop, None).unwrap();
        assert!(is_stopped(pid));
        assert_eq!(answer(&socket, message, file), None);
        assert!(!is_stopped(pid));
        talker.hits();
    }
    follower.end();
}

#[test]
fn memory_from_before_an_exec_proves_nothing() {
    let mut talker = Talker::start(&fixture("family.pie"));
    let pid = talker.pid();
    let follower = Follower::patient(pid);
    let lease = Lease::connect(follower.tid, &Process::open(pid).unwrap(), true, LIMIT).unwrap();
    let outdated = memory_file(pid);
    talker.ask(&exec("idle_threads.pie"), "ready");
    let socket = PacketSocket::connect(&lease::address(follower.tid)).unwrap();
    let accepted = answer(&socket, &hello(pid, true), Some(&outdated));
    let accepted = accepted.and_then(|it| Welcome::parse(&it));
    assert_eq!(accepted, Some(Welcome::Accepted));
    let stop = Request::Stop(LIMIT.as_millis() as u64).to_bytes();
    let executed = Reply::NotStopped(NotStopped::Executed).to_bytes();
    assert_eq!(answer(&socket, &stop, None), Some(executed));
    assert_eq!(lease.stop(LIMIT).unwrap(), Err(NotStopped::Executed));
    assert!(!is_stopped(pid));
    talker.hits();
    follower.end();
}

/// The command with which `family` executes a fixture.
fn exec(name: &str) -> String {
    format!("exec {}", fixture(name).display())
}

/// Asserts that memory that was opened before the last exec of the process cannot be written.
fn assert_unwritable(stopped: &Stopped<'_>, outdated: &ProcessMemory) {
    let (code, byte) = some_code(stopped.process());
    let written = stopped.memory(outdated).map(|mut memory| {
        memory.write_code(code, &[!byte]).unwrap();
    });
    assert_eq!(some_code(stopped.process()), (code, byte));
    assert_executed(written);
}

fn assert_executed<T: std::fmt::Debug>(result: Result<T>) {
    let error = result.unwrap_err();
    let kind = error.kind();
    assert!(
        matches!(kind, ErrorKind::Process(ProcessError::Executed)),
        "{error}"
    );
}

#[test]
fn program_executed_before_the_lease_is_not_changed() {
    let mut talker = Talker::start(&fixture("family.pie"));
    let follower = Follower::patient(talker.pid());
    let process = &Process::open(talker.pid()).unwrap();
    let outdated = ProcessMemory::open(process, OFlag::O_RDWR).unwrap();
    talker.ask(&exec("idle_threads.pie"), "ready");
    let checked = with_tracer(&[process], |tracer| {
        assert_unwritable(&tracer.stop(process, LIMIT)?, &outdated);
        Ok(())
    });
    checked.unwrap();
    talker.hits();
    follower.end();
}

#[test]
fn program_executed_between_two_stops_is_not_stopped() {
    let mut talker = Talker::start(&fixture("family.pie"));
    let follower = Follower::patient(talker.pid());
    let process = &Process::open(talker.pid()).unwrap();
    let again = with_tracer(&[process], |tracer| {
        tracer.stop(process, LIMIT)?.release();
        talker.ask(&exec("idle_threads.pie"), "ready");
        tracer.stop(process, LIMIT).map(Stopped::release)
    });
    assert_executed(again);
    talker.hits();
    follower.end();
}

// promise: Following: A program that a process executes while it is lent cannot be changed through its follower, nor its
//    registers be read
#[test]
fn program_executed_during_the_lease_is_not_touched() {
    let mut talker = Talker::start(&fixture("family.pie"));
    let pid = talker.pid();
    let follower = Follower::patient(pid);
    let lease = Lease::connect(follower.tid, &Process::open(pid).unwrap(), true, LIMIT).unwrap();
    assert_eq!(lease.stop(LIMIT).unwrap(), Ok(vec![pid]));
    let Ok(Reply::Registers(registers)) = lease.answer(&Request::Registers(pid), Some) else {
        panic!("no registers");
    };
    lease.call(&Request::ResumeThread(pid)).unwrap();
    talker.send(&exec("idle_threads.pie"));
    eventually("it executes the program", || {
        let state = lease.answer(&Request::State(pid), Some);
        (state == Ok(Reply::State(TraceeState::Executed))).then_some(())
    });
    let (code, byte) = some_code(&Process::open(pid).unwrap());
    for request in [
        Request::Registers(pid),
        Request::SetRegisters(pid, registers),
        Request::RseqAddress(pid),
        Request::SeccompFilter(pid, 0),
        Request::Write(code, vec![!byte]),
        Request::Poke(pid, code, vec![!byte]),
        Request::ResumeThread(pid),
    ] {
        let refused = lease.answer(&request, Some);
        assert!(refused.is_err(), "{request:?} {refused:?}");
    }
    assert!(!lease.is_lost());
    assert_eq!(some_code(&Process::open(pid).unwrap()), (code, byte));
    assert_eq!(lease.stop(LIMIT).unwrap(), Err(NotStopped::Executed));
    talker.expect("ready");
    talker.hits();
    follower.end();
}

#[test]
fn nothing_is_written_while_any_thread_runs() {
    let talker = Talker::start(&fixture("idle_threads.pie"));
    let pid = talker.pid();
    let follower = Follower::patient(pid);
    let process = Process::open(pid).unwrap();
    let lease = Lease::connect(follower.tid, &process, true, LIMIT).unwrap();
    let tids = lease.stop(LIMIT).unwrap().unwrap();
    let other = *tids.iter().find(|tid| **tid != pid).unwrap();
    let Ok(Reply::Registers(registers)) = lease.answer(&Request::Registers(other), Some) else {
        panic!("no registers");
    };
    let (code, byte) = some_code(&process);
    let writes = [
        Request::SetRegisters(other, registers),
        Request::Poke(other, code, vec![byte]),
        Request::Write(code, vec![byte]),
    ];
    let try_writes = || writes.each_ref().map(|it| lease.call(it).is_ok());
    assert_eq!(try_writes(), [true; 3]);
    lease.call(&Request::ResumeThread(pid)).unwrap();
    assert_eq!(try_writes(), [false; 3]);
    assert!(lease.answer(&Request::Registers(other), Some).is_ok());
    lease.stop(LIMIT).unwrap().unwrap();
    assert_eq!(try_writes(), [true; 3]);
    lease.resume_all();
    follower.end();
}

/// Runs `check` with processes that are followed, and the lender.
fn with_lender(processes: &[&Process], check: impl FnOnce(&mut TraceeSet<'_>, Lender) + Send) {
    let checked = with_tracer(processes, |tracer| {
        let mut tracees = TraceeSet::new(tracer);
        for process in processes {
            add(&mut tracees, process);
        }
        let lender = Lender::with(PATIENT);
        check(&mut tracees, lender);
        Ok(())
    });
    checked.unwrap();
}

#[test]
fn job_control_stop_survives_resuming_a_thread() {
    let mut talker = Talker::start_with(&fixture("idle_threads.pie"), ["4"]);
    let pid = talker.pid();
    let follower = Follower::patient(pid);
    let process = Process::open(pid).unwrap();
    let threads = process.threads().unwrap().read().unwrap();
    let wait_until_stopped = || {
        eventually("all threads are stopped", || {
            let is_stopped_or_traced = |tid: &i32| matches!(state(*tid), Some('T' | 't'));
            threads.iter().all(is_stopped_or_traced).then_some(())
        });
    };
    kill(Pid::from_raw(pid), Signal::SIGSTOP).unwrap();
    wait_until_stopped();
    for is_resumed in [true, false] {
        let lease = Lease::connect(follower.tid, &process, true, LIMIT).unwrap();
        lease.stop(LIMIT).unwrap().unwrap();
        let state = lease.answer(&Request::State(pid), Some);
        assert_eq!(state, Ok(Reply::State(TraceeState::GroupStopped)));
        lease.call(&Request::ResumeThread(pid)).unwrap();
        eventually("it runs", || (!is_stopped(pid)).then_some(()));
        if is_resumed {
            lease.resume_all();
        }
        drop(lease);
        wait_until_stopped();
    }
    kill(Pid::from_raw(pid), Signal::SIGCONT).unwrap();
    talker.hits();
    follower.end();
}

#[test]
fn signals_reach_other_processes_while_one_is_lent() {
    let lent = Talker::start(&fixture("idle_threads.pie"));
    let mut other = Talker::start(&fixture("job.pie"));
    let follower = Follower::with(&[lent.pid(), other.pid()], PATIENT);
    other.ask("catch 10", "catching");
    let process = Process::open(lent.pid()).unwrap();
    let lease = Lease::connect(follower.tid, &process, true, LIMIT).unwrap();
    lease.stop(LIMIT).unwrap().unwrap();
    for is_busy in [false, true] {
        kill(Pid::from_raw(other.pid()), Signal::SIGUSR1).unwrap();
        let other = &mut other;
        std::thread::scope(|scope| {
            let caught = scope.spawn(|| {
                eventually("the signal is caught", || {
                    other.ask("caught", "caught").contains(" 10:").then_some(())
                });
            });
            // A tool that sends requests without a pause, until the other process has caught its signal.
            while is_busy && !caught.is_finished() {
                lease.answer(&Request::State(process.pid()), Some).unwrap();
            }
        });
    }
    assert!(is_stopped(lent.pid()));
    lease.resume_all();
    assert!(!lease.is_lost());
    follower.end();
}

#[test]
fn address_can_be_taken_once() {
    let talker = Talker::start(&fixture("idle_threads.pie"));
    let process = &Process::open(talker.pid()).unwrap();
    with_lender(&[process], |tracees, mut first| {
        let second = Lender::with(PATIENT);
        let error = second.error().unwrap();
        assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
        first.close();
        first.serve(tracees);
        let refused = Lease::connect(gettid().as_raw(), process, true, LIMIT);
        assert_eq!(refused.err(), Some(NoLease::Absent));
    });
}

#[test]
fn program_without_random_bytes_is_not_lent() {
    let mut talker = Talker::start(&fixture("idle_threads.pie"));
    let follower = Follower::patient(talker.pid());
    let process = &Process::open(talker.pid()).unwrap();
    let memory = ProcessMemory::open(process, OFlag::O_RDWR).unwrap();
    let at = random_bytes_at(process).unwrap().unwrap();
    memory.write(at, &[0; 16]).unwrap();
    let stopped = with_tracer(&[process], |tracer| {
        tracer.stop(process, LIMIT).map(Stopped::release)
    });
    let text = stopped.unwrap_err().to_string();
    let expected = format!(
        "cannot ask the follower to stop process {}: ",
        process.pid()
    );
    assert!(text.starts_with(&expected), "{text}");
    talker.hits();
    follower.end();
}

#[test]
fn lost_lease_is_not_blamed_on_seccomp() {
    let talker = Talker::start(&fixture("seccomp.pie"));
    let limits = Limits {
        silence: Duration::from_millis(10),
        ..PATIENT
    };
    let follower = Follower::with(&[talker.pid()], limits);
    let process = &Process::open(talker.pid()).unwrap();
    let checked = with_tracer(&[process], |tracer| {
        let stopped = tracer.stop(process, LIMIT)?;
        eventually("the process is resumed", || {
            (!is_stopped(process.pid())).then_some(())
        });
        Permissions::of(process, false).check_some_thread_may_call(&stopped, &[])
    });
    let error = checked.unwrap_err();
    let kind = error.kind();
    assert!(
        matches!(kind, ErrorKind::Process(ProcessError::FollowerLost)),
        "{error}"
    );
    follower.end();
}

/// A fake follower: replies to each stop request after `pause`, and reports `code` as the program counter until it has
/// received `stops` stop requests.
fn serve_with_thread_at(
    code: u64,
    stops: usize,
    pause: Duration,
    process: &Process,
    started: Sender<()>,
) {
    let served = with_tracer(&[process], |tracer| {
        let mut tracees = TraceeSet::new(tracer);
        let listener = PacketSocket::listen(&lease::address(gettid().as_raw())).unwrap();
        let stopped = tracees.stop_and_keep(process, LIMIT).unwrap();
        let mut registers = ptrace::registers(process.pid()).unwrap();
        tracees.resume(process, stopped);
        tracees.resume_now(process.pid());
        started.send(()).unwrap();
        let client = eventually("a tool connects", || listener.accept().ok());
        let mut buffer = vec![0; MAX_LEN];
        let mut stop_requests = 0;
        loop {
            client.wait_for_message(LIMIT).unwrap();
            let Ok((len, _)) = client.receive(&mut buffer) else {
                return Ok(());
            };
            let Some(request) = Request::parse(&buffer[..len]) else {
                client.send(&Welcome::Accepted.to_bytes(), None).unwrap();
                continue;
            };
            let reply = match request {
                Request::Stop(_) => {
                    std::thread::sleep(pause);
                    stop_requests += 1;
                    Reply::Stopped(vec![process.pid()])
                }
                Request::Registers(_) => {
                    registers.rip = if stop_requests < stops { code } else { 0 };
                    Reply::Registers(Box::new(registers))
                }
                Request::State(_) => Reply::State(TraceeState::EventStopped),
                Request::RseqAddress(_) => Reply::RseqAddress(None),
                _ => Reply::Done,
            };
            client.send(&reply.to_bytes(), None).unwrap();
        }
    });
    served.unwrap();
}

#[test]
fn unfinished_call_is_reported_as_such() {
    let talker = Talker::start(&fixture("idle_threads.pie"));
    let process = &Process::open(talker.pid()).unwrap();
    let memory = &ProcessMemory::open(process, OFlag::O_RDONLY).unwrap();
    let code = 0x1000..0x1010;
    // It has executed something, and is still there.
    let inside = code.start + 1;
    let limit = Duration::from_millis(5);
    let (started, is_started) = channel();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            serve_with_thread_at(inside, usize::MAX, Duration::ZERO, process, started);
        });
        is_started.recv().unwrap();
        let ran = with_tracer(&[process], |tracer| {
            let stopped = tracer.stop(process, limit)?;
            let before = redirectable(stopped.calls(), process.pid(), memory).unwrap();
            let to = RedirectTarget {
                entry: LiveAddr(code.start),
                lingers_at: None,
                range: code.clone(),
                is_done: None,
            };
            let thread = (process.pid(), before);
            let (stopped, _) = tracer.run_at(process, stopped, thread, &to, limit)?;
            stopped.release();
            Ok(())
        });
        let error = ran.unwrap_err();
        let is_said = matches!(
            error.kind(),
            ErrorKind::Observe(ObserveError::CallUnfinished)
        );
        assert!(is_said && error.is_transient(), "{error}");
    });
}

/// Begins to follow a process, and waits for a tool to connect.
fn follow_until_connected(
    tracees: &mut TraceeSet<'_>,
    process: &Process,
    started: &Sender<()>,
) -> PacketSocket {
    let listener = PacketSocket::listen(&lease::address(gettid().as_raw())).unwrap();
    add(tracees, process);
    started.send(()).unwrap();
    eventually("a tool connects", || listener.accept().ok())
}

#[test]
fn lock_is_skipped_for_its_holder_only() {
    let talker = Talker::start(&fixture("idle_threads.pie"));
    let process = &Process::open(talker.pid()).unwrap();
    with_lender(&[process], |tracees, mut lender| {
        let (own, pid) = (std::process::id() as i32, process.pid());
        let memory = memory_file(pid);
        let connect = |lender: &mut Lender, holds_lock: bool| {
            let socket = PacketSocket::connect(&lease::address(gettid().as_raw())).unwrap();
            let bytes = hello(pid, holds_lock);
            socket.send(&bytes, Some(memory.as_fd())).unwrap();
            lender.lends_to(own, pid, tracees).then_some(socket)
        };
        assert!(connect(&mut lender, false).is_none());
        let socket = connect(&mut lender, true).unwrap();
        assert!(!lender.lends_to(own, own, tracees));
        assert!(!lender.lends_to(1, pid, tracees));
        // Without the connection, another thread of the tool may hold the lock.
        drop(socket);
        // A child that another test starts now has a copy until its exec.
        eventually("the connection is closed", || {
            (!lender.lends_to(own, pid, tracees)).then_some(())
        });
    });
}

#[test]
fn filters_are_read_for_the_privileged_only() {
    let may_read = |admin: bool, seccomp: u32| {
        let effective = if admin { u64::MAX } else { 0 };
        let status = Status {
            effective,
            seccomp,
            ..Status::default()
        };
        may_read_filters(&status)
    };
    assert!(may_read(true, 0));
    assert!(!may_read(false, 0) && !may_read(true, 1) && !may_read(true, 2));
    let talker = Talker::start(&fixture("idle_threads.pie"));
    let process = &Process::open(talker.pid()).unwrap();
    let mut command = std::process::Command::new("cat");
    command.stdin(std::process::Stdio::piped());
    if geteuid().is_root() {
        command.uid(65534);
    }
    let unprivileged = Guard::spawn(&mut command);
    with_lender(&[process], |tracees, _| {
        let (_other, socket) = PacketSocket::pair().unwrap();
        let proof = Proof::of(process.pid(), memory_file(process.pid())).unwrap();
        let lending = Lending {
            socket: &socket,
            tool: unprivileged.pid(),
            proof: &proof,
            limits: PATIENT,
            until: Instant::now() + LIMIT,
            has_run: false.into(),
            next_tick: Instant::now().into(),
        };
        lending.stop(LIMIT, tracees).unwrap();
        let asked = lending.call(Request::SeccompFilter(process.pid(), 0), tracees);
        assert_eq!(asked, Err(Errno::EACCES));
        tracees.resume_now(process.pid());
    });
}

#[test]
fn threads_with_something_to_report_are_not_resumed() {
    let mut talker = Talker::start(&fixture("job.pie"));
    let pid = talker.pid();
    let follower = Follower::patient(pid);
    talker.ask("catch 10", "catching");
    let process = Process::open(pid).unwrap();
    let lease = Lease::connect(follower.tid, &process, true, LIMIT).unwrap();
    lease.stop(LIMIT).unwrap().unwrap();
    let trapped = lease.answer(&Request::State(pid), Some);
    assert_eq!(trapped, Ok(Reply::State(TraceeState::EventStopped)));
    lease.call(&Request::ResumeThread(pid)).unwrap();
    // It runs now, so there is nothing to resume.
    assert_eq!(lease.call(&Request::ResumeThread(pid)), Err(Errno::EBUSY));
    kill(Pid::from_raw(pid), Signal::SIGUSR1).unwrap();
    eventually("it is about to receive the signal", || {
        let state = lease.answer(&Request::State(pid), Some);
        (state == Ok(Reply::State(TraceeState::Signal(10)))).then_some(())
    });
    assert_eq!(lease.call(&Request::ResumeThread(pid)), Err(Errno::EBUSY));
    assert_eq!(lease.stop(LIMIT).unwrap(), Ok(vec![pid]));
    lease.resume_all();
    let caught = talker.ask("caught", "caught");
    assert!(caught.starts_with("caught 10:"), "{caught}");
    follower.end();
}

#[test]
fn exited_process_is_not_stopped() {
    let mut talker = Talker::start(&fixture("idle_threads.pie"));
    let pid = talker.pid();
    let follower = Follower::patient(pid);
    let process = Process::open(pid).unwrap();
    let lease = Lease::connect(follower.tid, &process, true, LIMIT).unwrap();
    talker.guard().child().kill().unwrap();
    talker.guard().wait();
    let refused = lease.stop(LIMIT).unwrap();
    assert!(matches!(
        refused,
        Err(NotStopped::Exited | NotStopped::NotLent)
    ));
    assert!(!lease.is_lost() && !lease.has_stopped());
    follower.end();
}

/// Follows a process, and replies to every tool with another protocol version.
fn follow_as_another_version(pid: i32, started: Sender<()>, stop: &AtomicBool) {
    let process = &Process::open(pid).unwrap();
    let followed = with_tracer(&[process], move |tracer| {
        let mut tracees = TraceeSet::new(tracer);
        let listener = PacketSocket::listen(&lease::address(gettid().as_raw())).unwrap();
        let stopped = tracees.stop_and_keep(process, LIMIT)?;
        tracees.resume(process, stopped);
        started.send(()).unwrap();
        while !stop.load(Ordering::SeqCst) {
            while tracees.next(Instant::now() + FOLLOW_TICK).is_some() {}
            if let Ok(client) = listener.accept() {
                client.wait_for_message(LIMIT).unwrap();
                let version = Welcome::OtherVersion(lease::message::VERSION + 1);
                client.send(&version.to_bytes(), None).unwrap();
            }
            tracees.wait();
        }
        Ok(())
    });
    followed.unwrap();
}

#[test]
fn follower_of_another_version_is_named() {
    let mut talker = Talker::start(&fixture("idle_threads.pie"));
    let pid = talker.pid();
    let process = &Process::open(pid).unwrap();
    let stop = AtomicBool::new(false);
    let (started, is_started) = channel();
    let stopped = std::thread::scope(|scope| {
        scope.spawn(|| follow_as_another_version(pid, started, &stop));
        is_started.recv().unwrap();
        let stopped = with_tracer(&[process], |tracer| {
            tracer.stop(process, LIMIT).map(Stopped::release)
        });
        stop.store(true, Ordering::SeqCst);
        stopped
    });
    let text = stopped.unwrap_err().to_string();
    let expected = format!("process {pid} is followed by pid {} (", std::process::id());
    assert!(text.starts_with(&expected), "{text}");
    let end = "), another version of this tool, which does not lend it";
    assert!(text.ends_with(end), "{text}");
    talker.hits();
}

#[test]
fn tracer_uses_the_follower() {
    let mut talker = Talker::start(&fixture("idle_threads.pie"));
    let pid = talker.pid();
    let follower = Follower::patient(pid);
    let process = &Process::open(pid).unwrap();
    let stop = |times: usize| -> Result<()> {
        with_tracer(&[process], |tracer| {
            for _ in 0..times {
                tracer.stop(process, LIMIT)?.release();
            }
            Ok(())
        })
    };
    stop(3).unwrap();
    talker.hits();
    follower.end();
    stop(1).unwrap();
    talker.hits();
}

/// A follower that ends before it answers that it does not lend the process.
fn refuse_and_end(process: &Process, started: Sender<()>) {
    let client = with_tracer(&[process], |tracer| {
        let mut tracees = TraceeSet::new(tracer);
        let client = follow_until_connected(&mut tracees, process, &started);
        client.wait_for_message(LIMIT).unwrap();
        Ok(client)
    });
    eventually("it is not traced", || {
        (process.status().unwrap().tracer == 0).then_some(())
    });
    client
        .unwrap()
        .send(&Welcome::Refused.to_bytes(), None)
        .unwrap();
}

#[test]
fn process_is_stopped_after_its_follower_exits() {
    let mut talker = Talker::start(&fixture("idle_threads.pie"));
    let process = &Process::open(talker.pid()).unwrap();
    let (started, is_started) = channel();
    std::thread::scope(|scope| {
        scope.spawn(|| refuse_and_end(process, started));
        is_started.recv().unwrap();
        let stopped = with_tracer(&[process], |tracer| {
            tracer.stop(process, LIMIT).map(Stopped::release)
        });
        stopped.unwrap();
    });
    talker.hits();
}

#[test]
fn listener_that_is_not_the_tracer_is_refused() {
    let talker = Talker::start(&fixture("idle_threads.pie"));
    let process = Process::open(talker.pid()).unwrap();
    // Our own process has taken the address of that one.
    let _listener = PacketSocket::listen(&lease::address(talker.pid())).unwrap();
    let refused = Lease::connect(talker.pid(), &process, true, LIMIT);
    assert_eq!(refused.err(), Some(NoLease::Refused));
}
