//! [`Profiler`] has the kernel record each wait, and sample the threads that run.

use std::collections::HashSet;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::activity::Activity;
use super::kernel_records::{KernelRecords, processor_time};
use super::permitted::clock_samples_of;
use super::records::{RecordKind, SampledStack};
use super::switches::SwitchRecorder;
use super::threads::{WaitCounts, max_open, name_in};
use super::time_sums::{ProfileKey, TimeSums};
use super::waits::Waits;
use super::{Profiler, refusal};
use crate::error::Result;
use crate::observe::CopiedStack;
use crate::stacks::monotonic_now;
use crate::sys::perf::ClockSamples;
use crate::unwind::RawStack;

/// The shortest average time between two looks at waits.
const WAIT_INTERVAL: Duration = Duration::from_micros(800);

/// The pause after a look at waits is so many times as long as the look took. So looks take 2.5 % of a processor,
/// which is also the most that samples take.
const WAIT_PAUSE: u32 = 39;

impl Profiler {
    /// Begins anew, and has the kernel record each wait, so that the times of waits are exact. A wait has a stack if
    /// it lasts until [`look_at_waits`](Self::look_at_waits) is called. If the kernel does not permit that, waits are
    /// sampled, and [`Profile::waits`](crate::Profile::waits) says why. Ends
    /// [`distinguish_collections`](Self::distinguish_collections).
    ///
    /// With `hz`, from 1 to 10,000, the kernel also samples the threads that run, that many times in each second of
    /// running time, if it permits that. Then nothing is stopped, and [`Profile::running`](crate::Profile::running)
    /// says so. Threads of OCaml 5 are stopped nevertheless, unless the profiler is live: they have several stacks,
    /// and a sample has the bytes of one. The kernel's samples then replace the stops only if these come too late for
    /// more than a twentieth of the running time, because the process waits often.
    ///
    /// # Errors
    ///
    /// If the process has exited, or may not be read.
    pub fn record(&mut self, hz: Option<u32>) -> Result<()> {
        self.collector.clear();
        let (switches, tids) = match self.switches(hz) {
            Ok(recorded) => recorded,
            Err(why) => {
                (self.recorded, self.not_recorded) = (None, Some(refusal::text(&why, false)));
                return self.begin();
            }
        };
        let mut waits = Waits::of_process(self.stacks.pid(), monotonic_now());
        for tid in tids {
            waits.add_existing(tid);
        }
        self.max_open = max_open(switches.descriptors());
        let beside_stops =
            (switches.clock_samples().is_some() && self.stops_threads()).then(TimeSums::default);
        self.recorded = Some(KernelRecords::new(switches, waits, beside_stops));
        self.begin()
    }

    /// Begins to record switches, with the best samples of running threads that are permitted.
    pub(super) fn switches(&self, hz: Option<u32>) -> std::io::Result<(SwitchRecorder, Vec<i32>)> {
        let process = self.stacks.process();
        let wake_reader = self.stacks.has_fibers();
        let mut wanted = hz.map_or(Vec::new(), |hz| clock_samples_of(hz, wake_reader).to_vec());
        if !self.is_live {
            // Samples of user space alone would lack the time in the kernel, which stopping the threads shows.
            wanted.retain(|samples| samples.in_kernel);
        }
        for samples in wanted {
            if let Ok(recorded) = SwitchRecorder::of_process(process, Some(samples)) {
                return Ok(recorded);
            }
        }
        SwitchRecorder::of_process(process, None)
    }

    /// Whether threads that run are stopped even if the kernel samples them: a sample has one of the stacks that a
    /// thread of OCaml 5 has.
    pub(super) fn stops_threads(&self) -> bool {
        !self.is_live && self.stacks.has_fibers()
    }

    /// The samples that the kernel takes of running threads, if these are not stopped as well.
    pub(super) fn clock_samples(&self) -> Option<ClockSamples> {
        let recorded = self.recorded.as_ref()?;
        let samples = recorded.switches.clock_samples()?;
        recorded.beside_stops.is_none().then_some(samples)
    }

    /// Reads the stacks of the threads that have begun to wait, if waits are recorded.
    ///
    /// # Errors
    ///
    /// If the process may not be read.
    pub fn look_at_waits(&mut self) -> Result<()> {
        let (now, at) = (Instant::now(), monotonic_now());
        let switched = self.collect(false);
        let mut to_look_at = HashSet::new();
        let mut is_look = false;
        if let Some(recorded) = &mut self.recorded {
            recorded.switched.extend(switched);
            is_look = recorded.next_look_at <= at;
            if is_look {
                let (waits, switched) = (&recorded.waits, std::mem::take(&mut recorded.switched));
                to_look_at = switched;
                to_look_at.retain(|tid| waits.is_unseen(*tid));
                // It is not known whether these wait until the records of this time are complete.
                to_look_at.extend(recorded.switches.just_switched());
            }
        }
        for tid in to_look_at {
            if self.look_at(tid, now)?.is_none() {
                self.forget(tid);
            }
        }
        if let Some(recorded) = &mut self.recorded {
            let ran = processor_time();
            recorded.ran = ran.saturating_sub(recorded.ran_until);
            recorded.ran_until = ran;
            let pause = recorded.ran.saturating_mul(WAIT_PAUSE / 2);
            recorded.read_at_once_after = monotonic_now().saturating_add(pause);
            if is_look {
                recorded.stretch = 0.5 + fastrand::f64();
                // A little less than the pause, which is counted from a moment earlier.
                let pause = recorded.ran.saturating_mul(WAIT_PAUSE - 1);
                recorded.next_look_at = at.saturating_add(pause.mul_f64(recorded.stretch));
            }
        }
        Ok(())
    }

