//! [`Sessions`]: the processes that `top` shows, one or several, as one table.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::time::{Duration, Instant};

use probes_lib::{Latency, LiveAddr, Observation, Options, ProbeStates, State};

use super::model::NewRow;
use super::session::{Reading, Session};
use crate::commands::forked_processes::{
    ForkedProcesses, ObservedAncestor, warn_of_late_start, without_take_over,
};
use crate::commands::gaps::Gaps;
use crate::failure::{Failure, exit_or_exec};
use crate::messages::Messages;
use crate::text::{join_first_few, number_of};

/// The sessions of all processes.
pub(super) struct Sessions {
    each: Vec<ProcessSession>,
    /// Whether each process has rows of its own.
    by_pid: bool,
    begun: Instant,
    /// The functions, in the order of their figures in samples.
    functions: Vec<NewRow>,
    /// The index in `functions` of the n-th function of a process with a name, by that name and n.
    function_indices: HashMap<(String, usize), usize>,
    following: Option<Following>,
}

/// How the processes that the observed ones fork are observed.
struct Following {
    forked: ForkedProcesses,
    observation: Observation,
    options: Options,
    /// How many are observed.
    joined: usize,
    /// The processes that could not be observed.
    failed: Vec<(i32, Failure)>,
    /// The processes whose hits and times until they were found are missing, each with the process that has forked
    /// it.
    late: Vec<(i32, i32)>,
    /// How many have no row: each process has rows of its own, and these were found after the screen was set up.
    without_row: usize,
}

/// The session of a process, and what was read in it.
struct ProcessSession {
    session: Session,
    /// What was read last.
    last: Option<Reading>,
    /// The indices in [`Sessions::functions`] of its functions, in the order of its readings; `None` before the first.
    function_rows: Option<Vec<usize>>,
    /// Whether it cannot be read any more.
    has_ended: bool,
}

impl ProcessSession {
    fn of(session: Session) -> ProcessSession {
        ProcessSession {
            session,
            last: None,
            function_rows: None,
            has_ended: false,
        }
    }

    fn as_ancestor(&self) -> Option<ObservedAncestor<'_>> {
        Some(ObservedAncestor {
            target: self.session.target(),
            observer: self.session.observer()?,
            has_ended: self.has_ended,
        })
    }
}

/// The figures of all processes from the beginning.
pub(super) struct TotalReading {
    probes: HashMap<String, u64>,
    /// In the order of [`Sessions::functions`].
    pub(super) functions: Vec<u64>,
    /// See [`Counts::total_untyped`](probes_lib::Counts::total_untyped).
    pub(super) untyped: Option<u64>,
    /// Of each pair, with the process if each has rows of its own.
    pub(super) latencies: Vec<(Option<i32>, Latency)>,
    /// How long the observation has run.
    pub(super) at: Duration,
}

impl TotalReading {
    /// Returns the hits of the probe in a row.
    pub(super) fn hits(&self, row: &str) -> Option<u64> {
        self.probes.get(row).copied()
    }
}

impl Sessions {
    pub(super) fn new(sessions: Vec<Session>, by_pid: bool) -> Sessions {
        Sessions {
            each: sessions.into_iter().map(ProcessSession::of).collect(),
            by_pid,
            begun: Instant::now(),
            functions: Vec::new(),
            function_indices: HashMap::new(),
            following: None,
        }
    }

    /// Observes processes that the observed ones have forked, too: those that are there now, and from now on.
    pub(super) fn follow(&mut self, observation: Observation, options: Options) {
        self.following = Some(Following {
            forked: ForkedProcesses::default(),
            observation,
            options: without_take_over(options),
            joined: 0,
            failed: Vec::new(),
            late: Vec::new(),
            without_row: 0,
        });
        self.observe_forked();
    }

    /// Begins to observe processes that the observed ones have forked, if that is asked for and it is time.
    fn observe_forked(&mut self) {
        let Some(following) = &mut self.following else {
            return;
        };
        for one in self.each.iter_mut().filter(|one| one.has_ended) {
            one.session.close_if_reaped();
        }
        let parents = self.each.iter().filter_map(ProcessSession::as_ancestor);
        let mut joining = Vec::new();
        for it in following.forked.find(parents) {
            let parent = &self.each[it.parent].session;
            let child = parent.target().open_forked(it.pid);
            let begin = |child| Session::begin(&child, &following.observation, following.options);
            match child.and_then(begin) {
                Ok(session) => {
                    if self.by_pid && !it.existed_before {
                        following.without_row += 1;
                    }
                    if it.is_late {
                        following.late.push((it.pid, parent.pid()));
                    }
                    following.joined += 1;
                    joining.push(session);
                }
                Err(error) if exit_or_exec(&error).is_some() => {}
                Err(error) => {
                    let failure = Failure::of_process(it.pid)(error);
                    following.failed.push((it.pid, failure));
                }
            }
        }
        self.each
            .extend(joining.into_iter().map(ProcessSession::of));
    }

