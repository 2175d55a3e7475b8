//! Gathers the semaphores and sites that notes name, each checked against the segments.
//!
//! A file may have a hundred thousand notes: they are read part by part, and little is kept of each.

use std::str;

use crate::address::{CodeRange, FileAddr};
use crate::elf::note::{self, Note};
use crate::elf::segment_index::SegmentIndex;
use crate::elf::{ElfFile, Segment, within};
use crate::error::{ElfDefect, Error, FileError, ProbeDefect, ProbeError, Result};
use crate::site::{SITE_LEN, SiteCode};

use super::semaphore_layout::{self, FoundSemaphore};
use super::{COUNTER_LEN, Generation, SiteEntry};

pub(crate) const NOTE_SECTION: &str = ".note.stapsdt";
const BASE_SECTION: &str = ".stapsdt.base";
const SEMAPHORE_SECTION: &str = ".probes";

/// The semaphores and sites that the OCaml notes of a file name, in the order of the notes.
#[derive(Default)]
pub(super) struct GatheredNotes {
    /// A semaphore may occur several times.
    pub(super) semaphores: Vec<FoundSemaphore>,
    /// Without their code; each has the index of its semaphore above.
    pub(super) sites: Vec<SiteEntry>,
    /// The argument strings of the sites, each followed by a NUL.
    pub(super) arguments: Vec<u8>,
}

fn wrong_note(elf: &ElfFile, note: &Note<'_>, defect: ProbeDefect) -> crate::error::Error {
    Error::of_file(
        elf.path(),
        FileError::WrongNote {
            index: note.index,
            offset: note.offset,
            name: note.name.escape_ascii().to_string(),
            defect,
        },
    )
}

