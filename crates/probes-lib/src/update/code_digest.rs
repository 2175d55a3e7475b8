//! The digests by which OCaml's Marshal identifies the code of closures (`Marshal.Closures`): they are given to
//! the runtime before sites in that code are patched.
//!
//! The runtime computes the MD5 of all OCaml code of a process when it is first needed, and keeps
//! it. If it were computed while sites are patched, it would differ from that of other processes of
//! the program: these would refuse closures of this process, and this process theirs, until it
//! exits. So the digest of the code in the file, which is what the runtime would have computed, is
//! written into the runtime's table before the first patch.
//!
//! ```text
//! running    find the table ─▶ fragments with sites to be patched ─▶ MD5 of the file, compared with memory
//! stopped    no thread computes a digest? ─▶ write the digest, then its status ─▶ patch
//! ```

use std::collections::HashSet;
use std::ops::Range;
use std::time::{Duration, Instant};

use md5::{Digest as _, Md5};

use crate::address::{FileAddr, LiveAddr, LoadBias};
use crate::elf::{ElfFile, Segment};
use crate::error::Result;
use crate::memory::{ReadMemory, WriteMemory};
use crate::process::Process;
use crate::process::code_fragments::{
    CodeFragment, CodeFragments, Digest, DigestStatus, UnknownTable, code_area,
};
use crate::process::image::Image;
use crate::process::maps::read_maps;
use crate::process::memory::ProcessMemory;
use crate::process::object::Object;
use crate::process::pagemap::UnwrittenPages;
use crate::site::SITE_LEN;
use crate::trace::stopped::Stopped;
use crate::trace::tracer::Tracer;
use crate::update::lock;

/// How much code is read at once, in bytes.
const CHUNK: usize = 128 << 10;

/// Whether other processes of the same program accept the closures that a process marshals
/// (`Marshal.Closures` of OCaml), and it theirs.
///
/// OCaml identifies the code of a closure by a digest of all OCaml code of its program or plugin. A
/// process computes the digest when it first needs it. Compilers that have probes built in emit
/// sites in that code: if some of them are enabled or observed when the digest is computed, it
/// differs from that of other processes.
///
/// If sites lie in several pieces of code, each with a digest of its own, the value that comes last below is returned.
///
/// ```no_run
/// use probes_lib::{CodeDigest, Target};
///
/// let target = Target::open(4242)?;
/// let states = target.states()?;
/// if target.code_digest(&states)? == CodeDigest::OfPatchedCode {
///     println!("other processes refuse its closures");
/// }
/// # Ok::<(), probes_lib::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum CodeDigest {
    /// No site is known to lie in such code.
    #[default]
    Unaffected,
    /// The process has the digest of the code as the file has it: closures are accepted, whatever the state
    /// of the probes.
    OfFile,
    /// The process has a digest, which has not been compared with the file.
    Computed,
    /// The digest has not been computed yet, and no site of that code is patched now.
    NotComputed,
    /// The digest has not been computed yet, and sites of that code are patched now: if it is
    /// computed now, other processes will refuse closures of this process, and this process theirs.
    Pending,
    /// The digest was computed while sites were patched: closures are not accepted until the process exits.
    OfPatchedCode,
    /// The runtime of the program is not one whose digest can be read.
    Unknown,
}

/// What is known of the digests of the code that some sites lie in, and what is to be written before
/// these are patched.
pub(crate) struct CodeDigests {
    /// What holds for the code whose digest is not to be written.
    found: CodeDigest,
    fragments: Option<CodeFragments>,
    writes: Vec<(CodeFragment, Digest)>,
}

/// Finds out what is to be written before these sites of a process are patched.
pub(crate) fn prepare(
    process: &Process,
    image: &Image,
    memory: &ProcessMemory,
    sites: impl Iterator<Item = LiveAddr>,
) -> CodeDigests {
    match DigestReader::of(process, image) {
        Some(reader) => reader.prepare(memory, sites, &[]),
        None => CodeDigests::of(CodeDigest::Unaffected),
    }
}

/// Finds out what is to be written into a program whose code is patched at these places already, and which was
/// stopped before its first OCaml code.
pub(crate) fn prepare_patched(
    process: &Process,
    image: &Image,
    memory: &ProcessMemory,
    patched: &[LiveAddr],
) -> CodeDigests {
    match DigestReader::of(process, image) {
        Some(reader) => reader.prepare(memory, patched.iter().copied(), patched),
        None => CodeDigests::of(CodeDigest::Unaffected),
    }
}

