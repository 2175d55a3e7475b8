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
    /// Indices of `sites`, by address.
    sites_by_address: Vec<u32>,
}

/// A name, with its runs in the table's sites and semaphores.
#[derive(Debug)]
struct ProbeEntry {
    name: Box<str>,
    sites: Range<usize>,
    semaphores: Range<usize>,
}

/// There are many of these: they are kept small, and a section's offsets fit into 32 bits.
#[derive(Clone, Copy, Debug)]
struct SiteEntry {
    address: FileAddr,
    arguments: Arguments,
    /// Index of the semaphore that stands in its note.
    semaphore: u32,
    code: SiteCode,
    generation: Generation,
}

/// Where a site's argument string is in the note section.
#[derive(Clone, Copy, Debug)]
struct Arguments {
    start: u32,
    len: u32,
}

impl Arguments {
    fn of(range: &Range<usize>) -> Arguments {
        Arguments {
            start: range.start as u32,
            len: range.len() as u32,
        }
    }

    fn range(self) -> Range<usize> {
        self.start as usize..self.start as usize + self.len as usize
    }
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
        let sites = found.sites.len();
        let mut table = ProbeTable {
            path: elf.path().to_owned(),
            build_id: elf.build_id(),
            linking: elf.linking(),
            entry: elf.entry(),
            segments,
            probes: Vec::with_capacity(found.names.len()),
            sites: Vec::new(),
            semaphores: Vec::with_capacity(found.semaphores.len()),
            sites_by_address: Vec::with_capacity(sites),
            note_section: Vec::new(),
        };
        let origins = table.take(found, &note_section);
        table.read_code(elf)?;
        table.refuse_what_is_no_site(&origins, &note_section)?;
        table.refuse_shared_addresses()?;
        table.note_section = note_section;
        Ok(table)
    }

    /// Lays the found probes out by name, then address; returns where each site's note was, for
    /// errors.
    fn take(&mut self, found: Found<'_>, note_section: &[u8]) -> Vec<Origin> {
        let Found {
            names,
            mut sites,
            mut semaphores,
        } = found;
        let mut by_name: Vec<usize> = (0..names.len()).collect();
        by_name.sort_unstable_by_key(|&name| names[name].name);
        let mut ids = vec![0; names.len()];
        for (id, &name) in by_name.iter().enumerate() {
            ids[name] = id;
        }

        semaphores.sort_unstable_by_key(|one| (ids[one.name], one.counter, one.generation));
        // Objects of two compilers may share the symbol, and so the counter.
        semaphores.dedup_by_key(|one| (one.name, one.counter));
        // The linker's order: usually sorted already.
        sites.sort_by_key(|site| (site.address, ids[site.name as usize]));
        // A linker that folds equal functions leaves two notes of one site. If they do not say the
        // same, both stay, to be refused as overlapping.
        let arguments = |site: &FoundSite| &note_section[site.arguments.range()];
        sites.dedup_by(|one, other| {
            (one.address, one.name, one.counter) == (other.address, other.name, other.counter)
                && arguments(one) == arguments(other)
        });

        let mut site_counts = vec![0; names.len()];
        for site in &sites {
            site_counts[ids[site.name as usize]] += 1;
        }
        let (mut first_site, mut first_semaphore) = (0, 0);
        for (&name, &count) in by_name.iter().zip(&site_counts) {
            let own = semaphores[first_semaphore..].iter();
            let next_semaphore = first_semaphore + own.take_while(|one| one.name == name).count();
            self.probes.push(ProbeEntry {
                name: names[name].name.into(),
                sites: first_site..first_site + count,
                semaphores: first_semaphore..next_semaphore,
            });
            first_site += count;
            first_semaphore = next_semaphore;
        }
        let entries = semaphores.iter().map(|one| SemaphoreEntry {
            counter: one.counter,
            generation: one.generation,
        });
        self.semaphores.extend(entries);
        self.place(&sites, &ids)
    }

    /// Puts `sites`, which are sorted by address, into their probes' runs.
    fn place(&mut self, sites: &[FoundSite], ids: &[ProbeId]) -> Vec<Origin> {
        let Some(any) = sites.first() else {
            return Vec::new();
        };
        let mut next: Vec<usize> = self.probes.iter().map(|probe| probe.sites.start).collect();
        let mut origins = vec![any.origin; sites.len()];
        self.sites = vec![any.entry(0); sites.len()];
        for site in sites {
            let id = ids[site.name as usize];
            let semaphores = self.probes[id].semaphores.clone();
            let first = semaphores.start;
            let semaphore = first
                + self.semaphores[semaphores].partition_point(|one| one.counter < site.counter);
            let index = next[id];
            next[id] += 1;
            self.sites[index] = site.entry(semaphore as u32);
            origins[index] = site.origin;
            self.sites_by_address.push(index as u32);
        }
        origins
    }

    /// Reads the bytes of every site from the file.
    fn read_code(&mut self, elf: &ElfFile) -> Result<()> {
        let addresses: Vec<u64> = self
            .sites_by_address
            .iter()
            .map(|&site| self.sites[site as usize].address.0)
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
            for index in run.range() {
                let at = (addresses[index] - start) as usize;
                let site = &mut self.sites[self.sites_by_address[index] as usize];
                site.code.0.copy_from_slice(&bytes[at..at + SITE_LEN]);
            }
        }
        Ok(())
    }

    fn refuse_what_is_no_site(&self, origins: &[Origin], note_section: &[u8]) -> Result<()> {
        let Some(index) = self.sites.iter().position(|site| !site.code.is_pristine()) else {
            return Ok(());
        };
        let name = self
            .name_of(|probe| probe.sites.contains(&index))
            .to_owned();
        let defect = ProbeDefect::NotASite {
            address: self.sites[index].address,
            found: self.sites[index].code,
        };
        Err(origins[index].error(note_section, &self.path, name, defect))
    }

    /// Two sites that overlap, or a counter of two names, could not be changed independently.
    fn refuse_shared_addresses(&self) -> Result<()> {
        let by_address = self.sites_by_address.iter();
        let sites = by_address.map(|&index| (self.sites[index as usize].address, index as usize));
        let counters = self.semaphores.iter().map(|one| one.counter);
        let mut counters: Vec<_> = counters.zip(0..).collect();
        counters.sort_unstable();
        let (what, address, names) =
            if let Some((address, pair)) = first_overlap(sites, SITE_LEN as u64) {
                let name = |index| self.name_of(|probe| probe.sites.contains(&index));
                ("sites", address, pair.map(name))
            } else if let Some((address, pair)) = first_overlap(counters.into_iter(), COUNTER_LEN) {
                let name = |index| self.name_of(|probe| probe.semaphores.contains(&index));
                ("semaphores", address, pair.map(name))
            } else {
                return Ok(());
            };
        let [one, other] = names;
        let text = format!("the {what} of probes {one} and {other} overlap at {address}");
        Err(ErrorKind::elf(&self.path, ElfDefect::Contradiction(text)).into())
    }

    /// The name of the first probe of which something is so, for errors.
    fn name_of(&self, is_so: impl Fn(&ProbeEntry) -> bool) -> &str {
        let mut probes = self.probes.iter();
        probes
            .find(|&probe| is_so(probe))
            .map_or("", |probe| &probe.name)
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

    /// Indices of all sites, by address.
    pub(crate) fn sites_by_address(&self) -> impl Iterator<Item = usize> {
        self.sites_by_address.iter().map(|&index| index as usize)
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
        self.entry().semaphore as usize
    }

    /// Its arguments in the order of the note, each as text; see [`Site::arguments`].
    pub fn argument_texts(&self) -> impl Iterator<Item = &'t str> + use<'t> {
        let bytes = &self.table.note_section[self.entry().arguments.range()];
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

/// The OCaml notes of a file, in their order.
struct Found<'n> {
    names: Vec<FoundName<'n>>,
    sites: Vec<FoundSite>,
    semaphores: Vec<FoundSemaphore>,
}

struct FoundName<'n> {
    name: &'n str,
    /// The semaphore of its last note, which is usually the next note's too.
    last: (FileAddr, Generation),
}

