//! [`Target`]: a running process, opened to read and change its probes. The facade of `process` and
//! `update`.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::{Arc, Mutex};

use crate::build_id::BuildId;
use crate::error::{Effect, Error, Result};
use crate::memory::shadow::Shadowed;
use crate::observe::install::{installed, shadow};
use crate::observe::read::forked::forked_descendants;
use crate::process::memory::ProcessMemory;
use crate::process::object::{Object, UnreadableObject};
use crate::process::objects::Files;
use crate::process::opened::OpenedProcess;
use crate::process::status::Status;
use crate::runtime_events::has_ocaml;
use crate::select::{Actions, choose, choose_undo};
use crate::sys::pidfd;
use crate::update::attempt::{Choose, Updater};
use crate::update::code_digest::{CodeDigest, DigestReader};
use crate::update::holds::ReleasedHold;
use crate::update::holds::journal::{HoldChange, HoldJournal};
use crate::update::options::Options;
use crate::update::report::{ProbeStates, Report};
use crate::update::states::{ObservedMemory, StatesReader};

/// A running process with OCaml probes. Cloning it is cheap: all clones share what is known of the
/// process.
///
/// ```no_run
/// use probes_lib::{Action, Actions, Selector, Target};
///
/// let target = Target::open(4242)?;
/// let report = target.update(&Actions::of(Action::Enable, Selector::All))?;
/// println!("{} sites changed", report.changed.iter().map(|it| it.sites).sum::<usize>());
/// target.undo(&report, Default::default())?;
/// # Ok::<(), probes_lib::Error>(())
/// ```
#[derive(Clone)]
pub struct Target {
    pub(crate) opened: Arc<OpenedProcess>,
    /// Several threads may share the target; the one that is updating the process holds this.
    queue: Arc<Mutex<()>>,
}

impl Target {
    /// Opens the process `pid` and reads the probes of its executable and of all other objects that
    /// it has loaded, without stopping it.
    ///
    /// The executable is read through `/proc/PID/exe`, so it may have been replaced or deleted
    /// since. Any other file is read only if it is still the one that is mapped.
    ///
    /// If the process has no probes, but was forked within the last second and has executed no program
    /// since, this waits until it has, or until the second is over: a shell prints the pid of a job
    /// before the job executes its program.
    ///
    /// # Errors
    ///
    /// If there is no such process, it is a zombie or a kernel thread, the caller may not debug it,
    /// no object has OCaml probes, or its executable cannot be read; see [`ProbeTable::read`].
    ///
    /// [`ProbeTable::read`]: crate::ProbeTable::read
    pub fn open(pid: i32) -> Result<Target> {
        OpenedProcess::open(pid).map(Target::of)
    }

    /// Same as [`Target::open`], but a process without OCaml probes is accepted: it may later load
    /// an object, or execute a program, that has some ([`Follow`](crate::Follow)).
    ///
    /// This waits for a process that was just forked in the same way, even if it has probes.
    ///
    /// # Errors
    ///
    /// See [`Target::open`].
    pub fn open_any(pid: i32) -> Result<Target> {
        OpenedProcess::open_any(pid).map(Target::of)
    }

    /// Opens the current process, so that a program can switch its own probes, from any thread.
    ///
    /// Nothing is stopped and nothing traced, so that a program under a debugger can do it too. Other
    /// threads execute the sites meanwhile, as with [`Options::live`]; but objects that can be unloaded
    /// may be changed as well, as none is unloaded while we write (those of another namespace,
    /// dlmopen(3), are not seen). A thread that changes probes waits for other threads and
    /// processes that change them, for at most [`Options::time_limit`].
    ///
    /// It needs the files in /proc/self to belong to the user that the process runs as: a program that is
    /// not dumpable, because it has changed its user or asked for it (prctl(2), `PR_SET_DUMPABLE`),
    /// is refused. A child after fork(2) has probes of its own and needs a `Target` of its own; its parent's
    /// `Target` is refused there ([`ProcessError::Forked`]). Not for use in signal handlers
    /// (signal-safety(7)), nor between fork(2) and execve(2) in a program of several threads.
    ///
    /// # Errors
    ///
    /// If no object of this process has OCaml probes, or /proc is missing or cannot be read.
    ///
    /// [`ProcessError::Forked`]: crate::ProcessError::Forked
    pub fn current() -> Result<Target> {
        OpenedProcess::current().map(Target::of)
    }