/// A process with an OCaml runtime, whose digests can be read.
pub(crate) struct DigestReader<'r> {
    process: &'r Process,
    image: &'r Image,
    table: std::result::Result<CodeFragments, UnknownTable>,
}

impl<'r> DigestReader<'r> {
    /// Finds the table of the runtime, in the executable or an object with probes; `None` if there is none, or
    /// its file has no symbols.
    pub(crate) fn of(process: &'r Process, image: &'r Image) -> Option<DigestReader<'r>> {
        let find_table = || {
            let objects = image.program.objects();
            let mut tables = objects
                .iter()
                .filter_map(|object| CodeFragments::of(&object.elf, object.bias));
            let first = tables.next().or_else(|| {
                let (elf, bias) = image.executable_without_probes(process)?;
                CodeFragments::of(elf, bias)
            })?;
            // If there are two, the sites may be of either runtime.
            Some(tables.next().map_or(first, |_| Err(UnknownTable)))
        };
        let table = image.ocaml_code.table.get_or_init(find_table).clone()?;
        Some(DigestReader {
            process,
            image,
            table,
        })
    }

    /// Finds out what is to be written before `sites` are patched; the places `patched` are patched already.
    fn prepare(
        &self,
        memory: &ProcessMemory,
        sites: impl Iterator<Item = LiveAddr>,
        patched: &[LiveAddr],
    ) -> CodeDigests {
        let sites = sorted(sites);
        let table = self.table.clone();
        let read = table.and_then(|table| Ok((table.read(memory)?, table)));
        let Ok((all, table)) = read else {
            return CodeDigests::of(self.if_within(&sites, CodeDigest::Unknown));
        };
        let unregistered = self.unregistered(&sites, &all);
        let mut digests = CodeDigests::of(self.if_within(&unregistered, CodeDigest::Pending));
        for fragment in all {
            if !has_any(&sites, &fragment.code) {
                continue;
            }
            let found = match fragment.status {
                DigestStatus::Never => CodeDigest::Unaffected,
                DigestStatus::Computed(_) => CodeDigest::Computed,
                DigestStatus::Later => {
                    match self.digest_of_file(&fragment.code, Some((memory, patched))) {
                        Some(digest) => {
                            digests.writes.push((fragment, digest));
                            CodeDigest::Unaffected
                        }
                        None => CodeDigest::Pending,
                    }
                }
            };
            digests.found = digests.found.max(found);
        }
        digests.fragments = Some(table);
        digests
    }

    /// Compares the digests of the code that these sites lie in with the file; `is_patched` says whether any
    /// of them is patched.
    pub(crate) fn read(
        &self,
        memory: &ProcessMemory,
        sites: impl Iterator<Item = LiveAddr>,
        is_patched: bool,
    ) -> CodeDigest {
        let sites = sorted(sites);
        let later = if is_patched {
            CodeDigest::Pending
        } else {
            CodeDigest::NotComputed
        };
        match self.table.clone().and_then(|table| table.read(memory)) {
            Err(UnknownTable) => self.if_within(&sites, CodeDigest::Unknown),
            Ok(all) => {
                let unregistered = self.if_within(&self.unregistered(&sites, &all), later);
                let all = all.iter().filter(|it| has_any(&sites, &it.code));
                let state = |fragment: &CodeFragment| match fragment.status {
                    DigestStatus::Never => CodeDigest::Unaffected,
                    DigestStatus::Later => later,
                    DigestStatus::Computed(digest) => {
                        match self.digest_of_file(&fragment.code, None) {
                            Some(expected) if expected == digest => CodeDigest::OfFile,
                            Some(_) => CodeDigest::OfPatchedCode,
                            None => CodeDigest::Unknown,
                        }
                    }
                };
                all.map(state).fold(unregistered, CodeDigest::max)
            }
        }
    }

    /// Returns the sites in objects of which no code is registered: the runtime has not started yet, or not run
    /// the plugin.
    fn unregistered(&self, sites: &[LiveAddr], fragments: &[CodeFragment]) -> Vec<LiveAddr> {
        let program = &self.image.program;
        let at = |address| program.object_at(address).map(Object::start);
        let registered: HashSet<Option<LiveAddr>> =
            fragments.iter().map(|it| at(it.code.start)).collect();
        let objects = program.objects().iter().map(|it| Some(it.start()));
        // An executable without probes is none of the objects.
        let executable = self.executable_without_probes().map(|_| None);
        if objects.chain(executable).all(|it| registered.contains(&it)) {
            return Vec::new();
        }
        let sites = sites.iter().copied();
        sites
            .filter(|&site| !registered.contains(&at(site)))
            .collect()
    }

    /// Returns `state` if one of these sites lies in the OCaml code of its file, as far as that can be known.
    fn if_within(&self, sites: &[LiveAddr], state: CodeDigest) -> CodeDigest {
        if sites.is_empty() {
            return CodeDigest::Unaffected;
        }
        let find_areas = || {
            let objects = self.image.program.objects().iter();
            let objects = objects.map(|object| (&*object.elf, object.bias));
            let areas = objects.chain(self.executable_without_probes());
            let areas = areas.filter_map(|(elf, bias)| {
                let area = code_area(elf)?;
                Some(bias.live(area.start)..bias.live(area.end))
            });
            areas.collect()
        };
        let areas: &Vec<_> = self.image.ocaml_code.areas.get_or_init(find_areas);
        if areas.iter().any(|area| has_any(sites, area)) {
            state
        } else {
            CodeDigest::Unaffected
        }
    }

    fn executable_without_probes(&self) -> Option<(&ElfFile, LoadBias)> {
        self.image.executable_without_probes(self.process)
    }

    /// Returns the file that some code is of, its address there, and the segment of the file that holds all of it.
    fn place_of(&self, code: &Range<LiveAddr>) -> Option<(&ElfFile, FileAddr, Segment)> {
        let (elf, bias) = match self.image.program.object_at(code.start) {
            Some(object) => (&*object.elf, object.bias),
            None => self.executable_without_probes()?,
        };
        let start = bias.file(code.start);
        let len = code.end.0.checked_sub(code.start.0)?;
        let mut segments = elf.loaded();
        let segment = segments.find(|it| it.executable && it.holds_in_file(start, len))?;
        Some((elf, start, segment))
    }

    /// Returns the digest of code as its file has it. `memory`, if it is given, is compared with the file, except for
    /// sites and the places that are patched. If they differ, returns `None`: other processes of the program may have
    /// another digest.
    fn digest_of_file(
        &self,
        code: &Range<LiveAddr>,
        memory: Option<(&ProcessMemory, &[LiveAddr])>,
    ) -> Option<Digest> {
        let program = &self.image.program;
        let (elf, start, segment) = self.place_of(code)?;
        let len = (code.end.0 - code.start.0) as usize;
        // Only a comparison needs to know which pages are those of the file.
        let unwritten = memory.and_then(|_| {
            let maps = read_maps(self.process).ok()?;
            UnwrittenPages::of(self.process, program.objects(), maps)
        });
        let patched = memory.map_or(&[][..], |(_, patched)| patched).iter();
        let sites = program.sites_by_address().map(|site| site.address);
        let mut sites = sorted(sites.chain(patched.copied()));
        sites.retain(|site| site.0 + SITE_LEN as u64 > code.start.0 && *site < code.end);
        let mut md5 = Md5::new();
        let (mut file, mut live) = (vec![0; CHUNK], vec![0; CHUNK]);
        for offset in (0..len).step_by(CHUNK) {
            let part = CHUNK.min(len - offset);
            let (file, live) = (&mut file[..part], &mut live[..part]);
            let at = FileAddr(start.0 + offset as u64);
            elf.read_loaded(&segment, at, file).ok()?;
            md5.update(&*file);
            let at = code.start.plus(offset as u64);
            let is_from_file = || {
                let unwritten = unwritten.as_ref();
                unwritten.is_some_and(|pages| pages.holds(at, part as u64))
            };
            if let Some((memory, _)) = memory.filter(|_| !is_from_file()) {
                memory.read(at, live).ok()?;
                if !is_same_outside_sites(&sites, at, file, live) {
                    return None;
                }
            }
        }
        Some(md5.finalize().into())
    }
}

