//! The facade: a [`Target`] is a running process. The pipeline behind it: table, bias, selection,
//! plan, stop, patch, report.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use nix::fcntl::OFlag;

use crate::error::{Denial, Effect, Error, ErrorKind, Operation, Result};
use crate::memory::shadow::Shadowed;
use crate::observe::shadow;
use crate::process::Process;
use crate::process::denial;
use crate::process::image::{Image, read_maps};
use crate::process::maps::Mapping;
use crate::process::memory::ProcessMemory;
use crate::process::object::{Object, UnreadableObject};
use crate::process::objects::Files;
use crate::process::pagemap::UnwrittenPages;
use crate::process::program::Program;
use crate::select::{Actions, Choice, choose, choose_undo};
use crate::sys::loaded::{loaded, while_nothing_is_unloaded};
use crate::sys::pidfd;
use crate::trace::stop::with_tracer;
use crate::update::lock::{self, UpdateLock};
use crate::update::patch::Outcome;
use crate::update::prepare::{PreparedUpdate, StopMode, UpdateContext, UpdateRequest};
use crate::update::report::{ProbeStates, Report};
use crate::update::snapshot::Layout;

/// How often reading or updating starts again because somebody else changes the process meanwhile.
const ATTEMPTS: usize = 5;

/// How long a process may execute one program after the other before it is not opened.
const EXECUTING: Duration = Duration::from_secs(1);

/// How long until it is seen whether a process has executed its program.
const MOMENT: Duration = Duration::from_millis(1);

/// Opens a process that may have a program to work on.
fn open_workable(pid: i32) -> Result<Process> {
    let process = Process::open(pid)?;
    process.refuse_unworkable()?;
    Ok(process)
}

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
    /// another process to be done with this one; 500 ms by default. Threads of ours that use the same
    /// [`Target`] take turns, however long that takes.
    pub deadline: Duration,
    /// Whether to change the process while it runs, without stopping any of its threads; off by
    /// default. Only one byte of an instruction differs between a site that is enabled and one that
    /// is not, so that a thread executes either one or the other. The current process always runs.
    /// Observations are not affected: more bytes differ, so that every thread is stopped each time.
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

/// A running process with OCaml probes. Cloning it is cheap: all clones share what is known of the
/// process.
#[derive(Clone)]
pub struct Target {
    inner: Arc<Inner>,
}

struct Inner {
    process: Process,
    program: PathBuf,
    /// What getpid(2) has said, if it is the process that we are ourselves.
    own: Option<u32>,
    /// Held by the thread of ours that changes the process: waiting here is fairer than for the lock.
    changing: Mutex<()>,
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
    /// A process that was forked within the last second and has executed nothing so far is waited for
    /// until it is older, as a shell says its number before it executes the program.
    ///
    /// # Errors
    ///
    /// If there is no such process, it is a zombie or a kernel thread, the caller may not debug it,
    /// no object has OCaml probes, or its executable cannot be read; see [`ProbeTable::read`].
    ///
    /// [`ProbeTable::read`]: crate::ProbeTable::read
    pub fn open(pid: i32) -> Result<Target> {
        let process = open_workable(pid)?;
        let begun = Instant::now();
        let mut is_grown = false;
        loop {
            match Image::of(&process, Arc::default()) {
                Ok(image) => return Ok(Target::with(process, image, None)),
                Err(error) => match error.kind() {
                    // What it has executed before this was asked is what is read next.
                    ErrorKind::NoProbes { .. } if !is_grown => {
                        is_grown = !process.was_just_forked()
                    }
                    ErrorKind::Executed { .. } if begun.elapsed() < EXECUTING => {}
                    _ => return Err(error),
                },
            }
            std::thread::sleep(MOMENT);
        }
    }

