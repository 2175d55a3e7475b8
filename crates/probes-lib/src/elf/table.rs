//! [`ProbeTable`]: the OCaml probes of one ELF file, name -> sites, semaphores, generation.
//!
//! Built once from the notes, and checked against the file's segments, so that planning can rely on every
//! address in it. Addresses are link-time ([`FileAddr`]).

mod argument_names;
mod gather;
mod probe;
mod semaphore_layout;

use std::ops::Range;
use std::path::{Path, PathBuf};

use crate::address::FileAddr;
use crate::build_id::BuildId;
use crate::elf::segment_index::SegmentIndex;
use crate::elf::{ElfFile, Linking, Segment};
use crate::error::{ElfDefect, Error, FileError, ProcessError, Result};
use crate::memory::runs;
use crate::site::{SITE_LEN, SiteCode};

use argument_names::ArgumentNames;
pub(super) use gather::each_placed_note;
pub(crate) use gather::{NOTE_SECTION, noted_sites};
pub use probe::{Probe, Semaphore, Site};
use semaphore_layout::FoundSemaphore;

/// Length of a counter in bytes.
pub(crate) const COUNTER_LEN: u64 = 2;

/// The form in which a compiler emits probes. The provider in a note says which form it is.
///
/// ```
/// use probes_lib::Generation;
///
/// assert_eq!(Generation::of_provider(b"ocaml_2"), Some(Generation::Ocaml2));
/// assert_eq!(Generation::of_provider(b"python"), None);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Generation {
    /// Provider `ocaml`: one semaphore per compilation unit, shared with SystemTap, or the same as
    /// `ocaml.1`.
    Ocaml,
    /// Provider `ocaml.1`: a semaphore is SystemTap's counter, then OCaml's; one per linked object.
    OcamlDot1,
    /// Provider `ocaml_1`: same as `ocaml.1`, and probes may be enabled at program start.
    Ocaml1,
    /// Provider `ocaml_2`: same as `ocaml_1`, and a note may have a semaphore and no site.
    Ocaml2,
}

impl Generation {
    /// Returns the generation of a provider; `None` for a provider that is not OCaml's.
    pub fn of_provider(provider: &[u8]) -> Option<Generation> {
        match provider {
            b"ocaml" => Some(Generation::Ocaml),
            b"ocaml.1" => Some(Generation::OcamlDot1),
            b"ocaml_1" => Some(Generation::Ocaml1),
            b"ocaml_2" => Some(Generation::Ocaml2),
            _ => None,
        }
    }

    /// Returns the provider as the notes spell it.
    pub fn provider(self) -> &'static str {
        match self {
            Generation::Ocaml => "ocaml",
            Generation::OcamlDot1 => "ocaml.1",
            Generation::Ocaml1 => "ocaml_1",
            Generation::Ocaml2 => "ocaml_2",
        }
    }

    /// Returns the offset of OCaml's counter from the semaphore's address in the note, in bytes. For the
    /// provider `ocaml`, it is the smaller of two ([`semaphore_layout`]).
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
///
/// ```no_run
/// use probes_lib::ProbeTable;
///
/// for probe in ProbeTable::read("server.exe")?.probes() {
///     println!("{} ({} sites)", probe.name(), probe.sites().len());
/// }
/// # Ok::<(), probes_lib::Error>(())
/// ```
#[derive(Debug)]
pub struct ProbeTable {
    path: PathBuf,
    build_id: Option<BuildId>,
    linking: Linking,
    segments: Vec<Segment>,
    probes: Vec<ProbeEntry>,
    sites: Vec<SiteEntry>,
    semaphores: Vec<SemaphoreEntry>,
    /// Indices into `sites`, in the order of the sites' addresses.
    sites_by_address: Vec<u32>,
    /// The argument strings of the sites, each followed by a NUL.
    arguments: Vec<u8>,
    argument_names: ArgumentNames,
}

/// A name, and which of the table's sites and semaphores belong to it.
#[derive(Debug)]
struct ProbeEntry {
    name: Box<str>,
    sites: Range<usize>,
    semaphores: Range<usize>,
}

/// A site, as the table stores it. Kept small, because a table has many.
#[derive(Clone, Copy, Debug)]
struct SiteEntry {
    address: FileAddr,
    /// Where its string starts in the table's `arguments`.
    arguments: u32,
    /// Index of the semaphore that its note names.
    semaphore: u32,
    code: SiteCode,
    generation: Generation,
}

#[derive(Debug)]
struct SemaphoreEntry {
    counter: FileAddr,
    generation: Generation,
}