struct FoundSemaphore {
    /// Index of the name.
    name: usize,
    counter: FileAddr,
    generation: Generation,
}

struct FoundSite {
    address: FileAddr,
    counter: FileAddr,
    arguments: Arguments,
    origin: Origin,
    /// Index of the name.
    name: u32,
    generation: Generation,
}

impl FoundSite {
    fn entry(&self, semaphore: u32) -> SiteEntry {
        SiteEntry {
            address: self.address,
            arguments: self.arguments,
            semaphore,
            code: SiteCode([0; SITE_LEN]),
            generation: self.generation,
        }
    }
}

/// Where a note was, for errors: its offset in the section.
#[derive(Clone, Copy)]
struct Origin(u32);

impl Origin {
    fn error(self, section: &[u8], path: &Path, name: String, defect: ProbeDefect) -> crate::Error {
        let offset = self.0 as usize;
        let mut notes = notes(section).map_while(Result::ok);
        let note = notes.find(|note| note.offset == offset);
        ErrorKind::WrongNote {
            path: path.to_owned(),
            index: note.map_or(0, |note| note.index),
            offset,
            name,
            defect,
        }
        .into()
    }
}

/// Reads and checks the notes.
fn gather<'n>(elf: &ElfFile, segments: &[Segment], section: &'n [u8]) -> Result<Found<'n>> {
    let base = elf.section_range(BASE_SECTION).map(|(address, _)| address);
    let semaphore_section = elf.section_range(SEMAPHORE_SECTION);
    let mut found = Found {
        names: Vec::new(),
        sites: Vec::new(),
        semaphores: Vec::new(),
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
        let origin = Origin(note.offset as u32);
        let fail = |defect| {
            let name = note.name.escape_ascii().to_string();
            origin.error(section, elf.path(), name, defect)
        };
        let known = ids.get(note.name).copied();
        let new_name = match known {
            Some(_) => "",
            None => printable(note.name).ok_or_else(|| fail(ProbeDefect::Name))?,
        };
        let shift = prelink_shift(&note, base);
        let counter =
            counter_address(&note, shift, generation, segments, semaphore_section).map_err(fail)?;
        let semaphore = (counter, generation);
        let id = known.unwrap_or(found.names.len());
        let is_new = match found.names.get_mut(id) {
            Some(name) => std::mem::replace(&mut name.last, semaphore) != semaphore,
            None => {
                ids.insert(note.name, id);
                found.names.push(FoundName {
                    name: new_name,
                    last: semaphore,
                });
                true
            }
        };
        if is_new {
            found.semaphores.push(FoundSemaphore {
                name: id,
                counter,
                generation,
            });
        }
        if let Some(address) = site_address(&note, shift, generation, segments).map_err(fail)? {
            if str::from_utf8(&section[note.arguments.clone()]).is_err() {
                return Err(fail(ProbeDefect::Arguments));
            }
            found.sites.push(FoundSite {
                address,
                counter,
                arguments: Arguments::of(&note.arguments),
                origin,
                name: id as u32,
                generation,
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

/// The first two of sorted things of `len` bytes that share a byte: where, and their indices.
fn first_overlap(
    mut things: impl Iterator<Item = (FileAddr, usize)>,
    len: u64,
) -> Option<(FileAddr, [usize; 2])> {
    let (mut address, mut index) = things.next()?;
    for (next_address, next) in things {
        if next_address.0 - address.0 < len {
            return Some((next_address, [index, next]));
        }
        (address, index) = (next_address, next);
    }
    None
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
