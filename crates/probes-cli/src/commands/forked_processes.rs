//! [`ForkedProcesses`]: the processes that observed ones have forked, for commands with `-follow`.
//!
//! ```text
//! forked before                     observed by itself
//! forked meanwhile, hits counted    recorded with the process that has forked it, even if it exits soon;
//!                                   observed by itself once that one has exited; restored at the end
//! forked meanwhile, something timed observed by itself once it is found
//! ```

use std::collections::HashSet;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::signal::kill;
use nix::unistd::Pid;
use probes_lib::{ObservationReport, Observer, Options, Target};

use crate::messages::Messages;
use crate::output::WarningKind;

/// The shortest time from one search to the next.
const INTERVAL: Duration = Duration::from_millis(200);

/// The time from one search to the next is at least this many times as long as a search: a process may have thousands
/// of threads.
const SEARCH_PAUSE_FACTOR: u32 = 20;

/// The processes that observed ones have forked.
#[derive(Default)]
pub(super) struct ForkedProcesses {
    /// Forked processes that are or were observed by themselves, or could not be.
    observed_separately: HashSet<i32>,
    /// Forked processes whose hits are recorded by the observation of another process.
    recorded: Vec<ForkedProcess>,
    /// Those whose recorder has exited: restored at the end, if they could not be observed by themselves.
    orphaned: Vec<ForkedProcess>,
    /// The indices of observed processes that have exited, and whose forked processes were looked for since.
    exited: HashSet<usize>,
    /// When to look for forked processes again; `None` before the first time.
    next: Option<Instant>,
}

/// A process that an observed one has forked.
#[derive(Clone, Copy)]
pub(super) struct ForkedProcess {
    pub(super) pid: i32,
    /// The index, among the observed processes, of the one that records its hits, or else of the one that it descends
    /// from.
    pub(super) parent: usize,
    /// Whether it existed when its parent began to be observed, as far as is known.
    pub(super) existed_before: bool,
    /// Whether its hits were not recorded until now.
    pub(super) is_late: bool,
}

/// An observed process.
pub(super) struct ObservedAncestor<'p> {
    pub(super) target: &'p Target,
    pub(super) observer: &'p Observer,
    /// Whether it cannot be read any more.
    pub(super) has_ended: bool,
}

impl ObservedAncestor<'_> {
    /// Whether it has exited, so that its pid may be used again.
    fn has_exited(&self) -> bool {
        self.has_ended && self.target.has_exited()
    }
}

