//! [`Split`]: a program that one process of ours starts and another one follows.
//!
//! ```text
//! Starter (the caller)                     Follower (a copy, in a session of its own)
//! ────────────────────                     ──────────────────────────────────────────
//! Command::spawn  ──▶ child: sends its pid, waits  ──▶  SEIZE
//!                     execve                ◀─────────  "go"
//!                     is stopped                        sets its probes
//! is the program's parent               ◀── RUNS ────   resumes it, follows it
//! ```
//!
//! One process cannot be both parent and tracer of the program: a parent that traces its child is not
//! notified, as its parent, that the child stops; and Ctrl-Z would stop the tracer together with the
//! program, while the processes that it follows wait for it.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, poll};

use super::executable::{check_names, error_of_launch, refuse_privileged, refuse_shell, resolve};
use super::set_up::{Ready, SetUp};
use super::{Launch, Launched};
use crate::error::{Effect, Error, LaunchError, Result};
use crate::follow::session::FollowSession;
use crate::follow::{Follow, FollowEvent, TracerSide};
use crate::process::{Process, check_proc};
use crate::select::Actions;
use crate::sys::fork;
use crate::sys::signals::{self, SignalsAtLaunch};
use crate::sys::spawn::{self, ChildPipes, TracedBy, TracerPipes};
use crate::trace::at_exec::{self, AtExec, Untraced};
use crate::trace::tracer::{Tracer, with_tracer};
use crate::update::options::Options;
use crate::update::report::Report;

/// How often it is checked whether a signal has come, in milliseconds.
const SIGNALS_CHECKED: u8 = 50;

/// The two processes that [`Launch::split`] makes of one.
///
/// ```no_run
/// use std::process::Command;
/// use std::time::Duration;
/// use probes_lib::{Action, Actions, Launch, Selector, Split};
///
/// let launch = Launch::new(Command::new("./server.exe"))
///     .actions(Actions::of(Action::Enable, Selector::All));
/// match launch.split()? {
///     Split::Starter(starter) => {
///         if let Some(launched) = starter.spawn()? {
///             println!("{:?}", launched.into_child().wait());
///         }
///     }
///     Split::Follower(mut follower) => {
///         let follow = follower.start()?;
///         while let Some(event) = follow.next(Duration::MAX) {
///             println!("{event:?}");
///         }
///     }
/// }
/// # Ok::<(), probes_lib::Error>(())
/// ```
pub enum Split {
    /// The process that called: it becomes the parent of the program.
    Starter(Box<Starter>),
    /// A copy of that process, which traces the program and the processes that the program forks.
    Follower(Follower),
}

/// Starts a program that a [`Follower`] follows. [`Split`] has an example.
pub struct Starter {
    launch: Launch,
    file: Option<PathBuf>,
    signals: SignalsAtLaunch,
    pipes: ChildPipes,
    status: File,
    follower: i32,
}

/// Follows a program that a [`Starter`] starts. If the follower is dropped before the program runs, the
/// program never runs. [`Split`] has an example.
#[derive(Debug)]
pub struct Follower {
    tracing: Arc<Tracing>,
    pipes: Option<TracerPipes>,
}

/// What a follower and its tracer thread share.
#[derive(Debug)]
struct Tracing {
    program: PathBuf,
    file: Option<PathBuf>,
    actions: Actions,
    options: Options,
    status: StatusPipe,
}

/// What a follower sends its starter.
const RUNS: u8 = 1;
const FAILED: u8 = 2;

/// The pipe through which a follower tells its starter, once, what has become of the program. If it is
/// dropped before a status was sent or withheld, it sends [`FAILED`].
#[derive(Debug)]
struct StatusPipe(Mutex<Option<File>>);