    /// Opens the process that this is: a program that switches its own probes, from any thread.
    ///
    /// Nothing is stopped and nothing traced, so that a program under a debugger can do it too. Other
    /// threads execute the sites meanwhile, as with [`Options::live`]; beside that, objects which can
    /// be unloaded may be changed, as none is while we write (those of another namespace, dlmopen(3),
    /// are not seen). A thread that changes probes waits for
    /// others who do (of this process or another) as long as [`Options::deadline`] says.
    ///
    /// What it takes is files of /proc that belong to whoever the process runs as: a program that is
    /// not dumpable, because it has changed its user or asked for it (prctl(2), `PR_SET_DUMPABLE`),
    /// is refused. A child after fork(2) has probes of its own and must open itself anew; there the
    /// parent's `Target` is refused ([`ErrorKind::Forked`]). Not for use in a handler of signals
    /// (signal-safety(7)), nor between fork(2) and execve(2) in a program of many threads.
    ///
    /// # Errors
    ///
    /// If no object of this process has OCaml probes, or /proc is missing or not for us.
    pub fn current() -> Result<Target> {
        let target = Target::of(Process::own()?, Arc::default(), Some(std::process::id()))?;
        target.while_nothing_unloads(|| target.current_image())?;
        Ok(target)
    }

    /// Same as [`Target::open`], for callers that open many processes: `files` are not read again.
    pub(crate) fn open_among(pid: i32, files: Arc<Files>) -> Result<Target> {
        let process = open_workable(pid)?;
        Target::of(process, files, None)
    }

    fn of(process: Process, files: Arc<Files>, own: Option<u32>) -> Result<Target> {
        let image = Image::of(&process, files)?;
        Ok(Target::with(process, image, own))
    }

    fn with(process: Process, image: Image, own: Option<u32>) -> Target {
        let inner = Inner {
            process,
            program: image.program.path().to_owned(),
            own,
            changing: Mutex::default(),
            image: Mutex::new(Arc::new(image)),
        };
        Target {
            inner: Arc::new(inner),
        }
    }

    /// Same as [`Target::open`], but a process without OCaml probes is accepted: it may load or execute
    /// some later ([`Follow`](crate::Follow)).
    ///
    /// # Errors
    ///
    /// See [`Target::open`].
    pub fn open_any(pid: i32) -> Result<Target> {
        let process = open_workable(pid)?;
        let image = Image::even_without(&process, Arc::default())?;
        Ok(Target::with(process, image, None))
    }

    /// The process's id.
    pub fn pid(&self) -> i32 {
        self.inner.process.pid()
    }

    pub(crate) fn process(&self) -> &Process {
        &self.inner.process
    }

    /// A descriptor that can be read, as poll(2) says, from the end of the process on.
    ///
    /// # Errors
    ///
    /// If the process has ended and has been reaped, or the kernel is older than Linux 5.3.
    pub fn pidfd(&self) -> Result<OwnedFd> {
        let pidfd =
            pidfd::open(self.pid()).map_err(|source| self.inner.process.exited_or(source))?;
        // The pid is this process's as long as its folder is there.
        self.inner
            .process
            .status()
            .map_err(|source| self.inner.process.exited_or(source))?;
        Ok(pidfd)
    }

    /// The executable, as the kernel names it.
    pub fn program(&self) -> &Path {
        &self.inner.program
    }

    /// The objects with probes, as of the last look at the process: the executable if it has any,
    /// then the others by address.
    pub fn objects(&self) -> Vec<Object> {
        self.image().program.objects().to_vec()
    }

    /// The files that are mapped and could not be looked into, as of the last look at the process.
    pub fn unreadable(&self) -> Vec<UnreadableObject> {
        self.image().program.unreadable().to_vec()
    }

    /// Reads the state of every probe, without stopping the process.
    ///
    /// # Errors
    ///
    /// If the process has exited, or its memory may not or cannot be read.
    pub fn states(&self) -> Result<ProbeStates> {
        for _ in 0..ATTEMPTS {
            match self.while_nothing_unloads(|| self.read_states()) {
                // An object that has just been unloaded, or loaded.
                Err(error) if self.is_unloaded(&error) => {}
                Err(error) if matches!(error.kind(), ErrorKind::KeepsChanging { .. }) => {}
                done => return done,
            }
        }
        Err(ErrorKind::KeepsChanging { pid: self.pid() }.into())
    }

