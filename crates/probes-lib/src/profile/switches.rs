//! [`SwitchRecorder`]: every switch of the threads of a process, as the kernel records it (perf_event_open(2)), and samples
//! of them while they run.
//!
//! ```text
//! thread × processor   an event each; threads that are created later have theirs from the thread that creates them
//! processor            a ring, which the events of all threads on this processor write to
//! ```
//!
//! The memory depends on the number of processors. The rings are read from time to time, and no thread is woken for a
//! switch, so that the target pays for the record alone.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use nix::sys::resource::{Resource, getrlimit};
use nix::unistd::{SysconfVar, sysconf};

use super::records::{self, PerfRecord};
use crate::observe::CopiedStack;
use crate::process::Process;
use crate::stacks::monotonic_now;
use crate::sys::perf::{ClockSamples, PerfEvent, Ring};
use crate::unwind::RawStack;

/// More than Linux can have on amd64.
const MAX_PROCESSORS: usize = 8192;

/// The length of a ring, a power of two. Half of it is what an ordinary user may lock for each processor.
const RING_LEN: usize = 1 << 20;
const MIN_RING_LEN: usize = 1 << 14;

/// How many samples a ring has room for at least.
const MIN_SAMPLES: usize = 4;

/// The most bytes of all rings.
const MAX_RING_BYTES: usize = 64 << 20;

/// How long after its time a record may become readable: it is written after its time is taken, and the processor may be a
/// virtual one that is suspended in between.
const LATE: Duration = Duration::from_micros(500);

/// A ring with less room than that may have had none for a switch: larger than any record that is no sample, so that this is also
/// true of what the kernel writes while the ring is read.
const NEARLY_FULL: usize = 1024;

/// How many bytes of a stack are copied for a sample: those of nearly all stacks of programs that are not recursive.
pub(super) const SAMPLED_STACK: u32 = 32 << 10;

/// How many descriptors the events leave free, beside as many as they take.
const LEFT_BY_EVENTS: u64 = 256;

/// How often the threads are listed at most, until there is none that was created meanwhile.
const ATTEMPTS: usize = 20;

/// Records the switches of a process.
#[derive(Debug)]
pub(super) struct SwitchRecorder {
    /// With their processors.
    rings: Vec<(i32, Ring)>,
    /// The events that write to the ring of another one.
    events: Vec<PerfEvent>,
    /// Whether the thread for which the rings were opened has exited: then their descriptors are always readable, and
    /// say nothing about samples.
    are_silent: bool,
    samples: Option<ClockSamples>,
    /// The threads whose events were opened, by the numbers of the events.
    opened: HashMap<u64, i32>,
    /// By thread, the thread for whose events its samples are counted: itself if its events were opened, or else the
    /// one for whose events it was sampled first. A thread also has the events of the thread that creates it, and of
    /// that one's creator, and is sampled for each.
    counted: HashMap<i32, i32>,
    bytes: Vec<u8>,
    /// In the order of their times, as far as they are known.
    held_back: Vec<PerfRecord>,
    /// When they were last read, and in what time the fullest ring would fill up if records came as fast as before that.
    read_at: Duration,
    fills_up_in: Duration,
}

impl SwitchRecorder {
    /// Begins to record the switches of all threads, and `samples` of them; returns the threads.
    ///
    /// # Errors
    ///
    /// Why the kernel does not permit it; or that there are too many threads.
    pub(super) fn of_process(
        process: &Process,
        samples: Option<ClockSamples>,
    ) -> io::Result<(SwitchRecorder, Vec<i32>)> {
        let processors = processors()?;
        let mut switches = SwitchRecorder::without_events(samples);
        let (mut begun, mut known) = (Vec::new(), HashSet::new());
        for _ in 0..ATTEMPTS {
            let tids = process.threads().and_then(|mut list| list.read())?;
            let new: Vec<i32> = tids.into_iter().filter(|tid| known.insert(*tid)).collect();
            if new.is_empty() {
                break;
            }
            let events = known.len().saturating_mul(processors.len());
            refuse_too_many(events)?;
            for tid in new {
                let is_there = if switches.rings.is_empty() {
                    switches.open_first(tid, &processors)?
                } else {
                    switches.open(tid)?
                };
                if is_there {
                    begun.push(tid);
                }
            }
        }
        if switches.rings.is_empty() {
            return Err(io::ErrorKind::NotFound.into());
        }
        Ok((switches, begun))
    }

