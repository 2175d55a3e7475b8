//! The facade: a [`Target`] is a running process. The pipeline behind it: table, bias, selection,
//! plan, stop, patch, report.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use nix::fcntl::OFlag;

use crate::denial;
use crate::error::{Denial, Effect, Error, ErrorKind, Result};
use crate::image::{Image, read_maps};
use crate::maps::Mapping;
use crate::object::{Object, PassedOver};
use crate::objects::Files;
use crate::observe::{self, veil::Veil};
use crate::patch::Outcome;
use crate::process::Process;
use crate::program::Program;
use crate::report::{ProbeStates, Report};
use crate::select::{Actions, Choice, choose, choose_taken};
use crate::snapshot::Layout;
use crate::sys::mem::ProcessMemory;
use crate::sys::pidfd;
use crate::sys::threads::with_tracer;
use crate::turn::{self, Turn};
use crate::untouched::Untouched;
use crate::update::{Subject, Wish};

/// How often reading or updating starts again because somebody else changes the process meanwhile.
const ATTEMPTS: usize = 5;

/// Whether the process could not be had because another update has it.
fn is_passing(error: &Error) -> bool {
    matches!(
        error.kind(),
        ErrorKind::Denied {
            denial: Denial::BeingChanged { .. },
            ..
        }
    )
}

/// What an update may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// How long stopping every thread may take before all are let go again, and how long to wait for
    /// another update to be done with the process; 500 ms by default.
    pub deadline: Duration,
    /// Whether to change the process while it runs, without stopping any of its threads; off by
    /// default. Only one byte of an instruction differs between a site that is enabled and one that
    /// is not, so that a thread executes either one or the other.
    pub live: bool,
    /// Whether to write to text that lies on 1 GiB huge pages, the first write to each of which
    /// copies a gigabyte; off by default.
    pub gigatext: bool,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            deadline: Duration::from_millis(500),
            live: false,
            gigatext: false,
        }
    }
}

/// A running process with OCaml probes.
pub struct Target {
    process: Process,
    program: PathBuf,
    /// As of the last look.
    image: Mutex<Arc<Image>>,
}

/// Which probes, and what to do with them, in the objects that a process has just now.
type Choose<'a> = &'a dyn Fn(&Program) -> Result<Vec<Choice>>;

impl Target {
    /// Opens the process `pid` and reads the probes of its executable and of all other objects that
    /// it has loaded, without stopping it.
    ///
    /// The executable is read through `/proc/PID/exe`, so it may have been replaced or deleted
    /// since. Other files are read only if they are the ones that are mapped.
    ///
    /// # Errors
    ///
    /// If there is no such process, it is a zombie or a kernel thread, the caller may not debug it,
    /// no object has OCaml probes, or its executable cannot be read; see [`ProbeTable::read`].
    ///
    /// [`ProbeTable::read`]: crate::ProbeTable::read
    pub fn open(pid: i32) -> Result<Target> {
        Target::open_among(pid, Arc::default())
    }

    /// As [`Target::open`], for who opens many: `files` are not read again.
    pub(crate) fn open_among(pid: i32, files: Arc<Files>) -> Result<Target> {
        let process = Process::open(pid)?;
        process.refuse_unworkable()?;
        let image = Image::of(&process, files)?;
        Ok(Target {
            process,
            program: image.program.path().to_owned(),
            image: Mutex::new(Arc::new(image)),
        })
    }

    /// As [`Target::open`], for who is going to change the process: errors say that nothing was
    /// changed.
    ///
    /// # Errors
    ///
    /// See [`Target::open`].
    pub fn open_to_change(pid: i32) -> Result<Target> {
        Target::open(pid).map_err(|error| error.leaving(Effect::NothingChanged))
    }

    /// The process's id.
    pub fn pid(&self) -> i32 {
        self.process.pid()
    }

    pub(crate) fn process(&self) -> &Process {
        &self.process
    }

