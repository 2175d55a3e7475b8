//! [`PageTable`]: the table that says which pages the trampolines of a process may read, until when it is valid, and
//! whether they may ask the kernel.

use crate::error::Result;
use crate::observe::layout::readable_pages::ReadablePages;
use crate::observe::layout::shared::{SharedLayout, validity};
use crate::process::Process;
use crate::process::maps::{Mapping, read_maps};
use crate::process::seccomp::FilterWatch;
use crate::ticks;

/// Bytes to write at offsets in the shared data, in this order.
type SharedWrites = Vec<(u64, Vec<u8>)>;

/// The table of readable pages of a process, which its observer keeps up to date.
#[derive(Debug)]
pub(crate) struct PageTable {
    layout: SharedLayout,
    /// What the table in the process has; `None` until the first renewal in a forked child, whose table begins empty.
    pages: Option<ReadablePages>,
    /// For how long it is valid, in ticks.
    ticks: u64,
    /// Whether trampolines ask the kernel which memory can be read.
    asks_kernel: bool,
    /// Finds the seccomp filters that threads have installed: a filter may kill the process if a trampoline asks the
    /// kernel.
    filters: FilterWatch,
}

impl PageTable {
    /// Returns the table of a process whose shared data already contain `pages`; each renewal is valid for so many
    /// ticks.
    pub(crate) fn of(
        layout: SharedLayout,
        pages: ReadablePages,
        ticks: u64,
        asks_kernel: bool,
    ) -> PageTable {
        PageTable {
            layout,
            pages: Some(pages),
            ticks,
            asks_kernel,
            filters: FilterWatch::default(),
        }
    }

    /// Returns the table of a forked child: empty, because of MADV_WIPEONFORK.
    pub(crate) fn of_forked(&self) -> PageTable {
        PageTable {
            pages: None,
            filters: FilterWatch::default(),
            ..*self
        }
    }

    /// Brings the table of a process up to date with its mappings; `write` writes the changes.
    ///
    /// # Errors
    ///
    /// If its mappings cannot be read, or `write` fails; then the table is as it was.
    pub(crate) fn renew(
        &mut self,
        process: &Process,
        write: impl FnOnce(&[(u64, Vec<u8>)]) -> Result<()>,
    ) -> Result<()> {
        // Before the mappings are read: they may change right afterwards.
        let since = ticks::now();
        let may_ask = !self.asks_kernel || !self.filters.has_any(process);
        let (new, writes) = self.writes(&read_maps(process)?, since, may_ask);
        write(&writes)?;
        self.pages = new.or(self.pages.take());
        Ok(())
    }

    /// Returns the pages of these mappings, if the process does not have them yet, and what to write. `since` is a
    /// time before the mappings were read, in ticks; `may_ask` is whether trampolines may ask the kernel.
    fn writes(
        &self,
        maps: &[Mapping],
        since: u64,
        may_ask: bool,
    ) -> (Option<ReadablePages>, SharedWrites) {
        let (new, changes) = match &self.pages {
            None => {
                let new = ReadablePages::of(maps);
                let all = new.writes();
                (Some(new), all)
            }
            Some(before) => {
                let new = before.renewed(maps);
                let changes = new.as_ref().map(|new| new.changes(before));
                (new, changes.unwrap_or_default())
            }
        };
        let at = self.layout.pages();
        let table = changes
            .into_iter()
            .map(|write| (at + write.at, write.bytes));
        // `SINCE` is written last: until it is there, an empty table is not valid.
        let validity = [
            (validity::MAY_ASK, may_ask.into()),
            (validity::TICKS, self.ticks),
            (validity::SINCE, since),
        ];
        let at = self.layout.validity();
        let validity = validity.map(|(field, value)| (at + field, value.to_le_bytes().to_vec()));
        (new, table.chain(validity).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::{Error, ProcessError};
    use crate::process::maps::parse;
    use test_support::{Talker, fixture};

    #[test]
    fn renewal_writes_changed_pages_and_their_validity() {
        let layout = SharedLayout {
            filters_memory: true,
            ..SharedLayout::default()
        };
        let mut table = PageTable::of(layout, ReadablePages::default(), 700, true);
        let maps = parse(b"400000-401000 rw-p 00000000 00:00 0 \n");
        let entry = layout.pages() + 32 * 8;
        let word = |at, value: u64| (layout.validity() + at, value.to_le_bytes().to_vec());
        let valid = |since, may_ask: bool| {
            [
                word(validity::MAY_ASK, may_ask.into()),
                word(validity::TICKS, 700),
                word(validity::SINCE, since),
            ]
        };
        let changes = [
            (entry, vec![0; 4]),
            (entry + 4, vec![32, 0, 0, 0]),
            (entry, vec![1, 0, 0, 0]),
        ];
        let (new, writes) = table.writes(&maps, 1 << 50, true);
        assert_eq!(writes, [changes, valid(1 << 50, true)].concat());
        table.pages = new;
        let (new, writes) = table.writes(&maps, 1 << 51, false);
        assert!(new.is_none() && writes == valid(1 << 51, false));
        // In a forked child, nothing is there yet.
        let forked = table.of_forked();
        let whole = vec![(entry, vec![1, 0, 0, 0, 32, 0, 0, 0])];
        let (new, writes) = forked.writes(&maps, 1 << 52, true);
        assert_eq!(writes, [whole, valid(1 << 52, true).to_vec()].concat());
        assert_eq!(new, table.pages);
    }

    #[test]
    fn failed_writes_are_repeated() {
        // Its mappings stay as they are, unlike those of this process, where other tests run.
        let mut program = Talker::start(&fixture("job.pie"));
        program.ask("counters", "sem");
        let process = Process::open(program.pid()).unwrap();
        let layout = SharedLayout::default();
        let mut table = PageTable::of(layout, ReadablePages::default(), 700, false).of_forked();
        let mut renew = |fails: bool| {
            let mut count = 0;
            let renewed = table.renew(&process, |writes| {
                count = writes.len();
                if fails {
                    return Err(Error::of_process(1, ProcessError::Exited));
                }
                Ok(())
            });
            assert_eq!(renewed.is_err(), fails);
            count
        };
        assert!(renew(true) > 3 && renew(false) > 3);
        // Now only the validity is written.
        assert_eq!(renew(false), 3);
    }
}
