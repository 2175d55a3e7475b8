//! [`Permissions`]: which threads of a process may make the system calls that are to be injected.
//!
//! A seccomp filter (seccomp(2)) may kill the process for a system call. So the filters of a stopped thread
//! are read and run, for exactly these calls with their arguments. If they cannot be read, a thread is used only if
//! it has no filters beside those that its program was executed with ([`OwnFilters`]).

use nix::errno::Errno;

use crate::error::{Error, ObserveError, ProcessError, Result, UnreadableFilter};
use crate::inject::injected_call::PlacedCall;
use crate::process::Process;
use crate::process::denial;
use crate::process::seccomp::OwnFilters;
use crate::process::seccomp::filter::{self, SeccompData, SeccompFilter};
use crate::trace::stopped::Stopped;
use crate::trace::thread_calls::ThreadCalls;

/// A system call, and what it is called in messages.
pub(crate) type NamedCall = (&'static str, SeccompData);

/// How many instructions the filters of a thread have at most, with [`FILTER_OVERHEAD`] more counted for each filter:
/// `MAX_INSNS_PER_PATH` of the kernel's seccomp.c.
const MAX_FILTERS_LEN: usize = (1 << 18) / 8;
const FILTER_OVERHEAD: usize = 4;

/// The seccomp modes of /proc/PID/status.
const NONE: u32 = 0;
pub(crate) const STRICT: u32 = 1;

/// Which threads of a process may make system calls.
pub(crate) struct Permissions<'p> {
    process: &'p Process,
    own: OwnFilters<'p>,
    /// Whether filters that cannot be read are taken to allow everything.
    despite_seccomp: bool,
}

impl Permissions<'_> {
    pub(crate) fn of(process: &Process, despite_seccomp: bool) -> Permissions<'_> {
        Permissions {
            process,
            own: OwnFilters::of(process),
            despite_seccomp,
        }
    }

    /// Returns whether a stopped thread may make all these calls.
    pub(crate) fn allow(&self, thread_calls: &ThreadCalls, tid: i32, calls: &[PlacedCall]) -> bool {
        let refusal = self.refusal(tid, || read_filters(thread_calls, tid), &named(calls));
        matches!(refusal, Ok(None))
    }

    /// Checks that one of the stopped threads may make all the calls.
    ///
    /// # Errors
    ///
    /// [`ObserveError::SeccompRefuses`], [`ObserveError::SeccompStrict`],
    /// [`ObserveError::SeccompUnreadable`] if no thread may: the error of the first one. If the process is lent and its
    /// lease is lost.
    pub(crate) fn check_some_thread_may_call(
        &self,
        stopped: &Stopped<'_>,
        calls: &[PlacedCall],
    ) -> Result<()> {
        let (thread_calls, calls) = (stopped.calls(), named(calls));
        let checked = self.check_any(stopped.tids(), |tid| {
            self.refusal(tid, || read_filters(thread_calls, tid), &calls)
        });
        // The filters may be unreadable because of that.
        checked.or_else(|error| stopped.refuse_lost().and(Err(error)))
    }

    /// Returns why some stopped thread may not make one of these calls; `None` if all threads may make all of them.
    ///
    /// # Errors
    ///
    /// If the process has exited.
    pub(crate) fn refusal_of_any(
        &self,
        stopped: &Stopped<'_>,
        calls: &[NamedCall],
    ) -> Result<Option<ObserveError>> {
        let thread_calls = stopped.calls();
        for tid in stopped.tids() {
            let refusal = self.refusal(tid, || read_filters(thread_calls, tid), calls)?;
            if refusal.is_some() {
                return Ok(refusal);
            }
        }
        Ok(None)
    }

    /// Same as [`Permissions::check_some_thread_may_call`], for running threads, whose filters cannot be read because of
    /// `why`.
    pub(crate) fn check_some_running_thread_may_call(&self, why: UnreadableFilter) -> Result<()> {
        let process = self.process;
        let tids = process.threads().and_then(|mut list| list.read());
        let tids = tids.map_err(|source| process.exited_or(source))?;
        self.check_any(tids.into_iter(), |tid| self.refusal(tid, || Err(why), &[]))
    }

    fn check_any(
        &self,
        tids: impl Iterator<Item = i32>,
        refusal: impl Fn(i32) -> Result<Option<ObserveError>>,
    ) -> Result<()> {
        let mut tids: Vec<i32> = tids.collect();
        tids.sort_unstable();
        let mut first = None;
        for tid in tids {
            match refusal(tid) {
                Ok(None) => return Ok(()),
                Ok(Some(refusal)) => first = first.or(Some(refusal)),
                Err(error) if error.is_gone() => {}
                Err(error) => return Err(error),
            }
        }
        let pid = self.process.pid();
        Err(match first {
            Some(refusal) => Error::of_process(pid, refusal),
            None => Error::of_process(pid, ProcessError::Exited),
        })
    }

    /// Returns why a thread may not make these calls; `None` if it may.
    fn refusal(
        &self,
        tid: i32,
        read: impl FnOnce() -> Result<Vec<SeccompFilter>, UnreadableFilter>,
        calls: &[NamedCall],
    ) -> Result<Option<ObserveError>> {
        let exited_or = |source| self.process.exited_or(source);
        let status = self.process.thread_status(tid).map_err(exited_or)?;
        match status.seccomp {
            NONE => return Ok(None),
            STRICT => return Ok(Some(ObserveError::SeccompStrict)),
            _ => {}
        }
        let why = match read().and_then(|filters| refusal_of(&filters, calls)) {
            Ok(refusal) => return Ok(refusal),
            Err(why) => why,
        };
        let is_risky = !self.despite_seccomp && self.own.has(tid).map_err(exited_or)?;
        Ok(is_risky.then_some(ObserveError::SeccompUnreadable { why }))
    }
}

