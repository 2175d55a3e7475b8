//! [`UsdtSite`]: the sites of USDT probes of any provider, from the notes of a file. A site of another provider than
//! OCaml's is one byte of code, a `nop`.

use std::str;
use std::sync::Arc;

use super::segment_index::SegmentIndex;
use super::table::{self, COUNTER_LEN, Generation};
use super::{ElfFile, Segment};
use crate::address::FileAddr;
use crate::error::{ElfDefect, Error, FileError, Result};

/// A site of a USDT probe, as a note of a file describes it. Addresses are those in the file, corrected if it was
/// prelinked.
///
/// The format of the note is that of [`Note`](crate::Note).
///
/// ```no_run
/// use probes_lib::UsdtProbes;
///
/// for object in UsdtProbes::of_file("/usr/lib/postgresql/17/bin/postgres")?.objects() {
///     for site in object.sites() {
///         println!("{} at {:?}: {}", site.probe(), site.address, site.arguments.escape_ascii());
///     }
/// }
/// # Ok::<(), probes_lib::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UsdtSite {
    /// The provider of the probe: `postgresql`. It has no control characters.
    pub provider: Arc<str>,
    /// The name of the probe: `query__start`. It has no control characters.
    pub name: Arc<str>,
    /// The address of the site; `None` if the note has only a semaphore, as some of OCaml's have.
    pub address: Option<FileAddr>,
    /// The address of the semaphore, two bytes that count the tools that observe the probe; `None` if it has none. The
    /// program may execute the site only while they are not 0. OCaml's own counter is in the two bytes after it, except
    /// for the provider `ocaml`: see [`Semaphore`](crate::Semaphore).
    pub semaphore: Option<FileAddr>,
    /// The argument string as it is in the note, without its NUL; any bytes.
    pub arguments: Box<[u8]>,
}

impl UsdtSite {
    /// Returns provider and name of the probe: `postgresql:query__start`.
    pub fn probe(&self) -> String {
        format!("{}:{}", self.provider, self.name)
    }
}

/// The sites of a file, in the order of the notes.
#[derive(Debug, Default)]
pub(crate) struct UsdtSites {
    pub(crate) sites: Vec<UsdtSite>,
    /// How many notes are left out, because their addresses are outside of the file's segments, or their providers or
    /// names are not UTF-8 or have control characters.
    pub(crate) left_out: usize,
}

/// Returns the sites in a file whose providers are `wanted`; none if it has no notes. A note without a site is ignored,
/// unless its provider is OCaml's.
///
/// # Errors
///
/// If the file cannot be read, has no section headers, or a note is malformed.
pub(crate) fn usdt_sites(elf: &ElfFile, wanted: impl Fn(&[u8]) -> bool) -> Result<UsdtSites> {
    if !elf.has_sections() {
        let defect = FileError::Elf(ElfDefect::NoSectionHeaders);
        return Err(Error::of_file(elf.path(), defect));
    }
    let mut found = UsdtSites::default();
    let segments: Vec<Segment> = elf.loaded().collect();
    let (code, data) = (
        SegmentIndex::of_code(&segments),
        SegmentIndex::of_data(&segments),
    );
    table::each_placed_note(elf, |note, shift| {
        if !wanted(note.provider) || (note.pc == 0 && is_foreign(note.provider)) {
            return Ok(());
        }
        let placed = |address: u64| (address != 0).then(|| FileAddr(address.wrapping_add(shift)));
        let (address, semaphore) = (placed(note.pc), placed(note.semaphore));
        let is_code = |at| code.holds(at, 1);
        let is_counter = |at| data.holds(at, COUNTER_LEN);
        let is_placed = address.is_none_or(is_code) && semaphore.is_none_or(is_counter);
        let text = [note.provider, note.name].map(printable);
        let ([Some(provider), Some(name)], true) = (text, is_placed) else {
            found.left_out += 1;
            return Ok(());
        };
        // Most often the note before is of the same provider, and often of the same probe.
        let last = found.sites.last();
        let shared = |text: &str, of_last: Option<&Arc<str>>| match of_last {
            Some(last) if **last == *text => last.clone(),
            _ => text.into(),
        };
        let site = UsdtSite {
            provider: shared(provider, last.map(|site| &site.provider)),
            name: shared(name, last.map(|site| &site.name)),
            address,
            semaphore,
            arguments: note.arguments.into(),
        };
        found.sites.push(site);
        Ok(())
    })?;
    Ok(found)
}