    /// Warns of what is missing of forked processes, and restores those whose hits were recorded with a process that
    /// has exited. Returns why some could not be observed, or restored.
    pub(super) fn end_following(
        &mut self,
        messages: impl Fn(i32) -> Messages,
    ) -> Vec<(i32, Failure)> {
        let Some(following) = self.following.take() else {
            return Vec::new();
        };
        for &(pid, parent) in &following.late {
            warn_of_late_start(&messages(pid), pid, parent);
        }
        let observed = self.each.iter().filter_map(ProcessSession::as_ancestor);
        let restored = following.forked.restore(observed);
        let unrestored = restored.into_iter();
        let unrestored = unrestored.map(|(pid, error)| (pid, Failure::of_removal(pid, error)));
        following.failed.into_iter().chain(unrestored).collect()
    }

    /// The forked processes that are observed by themselves.
    pub(super) fn observed_separately(&self) -> HashSet<i32> {
        let following = self.following.as_ref();
        following.map_or_else(HashSet::new, |it| it.forked.observed_separately().clone())
    }

    /// How many forked processes were observed by themselves.
    pub(super) fn joined(&self) -> usize {
        self.following.as_ref().map_or(0, |it| it.joined)
    }

    /// Returns the sessions, in the order in which they began.
    pub(super) fn each_mut(&mut self) -> impl Iterator<Item = &mut Session> {
        self.each.iter_mut().map(|one| &mut one.session)
    }

    /// Returns the processes, each with whether it has ended.
    pub(super) fn processes(&self) -> Vec<(i32, bool)> {
        let each = self.each.iter();
        each.map(|one| (one.session.pid(), one.has_ended)).collect()
    }

    /// Returns the names of the rows of probes, and the rows of functions with their addresses in the first process;
    /// the address is 0 if that has no such function.
    pub(super) fn rows(&mut self) -> (Vec<String>, Vec<NewRow>) {
        self.read();
        let mut probes = Vec::new();
        for one in &self.each {
            let pid = one.session.pid();
            let counts = one.last.iter().map(|last| &last.counts);
            let names = counts.flat_map(|counts| counts.probes());
            probes.extend(names.map(|(name, _)| row(self.by_pid, pid, name)));
        }
        probes.sort();
        probes.dedup();
        (probes, self.functions.clone())
    }

    /// Reads each process; what was read last of one that can be read no more is kept.
    fn read(&mut self) {
        for one in self.each.iter_mut().filter(|one| !one.has_ended) {
            match one.session.sample() {
                Some(reading) => one.last = Some(reading),
                None => one.has_ended = true,
            }
        }
        self.find_function_rows();
    }

    /// Finds the rows of the functions of processes that were read for the first time.
    fn find_function_rows(&mut self) {
        for (index, one) in self.each.iter_mut().enumerate() {
            let pid = one.session.pid();
            let (Some(Reading { counts, .. }), None) = (&one.last, &one.function_rows) else {
                continue;
            };
            let mut rows = Vec::new();
            let mut namesakes: HashMap<String, usize> = HashMap::new();
            for function in counts.functions() {
                let name = row(self.by_pid, pid, function.name);
                let number = namesakes.entry(name.clone()).or_default();
                *number += 1;
                let functions = &mut self.functions;
                let known = self.function_indices.entry((name.clone(), *number));
                rows.push(*known.or_insert_with(|| {
                    let address = if index == 0 {
                        function.address
                    } else {
                        LiveAddr(0)
                    };
                    functions.push(NewRow {
                        name,
                        address,
                        is_usdt: function.is_usdt,
                    });
                    functions.len() - 1
                }));
            }
            one.function_rows = Some(rows);
        }
    }

    /// Reads the figures so far; `None` if all processes have exited or exec'd, or other tools have replaced this
    /// one.
    pub(super) fn sample(&mut self) -> Option<TotalReading> {
        self.read();
        // Afterwards: if a process has just exited, what it has forked is observed from now on.
        self.observe_forked();
        if self.each.iter().all(|one| one.has_ended) {
            return None;
        }
        Some(self.sum())
    }

    /// Returns the figures that were read last.
    pub(super) fn sum(&self) -> TotalReading {
        let mut sample = TotalReading {
            probes: HashMap::new(),
            functions: vec![0; self.functions.len()],
            untyped: None,
            latencies: Vec::new(),
            at: self.begun.elapsed(),
        };
        let mut latencies: Vec<&[Latency]> = Vec::new();
        for one in &self.each {
            let pid = one.session.pid();
            let Some(reading) = &one.last else {
                continue;
            };
            for (name, hits) in reading.counts.probes() {
                let sum = sample.probes.entry(row(self.by_pid, pid, name));
                let sum = sum.or_default();
                *sum = sum.saturating_add(hits);
            }
            let rows = one.function_rows.iter().flatten();
            for (index, function) in rows.zip(reading.counts.functions()) {
                let sum = &mut sample.functions[*index];
                *sum = sum.saturating_add(function.hits);
            }
            let untyped = [sample.untyped, reading.counts.total_untyped()];
            sample.untyped = untyped.into_iter().flatten().reduce(u64::saturating_add);
            if self.by_pid {
                let own = reading.latencies.iter().cloned();
                sample.latencies.extend(own.map(|it| (Some(pid), it)));
            } else {
                latencies.push(&reading.latencies);
            }
        }
        let together = Latency::of_processes(latencies).into_iter();
        sample.latencies.extend(together.map(|it| (None, it)));
        sample
    }

