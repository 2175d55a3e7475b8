//! [`Follow`]: sets the probes of what processes fork, execute and load, before any of it runs.
//!
//! ```text
//! the caller          first thread             tracer thread (session.rs)
//! ──────────          ────────────             ──────────────────────────
//! start ────────────▶ with_tracer ───────────▶ sets the probes of the targets
//!       ◀───────────────────────────────────── "begun", or why not
//! next, poll(2)       watches the tracer   ──▶ waits for SIGCHLD
//!       ◀──────────── events (channel.rs) ──── sets what is new, and resumes it
//! stop  ─────────────────────────────────────▶ restores loaders, detaches from all, ends
//! ```
//!
//! # Signals
//!
//! Both threads hold back all signals but faults, from their start on, and the caller does so while
//! `start` runs: none can stop or end this process in the middle of the first update. When `start`
//! returns, the caller's mask is what it was before.
//!
//! SIGCHLD is sent to the process when a tracee stops. While the tracer thread waits for it, in
//! sigtimedwait(2), the kernel prefers that thread, even if others do not hold SIGCHLD back. While the
//! tracer thread is busy, another thread may take it. Nothing is lost then: the tracer thread looks at
//! its tracees before it waits again, and if one stops just in between, after `TICK` at the latest.
//! Conversely, the tracer thread may take a SIGCHLD that is about a child of the caller's; so
//! `with_tracer` sends the process one more when the tracer thread has ended.

mod channel;
mod event;
mod followed_process;
pub(crate) mod present;
pub(crate) mod session;

use std::fmt;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::mpsc;
use std::sync::{Mutex, PoisonError};
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

use crate::error::{Result, SystemError};
use crate::process::Process;
use crate::select::Actions;
use crate::sys::signals::SignalsHeldBack;
use crate::target::Target;
use crate::trace::tracer::with_tracer;
use crate::update::options::Options;

use self::channel::{EventReceiver, EventSender};
pub use self::event::FollowEvent;
use self::session::FollowSession;

/// A handle to processes that are followed: probes are set in them, and from then on in all programs
/// that they execute, in the processes that they fork, and in the objects that any of them loads, before
/// anything of it runs.
///
/// There, names that are missing are skipped; a process that has no probes is detached from. A thread of
/// the handle's own traces the processes. It never waits for the caller: events are queued until
/// [`next`](Follow::next) returns them. When it is over, probes stay as they are, and the processes run on.
///
/// ```no_run
/// use std::time::Duration;
/// use probes_lib::{Action, Actions, Follow, FollowEvent, Options, Selector, Target};
///
/// let targets = vec![Target::open_any(4242)?];
/// let actions = Actions::of(Action::Enable, Selector::All);
/// let follow = Follow::start(targets, actions, Options::default())?;
/// while let Some(event) = follow.next(Duration::MAX) {
///     match event {
///         FollowEvent::Executed { pid, program } => println!("{pid} runs {}", program.display()),
///         event => println!("{event:?}"),
///     }
/// }
/// // All processes have exited.
/// # Ok::<(), probes_lib::Error>(())
/// ```
///
/// In a loop of poll(2) or epoll(7), its descriptor ([`AsFd`]) is readable while events wait, and once it
/// is over:
///
/// ```no_run
/// # use std::time::Duration;
/// # use probes_lib::Follow;
/// # fn handle(follow: &Follow) {
/// // The descriptor is readable:
/// while let Some(event) = follow.next(Duration::ZERO) {
///     println!("{event:?}");
/// }
/// if follow.is_over() {
///     // All processes have exited or are detached from.
/// }
/// # }
/// ```
///
/// # What it takes
///
/// All threads of the processes are traced: no other debugger can trace them meanwhile, and a program
/// that changes its user when it is executed (set-user-ID) runs without that privilege. If this process
/// dies, they run on; while it is stopped (SIGSTOP, SIGTSTP), they wait for it wherever they fork,
/// execute or load something, or receive a signal.
///
/// While processes are followed, no thread of this process is to wait for any child (waitpid(2) with
/// -1), nor for a target that is its child: that would consume what the tracees have stopped for. A
/// SIGCHLD for another child may come only when it is over, and one may come for which there is no
/// child to wait for.
pub struct Follow {
    events: EventReceiver<FollowEvent>,
    /// `None` once it was waited for.
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl fmt::Debug for Follow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Follow").finish_non_exhaustive()
    }
}

