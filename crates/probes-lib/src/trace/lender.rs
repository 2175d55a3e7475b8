//! [`Lender`]: lends processes that are followed to other tools (see `lease.rs`), in the tracer thread.

use std::fs;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::OFlag;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::unistd::{geteuid, gettid};

use crate::error::{Error, ErrorKind, ProcessError, Subject};
use crate::process::Process;
use crate::sys::peer;
use crate::sys::ptrace;
use crate::trace::lease;
use crate::trace::lease::message::{NotHeld, Reply, Request};
use crate::trace::tracee_set::TraceeSet;

/// How many tools may be connected at once.
const MAX_CLIENTS: usize = 16;

/// How long a tool may be silent while a process is lent to it, and how long it may take to read an answer:
/// meanwhile, nothing else that is followed is handled.
const MAX_SILENCE: Duration = Duration::from_secs(1);

/// For how long a process is lent at most.
const MAX_LEASE: Duration = Duration::from_secs(10);

/// How long it may take at most to stop a process that is lent.
const MAX_LIMIT: Duration = Duration::from_secs(10);

/// Lends processes.
pub(crate) struct Lender {
    /// `None` if the address cannot be had: then nothing is lent.
    listener: Option<UnixListener>,
    clients: Vec<Client>,
}

/// A tool that is connected.
struct Client {
    stream: UnixStream,
    credentials: peer::Credentials,
    /// What it has asked for, if that was read.
    asked: Option<Request>,
    is_gone: bool,
}

/// A process that is to be held.
struct Hold {
    pid: i32,
    limit: Duration,
    proof: i32,
}

impl Lender {
    /// Waits for tools from now on; to be called by the tracer thread, by whose id they find it.
    pub(crate) fn new() -> Lender {
        let listen = || -> io::Result<UnixListener> {
            let listener = UnixListener::bind_addr(&lease::address(gettid().as_raw())?)?;
            listener.set_nonblocking(true)?;
            Ok(listener)
        };
        Lender {
            listener: listen().ok(),
            clients: Vec::new(),
        }
    }

    /// Does what tools ask for, if any do, until each has released its process.
    pub(crate) fn serve(&mut self, tracees: &mut TraceeSet<'_>) {
        self.listen();
        for client in &mut self.clients {
            if let Some(request) = client.asked.take() {
                client.is_gone = client.serve(request, tracees).is_err();
            }
        }
        self.clients.retain(|client| !client.is_gone);
    }

    /// Returns whether a tool has asked to hold a process, and waits for that.
    pub(crate) fn is_asked_for(&mut self, pid: i32) -> bool {
        self.listen();
        let asked = self.clients.iter().map(|client| &client.asked);
        asked
            .flatten()
            .any(|request| matches!(request, Request::Hold { pid: it, .. } if *it == pid))
    }

    /// Reads what tools have asked for.
    fn listen(&mut self) {
        self.accept();
        for client in self
            .clients
            .iter_mut()
            .filter(|client| client.is_readable())
        {
            match Request::receive(&client.stream) {
                Ok(request) => client.asked = Some(request),
                Err(_) => client.is_gone = true,
            }
        }
        self.clients.retain(|client| !client.is_gone);
    }

    fn accept(&mut self) {
        let Some(listener) = &self.listener else {
            return;
        };
        while let Ok((stream, _)) = listener.accept() {
            if self.clients.len() < MAX_CLIENTS {
                self.clients.extend(Client::of(stream).ok());
            }
        }
    }
}

impl Client {
    fn of(stream: UnixStream) -> io::Result<Client> {
        stream.set_read_timeout(Some(MAX_SILENCE))?;
        stream.set_write_timeout(Some(MAX_SILENCE))?;
        let credentials = peer::credentials(&stream)?;
        // Only root and we ourselves: a program may gain privileges when it is executed, and others keep
        // the descriptor of its memory that they had before.
        if ![0, geteuid().as_raw()].contains(&credentials.uid) || credentials.pid == 0 {
            return Err(Errno::EPERM.into());
        }
        Ok(Client {
            stream,
            credentials,
            asked: None,
            is_gone: false,
        })
    }