    /// What the observations miss, as far as is known.
    pub(super) fn gaps(&self) -> Gaps {
        let each = self.each.iter().filter(|one| !one.has_ended);
        let observers = each.filter_map(|one| one.session.observer());
        Gaps::of_all(observers).without_separate(&self.observed_separately())
    }

    /// What is wrong with the figures, if anything is.
    pub(super) fn caution(&self) -> Option<String> {
        let following = self.following.as_ref();
        let (late, without_row) = following.map_or((0, 0), |it| (it.late.len(), it.without_row));
        let about = |many, what| {
            let processes = number_of(many, "forked process");
            (many > 0).then(|| format!("{what} {processes}"))
        };
        let late = about(late, "hits and times until they were found are missing of");
        let without_row = about(without_row, "no row has the hits from then on of");
        let cautions = self
            .gaps()
            .caution()
            .into_iter()
            .chain(late)
            .chain(without_row);
        cautions.reduce(|all, next| format!("{all}; {next}"))
    }

    /// Returns the states of the probes, by their rows, as far as they can be read now. A probe whose state differs
    /// between processes is inconsistent.
    pub(super) fn states(&self, rows: &[String]) -> BTreeMap<String, State> {
        let each = self.each.iter().filter(|one| !one.has_ended);
        let each = each.filter_map(|one| Some((one.session.pid(), one.session.states()?)));
        let each: Vec<(i32, ProbeStates)> = each.collect();
        let state = |row: &String| {
            let (of, name) = self.meant(row);
            let each = each
                .iter()
                .filter(|(pid, _)| of.is_none_or(|of| of == *pid));
            let mut states = each.filter_map(|(_, states)| Some(states.probe(name)?.state()));
            let first = states.next()?;
            let is_same = states.all(|state| state == first);
            let state = if is_same { first } else { State::Inconsistent };
            Some((row.clone(), state))
        };
        rows.iter().filter_map(state).collect()
    }

    /// Switches the probe in a row, in all processes that have it; returns what is said of it.
    pub(super) fn switch(&mut self, row: &str, on: bool) -> String {
        let (of, name) = self.meant(row);
        let (of, name) = (of, name.to_owned());
        let is_one = self.each.len() == 1;
        let mut said = Vec::new();
        let mut ended = Vec::new();
        let mut switched: Vec<((u16, u16), usize)> = Vec::new();
        for one in &mut self.each {
            let session = &mut one.session;
            let is_meant = of.is_none_or(|of| of == session.pid());
            let counts = one.last.as_ref().map(|last| &last.counts);
            let has_it = is_one || counts.is_some_and(|counts| counts.hits(&name).is_some());
            if !is_meant || !has_it {
                continue;
            }
            if one.has_ended {
                ended.push(session.pid().to_string());
                continue;
            }
            match session.switch(&name, on) {
                Ok(counters) => match switched.iter_mut().find(|(it, _)| *it == counters) {
                    Some((_, many)) => *many += 1,
                    None => switched.push((counters, 1)),
                },
                Err(error) if is_one => said.push(error.to_string()),
                Err(error) => said.push(format!("process {}: {error}", session.pid())),
            }
        }
        let changes = switched.into_iter().map(|((before, after), many)| {
            let others = if !on && after > 0 {
                ": still enabled, because others have enabled it too"
            } else {
                ""
            };
            let processes = match many {
                1 if is_one || of.is_some() => String::new(),
                1 => " in 1 process".to_owned(),
                many => format!(" in {many} processes"),
            };
            format!("{name} {before} -> {after}{processes}{others}")
        });
        let said: Vec<String> = changes.chain(said).collect();
        match (join_first_few(&ended), &ended[..]) {
            (Some(pid), [_]) if said.is_empty() => {
                format!("process {pid} is not read any more: {name} was not switched")
            }
            (Some(pids), _) if said.is_empty() => {
                format!("processes {pids} are not read any more: {name} was not switched")
            }
            _ => said.join("; "),
        }
    }

    /// Returns the process and the name that a row is about; no process means all of them.
    fn meant<'r>(&self, row: &'r str) -> (Option<i32>, &'r str) {
        let split = row.split_once(' ').filter(|_| self.by_pid);
        let split = split.and_then(|(pid, name)| Some((pid.parse().ok()?, name)));
        split.map_or((None, row), |(pid, name)| (Some(pid), name))
    }
}

/// Returns the name of a row.
fn row(by_pid: bool, pid: i32, name: &str) -> String {
    if by_pid {
        format!("{pid} {name}")
    } else {
        name.to_owned()
    }
}
