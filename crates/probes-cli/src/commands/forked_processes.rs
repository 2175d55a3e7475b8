//! [`ForkedProcesses`]: the processes that observed ones have forked, of the commands with `-follow`.
//!
//! ```text
//! forked before                     observed by itself
//! forked meanwhile, hits counted    recorded with the process that has forked it, even if it exits soon;
//!                                   observed by itself once that one has exited; restored in the end
//! forked meanwhile, something timed observed by itself once it is found
//! ```

use std::collections::HashSet;
use std::time::{Duration, Instant};

use probes_lib::{ObservationReport, Observer, Options, Target};

use crate::messages::Messages;
use crate::output::WarningKind;

/// How often processes are looked for, at most.
const INTERVAL: Duration = Duration::from_millis(200);

/// How many times as long as a look it is to the next one at least: a process may have thousands of threads.
const REST: u32 = 20;

/// The processes that observed ones have forked.
#[derive(Default)]
pub(super) struct ForkedProcesses {
    /// Those that are, or were, observed by themselves, or could not be.
    by_themselves: HashSet<i32>,
    /// Those whose hits the observation of another one records.
    recorded: Vec<ForkedProcess>,
    /// When they are looked for again; `None` before the first time.
    next: Option<Instant>,
}

/// A process that an observed one has forked.
#[derive(Clone, Copy)]
pub(super) struct ForkedProcess {
    pub(super) pid: i32,
    /// The index of that one among those that are observed.
    pub(super) parent: usize,
    /// Whether it was there before its parent was observed.
    pub(super) was_there: bool,
}

impl ForkedProcess {
    /// Whether its times are missing until it is observed by itself; `parent` observes the process that has forked it.
    pub(super) fn misses_times(self, parent: Option<&Observer>) -> bool {
        !self.was_there && parent.is_some_and(|parent| !parent.forked().are_recorded())
    }
}

/// An observed process.
pub(super) struct Parent<'p> {
    pub(super) target: &'p Target,
    pub(super) observer: &'p Observer,
    /// Whether it can be read no more.
    pub(super) has_ended: bool,
}

impl ForkedProcesses {
    /// Returns the processes that are to be observed by themselves from now on, each once, if it is time to look for them, or all observed
    /// ones have ended. The observed ones have the same index each time.
    pub(super) fn find<'p>(
        &mut self,
        observed: impl Iterator<Item = Parent<'p>>,
    ) -> Vec<ForkedProcess> {
        let looked = Instant::now();
        let observed: Vec<Parent<'_>> = observed.collect();
        let is_due = self.next.is_none_or(|next| next <= looked);
        if !is_due && !observed.iter().all(|it| it.has_ended) {
            return Vec::new();
        }
        let is_first = self.next.is_none();
        let known = std::mem::take(&mut self.recorded);
        let are_known: HashSet<i32> = known.iter().map(|it| it.pid).collect();
        let given = observed.iter().map(|it| it.target.pid());
        let mut skipped: HashSet<i32> = self.by_themselves.iter().copied().chain(given).collect();
        for process in observed.iter().filter(|it| it.has_ended) {
            // The kernel may give its pid to another one.
            skipped.remove(&process.target.pid());
        }
        let mut found = Vec::new();
        for (parent, process) in observed.iter().enumerate() {
            if process.has_ended {
                // Nothing reads any more what it has recorded.
                found.extend(known.iter().filter(|it| it.parent == parent));
                continue;
            }
            for pid in process.target.forked_descendants() {
                let forked = ForkedProcess {
                    pid,
                    parent,
                    was_there: is_first,
                };
                if skipped.contains(&pid) {
                    continue;
                }
                if are_known.contains(&pid) || process.observer.records_forked(pid) {
                    self.recorded.push(forked);
                } else {
                    found.push(forked);
                }
            }
        }
        found.retain(|it| skipped.insert(it.pid));
        self.by_themselves.extend(found.iter().map(|it| it.pid));
        self.next = Some(looked + INTERVAL.max(looked.elapsed() * REST));
        found
    }

    /// Those that are, or were, observed by themselves, or could not be.
    pub(super) fn by_themselves(&self) -> &HashSet<i32> {
        &self.by_themselves
    }
}

/// Names processes that were forked and could not be restored.
pub(super) fn warn_of_unrestored(messages: &Messages, parent: i32, report: &ObservationReport) {
    for (pid, why) in &report.unrestored {
        messages.warning(
            WarningKind::Forked,
            &format!("process {pid}, which process {parent} has forked, could not be restored: {why}"),
            &format!("it counts on, which does no harm: `ocaml-probes observe -clean -pid {pid}` restores it"),
        );
    }
}

/// Says that a forked process is observed by itself from now on, and that its times until now are missing.
pub(super) fn warn_of_late_start(messages: &Messages, pid: i32, parent: i32) {
    messages.warning(
        WarningKind::Forked,
        &format!(
            "process {parent} has forked process {pid}, which is observed from now on: its times until now are missing"
        ),
        "a process is found some 200 ms after it is forked; one that exits before that is not noticed",
    );
}

/// The options for a process that an observed one has forked: another tool may observe that one.
pub(super) fn without_take_over(options: Options) -> Options {
    Options {
        take_over: false,
        ..options
    }
}
