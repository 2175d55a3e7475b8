//! [`TimeSums`]: times, added up by thread, activity and stack.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use crate::numbers::nanoseconds;
use crate::observe::Times;
use crate::observe::layout::histogram;
use crate::unwind::RawStack;

use super::activity::Activity;
use super::process_time::ProcessTime;
use super::waits::ThreadWait;

/// How many sums there are, and how many frames their stacks have in all, until new stacks are no longer distinguished.
const MAX_STACKS: usize = 1 << 16;
const MAX_FRAMES: usize = 1 << 22;

/// The time of so many samples may be missing by chance.
const MIN_SAMPLES_OF_KERNEL: u32 = 10;

/// The mantissa bits of a bucket of waits: their lengths are counted to 1/64.
const PRECISION: u32 = 6;

/// What times are added up for.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct ProfileKey {
    pub(super) tid: i32,
    pub(super) name: Arc<str>,
    pub(super) activity: Activity,
    /// See [`ProfiledStack::in_collection`](super::ProfiledStack::in_collection).
    pub(super) in_collection: Option<bool>,
    /// How often files had been unloaded: see `Profiler::unloads`.
    pub(super) unloads: u32,
    /// Its frames, how it ends, and whether it is guessed; `None` if it is not known.
    pub(super) stack: Option<Arc<RawStack>>,
}

impl ProfileKey {
    /// Returns that of a thread that runs, and whose stack is not known.
    pub(super) fn running(tid: i32, name: Arc<str>, unloads: u32) -> ProfileKey {
        ProfileKey {
            tid,
            name,
            activity: Activity::Running,
            in_collection: None,
            unloads,
            stack: None,
        }
    }

    fn lose_stack(&mut self) {
        self.stack = None;
        // It has no names that may be others.
        self.unloads = 0;
    }
}

#[derive(Clone, Debug, Default)]
pub(super) struct Sum {
    pub(super) time: Duration,
    pub(super) samples: u64,
    /// In seconds squared.
    pub(super) variance: f64,
    /// The same, as if none of the samples were exact.
    pub(super) split_variance: f64,
    /// Of waits that were recorded.
    pub(super) waits: Option<WaitTimes>,
}

/// The lengths of the waits that began and ended while the process was watched.
///
/// ```no_run
/// # let mut profiler: probes_lib::Profiler = unimplemented!();
/// for stack in profiler.profile().stacks {
///     if let Some(waits) = &stack.waits {
///         let times = waits.times();
///         println!("{}: {} waits, p99 {:?}", stack.thread_name, times.count(), times.quantile(0.99));
///     }
/// }
/// ```
#[derive(Clone, Debug, Default)]
pub struct WaitTimes {
    /// By the bucket of the nanoseconds. A map, because the waits of one stack are in few buckets.
    counts: BTreeMap<u64, u64>,
    sum: Duration,
    longest: Duration,
    parts: u64,
}

impl ThreadWait<ProfileKey> {
    /// What its thread did: as it was seen, or else in the last wait of about this length. `name` is that of a thread.
    pub(super) fn key(self, name: impl FnOnce(i32) -> Arc<str>) -> ProfileKey {
        match (self.seen, self.similar) {
            (Some(seen), _) => seen,
            (None, Some(similar)) => ProfileKey {
                activity: Activity::Unseen,
                ..similar
            },
            (None, None) => ProfileKey {
                tid: self.tid,
                name: name(self.tid),
                activity: Activity::Unseen,
                in_collection: None,
                unloads: 0,
                stack: None,
            },
        }
    }
}

impl WaitTimes {
    fn add(&mut self, time: Duration) {
        let bucket = histogram::bucket_of(nanoseconds(time), PRECISION);
        *self.counts.entry(bucket).or_default() += 1;
        self.sum = self.sum.saturating_add(time);
        self.longest = self.longest.max(time);
    }

    /// Subtracts a time from each wait, and returns these waits, and how much was subtracted in all.
    pub(super) fn shortened_by(&self, time: Duration) -> (WaitTimes, Duration) {
        let cost = nanoseconds(time);
        let mut all = WaitTimes {
            longest: self.longest.saturating_sub(time),
            parts: self.parts,
            ..WaitTimes::default()
        };
        let mut number = 0;
        for (bucket, count) in &self.counts {
            let (least, different) = histogram::times_of(*bucket, PRECISION);
            let middle = (least + different / 2).saturating_sub(cost);
            *all.counts
                .entry(histogram::bucket_of(middle, PRECISION))
                .or_default() += count;
            number += count;
        }
        let number = u32::try_from(number).unwrap_or(u32::MAX);
        let subtracted = time.saturating_mul(number).min(self.sum);
        all.sum = self.sum.saturating_sub(subtracted);
        (all, subtracted)
    }

    /// Adds other waits.
    pub fn merge(&mut self, other: &WaitTimes) {
        for (bucket, count) in &other.counts {
            *self.counts.entry(*bucket).or_default() += count;
        }
        self.sum = self.sum.saturating_add(other.sum);
        self.longest = self.longest.max(other.longest);
        self.parts += other.parts;
    }