/// Index of a probe in its table, in order of names.
type ProbeIndex = usize;

impl ProbeTable {
    /// Reads the OCaml probes of the file at `path`.
    ///
    /// # Errors
    ///
    /// If the file cannot be read, is not an x86-64 program, has a note that is malformed or
    /// contradicts the file, has no OCaml probes
    /// ([`ProbeError::NoProbes`](crate::ProbeError::NoProbes)), or runs OCaml bytecode
    /// ([`ProcessError::Bytecode`](crate::ProcessError::Bytecode)).
    pub fn read(path: impl AsRef<Path>) -> Result<ProbeTable> {
        let elf = ElfFile::open(path.as_ref())?;
        if elf.interprets_bytecode() {
            return Err(Error::of_file(elf.path(), ProcessError::Bytecode));
        }
        ProbeTable::of(&elf)
    }

    pub(crate) fn of(elf: &ElfFile) -> Result<ProbeTable> {
        let segments: Vec<Segment> = elf.loaded().collect();
        let found = gather::gather(elf, &segments)?;
        if found.semaphores.is_empty() {
            return Err(gather::no_probes(elf));
        }
        let mut table = ProbeTable {
            path: elf.path().to_owned(),
            build_id: elf.build_id(),
            linking: elf.linking(),
            segments,
            probes: Vec::new(),
            sites: found.sites,
            semaphores: Vec::new(),
            sites_by_address: Vec::new(),
            arguments: found.arguments,
            argument_names: ArgumentNames::read(elf),
        };
        let probe_of = table.store_probes_and_semaphores(found.semaphores);
        table.sort_by_address();
        table.read_code(elf)?;
        table.sort_by_name(&probe_of);
        table.refuse_unexpected_code(elf)?;
        table.refuse_shared_addresses()?;
        Ok(table)
    }

    /// Lays out the probes and their semaphores by name; returns the probe of each semaphore.
    fn store_probes_and_semaphores(&mut self, mut found: Vec<FoundSemaphore>) -> Vec<ProbeIndex> {
        let mut order: Vec<usize> = (0..found.len()).collect();
        order.sort_unstable_by_key(|&index| {
            let one = &found[index];
            (&one.name, one.counter, one.generation)
        });
        let mut probe_of: Vec<ProbeIndex> = Vec::new();
        let mut index_of = vec![0; found.len()];
        for index in order {
            let FoundSemaphore {
                ref mut name,
                counter,
                generation,
            } = found[index];
            let next = self.semaphores.len();
            if self.probes.last().is_none_or(|probe| probe.name != *name) {
                self.probes.push(ProbeEntry {
                    name: std::mem::take(name),
                    sites: 0..0,
                    semaphores: next..next,
                });
            }
            let probe = self.probes.len() - 1;
            let own = &mut self.probes[probe].semaphores;
            // Objects of two compilers may share the symbol of the semaphore, and so its counter.
            let known = self.semaphores[own.clone()].last();
            if known.is_none_or(|known| known.counter != counter) {
                own.end += 1;
                probe_of.push(probe);
                self.semaphores.push(SemaphoreEntry {
                    counter,
                    generation,
                });
            }
            index_of[index] = self.semaphores.len() as u32 - 1;
        }
        for site in &mut self.sites {
            site.semaphore = index_of[site.semaphore as usize];
        }
        probe_of
    }

    fn sort_by_address(&mut self) {
        // The sites are still in the order in which the linker put the notes: usually sorted already.
        self.sites
            .sort_by_key(|site| (site.address, site.semaphore));
        let all = &self.arguments;
        let arguments = |site: &SiteEntry| string_at(all, site.arguments);
        // A linker that folds equal functions leaves two notes of one site. If they differ,
        // both are kept, to be refused as overlapping.
        self.sites.dedup_by(|one, other| {
            (one.address, one.semaphore) == (other.address, other.semaphore)
                && arguments(one) == arguments(other)
        });
    }

    /// Reads the bytes of every site from the file; the sites are sorted by address.
    fn read_code(&mut self, elf: &ElfFile) -> Result<()> {
        let code = SegmentIndex::of_code(&self.segments);
        let items = self.sites.iter().map(|site| {
            let segment = code.find(site.address, SITE_LEN as u64);
            // `gather` refuses a site outside the executable segments.
            (site.address.0, segment.unwrap_or(0))
        });
        let mut bytes = Vec::new();
        for run in runs::group(items, SITE_LEN as u64) {
            let (start, len) = (run.start, run.len as usize);
            let segment = self.segments[run.key];
            bytes.resize(len, 0);
            elf.read_loaded(&segment, FileAddr(start), &mut bytes)?;
            for site in &mut self.sites[run.range()] {
                let at = (site.address.0 - start) as usize;
                site.code.0.copy_from_slice(&bytes[at..at + SITE_LEN]);
            }
        }
        Ok(())
    }

