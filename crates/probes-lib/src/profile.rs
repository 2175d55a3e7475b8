//! [`Profiler`]: where the time of a process goes, on the processor and off it, by looking at all its threads again and again.
//!
//! ```text
//! sample  each thread: has it run since the last sample? → blocked as before, blocked elsewhere, or running
//! stop    the threads that run, for their registers; not if it is live
//! add     the time since the last sample → the stack of each thread
//! ```
//!
//! A thread that has not run since the last sample has waited all the time: its stack need not be read again, and its
//! time is exact. The kernel counts exactly how long the process has run, and how long each thread has waited for a
//! processor. If it permits that, it also records each wait:
//!
//! ```text
//! permitted  what the kernel permits to record
//! records    bytes of the kernel's rings → switches in and out                                  pure
//! switches   the rings of all threads
//! waits      switches → waits, with the stack that was read while they lasted, if there was time   pure
//! looks      what a thread was seen to do, until the records of that time are there   pure
//! samples    samples until the records of their time are there: which threads were on a processor then   pure
//! time_sums  times and waits, added up by stack
//! wait_recorder  waits, each by itself
//! process_time  the clock of the process → how much of its running time is in samples, and how much in none   pure
//! sample_pauses  when samples are due, so that they do not cost too much, and that does not depend on what they find   pure
//! threads, thread_looks  what is known of each thread; looking at them
//! recording, kernel_records  reading the kernel's records; what they have shown so far
//! summary    what was found, added up → [`Profile`]
//! raised_priority  a processor when a sample is due, on a busy machine, too
//! ```

mod activity;
mod answer;
mod kernel_records;
mod looks;
mod permitted;
mod process_time;
mod raised_priority;
mod recording;
mod records;
mod refusal;
mod sample_pauses;
mod samples;
mod summary;
mod switches;
mod thread_looks;
mod threads;
mod time_sums;
mod unloaded;
mod wait_recorder;
mod waits;

use std::collections::HashMap;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::error::{Error, Result};
use crate::stacks::{Stacks, files_pause, monotonic_now};
pub use activity::Activity;
pub use answer::{Profile, ProfiledStack, RunningMethod, ThreadTimes, WaitMethod};
use kernel_records::{KernelRecords, processor_time};
pub(crate) use permitted::{PermittedSamples, try_to_record_waits, try_to_sample};
use process_time::ProcessClock;
pub use raised_priority::RaisedPriority;
pub(crate) use refusal::paranoid;
use sample_pauses::SamplePauses;
use threads::{ProfiledThread, max_open};
use time_sums::TimeSums;
pub use time_sums::WaitTimes;
use unloaded::UnloadedFiles;
pub use wait_recorder::{RecordedWait, WaitRecorder};

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
    unloaded: UnloadedFiles,
    /// When it is checked next whether files were loaded although all code is known.
    next_files_check: Instant,
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
    /// All figures are of the time from `begun` to `ended`, when the clock of the process was last read.
    begun: Duration,
    ended: Duration,
    /// Whether the threads that were there from the beginning were looked at.
    is_begun: bool,
    sampled_at: Instant,
    /// When the current sample, or else the last one, was due.
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
            unloaded: UnloadedFiles::default(),
            next_files_check: now + files_pause(Duration::ZERO),
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

    /// Returns how long to wait until the next sample at least, so that the process is stopped for no more than 2 % of
    /// the time, and looking at its threads takes no more than 5 % of a processor (2.5 % if waits are recorded: looking
    /// at them takes the rest). Where processors are shared, a stop takes longer. Each cost is spread over the samples
    /// that follow, because the time of a sample must not depend on what the one before it has found. So both limits
    /// may be exceeded in the first seconds.
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
}

#[cfg(test)]
mod tests;
