//! [`Event`]: one hit, from the record that a trampoline has written of it.

mod pair_key;
mod slow;

pub use pair_key::PairKey;
pub use slow::SlowPair;

use std::collections::HashMap;
use std::iter;
use std::num::NonZeroU64;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use crate::address::LiveAddr;
use crate::elf::table::Site;
use crate::error::{Error, MemoryPart, Result};
use crate::memory::ReadMemory;
use crate::observe::functions::ObservedFunctions;
use crate::observe::layout::arena::Arena;
use crate::observe::layout::shared::{SharedLayout, fields, record};
use crate::observe::layout::stack_copies::StackCopies;
use crate::observe::page_table::PageTable;
use crate::observe::plan::{ObservationPlan, PlannedPoint, PointOf};
use crate::observe::read::copied_stack::CopiedStack;
use crate::observe::read::data_source;
use crate::observe::read::ring::{Rings, word};
use crate::observe::read::value::{CustomKind, RecordedArgument, Value};
use crate::observe::role::{ArgumentFormat, ArgumentSource, KeyRole};
use crate::process::Process;
use crate::process::memory::ProcessMemory;
use crate::process::object::Object;
use crate::process::program::{LiveSite, ProbeId, Program};
use crate::sys::ticks::Clock;

/// The hits of a process, one by one.
///
/// ```no_run
/// use std::{thread, time::Duration};
/// use probes_lib::{Observation, Options, Selector, Target};
///
/// let observation = Observation::new().watch(Selector::name("req_start"));
/// let mut observer = Target::open(4242)?.observe(&observation, Options::default())?;
/// loop {
///     thread::sleep(Duration::from_millis(50));
///     let read = observer.events()?;
///     for event in &read.events {
///         println!("{} {:?}", event.name(), event.arguments);
///     }
///     if read.dropped > 0 {
///         println!("{} hits were dropped", read.dropped);
///     }
/// }
/// # Ok::<(), probes_lib::Error>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct Events {
    /// In the order of their times.
    pub events: Vec<Event>,
    /// How many hits, or slow pairs, were lost: overwritten before they were read, with an invalid record, or, of a
    /// function of C, not recorded because there was no place to save registers.
    pub dropped: u64,
    /// How many hits were not recorded because of [`Observation::sample`](crate::Observation::sample).
    pub skipped: u64,
    /// How many hits were not recorded because [`Observation::only_where`](crate::Observation::only_where) has no
    /// answer for them; `None` if there is no such expression.
    pub untyped: Option<u64>,
    /// Pairs that lasted long ([`Observation::report_slow`](crate::Observation::report_slow)), in the order of their
    /// ends.
    pub slow_pairs: Vec<SlowPair>,
}

/// A hit.
///
/// ```no_run
/// # let event: probes_lib::Event = unimplemented!();
/// println!("{:?} thread {:?}: {}", event.time, event.thread, event.name());
/// println!("at {} with {:?}", event.address(), event.arguments);
/// ```
#[derive(Clone, Debug)]
pub struct Event {
    /// Its time.
    pub time: SystemTime,
    /// The same on CLOCK_MONOTONIC, in nanoseconds. Times that were read together are in the right order; between two
    /// readings, they may be some hundred nanoseconds off.
    pub monotonic: u64,
    /// The thread's id in our pid namespace; `None` if it is unknown, or if the thread is of
    /// another namespace and has exited.
    pub thread: Option<i32>,
    /// Which kind of hit it is.
    pub kind: EventKind,
    /// Its arguments, decoded, at most six; they are found by the note of the site, or by the calling convention of the function. Of a
    /// return, the result.
    pub arguments: Vec<Value>,
    /// Where the call is, of a function whose exits are recorded
    /// ([`Observation::watch_exits`](crate::Observation::watch_exits)).
    pub frame: Option<CallFrame>,
    /// Of an end of a pair, the key of the pair, if it is asked for
    /// ([`Observation::with_pair_keys`](crate::Observation::with_pair_keys)), and has a value.
    pub pair_key: Option<PairKey>,
    /// Its stack, if it was copied ([`Observation::with_stacks`](crate::Observation::with_stacks)). At a return, it is
    /// that of the entry: the frames of the callers are the same.
    pub stack: Option<CopiedStack>,
    within: Arc<Watched>,
    of: EventOf,
}

/// What the points of events are in.
#[derive(Debug)]
struct Watched {
    program: Arc<Program>,
    functions: Arc<ObservedFunctions>,
}

/// What kind of hit an event is.
///
/// [`CallFrame`] has an example.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum EventKind {
    /// A hit of a probe, a call of a function, or an execution of an instruction.
    Hit,
    /// A return of a function.
    Return,
    /// A function is left by a tail call ([`Observation::watch_exits`](crate::Observation::watch_exits),
    /// [`Observation::report_slow`](crate::Observation::report_slow)): its call has ended, and the other function
    /// returns in its place.
    Jump,
}

/// Identifies the frame of a call by its stack, and the place of its return address there. The place of a callee is lower than that of
/// its caller on the same stack. So when a call begins, earlier calls of that stack at its place or a lower one have ended.
///
/// ```no_run
/// use probes_lib::{Event, EventKind, FunctionSelector, Observation, Options, Target};
///
/// let handlers = FunctionSelector::Glob("Http.handle*".parse().unwrap());
/// let observation = Observation::new().watch_functions(handlers).watch_exits();
/// let mut observer = Target::open(4242)?.observe(&observation, Options::default())?;
/// let events = observer.events()?.events;
/// for (index, exit) in events.iter().enumerate().filter(|(_, it)| it.kind == EventKind::Return) {
///     let is_call = |it: &&Event| it.kind == EventKind::Hit && it.thread == exit.thread && it.frame == exit.frame;
///     if let Some(call) = events[..index].iter().rfind(is_call) {
///         println!("{} returned after {} ns", exit.name(), exit.monotonic - call.monotonic);
///     }
/// }
/// # Ok::<(), probes_lib::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CallFrame {
    /// The number of the fiber of OCaml 5 that the stack belongs to, which may move between threads; `None` if it is
    /// the stack of the thread.
    pub fiber: Option<u64>,
    /// The place of the return address: its address or, on the stack of a fiber, its distance in bytes from the upper
    /// end, which is negative.
    pub place: i64,
}

