//! A probe of a table, its sites and its semaphores: views, cheap to copy.

use std::ops::Range;
use std::str;

use crate::address::FileAddr;
use crate::elf::arguments::Argument;
use crate::site::SiteCode;

use super::{Generation, ProbeIndex, ProbeTable, SiteEntry, string_at};

/// One probe: all sites and semaphores of a name.
///
/// ```no_run
/// let table = probes_lib::ProbeTable::read("server.exe")?;
/// if let Some(probe) = table.probe("req_start") {
///     println!("{} has {} sites", probe.name(), probe.sites().len());
/// }
/// # Ok::<(), probes_lib::Error>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Probe<'t> {
    pub(super) table: &'t ProbeTable,
    pub(super) index: ProbeIndex,
}

impl<'t> Probe<'t> {
    /// Returns its name.
    pub fn name(&self) -> &'t str {
        &self.table.probes[self.index].name
    }

    /// Returns its sites, by address; none if there are only semaphores.
    pub fn sites(&self) -> impl ExactSizeIterator<Item = Site<'t>> + use<'t> {
        let table = self.table;
        self.site_range().map(|index| Site { table, index })
    }

    /// Returns its semaphores, by address.
    pub fn semaphores(&self) -> impl ExactSizeIterator<Item = Semaphore<'t>> + use<'t> {
        let table = self.table;
        self.semaphore_range()
            .map(|index| Semaphore { table, index })
    }

    pub(crate) fn site_range(&self) -> Range<usize> {
        self.table.probes[self.index].sites.clone()
    }

    pub(crate) fn semaphore_range(&self) -> Range<usize> {
        self.table.probes[self.index].semaphores.clone()
    }
}

/// One site of a probe.
///
/// ```no_run
/// let table = probes_lib::ProbeTable::read("server.exe")?;
/// for site in table.probes().flat_map(|probe| probe.sites()) {
///     let arguments: Vec<&str> = site.argument_texts().collect();
///     println!("{} {}", site.address(), arguments.join(" "));
/// }
/// # Ok::<(), probes_lib::Error>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Site<'t> {
    pub(super) table: &'t ProbeTable,
    pub(super) index: usize,
}

impl<'t> Site<'t> {
    fn entry(&self) -> &'t SiteEntry {
        &self.table.sites[self.index]
    }

    /// Returns the address of its nop; the opcode is the next byte.
    pub fn address(&self) -> FileAddr {
        self.entry().address
    }

    /// Returns the generation of its note.
    pub fn generation(&self) -> Generation {
        self.entry().generation
    }

    /// Returns its bytes in the file.
    pub fn code(&self) -> SiteCode {
        self.entry().code
    }

    /// Returns the index in the table of the semaphore whose counter decides whether it is enabled.
    pub(crate) fn semaphore_index(&self) -> usize {
        self.entry().semaphore as usize
    }

    /// Returns its arguments in the order of the note, each as text; see [`Site::arguments`].
    pub fn argument_texts(&self) -> impl Iterator<Item = &'t str> + use<'t> {
        let bytes = string_at(&self.table.arguments, self.entry().arguments);
        // Checked when the table was read.
        str::from_utf8(bytes)
            .unwrap_or_default()
            .split_ascii_whitespace()
    }

    /// Returns the names of its arguments, in the same order; none if the program was not built with a ppx_probe that
    /// records them.
    pub fn argument_names(&self) -> impl Iterator<Item = &'t str> + use<'t> {
        self.table.argument_names.of(self.address())
    }

    /// Returns its arguments, parsed; `None` for one that is not of the form `N@LOC`.
    pub fn arguments(&self) -> impl Iterator<Item = Option<Argument<'t>>> + use<'t> {
        self.argument_texts().map(Argument::parse)
    }
}

/// One semaphore of a probe. It has an unsigned 16-bit counter of the tools that have enabled the probe; in most
/// generations, SystemTap's counter precedes it.
///
/// ```no_run
/// let table = probes_lib::ProbeTable::read("server.exe")?;
/// for semaphore in table.probes().flat_map(|probe| probe.semaphores()) {
///     println!("{}", semaphore.counter());
/// }
/// # Ok::<(), probes_lib::Error>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Semaphore<'t> {
    pub(super) table: &'t ProbeTable,
    pub(super) index: usize,
}

impl Semaphore<'_> {
    /// Returns the address of the counter that OCaml reads, two bytes.
    pub fn counter(&self) -> FileAddr {
        self.table.semaphores[self.index].counter
    }

    /// Returns the generation of its notes.
    pub fn generation(&self) -> Generation {
        self.table.semaphores[self.index].generation
    }
}
