//! [`Event`]: a hit by itself, from the record that a trampoline has written of it.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use crate::address::LiveAddr;
use crate::elf::table::Site;
use crate::memory::ReadMemory;
use crate::observe::layout::readable_pages::ReadablePages;
use crate::observe::layout::shared::{self, Shared, record};
use crate::observe::plan::{ArgumentSource, Role};
use crate::observe::read::ring::{Rings, word};
use crate::observe::read::value::{Custom, Recorded, Value};
use crate::process::Process;
use crate::process::maps::Mapping;
use crate::process::memory::ProcessMemory;
use crate::process::object::Object;
use crate::process::program::{ProbeId, Program};
use crate::sys::ticks::Clock;

/// What was seen of the hits of a process, one by one.
#[derive(Clone, Debug, Default)]
pub struct Events {
    /// In the order of their times.
    pub events: Vec<Event>,
    /// Hits that could not be read any more when it was their lock.
    pub dropped: u64,
}

/// A hit.
#[derive(Clone, Debug)]
pub struct Event {
    /// When it was.
    pub time: SystemTime,
    /// The thread, as we see it; `None` if it cannot be told, or has ended in another pid namespace.
    pub thread: Option<i32>,
    /// What its note says of where they are, decoded; six at most.
    pub arguments: Vec<Value>,
    program: Arc<Program>,
    site: usize,
    probe: ProbeId,
}

impl Event {
    /// The name of its probe.
    pub fn name(&self) -> &str {
        self.program.by_id(self.probe).name()
    }

    /// Its site.
    pub fn site(&self) -> Site<'_> {
        self.program.site(self.site).site
    }

    /// The object that the site is in.
    pub fn object(&self) -> &Object {
        self.program.site(self.site).object
    }

    /// The index of that object among [`Target::objects`](crate::Target::objects).
    pub fn object_index(&self) -> usize {
        let mut objects = self.program.objects().iter();
        let object = self.object();
        objects
            .position(|one| std::ptr::eq(one, object))
            .unwrap_or(0)
    }

    /// Where its nop is in the process.
    pub fn address(&self) -> LiveAddr {
        self.program.site(self.site).address()
    }
}

/// The mappings are read anew so often, at most.
const RENEWAL: Duration = Duration::from_millis(100);

/// For so long, whenever hits are read.
const YOUNG: Duration = Duration::from_secs(1);

/// How long the trampolines believe what they were told of pages.
pub(crate) const PAGES_VALID_FOR: Duration = Duration::from_secs(1);

/// More kinds of custom blocks than a program has.
const MOST_KINDS: usize = 1024;

/// Makes events of records.
#[derive(Debug)]
pub(crate) struct EventReader {
    program: Arc<Program>,
    layout: Shared,
    rings: Rings,
    tids: ThreadIds,
    /// Those that are watched, by index in the program.
    sites: HashMap<usize, WatchedSite>,
    /// What is known of the operations of custom blocks.
    kinds: HashMap<u64, Custom>,
    /// Our ids of threads that know themselves by others.
    threads: HashMap<i32, Option<i32>>,
    pages: ReadablePages,
    begun: Instant,
    renewed: Instant,
}

/// How records tell threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ThreadIds {
    /// Not at all.
    Unknown,
    /// By ids that are ours, too.
    Ours,
    /// By ids of another pid namespace.
    OtherObjects,
}

/// A site that is watched.
#[derive(Debug)]
struct WatchedSite {
    probe: ProbeId,
    arguments: Vec<ArgumentShape>,
}

/// Where an argument was applied from, how many bytes it has, and whether it is signed.
#[derive(Clone, Copy, Debug)]
struct ArgumentShape {
    source: ArgumentSource,
    size: u8,
    signed: bool,
}

