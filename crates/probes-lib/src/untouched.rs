//! [`Untouched`]: which of a process's pages of code are still those of its file. Of them nothing
//! has to be read, and the process does not have to get them for our sake.
//!
//! Writing to a page of a private mapping gives the process a copy of its own, which the kernel
//! counts as anonymous memory; `/proc/PID/pagemap` tells these from pages of the file.

use std::fs::File;
use std::os::unix::fs::FileExt;

use nix::fcntl::OFlag;

use crate::addr::LiveAddr;
use crate::bias;
use crate::image::Image;
use crate::maps::{self, Mapping};
use crate::process::Process;
use crate::spans::PAGE;

// Bits of an entry, from the kernel's Documentation/admin-guide/mm/pagemap.rst: "Bit 61 page is
// file-page or shared-anon", "Bit 62 page swapped", "Bit 63 page present".
const OF_FILE: u64 = 1 << 61;
const SWAPPED: u64 = 1 << 62;
const PRESENT: u64 = 1 << 63;

/// The mappings of a process that show the code of its file as it is, where nobody has written.
pub(crate) struct Untouched {
    pagemap: File,
    mappings: Vec<Mapping>,
}

impl Untouched {
    /// `None` if the kernel does not tell: then everything has to be read.
    pub(crate) fn of(process: &Process, image: &Image) -> Option<Untouched> {
        let pagemap = process.look(|folder| {
            let path = format!("{folder}/pagemap");
            process.open_file(&path, OFlag::O_RDONLY).map(Some)
        });
        let mut mappings = maps::parse(&process.read_program("maps").ok()?);
        mappings.retain(|mapping| {
            let bias = bias::of_mapping(image.table.segments(), mapping);
            image.is_mapped(mapping) && !mapping.shared && bias == Some(image.bias)
        });
        Some(Untouched {
            pagemap: pagemap.ok()?,
            mappings,
        })
    }

    /// Whether nobody has written to the pages of these bytes.
    pub(crate) fn holds(&self, start: LiveAddr, len: u64) -> bool {
        if maps::find(&self.mappings, start, len).is_none() {
            return false;
        }
        let (first, last) = (start.0 / PAGE, (start.0 + len - 1) / PAGE);
        let mut entries = vec![0; (last - first + 1) as usize * size_of::<u64>()];
        let read = self.pagemap.read_exact_at(&mut entries, first * 8);
        let mut entries = entries.chunks_exact(8);
        read.is_ok()
            && entries.all(|entry| {
                let bits = entry
                    .iter()
                    .rev()
                    .fold(0, |bits, &byte| bits << 8 | u64::from(byte));
                bits & SWAPPED == 0 && (bits & PRESENT == 0 || bits & OF_FILE != 0)
            })
    }
}
