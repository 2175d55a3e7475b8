//! [`follow`]: sets the probes of what processes start, execute and load, before it runs.
//!
//! ```text
//! fork     nothing to do: memory is copied, sites and counters with it
//! exec     the new program stands: its executable is set, and its loader made to tell
//! loader   has mapped objects (loader.rs), of which nothing has run: they are set
//! end      loaders are put back, and all go on by themselves
//! ```
//!
//! Each object is set once where it is loaded. What others do to its probes later stays.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

use nix::fcntl::OFlag;

use crate::error::{Effect, Error, ErrorKind, Operation, Result};
use crate::inject::loader_hook::{self, LoaderHook, NoLoaderHook};
use crate::observe::shadow;
use crate::process::Process;
use crate::process::denial;
use crate::process::image::{Image, read_maps};
use crate::process::memory::ProcessMemory;
use crate::process::object::Object;
use crate::process::objects::Files;
use crate::select::{Actions, Choice, choose, choose_present};
use crate::target::{Options, Target};
use crate::trace::stop::{Stopped, Tracer, with_listener, with_tracer};
use crate::trace::tracee_set::{TICK, TraceEvent, TraceeSet};
use crate::update::lock::UpdateLock;
use crate::update::patch::Outcome;
use crate::update::prepare::{UpdateContext, UpdateRequest};
use crate::update::report::Report;

/// How long letting all processes go may take.
const LEAVING_LIMIT: Duration = Duration::from_secs(2);

/// How often to try it.
const PAUSE: Duration = Duration::from_millis(5);

/// How long a process may take to stand that is to be let go, before others are looked after.
const HOLDING: Duration = Duration::from_millis(100);

/// What has happened to processes that are followed.
#[derive(Debug)]
#[non_exhaustive]
pub enum FollowEvent {
    /// Probes were set: of the process itself, of a program that it has executed, or of objects that
    /// it has loaded.
    Set(Report),
    /// What was asked for does not fit a process that is to be followed: a name that is not there, or no
    /// probes at all. It is followed nevertheless, for what it executes and loads.
    NotYet {
        /// The process.
        pid: i32,
        /// What is not there.
        error: Error,
    },
    /// A process has started another, which has the same probes, and is followed, too.
    Forked {
        /// Who has started it.
        parent: i32,
        /// The new process.
        pid: i32,
    },
    /// A process has executed a program.
    Executed {
        /// The process.
        pid: i32,
        /// What it runs now.
        program: PathBuf,
    },
    /// A process has no probes now. It was let go, and nothing in it was changed.
    LetGo {
        /// The process.
        pid: i32,
    },
    /// Objects that a process loads from now on will not be seen.
    Blind {
        /// The process.
        pid: i32,
        /// Why.
        reason: &'static str,
    },
    /// Probes of a process could not be set; [`Error::effect`] says what it is left with.
    Failed {
        /// The process.
        pid: i32,
        /// Why.
        error: Error,
    },
    /// A process has ended.
    Ended {
        /// The process.
        pid: i32,
    },
}

/// Carries out `actions` in each of `targets`, as [`Target::update_with`] does, and from then on in
/// all programs that they execute, in the processes that they start, and in the objects that any of
/// them loads: before anything of it runs. There, names that are missing are passed over. Processes
/// without probes are let go.
///
/// Returns when all have ended, or soon after `is_over`. Probes stay as they are then. `tell` is
/// told what happens, by a thread of its own: nothing waits for it. A target that cannot be changed is
/// one that [`FollowEvent::Failed`].
///
/// The processes are traced, with all their threads, as long as this runs: nobody else can, and a
/// program that changes the user it runs as when it is executed (set-user-ID) does not. If this
/// process dies, they go on by themselves. A target that is a child of this process is not to be waited
/// for before this has returned: the kernel would tell of what it stands for, and take that away.
///
/// # Errors
///
/// If no thread can be started. Nothing was changed then.
pub fn follow(
    targets: &[Target],
    actions: &Actions,
    options: Options,
    tell: &mut (dyn FnMut(FollowEvent) + Send),
    is_over: &(dyn Fn() -> bool + Sync),
) -> Result<()> {
    let processes: Vec<&Process> = targets.iter().map(Target::process).collect();
    with_listener(tell, |events| {
        with_tracer(&processes, |tracer| {
            let mut following = FollowSession::new(tracer, actions, options, events);
            for target in targets {
                following.begin(target);
            }
            following.until(is_over);
            Ok(())
        })
    })
}

