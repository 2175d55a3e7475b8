//! [`Profiler`] looks at the threads of its process: which there are, what each does, and whether their program is still the same.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::Profiler;
use super::activity::Activity;
use super::samples::{RanUntilStop, SwitchesBefore};
use super::threads::{ProfiledThread, ThreadCounts};
use super::time_sums::ProfileKey;
use crate::error::{Error, ProcessError, Result};
use crate::stacks::{
    LONGEST_STOP, Look, Stacks, SwitchCounts, ThreadFiles, files_pause, monotonic_now,
};
use crate::unwind::RawStack;

/// How often it is checked whether the process has exec'd another program.
pub(super) const CHECK_INTERVAL: Duration = Duration::from_millis(500);

/// Exited threads are forgotten if more threads are known from the kernel's records than this, and two for each one that there is.
const MAX_EXITED: usize = 1 << 10;

/// How often, at most, it is checked whether libraries were loaded; only if there is code that is not known.
const RELOAD_INTERVAL: Duration = Duration::from_millis(20);

/// When to look for the domain of a thread again, for the first time; then after twice as long each time. The runtime sets it
/// once the thread has begun.
const FIRST_RETRY: Duration = Duration::from_millis(5);

/// Of how many threads the domains are kept.
const MAX_DOMAINS_KEPT: usize = 1 << 16;

/// What a look at the threads that run has found.
struct LookAtRunning {
    /// When they were stopped for it, if they were.
    stopped_at: Option<Duration>,
    /// Whether one of them worked for the collector; `None` if that is not known.
    in_collection: Option<bool>,
}

impl Profiler {
    /// Adds the time `elapsed` before `due` to what the threads do.
    pub(super) fn look_at_all(&mut self, elapsed: Duration, due: Instant) -> Result<()> {
        let now = Instant::now();
        let due_at = monotonic_now().saturating_sub(due.elapsed());
        self.due_at = due_at;
        let process = self.stacks.process().clone();
        let tids = process.threads().and_then(|mut list| list.read());
        let tids = tids.map_err(|source| process.exited_or(source))?;
        self.forget_exited(&tids.iter().copied().collect());
        let mut running = HashSet::new();
        let mut seen = Vec::new();
        for tid in tids {
            if let Some(recorded) = self.recorded.as_mut().filter(|_| !self.is_begun) {
                recorded.waits.add_existing(tid);
            }
            match self.look_at(tid, now)? {
                Some((key, _)) if key.activity == Activity::Running => {
                    running.insert(tid);
                }
                Some(found) => {
                    self.estimate_off(tid, elapsed);
                    seen.push(found);
                }
                None => self.forget(tid),
            }
        }
        // If threads start each other and exit, all that a list of them names may be gone when they are looked at.
        if running.is_empty() && seen.is_empty() && process.has_exited() {
            return Err(process.exited_or(nix::errno::Errno::ESRCH.into()));
        }
        let mut read_at = monotonic_now();
        let is_sampled_by_kernel = self.clock_samples().is_some();
        let mut in_collection = None;
        if !elapsed.is_zero() && !is_sampled_by_kernel {
            let waiting = seen.iter().filter_map(|(key, _)| key.stack.as_deref());
            let is_collecting = waiting.into_iter().any(|stack| self.is_of_collector(stack));
            let look = self.look_at_running(&running, &mut seen);
            read_at = look.stopped_at.unwrap_or(read_at);
            let found = if is_collecting {
                Some(true)
            } else {
                look.in_collection
            };
            in_collection = found.filter(|_| !self.collector.is_empty());
        }
        let is_unknown = |key: &ProfileKey| {
            let stack = key.stack.as_ref();
            stack.is_some_and(|stack| stack.end.may_be_loaded_since())
        };
        if seen.iter().any(|(key, _)| is_unknown(key)) {
            self.reload(now)?;
        }
        self.sampled_at = due;
        if elapsed.is_zero() {
            // It was only looked at, to know what each thread waits in from now on.
            return Ok(());
        }
        // If switches are not recorded, threads that wait for a processor are among those that run.
        let is_running = |key: &ProfileKey| key.activity == Activity::Running;
        let running_count = seen.iter().filter(|(key, _)| is_running(key)).count();
        let max_time = self.sums.process.not_sampled()
            / u32::try_from(running_count.max(1)).unwrap_or(u32::MAX);
        for (mut key, since) in seen {
            key.in_collection = in_collection;
            match &mut self.recorded {
                None => self
                    .sums
                    .add_sample(key, (elapsed, max_time), since.is_some()),
                Some(_) if is_sampled_by_kernel => {}
                // It has waited all the time since before the sample was due.
                Some(_) if since.is_some_and(|since| since <= due_at) => {}
                Some(recorded) => recorded
                    .samples
                    .add(key.tid, (due_at, read_at), key, elapsed),
            }
        }
        Ok(())
    }

