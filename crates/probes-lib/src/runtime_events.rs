//! [`RuntimeEvents`]: what the runtime of OCaml 5 writes about its garbage collector, and what programs write beside it
//! (`Runtime_events` of OCaml), read from the file that it maps.
//!
//! ```text
//! maps ─▶ the file that is mapped ─▶ header ─▶ a reader for each ring ─▶ items ─▶ events
//!         source                     header    ring                      item     names: of the numbers in a version
//! ```

mod durations;
mod gaps;
mod gc_times;
mod header;
mod item;
mod names;
mod open_phases;
mod pauses;
mod requests;
mod ring;
pub(crate) mod ring_file;
mod selected;
mod source;
mod user_names;

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::Duration;

use nix::fcntl::OFlag;

use crate::elf::ElfFile;
use crate::error::{ElfDefect, Error, FileError, Operation, Result, RuntimeEventsError, Subject};
use crate::observe::install::installed::events_switched_on;
use crate::process::Process;
use crate::process::image::open_executable;
use crate::process::maps::{DELETED, Mapping, read_maps};
use crate::process::objects::elf_of;
use crate::select::function::OCAML_5_SYMBOL;
use crate::select::glob::Glob;
use crate::ticks;

use self::header::{HEADER_LEN, Header};
use self::names::Names;
use self::open_phases::{OpenPhase, OpenPhases};
use self::ring::{CopyBuffer, RingBytes, RingError, RingReader, plausible_tails, tails};
use self::source::Source;
use self::user_names::UserNames;

pub use self::durations::EventDurations;
pub use self::gaps::EventGaps;
pub use self::gc_times::GcTimes;
pub use self::item::{CustomBytes, RuntimeEventKind, UserValue};
pub use self::pauses::{DomainPauses, GcPause, GcPauses, PausePhase};
pub use self::requests::DomainRequests;
pub use self::selected::{RuntimeEventGroup, RuntimeEventName, SelectedEntry, SelectedEvents};

/// A function of the runtime of every OCaml, for native code and for bytecode.
pub(crate) const OCAML_SYMBOL: &str = "caml_alloc_shr";

/// How long to wait between two reads: the first if rings fill slowly, otherwise the second.
const LONG_WAIT: Duration = Duration::from_millis(12);
const SHORT_WAIT: Duration = Duration::from_millis(5);

/// How long a ring is, unless OCAMLRUNPARAM says otherwise.
const USUAL_RING_WORDS: u64 = 1 << 16;

/// A ring fills slowly if at most one in so many of its words is written between two reads.
const SLOW_PART: u64 = 32;

/// A ring is read at once if more than one in so many of its words was written between two reads.
const FAST_PART: u64 = 4;

/// The events that the runtime of a process writes.
///
/// ```no_run
/// use probes_lib::{RingEntry, RuntimeEvents};
///
/// let mut events = RuntimeEvents::of_process(4242)?;
/// events.read(|entry| match entry {
///     RingEntry::Event { domain, time, kind } => println!("{domain} {time} {kind:?}"),
///     RingEntry::Lost { domain, words } => println!("{domain} lost {words} words"),
/// })?;
/// # Ok::<(), probes_lib::Error>(())
/// ```
#[derive(Debug)]
pub struct RuntimeEvents {
    subject: Subject,
    /// The process and its mapping of the file; `None` if the file was opened by its path.
    mapped: Option<(Process, Mapping)>,
    source: Source,
    header: Header,
    version: String,
    names: Names,
    rings: EventRings,
    user_names: UserNames,
    under_way: Vec<PhaseUnderWay>,
}

/// A phase of the collector's work that had begun, and not ended, when the events of a process were opened.
///
/// ```no_run
/// for phase in probes_lib::RuntimeEvents::of_process(4242)?.under_way() {
///     println!("domain {}: {} for {} ns already", phase.domain, phase.name, phase.seen - phase.began);
/// }
/// # Ok::<(), probes_lib::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PhaseUnderWay {
    /// The number of the ring.
    pub domain: u32,
    /// Its name.
    pub name: &'static str,
    /// When it began, in nanoseconds of CLOCK_MONOTONIC.
    pub began: u64,
    /// When the events were opened.
    pub seen: u64,
}