/// Where what happens is told.
pub(crate) type EventSender = Sender<FollowEvent>;

/// A process that is followed.
struct FollowedProcess {
    process: Process,
    /// Its objects that have been set, or could not be.
    known: Vec<Object>,
    hook: Option<LoaderHook>,
    /// Those that have been looked into since it executed its program.
    files: Arc<Files>,
    /// Who has started it, whose memory it may share until it executes a program; or 0.
    parent: i32,
    /// Whether its loader has not mapped all that its program is linked with.
    is_loading: bool,
    /// Whether it is to be let go as soon as it can.
    leaving: bool,
}

/// Processes that are followed, and what is to be done to them.
pub(crate) struct FollowSession<'f> {
    tracees: TraceeSet<'f>,
    processes: HashMap<i32, FollowedProcess>,
    actions: &'f Actions,
    options: Options,
    events: EventSender,
}

impl<'f> FollowSession<'f> {
    pub(crate) fn new(
        tracer: &'f Tracer<'f>,
        actions: &'f Actions,
        options: Options,
        events: EventSender,
    ) -> FollowSession<'f> {
        FollowSession {
            tracees: TraceeSet::new(tracer),
            processes: HashMap::new(),
            actions,
            options,
            events,
        }
    }

    /// Changes a target, and follows it.
    fn begin(&mut self, target: &Target) {
        let pid = target.pid();
        let mut one = match Process::open(pid) {
            Ok(process) => FollowedProcess::of(process),
            Err(error) => return self.failed(pid, error),
        };
        match self.change(target, &mut one) {
            Ok(report) => self.tell(FollowEvent::Set(report)),
            Err(error) => {
                self.failed(pid, error.leaving(Effect::NothingChanged));
                return self.tracees.give_up(pid);
            }
        }
        self.processes.insert(pid, one);
    }

    fn change(&mut self, target: &Target, one: &mut FollowedProcess) -> Result<Report> {
        match target.check(self.actions, self.options) {
            Err(error) if is_not_yet(error.kind()) => {}
            checked => checked?,
        }
        let (.., missing) = wanted(&one.process, one.files.clone(), self.actions)?;
        if let Some(error) = missing {
            let pid = one.pid();
            self.tell(FollowEvent::NotYet { pid, error });
        }
        let deadline = Instant::now() + self.options.deadline;
        loop {
            // Here, so that its files have been read when it stands.
            wanted(&one.process, one.files.clone(), self.actions)?;
            let held = self.tracees.hold(&one.process, self.options.deadline)?;
            match self.set_all(one, &held) {
                // It stands while it loads or unloads the object: once more.
                Err(error) if target.is_unloaded(&error) && Instant::now() < deadline => {
                    held.release();
                }
                changed => {
                    // Before it loads anything more.
                    let hook = match changed {
                        Ok(_) => self.watch_loader(one),
                        Err(_) => None,
                    };
                    self.tracees.resume(&one.process, held);
                    let (known, report) = changed?;
                    (one.known, one.hook) = (known, hook);
                    return Ok(report);
                }
            }
        }
    }

    fn set_all(&self, one: &FollowedProcess, held: &Stopped<'_>) -> Result<(Vec<Object>, Report)> {
        let (image, choices, _) = wanted(&one.process, one.files.clone(), self.actions)?;
        let report = set(one, &image, &choices, self.options, held)?;
        Ok((image.program.objects().to_vec(), report))
    }

    /// Follows a process whose probes have been set, and which stands, traced by the same thread.
    pub(crate) fn begin_with(&mut self, process: Process, stopped: Stopped<'_>) {
        let mut one = FollowedProcess::of(process);
        if let Ok(image) = one.image() {
            one.known = image.program.objects().to_vec();
        }
        one.hook = self.watch_loader(&one);
        self.tracees.adopt(&one.process, stopped);
        self.processes.insert(one.pid(), one);
    }

    /// Makes the loader of a process tell.
    fn watch_loader(&mut self, one: &FollowedProcess) -> Option<LoaderHook> {
        let pid = one.pid();
        let hook = match one.memory() {
            Ok(memory) => LoaderHook::install(&one.process, &memory),
            Err(_) => Err(NoLoaderHook::UNCHANGEABLE),
        };
        match hook {
            Ok(hook) => {
                self.tracees.watch(pid, Some(hook.range()));
                return Some(hook);
            }
            // There is nothing to be seen.
            Err(NoLoaderHook::NoLoader) => {}
            Err(NoLoaderHook::Impossible(reason)) => self.tell(FollowEvent::Blind { pid, reason }),
        }
        None
    }

    /// Tells what happens, until all have ended or it is over.
    pub(crate) fn until(&mut self, is_over: &dyn Fn() -> bool) {
        let mut end = None;
        let mut next_try = Instant::now();
        loop {
            let tick = Instant::now() + TICK;
            while let Some(news) = self.tracees.next(tick) {
                self.take(news);
            }
            if Instant::now() >= next_try {
                self.detach_leaving();
                // Threads that are in the trampoline need a moment to leave it.
                next_try = Instant::now() + PAUSE;
            }
            if self.tracees.is_empty() || end.is_some_and(|end| Instant::now() > end) {
                // Whoever could not be let go is by the kernel, when this thread ends.
                return;
            }
            if end.is_none() && is_over() {
                end = Some(Instant::now() + LEAVING_LIMIT);
                self.processes.values_mut().for_each(FollowedProcess::part);
                continue;
            }
            self.tracees.wait();
        }
    }

    fn take(&mut self, news: TraceEvent) {
        match news {
            TraceEvent::Forked { parent, pid } => self.forked(parent, pid),
            TraceEvent::Executed { pid } => self.executed(pid),
            TraceEvent::AtLoader { pid, tid } => {
                self.loaded(pid);
                self.tracees.resume_thread(tid);
            }
            TraceEvent::Ended { pid } => {
                if self.processes.remove(&pid).is_some_and(|one| !one.leaving) {
                    self.tell(FollowEvent::Ended { pid });
                }
            }
        }
    }

    fn forked(&mut self, parent: i32, pid: i32) {
        if self.processes.contains_key(&pid) {
            return;
        }
        let process = match Process::open(pid) {
            Ok(process) => process,
            Err(error) => return self.cannot_follow(pid, error),
        };
        let mut one = FollowedProcess::of(process);
        match self.processes.get(&parent) {
            Some(of_parent) => {
                one.known = of_parent.known.clone();
                one.files = of_parent.files.clone();
                one.hook = one.inherited(of_parent.hook.as_ref());
                one.parent = parent;
                one.is_loading = of_parent.is_loading;
                one.leaving = of_parent.leaving;
            }
            None => {
                // Its parent was let go meanwhile.
                one.hook = one.inherited(None);
                one.leaving = true;
            }
        }
        self.tracees
            .watch(pid, one.hook.as_ref().map(LoaderHook::range));
        if one.leaving {
            // Its parent was told when it had been started already, perhaps.
            one.part();
        } else {
            self.tell(FollowEvent::Forked { parent, pid });
        }
        self.processes.insert(pid, one);
    }

    /// Sets the program that a process has executed, and lets it run.
    fn executed(&mut self, pid: i32) {
        let before = self.processes.remove(&pid);
        let process = match Process::open(pid) {
            Ok(process) => process,
            Err(error) => {
                self.tracees.resume_thread(pid);
                return self.cannot_follow(pid, error);
            }
        };
        if before.is_none_or(|one| one.leaving) {
            return self.release(&process);
        }
        let program = process.look(|folder| process.read_link(&format!("{folder}/exe")).map(Some));
        if let Ok(program) = program {
            self.tell(FollowEvent::Executed { pid, program });
        }
        let mut one = FollowedProcess::of(process);
        one.hook = self.watch_loader(&one);
        one.is_loading = one.hook.is_some();
        self.catch_up(&mut one, Moment::Exec);
        if one.known.is_empty() && !one.is_loading {
            self.tell(FollowEvent::LetGo { pid });
            return self.release(&one.process);
        }
        self.processes.insert(pid, one);
        self.tracees.resume_thread(pid);
    }

    /// Lets a process go that stands after its execve.
    fn release(&mut self, process: &Process) {
        self.tracees.at_exec(process).release();
        self.tracees.forget(process.pid());
    }

    /// Sets the objects that the loader has mapped.
    fn loaded(&mut self, pid: i32) {
        let Some(mut one) = self.processes.remove(&pid) else {
            return;
        };
        if !one.leaving {
            self.catch_up(&mut one, Moment::Loading);
        }
        if one.is_loading && one.has_loaded() {
            one.is_loading = false;
            if one.known.is_empty() {
                one.part();
                self.tell(FollowEvent::LetGo { pid });
            }
        }
        self.processes.insert(pid, one);
    }

    /// Sets the objects of a process that are new.
    fn catch_up(&mut self, one: &mut FollowedProcess, moment: Moment) {
        let set = match one.image() {
            Ok(image) => {
                let objects = image.program.objects().to_vec();
                let is_new = |object: &&Object| !one.known.iter().any(|it| it.is_same(object));
                let new: Vec<Object> = objects.iter().filter(is_new).cloned().collect();
                one.known = objects;
                match new.is_empty() {
                    true => return,
                    false => self.set_new(one, &image.only(new), moment),
                }
            }
            Err(error) if matches!(error.kind(), ErrorKind::NoProbes { .. }) => {
                one.known.clear();
                return;
            }
            Err(error) => Err(error),
        };
        match set {
            Ok(report) if report.changed.is_empty() => {}
            Ok(report) => self.tell(FollowEvent::Set(report)),
            Err(error) => self.failed(one.pid(), error),
        }
    }

    /// Sets objects of which nothing has run.
    fn set_new(&mut self, one: &FollowedProcess, image: &Image, moment: Moment) -> Result<Report> {
        let choices = choose_present(&image.program, self.actions)?;
        let process = &one.process;
        match moment {
            Moment::Exec => {
                let standing = self.tracees.at_exec(process);
                set(one, image, &choices, self.options, &standing)
            }
            Moment::Loading => {
                let held = self.tracees.hold(process, self.options.deadline)?;
                let report = set(one, image, &choices, self.options, &held);
                self.tracees.resume(process, held);
                report
            }
        }
    }

    fn tell(&self, event: FollowEvent) {
        // Whoever listens does so until this is dropped.
        let _ = self.events.send(event);
    }

    /// A process that cannot be followed: too many files are open, unless it has been killed, which is
    /// told of next.
    fn cannot_follow(&self, pid: i32, error: Error) {
        if !matches!(error.kind(), ErrorKind::NoSuchProcess { .. }) {
            self.failed(pid, error);
        }
    }

    fn failed(&self, pid: i32, error: Error) {
        self.tell(FollowEvent::Failed { pid, error });
    }

    /// Lets those go that are to be, and can.
    fn detach_leaving(&mut self) {
        // After vfork(2), a child has the memory of its parent, which may be in the trampoline.
        let can_part =
            |one: &&FollowedProcess| one.leaving && !self.processes.contains_key(&one.parent);
        let leaving = self.processes.values().filter(can_part);
        let pids: Vec<i32> = leaving.map(FollowedProcess::pid).collect();
        for pid in pids {
            let Some(one) = self.processes.get(&pid) else {
                continue;
            };
            let Ok(held) = self.tracees.hold(&one.process, HOLDING) else {
                // It has ended, or executes a program, or is busy: later.
                continue;
            };
            if let (Some(hook), Ok(memory)) = (&one.hook, one.memory()) {
                if self.tracees.is_in_hook_code(pid, &held, &memory) {
                    self.tracees.resume(&one.process, held);
                    continue;
                }
                // It fails only if the process has been killed.
                let _ = hook.remove(&memory);
            }
            held.release();
            self.tracees.forget(pid);
            self.processes.remove(&pid);
        }
    }
}