    /// If waits are not recorded, adds the time that a new thread waited before the first look at it. The sample stands
    /// for the time `elapsed`, in which there were such threads, seen or not.
    pub(super) fn estimate_off(&mut self, tid: i32, elapsed: Duration) {
        let thread = self.threads.get(&tid);
        let is_first =
            thread.is_some_and(|it| it.is_new && it.first.is_some() && it.first == it.last);
        if is_first && self.recorded.is_none() {
            self.exited.off = self.exited.off.saturating_add(elapsed);
            self.off_variance += elapsed.as_secs_f64().powi(2);
        }
    }

    /// Returns whether a thread with this stack works for the collector.
    fn is_of_collector(&self, stack: &RawStack) -> bool {
        let mut addresses = stack.frames.iter().map(|frame| frame.within.0);
        !self.collector.is_empty()
            && addresses.any(|at| self.collector.iter().any(|code| code.contains(&at)))
    }

    /// Looks for the domain of a thread, if it is time to.
    pub(super) fn try_domain(&mut self, tid: i32, now: Instant) {
        let Some(thread) = self.threads.get_mut(&tid) else {
            return;
        };
        let due = thread.domain_attempt.filter(|(next, _)| *next <= now);
        let Some((_, pause)) = due else {
            return;
        };
        thread.domain_attempt = Some((now + pause, pause.saturating_mul(2)));
        if let Some(domain) = self.stacks.domain(tid) {
            thread.domain_attempt = None;
            if self.domains.len() < MAX_DOMAINS_KEPT {
                self.domains.insert((tid, thread.name.clone()), domain);
            }
        }
    }

    /// Opens the files of a thread that was not known; returns whether it is still there.
    pub(super) fn watch(&mut self, tid: i32, now: Instant) -> Result<bool> {
        let Some(files) = ThreadFiles::open(self.stacks.process(), tid)? else {
            return Ok(false);
        };
        let watched = ProfiledThread {
            name: files.name().into(),
            files: Some(files),
            domain_attempt: self.stacks.knows_domains().then_some((now, FIRST_RETRY)),
            blocked: None,
            switches: None,
            is_new: self.is_begun,
            first: None,
            last: None,
            waited_after_last: Duration::ZERO,
        };
        self.threads.insert(tid, watched);
        Ok(true)
    }