/// Returns whether a provider is another one than OCaml's.
pub(crate) fn is_foreign(provider: &[u8]) -> bool {
    Generation::of_provider(provider).is_none()
}

fn printable(text: &[u8]) -> Option<&str> {
    let text = str::from_utf8(text).ok()?;
    (!text.chars().any(char::is_control)).then_some(text)
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::process::Command;

    use test_support::{fixture_forms, output};

    use super::*;

    /// Returns the sites as readelf shows them.
    fn shown_by_readelf(file: &Path) -> Vec<UsdtSite> {
        let notes = output(Command::new("readelf").arg("-n").arg(file));
        let notes = String::from_utf8(notes.stdout).unwrap();
        let mut sites = Vec::new();
        let (mut provider, mut name) = ("", "");
        let (mut address, mut semaphore) = (None, None);
        let number = |text: &str| u64::from_str_radix(text.strip_prefix("0x").unwrap(), 16);
        for line in notes.lines() {
            let Some((key, value)) = line.trim_start().split_once(": ") else {
                continue;
            };
            match key {
                "Provider" => provider = value,
                "Name" => name = value,
                "Location" => {
                    let numbers = value.split(", ").map(|part| {
                        let digits = part.rsplit(' ').next().unwrap();
                        number(digits).unwrap()
                    });
                    let numbers: Vec<u64> = numbers.collect();
                    let placed = |number: u64| (number != 0).then_some(FileAddr(number));
                    (address, semaphore) = (placed(numbers[0]), placed(numbers[2]));
                }
                // The last line of a note.
                "Arguments" => sites.push(UsdtSite {
                    provider: provider.into(),
                    name: name.into(),
                    address,
                    semaphore,
                    arguments: value.as_bytes().into(),
                }),
                _ => {}
            }
        }
        sites
    }

    #[track_caller]
    fn assert_as_readelf(file: &Path) {
        let elf = ElfFile::open(file).unwrap();
        let expected = shown_by_readelf(file);
        assert!(!expected.is_empty(), "{}", file.display());
        let all = usdt_sites(&elf, |_| true).unwrap();
        assert_eq!((all.sites, all.left_out), (expected.clone(), 0));
        let foreign = expected.into_iter();
        let foreign = foreign.filter(|site| is_foreign(site.provider.as_bytes()));
        let found = usdt_sites(&elf, is_foreign).unwrap().sites;
        assert_eq!(found, foreign.collect::<Vec<_>>());
    }

    #[test]
    fn sites_are_those_that_readelf_shows() {
        let library = Path::new("/usr/lib/x86_64-linux-gnu/libstdc++.so.6");
        if library.exists() {
            assert_as_readelf(library);
        }
        for name in ["usdt", "foreign", "foreign_only", "gen_ocaml_2"] {
            fixture_forms(name)
                .iter()
                .for_each(|file| assert_as_readelf(file));
        }
    }

    #[test]
    fn any_file_gives_printable_sites_or_error() {
        let corpus = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/corpus/elf");
        let mut sites = 0;
        for entry in std::fs::read_dir(corpus).unwrap() {
            let elf = ElfFile::open(&entry.unwrap().path());
            let found = elf.and_then(|elf| usdt_sites(&elf, |_| true));
            for site in found.into_iter().flat_map(|found| found.sites) {
                assert!(!site.probe().chars().any(char::is_control));
                sites += 1;
            }
        }
        assert!(sites > 0, "no seed has a site");
    }
}
