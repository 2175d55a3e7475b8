//! [`Profiler`]: where the time of a process goes, on the processor and off it, by looking at all its threads again and again.
//!
//! ```text
//! sample  each thread: has it run since the last sample? → blocked as before, blocked elsewhere, or running
//! stop    the threads that run, for their registers; not if it is live
//! add     the time since the last sample → the stack of each thread
//! ```
//!
//! A thread that has not run since the last sample has waited all the time: its stack need not be read again, and its time is
//! exact. How long the process has run, and each thread has waited for a processor, the kernel counts exactly. Where it permits, it
//! records each wait, too:
//!
//! ```text
//! records    bytes of the kernel's rings → switches in and out                                  pure
//! switches   the rings of all threads
//! waits      switches → waits, with the stack that was read while they lasted, if there was time   pure
//! looks      what a thread was seen to do, until the records of that time are there   pure
//! samples    samples until the records of their time are there: which threads were on a processor then   pure
//! time_sums  times and waits, added up by stack
//! wait_recorder  waits, each by itself
//! process_time  the clock of the process → how much of its running time is in samples, and how much in none   pure
//! sample_pauses  when samples are due, so that they do not cost too much, and that does not depend on what they find   pure
//! raised_priority  a processor when a sample is due, on a busy machine, too
//! ```

mod activity;
mod answer;
mod looks;
mod process_time;
mod raised_priority;
mod records;
mod refusal;
mod sample_pauses;
mod samples;
mod switches;
mod time_sums;
mod wait_recorder;
mod waits;

use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::sys::resource::{Resource, getrlimit};
use nix::time::{ClockId, clock_gettime};

use crate::error::{Error, ProcessError, Result};
use crate::observe::CopiedStack;
use crate::process::Process;
use crate::stacks::{
    Look, Slices, StackFrame, Stacks, SwitchCounts, ThreadFiles, ThreadRole, monotonic_now,
};
use crate::sys::perf::ClockSamples;
use crate::unwind::RawStack;
pub use activity::Activity;
pub use answer::{Profile, ProfiledStack, RunningMethod, ThreadTimes, WaitMethod};
use process_time::ProcessClock;
pub use raised_priority::RaisedPriority;
use records::{RecordKind, SampledStack};
pub(crate) use refusal::paranoid;
use sample_pauses::SamplePauses;
use samples::{PendingSamples, RanUntilStop, SwitchesBefore};
use switches::SwitchRecorder;
pub use time_sums::WaitTimes;
use time_sums::{ProfileKey, Sum, TimeSums};
pub use wait_recorder::{RecordedWait, WaitRecorder};
use waits::{Cause, ThreadWait, Waits};

/// How many descriptors the files of threads leave free. As far as there are more, three files of each thread stay open; those of the
/// other threads are opened for each sample, which takes four times as long.
const LEFT_BY_THREAD_FILES: u64 = 128;

/// How often it is checked whether the process has exec'd another program.
const CHECK_INTERVAL: Duration = Duration::from_millis(500);

/// Exited threads are forgotten if more threads are known from the kernel's records than this, and two for each one that there is.
const MAX_EXITED: usize = 1 << 10;

/// How often, at most, it is checked whether libraries were loaded; only if there is code that is not known.
const RELOAD_INTERVAL: Duration = Duration::from_millis(20);

/// How often the kernel samples a thread in a second, at most. It takes no samples that are much closer.
const MAX_HZ: u32 = 10_000;

/// When to look for the domain of a thread again, for the first time; then after twice as long each time. The runtime sets it
/// once the thread has begun.
const FIRST_RETRY: Duration = Duration::from_millis(5);

/// Of how many threads the domains are kept.
const MAX_DOMAINS_KEPT: usize = 1 << 16;

/// How often it is tried whether the kernel samples a thread.
const TRIED_HZ: u32 = 99;

/// How long a switch takes at most.
const MAX_SWITCH_COST: Duration = Duration::from_micros(20);

/// How long to wait between two looks at waits, at least, on average.
const WAIT_INTERVAL: Duration = Duration::from_micros(800);

/// Looks at waits are followed by a pause of so many times as long as they took: so they take 2.5 % of a processor, as much as samples
/// take at most.
const WAIT_PAUSE: u32 = 39;