/// The tracer thread's end of a [`Follow`].
pub(crate) struct TracerEnd {
    pub(crate) events: EventSender<FollowEvent>,
    begun: mpsc::Sender<Result<()>>,
}

impl Follow {
    /// Carries out `actions` in each of `targets`, as [`Target::update_with`] does, and follows them.
    /// Returns when that is done; a target that cannot be changed gives [`FollowEvent::Failed`].
    ///
    /// # Errors
    ///
    /// If no thread can be started. Nothing is changed then.
    pub fn start(targets: Vec<Target>, actions: Actions, options: Options) -> Result<Follow> {
        Follow::spawn(move |end| {
            let processes: Vec<&Process> = targets
                .iter()
                .map(|target| target.opened.process())
                .collect();
            with_tracer(&processes, |tracer| {
                let mut session = FollowSession::new(tracer, &actions, options, &end.events);
                for target in &targets {
                    session.begin(target);
                }
                end.has_begun();
                session.run();
                Ok(())
            })
        })
    }

    /// Starts a thread that does `work`, and returns when that calls [`TracerEnd::has_begun`], or fails.
    pub(crate) fn spawn(
        work: impl FnOnce(&TracerEnd) -> Result<()> + Send + 'static,
    ) -> Result<Follow> {
        let _held_back = SignalsHeldBack::new();
        let (events, receiver) = channel::channel().map_err(|errno| SystemError::NoThread {
            source: errno.into(),
        })?;
        let (begun, has_begun) = mpsc::channel();
        let run = move || {
            let end = TracerEnd { events, begun };
            if let Err(error) = work(&end) {
                // Once it has begun, it does not fail.
                let _ = end.begun.send(Err(error));
            }
        };
        let thread = Builder::new()
            .name("probes-follow".to_owned())
            .spawn(run)
            .map_err(|source| SystemError::NoThread { source })?;
        // Nothing is sent if there was nothing to follow.
        has_begun.recv().unwrap_or(Ok(()))?;
        Ok(Follow {
            events: receiver,
            thread: Mutex::new(Some(thread)),
        })
    }

    /// Returns the next event, waiting for it up to `timeout`; `None` if there is none by then, or if
    /// it [is over](Follow::is_over).
    pub fn next(&self, timeout: Duration) -> Option<FollowEvent> {
        let event = self.events.next(timeout);
        if event.is_none() && self.events.is_closed() {
            self.join();
        }
        event
    }

    /// Returns whether all processes have exited or are detached from, and all events were returned.
    pub fn is_over(&self) -> bool {
        self.events.is_closed()
    }

    /// Asks for the end: within some two seconds, all processes are detached from and run on, and it
    /// [is over](Follow::is_over). Events until then can still be received. Does not wait.
    pub fn stop(&self) {
        self.events.stop();
    }

    /// Waits for the end of the thread, at which the kernel resumes whatever is still traced.
    fn join(&self) {
        let mut thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(Err(panic)) = thread.take().map(JoinHandle::join) {
            std::panic::resume_unwind(panic);
        }
    }
}

impl Drop for Follow {
    /// Same as [`Follow::stop`], and waits until all processes are detached from.
    fn drop(&mut self) {
        self.stop();
        if !std::thread::panicking() {
            self.join();
        }
    }
}

/// Readable, as poll(2) says, while events wait, and once it [is over](Follow::is_over). After the last
/// event that waits, it stays readable until [`Follow::next`] has returned `None`.
impl AsFd for Follow {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.events.as_fd()
    }
}

impl TracerEnd {
    /// Has `Follow::spawn` return.
    pub(crate) fn has_begun(&self) {
        // It waits for this.
        let _ = self.begun.send(Ok(()));
    }
}