impl Launch {
    /// Forks this process: the copy is to follow the program, with all that it forks, executes and
    /// loads. The copy leads a session of its own, so that it does not receive what the terminal sends
    /// the program (Ctrl-C, Ctrl-Z).
    ///
    /// # Errors
    ///
    /// Same as [`Launch::spawn`], as far as it is known before the program is executed; and if this
    /// process has several threads, of which the copy would have one.
    pub fn split(self) -> Result<Split> {
        self.try_split()
            .map_err(|error| error.with_effect(Effect::NotStarted))
    }

    fn try_split(self) -> Result<Split> {
        let program = PathBuf::from(self.command.get_program());
        if self.observation.is_some() {
            return Err(Error::of_program(
                &program,
                LaunchError::FollowedAndObserved,
            ));
        }
        // Nothing is opened below /proc before the program is started: without this, it would be the program that is not
        // found.
        check_proc()?;
        let file = resolve(&self.command);
        if let Some(file) = &file {
            refuse_privileged(file)?;
            match check_names(file, &self.actions) {
                // The missing name may be in what the program executes and loads later.
                Err(error) if error.is_missing_name() => {}
                checked => checked?,
            }
        }
        let failed = |source| Error::of_program(&program, LaunchError::Exec { source });
        let (child_pipes, tracer_pipes) = spawn::pipes().map_err(failed)?;
        let (reader, writer) = spawn::pipe().map_err(failed)?;
        // Made before the fork, so that the signals are blocked in both processes. Children are waitable even if SIGCHLD is
        // ignored: otherwise, one that could not execute its program is gone before the starter waits for it.
        let signals = SignalsAtLaunch::new(true);
        Ok(match fork::fork_into_new_session().map_err(failed)? {
            Some(follower) => Split::Starter(Box::new(Starter {
                launch: self,
                file,
                signals,
                pipes: child_pipes,
                status: reader,
                follower,
            })),
            None => {
                // They stay blocked here: the follower's caller reads those that ask it to stop
                // following, and the program's parent handles all others.
                signals.keep_blocked();
                let tracing = Arc::new(Tracing {
                    program,
                    file,
                    actions: self.actions,
                    options: self.options,
                    status: StatusPipe(Mutex::new(Some(writer))),
                });
                Split::Follower(Follower {
                    tracing,
                    pipes: Some(tracer_pipes),
                })
            }
        })
    }
}

impl Starter {
    /// Returns the pid of the follower, a child of this process.
    pub fn follower(&self) -> i32 {
        self.follower
    }

    /// Starts the program, and returns once it runs with its probes set. Its [`Launched::report`] is
    /// empty, as the report is an event of the follower. Returns `None` if the follower has failed; the
    /// follower then has an error that says why.
    ///
    /// # Errors
    ///
    /// If the program cannot be executed, or was killed before it ran.
    pub fn spawn(self) -> Result<Option<Launched>> {
        let Starter {
            launch,
            file,
            signals,
            pipes,
            mut status,
            follower,
        } = self;
        let program = PathBuf::from(launch.command.get_program());
        let of_launch = |kind: LaunchError| {
            let error = Error::of_program(&program, kind);
            error_of_launch(error, program.clone(), file.as_deref()).with_effect(Effect::NotStarted)
        };
        let traced_by = TracedBy::Other { pid: follower };
        let mut child = spawn::spawn(launch.command, pipes, traced_by, signals.inherited())
            .map_err(|source| of_launch(LaunchError::Exec { source }))?;
        let Some(sent) = wait_for_status(&mut status) else {
            at_exec::kill_and_reap(&mut child);
            return Err(of_launch(LaunchError::Interrupted));
        };
        if sent == [RUNS] {
            if launch.attended {
                signals.keep_blocked();
            }
            let report = Report::of_nothing(child.id() as i32);
            return Ok(Some(Launched {
                child,
                report,
                observer: None,
            }));
        }
        let status = at_exec::kill_and_reap(&mut child);
        if sent == [FAILED] {
            return Ok(None);
        }
        let signal = status.and_then(|status| status.signal());
        Err(of_launch(LaunchError::DiedAtStart { signal }))
    }
}