/// Samples a process.
///
/// ```no_run
/// use std::time::{Duration, Instant};
/// use probes_lib::Profiler;
///
/// let mut profiler = Profiler::of_process(4242, false)?;
/// for _ in 0..100 {
///     let due = Instant::now() + Duration::from_millis(10);
///     std::thread::sleep(due.saturating_duration_since(Instant::now()));
///     profiler.sample(due)?;
/// }
/// for stack in profiler.profile().stacks {
///     println!("{:?} {:?} {}", stack.time, stack.activity, stack.thread_name);
/// }
/// # Ok::<(), probes_lib::Error>(())
/// ```
pub struct Profiler {
    stacks: Stacks,
    is_live: bool,
    /// How many threads have their files open at most.
    max_open: usize,
    /// Where the functions of the collector are, if it is distinguished whether they are at work.
    collector: Vec<Range<u64>>,
    threads: HashMap<i32, ProfiledThread>,
    /// The domains of threads, also of those that have exited, by their numbers and names.
    domains: HashMap<(i32, Arc<str>), u32>,
    sums: TimeSums,
    /// `None` if the kernel has none.
    clock: Option<ProcessClock>,
    /// All figures are of the time from then, and until it was last known how long the process has run.
    begun: Duration,
    ended: Duration,
    /// Whether the threads that were there from the beginning were looked at.
    is_begun: bool,
    sampled_at: Instant,
    /// When the sample was due that is taken, or was last.
    due_at: Duration,
    checked_at: Instant,
    reloaded_at: Instant,
    samples: u64,
    stops: u64,
    stopped: Duration,
    last_stop_time: Duration,
    pauses: SamplePauses,
    not_stopped: Option<Error>,
    /// The times of threads that have exited, and waits from before a thread was first looked at.
    exited: ThreadTimes,
    /// See [`Profile::off_variance`].
    off_variance: f64,
    /// Whether the kernel counts how long threads run, and wait for a processor.
    is_counted: bool,
    recorded: Option<KernelRecords>,
    not_recorded: Option<String>,
}

/// What the kernel records.
struct KernelRecords {
    switches: SwitchRecorder,
    waits: Waits<ProfileKey>,
    samples: PendingSamples<ProfileKey>,
    /// What the kernel's samples add up to, if threads are stopped, too.
    beside_stops: Option<TimeSums>,
    /// Until then, samples beside stops are not read at once: it would take too much of a processor.
    told_after: Duration,
    /// When the process was stopped, until the records of that time are there.
    stops: Vec<Range<Duration>>,
    /// See [`Profile::unseen_excess`].
    unseen_excess: Duration,
    /// From the first look at each exited thread to the last, until its exit is recorded.
    looks_at_exited: HashMap<i32, Range<Duration>>,
    /// How long the profiler's thread had run when waits were last looked at; and how long that look took.
    ran_until: Duration,
    ran: Duration,
    /// How much longer or shorter the pause is, by chance: the process may do something in step with looks at it.
    stretch: f64,
    /// Threads are not looked at again before this time; records may have to be read more often.
    next_look_at: Duration,
    /// The threads that were switched since the last look at waits.
    switched: HashSet<i32>,
    /// Waits, if they are not added up but kept, each by itself.
    kept: Option<Vec<ThreadWait<ProfileKey>>>,
}

/// A thread between two samples.
struct ProfiledThread {
    name: Arc<str>,
    /// `None` if there are too many threads.
    files: Option<ThreadFiles>,
    /// When it is tried next to find out its domain, and how long after that; `None`: it is known, or never will be.
    domain_attempt: Option<(Instant, Duration)>,
    /// What it does as long as its slices stay the same, and since when that is known.
    blocked: Option<(Slices, ProfileKey, Duration)>,
    /// What the kernel had counted just before it was looked at last, and whether it had waited since the look before, if waits are
    /// not recorded.
    switches: Option<SwitchesBefore>,
    /// Whether it was not there from the beginning.
    is_new: bool,
    /// When it was first looked at, and when last, and how long it had run and waited for a processor. Where waits are sampled, when
    /// these samples were due.
    first: Option<ThreadCounts>,
    last: Option<ThreadCounts>,
    /// How long it has waited since the last look.
    waited_after_last: Duration,
}

/// What the kernel counts of a thread, at a moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ThreadCounts {
    at: Duration,
    running: Duration,
    runnable: Duration,
}