    /// Looks at a thread without stopping it; `None` if it has exited. If it has not run since the last look, also
    /// returns since when it is known to wait.
    pub(super) fn look_at(
        &mut self,
        tid: i32,
        now: Instant,
    ) -> Result<Option<(ProfileKey, Option<Duration>)>> {
        if !self.threads.contains_key(&tid) && !self.watch(tid, now)? {
            return Ok(None);
        }
        self.try_domain(tid, now);
        let is_many = self.threads.len() > self.max_open;
        let Some(thread) = self.threads.get_mut(&tid) else {
            return Ok(None);
        };
        let mut opened = None;
        if thread.files.is_none() {
            opened = ThreadFiles::open(self.stacks.process(), tid)?;
            if !is_many {
                thread.files = opened.take();
            }
        }
        let Some(files) = thread.files.as_ref().or(opened.as_ref()) else {
            return Ok(None);
        };
        let looked_at = monotonic_now();
        let Some(slices) = files.slices()? else {
            return Ok(None);
        };
        // Samples of all threads are of one moment, however long it takes to look at them.
        let at = self.recorded.as_ref().map_or(self.due_at, |_| looked_at);
        let counts = ThreadCounts::of(&slices, at);
        self.is_counted |= counts.is_some();
        thread.first = thread.first.or(counts);
        thread.last = counts;
        thread.waited_after_last = Duration::ZERO;
        if let Some((key, since)) = thread.still_blocked(&slices) {
            if let Some(recorded) = &mut self.recorded {
                recorded.waits.extend_look(tid, looked_at);
            }
            return Ok(Some((key.clone(), Some(since))));
        }
        thread.blocked = None;
        if self.recorded.is_none() && !self.is_live {
            let counts = SwitchCounts::of_thread(self.stacks.process(), tid);
            thread.switches = counts.map(|counts| SwitchesBefore::new(counts, thread.switches));
        }
        let mut key = ProfileKey::running(tid, thread.name.clone(), self.unloaded.unloads());
        match self.stacks.look(files, slices, false)? {
            Look::Exited => return Ok(None),
            Look::Running => {}
            Look::Blocked(blocked) => {
                key.activity = Activity::of(&blocked.state);
                key.stack = Some(blocked.stack);
                if let Some(recorded) = &mut self.recorded {
                    recorded.waits.looked(tid, blocked.at, key.clone());
                }
                thread.blocked = Some((blocked.slices, key.clone(), blocked.at));
            }
        }
        if is_many {
            thread.files = None;
        }
        Ok(Some((key, None)))
    }

    /// Adds what the threads do that run.
    fn look_at_running(
        &mut self,
        running: &HashSet<i32>,
        seen: &mut Vec<(ProfileKey, Option<Duration>)>,
    ) -> LookAtRunning {
        let mut stacks = HashMap::new();
        let (mut switches, mut system_calls) = (HashMap::new(), HashMap::new());
        let mut stopped_at = None;
        self.last_stop_time = Duration::ZERO;
        if !self.is_live && !running.is_empty() {
            let begun = monotonic_now();
            let counts_switches = self.recorded.is_none();
            let read = self
                .stacks
                .read_stopped(running, counts_switches, LONGEST_STOP);
            let stop = match read {
                // Threads for which there was no time are in the sample without a stack.
                Ok(read) => {
                    let time = read.time();
                    stacks = read.stacks;
                    (switches, system_calls) = (read.switches, read.system_calls);
                    self.stops += 1;
                    self.stopped += time;
                    self.last_stop_time = time;
                    stopped_at = Some(read.stop.start);
                    read.stop
                }
                Err(error) => {
                    // If it has exited, that is the end of the profile.
                    if !error.is_gone() {
                        self.not_stopped = Some(error);
                    }
                    begun..monotonic_now()
                }
            };
            if let Some(recorded) = &mut self.recorded {
                recorded.stops.push(stop);
            }
        }
        let is_collecting = stacks.values().any(|stack| self.is_of_collector(stack));
        // Where a thread ran that waits again may have been in the collector.
        let mut are_known = true;
        for &tid in running {
            let is_read = stacks.contains_key(&tid);
            let Some(thread) = self.threads.get_mut(&tid) else {
                are_known &= is_read;
                continue;
            };
            let is_in_call = system_calls.contains_key(&tid);
            let ran = match (&mut thread.switches, switches.get(&tid)) {
                (Some(before), Some(stopped)) => before.until_stop(*stopped, is_in_call),
                _ => RanUntilStop::Yes,
            };
            are_known &= is_read && ran != RanUntilStop::Waited;
            let stack = match ran {
                RanUntilStop::Yes => stacks.remove(&tid),
                RanUntilStop::Waited => None,
                // It is in no sample.
                RanUntilStop::Woken => continue,
            };
            let key = ProfileKey {
                stack: stack.map(Arc::new),
                ..ProfileKey::running(tid, thread.name.clone(), self.unloaded.unloads())
            };
            seen.push((key, None));
        }
        let in_collection = (is_collecting || are_known).then_some(is_collecting);
        LookAtRunning {
            stopped_at,
            in_collection,
        }
    }

