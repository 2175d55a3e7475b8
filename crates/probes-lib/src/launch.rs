//! [`Launch`]: starts a program with its probes set before its first instruction.

mod split;

use std::ffi::OsStr;
use std::fmt;
use std::fs::Metadata;
use std::io::{self, ErrorKind::NotFound};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::Arc;
use std::time::Duration;

use nix::errno::Errno;
use nix::fcntl::OFlag;
use nix::unistd::{AccessFlags, access, getegid, geteuid};

use crate::address::{LiveAddr, LoadBias};
use crate::elf::ElfFile;
use crate::elf::table::ProbeTable;
use crate::error::{Effect, Error, ErrorKind, Operation, Result};
use crate::follow::{is_not_yet, wanted};
use crate::inject::loader_hook;
use crate::memory::shadow::{Shadow, Shadowed};
use crate::observe::install::at_launch::AtLaunch;
use crate::observe::{Installed, Observation};
use crate::process::Process;
use crate::process::denial;
use crate::process::image::Image;
use crate::process::load_bias;
use crate::process::memory::ProcessMemory;
use crate::process::program::Program;
use crate::select::{Actions, choose};
use crate::sys::pidfd;
use crate::sys::signals::{self, SignalsAtLaunch};
use crate::sys::spawn::{self, AtExec};
use crate::target::Target;
use crate::trace::run_to::NotReached;
use crate::trace::stop::{Stopped, Tracer, with_tracer};
use crate::update::options::Options;
use crate::update::patch::Outcome;
use crate::update::prepare::{StopMode, UpdateContext, UpdateRequest};
use crate::update::report::Report;

pub use split::{Follower, Split, Starter};

/// A program to be started with its probes set before any of its code runs.
///
/// ```no_run
/// use std::process::Command;
/// use probes_lib::{Action, Actions, Launch, Selector};
///
/// let mut program = Command::new("./server.exe");
/// program.arg("--port=8080");
/// let launched = Launch::new(program)
///     .actions(Actions::of(Action::Enable, Selector::All))
///     .spawn()?;
/// println!("started {}", launched.report().pid);
/// # Ok::<(), probes_lib::Error>(())
/// ```
#[derive(Debug)]
pub struct Launch {
    command: Command,
    actions: Actions,
    options: Options,
    attended: bool,
    observation: Option<Observation>,
}

impl Launch {
    /// Starts what `command` says, with its arguments, environment, directory and descriptors.
    pub fn new(command: Command) -> Launch {
        Launch {
            command,
            actions: Actions::new(),
            options: Options::default(),
            attended: false,
            observation: None,
        }
    }

    /// What to do with its probes; nothing by default.
    #[must_use]
    pub fn actions(mut self, actions: Actions) -> Launch {
        self.actions = actions;
        self
    }

    /// See [`Options`]; the deadline does not matter, as nothing runs yet.
    #[must_use]
    pub fn options(mut self, options: Options) -> Launch {
        self.options = options;
        self
    }

    /// Also learns of the hits of its probes, from the first one to the last, which is known when the
    /// program has ended, too: see [`Launched::observed`]. Processes that it forks add to the counts
    /// and events, and disturb the times of pairs.
    #[must_use]
    pub fn observe(mut self, observation: Observation) -> Launch {
        self.observation = Some(observation);
        self
    }

    /// For a caller that stays and stands in for the program towards those who send it signals.
    ///
    /// When [`spawn`](Launch::spawn) has succeeded, the calling thread holds back all signals but
    /// those of faults, as it has from before the program was there: none is lost until the caller
    /// looks for them, with signalfd(2) or sigwaitinfo(2). And SIGCHLD is not ignored any more, so
    /// that the end of the program can be waited for. The program inherits neither.
    #[must_use]
    pub fn attended(mut self) -> Launch {
        self.attended = true;
        self
    }

    /// Starts the program, sets its probes and lets it run.
    ///
    /// # Errors
    ///
    /// If the program cannot be found, read, executed or traced, has no OCaml probes, or if the
    /// actions do not fit them. It has not run then, and no child is left behind.
    pub fn spawn(self) -> Result<Launched> {
        self.try_spawn()
            .map_err(|error| error.with_effect(Effect::NotStarted))
    }