/// What was hit.
#[derive(Clone, Copy, Debug)]
enum EventOf {
    /// A site of a probe.
    Site { site: usize, probe: ProbeId },
    /// The function with this index among those that are observed.
    Function(usize),
}

impl Event {
    /// Returns the name of its probe, or of its function as in the source; of a function without a name, its address.
    pub fn name(&self) -> &str {
        match self.of {
            EventOf::Site { probe, .. } => self.within.program.by_id(probe).name(),
            EventOf::Function(index) => &self.within.functions.functions[index].wanted.name,
        }
    }

    /// Returns its site; `None` for a function.
    pub fn site(&self) -> Option<Site<'_>> {
        self.live_site().map(|site| site.site)
    }

    /// Returns the object that its site is in; `None` for a function.
    pub fn object(&self) -> Option<&Object> {
        self.live_site().map(|site| site.object)
    }

    /// Returns the index of that object in [`Target::objects`](crate::Target::objects).
    pub fn object_index(&self) -> Option<usize> {
        let object = self.object()?;
        let mut objects = self.within.program.objects().iter();
        objects.position(|one| std::ptr::eq(one, object))
    }

    /// Returns the path of the file that its site or function is in.
    pub fn path(&self) -> &Path {
        match self.of {
            EventOf::Site { site, .. } => self.within.program.site(site).object.path(),
            EventOf::Function(index) => &self.within.functions.functions[index].wanted.object,
        }
    }

    /// Returns the address in the process of the site's nop, or of the function or the instruction that is
    /// observed.
    pub fn address(&self) -> LiveAddr {
        match self.of {
            EventOf::Site { site, .. } => self.within.program.site(site).address(),
            EventOf::Function(index) => self.within.functions.functions[index].wanted.address,
        }
    }

    fn live_site(&self) -> Option<LiveSite<'_>> {
        match self.of {
            EventOf::Site { site, .. } => Some(self.within.program.site(site)),
            EventOf::Function(_) => None,
        }
    }
}

/// The shortest time between two readings of the mappings, once [`STARTUP_TIME`] is over.
const MIN_RENEWAL_INTERVAL: Duration = Duration::from_millis(100);

/// For how long after the beginning the mappings are read anew whenever hits are read.
const STARTUP_TIME: Duration = Duration::from_secs(1);

/// How long the table of readable pages is valid, from when the mappings were read.
pub(crate) const PAGES_VALID_FOR: Duration = Duration::from_secs(1);

/// How long after a reading the next one should be while hits come.
const READ_INTERVAL: Duration = Duration::from_millis(2);

/// The longest time between two readings, once no hit has come for [`QUIET_TIME`].
const QUIET_INTERVAL: Duration = Duration::from_millis(10);
const QUIET_TIME: Duration = Duration::from_millis(100);

/// The shortest time between two hits of a thread that is expected then: a ring has to have room for those between readings.
const QUIET_HIT: Duration = Duration::from_micros(1);

/// How often more than the heads of the rings is read even if they have not changed.
const FULL_READ_INTERVAL: Duration = Duration::from_millis(50);

/// How many kinds of custom blocks are remembered at most: more than any program has.
const MAX_KINDS: usize = 1024;

/// Makes events of records.
#[derive(Debug)]
pub(crate) struct EventReader {
    within: Arc<Watched>,
    layout: SharedLayout,
    rings: Rings,
    thread_ids: ThreadIds,
    /// Of each point of the plan, how it is watched.
    points: Vec<Option<WatchedPoint>>,
    /// The kinds of custom blocks, by the address of their operations.
    kinds: HashMap<u64, CustomKind>,
    /// The ids of threads in our pid namespace, by their ids in the namespace of the process;
    /// `None` if a thread is not found.
    threads: HashMap<i32, Option<i32>>,
    pages: PageTable,
    /// From which time on pairs are slow.
    slow_from: Duration,
    began_at: Instant,
    pages_renewed_at: Instant,
    /// When the last new records were read.
    last_records_at: Instant,
    /// When more than the heads of the rings was last read.
    last_full_read_at: Instant,
    /// Of calls that could not be recorded, because no registers could be saved.
    lost: PointCounters,
    /// Of hits that the filter has no answer for, if there is one.
    untyped: Option<PointCounters>,
    skipped: SkippedHits,
}

/// Counters of some points, which all threads share.
#[derive(Debug)]
struct PointCounters {
    /// Where those of an arena are, and which of its points have them.
    counters: Vec<(LiveAddr, Vec<bool>)>,
    /// Their sum at the last reading.
    known: u64,
}

impl PointCounters {
    /// Returns those of the points of a plan that `have` them; the counter of the first point of an arena is the one
    /// with the index that `first` returns.
    fn of(
        plan: &ObservationPlan,
        arenas: &[Arena],
        have: impl Fn(&PlannedPoint) -> bool,
        first: impl Fn(&Arena) -> usize,
    ) -> PointCounters {
        let mut points = plan.points.iter();
        let counters = arenas.iter().filter_map(|arena| {
            let these = points.by_ref().take(arena.points.len());
            let have: Vec<bool> = these.map(&have).collect();
            let has_any = have.contains(&true);
            has_any.then(|| (arena.locked_counter(first(arena)), have))
        });
        PointCounters {
            counters: counters.collect(),
            known: 0,
        }
    }

    /// Returns what was added to them since the last reading.
    fn read(&mut self, pid: i32, source: &impl ReadMemory) -> Result<u64> {
        let mut sum = 0_u64;
        for (at, have) in &self.counters {
            let counters = data_source::read(pid, source, *at, 8 * have.len() as u64)?;
            let counters = counters.chunks_exact(8).zip(have);
            let counters = counters.filter(|(_, has_one)| **has_one);
            let values = counters.map(|(counter, _)| word(counter, 0));
            sum = values.fold(sum, u64::saturating_add);
        }
        let added = sum.saturating_sub(self.known);
        self.known = sum;
        Ok(added)
    }
}

/// Counters of the hits of which some are recorded.
#[derive(Debug, Default)]
struct SkippedHits {
    /// Where those of an arena are, and for each of its points N if every Nth hit is recorded, `None` if all are.
    counters: Vec<(LiveAddr, Vec<Option<NonZeroU64>>)>,
    /// How many were not recorded at the last reading.
    known: u64,
}

