//! A program that is started with its runtime events on, in a directory of their own.

use std::env;
use std::ffi::{OsStr, OsString};
use std::fs::{self, Permissions};
use std::io;
use std::iter;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use nix::unistd::{geteuid, mkdtemp};
use probes_lib::{ErrorKind, RuntimeEvents, RuntimeEventsError, Target, pids};

use super::reading_times::next_reading;
use super::started_program::StartedProgram;
use crate::failure::Failure;
use crate::messages::Messages;
use crate::search_path::{look_up, path_of};
use crate::signals::{TerminationSignals, WaitEnd};
use crate::text::join_first_few;

/// The environment variable that names the directory.
const DIRECTORY_VARIABLE: &str = "OCAML_RUNTIME_EVENTS_DIR";

/// A program that was started, and the directory of its events.
pub(super) struct ProgramWithEvents {
    started: StartedProgram,
    program: PathBuf,
    begun: Instant,
    directory: EventsDirectory,
}

/// A directory for files of events. It is removed with them when the program has exited, unless a process that it has
/// started still uses it: the runtime would end its children, whose files it could not create.
pub(super) struct EventsDirectory {
    path: PathBuf,
    /// What is removed at the end: the directory itself, or the one that was made around it.
    outer: PathBuf,
    messages: Messages,
}

impl Drop for EventsDirectory {
    fn drop(&mut self) {
        // Twice, because a process may fork and exit after /proc was listed and before it was looked at.
        let users = processes_using(&self.path);
        let users = if users.is_empty() {
            processes_using(&self.path)
        } else {
            users
        };
        let Some(named) = join_first_few(&users) else {
            // What cannot be removed stays in the directory for temporary files.
            let _ = fs::remove_dir_all(&self.outer);
            return;
        };
        let (process, use_it) = match users.len() {
            1 => ("process", "uses it and runs"),
            _ => ("processes", "use it and run"),
        };
        self.messages.note(&format!(
            "{} stays, with files of runtime events: {process} {named} {use_it}; remove it later",
            self.outer.display()
        ));
    }
}

/// Makes a directory for events in `outer` that all may write to, as a program that root starts may change its user: the
/// runtime would end its children if it could not create their files. Nobody can list `outer`: others cannot know the
/// directory's name, to plant links in it.
fn make_writable_directory(outer: &Path) -> io::Result<PathBuf> {
    const ENTERED_BY_ALL: u32 = 0o711;
    const ENTERED_AND_WRITTEN_BY_ALL: u32 = 0o1733;
    let inner = mkdtemp(&outer.join("events.XXXXXX"))?;
    fs::set_permissions(&inner, Permissions::from_mode(ENTERED_AND_WRITTEN_BY_ALL))?;
    fs::set_permissions(outer, Permissions::from_mode(ENTERED_BY_ALL))?;
    Ok(inner)
}

/// The pids of the processes that write events to this directory, or will: they have a file in it mapped, or name it in
/// their environment. Of a process that must not be read, it is enough that the directory has a file of its pid.
fn processes_using(directory: &Path) -> Vec<String> {
    let name = directory.as_os_str().as_bytes();
    let variable = [DIRECTORY_VARIABLE.as_bytes(), b"=", name].concat();
    let real = fs::canonicalize(directory);
    let real = real.as_deref().unwrap_or(directory).as_os_str();
    let mapped = [real.as_bytes(), b"/"].concat();
    let mut pids = pids().unwrap_or_default();
    pids.sort_unstable();
    let uses = |pid: &i32| {
        let process = Path::new("/proc").join(pid.to_string());
        match fs::read(process.join("environ")) {
            Ok(environment) => {
                let mut variables = environment.split(|&byte| byte == 0);
                // A program may have overwritten its environment, to show another name.
                variables.any(|it| it == variable)
                    || fs::read(process.join("maps"))
                        .is_ok_and(|maps| maps.windows(mapped.len()).any(|it| it == mapped))
            }
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                directory.join(format!("{pid}.events")).exists()
            }
            // It has exited.
            Err(_) => false,
        }
    };
    let using = pids.iter().filter(|pid| uses(pid));
    using.map(i32::to_string).collect()
}

