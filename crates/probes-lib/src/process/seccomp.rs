//! [`OwnFilters`]: which threads of a process have set themselves a seccomp filter (seccomp(2)), so that
//! the kernel may kill the process for a system call that is injected into them.
//!
//! A filter that a process has from its parent, that of a container or a service, allows programs to be
//! loaded and memory to be mapped. A thread has no filter of its own if it has as many as the parent.

use std::cell::OnceCell;
use std::io;

use crate::error::{Error, ObserveError, ProcessError, Result};
use crate::process::status::Status;
use crate::process::{Process, is_gone};

/// The filters of a process's threads, compared with its parent's.
pub(crate) struct OwnFilters<'p> {
    process: &'p Process,
    /// The parent's mode and number of filters, read once it is needed; `None` if they cannot be read.
    parent: OnceCell<Option<(u32, u32)>>,
}

fn filters(status: &Status) -> (u32, u32) {
    (status.seccomp, status.filters)
}

impl OwnFilters<'_> {
    pub(crate) fn of(process: &Process) -> OwnFilters<'_> {
        OwnFilters {
            process,
            parent: OnceCell::new(),
        }
    }

    /// Returns whether a thread has set itself a filter.
    pub(crate) fn has(&self, tid: i32) -> io::Result<bool> {
        let status = self.process.thread_status(tid)?;
        if status.seccomp == 0 {
            return Ok(false);
        }
        let of_parent = self.parent.get_or_init(|| {
            let parent = Process::open(status.ppid).ok()?;
            Some(filters(&parent.status().ok()?))
        });
        let is_inherited = *of_parent == Some(filters(&status));
        Ok(status.seccomp == 1 || status.filters == 0 || !is_inherited)
    }

    /// Returns whether any thread has set itself a filter, which holds for that thread and those that
    /// it starts afterwards.
    pub(crate) fn has_any(&self) -> io::Result<bool> {
        for tid in self.process.threads()?.read()? {
            match self.has(tid) {
                Ok(false) => {}
                Err(error) if is_gone(&error) => {}
                has => return has,
            }
        }
        Ok(false)
    }

    /// Checks that a system call can be injected into one of these threads.
    ///
    /// # Errors
    ///
    /// [`ObserveError::SeccompFiltered`] if each has set itself a filter.
    pub(crate) fn refuse_all(&self, tids: impl IntoIterator<Item = i32>) -> Result<()> {
        let mut is_any = false;
        for tid in tids {
            match self.has(tid) {
                Ok(true) => is_any = true,
                Ok(false) => return Ok(()),
                Err(error) if is_gone(&error) => {}
                Err(error) => return Err(self.process.exited_or(error)),
            }
        }
        let pid = self.process.pid();
        Err(if is_any {
            Error::of_process(pid, ObserveError::SeccompFiltered)
        } else {
            Error::of_process(pid, ProcessError::Exited)
        })
    }
}
