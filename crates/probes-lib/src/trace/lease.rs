//! [`Lease`]: a process that is followed has a tracer, and can have only one. So its follower lends it to
//! other tools of ours: for a moment it stops the process for them, makes their ptrace calls, and writes what they
//! write.
//!
//! ```text
//! a tool (this file)                          the follower's tracer thread (lender.rs)
//! ──────────────────                          ────────────────────────────────────────
//! Hello, with the memory of the process ───▶  may the tool change that process?
//!                                       ◀───  Welcome
//! Stop                                  ───▶  stops all threads
//!                                       ◀───  Stopped: these threads
//! Registers, Write, ResumeThread, ...   ───▶  makes the call
//!                                       ◀───  what it returned
//! ResumeAll                             ───▶  resumes all threads
//!                                       ◀───  Resumed: how long they were stopped
//! ```
//!
//! The process stays followed meanwhile: it stays traced, and what its threads report (forks,
//! execs, loaded objects, signals) waits, unconsumed, until the follower handles it. If the tool dies, or is silent
//! for too long, the follower resumes the process; if the follower dies, the kernel does.
//!
//! **For the process, losing the lease is the same as a kill of the tool at that moment.** All that relies
//! on stopped threads goes through the follower, writes included, and it refuses all of it once the lease is lost; data of an
//! observer, which no thread has to be stopped for, are written directly.
//! So the process is left as a killed tool leaves it, which every step is made for.

pub(crate) mod message;

use std::cell::{Cell, RefCell};
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::OFlag;
use nix::unistd::geteuid;

use self::message::{Hello, MAX_LEN, MAX_WRITE, NotStopped, Reply, Request, Welcome};
use crate::address::LiveAddr;
use crate::error::{Error, FOLLOWER_LOST, FOLLOWER_SILENT, ProcessError, Result};
use crate::process::memory::ProcessMemory;
use crate::process::stop_time::StopTime;
use crate::process::tool::own_namespace;
use crate::process::{Process, is_task_gone};
use crate::sys::packet_socket::{PacketSocket, Peer};
use crate::trace::time_budget::TimeBudget;

/// How long to wait for an answer, besides the time that stopping the process may take: the follower may be busy with
/// another process.
pub(crate) const ANSWER_LIMIT: Duration = Duration::from_secs(6);

/// How long to wait before connecting again to a follower to which many connect.
const RECONNECT: Duration = Duration::from_millis(5);

/// A connection to the follower of a process.
#[derive(Debug)]
pub(crate) struct Lease {
    socket: PacketSocket,
    /// The thread that follows the process.
    tracer: i32,
    /// The memory of the process that the follower writes to.
    memory: ProcessMemory,
    /// When we asked for the process to be stopped, if we have not asked for it to be resumed since.
    stopped_since: Cell<Option<Instant>>,
    stop_time: StopTime,
    /// What calls fail with once the lease is lost: the process may run then.
    lost: Cell<Option<Errno>>,
    /// For answers.
    buffer: RefCell<Vec<u8>>,
}

/// Why the follower does not lend a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NoLease {
    /// There is no follower at that address (any more), or too many tools are connected to it; or the process has
    /// exited.
    Absent,
    /// It does not follow the process, or does not let this tool change it; or it is not a follower that answers.
    Refused,
    /// It is of another user, or in another user namespace.
    OtherUser,
    /// It is another version of this tool.
    OtherVersion,
    /// It does not answer, or too many tools are connecting to it.
    Silent,
    /// It cannot be asked.
    Failed(Errno),
}

impl From<io::Error> for NoLease {
    fn from(error: io::Error) -> NoLease {
        if is_closed(&error) || is_task_gone(&error) {
            return NoLease::Absent;
        }
        match (error.kind(), error.raw_os_error()) {
            (io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock, _) => NoLease::Silent,
            (_, Some(errno)) => NoLease::Failed(Errno::from_raw(errno)),
            (_, None) => NoLease::Refused,
        }
    }
}

/// Returns the address at which the follower with this thread id waits for other tools of our pid namespace.
pub(crate) fn address(tracer: i32) -> String {
    format!("ocaml-probes-follower-{}-{tracer}", own_namespace())
}

/// Returns whether the process at the other end of a socket has our user: the effective uid, in the same user
/// namespace. In another one, the same number may stand for another user.
pub(crate) fn is_own_user(peer: Peer) -> bool {
    let namespace = |process: &str| {
        let metadata = fs::metadata(format!("/proc/{process}/ns/user"));
        metadata.map(|it| (it.dev(), it.ino())).ok()
    };
    let theirs = namespace(&peer.pid.to_string());
    peer.pid > 0
        && peer.uid == geteuid().as_raw()
        && theirs.is_some()
        && theirs == namespace("self")
}

