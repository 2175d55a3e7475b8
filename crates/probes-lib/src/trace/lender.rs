//! [`Lender`]: lends processes that are followed to other tools (see `lease.rs`), in the tracer thread.
//!
//! ```text
//! connected ──Hello──▶ known ──Stop──▶ lent        at most one: only that tool is answered meanwhile
//!                        ▲──ResumeAll──┘
//! ```
//!
//! A tool loses the process if it is silent while the process is stopped, closes its socket, or sends a request that is
//! not permitted: the process is resumed before anything else is done. Other tools are never waited for.

use std::cell::Cell;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::{AtFlags, FcntlArg, OFlag, fcntl};
use nix::sys::stat::fstatat;
use nix::unistd::gettid;

use crate::error::{Error, ErrorKind, ProcessError, Subject, SystemError};
use crate::process::memory::ProcessMemory;
use crate::process::status::Status;
use crate::process::{Process, is_task_gone};
use crate::sys::packet_socket::PacketSocket;
use crate::sys::ptrace::{self, TraceeState};
use crate::trace::lease::message::{
    Hello, MAX_LEN, MAX_THREADS, NotStopped, Reply, Request, Welcome,
};
use crate::trace::lease::{self, is_own_user};
use crate::trace::tracee_set::{FOLLOW_TICK, TraceeSet};

/// How many tools may be connected at once.
const MAX_CLIENTS: usize = 8;

/// How many connections are accepted before the followed processes are looked at again. Any user can connect, and is
/// refused only once the connection is accepted.
const MAX_ACCEPTED: usize = 16;

/// How long tools may take.
#[derive(Clone, Copy, Debug)]
struct Limits {
    /// To send a request while their process is stopped.
    silence: Duration,
    /// To have it resumed, including the time that stopping it takes.
    stopped: Duration,
    /// To send a request otherwise.
    idle: Duration,
}

impl Limits {
    const USUAL: Limits = Limits {
        silence: Duration::from_secs(2),
        stopped: Duration::from_secs(5),
        idle: Duration::from_secs(10),
    };
}

/// Lends processes.
pub(crate) struct Lender {
    /// An error if the address is taken, or sockets cannot be had: then nothing is lent.
    listener: io::Result<PacketSocket>,
    clients: Vec<Client>,
    limits: Limits,
    /// For messages.
    buffer: Vec<u8>,
}

/// A tool that is connected.
struct Client {
    socket: PacketSocket,
    /// Its pid.
    pid: i32,
    /// Whether it has said that the operation for which it is connected holds the update lock of the process.
    holds_lock: bool,
    /// The process that it may change, once it has proved that it may.
    proof: Option<Proof>,
    last_heard: Instant,
}

/// A process that a tool may change.
struct Proof {
    process: Process,
    /// The memory of the process, as the tool has opened it to write. [`Request::Write`] is carried out through it, so
    /// that it writes only what the tool could write itself.
    memory: ProcessMemory,
}

/// What has come from a tool.
enum Received {
    Nothing,
    Message(usize, Option<OwnedFd>),
    End,
}

impl Lender {
    /// Begins to listen for tools; to be called by the tracer thread, by whose id they find it.
    pub(crate) fn new() -> Lender {
        Lender::with(Limits::USUAL)
    }

    fn with(limits: Limits) -> Lender {
        Lender {
            listener: PacketSocket::listen(&lease::address(gettid().as_raw())),
            clients: Vec::new(),
            limits,
            buffer: vec![0; MAX_LEN],
        }
    }

    /// Returns why nothing is lent, if that is so.
    pub(crate) fn error(&self) -> Option<&io::Error> {
        self.listener.as_ref().err()
    }

    /// Lends nothing from now on.
    pub(crate) fn close(&mut self) {
        self.listener = Err(io::ErrorKind::NotConnected.into());
        self.clients.clear();
    }

