//! [`UsdtSite`]: the sites of the USDT probes of other providers than OCaml's, from the notes of a file. Such a site is one
//! byte of code, a `nop`.

use std::str;

use super::table::{self, COUNTER_LEN, Generation};
use super::{ElfFile, Segment};
use crate::address::FileAddr;
use crate::error::Result;

/// A site of a USDT probe.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct UsdtSite {
    /// Provider and name of the probe: `postgresql:query__start`.
    pub(crate) name: String,
    /// Its address in the file.
    pub(crate) address: FileAddr,
    /// The address in the file of the two bytes that count who observes the probe; `None` if it has none. The program may
    /// come to the site only while they are not 0.
    pub(crate) semaphore: Option<FileAddr>,
}

/// Returns the sites in a file, in the order of the notes; none if it has no notes. A note whose addresses are outside of the
/// file's segments is left out, and one whose name cannot be printed.
///
/// # Errors
///
/// If the file cannot be read, or a note is malformed.
pub(crate) fn usdt_sites(elf: &ElfFile) -> Result<Vec<UsdtSite>> {
    let mut sites = Vec::new();
    let segments: Vec<Segment> = elf.loaded().collect();
    table::each_placed_note(elf, |note, shift| {
        if Generation::of_provider(note.provider).is_some() {
            return Ok(());
        }
        let placed = |address: u64| FileAddr(address.wrapping_add(shift));
        let address = placed(note.pc);
        let semaphore = (note.semaphore != 0).then(|| placed(note.semaphore));
        let mut code = segments.iter().filter(|segment| segment.executable);
        let is_code = note.pc != 0 && code.any(|segment| segment.holds_in_file(address, 1));
        let is_counter = |at| {
            let mut data = segments.iter().filter(|segment| segment.writable);
            data.any(|segment| segment.holds_in_memory(at, COUNTER_LEN))
        };
        let text = [note.provider, note.name].map(printable);
        if let ([Some(provider), Some(name)], true) =
            (text, is_code && semaphore.is_none_or(is_counter))
        {
            sites.push(UsdtSite {
                name: format!("{provider}:{name}"),
                address,
                semaphore,
            });
        }
        Ok(())
    })?;
    Ok(sites)
}

fn printable(text: &[u8]) -> Option<&str> {
    let text = str::from_utf8(text).ok()?;
    (!text.chars().any(char::is_control)).then_some(text)
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::process::Command;

    use test_support::{fixture, output};

    use super::*;

    /// Returns the sites as readelf shows them.
    fn shown_by_readelf(file: &Path) -> Vec<UsdtSite> {
        let notes = output(Command::new("readelf").arg("-n").arg(file));
        let notes = String::from_utf8(notes.stdout).unwrap();
        let mut sites = Vec::new();
        let (mut provider, mut name) = ("", "");
        let (mut address, mut semaphore) = (FileAddr(0), None);
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
                    address = FileAddr(numbers[0]);
                    semaphore = (numbers[2] != 0).then_some(FileAddr(numbers[2]));
                }
                // The last line of a note.
                "Arguments" if Generation::of_provider(provider.as_bytes()).is_none() => {
                    sites.push(UsdtSite {
                        name: format!("{provider}:{name}"),
                        address,
                        semaphore,
                    });
                }
                _ => {}
            }
        }
        sites
    }

    #[test]
    fn sites_are_those_that_readelf_shows() {
        let libraries = ["libstdc++.so.6", "libc.so.6"];
        let folder = Path::new("/usr/lib/x86_64-linux-gnu");
        let files = libraries.map(|name| folder.join(name));
        for file in files.iter().filter(|file| file.exists()) {
            let elf = ElfFile::open(file).unwrap();
            assert_eq!(usdt_sites(&elf).unwrap(), shown_by_readelf(file));
        }
        let elf = ElfFile::open(&fixture("foreign_only.pie")).unwrap();
        let found = usdt_sites(&elf).unwrap();
        assert!(!found.is_empty());
        assert_eq!(found, shown_by_readelf(&fixture("foreign_only.pie")));
    }
}