    /// What looks inconsistent is looked at again: so it looks, too, if somebody writes meanwhile, or an
    /// object is being loaded, of which one look proves nothing.
    fn read_states(&self) -> Result<ProbeStates> {
        let mut states = self.look_at_states()?;
        let mut always_the_same = true;
        for _ in 1..ATTEMPTS {
            if states.is_consistent() {
                return Ok(states);
            }
            let is_fixed = !states.can_lose_objects();
            if !is_fixed {
                // Reading the maps waits for who changes them, and so might keep in step with him.
                lock::pause();
            }
            let again = self.look_at_states()?;
            let is_same = again.has_objects_of(&states) && again.snapshot == states.snapshot;
            always_the_same &= is_same;
            states = again;
            if is_same && is_fixed && !self.is_traced() {
                return Ok(states);
            }
        }
        if states.is_consistent() || always_the_same || !states.can_lose_objects() {
            return Ok(states);
        }
        Err(ErrorKind::KeepsChanging { pid: self.pid() }.into())
    }

    fn look_at_states(&self) -> Result<ProbeStates> {
        let maps = self.maps().map_err(|error| self.or_executed(error))?;
        let image = self.refresh_image(&maps);
        let program = &image.program;
        // Opened afterwards: that is when an exec is noticed.
        let memory = self.bare_memory_to_read()?;
        let arenas = shadow::find(&memory, &maps);
        let observed = shadow::count_observed(&self.inner.process, &memory, &arenas);
        let memory = Shadowed::new(memory, shadow::shadow_of(&arenas));
        let unwritten = UnwrittenPages::of(&self.inner.process, program.objects(), maps);
        let is_the_files = |start, len| {
            let unwritten = unwritten.as_ref();
            unwritten.is_some_and(|unwritten| unwritten.holds(start, len))
        };
        let layout = Layout::of(program, program.probes());
        let snapshot = layout
            .read_states(self.pid(), &memory, program, is_the_files)
            .map_err(|error| self.or_executed(error))?;
        let states = ProbeStates::of(program.clone(), snapshot, observed);
        if !states.is_consistent() && !image.is_as_in(&read_maps(&self.inner.process)?) {
            return Err(ErrorKind::KeepsChanging { pid: self.pid() }.into());
        }
        Ok(states)
    }