    /// Does what tools ask for. At most one process is lent before the followed processes are looked at again: its tool is
    /// answered until the process is resumed, and comes last the next time.
    pub(crate) fn serve(&mut self, tracees: &mut TraceeSet<'_>) {
        self.welcome(tracees);
        let (limits, buffer) = (self.limits, &mut self.buffer);
        for _ in 0..self.clients.len() {
            let mut client = self.clients.remove(0);
            let request = client.request(limits, buffer);
            let is_lent = matches!(request, Ok(Some(Request::Stop(_))));
            let served = request.and_then(|request| match request {
                Some(request) => client.serve(request, tracees, limits, buffer),
                None => Ok(()),
            });
            if served.is_ok() {
                self.clients.push(client);
            }
            if is_lent {
                return;
            }
        }
    }

    /// Accepts connections, and checks the tools that have said which process they want to change.
    fn welcome(&mut self, tracees: &TraceeSet<'_>) {
        for _ in 0..MAX_ACCEPTED {
            let accepted = self.listener.as_ref().map(PacketSocket::accept);
            let Ok(Ok(socket)) = accepted else {
                break;
            };
            let peer = socket.peer().ok().filter(|peer| is_own_user(*peer));
            if let Some(peer) = peer.filter(|_| self.clients.len() < MAX_CLIENTS) {
                self.clients.push(Client {
                    socket,
                    pid: peer.pid,
                    holds_lock: false,
                    proof: None,
                    last_heard: Instant::now(),
                });
            }
        }
        let (limits, buffer) = (self.limits, &mut self.buffer);
        self.clients.retain_mut(|client| {
            client.proof.is_some() || client.welcome(tracees, limits, buffer).is_ok()
        });
    }

    /// Returns whether the tool with pid `tool` is connected for an operation that holds the update lock of the process
    /// `pid`. Such an operation changes the process only while it is served; an operation of another thread of the same
    /// tool may change it at any time.
    pub(crate) fn lends_to(&mut self, tool: i32, pid: i32, tracees: &TraceeSet<'_>) -> bool {
        self.welcome(tracees);
        let is_meant = |proof: &Proof| proof.process.pid() == pid;
        self.clients.iter().any(|client| {
            let proof = client.proof.as_ref();
            client.pid == tool
                && client.holds_lock
                && proof.is_some_and(is_meant)
                && !client.socket.is_closed()
        })
    }
}

impl Client {
    /// Receives what has come, without waiting.
    fn receive(&mut self, limits: Limits, buffer: &mut [u8]) -> Received {
        match self.socket.receive(buffer) {
            Ok((len, descriptor)) => {
                self.last_heard = Instant::now();
                Received::Message(len, descriptor)
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                if self.last_heard.elapsed() > limits.idle {
                    Received::End
                } else {
                    Received::Nothing
                }
            }
            Err(_) => Received::End,
        }
    }