    fn without_events(samples: Option<ClockSamples>) -> SwitchRecorder {
        SwitchRecorder {
            rings: Vec::new(),
            events: Vec::new(),
            are_silent: false,
            samples,
            opened: HashMap::new(),
            counted: HashMap::new(),
            bytes: Vec::new(),
            held_back: Vec::new(),
            read_at: monotonic_now(),
            fills_up_in: Duration::MAX,
        }
    }

    /// Tries whether the switches of a process could be recorded, and `samples` of it, by recording those of one thread for a moment.
    ///
    /// # Errors
    ///
    /// Same as [`SwitchRecorder::of_process`].
    pub(super) fn try_out(process: &Process, samples: Option<ClockSamples>) -> io::Result<()> {
        let processors = processors()?;
        let tids = process.threads().and_then(|mut list| list.read())?;
        refuse_too_many(tids.len().saturating_mul(processors.len()))?;
        let mut switches = SwitchRecorder::without_events(samples);
        for tid in tids {
            if switches.open_first(tid, &processors)? {
                return Ok(());
            }
        }
        Err(io::ErrorKind::NotFound.into())
    }

    /// Returns how many descriptors are open for it.
    pub(super) fn descriptors(&self) -> usize {
        self.rings.len() + self.events.len()
    }

    /// Returns how long to wait, at most, until they are read again, so that none is lost: until a quarter of a ring is
    /// full.
    pub(super) fn read_within(&self) -> Duration {
        let of_samples = self.samples.map_or(Duration::MAX, |samples| {
            let rings = self.rings.iter();
            let min_len = rings.map(|(_, ring)| ring.len()).min().unwrap_or(RING_LEN);
            samples
                .period
                .mul_f64(min_len as f64 / f64::from(samples.stack_len))
        });
        self.fills_up_in.min(of_samples) / 4
    }