    /// Same as [`Target::open`], for callers that open many processes: `files` are not read again, and a process that
    /// was just forked is not waited for.
    pub(crate) fn open_with_files(pid: i32, files: Arc<Files>) -> Result<Target> {
        OpenedProcess::open_with_files(pid, files).map(Target::of)
    }

    fn of(opened: OpenedProcess) -> Target {
        Target {
            opened: Arc::new(opened),
            queue: Arc::default(),
        }
    }

    /// Returns the process's id.
    pub fn pid(&self) -> i32 {
        self.opened.pid()
    }

    /// Returns a descriptor that poll(2) reports as readable once the process has exited.
    ///
    /// # Errors
    ///
    /// If the process has exited and has been reaped, or the kernel is older than Linux 5.3.
    pub fn pidfd(&self) -> Result<OwnedFd> {
        let process = self.opened.process();
        let pidfd = pidfd::open(self.pid()).map_err(|source| process.exited_or(source))?;
        // As long as its directory in /proc is there, the pid is this process's.
        process
            .status()
            .map_err(|source| process.exited_or(source))?;
        Ok(pidfd)
    }

    /// Returns whether the process is known to run OCaml code or OCaml's bytecode. A stripped one without the module Sys may
    /// not be recognized.
    pub fn has_ocaml(&self) -> bool {
        self.opened.image().program.probes().len() > 0 || has_ocaml(self.opened.process())
    }

    /// Returns the path of the executable, as the kernel names it.
    pub fn program(&self) -> &Path {
        self.opened.program()
    }

    /// Returns the build-id of the executable, if it has one and can be read.
    pub fn build_id(&self) -> Option<BuildId> {
        self.opened.build_id()
    }

    /// Returns whether the process has exited, or all of its threads have begun to.
    pub fn has_exited(&self) -> bool {
        self.opened.process().has_exited()
    }

    /// Returns whether the process is in a job control stop (SIGSTOP, for example), and executes nothing until it is
    /// continued. False if it is traced.
    ///
    /// # Errors
    ///
    /// If the process has exited.
    pub fn is_stopped(&self) -> Result<bool> {
        let process = self.opened.process();
        // The first thread may have exited: the others are stopped.
        let state = process.with_thread_directory(|directory| {
            let state = Status::parse(&process.read(&format!("{directory}/status"))?).state;
            Ok((!matches!(state, 'Z' | 'X')).then_some(state))
        });
        let state = state.map_err(|source| process.exited_or(source))?;
        Ok(state == 'T')
    }

    /// Returns the pids of the processes that this one, or one of these, has forked, and that have executed no program
    /// since: those of a server that forks a process for each client, for example. One that was forked less than 50 ms
    /// ago is not among them yet, as it may be about to execute a program; nor is one that shares the memory of this
    /// process (vfork(2)), or whose parent has exited.
    ///
    /// ```no_run
    /// use probes_lib::{Observation, Options, Selector, Target};
    ///
    /// let server = Target::open(4242)?;
    /// let observation = Observation::new().count(Selector::All);
    /// for pid in server.forked_descendants() {
    ///     let observer = server.open_forked(pid)?.observe(&observation, Options::default())?;
    /// }
    /// # Ok::<(), probes_lib::Error>(())
    /// ```
    pub fn forked_descendants(&self) -> Vec<i32> {
        forked_descendants(self.opened.process())
    }

    /// Opens a process that this one has forked, with or without OCaml probes. Takes less time than
    /// [`Target::open_any`]: files that are known are not read again, and this does not wait to see whether the
    /// process executes another program.
    ///
    /// # Errors
    ///
    /// If there is no such process, it is a zombie, the caller may not debug it, or its executable cannot be read.
    pub fn open_forked(&self, pid: i32) -> Result<Target> {
        self.opened.open_forked(pid).map(Target::of)
    }

    /// Returns the objects with probes that the process had when it was last read: the executable if it
    /// has any, then the others by address.
    pub fn objects(&self) -> Vec<Object> {
        self.opened.image().program.objects().to_vec()
    }

    /// Returns the mapped files that could not be read when the process was last read.
    pub fn unreadable(&self) -> Vec<UnreadableObject> {
        self.opened.image().program.unreadable().to_vec()
    }

    /// Reads the state of every probe, without stopping the process.
    ///
    /// # Errors
    ///
    /// If the process has exited or executed a new program, keeps changing, or its memory cannot be read.
    pub fn states(&self) -> Result<ProbeStates> {
        let reader = StatesReader {
            opened: &self.opened,
            find_observed: |memory: ProcessMemory, maps: &[_]| {
                let arenas = installed::find(&memory, maps);
                let shadow = shadow::shadow_of(&arenas);
                let points = shadow::observed_points(self.opened.process(), &memory, arenas);
                let shadowed = Shadowed::new(memory, shadow);
                ObservedMemory { shadowed, points }
            },
        };
        reader.read()
    }