impl Lease {
    /// Connects to the thread `tracer`, which follows `process`, for an operation that holds the update lock of the
    /// process, or does not. Tries to connect for `limit`, and then waits as long for an answer.
    ///
    /// # Errors
    ///
    /// If the follower does not lend the process, or does not answer.
    pub(crate) fn connect(
        tracer: i32,
        process: &Process,
        holds_lock: bool,
        limit: Duration,
    ) -> Result<Lease, NoLease> {
        // Only processes that may trace it can open it.
        let memory = process.open_file("mem", OFlag::O_RDWR)?;
        let mut budget = TimeBudget::new(limit);
        let socket = loop {
            match PacketSocket::connect(&address(tracer)) {
                Err(error) if is_busy(&error) && !budget.is_spent() => {
                    std::thread::sleep(RECONNECT);
                }
                connected => break connected?,
            }
        };
        // Others may use that address, too.
        let peer = socket.peer()?;
        let thread = Process::open(tracer).map_err(|_| NoLease::Absent)?;
        if thread.status()?.tgid != peer.pid {
            return Err(NoLease::Refused);
        }
        if !is_own_user(peer) {
            return Err(NoLease::OtherUser);
        }
        let lease = Lease {
            socket,
            tracer,
            memory: ProcessMemory::of_file(memory),
            stopped_since: Cell::new(None),
            stop_time: process.stop_time().clone(),
            lost: Cell::new(None),
            buffer: RefCell::new(vec![0; MAX_LEN]),
        };
        let hello = Hello::Process {
            pid: process.pid(),
            holds_lock,
        };
        match lease.greet(hello, limit)? {
            Welcome::Accepted => Ok(lease),
            Welcome::Refused => Err(NoLease::Refused),
            Welcome::OtherVersion(_) => Err(NoLease::OtherVersion),
        }
    }

    fn greet(&self, hello: Hello, limit: Duration) -> io::Result<Welcome> {
        let memory = self.memory.as_fd();
        self.socket.send(&hello.to_bytes(), Some(memory))?;
        self.receive(limit, Welcome::parse)
    }

    /// Returns the thread that follows the process.
    pub(crate) fn tracer(&self) -> i32 {
        self.tracer
    }

    /// Checks that the process still runs the program whose memory is `memory`, for which the writes were planned, and
    /// that it is also the one that ran when we connected: the follower writes to the memory of that one.
    ///
    /// # Errors
    ///
    /// [`ProcessError::Executed`]; if the process has exited, or cannot be read.
    pub(crate) fn refuse_outdated(&self, process: &Process, memory: &ProcessMemory) -> Result<()> {
        let is_same = || -> io::Result<bool> {
            let current = self.memory.random_bytes(process)?;
            Ok(current.is_some() && current == memory.random_bytes(process)?)
        };
        match is_same() {
            Ok(true) => Ok(()),
            Ok(false) if !process.has_exited() => {
                Err(Error::of_process(process.pid(), ProcessError::Executed))
            }
            Ok(false) => Err(Error::of_process(process.pid(), ProcessError::Exited)),
            Err(source) => Err(process.exited_or(source)),
        }
    }

    /// Has the follower stop all threads of the process within `limit`. Returns which threads they are.
    ///
    /// # Errors
    ///
    /// If the follower does not answer as it should: the lease is lost then.
    pub(crate) fn stop(&self, limit: Duration) -> io::Result<Result<Vec<i32>, NotStopped>> {
        let limit_ms = limit.as_millis().try_into().unwrap_or(u64::MAX);
        let asked = Instant::now();
        let answered_within = limit.saturating_add(ANSWER_LIMIT);
        let stopped = match self.ask(&Request::Stop(limit_ms), answered_within)? {
            Reply::Stopped(tids) => Ok(tids),
            Reply::NotStopped(why) => Err(why),
            _ => return Err(self.lose(io::ErrorKind::InvalidData.into())),
        };
        if stopped.is_ok() {
            let since = self.stopped_since.get().unwrap_or(asked);
            self.stopped_since.set(Some(since));
        } else {
            self.count_stop_time(None);
        }
        Ok(stopped)
    }

    /// Has the follower resume the process. If that fails, it is resumed all the same: by the follower once it sees
    /// that we are gone, or by the kernel if the follower is.
    pub(crate) fn resume_all(&self) {
        if let Ok(Reply::Resumed(stop_time)) = self.ask(&Request::ResumeAll, ANSWER_LIMIT) {
            self.count_stop_time(Some(stop_time));
        } else {
            self.count_stop_time(None);
        }
    }

    /// Adds how long the process was stopped: `exact`, or else the time since we asked for the stop. That is too long
    /// if the follower was busy before it stopped the process, or we were after it resumed it.
    fn count_stop_time(&self, exact: Option<Duration>) {
        if let Some(since) = self.stopped_since.take() {
            self.stop_time.add(exact.unwrap_or_else(|| since.elapsed()));
        }
    }

    /// Returns whether the process is stopped for us; it may run if the follower is lost and we have not noticed.
    pub(crate) fn has_stopped(&self) -> bool {
        self.stopped_since.get().is_some() && !self.is_lost()
    }

    /// Returns whether the lease is lost: the process may run.
    pub(crate) fn is_lost(&self) -> bool {
        self.lost.get().is_some()
    }