    /// Whether it has sent something, or has gone; false if it waits for an answer.
    fn is_readable(&self) -> bool {
        if self.asked.is_some() {
            return false;
        }
        let mut fds = [PollFd::new(self.stream.as_fd(), PollFlags::POLLIN)];
        poll(&mut fds, PollTimeout::ZERO).is_ok_and(|count| count > 0)
    }

    /// Does what it asks for until it has released its process; fails once it has gone or is silent for
    /// too long. Its process is resumed by the caller, when that handles what the threads have reported.
    fn serve(&self, request: Request, tracees: &mut TraceeSet<'_>) -> io::Result<()> {
        let begun = Instant::now();
        let (mut request, mut held) = (request, None);
        while begun.elapsed() < MAX_LEASE {
            let reply = match (request, held) {
                (
                    Request::Hold {
                        pid,
                        limit_ms,
                        proof,
                    },
                    _,
                ) => {
                    let limit = Duration::from_millis(limit_ms).min(MAX_LIMIT);
                    let hold = Hold { pid, limit, proof };
                    match self.hold(tracees, &hold) {
                        Ok(tids) => {
                            held = Some(pid);
                            Reply::Held(tids)
                        }
                        Err(why) => return Reply::NotHeld(why).send(&self.stream),
                    }
                }
                (Request::Release, _) => return Reply::Done.send(&self.stream),
                (request, Some(pid)) => call(tracees, pid, request),
                (_, None) => return Err(io::ErrorKind::InvalidData.into()),
            };
            reply.send(&self.stream)?;
            request = Request::receive(&self.stream)?;
        }
        Err(io::ErrorKind::TimedOut.into())
    }

    /// Stops all threads of a process.
    fn hold(&self, tracees: &mut TraceeSet<'_>, hold: &Hold) -> Result<Vec<i32>, NotHeld> {
        let process = Process::open(hold.pid).map_err(|_| NotHeld::Exited)?;
        if !tracees.has(hold.pid) || !self.may_write(&process, hold.proof) {
            return Err(NotHeld::Refused);
        }
        let stopped = tracees.stop_and_keep(&process, hold.limit);
        let stopped = stopped.map_err(|error| why_not_held(&error))?;
        let tids = stopped.tids().collect();
        tracees.resume(&process, stopped);
        Ok(tids)
    }

    /// Whether the tool has opened the memory of a process to write it: for that, the kernel has checked
    /// whether it may trace the process (ptrace(2), "Ptrace access mode checking").
    fn may_write(&self, process: &Process, proof: i32) -> bool {
        let peer = &self.credentials;
        // The descriptors of root can be looked at by root alone.
        is_memory_to_write(process, peer.pid, proof).unwrap_or(peer.uid == 0)
    }
}

/// Whether the descriptor `proof` of the process `holder` is the memory of `process`, opened to write.
fn is_memory_to_write(process: &Process, holder: i32, proof: i32) -> io::Result<bool> {
    let memory = process.open_file("mem", OFlag::O_RDONLY)?.metadata()?;
    let folder = format!("/proc/{holder}");
    let theirs = fs::metadata(format!("{folder}/fd/{proof}"))?;
    let info = fs::read_to_string(format!("{folder}/fdinfo/{proof}"))?;
    let flags = info.lines().find_map(|line| line.strip_prefix("flags:"));
    let flags = flags.and_then(|flags| i32::from_str_radix(flags.trim(), 8).ok());
    let is_writable = flags.is_some_and(|flags| flags & libc::O_ACCMODE == libc::O_RDWR);
    Ok(is_writable && (theirs.dev(), theirs.ino()) == (memory.dev(), memory.ino()))
}

