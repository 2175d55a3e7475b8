//! [`ProbeTable`]: the OCaml probes of one ELF file, name -> sites, semaphores, generation.
//!
//! Built once from the notes; checked against the file's segments, so that what is planned later
//! can trust every address in it. Addresses are link-time ([`FileAddr`]).

use std::collections::HashMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

use crate::addr::FileAddr;
use crate::elf::args::Argument;
use crate::elf::note::{Note, notes};
use crate::elf::{BuildId, ElfFile, Linking, Segment, within};
use crate::error::{ElfDefect, ErrorKind, ProbeDefect, Result};
use crate::site::{SITE_LEN, SiteCode};
use crate::spans;

const NOTE_SECTION: &str = ".note.stapsdt";
const BASE_SECTION: &str = ".stapsdt.base";
const SEMAPHORE_SECTION: &str = ".probes";

/// Length of a counter in bytes.
pub(crate) const COUNTER_LEN: u64 = 2;

/// Which form of probes a compiler emits, told by the provider of the note.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Generation {
    /// Provider `ocaml`: one semaphore per compilation unit, shared with SystemTap.
    Ocaml,
    /// Provider `ocaml.1`: SystemTap's semaphore, then OCaml's; one pair per linked object.
    OcamlDot1,
    /// Provider `ocaml_1`: as `ocaml.1`, and probes may be enabled at program start.
    Ocaml1,
    /// Provider `ocaml_2`: as `ocaml_1`, and a note may have a semaphore and no site.
    Ocaml2,
}

impl Generation {
    /// The generation of a provider; `None` for a provider that is not OCaml's.
    pub fn of_provider(provider: &[u8]) -> Option<Generation> {
        match provider {
            b"ocaml" => Some(Generation::Ocaml),
            b"ocaml.1" => Some(Generation::OcamlDot1),
            b"ocaml_1" => Some(Generation::Ocaml1),
            b"ocaml_2" => Some(Generation::Ocaml2),
            _ => None,
        }
    }

    /// The provider as it stands in the notes.
    pub fn provider(self) -> &'static str {
        match self {
            Generation::Ocaml => "ocaml",
            Generation::OcamlDot1 => "ocaml.1",
            Generation::Ocaml1 => "ocaml_1",
            Generation::Ocaml2 => "ocaml_2",
        }
    }

    /// Offset of OCaml's counter from the semaphore's address in the note, in bytes.
    fn counter_offset(self) -> u64 {
        match self {
            Generation::Ocaml => 0,
            Generation::OcamlDot1 | Generation::Ocaml1 | Generation::Ocaml2 => COUNTER_LEN,
        }
    }

    fn allows_no_site(self) -> bool {
        self == Generation::Ocaml2
    }
}

/// The OCaml probes of one ELF file, sorted by name.
#[derive(Debug)]
pub struct ProbeTable {
    path: PathBuf,
    build_id: Option<BuildId>,
    linking: Linking,
    entry: FileAddr,
    segments: Vec<Segment>,
    note_section: Vec<u8>,
    probes: Vec<ProbeEntry>,
    sites: Vec<SiteEntry>,
    semaphores: Vec<SemaphoreEntry>,
}

/// A name, with its runs in the table's sites and semaphores.
#[derive(Debug)]
struct ProbeEntry {
    name: Box<str>,
    sites: Range<usize>,
    semaphores: Range<usize>,
}

#[derive(Debug)]
struct SiteEntry {
    address: FileAddr,
    generation: Generation,
    code: SiteCode,
    /// Index of the semaphore that stands in its note.
    semaphore: usize,
    arguments: Range<usize>,
}

#[derive(Debug)]
struct SemaphoreEntry {
    counter: FileAddr,
    generation: Generation,
}

/// Index of a probe in its table, in order of names.
pub(crate) type ProbeId = usize;

impl ProbeTable {
    /// Reads the OCaml probes of the file at `path`.
    ///
    /// # Errors
    ///
    /// If the file cannot be read, is not an x86-64 program, has a note that is malformed or
    /// contradicts the file, or has no OCaml probes ([`ErrorKind::NoProbes`]).
    pub fn read(path: impl AsRef<Path>) -> Result<ProbeTable> {
        ProbeTable::of(&ElfFile::open(path.as_ref())?)
    }