    /// Returns what becomes readable when there is a sample, if the samples are to be read at once.
    pub(super) fn sample_fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let wake_reader = self.samples.is_some_and(|it| it.wake_reader) && !self.are_silent;
        let rings = self.rings.iter().filter(move |_| wake_reader);
        rings.map(|(_, ring)| ring.event().as_fd())
    }

    /// Returns which samples the kernel takes, if any.
    pub(super) fn clock_samples(&self) -> Option<ClockSamples> {
        self.samples
    }

    /// Opens the events of the first thread, and their rings, shorter ones if so many bytes may not be locked; returns
    /// false if it has exited.
    fn open_first(&mut self, tid: i32, processors: &[i32]) -> io::Result<bool> {
        let min_len = self.samples.map_or(MIN_RING_LEN, |samples| {
            (MIN_SAMPLES * samples.stack_len as usize).next_power_of_two()
        });
        let mut len = RING_LEN;
        while len > min_len && len.saturating_mul(processors.len()) > MAX_RING_BYTES {
            len /= 2;
        }
        // All have the same length: how much may be locked is a sum.
        let rings = loop {
            match self.open_rings(tid, processors, len) {
                Err(error) if is_too_long(&error) && len > min_len => len /= 2,
                Err(error) if is_exited(&error) => return Ok(false),
                opened => break opened?,
            }
        };
        for (_, ring) in &rings {
            self.opened.insert(ring.event().id()?, tid);
        }
        self.counted.insert(tid, tid);
        self.rings = rings;
        Ok(true)
    }

    fn open_rings(&self, tid: i32, processors: &[i32], len: usize) -> io::Result<Vec<(i32, Ring)>> {
        let mut rings = Vec::new();
        for &processor in processors {
            let event = match PerfEvent::of_switches(tid, processor, self.samples.as_ref()) {
                // It is offline, or does not exist.
                Err(error) if is_offline(&error) && processor > 0 => continue,
                opened => opened?,
            };
            rings.push((processor, Ring::map(event, len)?));
        }
        Ok(rings)
    }

    /// Opens the events of another thread; returns false if it has exited.
    fn open(&mut self, tid: i32) -> io::Result<bool> {
        for (processor, ring) in &self.rings {
            let event = match PerfEvent::of_switches(tid, *processor, self.samples.as_ref()) {
                Err(error) if is_exited(&error) => return Ok(false),
                Err(error) if is_offline(&error) => continue,
                opened => opened?,
            };
            event.write_to(ring)?;
            self.opened.insert(event.id()?, tid);
            self.events.push(event);
        }
        self.counted.insert(tid, tid);
        Ok(true)
    }

    /// Returns whether a sample is the one that counts, of those that a thread has for several events.
    pub(super) fn is_counted(&mut self, sample: &PerfRecord) -> bool {
        let Some(&of) = self.opened.get(&sample.event) else {
            return false;
        };
        *self.counted.entry(sample.tid).or_insert(of) == of
    }

    /// Forgets a thread that has exited: its number may be used again, by one that another thread creates.
    pub(super) fn forget(&mut self, tid: i32) {
        self.counted.remove(&tid);
    }

    /// Returns how many threads are known.
    pub(super) fn len(&self) -> usize {
        self.counted.len()
    }

    /// Forgets the threads that are not there.
    pub(super) fn retain(&mut self, is_there: impl Fn(i32) -> bool) {
        self.counted.retain(|&tid, _| is_there(tid));
    }

    /// Returns how many processors are online of which nothing is recorded: they were not when recording began.
    pub(super) fn unrecorded_processors(&self) -> usize {
        let online = fs::read_to_string("/sys/devices/system/cpu/online");
        self.unrecorded_of(&online.unwrap_or_default())
    }

    fn unrecorded_of(&self, online: &str) -> usize {
        let recorded: Vec<i32> = self.rings.iter().map(|(processor, _)| *processor).collect();
        let is_unrecorded = |processor: &i32| !recorded.contains(processor);
        processors_in(online).filter(is_unrecorded).count()
    }

    /// Returns the threads of the records that were read, and are not yet returned.
    pub(super) fn just_switched(&self) -> impl Iterator<Item = i32> {
        self.held_back.iter().map(|record| record.tid)
    }

    /// Returns the records that were written since the last call, in the order of their times, and the time until which there are
    /// all: not those of the last 500 µs when more are to come. `complete` finds the frames of samples for which their copy is not
    /// enough.
    pub(super) fn read(
        &mut self,
        is_last: bool,
        mut complete: impl FnMut(&CopiedStack) -> Option<RawStack>,
    ) -> (Vec<PerfRecord>, Duration) {
        let now = monotonic_now();
        let until = if is_last {
            Duration::MAX
        } else {
            now.saturating_sub(LATE)
        };
        let since = now.saturating_sub(self.read_at);
        (self.read_at, self.fills_up_in) = (now, Duration::MAX);
        for (_, ring) in &mut self.rings {
            self.bytes.clear();
            ring.read(&mut self.bytes);
            let earlier = self.held_back.len();
            if !self.bytes.is_empty() {
                let fills_up = ring.len() as f64 / self.bytes.len() as f64;
                self.fills_up_in = self.fills_up_in.min(since.mul_f64(fills_up));
            }
            records::parse(&self.bytes, &mut self.held_back);
            for record in self.held_back.get_mut(earlier..).unwrap_or_default() {
                record.complete(&mut complete);
            }
            if ring.len() - self.bytes.len() < NEARLY_FULL {
                let last = self.held_back.get(earlier..).and_then(<[_]>::last);
                let full = last.map(|last| PerfRecord::of_full_ring(last, monotonic_now()));
                self.held_back.extend(full);
            }
        }
        self.are_silent |= self.rings.iter().any(|(_, ring)| ring.event().has_exited());
        self.held_back.sort_by_key(|record| record.at);
        let ready = self.held_back.partition_point(|record| record.at <= until);
        (self.held_back.drain(..ready).collect(), until)
    }
}

