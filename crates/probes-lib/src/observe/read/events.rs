//! [`Event`]: one hit, from the record that a trampoline has written of it.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use crate::address::LiveAddr;
use crate::elf::table::Site;
use crate::error::{Error, MemoryPart, Result};
use crate::memory::ReadMemory;
use crate::observe::layout::readable_pages::ReadablePages;
use crate::observe::layout::shared::{self, SharedLayout, record};
use crate::observe::plan::{ObservationPlan, PlannedPoint};
use crate::observe::point::ArgumentSource;
use crate::observe::read::ring::{Rings, word};
use crate::observe::read::value::{Custom, Recorded, Value};
use crate::process::Process;
use crate::process::maps::Mapping;
use crate::process::memory::ProcessMemory;
use crate::process::object::Object;
use crate::process::program::{ProbeId, Program};
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
    /// How many hits were overwritten before they were read.
    pub dropped: u64,
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
    /// The thread's id in our pid namespace; `None` if it is unknown, or the thread, of another
    /// namespace, has exited.
    pub thread: Option<i32>,
    /// Its arguments, decoded, at most six: the note of the site says where they are.
    pub arguments: Vec<Value>,
    program: Arc<Program>,
    site: usize,
    probe: ProbeId,
}

impl Event {
    /// Returns the name of its probe.
    pub fn name(&self) -> &str {
        self.program.by_id(self.probe).name()
    }

    /// Returns its site.
    pub fn site(&self) -> Site<'_> {
        self.program.site(self.site).site
    }

    /// Returns the object that its site is in.
    pub fn object(&self) -> &Object {
        self.program.site(self.site).object
    }

    /// Returns the index of that object in [`Target::objects`](crate::Target::objects).
    pub fn object_index(&self) -> usize {
        let mut objects = self.program.objects().iter();
        let object = self.object();
        objects
            .position(|one| std::ptr::eq(one, object))
            .unwrap_or(0)
    }

    /// Returns the address of the site's nop in the process.
    pub fn address(&self) -> LiveAddr {
        self.program.site(self.site).address()
    }
}

/// How often the mappings are read anew, at most.
const RENEWAL: Duration = Duration::from_millis(100);

/// How long they are read anew whenever hits are read.
const YOUNG: Duration = Duration::from_secs(1);

/// How long the table of pages is valid once it is written.
pub(crate) const PAGES_VALID_FOR: Duration = Duration::from_secs(1);

/// More kinds of custom blocks than a program has.
const MOST_KINDS: usize = 1024;

/// Makes events of records.
#[derive(Debug)]
pub(crate) struct EventReader {
    program: Arc<Program>,
    layout: SharedLayout,
    rings: Rings,
    thread_ids: ThreadIds,
    /// The points that are watched, by index in the plan.
    points: HashMap<usize, WatchedPoint>,
    /// The kinds of custom blocks, by the address of their operations.
    kinds: HashMap<u64, Custom>,
    /// The ids of threads in our pid namespace, by those in theirs; `None` if a thread is not found.
    threads: HashMap<i32, Option<i32>>,
    /// What the table of pages holds.
    pages: ReadablePages,
    begun: Instant,
    renewed: Instant,
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

/// A point that is watched: the probe's site that it is, and the arguments that are recorded.
#[derive(Debug)]
struct WatchedPoint {
    probe: ProbeId,
    site: usize,
    arguments: Vec<ArgumentShape>,
}

/// Where an argument was read from, how many bytes it has, and whether it is signed.
#[derive(Clone, Copy, Debug)]
struct ArgumentShape {
    source: ArgumentSource,
    size: u8,
    signed: bool,
}

impl EventReader {
    /// Begins to read the events of a plan, whose shared data are at an address; `pages` is what the
    /// table of pages holds.
    pub(crate) fn begin(
        plan: &ObservationPlan,
        shared: LiveAddr,
        thread_ids: ThreadIds,
        pages: ReadablePages,
    ) -> EventReader {
        EventReader {
            points: watched_points(plan),
            program: plan.program.clone(),
            layout: plan.shared,
            rings: Rings::at(shared, plan.shared),
            thread_ids,
            kinds: HashMap::new(),
            threads: HashMap::new(),
            pages,
            begun: Instant::now(),
            renewed: Instant::now(),
        }
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
        let mut events = Events {
            events: Vec::new(),
            dropped: records.dropped,
        };
        let len = self.layout.record_len.max(1) as usize;
        for record in records.bytes.chunks_exact(len) {
            match self.event(process, memory, clock, record) {
                Some(event) => events.events.push(event),
                None => events.dropped = events.dropped.saturating_add(1),
            }
        }
        Ok(events)
    }

