//! [`Processes`]: all processes that are shown: those that are observed, those that are refused, and those that have
//! just exited.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

use probes_lib::{Error, RuntimeEvents};

use super::figures::{CollectorTotals, ProcessFigures};
use super::observed::Observed;
use super::page::ShownProcess;
use super::scan::{Ended, name_of};
use crate::failure::{Failure, NO_MORE_EVENTS, exit_or_exec};
use crate::messages::Messages;
use crate::output::WarningKind;
use crate::signals::TerminationSignals;

/// How long the last figures of a process are shown after it has exited, so that they are scraped.
const SHOWN_AFTER_EXIT: Duration = Duration::from_secs(60);

/// The most rows of a process, and of all of them: probes, pairs and functions.
const MAX_ROWS_OF_PROCESS: usize = 1000;
const MAX_ROWS: usize = 20_000;

/// The most processes that are shown beside those that are observed.
const MAX_OTHERS: usize = 256;

/// How often it is checked whether processes still write runtime events.
const CHECK_INTERVAL: Duration = Duration::from_millis(200);

/// How often it is tried to remove the instrumentation of processes that cannot be read any more.
const REMOVAL_INTERVAL: Duration = Duration::from_secs(5);

/// What became of the others if the instrumentation of some could not be removed.
const OTHERS: &str = "the instrumentation was removed from the others";

pub(super) struct Processes {
    /// By their pids.
    each: BTreeMap<i32, ServedProcess>,
    /// Those that are refused and not shown, because there are too many.
    unshown: BTreeSet<i32>,
    /// Those that cannot be read, and whose instrumentation is not removed so far.
    unremoved: Vec<Unremoved>,
    removal_tried: Instant,
    /// What has ended, for the scanner; `None` once the scanner is to end.
    ends: Option<Sender<Ended>>,
    bounds: Vec<Duration>,
    wants_events: bool,
    messages: Messages,
    checked: Instant,
    /// Whether only one is selected, by its pid.
    is_single: bool,
    /// What has failed; `None` once clients are served.
    failures: Option<Vec<Failure>>,
}

#[derive(Default)]
struct ServedProcess {
    program: String,
    observed: Option<Observed>,
    /// Why it is not observed, if it runs.
    refused: Option<String>,
    /// Since when it is neither observed nor refused.
    gone_since: Option<Instant>,
    /// The figures of earlier observations, and those of this one.
    earlier: ProcessFigures,
    current: ProcessFigures,
    stopped: Duration,
    /// How many rows it may have; `None` until its first reading.
    max_rows: Option<usize>,
    left_out: usize,
    /// How many selections it does not have, by the kinds of their errors.
    missing: BTreeMap<String, usize>,
}

/// A process that cannot be read, and whose instrumentation is not removed so far. The scanner is told that its observation has
/// ended when that is done.
struct Unremoved {
    observed: Observed,
    /// Whether it was said that it cannot be removed.
    is_reported: bool,
}

impl Unremoved {
    fn of(observed: Observed) -> Unremoved {
        Unremoved {
            observed,
            is_reported: false,
        }
    }

    fn ended(&self) -> Ended {
        Ended::Observation {
            id: self.observed.id,
            is_replaced: false,
            may_have_executed: false,
        }
    }
}

impl ServedProcess {
    /// Ends its observation, and returns it, if there is one: its figures are those of an earlier one from now on.
    fn close(&mut self, bounds: &[Duration]) -> Option<Observed> {
        let mut observed = self.observed.take()?;
        // Its last events may still be readable. If not, what was read before counts.
        let _ = observed.read_events();
        let collector = observed.collector_figures(bounds);
        self.end_events(collector);
        self.current.close();
        self.earlier.add(&std::mem::take(&mut self.current));
        self.max_rows = None;
        Some(observed)
    }

    /// Its runtime events are read no more; these are their last figures, if they were read until now.
    fn end_events(&mut self, last: Option<CollectorTotals>) {
        self.current.collector = last.or(self.current.collector.take());
        for figures in [&mut self.current, &mut self.earlier] {
            figures.forget_heap();
        }
    }

    /// How many rows are shown of it.
    fn rows(&self) -> usize {
        let current = self.max_rows.unwrap_or(0);
        current.max(self.earlier.rows())
    }
}

