//! [`FollowSession`]: what the tracer thread does to the processes that it follows.
//!
//! ```text
//! fork     nothing to do: memory is copied, sites and counters with it
//! exec     the new program is stopped: the probes of its executable are set, its loader is hooked
//! loader   has mapped objects (loader_hook.rs), of which nothing has run: their probes are set
//! end      hooks are removed from loaders, and all processes are detached from
//! ```
//!
//! The probes of each object are set once where it is loaded. What others do to them later stays.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::time::{Duration, Instant};

use super::channel::EventSender;
use super::event::FollowEvent;
use super::followed_process::FollowedProcess;
use crate::error::{Effect, Error, ErrorKind, Operation, ProcessError, Result, reason};
use crate::inject::loader_hook::{LoaderHook, NoLoaderHook};
use crate::process::image::Image;
use crate::process::object::Object;
use crate::process::{Process, denial};
use crate::select::{Actions, choose_present};
use crate::sys::kcmp;
use crate::target::Target;
use crate::trace::lender::Lender;
use crate::trace::stop::waits_for_processor;
use crate::trace::stopped::Stopped;
use crate::trace::tracee_set::{FOLLOW_TICK, TraceEvent, TraceeSet};
use crate::trace::tracer::Tracer;
use crate::update::attempt::refuse_traced;
use crate::update::holds::settled_lock;
use crate::update::lock::{self, UpdateLock};
use crate::update::options::Options;
use crate::update::report::Report;

/// How long detaching from all processes may take.
const DETACH_LIMIT: Duration = Duration::from_secs(2);

/// How long to wait between two attempts to detach.
const DETACH_INTERVAL: Duration = Duration::from_millis(5);

/// How long to wait until a process that is to be detached from has stopped, before the next process
/// is tried.
const STOP_LIMIT: Duration = Duration::from_millis(100);

/// How long a process that loads or executes something waits until its probes can be set: because other tools change
/// it, or one of its threads is ready to run and is given no processor. On a busy machine, both may take seconds.
/// Without its probes set, the new code would run unnoticed.
const BUSY_LIMIT: Duration = Duration::from_secs(10);

/// How many files are kept open to be closed when processes are to be detached from or reaped, which needs some: all that
/// may be open may be in use by then, one for each process that is followed.
const SPARE_FILES: usize = 12;

/// How many processes that could not be opened are opened at a time, with spare files: some are left to detach from them.
const OPENED_AT_A_TIME: usize = 4;

/// Processes that are followed, and what is to be done to their probes.
pub(crate) struct FollowSession<'f> {
    tracees: TraceeSet<'f>,
    processes: HashMap<i32, FollowedProcess>,
    /// Forked processes that could not be opened: they are detached from once they can be.
    unopened: HashMap<i32, Unopened>,
    spare_files: Vec<File>,
    /// Other tools, to which processes are lent.
    lender: Lender,
    actions: &'f Actions,
    options: Options,
    events: &'f EventSender<FollowEvent>,
}

/// See [`Follow::check`](crate::Follow::check).
pub(super) fn check(target: &Target, actions: &Actions, options: Options) -> Result<()> {
    let is_traced = refuse_traced(target.opened.process(), |_| false);
    is_traced.map_err(|error| error.with_effect_if_none(Effect::NothingChanged))?;
    target.check(actions, options)
}