/// Returns what the follower sends: nothing (0) if the program exited before it was traced, or the follower was killed.
/// `None` if a signal came that ends this process: the program's loader may wait for ever.
fn wait_for_status(status: &mut File) -> Option<[u8; 1]> {
    let is_silent = |status: &File| {
        let mut fds = [PollFd::new(status.as_fd(), PollFlags::POLLIN)];
        matches!(poll(&mut fds, SIGNALS_CHECKED), Ok(0) | Err(Errno::EINTR))
    };
    while is_silent(status) {
        if signals::is_interrupted() {
            return None;
        }
    }
    let mut sent = [0];
    let _ = status.read_exact(&mut sent);
    Some(sent)
}

impl Follower {
    /// Sets the probes of the program and follows it, same as [`Follow`]. The first event is
    /// [`FollowEvent::Set`], which says what was done to the program; only [`FollowEvent::Missing`] may
    /// come before it. The program begins to run when [`Follow::next`] is called again after it has
    /// returned [`FollowEvent::Set`]: so what the caller prints about that event comes before what the
    /// program prints.
    ///
    /// If the program cannot be executed, [`Starter::spawn`] has the error, and there is nothing to
    /// follow here: no event comes.
    ///
    /// # Errors
    ///
    /// Same as [`Launch::spawn`]; the program has not run then. The starter waits until this is dropped.
    pub fn start(&mut self) -> Result<Follow> {
        let tracing = self.tracing.clone();
        let pipes = self.pipes.take();
        Follow::spawn(move |tracer_side| match pipes {
            Some(pipes) => with_tracer(&[], |tracer| tracing.follow(tracer, pipes, tracer_side)),
            None => Ok(()),
        })
        .map_err(|error| error.with_effect(Effect::NotStarted))
    }
}

impl Tracing {
    fn follow(
        &self,
        tracer: &Tracer<'_>,
        pipes: TracerPipes,
        tracer_side: &TracerSide,
    ) -> Result<()> {
        let pid = match at_exec::trace_to_exec(tracer, pipes) {
            Ok(pid) => pid,
            Err(Untraced::Exited) => {
                self.status.withhold();
                return Ok(());
            }
            Err(Untraced::Refused(errno)) => {
                return Err(at_exec::refused(&self.program, errno));
            }
            Err(Untraced::Interrupted) => return Err(at_exec::interrupted(&self.program)),
        };
        let at_exec = AtExec::new(Process::open(pid)?);
        refuse_shell(at_exec.process(), self.file.as_deref(), &self.program)?;
        let process = Process::open(pid)?;
        let set_up = SetUp {
            tracer,
            at_exec: &at_exec,
            program: &self.program,
            actions: &self.actions,
            options: self.options,
            allow_missing_names: true,
        };
        let Ready {
            stopped,
            report,
            objects,
            missing,
        } = set_up.run()?;
        tracer_side.report_begun();
        if let Some(error) = missing {
            tracer_side.events.send(FollowEvent::Missing { pid, error });
        }
        tracer_side.events.send(FollowEvent::Set(report));
        tracer_side.events.wait_until_all_are_done();
        self.status.send(RUNS);
        let mut session =
            FollowSession::new(tracer, &self.actions, self.options, &tracer_side.events);
        session.adopt(process, objects, stopped);
        session.run();
        Ok(())
    }
}

impl StatusPipe {
    fn file(&self) -> MutexGuard<'_, Option<File>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends the status, unless one was already sent or withheld.
    fn send(&self, status: u8) {
        if let Some(mut file) = self.file().take() {
            // It fails if the starter was killed; the program runs on.
            let _ = file.write_all(&[status]);
        }
    }

    /// Closes the pipe without sending a status: the starter learns by itself that the program has
    /// exited.
    fn withhold(&self) {
        self.file().take();
    }
}

impl Drop for StatusPipe {
    fn drop(&mut self) {
        self.send(FAILED);
    }
}