/// When objects are new.
#[derive(Clone, Copy, Debug)]
enum Moment {
    /// The process stands after an execve.
    Exec,
    /// A thread of the process stands in its loader.
    Loading,
}

impl FollowedProcess {
    fn of(process: Process) -> FollowedProcess {
        FollowedProcess {
            process,
            known: Vec::new(),
            hook: None,
            files: Arc::default(),
            parent: 0,
            is_loading: false,
            leaving: false,
        }
    }

    fn pid(&self) -> i32 {
        self.process.pid()
    }

    fn image(&self) -> Result<Image> {
        Image::of(&self.process, self.files.clone())
    }

    /// The trampoline that its memory has been copied with: that of its parent, if that is the one.
    fn inherited(&self, of_parent: Option<&LoaderHook>) -> Option<LoaderHook> {
        let memory = self.memory().ok()?;
        match of_parent.filter(|hook| hook.is_in(&memory)) {
            Some(hook) => Some(hook.clone()),
            None => LoaderHook::left_in(&self.process, &memory),
        }
    }

    fn memory(&self) -> Result<ProcessMemory> {
        ProcessMemory::open(&self.process, OFlag::O_RDWR)
            .map_err(|source| denial::denied_or_exited(&self.process, Operation::Attach, source))
    }

    fn has_loaded(&self) -> bool {
        let memory = self.memory();
        // Not to be seen as loading for ever.
        memory.is_ok_and(|memory| loader_hook::has_loaded(&self.process, &memory).unwrap_or(true))
    }