    fn try_spawn(self) -> Result<Launched> {
        let Launch {
            mut command,
            actions,
            options,
            attended,
            observation,
        } = self;
        // What is wrong with the file or the names is better found before anything is started; the
        // file that counts is the one that the kernel has executed in the end.
        let file = resolve(&command);
        if let Some(file) = &file {
            refuse_setuid(file)?;
            check_names(file, &actions)?;
        }
        let program = PathBuf::from(command.get_program());
        let at_launch = observation.map(|observation| AtLaunch::of(observation, &mut command));
        let mut at_launch = at_launch.transpose()?;
        let signals = SignalsAtLaunch::new(attended);
        let inherited = signals.inherited();
        let launched = with_tracer(&[], |tracer| {
            let at_exec = spawn::at_exec(tracer, command, inherited)?;
            let shell = is_shell_instead(at_exec.process(), file.as_deref());
            if shell {
                let source = Errno::ENOEXEC.into();
                let program = program.clone();
                return Err(ErrorKind::Exec { program, source }.into());
            }
            // Before `stopped` lets it go.
            let killed = |error| {
                at_exec.kill();
                error
            };
            let memory;
            let (mut stopped, report, _) =
                set_up(tracer, &at_exec, &program, &actions, options, false)?;
            let mut observed = None;
            if let Some(at_launch) = at_launch.take() {
                let target = Target::open(report.pid).map_err(killed)?;
                memory = target.bare_memory().map_err(killed)?;
                let program = target.current_image().map_err(killed)?.program.clone();
                let set = at_launch.install(tracer, &at_exec, stopped, &memory, program, options);
                let (standing, installed) = set.map_err(killed)?;
                (stopped, observed) = (standing, Some((target, installed)));
            }
            stopped.release();
            let child = at_exec.keep()?;
            Ok(Launched {
                child,
                report,
                observed,
            })
        });
        let launched = launched.map_err(|error| of_launch(error, program, file.as_deref()))?;
        if attended {
            signals.keep();
        }
        Ok(launched)
    }
}

/// Sets the probes of a program that stands at its exec, and leaves it standing, perhaps further on.
/// On an error it is killed: it is not to run without its probes.
fn set_up<'s>(
    tracer: &Tracer<'_>,
    at_exec: &'s AtExec,
    program: &Path,
    actions: &Actions,
    options: Options,
    follows: bool,
) -> Result<(Stopped<'s>, Report, Option<Error>)> {
    let process = at_exec.process();
    // Before `stopped` lets it go.
    let killed = |error| {
        at_exec.kill();
        error
    };
    let memory = ProcessMemory::open(process, OFlag::O_RDWR)
        .map_err(|source| killed(denial::denied_or_exited(process, Operation::Attach, source)))?;
    let stopped = at_exec.stopped(tracer);
    let stopped = match loader_entry(process).map_err(killed)? {
        None => stopped,
        // Its libraries may have probes as well.
        Some(entry) => run_until_loaded(tracer, at_exec, stopped, &memory, entry, options.deadline)
            .map_err(|reason| killed(not_reached(reason, process, program)))?,
    };
    let set = set_probes(process, memory, &stopped, actions, options, follows);
    let (report, missing) = set.map_err(killed)?;
    if tracer.is_interrupted() {
        // A Ctrl-C before the child was there has reached us alone.
        let program = program.to_owned();
        return Err(killed(ErrorKind::Interrupted { program }.into()));
    }
    Ok((stopped, report, missing))
}

/// Lets a program run until its loader has mapped all that it is linked with, of which nothing has run
/// then; where the loader does not tell, to its `entry`.
fn run_until_loaded<'s>(
    tracer: &Tracer<'_>,
    at_exec: &'s AtExec,
    mut stopped: Stopped<'s>,
    memory: &ProcessMemory,
    entry: LiveAddr,
    limit: Duration,
) -> Result<Stopped<'s>, NotReached> {
    let process = at_exec.process();
    let function = loader_hook::function(process);
    let mut place = function;
    loop {
        let places: Vec<LiveAddr> = place.into_iter().chain([entry]).collect();
        let (standing, reached) = at_exec.run_to(tracer, stopped, memory, &places, limit)?;
        stopped = standing;
        if reached == entry {
            return Ok(stopped);
        }
        place = match function == Some(reached) {
            // It is called before and after objects are mapped.
            true => match loader_hook::has_loaded(process, memory) {
                Some(true) => return Ok(stopped),
                Some(false) => Some(at_exec.return_address(memory)?),
                None => None,
            },
            false => function,
        };
    }
}