    /// A descriptor that can be read, as poll(2) says, from the end of the process on.
    ///
    /// # Errors
    ///
    /// If the process has ended and has been reaped, or the kernel is older than Linux 5.3.
    pub fn pidfd(&self) -> Result<OwnedFd> {
        let pidfd = pidfd::open(self.pid()).map_err(|source| self.process.lost(source))?;
        // The pid is this process's as long as its folder is there.
        self.process
            .status()
            .map_err(|source| self.process.lost(source))?;
        Ok(pidfd)
    }

    /// The executable, as the kernel names it.
    pub fn program(&self) -> &Path {
        &self.program
    }

    /// The objects with probes, as of the last look at the process: the executable if it has any,
    /// then the others by address.
    pub fn objects(&self) -> Vec<Object> {
        self.image().program.objects().to_vec()
    }

    /// The files that are mapped and could not be looked into, as of the last look at the process.
    pub fn passed_over(&self) -> Vec<PassedOver> {
        self.image().program.passed_over().to_vec()
    }

    /// Reads the state of every probe, without stopping the process.
    ///
    /// # Errors
    ///
    /// If the process has exited, or its memory may not or cannot be read.
    pub fn states(&self) -> Result<ProbeStates> {
        for _ in 0..ATTEMPTS {
            match self.read_states() {
                // An object that has just been unloaded.
                Err(error) if self.is_unloaded(&error) => {}
                done => return done,
            }
        }
        Err(ErrorKind::KeepsChanging { pid: self.pid() }.into())
    }

    fn read_states(&self) -> Result<ProbeStates> {
        let maps = read_maps(&self.process).map_err(|error| self.tell_exec(error))?;
        let image = self.look_again(&maps);
        let program = &image.program;
        let untouched = Untouched::of(&self.process, program.objects(), maps);
        // Opened afterwards: that is when an exec is noticed.
        let memory = self.memory("look into", OFlag::O_RDONLY)?;
        let is_the_files = |start, len| {
            let untouched = untouched.as_ref();
            untouched.is_some_and(|untouched| untouched.holds(start, len))
        };
        let layout = Layout::of(program, program.probes());
        let read = || -> Result<ProbeStates> {
            let snapshot = layout
                .read_states(self.pid(), &memory, program, is_the_files)
                .map_err(|error| self.tell_exec(error))?;
            Ok(ProbeStates::of(program.clone(), snapshot))
        };
        let mut states = read()?;
        for _ in 1..ATTEMPTS {
            if states.is_consistent() {
                break;
            }
            // So it looks, too, if somebody writes while we read.
            let again = read()?;
            let settled = again.snapshot == states.snapshot && !self.is_traced();
            states = again;
            if settled {
                break;
            }
        }
        Ok(states)
    }