/// The rings, each with how far it was read.
#[derive(Debug)]
struct EventRings {
    readers: Vec<RingReader>,
    copied: CopyBuffer,
    /// How many words of one ring the last read has found, at most.
    most_read: u64,
    /// How often the events were resumed.
    resumed: u64,
    /// When they were last paused, and when something else was last written.
    paused_at: Option<u64>,
    written_at: u64,
}

/// What a ring has: an event, or a gap.
///
/// [`RuntimeEvents`] has an example.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RingEntry<'w> {
    /// An event.
    Event {
        /// The number of the ring: the domain's index, which a later domain may have again.
        domain: u32,
        /// When, in nanoseconds of CLOCK_MONOTONIC.
        time: u64,
        /// What has happened.
        kind: RuntimeEventKind<'w>,
    },
    /// Words of events were overwritten before they were read.
    Lost {
        /// The number of the ring.
        domain: u32,
        /// How many words.
        words: u64,
    },
}

impl RuntimeEvents {
    /// Opens the events of a process, from now on. It does not matter whether the file still has a name, and in which
    /// namespaces the process is.
    ///
    /// # Errors
    ///
    /// If there is no such process, the caller may not debug it, or its events cannot be read
    /// ([`RuntimeEventsError`]).
    pub fn of_process(pid: i32) -> Result<RuntimeEvents> {
        RuntimeEvents::on_since(pid, 0)
    }

    /// Same as [`RuntimeEvents::of_process`], for a process whose events were off until `time`, by CLOCK_MONOTONIC: a
    /// phase that began earlier does not count as under way, because its end was not written.
    ///
    /// # Errors
    ///
    /// See [`RuntimeEvents::of_process`].
    pub(crate) fn on_since(pid: i32, time: u64) -> Result<RuntimeEvents> {
        let process = Process::open(pid)?;
        process.refuse_without_program()?;
        let maps = read_maps(&process)?;
        let status = process.status();
        let status = status.map_err(|source| process.exited_or(source))?;
        let name = format!("{}.events", status.innermost);
        let of = |kind: RuntimeEventsError| Error::of_process(pid, kind);
        let Some(mapping) = find_ring(&maps, &name) else {
            return Err(of(why_no_events(&process, &maps)));
        };
        let known = known_names_of_process(&process, &maps)?;
        // Another tool may have switched them on.
        let time = time.max(events_switched_on(&process, &maps));
        let source = Source::of_mapping(&process, mapping)?;
        let mapping = mapping.clone();
        let subject = Subject::Process(pid);
        let mut events = RuntimeEvents::new(subject, source, known)?;
        events.mapped = Some((process, mapping));
        events.skip(time)?;
        Ok(events)
    }

    /// Opens the events in a file that `program` writes or has written, from the first.
    ///
    /// # Errors
    ///
    /// If a file cannot be read, or the events cannot ([`RuntimeEventsError`]).
    pub fn of_file(file: impl AsRef<Path>, program: impl AsRef<Path>) -> Result<RuntimeEvents> {
        let (path, program) = (file.as_ref(), program.as_ref());
        let version = version(&ElfFile::open(program)?);
        let known = known_names(Subject::File(program.to_owned()), version)?;
        let open = |source| Error::of_file(path, FileError::Open { source });
        // A pipe is not waited for.
        let mut options = File::options();
        let opened = options
            .read(true)
            .custom_flags(OFlag::O_NONBLOCK.bits())
            .open(path)
            .map_err(open)?;
        if !opened.metadata().map_err(open)?.is_file() {
            let defect = ElfDefect::NotARegularFile;
            return Err(Error::of_file(path, FileError::Elf(defect)));
        }
        let source = Source::of_file(opened).map_err(open)?;
        RuntimeEvents::new(Subject::File(path.to_owned()), source, known)
    }