impl Processes {
    pub(super) fn new(
        ends: Sender<Ended>,
        bounds: Vec<Duration>,
        wants_events: bool,
        is_single: bool,
        messages: Messages,
    ) -> Processes {
        Processes {
            each: BTreeMap::new(),
            unshown: BTreeSet::new(),
            unremoved: Vec::new(),
            removal_tried: Instant::now(),
            ends: Some(ends),
            bounds,
            wants_events,
            messages,
            checked: Instant::now(),
            is_single,
            failures: Some(Vec::new()),
        }
    }

    /// The messages about one of the processes.
    fn messages(&self, pid: i32) -> Messages {
        self.messages.about_one(pid, self.is_single)
    }

    pub(super) fn bounds(&self) -> &[Duration] {
        &self.bounds
    }

    /// How many are observed.
    pub(super) fn observed(&self) -> usize {
        let each = self.each.values();
        each.filter(|it| it.observed.is_some()).count()
    }

    /// Clients are served from now on, even if no process is left; fails if `needs_any` and none could be observed.
    pub(super) fn begin_to_serve(&mut self, needs_any: bool) -> Result<(), Failure> {
        let mut failures = self.failures.take().unwrap_or_default();
        // Without a failure, those that were observed have exited since: their last figures are served.
        if self.observed() > 0 || !needs_any || failures.is_empty() {
            return Ok(());
        }
        let failed = failures.len();
        match failures.pop() {
            Some(failure) if self.is_single => Err(failure),
            _ => Err(Failure::Several {
                failed,
                total: failed,
                outcome: "",
            }),
        }
    }

    /// Whether no process is observed, is refused, or has just exited.
    pub(super) fn is_empty(&self) -> bool {
        self.each.is_empty()
    }

    /// Whether runtime events of any process are read.
    pub(super) fn reads_events(&self) -> bool {
        let mut each = self.each.values();
        each.any(|it| it.observed.as_ref().is_some_and(Observed::reads_events))
    }

    /// Tells the scanner to end.
    pub(super) fn end_scan(&mut self) {
        self.ends = None;
    }

    fn tell_scanner(&self, ended: Ended) {
        if let Some(ends) = &self.ends {
            // It fails only if the scanner has ended, and then nothing is found any more.
            let _ = ends.send(ended);
        }
    }

    /// The process of this pid and program; another program of that pid is forgotten.
    fn of(&mut self, pid: i32, program: String) -> &mut ServedProcess {
        self.unshown.remove(&pid);
        let process = self.each.entry(pid).or_default();
        if process.program != program {
            *process = ServedProcess {
                program,
                ..ServedProcess::default()
            };
        }
        process.gone_since = None;
        process.refused = None;
        process
    }

    /// Ends the observation of a process that was found anew, if there is one: the process has exited or exec'd, and that was not
    /// noticed so far. If it has not, the observation is removed like that of a process that cannot be read.
    fn close_earlier(&mut self, pid: i32) {
        let process = self.each.get_mut(&pid);
        let observed = process.and_then(|process| process.close(&self.bounds));
        self.unremoved.extend(observed.map(Unremoved::of));
    }

    /// A process is observed from now on.
    pub(super) fn begin(&mut self, observed: Observed) {
        let (pid, program) = (observed.target.pid(), name_of(&observed.target));
        let messages = self.messages(pid);
        let stopped = observed.stopped();
        messages.note(&format!(
            "{program} is observed; stopped {} us",
            stopped.as_micros()
        ));
        self.close_earlier(pid);
        let process = self.of(pid, program);
        process.stopped += stopped;
        process.observed = Some(observed);
        self.read_one(pid);
        self.forget_some();
    }

    /// A process cannot be observed.
    pub(super) fn refuse(&mut self, pid: i32, program: String, failure: Failure) {
        let kind = failure.kind();
        // The failure of the only process is that of the command, if it is the first.
        if self.failures.is_none() || !self.is_single {
            self.messages(pid).failure(&failure);
        }
        if let Some(failures) = &mut self.failures {
            failures.push(failure);
        }
        self.close_earlier(pid);
        let process = self.of(pid, program);
        process.refused = Some(kind);
        self.forget_some();
    }