    pub(crate) fn of(elf: &ElfFile) -> Result<ProbeTable> {
        let Some(note_section) = elf.contents(NOTE_SECTION)? else {
            return Err(if elf.has_sections() {
                no_probes(elf)
            } else {
                ErrorKind::elf(elf.path(), ElfDefect::NoSectionHeaders).into()
            });
        };
        let segments: Vec<Segment> = elf.loaded().collect();
        let found = gather(elf, &segments, &note_section)?;
        if found.names.is_empty() {
            return Err(no_probes(elf));
        }
        let mut table = ProbeTable {
            path: elf.path().to_owned(),
            build_id: elf.build_id(),
            linking: elf.linking(),
            entry: elf.entry(),
            segments,
            probes: Vec::with_capacity(found.names.len()),
            sites: Vec::with_capacity(found.sites),
            semaphores: Vec::new(),
            note_section: Vec::new(),
        };
        let mut origins = table.take(found, &note_section);
        table.read_code(elf, &mut origins)?;
        table.refuse_shared_addresses()?;
        table.note_section = note_section;
        Ok(table)
    }

    /// Lays the found probes out by name; returns where each site's note was, for errors.
    fn take(&mut self, found: Found<'_>, note_section: &[u8]) -> Vec<Origin> {
        let mut origins = Vec::with_capacity(found.sites);
        let mut names = found.names;
        names.sort_unstable_by_key(|probe| probe.name);
        for mut probe in names {
            let first_semaphore = self.semaphores.len();
            probe.semaphores.sort_unstable();
            // Objects of two compilers may share the symbol, and so the counter.
            probe.semaphores.dedup_by_key(|semaphore| semaphore.0);
            let first_site = self.sites.len();
            probe.sites.sort_unstable_by_key(|site| site.address);
            // A linker that folds equal functions leaves two notes of one site. If they do not say
            // the same, both stay, to be refused as overlapping.
            probe.sites.dedup_by(|one, other| {
                one.address == other.address
                    && one.counter == other.counter
                    && note_section[one.arguments.clone()] == note_section[other.arguments.clone()]
            });
            for site in probe.sites {
                origins.push(site.origin);
                self.sites.push(SiteEntry {
                    address: site.address,
                    generation: site.generation,
                    code: SiteCode([0; SITE_LEN]),
                    semaphore: first_semaphore
                        + probe
                            .semaphores
                            .partition_point(|&(counter, _)| counter < site.counter),
                    arguments: site.arguments,
                });
            }
            let semaphores = probe.semaphores.into_iter();
            self.semaphores
                .extend(semaphores.map(|(counter, generation)| SemaphoreEntry {
                    counter,
                    generation,
                }));
            self.probes.push(ProbeEntry {
                name: probe.name.into(),
                sites: first_site..self.sites.len(),
                semaphores: first_semaphore..self.semaphores.len(),
            });
        }
        origins
    }

    /// Reads the bytes of every site from the file and refuses what is not a site.
    fn read_code(&mut self, elf: &ElfFile, origins: &mut [Origin]) -> Result<()> {
        let mut order: Vec<usize> = (0..self.sites.len()).collect();
        order.sort_unstable_by_key(|&site| self.sites[site].address);
        let addresses: Vec<u64> = order
            .iter()
            .map(|&site| self.sites[site].address.0)
            .collect();
        let segment_of = |address: u64| {
            self.segments
                .iter()
                .position(|segment| segment.executable && segment.holds(FileAddr(address), 1))
        };
        let mut bytes = Vec::new();
        for run in spans::runs(&addresses, SITE_LEN as u64, segment_of) {
            let (start, len) = (addresses[run.first], run.len as usize);
            let Some(segment) = run.zone.map(|index| self.segments[index]) else {
                continue; // `gather` refuses a site outside the executable segments
            };
            bytes.resize(len, 0);
            elf.read_loaded(&segment, FileAddr(start), &mut bytes)?;
            for (&site, &address) in order[run.first..].iter().zip(&addresses[run.range()]) {
                let at = (address - start) as usize;
                self.sites[site]
                    .code
                    .0
                    .copy_from_slice(&bytes[at..at + SITE_LEN]);
            }
        }
        for (site, origin) in self.sites.iter().zip(origins) {
            if !site.code.is_pristine() {
                let name = self.name_of_site(site.address);
                let defect = ProbeDefect::NotASite {
                    address: site.address,
                    found: site.code,
                };
                return Err(origin.error(&self.path, name, defect));
            }
        }
        Ok(())
    }