    /// Returns the descriptors that become readable when there is a sample whose stack is to be completed at once, by
    /// [`look_at_waits`](Self::look_at_waits). Only threads of OCaml 5 have such samples: the kernel copies one of
    /// their stacks. If threads are stopped, too, the samples may not be needed; then reading them at once takes no
    /// more than 5 % of a processor.
    pub fn sample_fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let now = monotonic_now();
        let are_read_at_once =
            move |it: &&KernelRecords| it.beside_stops.is_none() || it.read_at_once_after <= now;
        let recorded = self.recorded.as_ref().filter(are_read_at_once);
        recorded
            .into_iter()
            .flat_map(|recorded| recorded.switches.sample_fds())
    }

    /// Returns how long to wait before the next look at waits, so that looks take no more than 2.5 % of a processor.
    /// The pause is shorter if so many records come that some would be lost. `None` if waits are not recorded.
    pub fn wait_pause(&self) -> Option<Duration> {
        let recorded = self.recorded.as_ref()?;
        let pause = recorded.ran.saturating_mul(WAIT_PAUSE).max(WAIT_INTERVAL);
        let pause = pause.mul_f64(recorded.stretch);
        Some(pause.min(recorded.switches.read_within()))
    }

    /// Adds the waits that have ended; returns the threads that were switched since the last call.
    pub(super) fn collect(&mut self, is_last: bool) -> HashSet<i32> {
        let mut tids = HashSet::new();
        let (recorded, stacks) = (self.recorded.as_mut(), &mut self.stacks);
        let complete = |copied: &CopiedStack| stacks.completed(copied);
        let read = recorded.map(|recorded| recorded.switches.read(is_last, complete));
        // The clock is read after the records, so it has counted all the time that they are of.
        self.read_clock();
        let (Some((records, until)), Some(recorded)) = (read, &mut self.recorded) else {
            return tids;
        };
        let mut counts = WaitCounts {
            threads: &mut self.threads,
            exited: &mut self.exited,
        };
        let mut samples = Vec::new();
        for record in records {
            if let RecordKind::Sample(sampled) = &record.kind {
                if recorded.waits.is_counted(&record) && recorded.switches.is_counted(&record) {
                    samples.push((record.tid, sampled.clone()));
                }
                continue;
            }
            if record.kind == RecordKind::Exited {
                recorded.switches.forget(record.tid);
            }
            recorded.add_samples(record.at, &mut self.sums);
            tids.insert(record.tid);
            let (tid, is_exit) = (record.tid, record.kind == RecordKind::Exited);
            if let Some(wait) = recorded.waits.add(record, &recorded.stops) {
                recorded.add_wait(wait, &mut self.sums, &mut counts);
            }
            if is_exit {
                recorded.looks_at_exited.remove(&tid);
            }
        }
        // Zero, unless the process has exited: then its clock was last read earlier.
        let ran_since = recorded.waits.ran_since();
        self.sums.process.set_after(ran_since);
        if let Some(by_kernel) = &mut recorded.beside_stops {
            by_kernel.process.set_after(ran_since);
        }
        recorded.add_samples(until, &mut self.sums);
        recorded.stops.retain(|stop| stop.end >= until);
        if is_last {
            let now = monotonic_now();
            self.ended = now;
            for wait in recorded.waits.lasting(now) {
                recorded.add_wait(wait, &mut self.sums, &mut counts);
            }
        }
        for (tid, sampled) in samples {
            self.add_clock_sample(tid, sampled.as_deref());
        }
        tids
    }

    /// Adds a sample that the kernel has taken of a thread that ran.
    pub(super) fn add_clock_sample(&mut self, tid: i32, sampled: Option<&SampledStack>) {
        let copied = sampled.map(|sampled| &sampled.copied);
        let completed = sampled.and_then(|sampled| sampled.completed.clone());
        let mut stack = completed.or_else(|| Some(self.stacks.of_copied(copied?)));
        let is_unknown = |stack: &RawStack| stack.end.may_be_loaded_since();
        // A process that has exec'd another program, or has exited, is noticed at the next sample.
        if stack.as_ref().is_some_and(is_unknown) && self.reload(Instant::now()).is_ok() {
            stack = copied.map(|copied| self.stacks.of_copied(copied));
        }
        let key = ProfileKey {
            tid,
            name: name_in(&self.threads, tid),
            activity: Activity::Running,
            in_collection: None,
            unloads: self.unloaded.unloads(),
            stack: stack.map(Arc::new),
        };
        let Some(recorded) = &mut self.recorded else {
            return;
        };
        let period = recorded.switches.clock_samples().map(|it| it.period);
        let time = period.unwrap_or_default();
        let sums = recorded.beside_stops.as_mut().unwrap_or(&mut self.sums);
        sums.add_sample(key, (time, time), false);
    }
}
