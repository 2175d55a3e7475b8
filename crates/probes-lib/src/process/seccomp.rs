//! [`OwnFilters`]: which threads of a process have set themselves a seccomp filter (seccomp(2)), so that
//! the kernel may kill the process for a system call that is injected into them: as far as /proc shows it.
//!
//! A filter that was set before the program was executed, as that of a container or a service,
//! allows programs to be loaded and memory to be mapped. A thread has no filter of its own if it
//! has as many as the parent of the process that executed the program: its own process or, if that
//! was forked and has executed nothing since, the nearest ancestor that has.

pub(crate) mod filter;

use std::cell::OnceCell;
use std::io;

use crate::error::Result;
use crate::process::status::Status;
use crate::process::{Process, is_task_gone};

/// How many ancestors are looked at that have not executed a program since they were forked.
const MAX_FORKS: usize = 64;

/// The filters of a process's threads, compared with those that it was executed with.
pub(crate) struct OwnFilters<'p> {
    process: &'p Process,
    /// The mode and number of filters that the program was executed with, read once they are needed; `None`
    /// if they are not known.
    inherited: OnceCell<Option<(u32, u32)>>,
}

fn filters(status: &Status) -> (u32, u32) {
    (status.seccomp, status.filters)
}

impl OwnFilters<'_> {
    pub(crate) fn of(process: &Process) -> OwnFilters<'_> {
        OwnFilters {
            process,
            inherited: OnceCell::new(),
        }
    }

    /// Returns whether a thread has set itself a filter; also true if it has one, and it is not known whether that was
    /// inherited.
    pub(crate) fn has(&self, tid: i32) -> io::Result<bool> {
        let status = self.process.thread_status(tid)?;
        if status.seccomp == 0 {
            return Ok(false);
        }
        let inherited = self.inherited.get_or_init(|| executed_with(self.process));
        let is_inherited = *inherited == Some(filters(&status));
        Ok(status.seccomp == 1 || status.filters == 0 || !is_inherited)
    }

    /// Returns whether any thread has set itself a filter, which holds for that thread and those that
    /// it starts afterwards.
    pub(crate) fn has_any(&self) -> io::Result<bool> {
        self.has_any_of(&self.process.threads()?.read()?)
    }

    /// Returns whether trampolines may ask the kernel which memory can be read: no thread has set itself a filter that
    /// may refuse that, for certain.
    pub(crate) fn allow_questions(&self) -> bool {
        matches!(self.has_any(), Ok(false))
    }

    fn has_any_of(&self, tids: &[i32]) -> io::Result<bool> {
        for &tid in tids {
            match self.has(tid) {
                Ok(false) => {}
                Err(error) if is_task_gone(&error) => {}
                has => return has,
            }
        }
        Ok(false)
    }

    /// Returns whether some thread has no filter at all.
    pub(crate) fn is_any_unfiltered(&self) -> Result<bool> {
        let process = self.process;
        let tids = process.threads().and_then(|mut list| list.read());
        let mut tids = tids
            .map_err(|source| process.exited_or(source))?
            .into_iter();
        Ok(tids.any(|tid| {
            let status = process.thread_status(tid);
            status.is_ok_and(|status| status.seccomp == 0)
        }))
    }
}

/// How many threads [`FilterWatch`] looks at each time: each takes about 10 µs.
const LOOKED_AT: usize = 64;

/// Looks again and again for filters that threads have set themselves, at some threads each time, in turn.
#[derive(Debug, Default)]
pub(crate) struct FilterWatch {
    /// The index of the first thread to look at next.
    next: usize,
    has_any: bool,
}

impl FilterWatch {
    /// Returns whether a filter has been found, or could not be looked for now. A thread never gives up its filters.
    pub(crate) fn has_any(&mut self, process: &Process) -> bool {
        let look = |watch: &mut FilterWatch| {
            let tids = process.threads()?.read()?;
            let filters = OwnFilters::of(process);
            // The first thread is the one that most programs confine.
            Ok(filters.has_any_of(&tids[..tids.len().min(1)])?
                || filters.has_any_of(watch.next_of(&tids))?)
        };
        if self.has_any {
            return true;
        }
        let found: io::Result<bool> = look(self);
        self.has_any = matches!(found, Ok(true));
        !matches!(found, Ok(false))
    }

    /// Returns the threads to look at now.
    fn next_of<'t>(&mut self, tids: &'t [i32]) -> &'t [i32] {
        let from = if self.next < tids.len() { self.next } else { 0 };
        let end = tids.len().min(from + LOOKED_AT);
        self.next = end;
        &tids[from..end]
    }
}

/// Returns the mode and number of filters that the program of a process was executed with: those of the
/// parent of the process that executed it.
fn executed_with(process: &Process) -> Option<(u32, u32)> {
    let parent_of = |process: &Process| Process::open(process.status().ok()?.ppid).ok();
    let mut parent = parent_of(process)?;
    let mut was_forked = process.was_only_forked();
    for _ in 0..MAX_FORKS {
        if !was_forked {
            return Some(filters(&parent.status().ok()?));
        }
        was_forked = parent.was_only_forked();
        parent = parent_of(&parent)?;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_are_looked_at_in_turn() {
        let mut watch = FilterWatch::default();
        let tids: Vec<i32> = (0..150).collect();
        for expected in [0..64, 64..128, 128..150, 0..64] {
            assert_eq!(watch.next_of(&tids), &tids[expected]);
        }
        // Threads have exited meanwhile.
        assert_eq!(watch.next_of(&tids[..10]), &tids[..10]);
        assert_eq!(watch.next_of(&[]), &[0; 0]);
    }
}