    /// Reads whether closures that the process marshals are accepted by other processes of its
    /// program; `states` are those of its probes. Does not stop the process. If sites lie in its
    /// OCaml code, and a digest of it has been computed, all of that code is read from the file.
    ///
    /// # Errors
    ///
    /// If the process has exited or executed a new program, or its memory cannot be read.
    pub fn code_digest(&self, states: &ProbeStates) -> Result<CodeDigest> {
        let image = self.opened.image();
        let Some(reader) = DigestReader::of(self.opened.process(), &image) else {
            return Ok(CodeDigest::Unaffected);
        };
        let memory = self.opened.unshadowed_memory_to_read()?;
        let sites = image.program.sites_by_address().map(|site| site.address);
        Ok(reader.read(&memory, sites, states.is_any_site_patched()))
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
    /// threads are stopped, everything is checked once more, written and read back, and the threads
    /// are resumed. The exceptions are a probe whose counters and sites contradict each other, as
    /// another update may be writing them, and unexpected bytes at a site of an object that can be
    /// unloaded, as it may be in the middle of being loaded: both are errors only if they are found
    /// again once the process is stopped.
    ///
    /// With [`Options::live`], no thread is stopped, and existing tracers are not checked for.
    ///
    /// # Errors
    ///
    /// If a name is unknown, a probe is selected twice, a probe is in a state that the actions do
    /// not fit, the process cannot be stopped or written, or exits meanwhile.
    /// [`Error::effect`](crate::Error::effect) says what the process is left with: nothing changed,
    /// unless restoring failed too.
    pub fn update_with(&self, actions: &Actions, options: Options) -> Result<Report> {
        self.carry_out(&|program| choose(program, actions), options, None)
    }

    /// Checks whether [`Target::update_with`] would succeed, as far as that is known while the process
    /// runs. Changes nothing.
    ///
    /// # Errors
    ///
    /// See [`Target::update_with`].
    pub fn check(&self, actions: &Actions, options: Options) -> Result<()> {
        self.updater(options)
            .check(&|program| choose(program, actions))
            .map_err(|error| self.nothing_changed_or(error))
    }

    /// Undoes an earlier update of this process: what was added to each counter is subtracted, what was
    /// subtracted is added, and the sites follow. Other changes that were made since then are kept:
    /// no counter goes below zero, and a probe that another tool has enabled as well stays enabled.
    ///
    /// The probes of a pair are undone in the order opposite to that of the update. Probes with nothing left to
    /// undo are skipped ([`Report::skipped`]); those with foreign bytes at a site stay as they are
    /// ([`Report::not_undone`]).
    ///
    /// # Errors
    ///
    /// See [`Target::update_with`]. If the process has exited ([`ProcessError::Exited`]) or executed a new
    /// program ([`ProcessError::Executed`]) meanwhile, nothing is left of the update.
    ///
    /// [`ProcessError::Exited`]: crate::ProcessError::Exited
    /// [`ProcessError::Executed`]: crate::ProcessError::Executed
    pub fn undo(&self, report: &Report, options: Options) -> Result<Report> {
        self.carry_out(
            &|program| choose_undo(program, &report.applied),
            options,
            None,
        )
    }

    /// Carries out what is chosen, and records it if it is of a hold.
    pub(crate) fn carry_out(
        &self,
        choose: Choose<'_>,
        options: Options,
        hold: Option<(&HoldJournal, HoldChange)>,
    ) -> Result<Report> {
        let updater = Updater {
            hold,
            ..self.updater(options)
        };
        let done = updater.update(choose, &self.queue);
        done.map_err(|error| self.nothing_changed_or(error))
    }

    /// Undoes what dead holders hold.
    pub(crate) fn release_all_dead(&self, options: Options) -> Result<Vec<ReleasedHold>> {
        let released = self.updater(options).release_dead(&self.queue);
        released.map_err(|error| self.nothing_changed_or(error))
    }

    fn nothing_changed_or(&self, error: Error) -> Error {
        self.opened
            .executed_or(error)
            .with_effect_if_none(Effect::NothingChanged)
    }

    fn updater(&self, options: Options) -> Updater<'_> {
        Updater {
            opened: &self.opened,
            options,
            hide: shadow::shadowed_memory,
            hold: None,
        }
    }
}