    fn name_of_site(&self, address: FileAddr) -> String {
        self.probes()
            .find(|probe| probe.sites().any(|site| site.address() == address))
            .map_or_else(String::new, |probe| probe.name().to_owned())
    }

    /// Two sites that overlap, or a counter of two names, could not be changed independently.
    fn refuse_shared_addresses(&self) -> Result<()> {
        let sites = self.probes().flat_map(|probe| {
            let name = probe.name();
            probe.sites().map(move |site| (site.address(), name))
        });
        let counters = self.probes().flat_map(|probe| {
            let name = probe.name();
            probe.semaphores().map(move |one| (one.counter(), name))
        });
        let clash = first_overlap(sites, SITE_LEN as u64)
            .map(|clash| ("sites", clash))
            .or_else(|| first_overlap(counters, COUNTER_LEN).map(|clash| ("semaphores", clash)));
        match clash {
            None => Ok(()),
            Some((what, (address, one, other))) => {
                let text = format!("the {what} of probes {one} and {other} overlap at {address}");
                Err(ErrorKind::elf(&self.path, ElfDefect::Contradiction(text)).into())
            }
        }
    }

    /// The file, as it was given or as the process shows it.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The file's build-id.
    pub fn build_id(&self) -> Option<&BuildId> {
        self.build_id.as_ref()
    }

    /// Whether the file is position independent.
    pub fn linking(&self) -> Linking {
        self.linking
    }

    pub(crate) fn entry(&self) -> FileAddr {
        self.entry
    }

    pub(crate) fn segments(&self) -> &[Segment] {
        &self.segments
    }

    /// All probes, sorted by name.
    pub fn probes(&self) -> impl ExactSizeIterator<Item = Probe<'_>> {
        (0..self.probes.len()).map(|id| Probe { table: self, id })
    }

    /// The probe of that name.
    pub fn probe(&self, name: &str) -> Option<Probe<'_>> {
        let id = self
            .probes
            .binary_search_by(|probe| (*probe.name).cmp(name))
            .ok()?;
        Some(self.by_id(id))
    }

    pub(crate) fn by_id(&self, id: ProbeId) -> Probe<'_> {
        Probe { table: self, id }
    }

    pub(crate) fn site_count(&self) -> usize {
        self.sites.len()
    }

    pub(crate) fn semaphore_count(&self) -> usize {
        self.semaphores.len()
    }

    pub(crate) fn site(&self, index: usize) -> Site<'_> {
        Site { table: self, index }
    }

    pub(crate) fn semaphore(&self, index: usize) -> Semaphore<'_> {
        Semaphore { table: self, index }
    }
}

/// One probe: all sites and semaphores of a name.
#[derive(Clone, Copy, Debug)]
pub struct Probe<'t> {
    table: &'t ProbeTable,
    id: ProbeId,
}

impl<'t> Probe<'t> {
    /// Its name.
    pub fn name(&self) -> &'t str {
        &self.table.probes[self.id].name
    }

    /// Its sites, by address; none if there are only semaphores.
    pub fn sites(&self) -> impl ExactSizeIterator<Item = Site<'t>> + use<'t> {
        let table = self.table;
        self.site_range().map(|index| Site { table, index })
    }

    /// Its semaphores, by address.
    pub fn semaphores(&self) -> impl ExactSizeIterator<Item = Semaphore<'t>> + use<'t> {
        let table = self.table;
        self.semaphore_range()
            .map(|index| Semaphore { table, index })
    }

    pub(crate) fn id(&self) -> ProbeId {
        self.id
    }

    pub(crate) fn site_range(&self) -> Range<usize> {
        self.table.probes[self.id].sites.clone()
    }

    pub(crate) fn semaphore_range(&self) -> Range<usize> {
        self.table.probes[self.id].semaphores.clone()
    }
}