    /// Returns how many waits there were beside these, of which only a part was seen: they had begun before, or last, or records of
    /// switches were lost meanwhile. How long they are is not known.
    pub fn parts(&self) -> u64 {
        self.parts
    }

    /// Returns their number, sum, longest and quantiles. Quantiles are accurate to 2 %.
    pub fn times(&self) -> Times {
        let counts = self.counts.iter().map(|(bucket, count)| (*bucket, *count));
        let (longest, sum) = (nanoseconds(self.longest), nanoseconds(self.sum));
        Times::of(counts, PRECISION, longest, Some(sum), 1.0)
    }
}

/// Returns the name of a thread: another one may have had its number before, so that one from `names` is only for what was found
/// before the name was read.
pub(super) fn name_of<'n>(key: &'n ProfileKey, names: &'n HashMap<i32, Arc<str>>) -> &'n Arc<str> {
    match names.get(&key.tid) {
        Some(name) if key.name.is_empty() => name,
        _ => &key.name,
    }
}

/// Times, added up by thread, activity and stack.
#[derive(Default)]
pub(super) struct TimeSums {
    pub(super) by_key: HashMap<ProfileKey, Sum>,
    pub(super) process: ProcessTime,
    /// How many frames all stacks have.
    frames: usize,
}

impl TimeSums {
    /// Of a process whose clock shows that it has run so much before.
    pub(super) fn begin(ran: Duration) -> TimeSums {
        TimeSums {
            process: ProcessTime::begin(ran),
            ..TimeSums::default()
        }
    }

    /// Adds the time since the last sample; if the thread has run meanwhile, it may have done something else for a part of it. Of a thread
    /// that runs, it adds no more than the process has run and no other sample stands for, and no more than `most`.
    pub(super) fn add_sample(
        &mut self,
        key: ProfileKey,
        (time, most): (Duration, Duration),
        is_exact: bool,
    ) {
        let counted = match key.activity {
            Activity::Running => self.process.take(time.min(most)),
            _ => time,
        };
        let sum = self.sum(key);
        sum.time = sum.time.saturating_add(counted);
        sum.samples += 1;
        let variance = time.as_secs_f64().powi(2);
        sum.split_variance += variance;
        if !is_exact {
            sum.variance += variance;
        }
    }

    /// Whether these samples, which the kernel has taken, are better than those of stops, of which there was one in each `period`: these
    /// lack the stacks of more than a twentieth of the running time, and more than may be missing by chance.
    pub(super) fn replaces(&self, of_stops: &TimeSums, period: Duration) -> bool {
        let lacking = of_stops.without_stack();
        let is_much = lacking.saturating_mul(20) > of_stops.process.running();
        is_much
            && lacking > period.saturating_mul(MIN_SAMPLES_OF_KERNEL)
            && self.without_stack() < lacking
    }

    /// How long threads have run of which there is no stack.
    fn without_stack(&self) -> Duration {
        let is_read = |key: &ProfileKey| {
            let stack = key.stack.as_ref();
            stack.is_some_and(|stack| !stack.frames.is_empty())
        };
        let running = self
            .by_key
            .iter()
            .filter(|(key, _)| key.activity == Activity::Running && !is_read(key));
        let times = running.map(|(_, sum)| sum.time);
        times.fold(self.process.not_sampled(), Duration::saturating_add)
    }

    /// Adds a wait that was recorded.
    pub(super) fn add_wait(
        &mut self,
        wait: ThreadWait<ProfileKey>,
        name: impl FnOnce(i32) -> Arc<str>,
    ) {
        let (time, is_whole) = (wait.time(), wait.is_whole);
        let sum = self.sum(wait.key(name));
        sum.time = sum.time.saturating_add(time);
        let waits = sum.waits.get_or_insert_default();
        if is_whole {
            waits.add(time);
        } else {
            waits.parts += 1;
        }
    }

    /// Returns the names of the threads that have one: a thread may have been sampled, or have waited, before its name
    /// was read.
    pub(super) fn names(&self) -> HashMap<i32, Arc<str>> {
        let named = self.by_key.keys().filter(|key| !key.name.is_empty());
        named.map(|key| (key.tid, key.name.clone())).collect()
    }