    /// Receives the first message, if it has come; fails unless it is accepted.
    fn welcome(
        &mut self,
        tracees: &TraceeSet<'_>,
        limits: Limits,
        buffer: &mut [u8],
    ) -> io::Result<()> {
        let (len, descriptor) = match self.receive(limits, buffer) {
            Received::Nothing => return Ok(()),
            Received::Message(len, descriptor) => (len, descriptor),
            Received::End => return Err(io::ErrorKind::UnexpectedEof.into()),
        };
        let hello = buffer.get(..len).and_then(Hello::parse);
        let answer = match hello.ok_or(io::ErrorKind::InvalidData)? {
            Hello::OtherVersion(_) => Welcome::OtherVersion(lease::message::VERSION),
            Hello::Process { pid, holds_lock } => {
                self.holds_lock = holds_lock;
                self.proof = descriptor
                    .filter(|_| tracees.has(pid))
                    .and_then(|memory| Proof::of(pid, memory.into()).ok());
                match self.proof {
                    Some(_) => Welcome::Accepted,
                    None => Welcome::Refused,
                }
            }
        };
        self.socket.send(&answer.to_bytes(), None)?;
        if self.proof.is_none() {
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        Ok(())
    }

    /// Receives its next request, if one has come; fails if its connection is to be closed.
    fn request(&mut self, limits: Limits, buffer: &mut [u8]) -> io::Result<Option<Request>> {
        if self.proof.is_none() {
            return Ok(None);
        }
        let len = match self.receive(limits, buffer) {
            Received::Nothing => return Ok(None),
            Received::Message(len, None) => len,
            Received::Message(..) | Received::End => return Err(io::ErrorKind::InvalidData.into()),
        };
        let request = buffer.get(..len).and_then(Request::parse);
        let request = request.ok_or(io::ErrorKind::InvalidData)?;
        Ok(Some(request))
    }

    /// Does what it asks for, until the process runs again; fails if its connection is to be closed.
    fn serve(
        &mut self,
        request: Request,
        tracees: &mut TraceeSet<'_>,
        limits: Limits,
        buffer: &mut [u8],
    ) -> io::Result<()> {
        let proof = self.proof.as_ref().ok_or(io::ErrorKind::InvalidData)?;
        let last = match request {
            Request::Stop(limit_ms) => {
                let since = Instant::now();
                let lending = Lending {
                    socket: &self.socket,
                    proof,
                    tool: self.pid,
                    limits,
                    has_run: false.into(),
                    until: Instant::now() + limits.stopped,
                    next_tick: Instant::now().into(),
                };
                let lent = lending.stop_until_resumed(limit_ms, tracees, buffer);
                // Whatever has failed, and before anything else.
                if lending.has_run.get() {
                    tracees.interrupt_running(proof.process.pid());
                }
                tracees.resume_now(proof.process.pid());
                match lent? {
                    Ok(()) => Reply::Resumed(since.elapsed()),
                    Err(why) => Reply::NotStopped(why),
                }
            }
            // The process is not stopped: perhaps because that has failed.
            Request::ResumeAll => Reply::Resumed(Duration::ZERO),
            _ => return Err(io::ErrorKind::InvalidData.into()),
        };
        self.last_heard = Instant::now();
        self.socket.send(&last.to_bytes(), None)
    }
}

impl Proof {
    /// Checks that `memory`, which a tool has sent, is the memory of that process, opened to write: for that, the
    /// kernel has checked whether the tool may trace the process (ptrace(2), "Ptrace access mode checking"). It may be
    /// the memory of a program that the process ran before ([`Proof::check_current`] finds that out later): to open the
    /// present one here would wait for an execve in progress, which may be waiting for us.
    fn of(pid: i32, memory: File) -> io::Result<Proof> {
        let process = Process::open(pid).map_err(|_| Errno::ESRCH)?;
        let mode = OFlag::from_bits_retain(fcntl(&memory, FcntlArg::F_GETFL)?) & OFlag::O_ACCMODE;
        if mode != OFlag::O_RDWR || identity(&memory)? != process.identity_of("mem")? {
            return Err(Errno::EPERM.into());
        }
        Ok(Proof {
            process,
            memory: ProcessMemory::of_file(memory),
        })
    }

    /// Checks that it is the memory of the program that the process runs now: after an execve, the tool may not be
    /// permitted to change that one. To be called while the process is stopped.
    fn check_current(&self) -> Result<(), NotStopped> {
        let read = || -> io::Result<_> {
            let memory = ProcessMemory::open(&self.process, OFlag::O_RDONLY)?;
            let own = memory.random_bytes(&self.process)?;
            Ok((own, self.memory.random_bytes(&self.process)?))
        };
        match read() {
            // The program has erased its random bytes: it is not known whether it is the same.
            Ok((Some(own), Some(_))) if own == [0; 16] => {
                Err(NotStopped::Failed(Errno::EOPNOTSUPP))
            }
            Ok((Some(own), Some(theirs))) if own == theirs => Ok(()),
            Ok(_) if self.process.has_exited() => Err(NotStopped::Exited),
            Ok(_) => Err(NotStopped::Executed),
            Err(error) if is_task_gone(&error) => Err(NotStopped::Exited),
            Err(error) => Err(NotStopped::Failed(errno_of(&error))),
        }
    }
}

/// A process that is lent to a tool.
struct Lending<'c> {
    socket: &'c PacketSocket,
    /// The pid of the tool.
    tool: i32,
    proof: &'c Proof,
    limits: Limits,
    until: Instant,
    /// Whether a thread has been resumed since the process was stopped: it may have executed a new program.
    has_run: Cell<bool>,
    /// When other processes are to be looked at.
    next_tick: Cell<Instant>,
}

