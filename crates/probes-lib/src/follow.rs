//! [`Follow`]: sets the probes of what processes fork, execute and load, before any of it runs.
//!
//! ```text
//! the caller          watching thread          tracer thread (session.rs)
//! ──────────          ───────────────          ──────────────────────────
//! start ────────────▶ with_tracer ───────────▶ sets the probes of the targets
//!       ◀───────────────────────────────────── "begun", or why not
//! next, poll(2)       watches the tracer   ──▶ waits for SIGCHLD
//!       ◀──────────── events (channel.rs) ──── sets what is new, and resumes it
//! stop  ─────────────────────────────────────▶ restores loaders, detaches from all, ends
//! ```
//!
//! # Signals
//!
//! Both threads that `start` starts block all signals except those of faults, from their beginning
//! on, and the caller does so while `start` runs: none can stop or end this process in the middle of
//! the first update. When `start` returns, the caller's signal mask is what it was before.
//!
//! SIGCHLD is sent to the process when a tracee stops. While the tracer thread waits for it, in
//! sigtimedwait(2), the kernel prefers that thread, even if others do not block SIGCHLD. While the
//! tracer thread is busy, another thread may take it. Nothing is lost then: the tracer thread looks at
//! its tracees before it waits again. If one stops between the look and the wait, the wait ends after
//! `FOLLOW_TICK` at the latest, and the tracer thread looks again.
//! Conversely, the tracer thread may take a SIGCHLD that is about a child of the caller's; so
//! `with_tracer` sends the process one more when the tracer thread has ended.

mod channel;
mod event;
mod followed_process;
pub(crate) mod resolved_actions;
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
use crate::sys::signals::BlockedSignals;
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
/// In programs and objects that come later, names that are missing are skipped; a process that
/// executes a program without probes is detached. A thread of this `Follow` traces the processes.
/// It never waits for the caller: events are queued until [`next`](Follow::next) returns them. When
/// following is over, probes stay as they are, and the processes run on.
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
///         FollowEvent::Executed { pid, program } => println!("{pid} executed {}", program.display()),
///         event => println!("{event:?}"),
///     }
/// }
/// // All processes have exited or are detached.
/// # Ok::<(), probes_lib::Error>(())
/// ```
///
/// In a loop of poll(2) or epoll(7), the descriptor ([`AsFd`]) of the `Follow` is readable while events
/// wait, and once the `Follow` [is over](Follow::is_over):
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
///     // All processes have exited or are detached.
/// }
/// # }
/// ```
///
/// # Requirements and side effects
///
/// All threads of the processes are traced: no debugger can trace them meanwhile (other programs of the same
/// user that use this library can stop and observe them: they are lent for that), and a program
/// that changes its user when it is executed (set-user-ID) runs without that privilege. If this process
/// dies, they run on; while it is stopped (SIGSTOP, SIGTSTP), they wait for it wherever they fork,
/// execute or load something, or receive a signal.
///
/// While processes are followed, no thread of this process may call waitpid(2) with -1, nor wait for a
/// target that is its child: that would consume the stops that the tracer thread waits for. The SIGCHLD
/// for another child may come only after the `Follow` is over, and a SIGCHLD may come although there is
/// no child to wait for.
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

/// The tracer thread's side of a [`Follow`].
pub(crate) struct TracerSide {
    pub(crate) events: EventSender<FollowEvent>,
    begun: mpsc::Sender<Result<()>>,
}

impl Follow {
    /// Carries out `actions` in each of `targets`, as [`Target::update_with`] does, and follows them.
    /// Returns when the actions are carried out; a target that cannot be changed gives [`FollowEvent::Failed`].
    ///
    /// # Errors
    ///
    /// If no thread can be started. Nothing is changed then.
    pub fn start(targets: Vec<Target>, actions: Actions, options: Options) -> Result<Follow> {
        Follow::spawn(move |tracer_side| {
            let processes: Vec<&Process> = targets
                .iter()
                .map(|target| target.opened.process())
                .collect();
            with_tracer(&processes, |tracer| {
                let mut session =
                    FollowSession::new(tracer, &actions, options, &tracer_side.events);
                for target in &targets {
                    session.begin(target);
                }
                tracer_side.report_begun();
                session.run();
                Ok(())
            })
        })
    }

    /// Checks whether a target could be followed, as far as that is known while it runs. Changes nothing.
    ///
    /// # Errors
    ///
    /// See [`Target::check`]; unlike an update, this needs a process that is not traced, not even by another
    /// `Follow`.
    pub fn check(target: &Target, actions: &Actions, options: Options) -> Result<()> {
        session::check(target, actions, options)
    }

    /// Starts a thread that does `work`, and returns when that calls [`TracerSide::report_begun`], or fails.
    pub(crate) fn spawn(
        work: impl FnOnce(&TracerSide) -> Result<()> + Send + 'static,
    ) -> Result<Follow> {
        let _blocked = BlockedSignals::new();
        let (events, receiver) = channel::channel().map_err(|errno| SystemError::NoThread {
            source: errno.into(),
        })?;
        let (begun, begun_receiver) = mpsc::channel();
        let run = move || {
            let tracer_side = TracerSide { events, begun };
            if let Err(error) = work(&tracer_side) {
                // Nothing receives this after `report_begun`, but then `work` does not fail.
                let _ = tracer_side.begun.send(Err(error));
            }
        };
        let thread = Builder::new()
            .name("probes-follow".to_owned())
            .spawn(run)
            .map_err(|source| SystemError::NoThread { source })?;
        // Nothing is sent if there was nothing to follow.
        begun_receiver.recv().unwrap_or(Ok(()))?;
        Ok(Follow {
            events: receiver,
            thread: Mutex::new(Some(thread)),
        })
    }

    /// Returns the next event, waiting for it up to `timeout`; `None` if there is none by then, or if
    /// it [is over](Follow::is_over).
    pub fn next(&self, timeout: Duration) -> Option<FollowEvent> {
        let event = self.events.next(timeout);
        if event.is_none() && self.events.is_drained() {
            self.join();
        }
        event
    }

    /// Returns whether all processes have exited or are detached, and all events were returned.
    pub fn is_over(&self) -> bool {
        self.events.is_drained()
    }

    /// Requests the end, and does not wait for it: within about two seconds, all processes are
    /// detached and run on, and following [is over](Follow::is_over). Events until then can still
    /// be received.
    pub fn stop(&self) {
        self.events.request_end();
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
    /// Same as [`Follow::stop`], and waits until all processes are detached from, except during a panic.
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

impl TracerSide {
    /// Makes `Follow::spawn` return.
    pub(crate) fn report_begun(&self) {
        // `Follow::spawn` waits for this, so the receiver still exists.
        let _ = self.begun.send(Ok(()));
    }
}
