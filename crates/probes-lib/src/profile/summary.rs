//! [`Profiler`] adds up what it has found: the times of each stack.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use super::Profiler;
use super::activity::Activity;
use super::answer::{Profile, ProfiledStack, RunningMethod, ThreadTimes, WaitMethod};
use super::time_sums::{self, ProfileKey, Sum, TimeSums};
use crate::stacks::{StackFrame, ThreadRole};

/// How long a switch takes at most.
const MAX_SWITCH_COST: Duration = Duration::from_micros(20);

impl Profiler {
    /// Returns what was found so far.
    pub fn profile(&mut self) -> Profile {
        self.collect(true);
        let stacks = self.profiled_stacks();
        let tids: HashSet<i32> = self.sums.by_key.keys().map(|key| key.tid).collect();
        let recorded = self.recorded.as_ref();
        let sums = self.sums_by_kernel().unwrap_or(&self.sums);
        let times = ThreadTimes {
            running: self.sums.process.running(),
            ..self.thread_times()
        };
        Profile {
            stacks,
            seconds: self.ended.saturating_sub(self.begun),
            samples: self.samples,
            threads: recorded.map_or(tids.len(), |it| it.waits.thread_count),
            times: self.is_counted.then_some(times),
            off_variance: self.off_variance,
            not_sampled: sums.process.not_sampled(),
            stops: self.stops,
            stopped: self.stopped,
            not_stopped: self.not_stopped.as_ref().map(ToString::to_string),
            waits: self.wait_method(),
            running: self.running_method(),
            unseen_excess: recorded.map_or(Duration::ZERO, |it| it.unseen_excess),
        }
    }

    /// Returns the stacks that have a time: most time first, then by thread, and always in the same order.
    fn profiled_stacks(&mut self) -> Vec<ProfiledStack> {
        let switch_cost = self.switch_cost(&self.thread_times());
        let are_by_kernel = self.sums_by_kernel().is_some();
        let recorded = self.recorded.as_ref().filter(|_| are_by_kernel);
        let by_kernel = recorded.and_then(|it| it.beside_stops.as_ref());
        let is_shown = |key: &ProfileKey| !are_by_kernel || key.activity != Activity::Running;
        let shown = self.sums.by_key.iter().filter(|(key, _)| is_shown(key));
        let names = self.sums.names();
        let mut stacks = Vec::new();
        for (key, sum) in shown.chain(by_kernel.iter().flat_map(|it| &it.by_key)) {
            if sum.time.is_zero() {
                continue;
            }
            let name = time_sums::name_of(key, &names);
            let domain = self.domains.get(&(key.tid, name.clone())).copied();
            let frames = self.unloaded.frames(&mut self.stacks, key);
            let role = ThreadRole::of(&frames, key.tid == self.stacks.pid());
            let mut stack = profiled_stack(key, sum, (name, domain, role), frames);
            stack.shorten_waits(switch_cost);
            stacks.push(stack);
        }
        stacks.retain(|stack| !stack.time.is_zero());
        share_roles(&mut stacks);
        stacks.sort_by(|one, other| {
            let order = (other.time, one.tid).cmp(&(one.time, other.tid));
            let addresses = one.frames.iter().map(|frame| frame.address);
            let others = other.frames.iter().map(|frame| frame.address);
            order
                .then_with(|| addresses.cmp(others))
                .then_with(|| one.activity.leaf().cmp(&other.activity.leaf()))
        });
        stacks
    }

    /// Returns the sums of the kernel's samples, if these replace our stops of running threads.
    fn sums_by_kernel(&self) -> Option<&TimeSums> {
        let by_kernel = self.recorded.as_ref()?.beside_stops.as_ref()?;
        // On a busy machine, there are few stops, and each stands for a longer time.
        let watched = self.ended.saturating_sub(self.begun);
        let samples = u32::try_from(self.samples).unwrap_or(u32::MAX);
        let period = watched / samples.max(1);
        by_kernel.replaces(&self.sums, period).then_some(by_kernel)
    }

    /// Returns the times of all threads, as the kernel counts them.
    fn thread_times(&self) -> ThreadTimes {
        let mut times = self.exited;
        for thread in self.threads.values() {
            times.add(thread.times());
        }
        times
    }

    fn wait_method(&self) -> WaitMethod {
        match &self.recorded {
            Some(recorded) => WaitMethod::Recorded {
                lost: recorded.waits.lost,
                unrecorded_processors: recorded.switches.unrecorded_processors(),
            },
            None => WaitMethod::Sampled {
                because: self.not_recorded.clone(),
            },
        }
    }

    fn running_method(&self) -> RunningMethod {
        match self.clock_samples() {
            _ if self.sums_by_kernel().is_some() => RunningMethod::ByKernel { in_kernel: true },
            Some(samples) => RunningMethod::ByKernel {
                in_kernel: samples.in_kernel,
            },
            None if self.is_live => RunningMethod::NotRead,
            None => RunningMethod::Stopped,
        }
    }

    /// Returns how long a thread runs on average, by the kernel's count, before the record that it got a processor:
    /// that time is counted both as running and as off the processor. `times` are those of all threads, by the same
    /// counts.
    pub(super) fn switch_cost(&self, times: &ThreadTimes) -> Duration {
        let Some(recorded) = self.recorded.as_ref().filter(|_| self.is_counted) else {
            return Duration::ZERO;
        };
        let (off, arrivals) = recorded.waits.off_and_arrivals();
        let excess = off.saturating_sub(times.off.saturating_add(times.runnable));
        let cost = excess / u32::try_from(arrivals.max(1)).unwrap_or(u32::MAX);
        // A larger difference has other reasons.
        let is_known = recorded.waits.lost == 0 && cost <= MAX_SWITCH_COST;
        if is_known { cost } else { Duration::ZERO }
    }
}

/// A stack that is cut, or was not read, does not tell what its thread is for the runtime: another one of the thread may.
fn share_roles(stacks: &mut [ProfiledStack]) {
    let thread = |stack: &ProfiledStack| (stack.tid, stack.thread_name.clone());
    let known = stacks.iter().filter(|it| it.role != ThreadRole::Other);
    let roles: HashMap<_, _> = known.map(|it| (thread(it), it.role)).collect();
    for stack in stacks {
        if let Some(role) = roles.get(&thread(stack)) {
            stack.role = *role;
        }
    }
}

/// Returns what a thread did with a stack, given with its frames, and the name, domain and role of the thread.
fn profiled_stack(
    key: &ProfileKey,
    sum: &Sum,
    (name, domain, role): (&str, Option<u32>, ThreadRole),
    frames: Vec<Arc<StackFrame>>,
) -> ProfiledStack {
    let stack = key.stack.as_deref();
    ProfiledStack {
        tid: key.tid,
        domain,
        thread_name: name.to_owned(),
        role,
        activity: key.activity,
        in_collection: key.in_collection,
        frames,
        end: stack.map(|stack| stack.end),
        is_guessed: stack.is_some_and(|stack| stack.is_guessed),
        time: sum.time,
        samples: sum.samples,
        variance: sum.variance,
        split_variance: sum.split_variance,
        waits: sum.waits.clone(),
    }
}