fn named(calls: &[PlacedCall]) -> Vec<NamedCall> {
    let named = |placed: &PlacedCall| (placed.call.name(), placed.as_filters_see_it());
    calls.iter().map(named).collect()
}

/// Returns which of these calls is the first one that filters do not allow; `None` if they allow all.
fn refusal_of(
    filters: &[SeccompFilter],
    calls: &[NamedCall],
) -> Result<Option<ObserveError>, UnreadableFilter> {
    for &(call, ref seen) in calls {
        let refusal = filter::refusal(filters, seen);
        if let Some(action) = refusal.map_err(|_| UnreadableFilter::NotClassic)? {
            return Ok(Some(ObserveError::SeccompRefuses { call, action }));
        }
    }
    Ok(None)
}

/// Reads the filters of a stopped thread.
fn read_filters(calls: &ThreadCalls, tid: i32) -> Result<Vec<SeccompFilter>, UnreadableFilter> {
    let mut filters = Vec::new();
    let mut room = MAX_FILTERS_LEN;
    loop {
        match calls.seccomp_filter(tid, filters.len()) {
            Ok(Some(filter)) => {
                let left = room.checked_sub(filter.len() + FILTER_OVERHEAD);
                room = left.ok_or(UnreadableFilter::NotSupported)?;
                filters.push(SeccompFilter(filter));
            }
            Ok(None) => return Ok(filters),
            Err(Errno::EMEDIUMTYPE) => return Err(UnreadableFilter::NotClassic),
            Err(Errno::EACCES | Errno::EPERM) => {
                return Err(why_unreadable().unwrap_or(UnreadableFilter::NotPermitted));
            }
            Err(_) => return Err(UnreadableFilter::NotSupported),
        }
    }
}

/// Returns why this process cannot read seccomp filters, as far as that is known without trying.
pub(crate) fn why_unreadable() -> Option<UnreadableFilter> {
    let ours = denial::own_status();
    if !ours.is_admin() {
        return Some(UnreadableFilter::NotPermitted);
    }
    (ours.seccomp != NONE).then_some(UnreadableFilter::ReaderFiltered)
}