/// Calls `visit` with each note of the file; a file without their section is an error.
fn each_note(elf: &ElfFile, mut visit: impl FnMut(Note<'_>) -> Result<()>) -> Result<()> {
    let Some(section) = elf.contents(NOTE_SECTION)? else {
        return Err(if elf.has_sections() {
            no_probes(elf)
        } else {
            Error::of_file(elf.path(), FileError::Elf(ElfDefect::NoSectionHeaders))
        });
    };
    let read = |offset, bytes: &mut [u8]| section.read(offset, bytes);
    note::each_note(section.len, read, |note| match note {
        Ok(note) => visit(note),
        Err(note) => Err(Error::of_file(elf.path(), FileError::MalformedNote(note))),
    })
}

/// Calls `visit` with each note of the file, and with what is added to the addresses of the note; a file without their
/// section is no error.
pub(in crate::elf) fn each_placed_note(
    elf: &ElfFile,
    mut visit: impl FnMut(Note<'_>, u64) -> Result<()>,
) -> Result<()> {
    if elf.contents(NOTE_SECTION)?.is_none() {
        return Ok(());
    }
    let base = base_address(elf);
    each_note(elf, |note| {
        let shift = prelink_shift(note.base, base);
        visit(note, shift)
    })
}

/// Returns the bytes that are overwritten when a probe is enabled or traced, for each note of any
/// provider: the whole site of an OCaml probe; the first byte of any other, for a breakpoint.
///
/// # Errors
///
/// If a note is malformed.
pub(crate) fn noted_sites(elf: &ElfFile) -> Result<Vec<CodeRange>> {
    let mut sites = Vec::new();
    each_placed_note(elf, |note, shift| {
        let start = FileAddr(note.pc.wrapping_add(shift));
        let is_ocaml = Generation::of_provider(note.provider).is_some();
        let len = if is_ocaml { SITE_LEN as u64 } else { 1 };
        sites.extend((note.pc != 0).then_some(CodeRange { start, len }));
        Ok(())
    })?;
    Ok(sites)
}

/// Returns how many sites to reserve memory for: an upper bound of the number of notes, but at most
/// `MANY`. Pages that are reserved and never touched cost nothing.
fn expected_notes(elf: &ElfFile) -> usize {
    // Header, `stapsdt\0`, three addresses, three empty strings.
    const SHORTEST: usize = 12 + 8 + 24 + 3;
    const MANY: usize = 1 << 16;
    let section = elf.contents(NOTE_SECTION).ok().flatten();
    section
        .map_or(0, |section| section.len / SHORTEST)
        .min(MANY)
}

/// Reads and checks the notes.
pub(super) fn gather(elf: &ElfFile, segments: &[Segment]) -> Result<GatheredNotes> {
    let base = base_address(elf);
    let (code, data) = (
        SegmentIndex::of_code(segments),
        SegmentIndex::of_data(segments),
    );
    let semaphore_section = elf.section_range(SEMAPHORE_SECTION);
    let mut found = GatheredNotes::default();
    let mut foreign: Vec<FileAddr> = Vec::new();
    let mut recent = Recent::of(semaphore_section);
    // The offset of the last argument string in `found.arguments`: often the next string is the same.
    let mut last_arguments = 0;
    found.sites.reserve(expected_notes(elf));
    each_note(elf, |note| {
        let shift = prelink_shift(note.base, base);
        let Some(generation) = Generation::of_provider(note.provider) else {
            let semaphore = FileAddr(note.semaphore.wrapping_add(shift));
            let is_inside = |(start, len)| within(start, len, semaphore, COUNTER_LEN);
            let is_semaphore = note.semaphore != 0 && semaphore_section.is_some_and(is_inside);
            if is_semaphore && foreign.last() != Some(&semaphore) {
                foreign.push(semaphore);
            }
            return Ok(());
        };
        let fail = |defect| wrong_note(elf, &note, defect);
        let counter =
            counter_address(&note, shift, generation, &data, semaphore_section).map_err(fail)?;
        let last = recent.at(counter);
        let known = found.semaphores.get(*last as usize).is_some_and(|one| {
            (one.counter, one.generation) == (counter, generation)
                && one.name.as_bytes() == note.name
        });
        if !known {
            let name = printable(note.name).ok_or_else(|| fail(ProbeDefect::Name))?;
            *last = found.semaphores.len() as u32;
            found.semaphores.push(FoundSemaphore {
                name: name.into(),
                counter,
                generation,
            });
        }
        let semaphore = *last;
        if let Some(address) = site_address(&note, shift, generation, &code).map_err(fail)? {
            let text = note.arguments;
            if !text.is_ascii() && str::from_utf8(text).is_err() {
                return Err(fail(ProbeDefect::Arguments));
            }
            let last = &found.arguments[last_arguments as usize..];
            if last.strip_prefix(text).is_none_or(|rest| rest != [0]) {
                last_arguments = found.arguments.len() as u32;
                found.arguments.extend_from_slice(text);
                found.arguments.push(0);
            }
            found.sites.push(SiteEntry {
                address,
                arguments: last_arguments,
                semaphore,
                code: SiteCode([0; SITE_LEN]),
                generation,
            });
        }
        Ok(())
    })?;
    if let Some(section) = semaphore_section {
        semaphore_layout::adjust(elf, &mut found.semaphores, &foreign, section)?;
    }
    Ok(found)
}

/// Returns the error for a site that a note names but that does not hold the bytes of a site. The note
/// is searched for only now, because nothing else needs the note's offset.
pub(super) fn not_a_site(elf: &ElfFile, site: &SiteEntry) -> crate::error::Error {
    let base = base_address(elf);
    let found = each_note(elf, |note| {
        let is_note_of_site = note.pc != 0
            && note.pc.wrapping_add(prelink_shift(note.base, base)) == site.address.0
            && Generation::of_provider(note.provider) == Some(site.generation);
        if is_note_of_site {
            let (address, found) = (site.address, site.code);
            let defect = ProbeDefect::NotASite { address, found };
            return Err(wrong_note(elf, &note, defect));
        }
        Ok(())
    });
    match found {
        Err(error) => error,
        Ok(()) => {
            let text = format!("the site at {} has no note any more", site.address);
            Error::of_file(elf.path(), FileError::Elf(ElfDefect::Contradiction(text)))
        }
    }
}

/// For each address of the semaphore section, the semaphore that was found there last. The next note with
/// this address nearly always names the same semaphore, so that no name has to be searched for.
struct Recent {
    start: FileAddr,
    indices: Vec<u32>,
}

impl Recent {
    /// If the section has more counters, several addresses share an element of `indices`, and a semaphore may be
    /// added to the found ones several times.
    const MAX_INDICES: u64 = 1 << 16;

    fn of(section: Option<(FileAddr, u64)>) -> Recent {
        let (start, len) = section.unwrap_or((FileAddr(0), 0));
        let count = (len / COUNTER_LEN).clamp(1, Recent::MAX_INDICES);
        Recent {
            start,
            indices: vec![u32::MAX; count as usize],
        }
    }

    fn at(&mut self, counter: FileAddr) -> &mut u32 {
        let place = (counter.0.wrapping_sub(self.start.0) / COUNTER_LEN) as usize;
        let count = self.indices.len();
        &mut self.indices[place % count]
    }
}

/// Returns the address of the section `.stapsdt.base`. The addresses in notes are absolute: this section only shows how
/// far prelink(8) has moved the file since they were written (see [`prelink_shift`]).
pub(super) fn base_address(elf: &ElfFile) -> Option<FileAddr> {
    elf.section_range(BASE_SECTION).map(|(address, _)| address)
}

/// How far the file has moved since a note with this base was written: prelink(8) shifts the sections that
/// are loaded, `.stapsdt.base` with them, but not the notes.
pub(super) fn prelink_shift(noted_base: u64, base: Option<FileAddr>) -> u64 {
    base.map_or(0, |base| base.0.wrapping_sub(noted_base))
}

/// Returns the address of the site; `None` if the note has none and its
/// generation allows that. A zero pc is never shifted.
fn site_address(
    note: &Note<'_>,
    shift: u64,
    generation: Generation,
    code: &SegmentIndex,
) -> Result<Option<FileAddr>, ProbeDefect> {
    if note.pc == 0 {
        return if generation.allows_no_site() {
            Ok(None)
        } else {
            Err(ProbeDefect::NoSite)
        };
    }
    let address = FileAddr(note.pc.wrapping_add(shift));
    code.holds(address, SITE_LEN as u64)
        .then_some(Some(address))
        .ok_or(ProbeDefect::SiteOutside(address))
}

/// Returns the address of the counter that OCaml reads. For the provider `ocaml`, this is the start
/// of the semaphore, until `semaphore_layout` has found out how long the semaphore is.
fn counter_address(
    note: &Note<'_>,
    shift: u64,
    generation: Generation,
    data: &SegmentIndex,
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
    data.holds(counter, COUNTER_LEN)
        .then_some(counter)
        .ok_or(ProbeDefect::SemaphoreNotWritable(counter))
}

/// Returns the name if it can be printed as one word; compilers emit letters, digits and `_`.
pub(super) fn printable(name: &[u8]) -> Option<&str> {
    let name = str::from_utf8(name).ok()?;
    let fits = |c: char| !c.is_control() && !c.is_whitespace();
    (!name.is_empty() && name.chars().all(fits)).then_some(name)
}

/// Returns the error of a file without OCaml probes.
pub(super) fn no_probes(elf: &ElfFile) -> crate::error::Error {
    Error::of_file(
        elf.path(),
        ProbeError::NoProbes {
            build_id: elf.build_id(),
            runs_bytecode: elf.interprets_bytecode(),
            unreadable: Vec::new(),
        },
    )
}
