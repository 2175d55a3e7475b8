//! [`StackReport`]: what the threads of a process did when they were read; and [`HitStack`], the stack of a hit.

use std::collections::HashMap;
use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use super::mutex::{self, MutexOwner};
use super::name::{StackFrame, ThreadRole};
use super::wait::{self, SystemCall, WaitsFor};
use crate::address::LiveAddr;
use crate::error::Error;
use crate::process::sockets;
use crate::unwind::StackEnd;

/// The frames of a hit.
///
/// ```no_run
/// use probes_lib::{Observation, Options, Selector, Stacks, Target};
///
/// let observation = Observation::new().watch(Selector::name("req_start")).with_stacks();
/// let mut observer = Target::open(4242)?.observe(&observation, Options::default())?;
/// let mut stacks = Stacks::of_process(4242)?;
/// for copied in observer.events()?.events.iter().filter_map(|event| event.stack.as_ref()) {
///     let stack = stacks.of_hit(copied);
///     println!("{} frames: {}", stack.frames.len(), stack.end);
/// }
/// # Ok::<(), probes_lib::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct HitStack {
    /// The innermost, that of the point, first.
    pub frames: Vec<Arc<StackFrame>>,
    /// Why there are no more.
    pub end: StackEnd,
    /// Whether a frame was found by searching the stack, because a register was not known.
    pub is_guessed: bool,
}

impl HitStack {
    /// Returns whether its frames reach to the code that the thread began with, and none was guessed.
    pub fn is_complete(&self) -> bool {
        self.end == StackEnd::Outermost && !self.is_guessed
    }
}

/// What all threads did when they were read.
///
/// ```no_run
/// let report = probes_lib::Stacks::of_process(4242)?.read(false)?;
/// println!("{} threads", report.threads.len());
/// if let Some(time) = report.stopped {
///     println!("stopped for {time:?}");
/// }
/// if let Some(why) = &report.not_stopped {
///     println!("some frames are missing: {why}");
/// }
/// # Ok::<(), probes_lib::Error>(())
/// ```
#[derive(Debug)]
pub struct StackReport {
    /// In the order of their ids, the main thread first.
    pub threads: Vec<ThreadStack>,
    /// How long the process was stopped. It is stopped only if a thread was running, or was blocked and its frames
    /// could not all be found without its registers.
    pub stopped: Option<Duration>,
    /// Why it could not be stopped, if it had to be. Then running threads have no frames, and blocked threads have
    /// only the frames that were found without their registers.
    pub not_stopped: Option<Error>,
}

/// What a thread did.
///
/// [`Stacks`](crate::Stacks) has an example.
#[derive(Clone, Debug)]
pub struct ThreadStack {
    /// Its id.
    pub tid: i32,
    /// Its name, as the kernel has it (prctl(2), `PR_SET_NAME`).
    pub name: String,
    /// What the runtime of OCaml uses it for, as far as its outermost frames tell.
    pub role: ThreadRole,
    /// The number of the domain of OCaml 5 that it belongs to, as in [`RuntimeEvents`](crate::RuntimeEvents): 0 is the
    /// domain of the main thread, and a new domain may get the number of one that has ended. `None` if it belongs to
    /// no domain, or if that is not known: the program is stripped, or the C library is not glibc.
    pub domain: Option<u32>,
    /// What it was doing.
    pub state: ThreadState,
    /// The function of the kernel that it waits in (`/proc/PID/task/TID/wchan`), if the kernel says.
    pub kernel_function: Option<String>,
    /// Its frames, the innermost first.
    pub frames: Vec<Arc<StackFrame>>,
    /// Why there are no more; `None` if its frames were not read: it was running.
    pub end: Option<StackEnd>,
    /// Whether a frame was found by searching the stack, because a register was not known.
    pub is_guessed: bool,
}