impl Lending<'_> {
    /// Stops the process and does what the tool asks for, until it is to be resumed: because the tool asks for that, or
    /// because it could not be stopped. Fails if the tool has gone, is silent, or does what it may not.
    fn stop_until_resumed(
        &self,
        limit_ms: u64,
        tracees: &mut TraceeSet<'_>,
        buffer: &mut [u8],
    ) -> io::Result<Result<(), NotStopped>> {
        let mut request = Request::Stop(limit_ms);
        loop {
            let reply = match request {
                Request::Stop(limit_ms) => {
                    let left = self.until.saturating_duration_since(Instant::now());
                    let limit = Duration::from_millis(limit_ms).min(left);
                    match self.stop(limit, tracees) {
                        Ok(tids) => Reply::Stopped(tids),
                        Err(why) => return Ok(Err(why)),
                    }
                }
                Request::ResumeAll => return Ok(Ok(())),
                request => self.call(request, tracees).unwrap_or_else(Reply::Failed),
            };
            self.socket.send(&reply.to_bytes(), None)?;
            request = self.next(tracees, buffer)?;
        }
    }

    /// Waits for the next request; meanwhile, other processes receive their signals.
    fn next(&self, tracees: &TraceeSet<'_>, buffer: &mut [u8]) -> io::Result<Request> {
        let deadline = self.until.min(Instant::now() + self.limits.silence);
        loop {
            // However many requests this tool sends.
            if Instant::now() >= self.next_tick.get() {
                tracees.resume_others(self.proof.process.pid());
                self.next_tick.set(Instant::now() + FOLLOW_TICK);
            }
            let next = deadline.min(self.next_tick.get());
            let left = next.saturating_duration_since(Instant::now());
            match self.socket.wait_for_message(left) {
                Err(error)
                    if error.kind() == io::ErrorKind::TimedOut && Instant::now() < deadline => {}
                waited => break waited?,
            }
        }
        let (len, descriptor) = self.socket.receive(buffer)?;
        let request = buffer.get(..len).and_then(Request::parse);
        // A tool that keeps sending requests cannot keep the process stopped, either.
        request
            .filter(|_| Instant::now() < self.until && descriptor.is_none())
            .ok_or_else(|| io::ErrorKind::InvalidData.into())
    }

    /// Stops all threads of the process.
    fn stop(&self, limit: Duration, tracees: &mut TraceeSet<'_>) -> Result<Vec<i32>, NotStopped> {
        let process = &self.proof.process;
        if !tracees.has(process.pid()) {
            return Err(NotStopped::NotLent);
        }
        let stopped = tracees.stop_and_keep(process, limit);
        let stopped = stopped.map_err(|error| why_not_stopped(&error))?;
        let tids: Vec<i32> = stopped.tids().collect();
        tracees.resume(process, stopped);
        if tids.len() > MAX_THREADS {
            return Err(NotStopped::Failed(Errno::EMSGSIZE));
        }
        // The process is stopped, and cannot execute another program now.
        self.proof.check_current()?;
        self.has_run.set(false);
        Ok(tids)
    }

    /// Makes a call about a thread of the process, or writes its memory.
    fn call(&self, request: Request, tracees: &TraceeSet<'_>) -> Result<Reply, Errno> {
        // A thread that runs may have executed a new program, which the tool may not be permitted to change.
        let is_harmless = matches!(
            request,
            Request::State(_) | Request::Registers(_) | Request::ResumeThread(_)
        );
        if self.has_run.get() && !is_harmless {
            return Err(Errno::EBUSY);
        }
        let pid = self.proof.process.pid();
        let own = |tid: i32| {
            let is_own = tracees.process_of(tid) == Some(pid);
            is_own.then_some(tid).ok_or(Errno::ESRCH)
        };
        let stopped = |tid: i32| match ptrace::peek_state(own(tid)?) {
            TraceeState::Running
            | TraceeState::Executed
            | TraceeState::Exited
            | TraceeState::Gone => Err(Errno::ESRCH),
            TraceeState::Signal(_)
            | TraceeState::EventStopped
            | TraceeState::GroupStopped
            | TraceeState::Cloned(_) => Ok(tid),
        };
        match request {
            Request::State(tid) => Ok(Reply::State(ptrace::peek_state(own(tid)?))),
            Request::ResumeThread(tid) => {
                // Whatever else it is stopped for is for the follower to handle.
                if !matches!(
                    ptrace::peek_state(own(tid)?),
                    TraceeState::EventStopped | TraceeState::GroupStopped
                ) {
                    return Err(Errno::EBUSY);
                }
                self.has_run.set(true);
                ptrace::resume(tid, 0);
                Ok(Reply::Done)
            }
            Request::Registers(tid) => ptrace::registers(stopped(tid)?)
                .map(|registers| Reply::Registers(Box::new(registers))),
            Request::SetRegisters(tid, registers) => {
                ptrace::set_registers(stopped(tid)?, *registers).map(|()| Reply::Done)
            }
            Request::RseqAddress(tid) => {
                Ok(Reply::RseqAddress(ptrace::rseq_cs_address(stopped(tid)?)))
            }
            Request::SeccompFilter(tid, index) => {
                let status = Process::open(self.tool)
                    .ok()
                    .and_then(|it| it.status().ok());
                if !status.is_some_and(|status| may_read_filters(&status)) {
                    return Err(Errno::EACCES);
                }
                ptrace::seccomp_filter(stopped(tid)?, index).map(Reply::SeccompFilter)
            }
            Request::Write(at, bytes) => written(self.proof.memory.write(at, &bytes)),
            Request::Poke(tid, at, bytes) => written(ptrace::poke_text(stopped(tid)?, at, &bytes)),
            Request::Stop(_) | Request::ResumeAll => Err(Errno::EINVAL),
        }
    }
}