/// Makes a call about a thread of a process that is held.
fn call(tracees: &TraceeSet<'_>, pid: i32, request: Request) -> Reply {
    let is_of_process = |tid| tracees.process_of(tid) == Some(pid);
    let done = match request {
        Request::Wait(tid) if is_of_process(tid) => Ok(Reply::Wait(ptrace::peek_wait(tid))),
        Request::Resume(tid) if is_of_process(tid) => {
            ptrace::resume(tid, 0);
            Ok(Reply::Done)
        }
        Request::Registers(tid) if is_of_process(tid) => {
            ptrace::registers(tid).map(|registers| Reply::Registers(Box::new(registers)))
        }
        Request::SetRegisters(tid, registers) if is_of_process(tid) => {
            ptrace::set_registers(tid, *registers).map(|()| Reply::Done)
        }
        Request::RseqAddress(tid) if is_of_process(tid) => {
            Ok(Reply::RseqAddress(ptrace::rseq_cs_address(tid)))
        }
        Request::SeccompFilter(tid, index) if is_of_process(tid) => {
            ptrace::seccomp_filter(tid, index).map(Reply::SeccompFilter)
        }
        Request::Poke(tid, at, bytes) if is_of_process(tid) => {
            let poked = ptrace::poke_text(tid, at, &bytes);
            poked.map(|()| Reply::Done).map_err(|_| Errno::EIO)
        }
        _ => Err(Errno::ESRCH),
    };
    done.unwrap_or_else(Reply::Failed)
}