    /// Forgets a thread that has exited; its times stay.
    pub(super) fn forget(&mut self, tid: i32) {
        let Some(thread) = self.threads.remove(&tid) else {
            return;
        };
        self.exited.add(thread.times());
        if let (Some(recorded), Some(looks)) = (&mut self.recorded, thread.looks()) {
            recorded.looks_at_exited.insert(tid, looks);
        }
    }

    /// Forgets the threads that have exited; their times stay.
    pub(super) fn forget_exited(&mut self, there: &HashSet<i32>) {
        let tids = self.threads.keys().copied();
        let ended: Vec<i32> = tids.filter(|tid| !there.contains(tid)).collect();
        for tid in ended {
            self.forget(tid);
        }
        // The kernel records the end of a thread, but such records may be lost, too.
        if let Some(recorded) = &mut self.recorded {
            let known = recorded.waits.len().max(recorded.switches.len());
            if known > 2 * there.len() + MAX_EXITED {
                recorded.waits.retain(|tid| there.contains(&tid));
                recorded.switches.retain(|tid| there.contains(&tid));
            }
            if recorded.looks_at_exited.len() > MAX_EXITED {
                let recent = monotonic_now().saturating_sub(CHECK_INTERVAL);
                recorded
                    .looks_at_exited
                    .retain(|_, looks| looks.end > recent);
            }
        }
    }

    /// Forgets the threads that are not there any more.
    pub(super) fn forget_gone(&mut self) -> Result<()> {
        let process = self.stacks.process();
        let tids = process.threads().and_then(|mut list| list.read());
        let tids = tids.map_err(|source| process.exited_or(source))?;
        self.forget_exited(&tids.into_iter().collect());
        Ok(())
    }

    /// Checks whether the process has exec'd another program, if it is time to.
    pub(super) fn check_program(&mut self, now: Instant) -> Result<()> {
        if now.saturating_duration_since(self.checked_at) < CHECK_INTERVAL {
            return Ok(());
        }
        self.checked_at = now;
        self.refuse_executed()?;
        if self.next_files_check <= now {
            let begun = Instant::now();
            self.reload(now)?;
            self.next_files_check = now + files_pause(begun.elapsed());
        }
        Ok(())
    }

    pub(super) fn refuse_executed(&self) -> Result<()> {
        if !self.stacks.has_executed() {
            return Ok(());
        }
        let pid = self.stacks.pid();
        Err(Error::of_process(pid, ProcessError::Executed))
    }

    /// Reads the files of the process again if it has loaded some since, and looks for what observers have mapped.
    pub(super) fn reload(&mut self, now: Instant) -> Result<()> {
        if now.saturating_duration_since(self.reloaded_at) < RELOAD_INTERVAL {
            return Ok(());
        }
        self.reloaded_at = now;
        self.refuse_executed()?;
        if !self.stacks.has_loaded_more() {
            self.stacks.find_trampolines();
            return Ok(());
        }
        let again = Stacks::of_process(self.stacks.pid())?;
        // It may have executed another program while the files were read. Only the stacks that were read before can tell.
        self.refuse_executed()?;
        let has_unloaded = self.stacks.has_unloaded(&again);
        let before = std::mem::replace(&mut self.stacks, again);
        if has_unloaded {
            let by_kernel = self.recorded.as_ref();
            let by_kernel = by_kernel.and_then(|it| it.beside_stops.as_ref());
            let sums = std::iter::once(&self.sums).chain(by_kernel);
            let found = sums.flat_map(|sums| sums.by_key.keys());
            self.unloaded.add(before, found);
        }
        if !self.collector.is_empty() {
            self.collector = self.stacks.code_of_collector()?;
        }
        for thread in self.threads.values_mut() {
            thread.blocked = None;
        }
        Ok(())
    }
}
