//! [`Lease`]: a process that is followed has a tracer, and can have only one. So its follower lends it to
//! other tools of ours: for a moment it stops the process for them, and makes their ptrace calls.
//!
//! ```text
//! a tool (this file)                      the follower's tracer thread (lender.rs)
//! ──────────────────                      ────────────────────────────────────────
//! connect                           ───▶  is it another user's tool?
//! Hold: "I may write its memory"    ───▶  may it? stops all threads
//!                                   ◀───  Held: these threads
//! Registers, Resume, ...            ───▶  makes the call
//!                                   ◀───  what it returned
//! Release                           ───▶  handles what the threads have reported, resumes them
//! ```
//!
//! Nothing of following is lost meanwhile: the process stays traced, and what its threads report (forks,
//! execs, loaded objects, signals) waits, unconsumed, until the follower handles it. If the tool dies, or is silent for
//! too long, the follower resumes the process, as the kernel does when a tracer dies. If the follower dies,
//! the kernel does.

pub(crate) mod message;

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixStream};
use std::time::Duration;

use nix::errno::Errno;
use nix::fcntl::OFlag;

use self::message::{NotHeld, Reply, Request};
use crate::process::Process;
use crate::sys::peer;

/// How much longer than it may take to stop the process an answer is waited for: the follower may be
/// busy with another process.
const PATIENCE: Duration = Duration::from_secs(3);

/// A connection to the follower of a process.
#[derive(Debug)]
pub(crate) struct Lease {
    stream: UnixStream,
    /// The memory of the process: only who may trace the process can open it to write.
    memory: File,
}

/// Returns the address at which the follower with this thread id waits for other tools.
pub(crate) fn address(tracer: i32) -> io::Result<SocketAddr> {
    SocketAddr::from_abstract_name(format!("ocaml-probes-follower-{tracer}"))
}

impl Lease {
    /// Connects to the thread `tracer`, which follows `process`.
    ///
    /// # Errors
    ///
    /// If it does not answer, or the process may not be changed.
    pub(crate) fn connect(tracer: i32, process: &Process) -> io::Result<Lease> {
        let memory = process.open_file("mem", OFlag::O_RDWR)?;
        let stream = UnixStream::connect_addr(&address(tracer)?)?;
        // Others may use that address, too.
        let peer = peer::credentials(&stream)?;
        let status = Process::open(tracer).map_err(|_| Errno::ESRCH)?.status()?;
        if status.tgid != peer.pid {
            return Err(io::ErrorKind::ConnectionRefused.into());
        }
        Ok(Lease { stream, memory })
    }

    /// Has the follower stop all threads of the process; returns which they are.
    ///
    /// # Errors
    ///
    /// If the follower does not answer.
    pub(crate) fn hold(&self, pid: i32, limit: Duration) -> io::Result<Result<Vec<i32>, NotHeld>> {
        self.stream.set_read_timeout(Some(limit + PATIENCE))?;
        let request = Request::Hold {
            pid,
            limit_ms: limit.as_millis().try_into().unwrap_or(u64::MAX),
            proof: self.memory.as_raw_fd(),
        };
        match self.ask(&request)? {
            Reply::Held(tids) => Ok(Ok(tids)),
            Reply::NotHeld(why) => Ok(Err(why)),
            _ => Err(io::ErrorKind::InvalidData.into()),
        }
    }

    /// Has the follower resume the process. It fails only if the follower has died, and the kernel has
    /// resumed it.
    pub(crate) fn release(&self) {
        let _ = self.ask(&Request::Release);
    }

    /// Asks for a call that returns nothing.
    ///
    /// # Errors
    ///
    /// Those of the call; ESRCH, as for a thread that is not traced, if the follower does not answer.
    pub(crate) fn call(&self, request: &Request) -> Result<(), Errno> {
        match self.reply(request)? {
            Reply::Done => Ok(()),
            _ => Err(Errno::EPROTO),
        }
    }

    /// The same for any call.
    pub(crate) fn reply(&self, request: &Request) -> Result<Reply, Errno> {
        match self.ask(request) {
            Ok(Reply::Failed(errno)) => Err(errno),
            Ok(reply) => Ok(reply),
            Err(_) => Err(Errno::ESRCH),
        }
    }

    fn ask(&self, request: &Request) -> io::Result<Reply> {
        request.send(&self.stream)?;
        Reply::receive(&self.stream)
    }
}