impl SkippedHits {
    /// Returns where the counters of a plan are, whose points are in these arenas.
    fn of(plan: &ObservationPlan, arenas: &[Arena]) -> SkippedHits {
        let mut points = plan.points.iter();
        let counters = arenas.iter().filter_map(|arena| {
            let these = points.by_ref().take(arena.points.len());
            let samples = these.map(|planned| planned.role.watched.as_ref()?.sample);
            let samples: Vec<Option<NonZeroU64>> = samples.collect();
            let at = arena.locked_counter(arena.sampled_counter(0));
            samples.iter().any(Option::is_some).then_some((at, samples))
        });
        SkippedHits {
            counters: counters.collect(),
            known: 0,
        }
    }

    /// Returns how many were not recorded since the last reading.
    fn read(&mut self, pid: i32, source: &impl ReadMemory) -> Result<u64> {
        let mut sum = 0_u64;
        for (at, samples) in &self.counters {
            let counters = data_source::read(pid, source, *at, 8 * samples.len() as u64)?;
            let counters = counters.chunks_exact(8).zip(samples);
            let skipped = counters.filter_map(|(counter, sample)| {
                let hits = word(counter, 0);
                sample.map(|every| hits - hits / every)
            });
            sum = skipped.fold(sum, u64::saturating_add);
        }
        let skipped = sum.saturating_sub(self.known);
        self.known = sum;
        Ok(skipped)
    }
}

/// Which thread ids records have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ThreadIds {
    /// None.
    Unknown,
    /// Ids of our pid namespace.
    OfOurNamespace,
    /// Ids of another pid namespace.
    OfAnotherNamespace,
}

/// A point that is watched, and the arguments that are recorded.
#[derive(Debug)]
struct WatchedPoint {
    of: EventOf,
    /// Whether each of its hits is recorded, and not only those at the ends of slow pairs.
    is_watched: bool,
    /// Whether it is an end of pairs.
    is_pair_end: bool,
    /// The key of its pairs, if hits are to say it.
    pair_key: Option<Arc<KeyRole>>,
    arguments: Vec<ArgumentShape>,
    /// Whether returns are recorded.
    has_results: bool,
    /// If results are recorded, and there is one.
    result: Option<ArgumentShape>,
    /// Whether all exits are recorded, and where calls are.
    has_frames: bool,
}

/// How to decode an argument of a record.
#[derive(Clone, Copy, Debug)]
struct ArgumentShape {
    source: ArgumentSource,
    size: u8,
    signed: bool,
    is_float: bool,
    is_c: bool,
}

impl EventReader {
    /// Begins to read the events of a plan, whose points are in `arenas`; `shared` is the address of its shared data,
    /// and `pages` is the table of readable pages.
    pub(crate) fn begin(
        plan: &ObservationPlan,
        arenas: &[Arena],
        shared: LiveAddr,
        thread_ids: ThreadIds,
        pages: PageTable,
    ) -> EventReader {
        EventReader {
            points: watched_points(plan),
            within: Arc::new(Watched {
                program: plan.program.clone(),
                functions: plan.functions.clone(),
            }),
            layout: plan.shared,
            rings: Rings::at(shared, plan.shared),
            thread_ids,
            kinds: HashMap::new(),
            threads: HashMap::new(),
            pages,
            slow_from: plan.slow_from,
            began_at: Instant::now(),
            pages_renewed_at: Instant::now(),
            last_records_at: Instant::now(),
            last_full_read_at: Instant::now(),
            lost: PointCounters::of(plan, arenas, may_lose_calls, |_| 0),
            untyped: plan.points.iter().any(is_filtered).then(|| {
                PointCounters::of(plan, arenas, is_filtered, |arena| arena.untyped_counter(0))
            }),
            skipped: SkippedHits::of(plan, arenas),
        }
    }

    /// Returns no events if nothing has come, as far as the rings tell: it is not checked whether the process is still
    /// observed. `None` if there are events, or it is time to look at everything.
    pub(crate) fn empty_if_no_new_records(&self, source: &impl ReadMemory) -> Option<Events> {
        let is_due = self.last_full_read_at.elapsed() >= FULL_READ_INTERVAL;
        let has_nothing = !is_due && self.rings.have_nothing_new(source);
        has_nothing.then(|| Events {
            untyped: self.untyped.as_ref().map(|_| 0),
            ..Events::default()
        })
    }

    /// Reads the new events from `source`; `is_over` says that no trampoline writes any more. `memory` is
    /// that of the process, unless it has exited.
    ///
    /// # Errors
    ///
    /// If they cannot be read, or the process has exited.
    pub(crate) fn read(
        &mut self,
        process: &Process,
        source: &impl ReadMemory,
        memory: Option<&ProcessMemory>,
        clock: &Clock,
        is_over: bool,
    ) -> Result<Events> {
        let records = self.rings.read(source, is_over).map_err(|source| {
            let (pid, at) = (process.pid(), self.rings.shared);
            Error::of_read(pid, MemoryPart::ObservationData, at, source)
        })?;
        self.last_full_read_at = Instant::now();
        if !records.bytes.is_empty() {
            self.last_records_at = self.last_full_read_at;
        }
        // If the process has just exited, the records that were read still count; the next call fails.
        let is_optional = !is_over && !records.bytes.is_empty();
        let or_later = |read: Result<u64>| match read {
            Err(_) if is_optional => Ok(0),
            read => read,
        };
        let untyped = self.untyped.as_mut();
        let untyped = untyped.map(|it| or_later(it.read(process.pid(), source)));
        let len = self.layout.record_len.max(1) as usize;
        let mut events = Events {
            events: Vec::with_capacity(records.bytes.len() / len),
            dropped: records.dropped,
            skipped: or_later(self.skipped.read(process.pid(), source))?,
            untyped: untyped.transpose()?,
            slow_pairs: Vec::new(),
        };
        let lost = or_later(self.lost.read(process.pid(), source))?;
        events.dropped = events.dropped.saturating_add(lost);
        for record in records.bytes.chunks_exact(len) {
            let point = (word(record, record::TID) >> 32) as u32;
            if point & record::SLOW != 0 {
                match self.slow_pair(process, memory, clock, record) {
                    // The trampoline compares with a bound that is a little lower.
                    Some(pair) if pair.duration < self.slow_from => {}
                    Some(pair) => events.slow_pairs.push(pair),
                    None => events.dropped = events.dropped.saturating_add(1),
                }
                continue;
            }
            match self.event(process, memory, clock, record) {
                Some(event) => events.events.push(event),
                None => events.dropped = events.dropped.saturating_add(1),
            }
        }
        Ok(events)
    }