impl Profiler {
    /// Begins to watch a process. If `is_live`, nothing is ever stopped: threads that run have no frames then, unless
    /// the kernel samples them ([`record`](Self::record)).
    ///
    /// # Errors
    ///
    /// Same as [`Stacks::of_process`]; and unless `is_live`, if it is this process or an ancestor of it.
    pub fn of_process(pid: i32, is_live: bool) -> Result<Profiler> {
        let stacks = Stacks::of_process(pid)?;
        if !is_live {
            stacks.process().refuse_self_and_ancestors()?;
        }
        let now = Instant::now();
        let mut profiler = Profiler {
            clock: ProcessClock::of_process(stacks.process()),
            stacks,
            is_live,
            max_open: max_open(0),
            collector: Vec::new(),
            threads: HashMap::new(),
            domains: HashMap::new(),
            sums: TimeSums::default(),
            begun: Duration::ZERO,
            ended: Duration::ZERO,
            is_begun: false,
            sampled_at: now,
            due_at: Duration::ZERO,
            checked_at: now,
            reloaded_at: now,
            samples: 0,
            stops: 0,
            stopped: Duration::ZERO,
            last_stop_time: Duration::ZERO,
            pauses: SamplePauses::default(),
            not_stopped: None,
            exited: ThreadTimes::default(),
            off_variance: 0.0,
            is_counted: false,
            recorded: None,
            not_recorded: None,
        };
        profiler.begin()?;
        Ok(profiler)
    }

    /// Begins: from this moment on, all times are counted, and none from before.
    fn begin(&mut self) -> Result<()> {
        self.threads.clear();
        (self.exited, self.off_variance) = (ThreadTimes::default(), 0.0);
        (self.samples, self.stops, self.stopped) = (0, 0, Duration::ZERO);
        self.pauses = SamplePauses::default();
        self.is_begun = false;
        let (now, at) = (Instant::now(), monotonic_now());
        let clock = self.clock.as_ref();
        let ran = clock.and_then(|clock| clock.read(self.stacks.process()));
        self.sums = TimeSums::begin(ran.unwrap_or_default());
        self.sampled_at = now;
        (self.begun, self.ended) = (at, at);
        if let Some(recorded) = &mut self.recorded {
            recorded.waits.begin_at(at);
            if let Some(by_kernel) = &mut recorded.beside_stops {
                *by_kernel = TimeSums::begin(ran.unwrap_or_default());
            }
        }
        // Threads that wait already are known to have waited until the first sample.
        self.look_at_all(Duration::ZERO, now)?;
        self.is_begun = true;
        Ok(())
    }

    /// Begins anew, and distinguishes whether some thread works for the garbage collector: whether a function of it is on a stack.
    /// Ends [`record`](Self::record).
    ///
    /// # Errors
    ///
    /// If no function of the collector is known in the process: it has none of OCaml's, or no symbols; or if it has exited.
    pub fn distinguish_collections(&mut self) -> Result<()> {
        self.collector = self.stacks.code_of_collector()?;
        self.recorded = None;
        self.begin()
    }