    fn image(&self) -> Arc<Image> {
        let image = self.image.lock();
        image.unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The image as it is now, `maps` being the mappings.
    fn look_again(&self, maps: &[Mapping]) -> Arc<Image> {
        let before = self.image();
        let Some(now) = before.renewed(&self.process, maps) else {
            return before;
        };
        let now = Arc::new(now);
        let mut image = self.image.lock().unwrap_or_else(PoisonError::into_inner);
        *image = now.clone();
        now
    }

    fn is_traced(&self) -> bool {
        self.process.status().is_ok_and(|status| status.tracer != 0)
    }

    /// Carries out `actions` with the default [`Options`].
    ///
    /// # Errors
    ///
    /// See [`Target::update_with`].
    pub fn update(&self, actions: &Actions) -> Result<Report> {
        self.update_with(actions, Options::default())
    }

    /// Carries out all of `actions`, or none.
    ///
    /// Everything that can be checked is checked before the process is stopped. Then all its
    /// threads are stopped, everything is checked once more, written, read back, and the threads
    /// go on. Only a probe whose counters and sites contradict each other is judged when the
    /// process stands: while it runs, that may be another update at work.
    ///
    /// With [`Options::live`], no thread is stopped, and nobody is asked whether he traces the
    /// process.
    ///
    /// # Errors
    ///
    /// If a name is unknown, a probe is selected twice, a probe is in a state that the actions do
    /// not fit, the process cannot be stopped or written, or ends meanwhile.
    /// [`Error::effect`] says what the process is left with: nothing changed,
    /// unless putting back failed too.
    pub fn update_with(&self, actions: &Actions, options: Options) -> Result<Report> {
        self.carry_out(&|program| choose(program, actions), options)
            .map_err(|error| self.tell_exec(error).leaving(Effect::NothingChanged))
    }

    /// Whether [`Target::update_with`] would be carried out, as far as can be told while the process
    /// runs. Changes nothing.
    ///
    /// # Errors
    ///
    /// As of [`Target::update_with`].
    pub fn check(&self, actions: &Actions, options: Options) -> Result<()> {
        let check = || {
            if !options.live {
                self.process.refuse_own_family()?;
                self.refuse_traced()?;
            }
            let image = self.look_at_objects()?;
            let choices = choose(&image.program, actions)?;
            let memory = self.memory("attach to", OFlag::O_RDWR)?;
            let subject = Subject {
                process: &self.process,
                image: &image,
                memory: &memory,
            };
            subject.prepare(Wish::of(&choices, options)).map(drop)
        };
        check().map_err(|error: Error| self.tell_exec(error).leaving(Effect::NothingChanged))
    }

    /// Takes back what an update of this process did: each counter goes down by what was added to
    /// it, or up by what was taken from it, and the sites follow. What others have done since stays:
    /// no counter goes below zero, and a probe that somebody else wants as well stays enabled.
    ///
    /// Pairs are taken back in the opposite order. Probes of which nothing is left to take back are
    /// passed over; those with foreign bytes at a site stay as they are ([`Report::left`]).
    ///
    /// # Errors
    ///
    /// As of [`Target::update_with`]. The process may have ended ([`ErrorKind::Exited`]) or executed
    /// another program ([`ErrorKind::Executed`]) meanwhile: then nothing is left of the update.
    pub fn put_back(&self, report: &Report, options: Options) -> Result<Report> {
        self.carry_out(&|program| choose_taken(program, &report.taken), options)
            .map_err(|error| self.tell_exec(error).leaving(Effect::NothingChanged))
    }

    /// Refuses a process that somebody traces who stays, unlike another update.
    fn refuse_traced(&self) -> Result<()> {
        let status = self.process.status();
        let tracer = status.map_err(|source| self.process.lost(source))?.tracer;
        if tracer == 0 {
            return Ok(());
        }
        let error = denial::traced(&self.process, "attach to", tracer);
        if is_passing(&error) {
            Ok(())
        } else {
            Err(error)
        }
    }

    /// Carries out what is chosen, waiting for others who change the process.
    fn carry_out(&self, choose: Choose<'_>, options: Options) -> Result<Report> {
        // Names are judged first: whose turn it is does not matter to them.
        choose(&self.look_at_objects()?.program)?;
        if !options.live {
            self.process.refuse_own_family()?;
        }
        let deadline = Instant::now() + options.deadline;
        let _turn = Turn::wait(&self.process, deadline)?;
        loop {
            match self.change(choose, options) {
                // Somebody whose lock we cannot see, from outside this container.
                Err(error) if is_passing(&error) && Instant::now() < deadline => turn::pause(),
                done => return done,
            }
        }
    }

    pub(crate) fn look_at_objects(&self) -> Result<Arc<Image>> {
        Ok(self.look_again(&read_maps(&self.process)?))
    }

    fn change(&self, choose: Choose<'_>, options: Options) -> Result<Report> {
        let memory = self.memory("attach to", OFlag::O_RDWR)?;
        for _ in 0..ATTEMPTS {
            let image = self.look_at_objects()?;
            let choices = choose(&image.program)?;
            let subject = Subject {
                process: &self.process,
                image: &image,
                memory: &memory,
            };
            let wish = Wish::of(&choices, options);
            let changed = match options.live {
                true => change_live(subject, wish),
                false => self.change_stopped(subject, wish, options.deadline),
            };
            match changed {
                Ok(Some(report)) => return Ok(report),
                Ok(None) => {}
                // An object that has just been unloaded.
                Err(error) if self.is_unloaded(&error) => {}
                Err(error) => return Err(error),
            }
        }
        Err(ErrorKind::KeepsChanging { pid: self.pid() }.into())
    }

    /// Whether something was missing of an object that can be unloaded, and perhaps loaded again.
    fn is_unloaded(&self, error: &Error) -> bool {
        match error.kind() {
            ErrorKind::NotMapped { path, .. } => *path != self.program,
            ErrorKind::ReadMemory { address, .. } => {
                let image = self.image();
                let object = image.program.object_at(*address);
                object.is_some_and(|object| image.program.can_unload(object))
            }
            _ => false,
        }
    }

    /// `None` if somebody else was faster, so that all has to be looked at again.
    fn change_stopped(
        &self,
        subject: Subject<'_>,
        wish: Wish<'_>,
        limit: Duration,
    ) -> Result<Option<Report>> {
        let prepared = match subject.prepare(wish) {
            // So it looks, too, if somebody else writes while we read: told when it stands.
            Err(error) if matches!(error.kind(), ErrorKind::Inconsistent { .. }) => None,
            prepared => Some(prepared?),
        };
        match prepared {
            Some(job) if job.is_done() => return Ok(Some(job.report(Duration::ZERO))),
            Some(ref job) => job.break_copy_on_write(),
            None => {}
        }
        let (job, outcome, stood) = with_tracer(&[&self.process], |tracer| {
            let stopped = tracer.stop(&self.process, limit)?;
            if let Some(job) = prepared {
                if job.carry_out(&stopped)? == Outcome::Done {
                    return Ok((job, Outcome::Done, stopped.release()));
                }
            }
            // Somebody else was faster; now that it stands, nobody is.
            let job = subject.prepare(wish)?;
            let outcome = job.carry_out(&stopped)?;
            Ok((job, outcome, stopped.release()))
        })?;
        Ok((outcome == Outcome::Done).then(|| job.report(stood)))
    }

    /// Tells an exec, which looks like an end to who has opened the old program.
    fn tell_exec(&self, error: Error) -> Error {
        if self.image().is_replaced(&self.process) {
            let pid = self.pid();
            return Error::from(ErrorKind::Executed { pid }).leaving(error.effect());
        }
        error
    }

    /// The memory, with sites that are observed behind a veil.
    fn memory(&self, operation: &'static str, flags: OFlag) -> Result<ProcessMemory> {
        let memory = self.bare_memory_for(operation, flags)?;
        let arenas = observe::find(&memory, &read_maps(&self.process)?);
        Ok(memory.behind(Veil::over(&arenas)))
    }

    /// The memory as it is, to be changed.
    pub(crate) fn bare_memory(&self) -> Result<ProcessMemory> {
        self.bare_memory_for("attach to", OFlag::O_RDWR)
    }

    /// The memory as it is, to be read.
    pub(crate) fn bare_memory_to_read(&self) -> Result<ProcessMemory> {
        self.bare_memory_for("look into", OFlag::O_RDONLY)
    }

    fn bare_memory_for(&self, operation: &'static str, flags: OFlag) -> Result<ProcessMemory> {
        let memory = ProcessMemory::open(&self.process, flags)
            .map_err(|source| denial::or_lost(&self.process, operation, source))?;
        // Asked afterwards: what was opened is then the memory of the program that we know.
        if self.image().is_replaced(&self.process) {
            return Err(ErrorKind::Executed { pid: self.pid() }.into());
        }
        Ok(memory)
    }
}

/// As `Target::change_stopped`, without a stop.
fn change_live(subject: Subject<'_>, wish: Wish<'_>) -> Result<Option<Report>> {
    let job = subject.prepare(wish)?;
    let done = job.is_done() || job.carry_out_live()? == Outcome::Done;
    Ok(done.then(|| job.report(Duration::ZERO)))
}