    /// A process that is observed lacks selections; reports that, unless it lacked as many before.
    pub(super) fn report_missing(&mut self, pid: i32, failures: &[Failure]) {
        let messages = self.messages(pid);
        let Some(process) = self.each.get_mut(&pid) else {
            return;
        };
        let mut missing: BTreeMap<String, usize> = BTreeMap::new();
        for failure in failures {
            *missing.entry(failure.kind()).or_default() += 1;
        }
        if process.missing != missing {
            failures.iter().for_each(|it| messages.failure(it));
            process.missing = missing;
        }
    }

    /// The runtime events of a process can be read from now on.
    pub(super) fn begin_events(&mut self, pid: i32, events: RuntimeEvents) {
        if let Some(process) = self.each.get_mut(&pid) {
            if let Some(observed) = &mut process.observed {
                let earlier = ProcessFigures {
                    collector: process.current.collector.take(),
                    ..ProcessFigures::default()
                };
                process.earlier.add(&earlier);
                observed.set_events(events);
            }
        }
    }

    /// The runtime events of a process cannot be read.
    pub(super) fn refuse_events(&self, pid: i32, failure: &Failure) {
        self.messages(pid).failure(failure);
    }

    /// A process has exited; if it is still observed, the next reading finds that out.
    pub(super) fn forget(&mut self, pid: i32) {
        self.unshown.remove(&pid);
        let is_refused = |process: &ServedProcess| process.observed.is_none();
        if let Some(process) = self.each.get_mut(&pid).filter(|it| is_refused(it)) {
            process.refused = None;
            process.gone_since.get_or_insert_with(Instant::now);
        }
    }

    /// Reads the new runtime events of all.
    pub(super) fn read_events(&mut self) {
        let is_checked = self.checked.elapsed() >= CHECK_INTERVAL;
        if is_checked {
            self.checked = Instant::now();
        }
        let mut ended = Vec::new();
        for (pid, process) in &mut self.each {
            let Some(observed) = process.observed.as_mut() else {
                continue;
            };
            if !observed.reads_events() {
                continue;
            }
            // Checked before they are read, so that nothing is missed that was written before.
            let has_events = !is_checked || observed.has_events();
            let read = observed.read_events();
            if has_events && read.is_ok() {
                continue;
            }
            let collector = observed.collector_figures(&self.bounds);
            process.end_events(collector);
            ended.push((*pid, read.err()));
        }
        for (pid, error) in ended {
            self.end_events(pid, error);
        }
    }

    /// The runtime events of a process cannot be read any more.
    fn end_events(&mut self, pid: i32, error: Option<Error>) {
        let Some(process) = self.each.get_mut(&pid) else {
            return;
        };
        let Some(observed) = &mut process.observed else {
            return;
        };
        observed.end_events();
        if observed.has_only_events() {
            self.end(pid, error);
        } else {
            let id = observed.id;
            self.tell_scanner(Ended::RuntimeEvents(id));
        }
    }

    /// Tries to remove the instrumentation of one of the processes that cannot be read, if it is time to: that may take seconds,
    /// in which nobody is answered.
    fn remove_unread(&mut self) {
        let is_due = self.removal_tried.elapsed() >= REMOVAL_INTERVAL;
        let next = self.unremoved.iter().position(|it| !it.is_reported);
        let Some(index) = next.or_else(|| is_due.then_some(0)) else {
            return;
        };
        if self.unremoved.is_empty() {
            return;
        }
        let mut unremoved = self.unremoved.remove(index);
        let observed = &mut unremoved.observed;
        let messages = self
            .messages
            .about_one(observed.target.pid(), self.is_single);
        match observed.try_to_remove(&messages) {
            Ok(is_removed) => {
                if is_removed && unremoved.is_reported {
                    messages.note("the process is restored now");
                }
                // It may be observed again.
                self.tell_scanner(unremoved.ended());
            }
            Err(failure) => {
                if !unremoved.is_reported {
                    messages.failure(&failure);
                }
                unremoved.is_reported = true;
                // The others come before it.
                self.unremoved.push(unremoved);
            }
        }
        self.removal_tried = Instant::now();
    }

    /// Reads all processes.
    pub(super) fn read(&mut self) {
        self.remove_unread();
        let pids: Vec<i32> = self.each.keys().copied().collect();
        for pid in pids {
            self.read_one(pid);
        }
        self.each.retain(|_, process| {
            let gone = process.gone_since;
            gone.is_none_or(|since| since.elapsed() < SHOWN_AFTER_EXIT)
        });
    }

