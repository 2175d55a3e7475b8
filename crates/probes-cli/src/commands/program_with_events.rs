//! A program that is started with its runtime events on, in a directory of their own.

use std::env;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::iter;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use nix::unistd::mkdtemp;
use probes_lib::{ErrorKind, RuntimeEvents, RuntimeEventsError, Target};

use super::observe_loop::next_reading;
use super::started_program::StartedProgram;
use crate::failure::Failure;
use crate::messages::Messages;
use crate::search_path::{look_up, path_of};
use crate::signals::{TerminationSignals, WaitEnd};

/// How often it is checked whether a program has begun to write events.
const CHECK_INTERVAL: Duration = Duration::from_millis(1);

/// A program that was started, and the directory of its events.
pub(super) struct ProgramWithEvents {
    started: StartedProgram,
    program: PathBuf,
    begun: Instant,
    directory: EventsDirectory,
}

/// A directory for files of events, which is removed with them when the program has exited; but it stays if processes
/// that the program has forked still write there: the runtime would end their children, whose files it could not
/// create.
pub(super) struct EventsDirectory(PathBuf);

impl Drop for EventsDirectory {
    fn drop(&mut self) {
        let is_running = |pid: &str| Path::new("/proc").join(pid).exists();
        let files = fs::read_dir(&self.0).into_iter().flatten().flatten();
        let mut names = files.filter_map(|file| file.file_name().into_string().ok());
        if !names.any(|name| name.strip_suffix(".events").is_some_and(is_running)) {
            // What cannot be removed stays in the directory for temporary files.
            let _ = fs::remove_dir_all(&self.0);
        }
    }
}

impl EventsDirectory {
    /// Makes one for a `program` that is to be started. Prints a note if that certainly writes no events itself.
    ///
    /// # Errors
    ///
    /// If there can be no directory.
    pub(super) fn make(program: &Path, messages: &Messages) -> Result<EventsDirectory, Failure> {
        let checked = look_up(program).map(RuntimeEvents::check_program);
        if let Some(Err(why)) = checked {
            let others = match why.kind() {
                ErrorKind::RuntimeEvents(RuntimeEventsError::Ocaml4) => {
                    ": only a program that it executes may"
                }
                _ => "",
            };
            messages.note(&format!("{why}{others}"));
        }
        let directory = mkdtemp(&env::temp_dir().join("ocaml-probes-gc.XXXXXX"));
        let failed = |source| Failure::System("make a directory for runtime events", source);
        Ok(EventsDirectory(
            directory.map_err(|errno| failed(errno.into()))?,
        ))
    }

    /// The environment of a program that writes its events there.
    pub(super) fn variables(&self) -> [(&'static str, &OsStr); 3] {
        [
            ("OCAML_RUNTIME_EVENTS_START", OsStr::new("1")),
            ("OCAML_RUNTIME_EVENTS_DIR", self.0.as_os_str()),
            // It may exit before we have opened it.
            ("OCAML_RUNTIME_EVENTS_PRESERVE", OsStr::new("1")),
        ]
    }

    /// The file of a process, if there is one.
    fn file(&self, pid: i32) -> Option<PathBuf> {
        let file = self.0.join(format!("{pid}.events"));
        file.exists().then_some(file)
    }

    /// Opens the events of a `program` that has exited, from the first.
    ///
    /// # Errors
    ///
    /// If it has written none, or they cannot be read.
    fn events_of_exited(&self, pid: i32, program: &Path) -> Result<RuntimeEvents, Failure> {
        let file = self.file(pid);
        let file = file.ok_or_else(|| Failure::NoRuntimeEvents(program.to_owned()))?;
        RuntimeEvents::of_file(file, path_of(program)).map_err(Failure::of_process(pid))
    }
}

/// The runtime events of a program that another thread waits for, once they are there.
pub(super) struct AwaitedEvents<'f> {
    directory: &'f EventsDirectory,
    /// When to try next to open them, since the beginning.
    try_at: Duration,
}

impl<'f> AwaitedEvents<'f> {
    pub(super) fn in_directory(directory: &'f EventsDirectory) -> AwaitedEvents<'f> {
        let try_at = Duration::ZERO;
        AwaitedEvents { directory, try_at }
    }

    /// Opens them, from the first, if it is time to try and they are there by now: `at` after the beginning.
    pub(super) fn try_to_open(&mut self, pid: i32, at: Duration) -> Option<RuntimeEvents> {
        if at < self.try_at {
            return None;
        }
        self.try_at = next_reading(at);
        let events = RuntimeEvents::of_process(pid).ok()?;
        Some(events.from_start())
    }

    /// Opens those of a program that has exited.
    pub(super) fn of_exited(&self, pid: i32, program: &Path) -> Result<RuntimeEvents, Failure> {
        self.directory.events_of_exited(pid, program)
    }
}

impl ProgramWithEvents {
    pub(super) fn start(
        program: &Path,
        arguments: &[OsString],
        messages: &Messages,
    ) -> Result<ProgramWithEvents, Failure> {
        let directory = EventsDirectory::make(program, messages)?;
        let begun = Instant::now();
        Ok(ProgramWithEvents {
            started: StartedProgram::start(program, arguments, directory.variables())?,
            program: program.to_owned(),
            begun,
            directory,
        })
    }

    pub(super) fn pid(&self) -> i32 {
        self.started.pid()
    }

    pub(super) fn begun(&self) -> Instant {
        self.begun
    }

    /// Opens its events, from the first, once it has begun to write them.
    ///
    /// # Errors
    ///
    /// If it has exited, or a signal comes, and it has written none.
    pub(super) fn events(
        &self,
        target: &Target,
        signals: &TerminationSignals,
    ) -> Result<RuntimeEvents, Failure> {
        loop {
            if let Ok(events) = RuntimeEvents::of_process(self.pid()) {
                return Ok(events.from_start());
            }
            match signals.wait(iter::once(target), CHECK_INTERVAL)? {
                WaitEnd::Timeout => {}
                WaitEnd::Interrupted => return Err(self.no_events()),
                WaitEnd::Exited => return self.events_of_exited(),
            }
        }
    }

    fn no_events(&self) -> Failure {
        Failure::NoRuntimeEvents(self.program.clone())
    }

    /// Opens the events of a program that has exited.
    pub(super) fn events_of_exited(&self) -> Result<RuntimeEvents, Failure> {
        self.directory.events_of_exited(self.pid(), &self.program)
    }

    /// The path of the program.
    pub(super) fn path(&self) -> PathBuf {
        path_of(&self.program)
    }

    /// Waits until it has exited, and returns its status as [`StartedProgram::wait`] does.
    pub(super) fn wait(self, is_complete: bool) -> Result<ExitCode, Failure> {
        self.started.wait(is_complete)
    }
}