/// Returns whether the kernel would let a process with this status read seccomp filters itself.
fn may_read_filters(status: &Status) -> bool {
    status.is_admin() && status.seccomp == 0
}

/// Returns the device and inode of a file, without asking the server of its file system, which may not answer: a tool
/// may have sent any file. Fails before Linux 4.11.
fn identity(file: &File) -> io::Result<(u64, u64)> {
    let flags = libc::AT_EMPTY_PATH | libc::AT_STATX_DONT_SYNC;
    let status = fstatat(file, "", AtFlags::from_bits_retain(flags))?;
    Ok((status.st_dev, status.st_ino))
}

fn written(result: io::Result<()>) -> Result<Reply, Errno> {
    match result {
        Ok(()) => Ok(Reply::Done),
        // The process has exited.
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Err(Errno::ESRCH),
        Err(error) => Err(errno_of(&error)),
    }
}

fn errno_of(error: &io::Error) -> Errno {
    error.raw_os_error().map_or(Errno::EIO, Errno::from_raw)
}

fn why_not_stopped(error: &Error) -> NotStopped {
    let tid = match error.subject() {
        Subject::Thread { tid, .. } => *tid,
        _ => 0,
    };
    match error.kind() {
        ErrorKind::Process(ProcessError::Busy { .. }) => NotStopped::Busy(tid),
        ErrorKind::Process(ProcessError::ThreadsKeepStarting { .. }) => {
            NotStopped::ThreadsKeepStarting
        }
        ErrorKind::Process(ProcessError::Executed) => NotStopped::Executed,
        ErrorKind::System(SystemError::Call { source, .. }) => NotStopped::Failed(errno_of(source)),
        _ if error.is_gone() => NotStopped::Exited,
        _ => NotStopped::NotLent,
    }
}

#[cfg(test)]
mod tests;