    fn read_one(&mut self, pid: i32) {
        let rows: usize = self.each.values().filter_map(|it| it.max_rows).sum();
        let messages = self.messages(pid);
        let Some(process) = self.each.get_mut(&pid) else {
            return;
        };
        let Some(observed) = &mut process.observed else {
            return;
        };
        match observed.read(&self.bounds) {
            Ok(mut figures) => {
                let all = figures.rows();
                let most = *process.max_rows.get_or_insert_with(|| {
                    all.min(MAX_ROWS_OF_PROCESS)
                        .min(MAX_ROWS.saturating_sub(rows))
                });
                if all > most && process.left_out == 0 {
                    messages.warning(
                        WarningKind::LeftOut,
                        &format!(
                            "{} of {all} probes, pairs and functions are left out",
                            all - most
                        ),
                        "select fewer; docs/serve.md has the limits",
                    );
                }
                process.left_out = all - most.min(all);
                figures.keep_rows(most);
                process.current.raise_to(figures);
            }
            Err(error) => self.end(pid, Some(error)),
        }
    }

    /// A process is observed no more.
    fn end(&mut self, pid: i32, error: Option<Error>) {
        let messages = self.messages(pid);
        let process = self.each.get_mut(&pid);
        let Some((id, process)) = process.and_then(|it| Some((it.observed.as_ref()?.id, it)))
        else {
            return;
        };
        let observed = process.close(&self.bounds);
        let (mut is_replaced_now, mut may_have_executed) = (false, false);
        match error {
            Some(error) if exit_or_exec(&error).is_none() => {
                is_replaced_now = error.is_replaced();
                let failure = Failure::of_process(pid)(error);
                process.refused = Some(failure.kind());
                messages.failure(&failure);
                if let (false, Some(observed)) = (is_replaced_now, observed) {
                    self.unremoved.push(Unremoved::of(observed));
                    self.forget_some();
                    return;
                }
            }
            error => {
                may_have_executed = error.as_ref().is_none_or(Error::is_exec);
                let how = error.as_ref().and_then(exit_or_exec);
                let how = how.unwrap_or(NO_MORE_EVENTS);
                messages.note(&format!("{} {how}", process.program));
                process.gone_since = Some(Instant::now());
            }
        }
        self.tell_scanner(Ended::Observation {
            id,
            is_replaced: is_replaced_now,
            may_have_executed,
        });
        self.forget_some();
    }

    /// If too many processes are shown that are not observed, or too many rows, forgets the ones that exited earliest
    /// or, if none has, those that are refused.
    fn forget_some(&mut self) {
        loop {
            let is_too_many = self.each.len() - self.observed() > MAX_OTHERS;
            let rows: usize = self.each.values().map(ServedProcess::rows).sum();
            if !is_too_many && rows <= MAX_ROWS {
                return;
            }
            let others = self.each.iter().filter(|(_, it)| it.observed.is_none());
            let others = others.filter(|(_, it)| is_too_many || it.rows() > 0);
            let oldest = others.min_by_key(|(_, it)| (it.gone_since.is_none(), it.gone_since));
            let Some(pid) = oldest.map(|(pid, _)| *pid) else {
                return;
            };
            let forgotten = self.each.remove(&pid);
            if forgotten.is_some_and(|it| it.refused.is_some()) {
                self.add_unshown(pid);
            }
        }
    }

    /// Notes that a process is refused and not shown; warns of the first.
    fn add_unshown(&mut self, pid: i32) {
        if self.unshown.is_empty() {
            self.messages.warning(
                WarningKind::LeftOut,
                &format!("more than {MAX_OTHERS} processes are refused: the metrics name no more"),
                "select fewer by -name; ocaml_probes_unshown_processes is the number of the others",
            );
        }
        self.unshown.insert(pid);
    }

    /// How many processes are refused and not shown.
    pub(super) fn unshown(&self) -> usize {
        self.unshown.len()
    }