impl ForkedProcesses {
    /// Returns the processes that are to be observed by themselves from now on, each once. Looks for them only if it
    /// is time, or if all observed processes have ended. An observed process must have the same index each time.
    pub(super) fn find<'p>(
        &mut self,
        observed: impl Iterator<Item = ObservedAncestor<'p>>,
    ) -> Vec<ForkedProcess> {
        let looked = Instant::now();
        let observed: Vec<ObservedAncestor<'_>> = observed.collect();
        let is_due = self.next.is_none_or(|next| next <= looked);
        if !is_due && !observed.iter().all(|it| it.has_ended) {
            return Vec::new();
        }
        let mut skipped = self.skipped(&observed);
        let seen: HashSet<i32> = self.recorded.iter().map(|it| it.pid).collect();
        let mut found = self.take_unrecorded(&observed, &skipped);
        found.extend(self.new_ones(&observed, &skipped, seen));
        found.retain(|it| skipped.insert(it.pid));
        let is_orphaned = |it: &&ForkedProcess| observed[it.parent].has_exited();
        self.orphaned
            .extend(found.iter().filter(is_orphaned).copied());
        self.observed_separately
            .extend(found.iter().map(|it| it.pid));
        self.next = Some(looked + INTERVAL.max(looked.elapsed() * SEARCH_PAUSE_FACTOR));
        found
    }

    /// The pids of processes that are observed already, or could not be. The kernel may have given the pid of one that
    /// has exited to another, which may be observed, too.
    fn skipped(&self, observed: &[ObservedAncestor<'_>]) -> HashSet<i32> {
        let (exited, running): (Vec<_>, Vec<_>) = observed.iter().partition(|it| it.has_exited());
        let pids = |those: Vec<&ObservedAncestor<'_>>| -> HashSet<i32> {
            those.into_iter().map(|it| it.target.pid()).collect()
        };
        let (free, taken) = (pids(exited), pids(running));
        // Of those that could not be observed, only those that still exist: another process may have the pid later.
        let separate = self.observed_separately.iter().copied();
        let separate = separate.filter(|pid| !free.contains(pid) && exists(*pid));
        separate.chain(taken.iter().copied()).collect()
    }

    /// Returns the processes whose hits are recorded with those of an observed process that has exited: they are not
    /// read any more. Includes processes whose own parent has exited, as a daemon's has.
    fn take_unrecorded(
        &mut self,
        observed: &[ObservedAncestor<'_>],
        skipped: &HashSet<i32>,
    ) -> Vec<ForkedProcess> {
        let known = std::mem::take(&mut self.recorded).into_iter();
        let is_recorded = |it: &ForkedProcess| observed[it.parent].observer.records_forked(it.pid);
        let known = known.filter(|it| !skipped.contains(&it.pid) && is_recorded(it));
        let (found, recorded) = known.partition(|it| observed[it.parent].has_exited());
        self.recorded = recorded;
        found
    }

    /// Returns the processes, of those that are not among `seen`, whose hits no observed process records; keeps the
    /// others.
    fn new_ones(
        &mut self,
        observed: &[ObservedAncestor<'_>],
        skipped: &HashSet<i32>,
        mut seen: HashSet<i32>,
    ) -> Vec<ForkedProcess> {
        let is_first = self.next.is_none();
        let mut found = Vec::new();
        for (index, process) in observed.iter().enumerate() {
            let forked = if !process.has_ended {
                process.target.forked_descendants()
            } else if process.has_exited() && self.exited.insert(index) {
                process.observer.recorded_forked()
            } else {
                continue;
            };
            for pid in forked {
                if skipped.contains(&pid) || !seen.insert(pid) {
                    continue;
                }
                // Its parent may be another observed process, a child of this one, which then records it.
                let mut others = observed.iter().enumerate();
                let recorder =
                    others.find(|(_, it)| !it.has_ended && it.observer.records_forked(pid));
                let forked = ForkedProcess {
                    pid,
                    parent: recorder.map_or(index, |(recorder, _)| recorder),
                    existed_before: is_first,
                    is_late: recorder.is_none() && !is_first && !process.has_ended,
                };
                if recorder.is_some() {
                    self.recorded.push(forked);
                } else {
                    found.push(forked);
                }
            }
        }
        found
    }

    /// Restores the processes that were recorded by an observed process which has exited. If the recording process
    /// still runs, the removal of its observation restores them. Returns the failures.
    pub(super) fn restore<'p>(
        &self,
        observed: impl Iterator<Item = ObservedAncestor<'p>>,
    ) -> Vec<(i32, probes_lib::Error)> {
        let observers: Vec<&Observer> = observed.map(|it| it.observer).collect();
        let restore = |it: &ForkedProcess| {
            let observer = observers[it.parent];
            let is_recorded = observer.records_forked(it.pid);
            let error = is_recorded.then(|| observer.restore_forked(it.pid).err())??;
            Some((it.pid, error))
        };
        let all = self.recorded.iter().chain(&self.orphaned);
        all.filter_map(restore).collect()
    }

    /// Forked processes that are or were observed by themselves, or could not be.
    pub(super) fn observed_separately(&self) -> &HashSet<i32> {
        &self.observed_separately
    }
}

fn exists(pid: i32) -> bool {
    kill(Pid::from_raw(pid), None) != Err(Errno::ESRCH)
}

/// Names processes that were forked and could not be restored.
pub(super) fn warn_of_unrestored(messages: &Messages, parent: i32, report: &ObservationReport) {
    for (pid, why) in &report.unrestored {
        messages.warning(
            WarningKind::Forked,
            &format!("process {pid}, which process {parent} has forked, could not be restored: {why}"),
            &format!("it keeps counting, which does no harm: `ocaml-probes observe -clean -pid {pid}` restores it"),
        );
    }
}

/// Says that a forked process is observed by itself from now on, and that its hits and times until now are missing.
pub(super) fn warn_of_late_start(messages: &Messages, pid: i32, parent: i32) {
    messages.warning(
        WarningKind::Forked,
        &format!(
            "process {parent} has forked process {pid}, which is observed from now on: its hits and times until now are missing"
        ),
        "a process is found about 200 ms after it is forked; one that exits before that is not noticed",
    );
}

/// The options for a forked process: if another tool observes it already, that tool is not replaced.
pub(super) fn without_take_over(options: Options) -> Options {
    Options {
        take_over: false,
        ..options
    }
}