/// Where a program begins that has to be loaded first; `None` if the kernel has done all there is to
/// do.
fn loader_entry(process: &Process) -> Result<Option<LiveAddr>> {
    let auxv = process
        .read_program("auxv")
        .map_err(|source| process.exited_or(source))?;
    let has_loader = load_bias::auxv_value(&auxv, load_bias::AT_BASE).is_some_and(|base| base != 0);
    let entry = load_bias::auxv_value(&auxv, load_bias::AT_ENTRY).filter(|_| has_loader);
    Ok(entry.map(LiveAddr))
}

fn not_reached(reason: NotReached, process: &Process, program: &Path) -> Error {
    let (pid, program) = (process.pid(), program.to_owned());
    match reason {
        NotReached::Ended => ErrorKind::DiedLoading { program },
        NotReached::Executed => ErrorKind::Executed { pid },
        NotReached::Failed(source) => ErrorKind::System {
            pid,
            operation: Operation::StopAtEntry,
            source,
        },
    }
    .into()
}

/// The same error, in terms of the program that was to be started.
fn of_launch(error: Error, program: PathBuf, file: Option<&Path>) -> Error {
    match error.kind() {
        ErrorKind::NoThread { source } => {
            // From clone(2), so it has a number.
            let errno = source.raw_os_error().unwrap_or(libc::EAGAIN);
            let source = io::Error::from_raw_os_error(errno);
            ErrorKind::Exec { program, source }.into()
        }
        // ENOENT of a file that is there is about the one that is to load it.
        ErrorKind::Exec { source, .. } if source.kind() == NotFound => {
            let elf = file.and_then(|file| ElfFile::open(file).ok());
            match elf.and_then(|elf| elf.interpreter()) {
                Some(interpreter) if !interpreter.exists() => ErrorKind::NoInterpreter {
                    program,
                    interpreter,
                }
                .into(),
                _ => error,
            }
        }
        _ => error,
    }
}

/// execvp(3): "If the header of a file isn't recognized (the attempted execve(2) failed with the
/// error ENOEXEC), these functions will execute the shell (/bin/sh) with the path of the file as its
/// first argument."
fn is_shell_instead(process: &Process, file: Option<&Path>) -> bool {
    let identity = |metadata: Metadata| (metadata.dev(), metadata.ino());
    let exe = process.open_file("exe", OFlag::O_RDONLY);
    let exe = exe.and_then(|exe| exe.metadata()).map(identity);
    let of_path = |path: &Path| std::fs::metadata(path).map(identity).ok();
    exe.is_ok_and(|exe| {
        Some(exe) == of_path(Path::new("/bin/sh")) && Some(exe) != file.and_then(of_path)
    })
}

/// Sets the probes of a program that stands before its first instruction, or at its entry.
fn set_probes(
    process: &Process,
    memory: ProcessMemory,
    stopped: &Stopped<'_>,
    actions: &Actions,
    options: Options,
    follows: bool,
) -> Result<(Report, Option<Error>)> {
    let (image, choices, missing) = match follows {
        true => wanted(process, Arc::default(), actions)?,
        false => {
            let image = Image::of(process, Arc::default())?;
            let choices = choose(&image.program, actions)?;
            (image, choices, None)
        }
    };
    // A program that has not run is not observed.
    let context = UpdateContext {
        process,
        image: &image,
        memory: &Shadowed::new(memory, Shadow::default()),
    };
    let prepared = context.prepare(UpdateRequest {
        choices: &choices,
        stop_mode: StopMode::Stopped,
        gigatext: options.gigatext,
    })?;
    if !prepared.is_done() && prepared.carry_out(stopped)? == Outcome::Outdated {
        return Err(ErrorKind::KeepsChanging { pid: process.pid() }.into());
    }
    Ok((prepared.report(Duration::ZERO), missing))
}

/// Chooses among the probes of a file, so that a wrong name is found before anything is started.
/// What is not found may be in a library.
fn check_names(file: &Path, actions: &Actions) -> Result<()> {
    let elf = ElfFile::open(file)?;
    let is_loaded = elf.interpreter().is_some();
    match choose_in(elf, actions) {
        Err(error) if is_loaded && is_not_yet(error.kind()) => Ok(()),
        checked => checked,
    }
}

