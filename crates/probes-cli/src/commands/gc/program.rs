//! A program that is started with its runtime events on.

use std::env;
use std::ffi::OsString;
use std::fs;
use std::iter;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode};
use std::time::{Duration, Instant};

use nix::unistd::mkdtemp;
use probes_lib::{Error, RuntimeEvents, Target};

use crate::failure::Failure;
use crate::signals::{TerminationSignals, WaitEnd};

/// How long a program that was started may take until its memory is set up.
const EXECUTING: Duration = Duration::from_secs(1);

/// How often it is checked whether it has begun to write events.
const CHECK_INTERVAL: Duration = Duration::from_millis(1);

/// A program that was started, and the folder of its events.
pub(super) struct StartedProgram {
    child: Child,
    program: PathBuf,
    begun: Instant,
    folder: Folder,
}

/// A folder that is removed when it is not needed any more, with the files of events in it.
struct Folder(PathBuf);

impl Drop for Folder {
    fn drop(&mut self) {
        // What cannot be removed stays in the folder for temporary files.
        let _ = fs::remove_dir_all(&self.0);
    }
}

impl StartedProgram {
    pub(super) fn start(program: &Path, arguments: &[OsString]) -> Result<StartedProgram, Failure> {
        let folder = mkdtemp(&env::temp_dir().join("ocaml-probes-gc.XXXXXX"));
        let failed = |source| Failure::System("make a folder for runtime events", source);
        let folder = Folder(folder.map_err(|errno| failed(errno.into()))?);
        let begun = Instant::now();
        let mut command = Command::new(program);
        let child = command
            .args(arguments)
            .env("OCAML_RUNTIME_EVENTS_START", "1")
            .env("OCAML_RUNTIME_EVENTS_DIR", &folder.0)
            // It may exit before we have opened it.
            .env("OCAML_RUNTIME_EVENTS_PRESERVE", "1")
            .spawn()
            .map_err(|source| Failure::StartProgram(program.to_owned(), source))?;
        Ok(StartedProgram {
            child,
            program: program.to_owned(),
            begun,
            folder,
        })
    }

    pub(super) fn pid(&self) -> i32 {
        self.child.id() as i32
    }

    pub(super) fn begun(&self) -> Instant {
        self.begun
    }

    /// Opens it; the kernel says that a program was started before it has set up its memory.
    pub(super) fn open(&self) -> Result<Target, Error> {
        let begun = Instant::now();
        loop {
            match Target::open_any(self.pid()) {
                Err(error) if error.is_executed() && begun.elapsed() < EXECUTING => {
                    std::thread::sleep(CHECK_INTERVAL);
                }
                opened => return opened,
            }
        }
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
        let file = self.folder.0.join(format!("{}.events", self.pid()));
        if !file.exists() {
            return Err(self.no_events());
        }
        let events = RuntimeEvents::of_file(file, self.path());
        events.map_err(Failure::of_process(self.pid()))
    }

    /// The path of the program, which is looked up as execvp(3) does it.
    pub(super) fn path(&self) -> PathBuf {
        let path = env::var_os("PATH").unwrap_or_default();
        let mut found = env::split_paths(&path).map(|folder| folder.join(&self.program));
        if self.program.components().count() > 1 {
            return self.program.clone();
        }
        let found = found.find(|path| path.is_file());
        found.unwrap_or_else(|| self.program.clone())
    }

    /// Waits for it; returns its status as ours, 128 plus its number if a signal has ended it.
    pub(super) fn wait(mut self) -> Result<ExitCode, Failure> {
        let status = self.child.wait();
        let status = status.map_err(|source| Failure::System("wait for the program", source))?;
        let code = status.code().or(status.signal().map(|signal| 128 + signal));
        Ok(ExitCode::from(code.unwrap_or(1) as u8))
    }
}
