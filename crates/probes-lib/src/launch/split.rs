//! [`Split`]: a program that is started by one process of ours and followed by another.
//!
//! ```text
//! Starter (who called)                      Follower (a copy, in a session of its own)
//! ────────────────────                      ──────────────────────────────────────────
//! Command::spawn  ──▶ child: tells its pid, waits  ───▶  SEIZE
//!                     execve                ◀─────────  "go"
//!                     stands                            sets its probes
//! is the program's parent               ◀── "done" ──   lets it run, follows it
//! ```
//!
//! One process could not be both: who traces its own child is not told that it stops, and is stopped
//! with it by Ctrl-Z, while what it follows waits for it.

use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::sync::mpsc::{self, Receiver};

use nix::errno::Errno;

use super::{
    Launch, Launched, check_names, is_shell_instead, of_launch, refuse_setuid, resolve, set_up,
};
use crate::error::{Effect, ErrorKind, Result};
use crate::follow::{EventSender, FollowEvent, FollowSession, is_not_yet};
use crate::process::Process;
use crate::select::Actions;
use crate::sys::fork;
use crate::sys::signals::SignalsAtLaunch;
use crate::sys::spawn::{self, AtExec, ChildsEnds, TracedBy, TracersEnds, Untraced};
use crate::target::Options;
use crate::trace::stop::{Tracer, with_listener, with_tracer};
use crate::update::report::Report;

/// What this process is from [`Launch::split`] on.
pub enum Split {
    /// The process that called: it is to be the parent of the program.
    Starter(Box<Starter>),
    /// A copy of it, which is to trace the program and what that starts.
    Follower(Follower),
}

/// Starts a program that a [`Follower`] follows.
pub struct Starter {
    launch: Launch,
    file: Option<PathBuf>,
    signals: SignalsAtLaunch,
    ends: ChildsEnds,
    verdict: File,
    follower: i32,
}

/// Follows a program that a [`Starter`] starts. If it is dropped before the program runs, the program
/// does not run.
#[derive(Debug)]
pub struct Follower {
    program: PathBuf,
    file: Option<PathBuf>,
    actions: Actions,
    options: Options,
    ends: Option<TracersEnds>,
    /// Where to tell the starter what has come of it, once.
    verdict: Option<File>,
}

/// What a follower tells its starter.
const RUNS: u8 = 1;
const FAILED: u8 = 2;

impl Launch {
    /// Makes a copy of this process that is to follow the program, with all that it starts, executes
    /// and loads. The copy leads a session of its own: what the terminal sends the program, Ctrl-C
    /// or Ctrl-Z, is not for it.
    ///
    /// # Errors
    ///
    /// As of [`Launch::spawn`], for what can be told before the program is executed; and if this
    /// process has several threads, of which the copy would have one.
    pub fn split(self) -> Result<Split> {
        self.try_split()
            .map_err(|error| error.with_effect(Effect::NotStarted))
    }

    fn try_split(self) -> Result<Split> {
        let program = PathBuf::from(self.command.get_program());
        if self.observation.is_some() {
            return Err(ErrorKind::FollowedAndObserved { program }.into());
        }
        let file = resolve(&self.command);
        if let Some(file) = &file {
            refuse_setuid(file)?;
            match check_names(file, &self.actions) {
                // What it lacks may come with what it executes and loads.
                Err(error) if is_not_yet(error.kind()) => {}
                checked => checked?,
            }
        }
        let failed = |source| ErrorKind::Exec {
            program: program.clone(),
            source,
        };
        let (childs, tracers) = spawn::ends().map_err(failed)?;
        let (reader, writer) = spawn::pipe().map_err(failed)?;
        // From before there are two of us.
        let signals = SignalsAtLaunch::new(self.attended);
        Ok(match fork::split().map_err(failed)? {
            Some(follower) => Split::Starter(Box::new(Starter {
                launch: self,
                file,
                signals,
                ends: childs,
                verdict: reader,
                follower,
            })),
            None => {
                // Those that end it are its own to read; others are not for it.
                signals.keep();
                Split::Follower(Follower {
                    program,
                    file,
                    actions: self.actions,
                    options: self.options,
                    ends: Some(tracers),
                    verdict: Some(writer),
                })
            }
        })
    }
}

impl Starter {
    /// The follower, a child of this process.
    pub fn follower(&self) -> i32 {
        self.follower
    }