fn choose_in(elf: ElfFile, actions: &Actions) -> Result<()> {
    let table = Arc::new(ProbeTable::of(&elf)?);
    choose(&Program::alone(elf, table, LoadBias::NONE), actions)?;
    Ok(())
}

/// execve(2): the set-user-ID bits are ignored if "the calling process is being ptraced" by somebody
/// without the privilege.
fn refuse_setuid(file: &Path) -> Result<()> {
    const SETUID_OR_SETGID: u32 = 0o6000;
    let Ok(metadata) = std::fs::metadata(file) else {
        return Ok(());
    };
    let gives = metadata.mode() & SETUID_OR_SETGID != 0 && metadata.mode() & 0o111 != 0;
    let changes = metadata.uid() != geteuid().as_raw() || metadata.gid() != getegid().as_raw();
    if gives && changes && !geteuid().is_root() {
        let program = file.to_owned();
        return Err(ErrorKind::Setuid { program }.into());
    }
    Ok(())
}

/// The file that execvp(3) will execute, as far as can be told from here.
fn resolve(command: &Command) -> Option<PathBuf> {
    let program = command.get_program();
    if program.as_bytes().contains(&b'/') {
        let directory = command.get_current_dir().unwrap_or(Path::new(""));
        return Some(directory.join(program)).filter(|file| file.exists());
    }
    let path = command
        .get_envs()
        .find(|(name, _)| *name == "PATH")
        .map_or_else(
            || std::env::var_os("PATH"),
            |(_, value)| value.map(OsStr::to_owned),
        );
    std::env::split_paths(&path?)
        .map(|directory| directory.join(program))
        // "If permission is denied for a file (the attempted execve(2) failed with the error
        // EACCES), these functions will continue searching the rest of the search path."
        .find(|file| file.is_file() && access(file, AccessFlags::X_OK).is_ok())
}

/// A program that was started with its probes set, and runs.
pub struct Launched {
    child: Child,
    report: Report,
    observed: Option<(Target, Installed)>,
}

impl fmt::Debug for Launched {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text = f.debug_struct("Launched");
        text.field("child", &self.child)
            .field("report", &self.report);
        text.finish_non_exhaustive()
    }
}

impl Launched {
    /// What was done to its probes, and its pid.
    pub fn report(&self) -> &Report {
        &self.report
    }

    /// The program and its observation, if it was to be observed: [`Installed::observer`] makes them an
    /// observer. `None` from the second time on.
    pub fn observed(&mut self) -> Option<(Target, Installed)> {
        self.observed.take()
    }

    /// The program as a child of this process: to wait for, or to drop and let it go on by itself.
    pub fn into_child(self) -> Child {
        self.child
    }

    /// The program as a child of this process, to wait for.
    pub fn child(&mut self) -> &mut Child {
        &mut self.child
    }

    /// A descriptor that can be read, as poll(2) says, once the program has ended.
    ///
    /// # Errors
    ///
    /// What pidfd_open(2) says. To be called before the program has been waited for: its pid may be
    /// another's after that.
    pub fn pidfd(&self) -> io::Result<OwnedFd> {
        pidfd::open(self.report.pid)
    }

    /// Sends the program a signal that was sent to this process. If it was queued, with
    /// sigqueue(3), the program sees who has sent it and the value; otherwise, that we have.
    ///
    /// # Errors
    ///
    /// What kill(2) or rt_sigqueueinfo(2) says. If the program has ended, nothing is done.
    pub fn pass_on(&mut self, signal: &ReceivedSignal) -> io::Result<()> {
        match self.child.try_wait()? {
            // Its pid may be another's by now.
            Some(_) => Ok(()),
            None => Ok(signals::pass_on(self.report.pid, signal)?),
        }
    }
}

/// A signal that this process has received: sigaction(2) has what the fields of its siginfo_t mean.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReceivedSignal {
    /// Which signal.
    pub number: i32,
    /// How it came to be sent (`si_code`).
    pub code: i32,
    /// The process that sent it, if one has.
    pub sender: i32,
    /// The real user id of that process.
    pub uid: u32,
    /// The value that was queued with it, a number or an address.
    pub value: u64,
}
