//! The facade: a [`Target`] is a running process. The pipeline behind it: table, bias, selection,
//! plan, stop, patch, report.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::{Duration, Instant};

use nix::fcntl::OFlag;

use crate::addr::LoadBias;
use crate::denial;
use crate::elf::source::SourceMap;
use crate::error::{Denial, Effect, Error, ErrorKind, Result};
use crate::image::Image;
use crate::patch::Outcome;
use crate::process::Process;
use crate::report::{ProbeStates, Report};
use crate::select::{Actions, choose, choose_taken};
use crate::snapshot::Layout;
use crate::sys::mem::ProcessMemory;
use crate::sys::pidfd;
use crate::sys::threads::with_tracer;
use crate::table::ProbeTable;
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
    image: Image,
}

impl Target {
    /// Opens the process `pid` and reads the probes of its executable, without stopping it.
    ///
    /// The file is read through `/proc/PID/exe`, so it may have been replaced or deleted since.
    ///
    /// # Errors
    ///
    /// If there is no such process, it is a zombie or a kernel thread, the caller may not debug it,
    /// or its executable has no OCaml probes or cannot be read; see [`ProbeTable::read`].
    pub fn open(pid: i32) -> Result<Target> {
        let process = Process::open(pid)?;
        process.refuse_unworkable()?;
        let image = Image::of(&process)?;
        Ok(Target { process, image })
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
        self.image.table.path()
    }

    /// The probes of the executable.
    pub fn table(&self) -> &ProbeTable {
        &self.image.table
    }

    /// What is added to the file's addresses to get the process's.
    pub fn load_bias(&self) -> LoadBias {
        self.image.bias
    }

    /// Reads the state of every probe, without stopping the process.
    ///
    /// # Errors
    ///
    /// If the process has exited, or its memory may not or cannot be read.
    pub fn states(&self) -> Result<ProbeStates<'_>> {
        let untouched = Untouched::of(&self.process, &self.image);
        // Opened afterwards: that is when an exec is noticed.
        let memory = self.memory("look into", OFlag::O_RDONLY)?;
        let is_the_files = |start, len| {
            let untouched = untouched.as_ref();
            untouched.is_some_and(|untouched| untouched.holds(start, len))
        };
        let table = self.table();
        let layout = Layout::of(table, table.probes(), self.image.bias);
        let read = || -> Result<ProbeStates<'_>> {
            let snapshot = layout
                .read_states(self.pid(), &memory, table, is_the_files)
                .map_err(|error| self.tell_exec(error))?;
            Ok(ProbeStates::of(table, self.image.bias, snapshot))
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
        let choices = choose(self.table(), actions);
        choices
            .and_then(|choices| self.carry_out(Wish::of(&choices, options), options.deadline))
            .map_err(|error| self.tell_exec(error).leaving(Effect::NothingChanged))
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
        let choices = choose_taken(self.table(), &report.taken);
        choices
            .and_then(|choices| self.carry_out(Wish::of(&choices, options), options.deadline))
            .map_err(|error| self.tell_exec(error).leaving(Effect::NothingChanged))
    }

    /// Carries out a wish, waiting up to `patience` for others who change the process.
    fn carry_out(&self, wish: Wish<'_>, patience: Duration) -> Result<Report> {
        if !wish.live {
            self.process.refuse_own_family()?;
        }
        let deadline = Instant::now() + patience;
        let _turn = Turn::wait(&self.process, deadline)?;
        loop {
            let done = match wish.live {
                true => self.change_live(wish),
                false => self.change_stopped(wish, patience),
            };
            match done {
                // Somebody whose lock we cannot see, from outside this container.
                Err(error) if is_passing(&error) && Instant::now() < deadline => turn::pause(),
                done => return done,
            }
        }
    }

    fn change_stopped(&self, wish: Wish<'_>, limit: Duration) -> Result<Report> {
        let memory = self.memory("attach to", OFlag::O_RDWR)?;
        let subject = self.subject(&memory);
        for _ in 0..ATTEMPTS {
            let prepared = match subject.prepare(wish) {
                // So it looks, too, if somebody else writes while we read: told when it stands.
                Err(error) if matches!(error.kind(), ErrorKind::Inconsistent { .. }) => None,
                prepared => Some(prepared?),
            };
            match prepared {
                Some(job) if job.is_done() => return Ok(job.report(Duration::ZERO)),
                Some(ref job) => job.break_copy_on_write(),
                None => {}
            }
            let (job, outcome, stood) = with_tracer(Some(&self.process), |tracer| {
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
            if outcome == Outcome::Done {
                return Ok(job.report(stood));
            }
        }
        Err(ErrorKind::KeepsChanging { pid: self.pid() }.into())
    }

    fn change_live(&self, wish: Wish<'_>) -> Result<Report> {
        let memory = self.memory("attach to", OFlag::O_RDWR)?;
        let subject = self.subject(&memory);
        for _ in 0..ATTEMPTS {
            let job = subject.prepare(wish)?;
            if job.is_done() || job.carry_out_live()? == Outcome::Done {
                return Ok(job.report(Duration::ZERO));
            }
        }
        Err(ErrorKind::KeepsChanging { pid: self.pid() }.into())
    }

    fn subject<'a>(&'a self, memory: &'a ProcessMemory) -> Subject<'a> {
        Subject {
            process: &self.process,
            image: &self.image,
            memory,
        }
    }

    /// Opens the executable for source lines and functions. Takes longer the more debugging
    /// information the file has, unlike anything else here.
    ///
    /// # Errors
    ///
    /// If the file cannot be read.
    pub fn source_map(&self) -> Result<SourceMap> {
        self.image.source_map()
    }

    /// Tells an exec, which looks like an end to who has opened the old program.
    fn tell_exec(&self, error: Error) -> Error {
        if self.image.is_replaced(&self.process) {
            let pid = self.pid();
            return Error::from(ErrorKind::Executed { pid }).leaving(error.effect());
        }
        error
    }

    fn memory(&self, operation: &'static str, flags: OFlag) -> Result<ProcessMemory> {
        let memory = ProcessMemory::open(&self.process, flags)
            .map_err(|source| denial::or_lost(&self.process, operation, source))?;
        // Asked afterwards: what was opened is then the memory of the program that we know.
        if self.image.is_replaced(&self.process) {
            return Err(ErrorKind::Executed { pid: self.pid() }.into());
        }
        Ok(memory)
    }
}