    /// Starts the program; returns once it runs with its probes set. [`Launched::report`] does not
    /// say which: the follower does. `None` if the follower has failed, and has said why.
    ///
    /// # Errors
    ///
    /// If the program cannot be executed, or has been killed before it ran.
    pub fn spawn(self) -> Result<Option<Launched>> {
        let Starter {
            launch,
            file,
            signals,
            ends,
            mut verdict,
            follower,
        } = self;
        let program = PathBuf::from(launch.command.get_program());
        let of_launch = |kind: ErrorKind| {
            of_launch(kind.into(), program.clone(), file.as_deref()).with_effect(Effect::NotStarted)
        };
        let by = TracedBy::Other { pid: follower };
        let mut child =
            spawn::spawn(launch.command, ends, by, signals.inherited()).map_err(|source| {
                of_launch(ErrorKind::Exec {
                    program: program.clone(),
                    source,
                })
            })?;
        let mut said = [0];
        // Nothing, if the follower has been killed.
        let _ = verdict.read_exact(&mut said);
        if said == [RUNS] {
            if launch.attended {
                signals.keep();
            }
            let report = Report::of_nothing(child.id() as i32);
            return Ok(Some(Launched {
                child,
                report,
                observed: None,
            }));
        }
        let status = spawn::end(&mut child);
        if said == [FAILED] {
            return Ok(None);
        }
        let signal = status.and_then(|status| status.signal());
        Err(of_launch(ErrorKind::DiedAtStart {
            program: program.clone(),
            signal,
        }))
    }
}

impl Follower {
    /// Sets the probes of the program, lets it run, and follows it as [`follow`](crate::follow)
    /// does. What was done to the program is the first thing that `tell` is told.
    ///
    /// # Errors
    ///
    /// As of [`Launch::spawn`]; the program has not run then. If it cannot be executed, that is for
    /// the [`Starter`] to say, and not an error here.
    pub fn run(
        &mut self,
        tell: &mut (dyn FnMut(FollowEvent) + Send),
        is_over: &(dyn Fn() -> bool + Sync),
    ) -> Result<()> {
        // Before the program runs, and can say anything.
        let (is_in_hook, is_told) = mpsc::channel();
        let mut tell = |event| {
            tell(event);
            // Nobody waits for all that follows.
            let _ = is_in_hook.send(());
        };
        with_listener(&mut tell, |events| {
            with_tracer(&[], |tracer| self.follow(tracer, events, is_told, is_over))
        })
        .map_err(|error| error.with_effect(Effect::NotStarted))
    }

    fn follow(
        &mut self,
        tracer: &Tracer<'_>,
        events: EventSender,
        is_told: Receiver<()>,
        is_over: &dyn Fn() -> bool,
    ) -> Result<()> {
        let Some(ends) = self.ends.take() else {
            return Ok(());
        };
        let pid = match spawn::trace_to_exec(tracer, ends) {
            Ok(pid) => pid,
            Err(Untraced::Ended) => {
                self.verdict = None;
                return Ok(());
            }
            Err(Untraced::Refused(errno)) => {
                return Err(spawn::refused(&self.program, errno).into());
            }
        };
        let at_exec = AtExec::of_other(Process::open(pid)?);
        if is_shell_instead(at_exec.process(), self.file.as_deref()) {
            let (program, source) = (self.program.clone(), Errno::ENOEXEC.into());
            return Err(ErrorKind::Exec { program, source }.into());
        }
        let (stopped, report, missing) = set_up(
            tracer,
            &at_exec,
            &self.program,
            &self.actions,
            self.options,
            true,
        )?;
        if let Some(error) = missing {
            let _ = events.send(FollowEvent::NotYet { pid, error });
        }
        let _ = events.send(FollowEvent::Set(report));
        let _ = is_told.recv();
        drop(is_told);
        if let Some(mut verdict) = self.verdict.take() {
            // Nobody reads it if the starter has been killed; the program goes on.
            let _ = verdict.write_all(&[RUNS]);
        }
        let mut following = FollowSession::new(tracer, &self.actions, self.options, events);
        following.begin_with(Process::open(pid)?, stopped);
        following.until(is_over);
        Ok(())
    }
}

impl Drop for Follower {
    fn drop(&mut self) {
        if let Some(mut verdict) = self.verdict.take() {
            // Nobody reads it if the starter has been killed.
            let _ = verdict.write_all(&[FAILED]);
        }
    }
}