    /// Returns the event of a record; `None` if it is not one that a trampoline writes.
    #[inline]
    fn event(
        &mut self,
        process: &Process,
        memory: Option<&ProcessMemory>,
        clock: &Clock,
        record: &[u8],
    ) -> Option<Event> {
        let ids = word(record, record::TID);
        let (tid, point) = (ids as u32 as i32, (ids >> 32) as u32);
        let ends = record::RETURN | record::JUMP;
        let watched = self.points.get((point & !ends) as usize)?.as_ref()?;
        let (kind, shapes) = match point & ends {
            0 => (EventKind::Hit, &watched.arguments[..]),
            record::RETURN => (EventKind::Return, watched.result.as_slice()),
            record::JUMP => (EventKind::Jump, &[][..]),
            _ => return None,
        };
        let is_possible = match kind {
            EventKind::Hit => true,
            EventKind::Return => watched.has_frames || watched.has_results,
            EventKind::Jump => watched.has_frames,
        };
        if !watched.is_watched || !is_possible {
            return None;
        }
        let frame = watched.has_frames.then(|| frame(record));
        let recorded = all_recorded(record, shapes);
        let pair_key = watched.pair_key.as_ref();
        let has_threads = self.thread_ids != ThreadIds::Unknown;
        let pair_key =
            pair_key.and_then(|key| PairKey::of(&key.parts, &recorded, has_threads.then_some(tid)));
        let what = (watched.of, kind, recorded, tid);
        let mut event = self.hit(process, memory, clock, record, what);
        event.frame = frame;
        event.pair_key = pair_key;
        event.stack = self.stack(record, &event);
        Some(event)
    }

    /// Returns the stack that a record has of its hit, if stacks are copied.
    fn stack(&self, record: &[u8], event: &Event) -> Option<CopiedStack> {
        if self.layout.stacks == StackCopies::None {
            return None;
        }
        let copied = record.get(self.layout.stack_at() as usize..)?;
        CopiedStack::parse(copied, event.address())
    }