    /// Checks that the events of a program that is to be started can be read: that it is not one of OCaml 4, which
    /// writes none, and that the events of its version of OCaml are known. A program whose runtime is a library, or has
    /// no symbols, is not refused.
    ///
    /// ```no_run
    /// probes_lib::RuntimeEvents::check_program("./server.exe")?;
    /// # Ok::<(), probes_lib::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`RuntimeEventsError::Ocaml4`], [`RuntimeEventsError::NoVersion`], [`RuntimeEventsError::UnknownVersion`].
    pub fn check_program(program: impl AsRef<Path>) -> Result<()> {
        let path = program.as_ref();
        // If it is no program, starting it says so.
        let Ok(elf) = ElfFile::open(path) else {
            return Ok(());
        };
        let has = |name: &str| elf.data_symbol(name).is_some();
        let why = match (has(OCAML_5_SYMBOL), version(&elf)) {
            (false, _) if has(OCAML_SYMBOL) => RuntimeEventsError::Ocaml4,
            (false, _) => return Ok(()),
            (true, None) => RuntimeEventsError::NoVersion,
            (true, Some(version)) if Names::of(&version).is_none() => {
                RuntimeEventsError::UnknownVersion { version }
            }
            (true, Some(_)) => return Ok(()),
        };
        Err(Error::of_file(path, why))
    }

    fn new(
        subject: Subject,
        source: Source,
        (names, version): (Names, String),
    ) -> Result<RuntimeEvents> {
        let mut bytes = [0; HEADER_LEN];
        let header = source
            .read(0, &mut bytes)
            .map_err(RingError::Read)
            .and_then(|()| Header::parse(&bytes, source.len()).map_err(RingError::Malformed));
        let header = header.map_err(|error| error_of(&subject, error))?;
        let readers = (0..header.domains).map(|domain| RingReader {
            domain,
            position: 0,
        });
        Ok(RuntimeEvents {
            subject,
            mapped: None,
            source,
            header,
            version,
            names,
            rings: EventRings {
                readers: readers.collect(),
                copied: CopyBuffer::default(),
                most_read: 0,
                resumed: 0,
                paused_at: None,
                written_at: 0,
            },
            user_names: UserNames::at(header.names_at),
            under_way: Vec::new(),
        })
    }

    /// Returns the events from the oldest one that is still in the file; what was overwritten before it counts as lost.
    /// Then no phase is under way ([`RuntimeEvents::under_way`]): its begin is read, or was lost.
    #[must_use]
    pub fn from_start(mut self) -> RuntimeEvents {
        self.under_way.clear();
        for reader in &mut self.rings.readers {
            reader.position = 0;
        }
        self
    }

    /// Returns the phases that were under way when the events of a process were opened, the outermost of each domain
    /// first, as far as the rings still had their beginnings. Empty for a file, all of whose phases are read.
    pub fn under_way(&self) -> &[PhaseUnderWay] {
        &self.under_way
    }

    /// Returns the version of OCaml that the program was compiled by, as `Sys.ocaml_version` has it.
    pub fn version(&self) -> &str {
        &self.version
    }