/// One site of a probe.
#[derive(Clone, Copy, Debug)]
pub struct Site<'t> {
    table: &'t ProbeTable,
    index: usize,
}

impl<'t> Site<'t> {
    fn entry(&self) -> &'t SiteEntry {
        &self.table.sites[self.index]
    }

    /// Address of its nop; the opcode is one byte further on.
    pub fn address(&self) -> FileAddr {
        self.entry().address
    }

    /// The generation of its note.
    pub fn generation(&self) -> Generation {
        self.entry().generation
    }

    /// Its bytes in the file.
    pub fn code(&self) -> SiteCode {
        self.entry().code
    }

    /// Index in the table of the semaphore whose counter decides whether it is enabled.
    pub(crate) fn semaphore_index(&self) -> usize {
        self.entry().semaphore
    }

    /// Its arguments in the order of the note, each as text; see [`Site::arguments`].
    pub fn argument_texts(&self) -> impl Iterator<Item = &'t str> + use<'t> {
        let bytes = &self.table.note_section[self.entry().arguments.clone()];
        // `gather` has checked that it is text.
        str::from_utf8(bytes)
            .unwrap_or_default()
            .split_ascii_whitespace()
    }

    /// Its arguments, decoded; `None` in the place of one that is not of the form `N@LOC`.
    pub fn arguments(&self) -> impl Iterator<Item = Option<Argument<'t>>> + use<'t> {
        self.argument_texts().map(Argument::parse)
    }
}

/// One semaphore of a probe: an unsigned 16-bit counter of those who want the probe enabled.
#[derive(Clone, Copy, Debug)]
pub struct Semaphore<'t> {
    table: &'t ProbeTable,
    index: usize,
}

impl Semaphore<'_> {
    /// Address of the counter that OCaml reads, two bytes.
    pub fn counter(&self) -> FileAddr {
        self.table.semaphores[self.index].counter
    }

    /// The generation of its notes.
    pub fn generation(&self) -> Generation {
        self.table.semaphores[self.index].generation
    }
}

/// The OCaml notes of a file, by name, in the order of their first note.
struct Found<'n> {
    names: Vec<FoundProbe<'n>>,
    sites: usize,
}

struct FoundProbe<'n> {
    name: &'n str,
    sites: Vec<FoundSite>,
    semaphores: Vec<(FileAddr, Generation)>,
}

struct FoundSite {
    address: FileAddr,
    counter: FileAddr,
    generation: Generation,
    arguments: Range<usize>,
    origin: Origin,
}

/// Where a note was, for errors.
#[derive(Clone, Copy)]
struct Origin {
    index: usize,
    offset: usize,
}

impl Origin {
    fn error(self, path: &Path, name: String, defect: ProbeDefect) -> crate::Error {
        ErrorKind::WrongNote {
            path: path.to_owned(),
            index: self.index,
            offset: self.offset,
            name,
            defect,
        }
        .into()
    }
}

