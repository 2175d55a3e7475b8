//! [`survey`]: finds the processes of this machine that have OCaml probes.

use std::collections::BTreeSet;
use std::num::NonZero;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use crate::elf::table::Generation;
use crate::error::{Error, ErrorKind, FileError, Result};
use crate::process::objects::Files;
use crate::process::{check_proc, pids};
use crate::target::Target;
use crate::update::snapshot::State;

/// More threads than this do not make /proc any faster.
const MAX_THREADS: usize = 8;

/// What [`survey`] has found.
///
/// ```no_run
/// let survey = probes_lib::survey()?;
/// for process in &survey.processes {
///     println!("{} {}: {} of {} enabled", process.pid, process.program.display(), process.enabled, process.probes);
/// }
/// for process in &survey.unread {
///     println!("{}: {}", process.pid, process.why);
/// }
/// println!("{} processes may not be read", survey.denied.len());
/// # Ok::<(), probes_lib::Error>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Survey {
    /// The processes with probes, by pid.
    pub processes: Vec<SurveyedProcess>,
    /// Processes that we may not read: of other users, mostly.
    pub denied: Vec<i32>,
    /// Processes that may have probes, but could not be read, by pid: the notes of a file are damaged, or the kernel
    /// failed to read something, for example because too many files are open.
    pub unread: Vec<UnreadProcess>,
}

/// A process that may have probes which cannot be found.
///
/// [`Survey`] has an example.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnreadProcess {
    /// Its id.
    pub pid: i32,
    /// What could not be read, and why.
    pub why: String,
}

/// A process with probes.
///
/// [`Survey`] has an example.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SurveyedProcess {
    /// Its id.
    pub pid: i32,
    /// The user it runs as: its real uid.
    pub uid: u32,
    /// Its executable, as the kernel names it.
    pub program: PathBuf,
    /// The generations of its probes.
    pub generations: BTreeSet<Generation>,
    /// How many probes (names) it has.
    pub probes: usize,
    /// How many of them are enabled.
    pub enabled: usize,
    /// How many are neither enabled nor disabled.
    pub inconsistent: usize,
}

/// Looks for probes in all processes that we may read, without stopping any. Each file is read once,
/// however many processes run it.
///
/// # Errors
///
/// If the processes cannot be listed.
pub fn survey() -> Result<Survey> {
    check_proc()?;
    let pids = pids().map_err(|source| Error::of_file("/proc", FileError::Open { source }))?;
    let files = Arc::new(Files::default());
    let next = AtomicUsize::new(0);
    let work = || {
        let mut found = Survey::default();
        while let Some(&pid) = pids.get(next.fetch_add(1, Ordering::Relaxed)) {
            match read(pid, &files) {
                Ok(process) => found.processes.extend(process),
                Err(NotRead::Denied) => found.denied.push(pid),
                Err(NotRead::Failed(why)) => found.unread.push(UnreadProcess { pid, why }),
            }
        }
        found
    };
    let threads = thread::available_parallelism().map_or(1, NonZero::get);
    let mut survey = thread::scope(|scope| {
        let others: Vec<_> = (1..threads.min(MAX_THREADS))
            .filter_map(|_| thread::Builder::new().spawn_scoped(scope, work).ok())
            .collect();
        let mut survey = work();
        for other in others {
            match other.join() {
                Ok(found) => {
                    survey.processes.extend(found.processes);
                    survey.denied.extend(found.denied);
                    survey.unread.extend(found.unread);
                }
                Err(panic) => std::panic::resume_unwind(panic),
            }
        }
        survey
    });
    survey.processes.sort_by_key(|process| process.pid);
    survey.denied.sort_unstable();
    survey.unread.sort_by_key(|process| process.pid);
    Ok(survey)
}

/// Why a process is not known to have probes, or to have none.
enum NotRead {
    /// We may not read it.
    Denied,
    /// The notes of one of its files cannot be used, or a call failed; the text says why.
    Failed(String),
}

/// Returns the process if it has probes.
fn read(pid: i32, files: &Arc<Files>) -> Result<Option<SurveyedProcess>, NotRead> {
    let opened = Target::open_with_files(pid, files.clone());
    let read = opened.and_then(|target| {
        let states = target.states()?;
        let process = target.opened.process();
        let status = process.status();
        let status = status.map_err(|source| process.exited_or(source))?;
        Ok((states, status, target))
    });
    let (states, status, target) = match read {
        Ok(found) => found,
        Err(error) if error.denial().is_some() => {
            return Err(NotRead::Denied);
        }
        Err(error) if has_damaged_notes(&error) || error.is_failed_call() => {
            return Err(NotRead::Failed(error.to_string()));
        }
        // It has no probes, is a kernel thread, has exited meanwhile, or its program cannot be read.
        Err(_) => return Ok(None),
    };
    let count = |state| states.probes().filter(|it| it.state() == state).count();
    let objects = states.objects().iter();
    Ok(Some(SurveyedProcess {
        pid,
        uid: status.uid,
        program: target.program().to_owned(),
        generations: objects
            .flat_map(|object| object.table().generations())
            .collect(),
        probes: states.probes().len(),
        enabled: count(State::Enabled),
        inconsistent: count(State::Inconsistent),
    }))
}

/// Whether a file has notes of probes that cannot be used.
fn has_damaged_notes(error: &Error) -> bool {
    use FileError::{MalformedNote, UnknownLayout, WrongNote};
    let ErrorKind::File(kind) = error.kind() else {
        return false;
    };
    matches!(
        kind,
        MalformedNote(_) | WrongNote { .. } | UnknownLayout { .. }
    )
}