fn is_exited(error: &io::Error) -> bool {
    error.raw_os_error() == Some(libc::ESRCH)
}

fn is_offline(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENODEV | libc::EINVAL))
}

/// Returns whether an error is that more bytes were to be locked than is permitted.
fn is_too_long(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EPERM | libc::ENOMEM))
}

/// Returns the numbers in a list such as `0-3,8`, at most [`MAX_PROCESSORS`].
fn processors_in(list: &str) -> impl Iterator<Item = i32> {
    let ranges = list.trim().split(',').filter_map(|range| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        Some(first.parse::<i32>().ok()?..=last.parse().ok()?)
    });
    ranges.flatten().take(MAX_PROCESSORS)
}

/// Returns the processors that are there, online or not.
fn processors() -> io::Result<Vec<i32>> {
    let present = fs::read_to_string("/sys/devices/system/cpu/present");
    let present: Vec<i32> = processors_in(&present.unwrap_or_default()).collect();
    if !present.is_empty() {
        return Ok(present);
    }
    let configured = sysconf(SysconfVar::_NPROCESSORS_CONF)?.unwrap_or(1);
    Ok((0..configured.max(1))
        .filter_map(|it| i32::try_from(it).ok())
        .collect())
}

fn refuse_too_many(events: usize) -> io::Result<()> {
    let (limit, _) = getrlimit(Resource::RLIMIT_NOFILE)?;
    let permitted = limit.saturating_sub(LEFT_BY_EVENTS) / 2;
    if events as u64 <= permitted {
        return Ok(());
    }
    let why = format!(
        "it would need {events} open files, and may open {permitted}: raise ulimit -n, which is {limit}"
    );
    Err(io::Error::other(why))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::records::RecordKind;

    #[test]
    fn samples_of_several_events_count_once() {
        let mut switches = SwitchRecorder::without_events(None);
        // The events of threads 10 and 20; 20 was created by 10 after that of 10 was opened, and has both.
        switches.opened = HashMap::from([(1, 10), (2, 20)]);
        switches.counted = HashMap::from([(10, 10), (20, 20)]);
        let mut is_counted = |tid, event| {
            switches.is_counted(&PerfRecord {
                at: Duration::ZERO,
                pid: 10,
                tid,
                event,
                kind: RecordKind::Sample(None),
            })
        };
        assert!(is_counted(10, 1));
        assert_eq!(
            [1, 2, 1].map(|event| is_counted(20, event)),
            [false, true, false]
        );
        // A thread that 20 creates has both of 20.
        assert_eq!(
            [1, 2, 1].map(|event| is_counted(30, event)),
            [true, false, true]
        );
        assert!(!is_counted(30, 9), "an event of somebody else");
        // It exits, and 10 creates one that gets its number.
        switches.forget(30);
        let sample = |event| PerfRecord {
            at: Duration::ZERO,
            pid: 10,
            tid: 30,
            event,
            kind: RecordKind::Sample(None),
        };
        assert!(switches.is_counted(&sample(1)));
        switches.retain(|tid| tid != 30);
        assert_eq!(switches.len(), 2);
    }

    #[test]
    fn processors_without_a_ring_are_counted() {
        let switches = SwitchRecorder::without_events(None);
        let unrecorded = ["0-3,5,7-8\n", "0\n", "", "x-3"].map(|it| switches.unrecorded_of(it));
        assert_eq!(unrecorded, [7, 1, 0, 0]);
        let listed: Vec<i32> = processors_in("0-1,8-9\n").collect();
        assert_eq!(listed, [0, 1, 8, 9]);
        assert_eq!(processors_in("0-2000000000").count(), MAX_PROCESSORS);
        let present = processors().unwrap();
        let online = fs::read_to_string("/sys/devices/system/cpu/online").unwrap();
        assert!(processors_in(&online).all(|it| present.contains(&it)));
    }

    #[test]
    fn first_estimate_is_of_the_recorded_time() {
        let begun = monotonic_now();
        assert!(SwitchRecorder::without_events(None).read_at >= begun);
    }
}