/// Reads and checks the notes, and groups the OCaml ones by name.
fn gather<'n>(elf: &ElfFile, segments: &[Segment], section: &'n [u8]) -> Result<Found<'n>> {
    let base = elf.section_range(BASE_SECTION).map(|(address, _)| address);
    let semaphore_section = elf.section_range(SEMAPHORE_SECTION);
    let mut found = Found {
        names: Vec::new(),
        sites: 0,
    };
    let mut ids: HashMap<&[u8], usize> = HashMap::new();
    for note in notes(section) {
        let note = note.map_err(|note| ErrorKind::MalformedNote {
            path: elf.path().to_owned(),
            note,
        })?;
        let Some(generation) = Generation::of_provider(note.provider) else {
            continue;
        };
        let origin = Origin {
            index: note.index,
            offset: note.offset,
        };
        let fail = |defect| {
            let name = note.name.escape_ascii().to_string();
            origin.error(elf.path(), name, defect)
        };
        let id = match ids.get(note.name) {
            Some(&id) => id,
            None => {
                let name = printable(note.name).ok_or_else(|| fail(ProbeDefect::Name))?;
                found.names.push(FoundProbe {
                    name,
                    sites: Vec::new(),
                    semaphores: Vec::new(),
                });
                ids.insert(note.name, found.names.len() - 1);
                found.names.len() - 1
            }
        };
        let probe = &mut found.names[id];

        let shift = prelink_shift(&note, base);
        let counter =
            counter_address(&note, shift, generation, segments, semaphore_section).map_err(fail)?;
        if probe.semaphores.last() != Some(&(counter, generation)) {
            probe.semaphores.push((counter, generation));
        }
        if let Some(address) = site_address(&note, shift, generation, segments).map_err(fail)? {
            if str::from_utf8(&section[note.arguments.clone()]).is_err() {
                return Err(fail(ProbeDefect::Arguments));
            }
            found.sites += 1;
            probe.sites.push(FoundSite {
                address,
                counter,
                generation,
                arguments: note.arguments,
                origin,
            });
        }
    }
    Ok(found)
}

/// How far the file has moved since its notes were written: prelink(8) shifts the sections that
/// are loaded, `.stapsdt.base` with them, but not the notes.
fn prelink_shift(note: &Note<'_>, base: Option<FileAddr>) -> u64 {
    base.map_or(0, |base| base.0.wrapping_sub(note.base))
}

/// Where the site is; `None` if the note rightly has none. A zero pc is never shifted.
fn site_address(
    note: &Note<'_>,
    shift: u64,
    generation: Generation,
    segments: &[Segment],
) -> Result<Option<FileAddr>, ProbeDefect> {
    if note.pc == 0 {
        return if generation.allows_no_site() {
            Ok(None)
        } else {
            Err(ProbeDefect::NoSite)
        };
    }
    let address = FileAddr(note.pc.wrapping_add(shift));
    segments
        .iter()
        .any(|segment| segment.executable && segment.holds(address, SITE_LEN as u64))
        .then_some(Some(address))
        .ok_or(ProbeDefect::SiteOutside(address))
}

/// Where the counter is that OCaml reads.
fn counter_address(
    note: &Note<'_>,
    shift: u64,
    generation: Generation,
    segments: &[Segment],
    section: Option<(FileAddr, u64)>,
) -> Result<FileAddr, ProbeDefect> {
    if note.semaphore == 0 {
        return Err(ProbeDefect::NoSemaphore);
    }
    let semaphore = note.semaphore.wrapping_add(shift);
    let counter = FileAddr(semaphore.wrapping_add(generation.counter_offset()));
    if !section.is_some_and(|(start, len)| within(start, len, counter, COUNTER_LEN)) {
        return Err(ProbeDefect::SemaphoreOutside(counter));
    }
    segments
        .iter()
        .any(|segment| segment.writable && segment.covers(counter, COUNTER_LEN))
        .then_some(counter)
        .ok_or(ProbeDefect::SemaphoreNotWritable(counter))
}

/// A name that can stand in a line of output; compilers emit letters, digits and `_`.
fn printable(name: &[u8]) -> Option<&str> {
    let name = str::from_utf8(name).ok()?;
    let fits = |c: char| !c.is_control() && !c.is_whitespace();
    (!name.is_empty() && name.chars().all(fits)).then_some(name)
}

/// The first two things of `len` bytes that share a byte, with their names.
fn first_overlap<'n>(
    things: impl Iterator<Item = (FileAddr, &'n str)>,
    len: u64,
) -> Option<(FileAddr, &'n str, &'n str)> {
    let mut things: Vec<_> = things.collect();
    things.sort_unstable();
    things
        .windows(2)
        .find(|pair| pair[1].0.0 - pair[0].0.0 < len)
        .map(|pair| (pair[1].0, pair[0].1, pair[1].1))
}

fn no_probes(elf: &ElfFile) -> crate::Error {
    ErrorKind::NoProbes {
        path: elf.path().to_owned(),
        build_id: elf.build_id(),
    }
    .into()
}

#[cfg(test)]
mod tests;