impl CodeDigests {
    fn of(found: CodeDigest) -> CodeDigests {
        CodeDigests {
            found,
            fragments: None,
            writes: Vec::new(),
        }
    }

    /// Stops the process at a moment when no thread is computing a digest that is to be written. If one is, resumes
    /// the process and stops it again. After `limit`, leaves it stopped all the same.
    ///
    /// # Errors
    ///
    /// Same as [`Tracer::stop`].
    pub(crate) fn stop<'p>(
        &self,
        tracer: &Tracer<'_>,
        process: &'p Process,
        memory: &ProcessMemory,
        limit: Duration,
    ) -> Result<Stopped<'p>> {
        let begun = Instant::now();
        loop {
            let stopped = tracer.stop(process, limit)?;
            if !self.is_being_computed(&stopped, memory) || begun.elapsed() > limit {
                return Ok(stopped);
            }
            stopped.release();
            lock::pause();
        }
    }

    /// Returns whether a thread may be computing a digest that is to be written.
    fn is_being_computed(&self, stopped: &Stopped<'_>, memory: &ProcessMemory) -> bool {
        let functions = self.fragments.iter().filter(|_| !self.writes.is_empty());
        let functions: Vec<_> = functions
            .flat_map(|table| table.computing.iter().cloned())
            .collect();
        !functions.is_empty() && stopped.leads_into(memory, &functions)
    }

    /// Writes the digests into the stopped process, before the first patch, and returns what holds then. What cannot
    /// be written is left as it is.
    pub(crate) fn write(&self, stopped: &Stopped<'_>, memory: &ProcessMemory) -> CodeDigest {
        let Some(table) = self.fragments.as_ref().filter(|_| !self.writes.is_empty()) else {
            return self.found;
        };
        let written = if self.is_being_computed(stopped, memory) {
            CodeDigest::Pending
        } else {
            self.try_to_write(table, stopped, memory)
                .unwrap_or(CodeDigest::Pending)
        };
        self.found.max(written)
    }

    fn try_to_write(
        &self,
        table: &CodeFragments,
        stopped: &Stopped<'_>,
        memory: &ProcessMemory,
    ) -> Option<CodeDigest> {
        let mut state = CodeDigest::OfFile;
        // A plugin may have been unloaded since, or a digest computed.
        let now = table.read(memory).ok()?;
        let mut writer = stopped.memory(memory).ok()?;
        let mut written = Vec::new();
        for (fragment, digest) in &self.writes {
            if !now.contains(fragment) {
                let mut now = now.iter();
                let same = now.find(|it| it.code == fragment.code)?;
                matches!(same.status, DigestStatus::Computed(_)).then_some(())?;
                state = CodeDigest::Computed;
                continue;
            }
            for (at, bytes) in fragment.writes(*digest) {
                writer.write_code(at, &bytes).ok()?;
            }
            written.push((fragment, *digest));
        }
        let after = table.read(memory).ok()?;
        let is_written = |&(fragment, digest): &(&CodeFragment, Digest)| {
            let mut after = after.iter().filter(|it| it.code == fragment.code);
            after.any(|it| it.status == DigestStatus::Computed(digest))
        };
        written.iter().all(is_written).then_some(state)
    }

    /// Returns what holds if nothing is written.
    pub(crate) fn unwritten(&self) -> CodeDigest {
        if self.writes.is_empty() {
            self.found
        } else {
            self.found.max(CodeDigest::Pending)
        }
    }
}