/// What a thread was doing.
///
/// ```no_run
/// use probes_lib::{Stacks, ThreadState, WaitsFor};
///
/// for thread in Stacks::of_process(4242)?.read(true)?.threads {
///     match thread.state {
///         ThreadState::Blocked { waits_for: Some(WaitsFor::Futex { address, owner: Some(owner) }), .. } => {
///             println!("thread {owner} has the lock {address}");
///         }
///         ThreadState::Blocked { call, .. } => println!("{}", call.name().unwrap_or("?")),
///         other => println!("{other}"),
///     }
/// }
/// # Ok::<(), probes_lib::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ThreadState {
    /// It was executing, or was about to.
    Running,
    /// It waits in a system call.
    Blocked {
        /// Which.
        call: SystemCall,
        /// What it waits for, if the system call says.
        waits_for: Option<WaitsFor>,
    },
    /// It waits in the kernel, but not in a system call: for a page of memory, for example.
    Waiting,
    /// It is stopped by a signal or a debugger.
    Stopped,
    /// The cgroup freezer keeps it from running, whatever it waited for before.
    Frozen,
}

impl fmt::Display for ThreadState {
    /// Continues a sentence that begins with the thread and "is".
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ThreadState::Running => f.write_str("running"),
            ThreadState::Waiting => f.write_str("waiting in the kernel"),
            ThreadState::Stopped => f.write_str("stopped"),
            ThreadState::Frozen => f.write_str("frozen (cgroup freezer)"),
            ThreadState::Blocked { call, waits_for } => {
                write!(f, "blocked in {call}")?;
                match waits_for {
                    Some(waits_for) => write!(f, ", waits for {waits_for}"),
                    None => Ok(()),
                }
            }
        }
    }
}

impl ThreadState {
    /// Returns the futex that it waits for, if it does.
    pub(super) fn futex(&self) -> Option<LiveAddr> {
        match self {
            ThreadState::Blocked {
                waits_for: Some(WaitsFor::Futex { address, .. }),
                ..
            } => Some(*address),
            _ => None,
        }
    }
}

impl ThreadStack {
    /// If it waits for a mutex, notes which thread holds it.
    pub(super) fn set_owner(&mut self, owners: &HashMap<LiveAddr, MutexOwner>) {
        if let ThreadState::Blocked {
            waits_for: Some(WaitsFor::Futex { address, owner }),
            ..
        } = &mut self.state
        {
            if mutex::is_taking_mutex(&self.frames) {
                *owner = owners.get(address).map(|it| it.tid);
            }
        }
    }

    /// Returns whether it waits for a child process.
    pub(super) fn waits_for_child(&self) -> bool {
        let ThreadState::Blocked { waits_for, .. } = &self.state else {
            return false;
        };
        matches!(waits_for, Some(WaitsFor::Child { .. }))
    }

    /// If it waits for a child process, notes which: one of these `children`.
    pub(super) fn set_child(&mut self, children: &[(i32, i32)]) {
        if let ThreadState::Blocked {
            call,
            waits_for: Some(WaitsFor::Child { pid }),
        } = &mut self.state
        {
            *pid = wait::child(call, children);
        }
    }

    /// Returns the inode of the socket that it waits for, if it does.
    pub(super) fn socket(&self) -> Option<u64> {
        match &self.state {
            ThreadState::Blocked {
                waits_for: Some(WaitsFor::File { path, .. }),
                ..
            } => sockets::inode(path.as_deref()?),
            _ => None,
        }
    }

    /// If it waits for a socket, notes the other end.
    pub(super) fn set_peer(&mut self, peers: &HashMap<u64, SocketAddr>) {
        let found = self.socket().and_then(|inode| peers.get(&inode));
        if let ThreadState::Blocked {
            waits_for: Some(WaitsFor::File { peer, .. }),
            ..
        } = &mut self.state
        {
            *peer = found.copied();
        }
    }

    /// Returns whether its frames reach to the code that the thread began with, and none was guessed.
    pub fn is_complete(&self) -> bool {
        self.end == Some(StackEnd::Outermost) && !self.is_guessed
    }
}