impl EventReader {
    /// Of sites of these roles; `shared` is where they share what, and `pages` is what trampolines have been
    /// told.
    pub(crate) fn begin(
        program: Arc<Program>,
        roles: &[Role],
        (shared, layout): (LiveAddr, Shared),
        tids: ThreadIds,
        pages: ReadablePages,
    ) -> EventReader {
        let mut sites = HashMap::new();
        for probe in program.probes() {
            for site in probe.sites() {
                let arguments = program.site(site).site.arguments();
                let watched = roles.get(site).and_then(|role| role.watched.as_ref());
                let shapes = watched.map(|watched| watched.arguments.iter().zip(arguments));
                let Some(shapes) = shapes else { continue };
                let shapes = shapes.map(|(source, argument)| ArgumentShape {
                    source: *source,
                    size: argument.as_ref().map_or(8, |it| it.size),
                    signed: argument.is_some_and(|it| it.signed),
                });
                let watched = WatchedSite {
                    probe: probe.id(),
                    arguments: shapes.collect(),
                };
                sites.insert(site, watched);
            }
        }
        EventReader {
            sites,
            program,
            layout,
            rings: Rings::at(shared, layout),
            tids,
            kinds: HashMap::new(),
            threads: HashMap::new(),
            pages,
            begun: Instant::now(),
            renewed: Instant::now(),
        }
    }

    /// Where it reads.
    pub(crate) fn shared(&self) -> LiveAddr {
        self.rings.shared
    }

    /// What is new, from `source`; `is_over` says that nobody writes any more. `memory` is the process's,
    /// as long as there is one.
    pub(crate) fn read(
        &mut self,
        process: &Process,
        source: &impl ReadMemory,
        memory: Option<&ProcessMemory>,
        clock: &Clock,
        is_over: bool,
    ) -> std::io::Result<Events> {
        let records = self.rings.read(source, is_over)?;
        let mut events = Events {
            events: Vec::new(),
            dropped: records.dropped,
        };
        for record in records
            .bytes
            .chunks_exact(self.layout.record_len.max(1) as usize)
        {
            match self.event(process, memory, clock, record) {
                Some(event) => events.events.push(event),
                None => events.dropped = events.dropped.saturating_add(1),
            }
        }
        Ok(events)
    }

    /// `None` if the record is not one of our trampolines'.
    fn event(
        &mut self,
        process: &Process,
        memory: Option<&ProcessMemory>,
        clock: &Clock,
        record: &[u8],
    ) -> Option<Event> {
        let ids = word(record, record::TID);
        let (tid, site) = (ids as u32 as i32, (ids >> 32) as usize);
        let watched = self.sites.get(&site)?;
        let probe = watched.probe;
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

    /// What a custom block is, by its operations, the first of which is the address of their name.
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

    /// Our id of the thread that knows itself by `tid`.
    fn thread(&mut self, process: &Process, tid: i32) -> Option<i32> {
        match self.tids {
            ThreadIds::Unknown => return None,
            ThreadIds::Ours => return Some(tid),
            ThreadIds::OtherObjects => {}
        }
        if let Some(known) = self.threads.get(&tid) {
            return *known;
        }
        for thread in process.threads().and_then(|mut list| list.read()).ok()? {
            if let Ok(status) = process.thread_status(thread) {
                self.threads.insert(status.innermost, Some(thread));
            }
        }
        // One that has ended is not looked for again, unless its id is another's in a while.
        *self.threads.entry(tid).or_insert(None)
    }

    /// Whether it is time to look which pages there are: a program that has just begun maps its heap.
    pub(crate) fn is_due(&self) -> bool {
        let is_young = self.begun.elapsed() < YOUNG;
        self.layout.record_len > 0 && (is_young || self.renewed.elapsed() > RENEWAL)
    }

    /// What tells the trampolines which pages there are now, to be believed `until` then: an offset in what is
    /// shared, and bytes.
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

/// What tells the trampolines until when to believe what they were told of pages.
pub(crate) fn pages_valid_until(until: u64) -> (u64, Vec<u8>) {
    (shared::PAGES_VALID_UNTIL, until.to_le_bytes().to_vec())
}