    /// It is to be let go: its loader tells nothing from now on.
    fn part(&mut self) {
        self.leaving = true;
        if let (Some(hook), Ok(memory)) = (&self.hook, self.memory()) {
            // It fails only if the process has ended.
            let _ = hook.close(&memory);
        }
    }
}

/// What a process that is to be followed has, what of it is meant, and what is missing so far.
///
/// # Errors
///
/// If the process cannot be looked into, or the actions contradict each other.
pub(crate) fn wanted(
    process: &Process,
    files: Arc<Files>,
    actions: &Actions,
) -> Result<(Image, Vec<Choice>, Option<Error>)> {
    let image = match Image::of(process, files.clone()) {
        Err(error) if is_not_yet(error.kind()) => {
            return Ok((
                Image::even_without(process, files)?,
                Vec::new(),
                Some(error),
            ));
        }
        image => image?,
    };
    match choose(&image.program, actions) {
        Err(error) if is_not_yet(error.kind()) => {
            let present = choose_present(&image.program, actions)?;
            Ok((image, present, Some(error)))
        }
        choices => Ok((image, choices?, None)),
    }
}

/// Whether something is missing that may come, with a program that is executed or an object that is
/// loaded.
pub(crate) fn is_not_yet(kind: &ErrorKind) -> bool {
    matches!(
        kind,
        ErrorKind::NoProbes { .. } | ErrorKind::UnknownProbe { .. } | ErrorKind::NoMatch { .. }
    )
}

/// Carries out what was chosen among the probes of `image`, which the process is to have.
fn set(
    one: &FollowedProcess,
    image: &Image,
    choices: &[Choice],
    options: Options,
    standing: &Stopped<'_>,
) -> Result<Report> {
    let _lock = UpdateLock::wait(&one.process, Instant::now() + options.deadline)?;
    let memory = shadow::shadowed_memory(one.memory()?, &read_maps(&one.process)?);
    let context = UpdateContext {
        process: &one.process,
        image,
        memory: &memory,
    };
    let prepared = context.prepare(UpdateRequest::of(choices, options))?;
    if !prepared.is_done() && prepared.carry_out(standing)? == Outcome::Outdated {
        let pid = one.pid();
        return Err(ErrorKind::KeepsChanging { pid }.into());
    }
    Ok(prepared.report(standing.stop_time()))
}