impl<'f> FollowSession<'f> {
    pub(crate) fn new(
        tracer: &'f Tracer<'f>,
        actions: &'f Actions,
        options: Options,
        events: &'f EventSender<FollowEvent>,
    ) -> FollowSession<'f> {
        let session = FollowSession {
            tracees: TraceeSet::new(tracer),
            processes: HashMap::new(),
            unopened: HashMap::new(),
            spare_files: spare_files(),
            lender: Lender::new(),
            actions,
            options,
            events,
        };
        if let Some(error) = session.lender.error() {
            let reason = reason(error);
            session.send(FollowEvent::NotLent { reason });
        }
        session
    }

    /// Sets the probes of a target, and follows it.
    pub(super) fn begin(&mut self, target: &Target) {
        let pid = target.pid();
        let mut followed = match Process::open(pid) {
            Ok(process) => FollowedProcess::of(process),
            Err(error) => {
                return self.failed(pid, error.with_effect_if_none(Effect::NothingChanged));
            }
        };
        match self.set_target(target, &mut followed) {
            Ok(report) => self.send(FollowEvent::Set(report)),
            Err(error) => {
                self.failed(pid, error.with_effect_if_none(Effect::NothingChanged));
                return self.tracees.give_up(pid);
            }
        }
        self.processes.insert(pid, followed);
    }

    fn set_target(&mut self, target: &Target, followed: &mut FollowedProcess) -> Result<Report> {
        match check(target, self.actions, self.options) {
            Err(error) if error.is_missing_name() => {}
            checked => checked?,
        }
        if let Some(error) = followed.resolve(self.actions)?.missing {
            let pid = followed.pid();
            self.send(FollowEvent::Missing { pid, error });
        }
        let deadline = self.options.deadline();
        loop {
            // Its files are read here, so that they need not be while it is stopped.
            followed.resolve(self.actions)?;
            let _lock = self.lock(&followed.process, Duration::ZERO)?;
            let held = self
                .tracees
                .stop_and_keep(&followed.process, self.options.time_limit)?;
            match self.set_all(followed, &held) {
                // The process was stopped while it loaded or unloaded an object: try once more.
                Err(error) if target.opened.is_unloaded(&error) && Instant::now() < deadline => {
                    held.release();
                }
                result => {
                    // The loader is hooked before the process is resumed and loads anything more.
                    let hook = match result {
                        Ok(_) => self.hook_loader(followed, &held),
                        Err(_) => None,
                    };
                    self.tracees.resume(&followed.process, held);
                    let (known, report) = result?;
                    (followed.known, followed.hook) = (known, hook);
                    return Ok(report);
                }
            }
        }
    }

    fn set_all(
        &self,
        followed: &FollowedProcess,
        held: &Stopped<'_>,
    ) -> Result<(Vec<Object>, Report)> {
        let resolved = followed.resolve(self.actions)?;
        let report = followed.set(&resolved.image, &resolved.choices, self.options, held)?;
        Ok((resolved.image.program.objects().to_vec(), report))
    }

    /// Follows a process which is stopped, traced by this thread; the probes of the objects in `known` were set.
    pub(crate) fn adopt(&mut self, process: Process, known: Vec<Object>, stopped: Stopped<'_>) {
        let mut followed = FollowedProcess::of(process);
        followed.known = known;
        // Its files are read here, so that they need not be later; if that fails, they are.
        let _ = followed.image();
        followed.hook = self.hook_loader(&followed, &stopped);
        self.tracees.adopt(&followed.process, stopped);
        self.processes.insert(followed.pid(), followed);
    }

    /// Waits for the update lock of a process; `None` if the tool to which the process is lent holds it: that tool may
    /// be waiting for us, and changes the process only while this thread serves it, which it does not now. Waits for
    /// [`Options::time_limit`], and up to `busy_limit` for tools that are not stopped themselves.
    fn lock(&mut self, process: &Process, busy_limit: Duration) -> Result<Option<UpdateLock>> {
        let begun = Instant::now();
        let mut next_tick = begun + FOLLOW_TICK;
        loop {
            let error = match settled_lock(process, Instant::now()) {
                Err(error) if error.is_being_updated() => error,
                locked => return locked.map(Some),
            };
            let (holder, pid) = (lock::holder_in(&error), process.pid());
            if self.lender.lends_to(holder, pid, &self.tracees) {
                return Ok(None);
            }
            let limit = self.options.time_limit;
            let waited = begun.elapsed();
            if waited >= limit && (waited >= busy_limit || is_job_stopped(holder)) {
                return Err(error);
            }
            // Others receive their signals meanwhile.
            if Instant::now() >= next_tick {
                self.tracees.resume_others(pid);
                next_tick = Instant::now() + FOLLOW_TICK;
            }
            lock::pause();
        }
    }

    /// Hooks the loader of a stopped process.
    fn hook_loader(
        &mut self,
        followed: &FollowedProcess,
        stopped: &Stopped<'_>,
    ) -> Option<LoaderHook> {
        let pid = followed.pid();
        let hook = match followed.memory() {
            Ok(memory) => LoaderHook::install(stopped, &memory, self.options.despite_seccomp),
            Err(_) => Err(NoLoaderHook::UNCHANGEABLE),
        };
        match hook {
            Ok(hook) => {
                self.tracees.set_hook(pid, Some(hook.range()));
                return Some(hook);
            }
            // Without a loader, it loads nothing.
            Err(NoLoaderHook::NoLoader) => {}
            // One that was killed loads nothing either.
            Err(NoLoaderHook::Impossible(_)) if followed.process.has_exited() => {}
            Err(NoLoaderHook::Impossible(reason)) => {
                self.send(FollowEvent::LoaderNotHooked { pid, reason })
            }
        }
        None
    }

    /// Follows the processes until all have exited, or until they have been detached from because the
    /// user asked to stop.
    pub(crate) fn run(&mut self) {
        let mut end = None;
        let mut next_try = Instant::now();
        loop {
            let tick = Instant::now() + FOLLOW_TICK;
            while let Some(event) = self.tracees.next(tick) {
                self.handle(event);
            }
            if end.is_none() {
                self.lender.serve(&mut self.tracees);
            }
            if Instant::now() >= next_try {
                self.detach_pending(end.is_some());
                // Threads that are in the hook need a moment to leave it.
                next_try = Instant::now() + DETACH_INTERVAL;
            }
            if self.tracees.is_empty() || end.is_some_and(|end| Instant::now() > end) {
                // The kernel detaches from the others when this thread ends.
                return;
            }
            if end.is_none() && self.events.end_is_requested() {
                end = Some(Instant::now() + DETACH_LIMIT);
                // From now on, other tools wait until the processes are detached, instead of borrowing them.
                self.lender.close();
                self.spare_files.clear();
                self.processes
                    .values_mut()
                    .for_each(FollowedProcess::prepare_to_detach);
                continue;
            }
            self.tracees.wait();
        }
    }

    fn handle(&mut self, event: TraceEvent) {
        match event {
            TraceEvent::Forked { parent, pid } => self.forked(parent, pid),
            TraceEvent::Executed { pid } => self.executed(pid),
            TraceEvent::AtLoader { pid, tid } => {
                self.loaded(pid);
                self.tracees.resume_thread(tid);
            }
            TraceEvent::Starved { pid } => self.starved(pid),
            TraceEvent::Exited { pid } => {
                self.unopened.remove(&pid);
                let followed = self.processes.remove(&pid);
                if followed.is_some_and(|followed| !followed.is_to_be_detached) {
                    self.send(FollowEvent::Exited { pid });
                }
            }
        }
    }

    fn forked(&mut self, parent: i32, pid: i32) {
        // Its own stop and that of its parent both say so.
        if self.processes.contains_key(&pid) || self.unopened.contains_key(&pid) {
            return;
        }
        let parent = match parent {
            0 => parent_of(pid),
            parent => parent,
        };
        let of_parent = self.processes.get(&parent);
        let hooks = self.hooks_after_fork(parent);
        let opened = Process::open(pid);
        let mut followed =
            match opened.and_then(|it| FollowedProcess::forked(it, of_parent, &hooks)) {
                Ok(followed) => followed,
                Err(error) => return self.cannot_follow(parent, pid, hooks, error),
            };
        self.tracees
            .set_hook(pid, followed.hook.as_ref().map(LoaderHook::range));
        if followed.is_to_be_detached {
            // If it was forked before its parent's function was restored, its own still jumps to
            // the hook.
            followed.prepare_to_detach();
        } else {
            self.send(FollowEvent::Forked { parent, pid });
        }
        self.processes.insert(pid, followed);
    }

    /// Returns the hooks that a process may have inherited from `parent`: if that is not followed, from any process.
    fn hooks_after_fork(&self, parent: i32) -> Vec<LoaderHook> {
        match self.processes.get(&parent) {
            Some(parent) => parent.hook.iter().cloned().collect(),
            None => {
                let followed = self.processes.values().filter_map(|it| it.hook.clone());
                let unopened = self.unopened.values().flat_map(|it| it.hooks.clone());
                let mut hooks: Vec<LoaderHook> = followed.chain(unopened).collect();
                hooks.sort_by_key(|hook| hook.range().start);
                hooks.dedup_by_key(|hook| hook.range().start);
                hooks
            }
        }
    }

    /// Marks a process to be detached from, so that it can run on. Also marks those that it was forked
    /// from, as it may share their memory.
    fn starved(&mut self, mut pid: i32) {
        while let Some(followed) = self.processes.get_mut(&pid) {
            if followed.is_to_be_detached {
                return;
            }
            followed.prepare_to_detach();
            let parent = followed.parent;
            self.send(FollowEvent::Starved { pid });
            pid = parent;
        }
    }

    /// Sets the probes of the program that a process has executed, and resumes it.
    fn executed(&mut self, pid: i32) {
        self.unopened.remove(&pid);
        let process = match Process::open(pid) {
            Ok(process) => process,
            // Its exit is an event of its own.
            Err(error) if is_not_found(&error) => return self.tracees.resume_thread(pid),
            Err(error) => {
                self.processes.remove(&pid);
                self.failed(pid, error);
                // It is the only one that an execve leaves.
                self.tracees.forget(pid);
                return self.tracees.detach_executed(pid);
            }
        };
        let before = self.processes.remove(&pid);
        if before.is_none_or(|followed| followed.is_to_be_detached) {
            return self.detach_at_exec(&process);
        }
        let program = process.with_thread_directory(|directory| {
            process.read_link(&format!("{directory}/exe")).map(Some)
        });
        match program {
            Ok(program) => self.send(FollowEvent::Executed { pid, program }),
            Err(source) => {
                let error = denial::denied_or_exited(&process, Operation::Attach, source);
                if !error.is_gone() {
                    self.failed(pid, error);
                }
            }
        }
        let mut followed = FollowedProcess::of(process);
        let stopped = self.tracees.at_exec(&followed.process);
        followed.hook = self.hook_loader(&followed, &stopped);
        drop(stopped);
        followed.is_starting = followed.hook.is_some();
        self.set_new_objects(&mut followed, LoadMoment::Exec);
        let is_unprobed = followed.known.is_empty() && !followed.is_starting;
        if is_unprobed && !followed.process.has_exited() {
            self.send(FollowEvent::Detached { pid });
            return self.detach_at_exec(&followed.process);
        }
        self.processes.insert(pid, followed);
        self.tracees.resume_thread(pid);
    }

    /// Detaches from a process that is stopped after its execve.
    fn detach_at_exec(&mut self, process: &Process) {
        self.tracees.at_exec(process).release();
        self.tracees.forget(process.pid());
    }

    /// Sets the probes of the objects that the loader of a process has mapped.
    fn loaded(&mut self, pid: i32) {
        let Some(mut followed) = self.processes.remove(&pid) else {
            return;
        };
        if !followed.is_to_be_detached {
            self.set_new_objects(&mut followed, LoadMoment::Loading);
        }
        if followed.is_starting && followed.has_loaded() {
            followed.is_starting = false;
            if followed.known.is_empty() && !followed.process.has_exited() {
                followed.prepare_to_detach();
                self.send(FollowEvent::Detached { pid });
            }
        }
        self.processes.insert(pid, followed);
    }

    /// Sets the probes of the objects of a process that are new.
    fn set_new_objects(&mut self, followed: &mut FollowedProcess, moment: LoadMoment) {
        let set = match followed.image() {
            Ok(image) => {
                let objects = image.program.objects().to_vec();
                let is_new = |object: &&Object| !followed.known.iter().any(|it| it.is_same(object));
                let new: Vec<Object> = objects.iter().filter(is_new).cloned().collect();
                followed.known = objects;
                if new.is_empty() {
                    return;
                }
                self.set_objects(followed, &image.only(new), moment)
            }
            Err(error) if error.has_no_probes() => {
                followed.known.clear();
                return;
            }
            Err(error) => Err(error),
        };
        match set {
            Ok(report) if report.changed.is_empty() => {}
            Ok(report) => self.send(FollowEvent::Set(report)),
            // Its exit, or its execve, is an event of its own.
            Err(error) if error.is_program_gone() => {}
            Err(error) => self.failed(followed.pid(), error),
        }
    }

    /// Sets the probes of objects of which nothing has run.
    fn set_objects(
        &mut self,
        followed: &FollowedProcess,
        image: &Image,
        moment: LoadMoment,
    ) -> Result<Report> {
        let choices = choose_present(&image.program, self.actions)?;
        let process = &followed.process;
        let _lock = self.lock(process, BUSY_LIMIT)?;
        match moment {
            LoadMoment::Exec => {
                let stopped = self.tracees.at_exec(process);
                followed.set(image, &choices, self.options, &stopped)
            }
            LoadMoment::Loading => {
                let held = self.stop_to_set(process)?;
                let report = followed.set(image, &choices, self.options, &held);
                self.tracees.resume(process, held);
                report
            }
        }
    }

    /// Stops a process that has loaded objects; waits up to [`BUSY_LIMIT`] for threads that have no processor.
    fn stop_to_set<'p>(&self, process: &'p Process) -> Result<Stopped<'p>> {
        let end = Instant::now() + BUSY_LIMIT;
        loop {
            match self.tracees.stop_and_keep(process, self.options.time_limit) {
                Err(error) if waits_for_processor(&error) && Instant::now() < end => {}
                stopped => return stopped,
            }
        }
    }

    fn send(&self, event: FollowEvent) {
        self.events.send(event);
    }

    /// Reports that a process which was just forked cannot be followed, for example because too many files are open. If
    /// it was killed, nothing is reported here: the exit of a process that was followed is an event of its own.
    fn cannot_follow(&mut self, parent: i32, pid: i32, hooks: Vec<LoaderHook>, error: Error) {
        if error.is_gone() {
            return;
        }
        // While it may share the memory of its parent, its hook is the parent's.
        let may_share = |other: &i32| kcmp::shares_memory(*other, pid).unwrap_or(true);
        let parent = if parent == 0 {
            self.processes.keys().copied().find(may_share)
        } else {
            Some(parent).filter(may_share)
        };
        let parent = parent.unwrap_or_default();
        let unopened = Unopened {
            parent,
            hooks,
            lacks_files: error.is_shortage(),
        };
        self.unopened.insert(pid, unopened);
        self.failed(pid, error);
    }

    /// Detaches from each process for which this is possible now: those that are marked for it, and those that could not
    /// be opened. Reaps what has exited and could not be reaped then: its parent waits for it. The spare files are closed
    /// meanwhile if these may be what it takes.
    fn detach_pending(&mut self, is_ending: bool) {
        let is_marked = |followed: &FollowedProcess| followed.is_to_be_detached;
        let lacks_files = self.tracees.lacks_files()
            || self.unopened.values().any(|it| it.lacks_files)
            || self.processes.values().any(is_marked);
        if lacks_files {
            self.spare_files.clear();
        }
        self.tracees.reap_undecided();
        self.open_unopened();
        self.detach_marked();
        if lacks_files && !is_ending {
            self.spare_files = spare_files();
        }
    }

    /// Marks some of the processes that could not be opened, and can be now, to be detached from.
    fn open_unopened(&mut self) {
        let pids = self.unopened.keys().copied().take(OPENED_AT_A_TIME);
        for pid in pids.collect::<Vec<i32>>() {
            let Some(mut unopened) = self.unopened.remove(&pid) else {
                continue;
            };
            let opened = Process::open(pid);
            let hooks = &unopened.hooks;
            match opened.and_then(|it| FollowedProcess::with_inherited_hook(it, hooks)) {
                Ok(mut followed) => {
                    self.tracees
                        .set_hook(pid, followed.hook.as_ref().map(LoaderHook::range));
                    followed.parent = unopened.parent;
                    followed.prepare_to_detach();
                    self.processes.insert(pid, followed);
                }
                // Its exit is an event of its own.
                Err(error) if error.is_gone() => {}
                Err(error) => {
                    unopened.lacks_files = error.is_shortage();
                    self.unopened.insert(pid, unopened);
                }
            }
        }
    }

    fn failed(&self, pid: i32, error: Error) {
        self.send(FollowEvent::Failed { pid, error });
    }

    /// Detaches from each process that is marked for it and from which this is possible now.
    fn detach_marked(&mut self) {
        // After vfork(2), a child shares the memory of its parent, and the parent may be in the hook.
        // So the parent is detached from first.
        let can_detach = |followed: &&FollowedProcess| {
            followed.is_to_be_detached && !self.processes.contains_key(&followed.parent)
        };
        let pending = self.processes.values().filter(can_detach);
        let pids: Vec<i32> = pending.map(FollowedProcess::pid).collect();
        for pid in pids {
            let Some(followed) = self.processes.get(&pid) else {
                continue;
            };
            let memory = followed
                .hook
                .as_ref()
                .map(|_| followed.memory())
                .transpose();
            let (memory, denied) = match memory {
                Ok(memory) => (memory, None),
                Err(error) if error.is_gone() => (None, None),
                Err(error) if error.denial().is_some() => (None, Some(error)),
                // For example because too many files are open: tried again later.
                Err(_) => continue,
            };
            let Ok(held) = self.tracees.stop_and_keep(&followed.process, STOP_LIMIT) else {
                // It has exited, is executing a program, or could not be stopped: tried again
                // later.
                continue;
            };
            if let (Some(hook), Some(memory)) = (&followed.hook, &memory) {
                if self.tracees.has_thread_in_hook(pid, &held, memory) {
                    self.tracees.resume(&followed.process, held);
                    continue;
                }
                // It fails only if the process was killed.
                let _ = hook.remove(memory);
            }
            held.release();
            if let Some(error) = denied {
                self.failed(pid, error);
            }
            self.tracees.forget(pid);
            self.processes.remove(&pid);
        }
    }
}