impl EventsDirectory {
    /// Makes a directory for a `program` that is to be started. Prints a note if the program itself certainly writes
    /// no events.
    ///
    /// # Errors
    ///
    /// If no directory can be made.
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
        let made = EventsDirectory::make_in(&env::temp_dir(), geteuid().is_root(), messages);
        made.map_err(|source| Failure::System("make a directory for runtime events", source))
    }

    /// Makes a directory in `temporary`. Its path is absolute: a program that works in another directory by the time it
    /// forks creates files in it, too.
    fn make_in(
        temporary: &Path,
        is_root: bool,
        messages: &Messages,
    ) -> io::Result<EventsDirectory> {
        let outer = mkdtemp(&std::path::absolute(temporary)?.join("ocaml-probes-gc.XXXXXX"))?;
        // From here on, it is removed if something fails.
        let mut directory = EventsDirectory {
            path: outer.clone(),
            outer,
            messages: *messages,
        };
        if is_root {
            directory.path = make_writable_directory(&directory.outer)?;
        }
        Ok(directory)
    }

    /// The environment of a program that writes its events there.
    pub(super) fn variables(&self) -> [(&'static str, &OsStr); 3] {
        [
            ("OCAML_RUNTIME_EVENTS_START", OsStr::new("1")),
            (DIRECTORY_VARIABLE, self.path.as_os_str()),
            // It may exit before we have opened it.
            ("OCAML_RUNTIME_EVENTS_PRESERVE", OsStr::new("1")),
        ]
    }

    /// The file of a process, if there is one.
    fn file(&self, pid: i32) -> Option<PathBuf> {
        let file = self.path.join(format!("{pid}.events"));
        file.exists().then_some(file)
    }

    /// Opens the events of a `program` that has exited, from the first.
    ///
    /// # Errors
    ///
    /// If it has written none, or they cannot be read.
    fn events_of_exited(&self, pid: i32, program: &Path) -> Result<RuntimeEvents, Failure> {
        let file = self.file(pid);
        let file = file.ok_or_else(|| Failure::without_events(program))?;
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

    /// Opens its events, from the first, once it has begun to write them: until `end`, after the beginning.
    ///
    /// # Errors
    ///
    /// If the time is over, it has exited, or a signal comes, and it has written none.
    pub(super) fn events(
        &self,
        target: &Target,
        end: Duration,
        signals: &TerminationSignals,
    ) -> Result<RuntimeEvents, Failure> {
        let mut awaited = AwaitedEvents::in_directory(&self.directory);
        loop {
            let at = self.begun.elapsed();
            if let Some(events) = awaited.try_to_open(self.pid(), at) {
                return Ok(events);
            }
            if at >= end {
                return Err(self.no_events());
            }
            let next = awaited.try_at.min(end).saturating_sub(at);
            match signals.wait(iter::once(target), next)? {
                WaitEnd::Timeout => {}
                WaitEnd::Interrupted => return Err(self.no_events()),
                WaitEnd::Exited => return self.events_of_exited(),
            }
        }
    }

    fn no_events(&self) -> Failure {
        Failure::without_events(&self.program)
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

#[cfg(test)]
mod tests {
    use test_support::Scratch;

    use super::*;
    use crate::messages::{Level, MessageForm};

    #[test]
    fn only_the_directories_made_are_removed() {
        let scratch = Scratch::new();
        // Its name begins as those of our own directories do.
        let temporary = scratch.file("ocaml-probes-gc.tmp");
        fs::create_dir(&temporary).unwrap();
        fs::write(temporary.join("kept"), "").unwrap();
        let messages = Messages::new(Level::Errors, MessageForm::Text);
        for is_root in [false, true] {
            let directory = EventsDirectory::make_in(&temporary, is_root, &messages).unwrap();
            // No process has this pid.
            fs::write(directory.path.join("0.events"), "").unwrap();
            drop(directory);
            let names = fs::read_dir(&temporary).unwrap();
            let names: Vec<_> = names.map(|entry| entry.unwrap().file_name()).collect();
            assert_eq!(names, ["kept"], "{is_root}");
        }
    }
}