    /// Returns what calls fail with if it is lost: [`FOLLOWER_LOST`] or [`FOLLOWER_SILENT`].
    pub(crate) fn loss(&self) -> Option<Errno> {
        self.lost.get()
    }

    /// Writes memory of the process; fails if it is not stopped for us any more.
    pub(crate) fn write(&self, at: LiveAddr, bytes: &[u8]) -> io::Result<()> {
        self.write_pieces(at, bytes, Request::Write)
    }

    /// The same by a ptrace call on `tid`, a stopped thread of the process.
    pub(crate) fn poke(&self, tid: i32, at: LiveAddr, bytes: &[u8]) -> io::Result<()> {
        self.write_pieces(at, bytes, |at, piece| Request::Poke(tid, at, piece))
    }

    fn write_pieces(
        &self,
        at: LiveAddr,
        bytes: &[u8],
        request: impl Fn(LiveAddr, Vec<u8>) -> Request,
    ) -> io::Result<()> {
        let mut at = at;
        for piece in bytes.chunks(MAX_WRITE) {
            self.call(&request(at, piece.to_vec()))?;
            at = at.plus(piece.len() as u64);
        }
        Ok(())
    }

    /// Asks for a call that returns nothing.
    ///
    /// # Errors
    ///
    /// Those of the call; [`FOLLOWER_LOST`], [`FOLLOWER_SILENT`].
    pub(crate) fn call(&self, request: &Request) -> Result<(), Errno> {
        self.answer(request, |reply| (reply == Reply::Done).then_some(()))
    }

    /// Asks for a call, and takes what is wanted from the answer; any other answer loses the lease.
    pub(crate) fn answer<T>(
        &self,
        request: &Request,
        take: impl FnOnce(Reply) -> Option<T>,
    ) -> Result<T, Errno> {
        match self.ask(request, ANSWER_LIMIT) {
            Ok(Reply::Failed(errno)) => Err(errno),
            Ok(reply) => take(reply).ok_or_else(|| {
                self.lose(io::ErrorKind::InvalidData.into());
                FOLLOWER_LOST
            }),
            Err(_) => Err(self.loss().unwrap_or(FOLLOWER_LOST)),
        }
    }

    fn ask(&self, request: &Request, limit: Duration) -> io::Result<Reply> {
        if self.is_lost() {
            return Err(io::ErrorKind::NotConnected.into());
        }
        self.exchange(request, limit)
            .map_err(|error| self.lose(error))
    }

    fn exchange(&self, request: &Request, limit: Duration) -> io::Result<Reply> {
        self.socket.send(&request.to_bytes(), None)?;
        self.receive(limit, Reply::parse)
    }

    fn receive<T>(&self, limit: Duration, parse: impl Fn(&[u8]) -> Option<T>) -> io::Result<T> {
        self.socket.wait_for_message(limit)?;
        let mut buffer = self.buffer.borrow_mut();
        let (len, _) = self.socket.receive(&mut buffer)?;
        let message = buffer.get(..len).and_then(parse);
        message.ok_or_else(|| io::ErrorKind::InvalidData.into())
    }

    fn lose(&self, error: io::Error) -> io::Error {
        let is_silent = error.kind() == io::ErrorKind::TimedOut;
        let errno = if is_silent {
            FOLLOWER_SILENT
        } else {
            FOLLOWER_LOST
        };
        self.lost.set(Some(errno));
        self.count_stop_time(None);
        error
    }
}

/// Returns whether the other end of a connection is closed, or does not exist.
pub(crate) fn is_closed(error: &io::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionRefused, ConnectionReset, UnexpectedEof};
    matches!(
        error.kind(),
        UnexpectedEof | BrokenPipe | ConnectionReset | ConnectionRefused
    )
}

fn is_busy(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::WouldBlock
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn silent_follower_loses_the_lease() {
        let (socket, _follower) = PacketSocket::pair().unwrap();
        let lease = Lease {
            socket,
            tracer: 0,
            memory: ProcessMemory::open(&Process::own().unwrap(), OFlag::O_RDONLY).unwrap(),
            stopped_since: Cell::new(Some(Instant::now())),
            stop_time: StopTime::default(),
            lost: Cell::new(None),
            buffer: RefCell::new(vec![0; MAX_LEN]),
        };
        let error = lease.ask(&Request::State(1), Duration::ZERO).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        assert_eq!(lease.call(&Request::ResumeAll), Err(FOLLOWER_SILENT));
        assert!(lease.is_lost() && !lease.has_stopped());
        let error = lease.ask(&Request::State(1), Duration::ZERO).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotConnected);
    }

    #[test]
    fn only_processes_of_our_user_are_trusted() {
        let own = Peer {
            pid: std::process::id() as i32,
            uid: geteuid().as_raw(),
        };
        assert!(is_own_user(own));
        for (pid, uid) in [(own.pid, own.uid ^ 1), (0, own.uid), (i32::MAX, own.uid)] {
            assert!(!is_own_user(Peer { pid, uid }), "{pid} {uid}");
        }
    }
}