    /// Sorts the sites by the name of their probe, and records their order by address.
    fn sort_by_name(&mut self, probe_of: &[ProbeIndex]) {
        let probe_of = |site: &SiteEntry| probe_of[site.semaphore as usize];
        for site in &self.sites {
            self.probes[probe_of(site)].sites.end += 1;
        }
        let mut end = 0;
        for probe in &mut self.probes {
            let start = end;
            end += probe.sites.end;
            // Until all sites are placed, `end` is the place of the probe's next site.
            probe.sites = start..start;
        }
        let place = |site: &SiteEntry| {
            let next = &mut self.probes[probe_of(site)].sites.end;
            *next += 1;
            *next as u32 - 1
        };
        self.sites_by_address = self.sites.iter().map(place).collect();
        let mut places = self.sites_by_address.clone();
        for index in 0..places.len() {
            while places[index] as usize != index {
                let place = places[index] as usize;
                self.sites.swap(index, place);
                places.swap(index, place);
            }
        }
    }

    fn refuse_unexpected_code(&self, elf: &ElfFile) -> Result<()> {
        let Some(index) = self.sites.iter().position(|site| !site.code.is_pristine()) else {
            return Ok(());
        };
        let site = &self.sites[index];
        Err(gather::not_a_site(elf, site))
    }

    /// Refuses sites that overlap, and counters that overlap: they cannot be changed independently.
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
        Err(Error::of_file(
            &self.path,
            FileError::Elf(ElfDefect::Contradiction(text)),
        ))
    }

    /// Returns the name of the first probe that fulfils a condition, for errors.
    fn name_of(&self, fulfils: impl Fn(&ProbeEntry) -> bool) -> &str {
        let mut probes = self.probes.iter();
        probes
            .find(|&probe| fulfils(probe))
            .map_or("", |probe| &probe.name)
    }

    /// Returns the path of the file, as it was given or as the kernel names it.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the file's build-id.
    pub fn build_id(&self) -> Option<&BuildId> {
        self.build_id.as_ref()
    }

    /// Returns whether the file is position independent.
    pub fn linking(&self) -> Linking {
        self.linking
    }

    pub(crate) fn segments(&self) -> &[Segment] {
        &self.segments
    }

    /// Returns the generations of its probes, with repetitions.
    pub(crate) fn generations(&self) -> impl Iterator<Item = Generation> {
        self.semaphores.iter().map(|semaphore| semaphore.generation)
    }

    /// Returns all probes, sorted by name.
    pub fn probes(&self) -> impl ExactSizeIterator<Item = Probe<'_>> {
        (0..self.probes.len()).map(|index| Probe { table: self, index })
    }

    /// Returns the probe of that name.
    pub fn probe(&self, name: &str) -> Option<Probe<'_>> {
        let index = self
            .probes
            .binary_search_by(|probe| (*probe.name).cmp(name))
            .ok()?;
        Some(self.by_index(index))
    }

    pub(crate) fn by_index(&self, index: usize) -> Probe<'_> {
        Probe { table: self, index }
    }

    pub(crate) fn site_count(&self) -> usize {
        self.sites.len()
    }

    pub(crate) fn semaphore_count(&self) -> usize {
        self.semaphores.len()
    }

    /// Returns the indices of all sites, by address.
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

/// Returns the string from `start` to the next NUL.
fn string_at(strings: &[u8], start: u32) -> &[u8] {
    let rest = &strings[start as usize..];
    &rest[..memchr::memchr(0, rest).unwrap_or(rest.len())]
}

/// Returns the first two items that overlap: the address of the second, and the indices of both.
/// The items are sorted by address, and each has `len` bytes.
fn first_overlap(
    mut items: impl Iterator<Item = (FileAddr, usize)>,
    len: u64,
) -> Option<(FileAddr, [usize; 2])> {
    let (mut address, mut index) = items.next()?;
    for (next_address, next) in items {
        if next_address.0 - address.0 < len {
            return Some((next_address, [index, next]));
        }
        (address, index) = (next_address, next);
    }
    None
}

#[cfg(test)]
mod tests;