fn sorted(sites: impl Iterator<Item = LiveAddr>) -> Vec<LiveAddr> {
    let mut sites: Vec<LiveAddr> = sites.collect();
    sites.sort_unstable();
    sites
}

/// Returns whether any of these sorted sites lies in some code.
fn has_any(sites: &[LiveAddr], code: &Range<LiveAddr>) -> bool {
    let first = sites.partition_point(|site| *site < code.start);
    sites.get(first).is_some_and(|site| *site < code.end)
}

/// Returns whether code at `at` is as in its file, except for `sites`. They may include other patched places, because
/// no patch is longer than a site.
fn is_same_outside_sites(sites: &[LiveAddr], at: LiveAddr, file: &[u8], live: &mut [u8]) -> bool {
    if file == live {
        return true;
    }
    let before = LiveAddr(at.0.saturating_sub(SITE_LEN as u64 - 1));
    let first = sites.partition_point(|site| *site < before);
    let end = at.plus(live.len() as u64);
    for site in sites[first..].iter().take_while(|site| **site < end) {
        let of_site = site.0..site.0 + SITE_LEN as u64;
        for address in of_site.filter(|address| (at.0..end.0).contains(address)) {
            let index = (address - at.0) as usize;
            live[index] = file[index];
        }
    }
    file == live
}