    fn image(&self) -> Arc<Image> {
        let image = self.inner.image.lock();
        image.unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The image as it is now, `maps` being the mappings.
    fn refresh_image(&self, maps: &[Mapping]) -> Arc<Image> {
        let before = self.image();
        let loaded = self.inner.own.map(|_| loaded());
        let Some(now) = before.renewed(&self.inner.process, maps, loaded) else {
            return before;
        };
        let now = Arc::new(now);
        let mut image = self
            .inner
            .image
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        *image = now.clone();
        now
    }

    fn is_traced(&self) -> bool {
        self.inner
            .process
            .status()
            .is_ok_and(|status| status.tracer != 0)
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
            .map_err(|error| self.or_executed(error).leaving(Effect::NothingChanged))
    }

    /// Whether [`Target::update_with`] would be carried out, as far as can be told while the process
    /// runs. Changes nothing.
    ///
    /// # Errors
    ///
    /// As of [`Target::update_with`].
    pub fn check(&self, actions: &Actions, options: Options) -> Result<()> {
        let check = || {
            if self.stop_mode(options) == StopMode::Stopped {
                self.inner.process.refuse_self_and_ancestors()?;
                self.refuse_traced()?;
            }
            let image = self.current_image()?;
            let choices = choose(&image.program, actions)?;
            let memory = self.memory()?;
            let context = UpdateContext {
                process: &self.inner.process,
                image: &image,
                memory: &memory,
            };
            context.prepare(self.request(&choices, options)).map(drop)
        };
        let deadline = Instant::now() + options.deadline;
        loop {
            match check() {
                Err(error) if self.is_unloaded(&error) && Instant::now() < deadline => {}
                done => {
                    return done
                        .map_err(|error| self.or_executed(error).leaving(Effect::NothingChanged));
                }
            }
        }
    }

    /// Takes back what an update of this process did: each counter goes down by what was added to
    /// it, or up by what was applied from it, and the sites follow. What others have done since stays:
    /// no counter goes below zero, and a probe that somebody else wants as well stays enabled.
    ///
    /// Pairs are applied back in the opposite order. Probes of which nothing is left to take back are
    /// passed over; those with foreign bytes at a site stay as they are ([`Report::left`]).
    ///
    /// # Errors
    ///
    /// As of [`Target::update_with`]. The process may have ended ([`ErrorKind::Exited`]) or executed
    /// another program ([`ErrorKind::Executed`]) meanwhile: then nothing is left of the update.
    pub fn undo(&self, report: &Report, options: Options) -> Result<Report> {
        self.carry_out(&|program| choose_undo(program, &report.applied), options)
            .map_err(|error| self.or_executed(error).leaving(Effect::NothingChanged))
    }

    /// Refuses a process that somebody traces who stays, unlike another update.
    fn refuse_traced(&self) -> Result<()> {
        let status = self.inner.process.status();
        let tracer = status
            .map_err(|source| self.inner.process.exited_or(source))?
            .tracer;
        if tracer == 0 {
            return Ok(());
        }
        let error = denial::traced(&self.inner.process, Operation::Attach, tracer);
        if is_passing(&error) {
            Ok(())
        } else {
            Err(error)
        }
    }

    /// Carries out what is chosen, waiting for others who change the process.
    fn carry_out(&self, choose: Choose<'_>, options: Options) -> Result<Report> {
        // Names are judged first: whose lock it is does not matter to them.
        choose(&self.current_image()?.program)?;
        if self.stop_mode(options) == StopMode::Stopped {
            self.inner.process.refuse_self_and_ancestors()?;
        }
        let _changing = self
            .inner
            .changing
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let deadline = Instant::now() + options.deadline;
        let _lock = UpdateLock::wait(&self.inner.process, deadline)?;
        loop {
            match self.change(choose, options) {
                // Somebody whose lock we cannot see, from outside this container.
                Err(error) if is_passing(&error) && Instant::now() < deadline => lock::pause(),
                done => return done,
            }
        }
    }

    pub(crate) fn current_image(&self) -> Result<Arc<Image>> {
        Ok(self.refresh_image(&self.maps()?))
    }

    /// What every look at the process begins with.
    fn maps(&self) -> Result<Vec<Mapping>> {
        self.refuse_parent()?;
        read_maps(&self.inner.process)
    }

    /// After a fork, "the current process" of our parent is not ours.
    fn refuse_parent(&self) -> Result<()> {
        let child = std::process::id();
        if self.inner.own.is_some_and(|own| own != child) {
            let (pid, child) = (self.pid(), child as i32);
            return Err(ErrorKind::Forked { pid, child }.into());
        }
        Ok(())
    }

    fn stop_mode(&self, options: Options) -> StopMode {
        match self.inner.own {
            Some(_) => StopMode::Own,
            None => StopMode::of(options),
        }
    }

    fn request<'a>(&self, choices: &'a [Choice], options: Options) -> UpdateRequest<'a> {
        UpdateRequest {
            stop_mode: self.stop_mode(options),
            ..UpdateRequest::of(choices, options)
        }
    }

    fn change(&self, choose: Choose<'_>, options: Options) -> Result<Report> {
        let memory = self.memory()?;
        for _ in 0..ATTEMPTS {
            match self.while_nothing_unloads(|| self.try_to_change(choose, options, &memory)) {
                Ok(Some(report)) => return Ok(report),
                Ok(None) => {}
                // An object that has just been unloaded.
                Err(error) if self.is_unloaded(&error) => {}
                Err(error) => return Err(error),
            }
        }
        Err(ErrorKind::KeepsChanging { pid: self.pid() }.into())
    }

    /// `None` if somebody else was faster, so that all has to be looked at again.
    fn try_to_change(
        &self,
        choose: Choose<'_>,
        options: Options,
        memory: &Shadowed<ProcessMemory>,
    ) -> Result<Option<Report>> {
        let image = self.current_image()?;
        let choices = choose(&image.program)?;
        let context = UpdateContext {
            process: &self.inner.process,
            image: &image,
            memory,
        };
        let request = self.request(&choices, options);
        match request.stop_mode {
            StopMode::Stopped => self.change_stopped(context, request, options.deadline),
            StopMode::Live => change_running(context, request, PreparedUpdate::carry_out_live),
            StopMode::Own => change_running(context, request, PreparedUpdate::carry_out_own),
        }
    }

    /// Does `work`; if the process is our own, while none of its objects can be unloaded.
    fn while_nothing_unloads<T>(&self, mut work: impl FnMut() -> T) -> T {
        match self.inner.own {
            Some(_) => while_nothing_is_unloaded(work),
            None => work(),
        }
    }

    /// Whether something was missing of an object that can be unloaded, and perhaps loaded again.
    pub(crate) fn is_unloaded(&self, error: &Error) -> bool {
        match error.kind() {
            ErrorKind::NotMapped { path, .. } => *path != self.inner.program,
            ErrorKind::ReadMemory { address, .. } => {
                let image = self.image();
                let object = image.program.object_at(*address);
                object.is_some_and(|object| image.program.can_unload(object))
            }
            _ => false,
        }
    }

    /// As `try_to_change`.
    fn change_stopped(
        &self,
        context: UpdateContext<'_>,
        request: UpdateRequest<'_>,
        limit: Duration,
    ) -> Result<Option<Report>> {
        // So it looks, too, if somebody else writes while we read, or an object is being loaded.
        let may_pass = |kind: &ErrorKind| match kind {
            ErrorKind::Inconsistent { .. } => true,
            ErrorKind::UnexpectedSite { address, .. } => context.image.is_unloadable(*address),
            _ => false,
        };
        let prepared = match context.prepare(request) {
            // Told when it stands.
            Err(error) if may_pass(error.kind()) => None,
            prepared => Some(prepared?),
        };
        match prepared {
            Some(prepared) if prepared.is_done() => {
                return Ok(Some(prepared.report(Duration::ZERO)));
            }
            Some(ref prepared) => prepared.break_copy_on_write(),
            None => {}
        }
        let done = with_tracer(&[&self.inner.process], |tracer| {
            let stopped = tracer.stop(&self.inner.process, limit)?;
            if let Some(prepared) = prepared {
                if prepared.carry_out(&stopped)? == Outcome::Done {
                    return Ok(Some((prepared, stopped.release())));
                }
            }
            // An object that was unloaded, or stands half loaded now.
            if !context.image.is_as_in(&read_maps(&self.inner.process)?) {
                return Ok(None);
            }
            // Somebody else was faster; now that it stands, nobody is.
            let prepared = context.prepare(request)?;
            let done = prepared.carry_out(&stopped)? == Outcome::Done;
            Ok(done.then(|| (prepared, stopped.release())))
        })?;
        Ok(done.map(|(prepared, stop_time)| prepared.report(stop_time)))
    }

    /// Whether an error is because of an exec.
    pub(crate) fn has_executed(&self, error: &Error) -> bool {
        matches!(error.kind(), ErrorKind::Executed { .. })
            || self.image().is_replaced(&self.inner.process)
    }

    /// Tells an exec, which looks like an end to who has opened the old program.
    pub(crate) fn or_executed(&self, error: Error) -> Error {
        if self.image().is_replaced(&self.inner.process) {
            let pid = self.pid();
            return Error::from(ErrorKind::Executed { pid }).leaving(error.effect());
        }
        error
    }

    /// The memory, to be changed, with observed sites shown as if they were not observed.
    fn memory(&self) -> Result<Shadowed<ProcessMemory>> {
        let maps = read_maps(&self.inner.process)?;
        Ok(shadow::shadowed_memory(self.bare_memory()?, &maps))
    }

    /// The memory as it is, to be changed.
    pub(crate) fn bare_memory(&self) -> Result<ProcessMemory> {
        self.bare_memory_for(Operation::Attach, OFlag::O_RDWR)
    }

    /// The memory as it is, to be read.
    pub(crate) fn bare_memory_to_read(&self) -> Result<ProcessMemory> {
        self.bare_memory_for(Operation::Read, OFlag::O_RDONLY)
    }

    fn bare_memory_for(&self, operation: Operation, flags: OFlag) -> Result<ProcessMemory> {
        let memory = ProcessMemory::open(&self.inner.process, flags)
            .map_err(|source| denial::denied_or_exited(&self.inner.process, operation, source))?;
        // Asked afterwards: what was opened is then the memory of the program that we know.
        if self.image().is_replaced(&self.inner.process) {
            return Err(ErrorKind::Executed { pid: self.pid() }.into());
        }
        Ok(memory)
    }
}

/// As `Target::try_to_change`, without a stop.
fn change_running<'a>(
    context: UpdateContext<'a>,
    request: UpdateRequest<'_>,
    carry_out: impl FnOnce(&PreparedUpdate<'a>) -> Result<Outcome>,
) -> Result<Option<Report>> {
    let prepared = context.prepare(request)?;
    let done = prepared.is_done() || carry_out(&prepared)? == Outcome::Done;
    Ok(done.then(|| prepared.report(Duration::ZERO)))
}