    /// Returns the event of a record, whose kind, arguments and thread are known.
    #[inline]
    fn hit(
        &mut self,
        process: &Process,
        memory: Option<&ProcessMemory>,
        clock: &Clock,
        record: &[u8],
        (of, kind, recorded, tid): (EventOf, EventKind, Vec<RecordedArgument<'_>>, i32),
    ) -> Event {
        let values = recorded
            .iter()
            .map(|it| it.decode(&mut |operations| self.custom(memory, operations)))
            .collect();
        Event {
            time: clock.time(word(record, record::TIME)),
            monotonic: clock.monotonic(word(record, record::TIME)),
            kind,
            arguments: values,
            frame: None,
            pair_key: None,
            thread: self.thread(process, tid),
            stack: None,
            within: self.within.clone(),
            of,
        }
    }

    /// Returns the kind of a custom block, from the address of its operations: the first word there
    /// is the address of a name.
    fn custom(&mut self, memory: Option<&ProcessMemory>, operations: u64) -> CustomKind {
        if let Some(known) = self.kinds.get(&operations) {
            return known.clone();
        }
        let read_kind = || {
            let at = memory?.read_word(LiveAddr(operations)).ok()?;
            CustomKind::of(&name_at(memory?, LiveAddr(at))?)
        };
        let Some(custom) = read_kind() else {
            return CustomKind::Unknown;
        };
        if self.kinds.len() < MAX_KINDS {
            self.kinds.insert(operations, custom.clone());
        }
        custom
    }

    /// Returns the id in our pid namespace of the thread with this id in its own.
    fn thread(&mut self, process: &Process, tid: i32) -> Option<i32> {
        match self.thread_ids {
            ThreadIds::Unknown => return None,
            ThreadIds::OfOurNamespace => return Some(tid),
            ThreadIds::OfAnotherNamespace => {}
        }
        if let Some(known) = self.threads.get(&tid) {
            return *known;
        }
        for thread in process.threads().and_then(|mut list| list.read()).ok()? {
            if let Ok(status) = process.thread_status(thread) {
                self.threads.insert(status.innermost, Some(thread));
            }
        }
        // A thread that has exited is not found. Its id is looked for again only after the table of
        // pages is renewed.
        *self.threads.entry(tid).or_insert(None)
    }

    /// See [`Observer::next_read`](crate::Observer::next_read).
    pub(crate) fn next_read(&self) -> Duration {
        if self.last_records_at.elapsed() < QUIET_TIME {
            return READ_INTERVAL;
        }
        let records = u32::try_from(self.layout.records()).unwrap_or(u32::MAX);
        let until_full = QUIET_HIT.saturating_mul(records);
        until_full.clamp(READ_INTERVAL, QUIET_INTERVAL)
    }

    /// Returns whether it is time, at `now`, to renew the table of readable pages. At the beginning
    /// it always is, because a program that has just started is still mapping its heap.
    pub(crate) fn pages_are_due(&self, now: Instant) -> bool {
        let since = |earlier| now.saturating_duration_since(earlier);
        let is_starting = since(self.began_at) < STARTUP_TIME;
        self.layout.has_pages()
            && (is_starting || since(self.pages_renewed_at) > MIN_RENEWAL_INTERVAL)
    }

    /// Renews the table of readable pages; see [`PageTable::renew`].
    ///
    /// # Errors
    ///
    /// If the mappings of the process cannot be read, and those of `write`.
    pub(crate) fn renew_pages(
        &mut self,
        process: &Process,
        write: impl FnOnce(&[(u64, Vec<u8>)]) -> Result<()>,
    ) -> Result<()> {
        self.pages_renewed_at = Instant::now();
        // Another thread may have the id of one that has exited.
        self.threads.clear();
        self.pages.renew(process, write)
    }
}

/// Returns whether a point records calls, and may find no place to save registers.
fn may_lose_calls(planned: &PlannedPoint) -> bool {
    let watched = planned.role.watched.as_ref();
    watched.is_some_and(|it| it.function.is_some_and(|it| !it.is_ocaml))
}

/// Returns whether only the hits of a point are recorded for which a filter is true.
fn is_filtered(planned: &PlannedPoint) -> bool {
    planned.role.chooses_records()
}

/// Returns how each point of a plan is watched; `None` if it is not, and no slow pairs are recorded there.
fn watched_points(plan: &ObservationPlan) -> Vec<Option<WatchedPoint>> {
    let watched = |(index, planned): (usize, &PlannedPoint)| {
        let role = &planned.role;
        role.watched.as_ref().or(role.reported.as_ref())?;
        Some((planned.site()?, index))
    };
    let planned = plan.points.iter().enumerate();
    let index_of: HashMap<usize, usize> = planned.filter_map(watched).collect();
    let mut points: Vec<Option<WatchedPoint>> = plan.points.iter().map(|_| None).collect();
    for (index, planned) in plan.points.iter().enumerate() {
        let role = &planned.role;
        let recorded = role.watched.as_ref().or(role.reported.as_ref());
        let (PointOf::Function(function), Some(watched)) = (planned.of, recorded) else {
            continue;
        };
        let is_c = watched.function.is_none_or(|it| !it.is_ocaml) || !watched.formats.is_empty();
        let shape = |(source, format): (&ArgumentSource, ArgumentFormat)| ArgumentShape {
            source: *source,
            size: format.size,
            signed: format.signed,
            is_float: format.is_float,
            is_c,
        };
        let formats = watched.formats.iter().copied();
        let formats = formats.chain(iter::repeat(ArgumentFormat::WORD));
        let has_results =
            role.watched.is_none() || watched.function.is_some_and(|it| it.has_results);
        let watched = WatchedPoint {
            of: EventOf::Function(function),
            is_watched: role.watched.is_some(),
            is_pair_end: !role.ends.is_empty(),
            pair_key: None,
            arguments: watched.arguments.iter().zip(formats).map(shape).collect(),
            has_results,
            result: (watched.result_format.filter(|_| has_results))
                .map(|format| shape((&ArgumentSource::RESULT, format))),
            has_frames: watched.function.is_some_and(|it| it.exits_on.is_some()),
        };
        points[index] = Some(watched);
    }
    for probe in plan.program.probes() {
        for site in probe.sites() {
            let Some(&index) = index_of.get(&site) else {
                continue;
            };
            let role = &plan.points[index].role;
            // Both have the same arguments.
            let sources = role.watched.as_ref().or(role.reported.as_ref());
            let sources = sources.into_iter().flat_map(|it| &it.arguments);
            let arguments = plan.program.site(site).site.arguments();
            let shapes = sources
                .zip(arguments)
                .map(|(source, argument)| ArgumentShape {
                    source: *source,
                    size: argument.as_ref().map_or(8, |it| it.size),
                    signed: argument.is_some_and(|it| it.signed),
                    is_float: false,
                    is_c: false,
                });
            let watched = WatchedPoint {
                of: EventOf::Site {
                    probe: probe.id(),
                    site,
                },
                is_watched: role.watched.is_some(),
                is_pair_end: !role.ends.is_empty(),
                pair_key: role.pair_key.clone().filter(|_| plan.has_pair_keys),
                has_results: false,
                result: None,
                has_frames: false,
                arguments: shapes.collect(),
            };
            points[index] = Some(watched);
        }
    }
    points
}

/// Returns the bytes of a name before the null byte that ends it; `None` if it cannot be read, or is longer than names
/// are.
fn name_at(memory: &impl ReadMemory, at: LiveAddr) -> Option<Vec<u8>> {
    const MAX_NAME_LEN: usize = 64;
    let mut name = Vec::new();
    let mut at = at;
    while name.len() <= MAX_NAME_LEN {
        // Not across the end of a page.
        let mut bytes = [0; 8];
        let bytes = &mut bytes[..8 - at.0 as usize % 8];
        memory.read(at, bytes).ok()?;
        let end = bytes.iter().position(|byte| *byte == 0);
        name.extend(&bytes[..end.unwrap_or(bytes.len())]);
        if end.is_some() {
            return Some(name);
        }
        at = LiveAddr(at.0.checked_add(bytes.len() as u64)?);
    }
    None
}

/// Returns where the call in a record is.
fn frame(record: &[u8]) -> CallFrame {
    let fiber = word(record, record::FIBER);
    CallFrame {
        fiber: (fiber != 0).then_some(fiber >> 1),
        place: word(record, record::FRAME) as i64,
    }
}

/// Returns the arguments in a record.
fn all_recorded<'r>(record: &'r [u8], shapes: &[ArgumentShape]) -> Vec<RecordedArgument<'r>> {
    let shapes = shapes.iter().enumerate();
    let all = shapes.map(|(index, shape)| recorded(record, index, *shape));
    all.collect()
}

/// Returns the argument of this index in a record.
fn recorded(record: &[u8], index: usize, shape: ArgumentShape) -> RecordedArgument<'_> {
    let at = record::ARGUMENTS + record::ARGUMENT_LEN * index as u64;
    let copied = record
        .get(record::COPIED as usize + index)
        .copied()
        .unwrap_or(0);
    let words = u64::from(copied).saturating_sub(1).min(fields::WORDS);
    let start = (at + record::COPY) as usize;
    let bytes = record.get(start..start + 8 * words as usize);
    RecordedArgument {
        source: shape.source,
        size: shape.size,
        signed: shape.signed,
        is_float: shape.is_float,
        is_c: shape.is_c,
        value: word(record, at + record::VALUE),
        header: word(record, at + record::BLOCK_HEADER),
        words: bytes.filter(|_| copied > 0),
    }
}

#[cfg(test)]
mod tests {
    use nix::fcntl::OFlag;
    use nix::unistd::gettid;
    use test_support::{Talker, fixture};

    use super::*;
    use crate::address::LoadBias;
    use crate::memory::double::SliceMemory;
    use crate::observe::layout::groups::GROUPS;
    use crate::observe::layout::readable_pages::ReadablePages;
    use crate::observe::layout::shared::HEADER_LEN;
    use crate::observe::observation::Observation;
    use crate::select::Selector;
    use crate::select::function::FunctionSelector;
    use crate::sys::ticks::TickMeasurement;
    use crate::testing::{ProgramSpec, RecordedData, loaded_twice, program_with_arguments};