    /// Calls `visit` with all events that were written since the last call, ring by ring. What a ring has lost comes
    /// before the events that were written after it.
    ///
    /// # Errors
    ///
    /// If the file was truncated or is damaged, or the memory of the process is gone.
    pub fn read(&mut self, visit: impl FnMut(RingEntry<'_>)) -> Result<()> {
        self.rings
            .read(&self.source, &self.header, &self.names, visit)
            .map_err(|error| error_of(&self.subject, error))
    }

    /// Returns how long to wait before the next [`RuntimeEvents::read`]: 12 ms; 5 ms if the rings are short, or if one
    /// has filled fast before the last read; nothing if more than a quarter of one was filled. A ring of the usual
    /// length holds a million events a second for 20 ms.
    pub fn next_read(&self) -> Duration {
        wait_after(self.rings.most_read, self.header.ring_words)
    }

    /// Returns how often the program has resumed its events since they were opened, as far as they were read. What
    /// happened while they were paused is missing.
    pub fn resumed(&self) -> u64 {
        self.rings.resumed
    }

    /// Returns whether the program has paused its events, and nothing was written since, as far as they were read. Not
    /// all versions of the runtime write that; and another tool may have resumed them, which is not written.
    pub fn are_paused(&self) -> bool {
        let paused_at = self.rings.paused_at;
        paused_at.is_some_and(|time| time >= self.rings.written_at)
    }

    /// Selects events by globs for their names; all if there are none. Names are those of the version's phases and counters,
    /// `ring_start`, `domain_spawn` and the like, `alloc`, and those that the program has registered for its own events.
    ///
    /// ```no_run
    /// use probes_lib::{RuntimeEvents, SelectedEntry};
    ///
    /// let mut events = RuntimeEvents::of_process(4242)?;
    /// let mut selected = events.select(&["minor*".parse()?])?;
    /// events.read_selected(&mut selected, |entry| {
    ///     if let SelectedEntry::Event { name, domain, .. } = entry {
    ///         println!("{name} in domain {domain}");
    ///     }
    /// })?;
    /// println!("names: {:?}", selected.names());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// If a glob matches no name, or see [`RuntimeEvents::read`].
    pub fn select(&mut self, globs: &[Glob]) -> Result<SelectedEvents> {
        let users = self.user_names.all(&self.source);
        let users = users.map_err(|error| error_of(&self.subject, error.into()))?;
        let selected = SelectedEvents::new(globs, &self.names, users);
        selected.map_err(|kind| Error::new(self.subject.clone(), kind))
    }

    /// Does the same as [`RuntimeEvents::read`] with what is selected.
    ///
    /// # Errors
    ///
    /// See [`RuntimeEvents::read`].
    pub fn read_selected(
        &mut self,
        selected: &mut SelectedEvents,
        mut visit: impl FnMut(SelectedEntry<'_>),
    ) -> Result<()> {
        let (source, users) = (&self.source, &mut self.user_names);
        let mut named = Ok(());
        let read = self.rings.read(source, &self.header, &self.names, |entry| {
            let passed = selected.pass(entry, users, source, &mut visit);
            if let Err(error) = passed {
                named = Err(RingError::Read(error));
            }
        });
        read.and(named)
            .map_err(|error| error_of(&self.subject, error))
    }

    /// Returns the name of a user event; `None` if it has none so far.
    ///
    /// # Errors
    ///
    /// See [`RuntimeEvents::read`].
    pub fn user_event_name(&mut self, id: u16) -> Result<Option<&str>> {
        let name = self.user_names.get(&self.source, id);
        name.map_err(|error| error_of(&self.subject, error.into()))
    }

    /// Returns whether the process still has the file mapped: not if it has exited, exec'd another program, or ended
    /// its events. What it has written before can still be read.
    ///
    /// # Errors
    ///
    /// If its maps cannot be read though it runs.
    pub fn is_mapped(&self) -> Result<bool> {
        let Some((process, mapping)) = &self.mapped else {
            return Ok(true);
        };
        // Its name may have been removed.
        let same = |it: &Mapping| {
            (it.start, it.end, it.device, it.inode)
                == (mapping.start, mapping.end, mapping.device, mapping.inode)
        };
        match read_maps(process) {
            Err(error) if error.is_gone() => Ok(false),
            maps => Ok(maps?.iter().any(same)),
        }
    }

    /// Goes to the end of each ring, and keeps which phases are under way there, of those that began after `on_since`.
    fn skip(&mut self, on_since: u64) -> Result<()> {
        let mut domains: BTreeMap<u32, OpenPhases<()>> = BTreeMap::new();
        let seen = ticks::monotonic();
        let mut gaps = EventGaps::default();
        let read = self.read(|entry| match entry {
            RingEntry::Event { domain, time, kind } => {
                let open = domains.entry(domain).or_default();
                match kind {
                    RuntimeEventKind::Begin(name) => {
                        open.begin(OpenPhase { name, began: time }, ());
                    }
                    RuntimeEventKind::End(name) => drop(open.end(name, time)),
                    RuntimeEventKind::Lifecycle("domain_terminate", _) => open.forget(),
                    RuntimeEventKind::Lifecycle("ring_pause" | "ring_resume", _) => gaps.add(time),
                    _ => {}
                }
            }
            RingEntry::Lost { domain, .. } => drop(domains.remove(&domain)),
        });
        self.rings.resumed = 0;
        if read.is_ok() {
            let under_way = domains.iter().flat_map(|(&domain, open)| {
                open.each().map(move |(phase, ())| PhaseUnderWay {
                    domain,
                    name: phase.name,
                    began: phase.began,
                    seen,
                })
            });
            // The ends of earlier ones may not have been written, in any domain.
            let since = on_since.max(gaps.latest());
            self.under_way = under_way.filter(|it| it.began >= since).collect();
            return Ok(());
        }
        // What is wrong with old events does not matter.
        let tails = plausible_tails(&self.source, &self.header);
        let tails = tails.map_err(|error| error_of(&self.subject, error))?;
        for (reader, tail) in self.rings.readers.iter_mut().zip(tails) {
            reader.position = tail;
        }
        Ok(())
    }
}

impl EventRings {
    fn read(
        &mut self,
        source: &Source,
        header: &Header,
        names: &Names,
        mut visit: impl FnMut(RingEntry<'_>),
    ) -> std::result::Result<(), RingError> {
        let tails = tails(source, header)?;
        let to_read = tails.iter().zip(&self.readers);
        let to_read = to_read.map(|(tail, reader)| tail.saturating_sub(reader.position));
        self.most_read = to_read.max().unwrap_or(0);
        let (resumed, paused_at, written_at) =
            (&mut self.resumed, &mut self.paused_at, &mut self.written_at);
        for (reader, tail) in self.readers.iter_mut().zip(tails) {
            let copied = &mut self.copied;
            reader.read(source, header, names, tail, copied, |entry| {
                if let RingEntry::Event { kind, time, .. } = entry {
                    // Not all versions write that they pause.
                    if let RuntimeEventKind::Lifecycle("ring_pause", _) = kind {
                        *paused_at = (*paused_at).max(Some(time));
                    } else {
                        *written_at = time.max(*written_at);
                    }
                    if let RuntimeEventKind::Lifecycle("ring_resume", _) = kind {
                        *resumed += 1;
                    }
                }
                visit(entry);
            })?;
        }
        Ok(())
    }
}

/// How long to wait after a read that has found `most_read` words in one ring, at most.
fn wait_after(most_read: u64, ring_words: u64) -> Duration {
    if most_read > ring_words / FAST_PART {
        Duration::ZERO
    } else if ring_words >= USUAL_RING_WORDS && most_read <= ring_words / SLOW_PART {
        LONG_WAIT
    } else {
        SHORT_WAIT
    }
}

/// The error for a file that cannot be read.
fn error_of(subject: &Subject, error: RingError) -> Error {
    let why = match error {
        RingError::Malformed(why) => why,
        RingError::Read(source) => match subject {
            Subject::Process(pid) if source.kind() != std::io::ErrorKind::UnexpectedEof => {
                return Error::of_call(*pid, Operation::Read, source);
            }
            _ => "it is shorter than its header says".to_owned(),
        },
    };
    Error::new(subject.clone(), RuntimeEventsError::Malformed { why })
}

/// Returns the names of events in the version of OCaml that compiled the program of a process, and that version.
///
/// # Errors
///
/// [`RuntimeEventsError::NoVersion`], [`RuntimeEventsError::UnknownVersion`].
pub(crate) fn known_names_of_process(
    process: &Process,
    maps: &[Mapping],
) -> Result<(Names, String)> {
    known_names(
        Subject::Process(process.pid()),
        version_of_process(process, maps),
    )
}

/// Returns the mapping of the file that a process writes its events to; `None` if it has none.
pub(crate) fn ring_mapping(process: &Process) -> Result<Option<Mapping>> {
    let status = process.status();
    let status = status.map_err(|source| process.exited_or(source))?;
    let name = format!("{}.events", status.innermost);
    let maps = read_maps(process)?;
    Ok(find_ring(&maps, &name).cloned())
}

/// Returns the mapping of the file of events with this name. If there are several, it prefers one whose file still has
/// the name: the runtime has created it last.
fn find_ring<'m>(maps: &'m [Mapping], name: &str) -> Option<&'m Mapping> {
    let mut rings = maps.iter().filter(|it| is_ring(it, name));
    let named = rings.clone().find(|it| !it.is_deleted());
    named.or_else(|| rings.next())
}

/// Returns whether a mapping is that of a file of events of this `name`.
fn is_ring(mapping: &Mapping, name: &str) -> bool {
    let path = mapping.path();
    let path = path.strip_suffix(DELETED).unwrap_or(path);
    let file = path.rsplit(|&byte| byte == b'/').next();
    mapping.shared && mapping.is_readable() && mapping.offset == 0 && file == Some(name.as_bytes())
}

/// The executable of a process, and then all files that it has mapped with code.
fn elf_files(process: &Process, maps: &[Mapping]) -> impl Iterator<Item = ElfFile> {
    // By the link in /proc, which leads there even where its path does not.
    let executable = open_executable(process)
        .ok()
        .and_then(|(path, file)| ElfFile::read(file, path).ok());
    let mut seen = Vec::new();
    let code = maps.iter().filter(move |mapping| {
        let file = (mapping.device, mapping.inode);
        let is_new = mapping.executable && mapping.inode != 0 && !seen.contains(&file);
        seen.extend(is_new.then_some(file));
        is_new
    });
    let others = code.filter_map(|mapping| elf_of(process, maps, mapping));
    executable.into_iter().chain(others)
}

/// Returns the version of OCaml that the program of a process was compiled by, as `Sys.ocaml_version` has it; `None` if
/// nothing in its files says so.
pub(crate) fn version_of_process(process: &Process, maps: &[Mapping]) -> Option<String> {
    elf_files(process, maps).find_map(|elf| version(&elf))
}

/// Returns whether a process is known to have a runtime of OCaml, or OCaml's library.
pub(crate) fn has_ocaml(process: &Process) -> bool {
    let Ok(maps) = read_maps(process) else {
        return false;
    };
    // A stripped one has no symbols.
    has_runtime(process, &maps) || version_of_process(process, &maps).is_some()
}

/// Returns whether a file of a process is known to have a runtime of OCaml.
pub(crate) fn has_runtime(process: &Process, maps: &[Mapping]) -> bool {
    elf_files(process, maps).any(|elf| elf.data_symbol(OCAML_SYMBOL).is_some())
}

/// Returns the names of events in the version of OCaml of `subject`, and the version.
fn known_names(subject: Subject, version: Option<String>) -> Result<(Names, String)> {
    let why = match version {
        None => RuntimeEventsError::NoVersion,
        Some(version) => match Names::of(&version) {
            Some(names) => return Ok((names, version)),
            None => RuntimeEventsError::UnknownVersion { version },
        },
    };
    Err(Error::new(subject, why))
}

/// Returns the version of OCaml that a file was compiled by.
fn version(elf: &ElfFile) -> Option<String> {
    let mut data = elf.read_wanted(|segment| segment.writable);
    data.find_map(|(_, bytes)| names::version(&bytes))
}

/// Returns why a process maps no file of events.
fn why_no_events(process: &Process, maps: &[Mapping]) -> RuntimeEventsError {
    let has = |name: &str| elf_files(process, maps).any(|elf| elf.data_symbol(name).is_some());
    if has(OCAML_5_SYMBOL) {
        RuntimeEventsError::NotOn
    } else if has(OCAML_SYMBOL) {
        RuntimeEventsError::Ocaml4
    } else {
        RuntimeEventsError::NoRuntime
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::maps;

    #[test]
    fn full_or_short_rings_are_read_sooner() {
        for (most_read, ring_words, wait) in [
            (0, 1 << 16, LONG_WAIT),
            (2048, 1 << 16, LONG_WAIT),
            (2049, 1 << 16, SHORT_WAIT),
            (1 << 14, 1 << 16, SHORT_WAIT),
            (u64::MAX, 1 << 16, Duration::ZERO),
            (0, 1 << 12, SHORT_WAIT),
        ] {
            assert_eq!(wait_after(most_read, ring_words), wait);
        }
    }

    #[test]
    fn ring_with_a_name_is_the_latest() {
        let maps = |last: &str| {
            let first = "1000-2000 rw-s 00000000 00:01 7 /tmp/5.events (deleted)\n\
                         3000-4000 rw-s 00000000 00:01 8 /tmp/6.events\n";
            maps::parse(format!("{first}{last}\n").as_bytes())
        };
        let found = |maps: &[Mapping]| find_ring(maps, "5.events").map(|it| it.start.0);
        assert_eq!(
            found(&maps("5000-6000 rw-s 00000000 00:01 9 /tmp/5.events")),
            Some(0x5000)
        );
        assert_eq!(
            found(&maps("5000-6000 rw-p 00000000 00:01 9 /tmp/5.events")),
            Some(0x1000)
        );
        assert_eq!(found(&maps("")[1..]), None);
    }
}