fn why_not_held(error: &Error) -> NotHeld {
    let tid = match error.subject() {
        Subject::Thread { tid, .. } => *tid,
        _ => 0,
    };
    match error.kind() {
        ErrorKind::Process(ProcessError::Busy { .. }) => NotHeld::Busy(tid),
        ErrorKind::Process(ProcessError::ThreadsKeepStarting { .. }) => {
            NotHeld::ThreadsKeepStarting
        }
        ErrorKind::Process(ProcessError::Executed) => NotHeld::Executed,
        _ if error.is_gone() => NotHeld::Exited,
        _ => NotHeld::Refused,
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::AsRawFd;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::sync::mpsc::{Sender, channel};
    use std::thread::JoinHandle;

    use test_support::{Talker, eventually, fixture};

    use super::*;
    use crate::trace::lease::Lease;
    use crate::trace::tracee_set::TICK;
    use crate::trace::tracer::with_tracer;

    const LIMIT: Duration = Duration::from_secs(30);

    /// A thread that follows a process, and lends it.
    struct Follower {
        tid: i32,
        is_over: Arc<AtomicBool>,
        thread: JoinHandle<()>,
    }

    impl Follower {
        fn of(pid: i32) -> Follower {
            let (tid, started) = channel();
            let is_over = Arc::new(AtomicBool::new(false));
            let stop = is_over.clone();
            let thread = std::thread::spawn(move || follow(pid, tid, &stop));
            Follower {
                tid: started.recv().unwrap(),
                is_over,
                thread,
            }
        }

        fn end(self) {
            self.is_over.store(true, Ordering::SeqCst);
            self.thread.join().unwrap();
        }
    }

    fn follow(pid: i32, started: Sender<i32>, stop: &AtomicBool) {
        let process = &Process::open(pid).unwrap();
        let followed = with_tracer(&[process], move |tracer| {
            let mut tracees = TraceeSet::new(tracer);
            let mut lender = Lender::new();
            let stopped = tracees.stop_and_keep(process, LIMIT)?;
            tracees.resume(process, stopped);
            started.send(gettid().as_raw()).unwrap();
            while !stop.load(Ordering::SeqCst) {
                while tracees.next(Instant::now() + TICK).is_some() {}
                lender.serve(&mut tracees);
                tracees.wait();
            }
            Ok(())
        });
        followed.unwrap();
    }

    fn is_stopped(pid: i32) -> bool {
        test_support::process::state(pid) == Some('t')
    }

    #[test]
    fn process_is_held_until_released_or_abandoned() {
        let mut talker = Talker::start(&fixture("idle_threads.pie"));
        let pid = talker.pid();
        let follower = Follower::of(pid);
        let process = Process::open(pid).unwrap();
        for ends_by_release in [true, false, true] {
            let lease = Lease::connect(follower.tid, &process).unwrap();
            let mut tids = lease.hold(pid, LIMIT).unwrap().unwrap();
            tids.sort_unstable();
            let mut threads = process.threads().unwrap().read().unwrap();
            threads.sort_unstable();
            assert_eq!(tids, threads);
            assert!(tids.iter().all(|tid| is_stopped(*tid)));
            let registers = lease.reply(&Request::Registers(pid)).unwrap();
            assert!(matches!(&registers, Reply::Registers(it) if it.rip != 0));
            // Once more, as after a part of it has run.
            assert_eq!(lease.hold(pid, LIMIT).unwrap().unwrap().len(), tids.len());
            if ends_by_release {
                lease.release();
                talker.hits();
            } else {
                drop(lease);
                talker.hits();
            }
        }
        follower.end();
        talker.hits();
    }

    #[test]
    fn silent_tool_loses_the_process() {
        let mut talker = Talker::start(&fixture("idle_threads.pie"));
        let pid = talker.pid();
        let follower = Follower::of(pid);
        let lease = Lease::connect(follower.tid, &Process::open(pid).unwrap()).unwrap();
        lease.hold(pid, LIMIT).unwrap().unwrap();
        // It answers although nothing is released.
        talker.hits();
        assert_eq!(lease.reply(&Request::Registers(pid)), Err(Errno::ESRCH));
        follower.end();
    }

    #[test]
    fn only_threads_of_the_held_process_are_touched() {
        let talker = Talker::start(&fixture("idle_threads.pie"));
        let other = Talker::start(&fixture("idle_threads.pie"));
        let pid = talker.pid();
        let follower = Follower::of(pid);
        let lease = Lease::connect(follower.tid, &Process::open(pid).unwrap()).unwrap();
        let refused = Some(NotHeld::Refused);
        assert_eq!(lease.hold(other.pid(), LIMIT).unwrap().err(), refused);
        lease.hold(pid, LIMIT).unwrap().unwrap();
        for tid in [other.pid(), 1, -1, 0] {
            let wait = lease.reply(&Request::Wait(tid));
            assert_eq!(wait, Err(Errno::ESRCH), "{tid}");
            assert!(lease.call(&Request::Resume(tid)).is_err());
        }
        lease.release();
        follower.end();
    }

    #[test]
    fn request_out_of_order_ends_the_connection() {
        let mut talker = Talker::start(&fixture("idle_threads.pie"));
        let pid = talker.pid();
        let follower = Follower::of(pid);
        let lease = Lease::connect(follower.tid, &Process::open(pid).unwrap()).unwrap();
        assert_eq!(lease.reply(&Request::Wait(pid)), Err(Errno::ESRCH));
        assert!(lease.hold(pid, LIMIT).is_err());
        talker.hits();
        follower.end();
    }

    #[test]
    fn proof_is_the_memory_opened_to_write() {
        let talker = Talker::start(&fixture("idle_threads.pie"));
        let (pid, own) = (talker.pid(), std::process::id() as i32);
        let process = Process::open(pid).unwrap();
        let open = |pid: i32, write: bool| {
            let mut options = File::options();
            let options = options.read(true).write(write);
            options.open(format!("/proc/{pid}/mem")).unwrap()
        };
        let proves = |file: &File| is_memory_to_write(&process, own, file.as_raw_fd());
        assert!(proves(&open(pid, true)).unwrap());
        assert!(!proves(&open(pid, false)).unwrap());
        assert!(!proves(&open(own, true)).unwrap());
        assert!(is_memory_to_write(&process, own, -1).is_err());
        eventually("the process waits", || {
            (test_support::process::state(pid) == Some('S')).then_some(())
        });
    }
}