    const BASE: LiveAddr = LiveAddr(0x10_0000);
    const AGAIN: LoadBias = LoadBias(0x1000_0000);

    /// A plan of two probes with a site in each of two objects: the points 1 and 3 are watched.
    fn plan() -> ObservationPlan {
        let program = program_with_arguments(&[("a", ""), ("b", "8@%rdi -4@8(%rsp)")]);
        let observation = Observation::new()
            .count(Selector::name("a"))
            .watch(Selector::name("b"));
        ObservationPlan::of(
            &observation,
            Arc::new(loaded_twice(&program, AGAIN)),
            Arc::default(),
        )
        .unwrap()
    }

    fn reader(thread_ids: ThreadIds) -> EventReader {
        let plan = plan();
        let pages = PageTable::of(plan.shared, ReadablePages::default(), 0, false);
        EventReader::begin(&plan, &[], BASE, thread_ids, pages)
    }

    /// Returns a record with these words at these offsets.
    fn record_of(words: &[(u64, u64)]) -> Vec<u8> {
        let mut bytes = vec![0; record::len(2) as usize];
        for (at, word) in words {
            bytes[*at as usize..][..8].copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    #[test]
    fn quiet_rings_are_read_less_often() {
        let mut reader = reader(ThreadIds::Unknown);
        assert_eq!(reader.next_read(), READ_INTERVAL);
        reader.last_records_at -= QUIET_TIME;
        assert_eq!(reader.layout.records(), 4096);
        assert_eq!(reader.next_read(), 4096 * QUIET_HIT);
        reader.layout.record_len = 64;
        assert_eq!(reader.next_read(), QUIET_INTERVAL);
        // Rings with less room.
        reader.layout.record_len = 1 << 16;
        assert_eq!(reader.next_read(), READ_INTERVAL);
    }

    #[test]
    fn full_reading_is_due_after_50_ms() {
        let mut reader = reader(ThreadIds::Unknown);
        let rings = vec![0; reader.layout.ring(GROUPS) as usize];
        let source = SliceMemory::new([(BASE.0, rings)]);
        assert!(reader.empty_if_no_new_records(&source).is_some());
        reader.last_full_read_at -= FULL_READ_INTERVAL;
        assert!(reader.empty_if_no_new_records(&source).is_none());
        reader.last_full_read_at = Instant::now();
        let unreadable = SliceMemory::new([]);
        assert!(reader.empty_if_no_new_records(&unreadable).is_none());
    }

    #[test]
    fn event_has_the_fields_of_its_record() {
        let process = Process::own().unwrap();
        let clock = TickMeasurement::begin().clock();
        let mut reader = reader(ThreadIds::OfOurNamespace);
        let mut event = |point: u64| {
            let bytes = record_of(&[
                (record::TIME, 1 << 40),
                (record::TID, point << 32 | 77),
                (record::ARGUMENTS + record::VALUE, 85),
                (record::ARGUMENTS + record::ARGUMENT_LEN, 0xffff_ffff),
            ]);
            reader.event(&process, None, &clock, &bytes)
        };
        for (point, object) in [(1, 0), (3, 1)] {
            let event = event(point).unwrap();
            assert_eq!((event.name(), event.thread), ("b", Some(77)));
            assert_eq!(event.time, clock.time(1 << 40));
            assert_eq!(event.arguments, [Value::Int(42), Value::Int(-1)]);
            assert_eq!(event.object_index(), Some(object));
            let address = ProgramSpec::TEXT + 8;
            assert_eq!(event.site().unwrap().address().0, address);
            assert_eq!(event.address().0, address + object as u64 * AGAIN.0);
            assert_eq!(
                event.object().unwrap().load_bias().0,
                object as u64 * AGAIN.0
            );
        }
        for point in [0, 2, 4, u64::from(u32::MAX)] {
            assert!(event(point).is_none(), "{point}");
        }
    }

    #[test]
    fn records_of_no_point_are_dropped() {
        let layout = plan().shared;
        let mut bytes = vec![0; layout.ring(GROUPS) as usize];
        let ring = layout.ring(0) as usize;
        bytes[ring] = 3;
        for (index, point) in [1_u64, 0, 3].into_iter().enumerate() {
            let words = [
                (record::NUMBER, index as u64 + 1),
                (record::TID, point << 32),
            ];
            let at = ring + HEADER_LEN as usize + index * layout.record_len as usize;
            bytes[at..][..layout.record_len as usize].copy_from_slice(&record_of(&words));
        }
        let memory = SliceMemory::new([(BASE.0, bytes)]);
        let process = Process::own().unwrap();
        let clock = TickMeasurement::begin().clock();
        let mut reader = reader(ThreadIds::Unknown);
        let events = reader.read(&process, &memory, None, &clock, false).unwrap();
        assert_eq!((events.events.len(), events.dropped), (2, 1));
        assert_eq!(events.events[0].thread, None);
    }

    #[test]
    fn recorded_argument_has_its_copied_words() {
        let shape = ArgumentShape {
            source: ArgumentSource::on_stack(8),
            size: 4,
            signed: true,
            is_float: false,
            is_c: false,
        };
        let at = record::ARGUMENTS + record::ARGUMENT_LEN;
        let mut words = vec![
            (at + record::VALUE, 11),
            (at + record::BLOCK_HEADER, 22),
            (at + record::COPY, 33),
            (at + record::COPY + 8 * 8, 44),
        ];
        // All words of the argument before it were copied.
        for (copied, len) in [(0, None), (1, Some(0)), (3, Some(2)), (255, Some(22))] {
            words.push((record::COPIED, copied << 8 | 10));
            let bytes = record_of(&words);
            let recorded = recorded(&bytes, 1, shape);
            assert_eq!((recorded.value, recorded.header), (11, 22));
            assert_eq!((recorded.size, recorded.signed), (4, true));
            assert_eq!(recorded.words.map(|words| words.len() / 8), len);
            if let Some(words @ [first, ..]) = recorded.words {
                assert_eq!((*first, words.len() % 8), (33, 0));
            }
        }
    }

    #[test]
    fn custom_blocks_are_known_by_name() {
        let name = *b"_j\0";
        let operations = [name.as_ptr() as u64];
        let at = operations.as_ptr() as u64;
        let process = Process::own().unwrap();
        let memory = ProcessMemory::open(&process, OFlag::O_RDONLY).unwrap();
        let mut reader = reader(ThreadIds::Unknown);
        assert_eq!(reader.custom(None, at), CustomKind::Unknown);
        assert_eq!(reader.custom(Some(&memory), 0), CustomKind::Unknown);
        assert!(reader.kinds.is_empty());
        assert_eq!(reader.custom(Some(&memory), at), CustomKind::Int64);
        // Now it is known without reading memory.
        assert_eq!(reader.custom(None, at), CustomKind::Int64);
        // No more than a certain number are remembered.
        reader.kinds = (1..=MAX_KINDS as u64)
            .map(|at| (at, CustomKind::Unknown))
            .collect();
        assert_eq!(reader.custom(Some(&memory), at), CustomKind::Int64);
        assert_eq!(reader.kinds.len(), MAX_KINDS);
    }

    #[test]
    fn threads_are_named_by_our_namespace() {
        let process = Process::own().unwrap();
        let tid = gettid().as_raw();
        let mut foreign = reader(ThreadIds::OfAnotherNamespace);
        assert_eq!(foreign.thread(&process, tid), Some(tid));
        assert_eq!(foreign.thread(&process, i32::MAX), None);
        // They are looked for again after the table is renewed: an id may be another thread's then.
        assert!(foreign.threads.contains_key(&i32::MAX));
        foreign.renew_pages(&process, |_| Ok(())).unwrap();
        assert!(foreign.threads.is_empty());
        let unknown = |thread_ids| reader(thread_ids).thread(&process, i32::MAX);
        assert_eq!(unknown(ThreadIds::OfOurNamespace), Some(i32::MAX));
        assert_eq!(unknown(ThreadIds::Unknown), None);
    }

    #[test]
    fn pages_are_renewed_often_at_the_beginning() {
        let mut reader = reader(ThreadIds::Unknown);
        let begun = Instant::now();
        let after = |milliseconds| begun + Duration::from_millis(milliseconds);
        reader.began_at = begun;
        reader.pages_renewed_at = after(900);
        let is_due = |reader: &EventReader| {
            let due = |milliseconds: &u64| reader.pages_are_due(after(*milliseconds));
            [0, 950, 999, 1000, 1001]
                .into_iter()
                .filter(due)
                .collect::<Vec<u64>>()
        };
        assert_eq!(is_due(&reader), [0, 950, 999, 1001]);
        reader.layout = SharedLayout::default();
        assert_eq!(is_due(&reader), [0_u64; 0]);
    }

    fn function(name: &str) -> FunctionSelector {
        FunctionSelector::Glob(name.parse().unwrap())
    }

    /// Returns a plan of functions of a program that is running, with the probes `a` and `b`.
    fn plan_of_functions(observation: &Observation) -> ObservationPlan {
        let target = Talker::start(&fixture("calls.pie"));
        let functions = ObservedFunctions::find(target.pid(), observation).unwrap();
        let program = program_with_arguments(&[("a", "8@%rdi"), ("b", "8@%rdi")]);
        ObservationPlan::of(observation, Arc::new(program), Arc::new(functions)).unwrap()
    }

    fn reader_of(plan: &ObservationPlan, data: &RecordedData) -> EventReader {
        let arenas = std::slice::from_ref(&data.arena);
        let pages = PageTable::of(plan.shared, ReadablePages::default(), 0, false);
        let ids = ThreadIds::OfOurNamespace;
        EventReader::begin(plan, arenas, data.shared(), ids, pages)
    }

    #[test]
    fn exits_of_functions_are_events_if_asked_for() {
        let watching = || Observation::new().watch_functions(function("leaf"));
        let process = Process::own().unwrap();
        let clock = TickMeasurement::begin().clock();
        let event = |observation: &Observation, ends: u32| {
            let plan = plan_of_functions(observation);
            let mut reader = reader_of(&plan, &RecordedData::of(&plan));
            let mut bytes = vec![0; plan.shared.record_len as usize];
            for (at, word) in [
                (record::TID, u64::from(ends) << 32 | 77),
                (record::ARGUMENTS + record::VALUE, 85),
                (record::FRAME, -0x40_i64 as u64),
                (record::FIBER, 2 * 9 + 1),
            ] {
                bytes[at as usize..][..8].copy_from_slice(&word.to_le_bytes());
            }
            let event = reader.event(&process, None, &clock, &bytes)?;
            assert_eq!(event.name(), "leaf");
            Some((event.kind, event.arguments, event.frame))
        };
        let frame = Some(CallFrame {
            fiber: Some(9),
            place: -0x40,
        });
        // A word of C.
        let word = vec![Value::Int(85)];
        let (results, exits) = (watching().watch_results(), watching().watch_exits());
        let (returned, jumped) = (record::RETURN, record::JUMP);
        for (observation, ends, expected) in [
            (&watching(), 0, Some((EventKind::Hit, word.clone(), None))),
            (&watching(), returned, None),
            (&results, 0, Some((EventKind::Hit, word.clone(), None))),
            (
                &results,
                returned,
                Some((EventKind::Return, word.clone(), None)),
            ),
            (&results, jumped, None),
            (&exits, 0, Some((EventKind::Hit, word, frame))),
            (&exits, returned, Some((EventKind::Return, vec![], frame))),
            (&exits, jumped, Some((EventKind::Jump, vec![], frame))),
            (&exits, returned | jumped, None),
        ] {
            assert_eq!(event(observation, ends), expected, "{ends:x}");
        }
    }

    #[test]
    fn ocaml_arguments_without_format_are_values() {
        let mut plan = plan_of_functions(&Observation::new().watch_functions(function("leaf")));
        let mut is_c = |is_ocaml: bool, formats: &[ArgumentFormat]| {
            let watched = plan.points[0].role.watched.as_mut().unwrap();
            watched.function.as_mut().unwrap().is_ocaml = is_ocaml;
            watched.formats = formats.to_vec();
            watched_points(&plan)[0].as_ref().unwrap().arguments[0].is_c
        };
        assert!(is_c(false, &[]) && !is_c(true, &[]));
        // What has a format is a number or a pointer, whatever passes it.
        assert!(is_c(true, &[ArgumentFormat::WORD]));
    }

    #[test]
    fn slow_timed_calls_are_slow_pairs() {
        let timing = Observation::new().time_functions(function("outer"));
        let plan = plan_of_functions(&timing.report_slow(Duration::from_millis(1)));
        let process = Process::own().unwrap();
        let clock = TickMeasurement::begin().clock();
        let mut reader = reader_of(&plan, &RecordedData::of(&plan));
        let kept = plan.shared.kept_len as usize;
        let mut bytes = vec![0; plan.shared.record_len as usize];
        let mut put = |at: u64, word: u64| {
            bytes[at as usize..][..8].copy_from_slice(&word.to_le_bytes());
        };
        put(record::TIME, 1 << 40);
        put(
            record::TID,
            u64::from(record::SLOW | record::RETURN) << 32 | 77,
        );
        put(record::ARGUMENTS + record::VALUE, 9);
        put(kept as u64 + record::TIME, 1 << 39);
        put(kept as u64 + record::TID, 77);
        put(kept as u64 + record::ARGUMENTS + record::VALUE, 5);
        assert!(
            reader
                .event(&process, None, &clock, &bytes[kept..])
                .is_none()
        );
        let slow = reader.slow_pair(&process, None, &clock, &bytes).unwrap();
        assert_eq!((slow.pair, slow.stop.kind), (None, EventKind::Return));
        assert_eq!(slow.stop.arguments, [Value::Int(9)]);
        let start = slow.start.unwrap();
        assert_eq!(
            (start.kind, &start.arguments[0]),
            (EventKind::Hit, &Value::Int(5))
        );
        assert_eq!(slow.duration, clock.between(1 << 39, 1 << 40));
    }

    #[test]
    fn slow_pairs_last_as_long_as_asked() {
        let timing = Observation::new().time("a", "b").time("b", "a");
        let plan = plan_of_functions(&timing.report_slow(Duration::from_millis(1)));
        let process = Process::own().unwrap();
        let clock = TickMeasurement::begin().clock();
        let duration = clock.between(1 << 39, 1 << 40);
        let read = |slow_from: Duration, pair: u64, start: u32| {
            let mut data = RecordedData::of(&plan);
            let layout = plan.shared;
            let ring = data.shared().plus(layout.ring(0));
            let at = ring.plus(HEADER_LEN);
            let kept = u64::from(layout.kept_len);
            data.put(ring, 1);
            data.put(at.plus(record::NUMBER), 1);
            data.put(at.plus(record::TIME), 1 << 40);
            data.put(at.plus(record::TID), u64::from(record::SLOW | 1) << 32 | 77);
            data.put(at.plus(kept + record::NUMBER), pair);
            data.put(at.plus(kept + record::TIME), 1 << 39);
            data.put(at.plus(kept + record::TID), u64::from(start) << 32 | 77);
            let mut reader = reader_of(&plan, &data);
            reader.slow_from = slow_from;
            let events = reader.read(&process, &data.memory, None, &clock, false);
            let events = events.unwrap();
            assert!(events.events.is_empty());
            let pairs = events.slow_pairs.iter();
            let pairs: Vec<_> = pairs
                .map(|it| (it.pair, it.start.as_ref().map(|it| it.name().to_owned())))
                .collect();
            (pairs, events.dropped)
        };
        let from_a = |pair| vec![(Some(pair), Some("a".to_owned()))];
        assert_eq!(read(duration, 1, 0), (from_a(1), 0));
        assert_eq!(read(duration / 2, 0, 0), (from_a(0), 0));
        let longer = duration + Duration::from_nanos(1);
        assert_eq!(read(longer, 0, 0), (vec![], 0));
        let unknown = record::UNKNOWN_POINT;
        assert_eq!(read(duration, 0, unknown), (vec![(Some(0), None)], 0));
        // No such pair, and no such point.
        assert_eq!(read(duration, 2, 0), (vec![], 1));
        assert_eq!(read(duration, 0, 99), (vec![], 1));
    }

    #[test]
    fn hits_that_are_not_recorded_are_counted() {
        let process = Process::own().unwrap();
        let clock = TickMeasurement::begin().clock();
        let functions = || {
            let watching = Observation::new().watch_functions(function("leaf"));
            watching.watch_functions(function("outer"))
        };
        // Calls of C for which no registers could be saved.
        let plan = plan_of_functions(&functions().count(Selector::name("a")));
        let mut data = RecordedData::of(&plan);
        let is_site = |it: &PlannedPoint| it.site().is_some();
        let points = 0..plan.points.len();
        for point in points.clone() {
            let hits = if is_site(&plan.points[point]) {
                1000
            } else {
                3
            };
            data.hit(point, hits);
        }
        let mut reader = reader_of(&plan, &data);
        let read = |reader: &mut EventReader, data: &RecordedData| {
            let events = reader.read(&process, &data.memory, None, &clock, false);
            let events = events.unwrap();
            (events.dropped, events.skipped, events.untyped)
        };
        let lost = 3 * (plan.points.len() as u64 - 1);
        assert_eq!(read(&mut reader, &data), (lost, 0, None));
        // Only what is new.
        assert_eq!(read(&mut reader, &data), (0, 0, None));
        // Of probes, every tenth hit is recorded, and only of some arguments.
        let sampled = Observation::new().watch(Selector::All);
        let sampled = sampled.sample(NonZeroU64::new(10).unwrap());
        let plan = plan_of_functions(&sampled.only_where("arg0 == 1".parse().unwrap()));
        let mut data = RecordedData::of(&plan);
        for (point, hits) in [(0, 25), (1, 100)] {
            data.hit(data.arena.sampled_counter(point), hits);
            data.hit(data.arena.untyped_counter(point), 4);
            // These count something else.
            data.hit(point, 7777);
        }
        let mut reader = reader_of(&plan, &data);
        assert_eq!(read(&mut reader, &data), (0, 23 + 90, Some(8)));
        data.hit(data.arena.sampled_counter(1), 110);
        assert_eq!(read(&mut reader, &data), (0, 9, Some(0)));
    }
}