    /// All processes, with what is read only to be shown.
    pub(super) fn shown(&mut self) -> Vec<ShownProcess> {
        let mut shown = Vec::new();
        for (pid, process) in &mut self.each {
            let mut figures = process.earlier.clone();
            figures.add(&process.current);
            let observed = process.observed.as_mut();
            let messages = self.messages.about_one(*pid, self.is_single);
            let details = observed.map(|it| it.details(&process.current, &messages));
            let details = details.unwrap_or_default();
            let reads_events = process.observed.as_ref().map(Observed::reads_events);
            shown.push(ShownProcess {
                pid: *pid,
                program: process.program.clone(),
                is_observed: process.observed.is_some(),
                refused: process.refused.clone(),
                figures,
                states: details.states,
                stopped: process.stopped,
                discarded: details.discarded,
                refused_functions: details.refused_functions,
                left_out: process.left_out,
                missing: match process.observed {
                    Some(_) => process.missing.clone(),
                    None => BTreeMap::new(),
                },
                collector: reads_events.filter(|_| self.wants_events),
            });
        }
        shown
    }

    /// Removes the instrumentation from all processes.
    pub(super) fn remove_instrumentation(
        &mut self,
        signals: &TerminationSignals,
    ) -> Result<(), Failure> {
        let (mut failed, mut total) = (0, 0);
        let each = self.each.values_mut().filter_map(|it| it.observed.as_mut());
        let unremoved = self.unremoved.iter_mut().map(|it| &mut it.observed);
        for observed in each.chain(unremoved) {
            total += 1;
            let pid = observed.target.pid();
            let messages = self.messages.about_one(pid, self.is_single);
            if let Err(failure) = observed.remove(signals, &messages) {
                if self.is_single {
                    return Err(failure);
                }
                failed += 1;
                messages.failure(&failure);
            }
        }
        if failed == 0 {
            return Ok(());
        }
        let outcome = if failed < total { OTHERS } else { "" };
        Err(Failure::Several {
            failed,
            total,
            outcome,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;

    fn none() -> Processes {
        let (ends, _) = channel();
        Processes::new(ends, Vec::new(), true, false, Messages::default())
    }

    #[test]
    fn rows_of_exited_processes_are_limited() {
        let mut processes = none();
        let rows = (0..MAX_ROWS * 2 / 3).map(|row| (row.to_string(), 1));
        let figures = ProcessFigures {
            hits: rows.collect(),
            ..ProcessFigures::default()
        };
        for pid in [3, 2, 4] {
            let exited = ServedProcess {
                gone_since: Some(Instant::now()),
                earlier: figures.clone(),
                ..ServedProcess::default()
            };
            processes.each.insert(pid, exited);
            processes.forget_some();
            assert_eq!(processes.each.keys().collect::<Vec<_>>(), [&pid]);
        }
        // A process without rows takes no room from others.
        let refused = ServedProcess {
            refused: Some("denied".to_owned()),
            ..ServedProcess::default()
        };
        processes.each.insert(5, refused);
        processes.forget_some();
        assert_eq!(processes.each.len(), 2);
    }

    #[test]
    fn refused_processes_that_are_not_shown_are_counted() {
        let mut processes = none();
        let refuse = |processes: &mut Processes, pid| {
            let failure = Failure::TooManyProcesses(1);
            processes.refuse(pid, "server".to_owned(), failure);
        };
        let most = MAX_OTHERS as i32;
        for pid in 1..=most + 3 {
            refuse(&mut processes, pid);
        }
        assert_eq!((processes.each.len(), processes.unshown()), (MAX_OTHERS, 3));
        // Some that is not shown exits, and some is refused anew, for which another one is not shown.
        let [gone, again] = [0, 1].map(|at| *processes.unshown.iter().nth(at).unwrap());
        processes.forget(gone);
        refuse(&mut processes, again);
        assert_eq!((processes.each.len(), processes.unshown()), (MAX_OTHERS, 2));
    }

    #[test]
    fn heap_is_forgotten_with_the_events() {
        let collector = |heap| CollectorTotals {
            allocated: 8,
            heap: Some(heap),
            ..CollectorTotals::default()
        };
        for last in [None, Some(collector(3))] {
            let mut process = ServedProcess::default();
            process.current.collector = Some(collector(1));
            process.earlier.collector = Some(collector(2));
            process.end_events(last);
            process.earlier.add(&process.current);
            let all = process.earlier.collector.unwrap();
            assert_eq!((all.allocated, all.heap), (16, None));
        }
    }
}