    /// Returns the sum for a key. Once there are too many stacks, new keys lose their stack; once there are too many
    /// keys as well, also their thread (0, without a name).
    fn sum(&mut self, mut key: ProfileKey) -> &mut Sum {
        if key.stack.is_none() {
            key.lose_stack();
        }
        if !self.by_key.contains_key(&key) {
            let frames = key.stack.as_ref().map_or(0, |stack| stack.frames.len());
            if self.by_key.len() >= MAX_STACKS || self.frames + frames > MAX_FRAMES {
                key.lose_stack();
                if !self.by_key.contains_key(&key) && self.by_key.len() >= 2 * MAX_STACKS {
                    (key.tid, key.name) = (0, "".into());
                }
            } else {
                self.frames += frames;
            }
        }
        self.by_key.entry(key).or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::address::LiveAddr;
    use crate::profile::waits::Cause;
    use crate::unwind::{RawFrame, StackEnd};

    #[test]
    fn threads_that_share_a_number_keep_names() {
        let key = |name: &str| ProfileKey {
            tid: 7,
            name: name.into(),
            activity: Activity::Running,
            in_collection: None,
            unloads: 0,
            stack: None,
        };
        let names = HashMap::from([(7, "second".into())]);
        let named = ["first", "second", ""].map(|name| name_of(&key(name), &names).to_string());
        assert_eq!(named, ["first", "second", "second"]);
    }

    #[test]
    fn known_threads_keep_their_time_when_full() {
        let key = |tid, unloads| ProfileKey {
            tid,
            name: "".into(),
            activity: Activity::Running,
            in_collection: None,
            unloads,
            stack: None,
        };
        let mut sums = TimeSums::begin(Duration::ZERO);
        for tid in 1..=2 * MAX_STACKS as i32 {
            sums.sum(key(tid, 0));
        }
        sums.sum(key(7, 3)).samples = 1;
        assert_eq!(sums.sum(key(7, 0)).samples, 1);
        // That of a new one is nobody's.
        sums.sum(key(-1, 0)).samples = 2;
        assert_eq!(sums.sum(key(0, 0)).samples, 2);
    }

    // promise: Profiles: The kernel's samples replace those of stops only if more than a twentieth of the running time has no stack
    #[test]
    fn samples_of_kernel_replace_late_stops() {
        let sums = |read: u64, unread: u64| {
            let mut sums = TimeSums::begin(Duration::ZERO);
            sums.process.set(Duration::from_millis(100));
            let stack = RawStack {
                frames: vec![RawFrame {
                    address: LiveAddr(1),
                    within: LiveAddr(1),
                }],
                end: StackEnd::Outermost,
                is_guessed: false,
            };
            for (time, stack) in [(read, Some(Arc::new(stack))), (unread, None)] {
                let key = ProfileKey {
                    tid: 7,
                    name: "".into(),
                    activity: Activity::Running,
                    in_collection: None,
                    unloads: 0,
                    stack,
                };
                let time = Duration::from_millis(time);
                sums.add_sample(key, (time, time), false);
            }
            sums
        };
        let replaces =
            |period, stops: TimeSums| sums(90, 0).replaces(&stops, Duration::from_millis(period));
        assert!(!replaces(0, sums(95, 5)));
        assert!(replaces(1, sums(50, 50)));
        // Nothing is read of 5 ms, and there is no sample of 15 others; or nothing is better.
        assert!(replaces(1, sums(80, 5)));
        assert!(!replaces(0, sums(90, 10)));
        // By chance.
        assert!(!replaces(5, sums(50, 50)));
    }

    #[test]
    fn many_threads_take_bounded_memory() {
        let mut sums = TimeSums::default();
        let count = 3 * MAX_STACKS;
        for tid in 1..=count as i32 {
            let wait = ThreadWait {
                tid,
                since: Duration::ZERO,
                until: Duration::from_nanos(1),
                is_whole: true,
                cause: Cause::Wait,
                seen: None,
                similar: None,
            };
            sums.add_wait(wait, |_| "thread".into());
        }
        assert!(sums.by_key.len() <= 2 * MAX_STACKS + 1);
        let time: Duration = sums.by_key.values().map(|sum| sum.time).sum();
        assert_eq!(time, Duration::from_nanos(count as u64));
    }

    #[test]
    fn each_wait_is_shortened() {
        let mut waits = WaitTimes::default();
        for microseconds in [4, 100, 200] {
            waits.add(Duration::from_micros(microseconds));
        }
        let (shorter, subtracted) = waits.shortened_by(Duration::from_micros(10));
        assert_eq!(subtracted, Duration::from_micros(30));
        let times = shorter.times();
        assert_eq!(
            (times.count(), times.max()),
            (3, Duration::from_micros(190))
        );
        assert_eq!(times.sum(), Duration::from_micros(274));
        let median = times.quantile(0.5).as_secs_f64();
        assert!((87e-6..93e-6).contains(&median), "{median}");
        // No more than there is.
        let (none, subtracted) = waits.shortened_by(Duration::from_secs(1));
        assert_eq!(subtracted, Duration::from_micros(304));
        assert_eq!(none.times().sum(), Duration::ZERO);
    }

    #[test]
    fn lengths_of_waits_are_counted_closely() {
        let mut waits = WaitTimes::default();
        for milliseconds in 1..=1000 {
            waits.add(Duration::from_millis(milliseconds));
        }
        let mut all = WaitTimes::default();
        all.merge(&waits);
        all.merge(&waits);
        let times = all.times();
        assert_eq!(times.count(), 2000);
        assert_eq!(times.sum(), Duration::from_millis(1001 * 1000));
        assert_eq!(times.max(), Duration::from_secs(1));
        let median = times.quantile(0.5).as_secs_f64();
        assert!((0.49..0.51).contains(&median), "{median}");
        assert_eq!(WaitTimes::default().times().count(), 0);
    }
}
