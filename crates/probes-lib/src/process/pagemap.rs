//! [`UnwrittenPages`]: which of a process's pages of code still have the contents of their file. These need not
//! be read from the process, which would make the kernel map them there.
//!
//! Writing to a page of a private mapping gives the process a copy of its own, which the kernel
//! counts as anonymous memory; `/proc/PID/pagemap` distinguishes it from a page of the file.

use std::fs::File;
use std::os::unix::fs::FileExt;

use nix::fcntl::OFlag;

use crate::address::{LiveAddr, PAGE};
use crate::process::Process;
use crate::process::load_bias;
use crate::process::maps::{self, Mapping};
use crate::process::object::Object;

// Bits of an entry, from the kernel's Documentation/admin-guide/mm/pagemap.rst: "Bit 61 page is
// file-page or shared-anon", "Bit 62 page swapped", "Bit 63 page present".
const OF_FILE: u64 = 1 << 61;
const SWAPPED: u64 = 1 << 62;
const PRESENT: u64 = 1 << 63;

/// The private mappings of code from the files of a process, and the pagemap, which tells which of
/// their pages have not been written to.
pub(crate) struct UnwrittenPages {
    pagemap: File,
    mappings: Vec<Mapping>,
}

impl UnwrittenPages {
    /// Opens the pagemap; returns `None` if it cannot be opened, so that everything has to be read.
    pub(crate) fn of(
        process: &Process,
        objects: &[Object],
        mut mappings: Vec<Mapping>,
    ) -> Option<UnwrittenPages> {
        let pagemap = process.with_thread_directory(|directory| {
            let path = format!("{directory}/pagemap");
            process.open_file(&path, OFlag::O_RDONLY).map(Some)
        });
        mappings.retain(|mapping| {
            let mut objects = objects.iter().filter(|object| object.is_mapped_by(mapping));
            !mapping.shared
                && objects.any(|object| {
                    load_bias::of_mapping(object.table.segments(), mapping) == Some(object.bias)
                })
        });
        Some(UnwrittenPages {
            pagemap: pagemap.ok()?,
            mappings,
        })
    }

    /// Returns whether the pages of these bytes have not been written to.
    pub(crate) fn holds(&self, start: LiveAddr, len: u64) -> bool {
        if maps::find(&self.mappings, start, len).is_none() {
            return false;
        }
        let (first, last) = (start.0 / PAGE, (start.0 + len - 1) / PAGE);
        let mut entries = vec![0; (last - first + 1) as usize * size_of::<u64>()];
        let read = self
            .pagemap
            .read_exact_at(&mut entries, first * size_of::<u64>() as u64);
        let mut entries = entries.chunks_exact(size_of::<u64>());
        read.is_ok() && entries.all(|entry| entry.try_into().is_ok_and(is_unwritten))
    }
}

/// Returns whether this is the entry of a page of which the process has no copy.
fn is_unwritten(entry: [u8; 8]) -> bool {
    let bits = u64::from_le_bytes(entry);
    bits & SWAPPED == 0 && (bits & PRESENT == 0 || bits & OF_FILE != 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::image::Image;

    use crate::process::maps::read_maps;
    use test_support::{Talker, fixture};

    #[test]
    fn absent_and_file_pages_are_unwritten() {
        let is_unwritten = |bits: u64| is_unwritten(bits.to_le_bytes());
        // Anonymous memory without and with the soft-dirty bit, swapped out, and being migrated.
        for bits in [PRESENT, PRESENT | 1 << 55, SWAPPED, SWAPPED | OF_FILE] {
            assert!(!is_unwritten(bits), "{bits:#x}");
        }
        for bits in [0, PRESENT | OF_FILE, PRESENT | OF_FILE | 0x1234] {
            assert!(is_unwritten(bits), "{bits:#x}");
        }
    }

    #[test]
    fn page_is_unwritten_until_its_first_write() {
        for fixture in ["page_borders.pie", "page_borders.nopie"].map(fixture) {
            let talker = Talker::start(&fixture);
            let process = Process::open(talker.pid()).unwrap();
            let image = Image::of(&process, std::sync::Arc::default()).unwrap();
            let program = &image.program;
            let maps = read_maps(&process).unwrap();
            let unwritten = UnwrittenPages::of(&process, program.objects(), maps).unwrap();
            let sites: Vec<LiveAddr> = (0..program.site_count())
                .map(|site| program.site(site).address())
                .collect();
            assert!(sites.iter().all(|&site| unwritten.holds(site, 6)));

            let page = |at: LiveAddr| at.0 / PAGE;
            let written = sites[0];
            let byte = test_support::process::peek(talker.pid(), written.0, 1);
            test_support::process::poke(talker.pid(), written.0, &byte);
            for &site in &sites {
                let pages = page(site)..=page(site.plus(5));
                assert_eq!(unwritten.holds(site, 6), !pages.contains(&page(written)));
            }
            // Only the code of the program is known to be the file's.
            assert!(!unwritten.holds(LiveAddr(0), 6));
            assert!(!unwritten.holds(LiveAddr(u64::MAX - 2), 6));
        }
    }
}