    /// Returns the event of a record; `None` if it is not one that a trampoline writes.
    fn event(
        &mut self,
        process: &Process,
        memory: Option<&ProcessMemory>,
        clock: &Clock,
        record: &[u8],
    ) -> Option<Event> {
        let ids = word(record, record::TID);
        let (tid, point) = (ids as u32 as i32, (ids >> 32) as usize);
        let watched = self.points.get(&point)?;
        let (probe, site) = (watched.probe, watched.site);
        let shapes = watched.arguments.iter().enumerate();
        let recorded: Vec<Recorded<'_>> = shapes
            .map(|(index, shape)| recorded(record, index, *shape))
            .collect();
        let values = recorded
            .iter()
            .map(|it| it.decode(|operations| self.custom(memory, operations)))
            .collect();
        Some(Event {
            time: clock.time(word(record, record::TIME)),
            arguments: values,
            thread: self.thread(process, tid),
            program: self.program.clone(),
            site,
            probe,
        })
    }

    /// Returns the kind of a custom block, from the address of its operations: the first of them is the
    /// address of their name.
    fn custom(&mut self, memory: Option<&ProcessMemory>, operations: u64) -> Custom {
        if let Some(known) = self.kinds.get(&operations) {
            return *known;
        }
        let name = || {
            let mut at = [0; 8];
            memory?.read(LiveAddr(operations), &mut at).ok()?;
            let mut name = [0; 3];
            let at = LiveAddr(u64::from_le_bytes(at));
            memory?.read(at, &mut name).ok()?;
            Some(Custom::of(&name))
        };
        let custom = name();
        if let Some(custom) = custom.filter(|_| self.kinds.len() < MOST_KINDS) {
            self.kinds.insert(operations, custom);
        }
        custom.unwrap_or(Custom::Other)
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
        // A thread that has exited is not looked for again until the pages are renewed: its id may be
        // reused.
        *self.threads.entry(tid).or_insert(None)
    }

    /// Returns whether it is time to renew the table of pages: a program that has just started maps its
    /// heap.
    pub(crate) fn is_due(&self) -> bool {
        let is_young = self.begun.elapsed() < YOUNG;
        self.layout.record_len > 0 && (is_young || self.renewed.elapsed() > RENEWAL)
    }

    /// Returns what to write into the shared data, at which offsets, to renew the table of pages, which is
    /// then valid `until` a time.
    pub(crate) fn renew(&mut self, maps: &[Mapping], until: u64) -> Vec<(u64, Vec<u8>)> {
        self.renewed = Instant::now();
        self.threads.retain(|_, thread| thread.is_some());
        let mut writes = Vec::new();
        if let Some(pages) = self.pages.renewed(maps) {
            let table = self.layout.pages();
            let changes = pages.changes(&self.pages).into_iter();
            writes.extend(changes.map(|write| (table + write.at, write.bytes)));
            self.pages = pages;
        }
        writes.push(pages_valid_until(until));
        writes
    }
}

/// Returns the points of a plan that are watched, by index.
fn watched_points(plan: &ObservationPlan) -> HashMap<usize, WatchedPoint> {
    let watched = |(index, planned): (usize, &PlannedPoint)| {
        planned.role.watched.as_ref()?;
        Some((planned.site, index))
    };
    let planned = plan.points.iter().enumerate();
    let index_of: HashMap<usize, usize> = planned.filter_map(watched).collect();
    let mut points = HashMap::with_capacity(index_of.len());
    for probe in plan.program.probes() {
        for site in probe.sites() {
            let Some(&index) = index_of.get(&site) else {
                continue;
            };
            let sources = plan.points[index].role.watched.iter();
            let sources = sources.flat_map(|watched| &watched.arguments);
            let arguments = plan.program.site(site).site.arguments();
            let shapes = sources
                .zip(arguments)
                .map(|(source, argument)| ArgumentShape {
                    source: *source,
                    size: argument.as_ref().map_or(8, |it| it.size),
                    signed: argument.is_some_and(|it| it.signed),
                });
            let watched = WatchedPoint {
                probe: probe.id(),
                site,
                arguments: shapes.collect(),
            };
            points.insert(index, watched);
        }
    }
    points
}

/// Returns the argument of this index in a record.
fn recorded(record: &[u8], index: usize, shape: ArgumentShape) -> Recorded<'_> {
    let at = record::ARGUMENTS + record::ARGUMENT_LEN * index as u64;
    let copied = record
        .get(record::COPIED as usize + index)
        .copied()
        .unwrap_or(0);
    let words = u64::from(copied).saturating_sub(1).min(record::COPY_WORDS);
    let start = (at + record::COPY) as usize;
    let bytes = record.get(start..start + 8 * words as usize);
    Recorded {
        source: shape.source,
        size: shape.size,
        signed: shape.signed,
        value: word(record, at + record::VALUE),
        header: word(record, at + record::BLOCK),
        words: bytes.filter(|_| copied > 0),
    }
}

/// Returns what to write into the shared data, at which offset, so that the table of pages is valid `until`
/// a time.
pub(crate) fn pages_valid_until(until: u64) -> (u64, Vec<u8>) {
    (shared::PAGES_VALID_UNTIL, until.to_le_bytes().to_vec())
}