/// Returns the parent of a process; 0 if that cannot be found out.
fn parent_of(pid: i32) -> i32 {
    let status = Process::open(pid).ok().and_then(|it| it.status().ok());
    status.map_or(0, |status| status.ppid)
}

fn spare_files() -> Vec<File> {
    let files = (0..SPARE_FILES).map(|_| File::open("/proc"));
    files.map_while(io::Result::ok).collect()
}

fn is_not_found(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::Process(ProcessError::NotFound))
}

/// Returns whether a process is stopped by job control, or is not there: it does nothing until it is continued. Also if that is
/// not known, such as for one in another pid namespace.
fn is_job_stopped(pid: i32) -> bool {
    let status = Process::open(pid).ok().and_then(|it| it.status().ok());
    status.is_none_or(|status| status.state == 'T')
}

/// A forked process that could not be opened.
struct Unopened {
    /// The process whose memory it may share, or 0.
    parent: i32,
    /// Those that it may have inherited.
    hooks: Vec<LoaderHook>,
    /// Whether it could not be opened because too many files were open, or for lack of memory.
    lacks_files: bool,
}

/// At which moment the new objects of a process are handled.
#[derive(Clone, Copy, Debug)]
enum LoadMoment {
    /// The process is stopped after an execve.
    Exec,
    /// A thread of the process is stopped in its loader.
    Loading,
}