    /// Begins anew, and has the kernel record each wait, so that the times of waits are exact: with its stack if
    /// it lasts until [`look_at_waits`](Self::look_at_waits) is called. If the kernel does not permit that, waits are sampled, and
    /// [`Profile::waits`] says why. Ends [`distinguish_collections`](Self::distinguish_collections).
    ///
    /// With `hz`, from 1 to 10,000, the kernel samples the threads that run, too, so many times in each second that they run, if it permits
    /// that. Then nothing is stopped, and [`Profile::running`] says so. Threads of OCaml 5 are stopped nevertheless, unless the profiler is
    /// live: a sample has the bytes of one stack, and they have two. The kernel's samples are the answer only if stops come too late for
    /// more than a twentieth of the running time, as the process waits often.
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
        let ran_until = processor_time();
        let beside_stops =
            (switches.clock_samples().is_some() && self.stops_threads()).then(TimeSums::default);
        self.recorded = Some(KernelRecords {
            switches,
            waits,
            samples: PendingSamples::default(),
            beside_stops,
            told_after: Duration::ZERO,
            stops: Vec::new(),
            unseen_excess: Duration::ZERO,
            looks_at_exited: HashMap::new(),
            ran_until,
            ran: Duration::ZERO,
            stretch: 1.0,
            next_look_at: Duration::ZERO,
            switched: HashSet::new(),
            kept: None,
        });
        self.begin()
    }

    /// Finds out how long the process has run until now.
    fn read_clock(&mut self) {
        let process = self.stacks.process();
        let ran = match &self.clock {
            Some(clock) => clock.read(process),
            // Without threads that are too short to be seen.
            None => {
                let of_threads = self.threads.values().map(|it| it.times().running);
                Some(of_threads.fold(self.exited.running, Duration::saturating_add))
            }
        };
        let Some(ran) = ran else { return };
        self.ended = monotonic_now();
        self.sums.process.set(ran);
        if let Some(recorded) = &mut self.recorded {
            recorded.waits.read_clock(self.ended);
            if let Some(by_kernel) = &mut recorded.beside_stops {
                by_kernel.process.set(ran);
            }
        }
    }

    /// Begins to record switches, with the best samples of running threads that are permitted.
    fn switches(&self, hz: Option<u32>) -> std::io::Result<(SwitchRecorder, Vec<i32>)> {
        let process = self.stacks.process();
        let are_told = self.stacks.has_fibers();
        let mut wanted = hz.map_or(Vec::new(), |hz| clock_samples_of(hz, are_told).to_vec());
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

    /// Whether threads that run are stopped, even if the kernel samples them: its samples have one of the two stacks of OCaml 5.
    fn stops_threads(&self) -> bool {
        !self.is_live && self.stacks.has_fibers()
    }

    /// The samples that the kernel takes of running threads, if they are not stopped.
    fn clock_samples(&self) -> Option<ClockSamples> {
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
                // Whether these wait is not known before the records of this time are complete.
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
            recorded.told_after = monotonic_now().saturating_add(pause);
            if is_look {
                recorded.stretch = 0.5 + fastrand::f64();
                // A little less than the pause, which is counted from a moment earlier.
                let pause = recorded.ran.saturating_mul(WAIT_PAUSE - 1);
                recorded.next_look_at = at.saturating_add(pause.mul_f64(recorded.stretch));
            }
        }
        Ok(())
    }

    /// Returns what becomes readable when there is a sample whose stack is to be read at once, by
    /// [`look_at_waits`](Self::look_at_waits): of a profile of OCaml 5, whose threads have several stacks, the kernel copies one. Where
    /// threads are stopped, too, so that these samples may not be needed, reading them at once takes no more than 5 % of a processor.
    pub fn sample_fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let now = monotonic_now();
        let is_told = move |it: &&KernelRecords| it.beside_stops.is_none() || it.told_after <= now;
        let recorded = self.recorded.as_ref().filter(is_told);
        recorded
            .into_iter()
            .flat_map(|recorded| recorded.switches.sample_fds())
    }

    /// Returns how long to wait until waits are to be looked at, so that it takes no more than 2.5 % of a processor;
    /// less if records would be lost, as there are so many. `None` if waits are not recorded.
    pub fn wait_pause(&self) -> Option<Duration> {
        let recorded = self.recorded.as_ref()?;
        let pause = recorded.ran.saturating_mul(WAIT_PAUSE).max(WAIT_INTERVAL);
        let pause = pause.mul_f64(recorded.stretch);
        Some(pause.min(recorded.switches.read_within()))
    }

    /// Adds the waits that have ended; returns the threads that were switched since the last call.
    fn collect(&mut self, is_last: bool) -> HashSet<i32> {
        let mut tids = HashSet::new();
        let (recorded, stacks) = (self.recorded.as_mut(), &mut self.stacks);
        let complete = |copied: &CopiedStack| stacks.completed(copied);
        let read = recorded.map(|recorded| recorded.switches.read(is_last, complete));
        // Later than the records, which are of no time that it has not counted.
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
        // Nothing, unless the process has exited since its clock was read.
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
    fn add_clock_sample(&mut self, tid: i32, sampled: Option<&SampledStack>) {
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
            in_collection: false,
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

    /// How often [`sample`](Self::sample) has looked at all threads.
    pub fn samples(&self) -> u64 {
        self.samples
    }

    /// The path of its program, as the kernel names it.
    pub fn program(&self) -> &Path {
        self.stacks.program()
    }

    /// The files that are mapped with code in them, and could not be read: stacks end at their code.
    pub fn unreadable(&self) -> Vec<PathBuf> {
        self.stacks.unreadable().collect()
    }

    /// Returns how long to wait until the next sample at least, so that the process is stopped for no more than 2 % of the time, and
    /// looking at its threads takes no more than 5 % of a processor (if waits are recorded, half of that is left for looking at them). Where
    /// processors are shared, a stop takes longer. Each cost is spread over the samples that follow, as samples would be wrong if when the
    /// next is due depended on what the last has found: so both may be exceeded in the first seconds.
    pub fn min_pause(&self) -> Duration {
        self.pauses.next()
    }

    /// Looks at all threads, and adds the time since the last sample to what they do. The sample was `due` a moment ago: if switches are
    /// recorded, it counts the threads that were on a processor then, even if this thread got one only later.
    ///
    /// # Errors
    ///
    /// If the process has exited, or exec'd another program, or may not be read. What was found is still there.
    pub fn sample(&mut self, due: Instant) -> Result<()> {
        let now = Instant::now();
        let due = due.max(self.sampled_at).min(now);
        let begun = processor_time();
        let elapsed = due.saturating_duration_since(self.sampled_at);
        self.collect(false);
        self.look_at_all(elapsed, due)?;
        let look_cost = processor_time().saturating_sub(begun);
        if let Some(recorded) = &mut self.recorded {
            recorded.ran_until += look_cost;
        }
        let costs = (self.last_stop_time, look_cost);
        self.pauses.add(elapsed, costs, self.recorded.is_some());
        self.samples += 1;
        self.check_program(now)
    }

    /// Checks whether the process has exec'd another program, if it is time to.
    fn check_program(&mut self, now: Instant) -> Result<()> {
        if now.saturating_duration_since(self.checked_at) < CHECK_INTERVAL {
            return Ok(());
        }
        self.checked_at = now;
        self.refuse_executed()
    }

    fn refuse_executed(&self) -> Result<()> {
        if !self.stacks.has_executed() {
            return Ok(());
        }
        let pid = self.stacks.pid();
        Err(Error::of_process(pid, ProcessError::Executed))
    }

    /// Reads the files of the process again if it has loaded some since.
    fn reload(&mut self, now: Instant) -> Result<()> {
        if now.saturating_duration_since(self.reloaded_at) < RELOAD_INTERVAL {
            return Ok(());
        }
        self.reloaded_at = now;
        self.refuse_executed()?;
        if !self.stacks.has_loaded_more() {
            return Ok(());
        }
        self.stacks = Stacks::of_process(self.stacks.pid())?;
        if !self.collector.is_empty() {
            self.collector = self.stacks.code_of_collector()?;
        }
        for thread in self.threads.values_mut() {
            thread.blocked = None;
        }
        Ok(())
    }

    /// Forgets a thread that has exited; its times stay.
    fn forget(&mut self, tid: i32) {
        let Some(thread) = self.threads.remove(&tid) else {
            return;
        };
        self.exited.add(thread.times());
        if let (Some(recorded), Some(looks)) = (&mut self.recorded, thread.looks()) {
            recorded.looks_at_exited.insert(tid, looks);
        }
    }

    /// Forgets the threads that have exited; their times stay.
    fn forget_exited(&mut self, there: &HashSet<i32>) {
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
    fn forget_gone(&mut self) -> Result<()> {
        let process = self.stacks.process();
        let tids = process.threads().and_then(|mut list| list.read());
        let tids = tids.map_err(|source| process.exited_or(source))?;
        self.forget_exited(&tids.into_iter().collect());
        Ok(())
    }

    /// Adds the time `elapsed` before `due` to what the threads do.
    fn look_at_all(&mut self, elapsed: Duration, due: Instant) -> Result<()> {
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
        if running.is_empty() && seen.is_empty() {
            return Err(process.exited_or(nix::errno::Errno::ESRCH.into()));
        }
        let mut read_at = monotonic_now();
        let is_sampled_by_kernel = self.clock_samples().is_some();
        if !elapsed.is_zero() && !is_sampled_by_kernel {
            let stopped_at = self.look_at_running(&running, &mut seen);
            read_at = stopped_at.unwrap_or(read_at);
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
        let in_collection = seen.iter().any(|(key, _)| self.is_of_collector(key));
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

    /// If waits are not recorded, adds the time before the first look at a thread that waits, if it has begun since the sample before: this
    /// sample stands for the time `elapsed` in which there were such threads, seen or not.
    fn estimate_off(&mut self, tid: i32, elapsed: Duration) {
        let thread = self.threads.get(&tid);
        let is_first =
            thread.is_some_and(|it| it.is_new && it.first.is_some() && it.first == it.last);
        if is_first && self.recorded.is_none() {
            self.exited.off = self.exited.off.saturating_add(elapsed);
            self.off_variance += elapsed.as_secs_f64().powi(2);
        }
    }

    /// Returns whether a thread works for the collector.
    fn is_of_collector(&self, key: &ProfileKey) -> bool {
        let frames = key.stack.iter().flat_map(|stack| &stack.frames);
        let mut addresses = frames.map(|frame| frame.within.0);
        !self.collector.is_empty()
            && addresses.any(|at| self.collector.iter().any(|code| code.contains(&at)))
    }

    /// Looks for the domain of a thread, if it is time to.
    fn try_domain(&mut self, tid: i32, now: Instant) {
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
    fn watch(&mut self, tid: i32, now: Instant) -> Result<bool> {
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
    fn look_at(
        &mut self,
        tid: i32,
        now: Instant,
    ) -> Result<Option<(ProfileKey, Option<Duration>)>> {
        let mut opened = None;
        if !self.threads.contains_key(&tid) && !self.watch(tid, now)? {
            return Ok(None);
        }
        self.try_domain(tid, now);
        let is_many = self.threads.len() > self.max_open;
        let Some(thread) = self.threads.get_mut(&tid) else {
            return Ok(None);
        };
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
        if let Some((before, key, since)) = &thread.blocked {
            if *before == slices {
                if let Some(recorded) = &mut self.recorded {
                    recorded.waits.waits_still(tid, looked_at);
                }
                return Ok(Some((key.clone(), Some(*since))));
            }
        }
        thread.blocked = None;
        if self.recorded.is_none() && !self.is_live {
            let counts = SwitchCounts::of_thread(self.stacks.process(), tid);
            thread.switches = counts.map(|counts| SwitchesBefore::new(counts, thread.switches));
        }
        let mut key = ProfileKey {
            tid,
            name: thread.name.clone(),
            activity: Activity::Running,
            in_collection: false,
            stack: None,
        };
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

    /// Adds what the threads do that run; returns when they were stopped for that, if they were.
    fn look_at_running(
        &mut self,
        running: &HashSet<i32>,
        seen: &mut Vec<(ProfileKey, Option<Duration>)>,
    ) -> Option<Duration> {
        let mut stacks = HashMap::new();
        let (mut switches, mut system_calls) = (HashMap::new(), HashMap::new());
        let mut stopped_at = None;
        self.last_stop_time = Duration::ZERO;
        if !self.is_live && !running.is_empty() {
            let begun = monotonic_now();
            let counts_switches = self.recorded.is_none();
            let stop = match self.stacks.read_stopped(running, counts_switches) {
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
        for &tid in running {
            let Some(thread) = self.threads.get_mut(&tid) else {
                continue;
            };
            let is_in_call = system_calls.contains_key(&tid);
            let ran = match (&mut thread.switches, switches.get(&tid)) {
                (Some(before), Some(stopped)) => before.until_stop(*stopped, is_in_call),
                _ => RanUntilStop::Yes,
            };
            let stack = match ran {
                RanUntilStop::Yes => stacks.remove(&tid),
                RanUntilStop::Waited => None,
                // It is in no sample.
                RanUntilStop::Woken => continue,
            };
            let key = ProfileKey {
                tid,
                name: thread.name.clone(),
                activity: Activity::Running,
                in_collection: false,
                stack: stack.map(Arc::new),
            };
            seen.push((key, None));
        }
        stopped_at
    }

    /// Returns for how long a thread runs, by the kernel's count, until it is recorded that it got a processor: that time is in what it
    /// has run, and in what it has waited. `times` are those of all threads, by the same counts.
    fn switch_cost(&self, times: &ThreadTimes) -> Duration {
        let Some(recorded) = self.recorded.as_ref().filter(|_| self.is_counted) else {
            return Duration::ZERO;
        };
        let (off, arrivals) = recorded.waits.off_and_arrivals();
        let excess = off.saturating_sub(times.off.saturating_add(times.runnable));
        let cost = excess / u32::try_from(arrivals.max(1)).unwrap_or(u32::MAX);
        // What is more has other reasons.
        let is_known = recorded.waits.lost == 0 && cost <= MAX_SWITCH_COST;
        if is_known { cost } else { Duration::ZERO }
    }

    /// Returns what was found so far.
    pub fn profile(&mut self) -> Profile {
        self.collect(true);
        let mut stacks = Vec::new();
        let names = self.sums.names();
        let by_kernel = self.recorded.as_ref().and_then(|recorded| {
            let by_kernel = recorded.beside_stops.as_ref()?;
            // On a busy machine, there are few stops, and each stands for a longer time.
            let watched = self.ended.saturating_sub(self.begun);
            let samples = u32::try_from(self.samples).unwrap_or(u32::MAX);
            let period = watched / samples.max(1);
            by_kernel.replaces(&self.sums, period).then_some(by_kernel)
        });
        let is_shown = |key: &ProfileKey| by_kernel.is_none() || key.activity != Activity::Running;
        let shown = self.sums.by_key.iter().filter(|(key, _)| is_shown(key));
        for (key, sum) in shown.chain(by_kernel.iter().flat_map(|it| &it.by_key)) {
            if sum.time.is_zero() {
                continue;
            }
            let name = time_sums::name_of(key, &names);
            let domain = self.domains.get(&(key.tid, name.clone())).copied();
            stacks.push(profiled_stack(&mut self.stacks, key, sum, name, domain));
        }
        let tids: HashSet<i32> = self.sums.by_key.keys().map(|key| key.tid).collect();
        let mut times = self.exited;
        for thread in self.threads.values() {
            times.add(thread.times());
        }
        let switch_cost = self.switch_cost(&times);
        for stack in &mut stacks {
            stack.shorten_waits(switch_cost);
        }
        stacks.retain(|stack| !stack.time.is_zero());
        share_roles(&mut stacks);
        // Most time first, then by thread, and always in the same order.
        stacks.sort_by(|one, other| {
            let order = (other.time, one.tid).cmp(&(one.time, other.tid));
            let addresses = one.frames.iter().map(|frame| frame.address);
            let others = other.frames.iter().map(|frame| frame.address);
            order
                .then_with(|| addresses.cmp(others))
                .then_with(|| one.activity.leaf().cmp(&other.activity.leaf()))
        });
        times.running = self.sums.process.running();
        Profile {
            stacks,
            seconds: self.ended.saturating_sub(self.begun),
            samples: self.samples,
            threads: self
                .recorded
                .as_ref()
                .map_or(tids.len(), |it| it.waits.thread_count),
            times: self.is_counted.then_some(times),
            off_variance: self.off_variance,
            not_sampled: by_kernel.unwrap_or(&self.sums).process.not_sampled(),
            stops: self.stops,
            stopped: self.stopped,
            not_stopped: self.not_stopped.as_ref().map(ToString::to_string),
            waits: match &self.recorded {
                Some(recorded) => WaitMethod::Recorded {
                    lost: recorded.waits.lost,
                    unrecorded_processors: recorded.switches.unrecorded_processors(),
                },
                None => WaitMethod::Sampled {
                    because: self.not_recorded.clone(),
                },
            },
            running: match self.clock_samples() {
                _ if by_kernel.is_some() => RunningMethod::ByKernel { in_kernel: true },
                Some(samples) => RunningMethod::ByKernel {
                    in_kernel: samples.in_kernel,
                },
                None if self.is_live => RunningMethod::NotRead,
                None => RunningMethod::Stopped,
            },
            unseen_excess: match &self.recorded {
                Some(recorded) => recorded.unseen_excess,
                None => Duration::ZERO,
            },
        }
    }
}

impl KernelRecords {
    /// Adds a wait, unless it is only that the process was stopped.
    fn add_wait(
        &mut self,
        wait: ThreadWait<ProfileKey>,
        sums: &mut TimeSums,
        counts: &mut WaitCounts<'_>,
    ) {
        if wait.cause == Cause::Stop || wait.time().is_zero() {
            return;
        }
        if let Some(kept) = &mut self.kept {
            return kept.push(wait);
        }
        if wait.cause == Cause::PerhapsStop && wait.seen.is_none() {
            self.unseen_excess = self.unseen_excess.saturating_add(wait.time());
        }
        counts.add(&wait, self.looks_at_exited.get(&wait.tid));
        sums.add_wait(wait, |tid| name_in(counts.threads, tid));
    }

    /// Adds the samples up to `until` of the threads that were on a processor. Waiting for one after a wait is a part of the wait.
    fn add_samples(&mut self, until: Duration, sums: &mut TimeSums) {
        self.samples.take_until(until, &self.waits, |sample| {
            let stack = sample.key.stack.filter(|_| !sample.is_stale);
            let key = ProfileKey {
                activity: Activity::Running,
                stack,
                ..sample.key
            };
            sums.add_sample(key, (sample.time, sample.time), false);
        });
    }
}

/// The times of threads, to which waits are added that the kernel's counts lack: those before the first look at a thread, and after
/// the last.
struct WaitCounts<'p> {
    threads: &'p mut HashMap<i32, ProfiledThread>,
    exited: &'p mut ThreadTimes,
}

impl WaitCounts<'_> {
    /// `looks_at_exited` are those at the thread if it has exited.
    fn add(&mut self, wait: &ThreadWait<ProfileKey>, looks_at_exited: Option<&Range<Duration>>) {
        let thread = self.threads.get_mut(&wait.tid);
        let looks = thread.as_ref().and_then(|thread| thread.looks());
        let Some(looks) = looks.or_else(|| looks_at_exited.cloned()) else {
            self.exited.off = self.exited.off.saturating_add(wait.time());
            return;
        };
        let (before, after) = wait.outside(looks);
        self.exited.off = self.exited.off.saturating_add(before);
        // Until it is looked at again.
        let since = match thread {
            Some(thread) => &mut thread.waited_after_last,
            None => &mut self.exited.off,
        };
        *since = since.saturating_add(after);
    }
}

impl ThreadCounts {
    /// `None` if the kernel counts no times.
    fn of(slices: &Slices, at: Duration) -> Option<ThreadCounts> {
        let (running, runnable) = slices.times()?;
        Some(ThreadCounts {
            at,
            running,
            runnable,
        })
    }
}

impl ProfiledThread {
    /// From the first look at it to the last.
    fn looks(&self) -> Option<Range<Duration>> {
        Some(self.first?.at..self.last?.at)
    }

    fn times(&self) -> ThreadTimes {
        let (Some(first), Some(last)) = (self.first, self.last) else {
            return ThreadTimes {
                off: self.waited_after_last,
                ..ThreadTimes::default()
            };
        };
        let running = last.running.saturating_sub(first.running);
        let runnable = last.runnable.saturating_sub(first.runnable);
        let looked = last.at.saturating_sub(first.at);
        let off = looked.saturating_sub(running.saturating_add(runnable));
        let off = off.saturating_add(self.waited_after_last);
        // What the kernel has counted of a new thread was all since the beginning.
        let (running, runnable) = if self.is_new {
            (last.running, last.runnable)
        } else {
            (running, runnable)
        };
        ThreadTimes {
            running,
            runnable,
            off,
        }
    }
}

/// Tries whether the kernel would record the waits of a process; if not, says why.
pub(crate) fn try_to_record_waits(process: &Process) -> std::result::Result<(), String> {
    SwitchRecorder::try_out(process, None).map_err(|why| refusal::text(&why, false))
}

/// Where the kernel would sample the threads of a process.
#[derive(Debug)]
pub(crate) enum PermittedSamples {
    Everywhere,
    /// While they execute their own code; why not in the kernel.
    InUserSpace(String),
    /// Nowhere; why.
    Nowhere(String),
}

/// Tries which samples the kernel would take of a process, in the order in which a profile does.
pub(crate) fn try_to_sample(process: &Process) -> PermittedSamples {
    let mut refusals = Vec::new();
    for samples in clock_samples_of(TRIED_HZ, false) {
        match SwitchRecorder::try_out(process, Some(samples)) {
            Err(why) => refusals.push(refusal::text(&why, samples.in_kernel)),
            Ok(()) if samples.in_kernel => return PermittedSamples::Everywhere,
            Ok(()) => return PermittedSamples::InUserSpace(refusals.concat()),
        }
    }
    PermittedSamples::Nowhere(refusals.pop().unwrap_or_default())
}

/// The samples to ask the kernel for, the best first.
fn clock_samples_of(hz: u32, are_told: bool) -> [ClockSamples; 2] {
    [true, false].map(|in_kernel| ClockSamples {
        period: Duration::from_secs(1) / hz.clamp(1, MAX_HZ),
        stack_len: switches::SAMPLED_STACK,
        in_kernel,
        are_told,
    })
}

/// A stack that is cut, or was not read, does not tell what its thread is for the runtime: another one of the thread may.
fn share_roles(stacks: &mut [ProfiledStack]) {
    let thread = |stack: &ProfiledStack| (stack.tid, stack.thread_name.clone());
    let told = stacks.iter().filter(|it| it.role != ThreadRole::Other);
    let roles: HashMap<_, _> = told.map(|it| (thread(it), it.role)).collect();
    for stack in stacks {
        if let Some(role) = roles.get(&thread(stack)) {
            stack.role = *role;
        }
    }
}

/// Returns the name of a thread; an empty one if it was not looked at so far.
fn name_in(threads: &HashMap<i32, ProfiledThread>, tid: i32) -> Arc<str> {
    let thread = threads.get(&tid);
    thread.map_or_else(|| "".into(), |thread| thread.name.clone())
}

/// Returns how long this thread has run.
fn processor_time() -> Duration {
    clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).map_or(Duration::ZERO, Duration::from)
}

/// Returns what a thread did with a stack, given with its name and its domain.
fn profiled_stack(
    stacks: &mut Stacks,
    key: &ProfileKey,
    sum: &Sum,
    name: &str,
    domain: Option<u32>,
) -> ProfiledStack {
    let stack = key.stack.as_deref();
    let frames = stack.map_or(&[][..], |stack| &stack.frames);
    let frames: Vec<Arc<StackFrame>> = frames.iter().map(|frame| stacks.name(*frame)).collect();
    ProfiledStack {
        tid: key.tid,
        domain,
        thread_name: name.to_owned(),
        role: ThreadRole::of(&frames, key.tid == stacks.pid()),
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

/// Returns how many threads may have their files open, beside so many others.
fn max_open(others: usize) -> usize {
    let (limit, _) = getrlimit(Resource::RLIMIT_NOFILE).unwrap_or((0, 0));
    let left = limit.saturating_sub(LEFT_BY_THREAD_FILES.saturating_add(others as u64));
    usize::try_from(left / 3).unwrap_or(usize::MAX)
}
