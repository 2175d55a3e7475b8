//! Memory of a stopped process: `process_vm_writev` writes many counters at once, to writable pages
//! only; ptrace writes code where `/proc/PID/mem` may not.

use std::io::{self, IoSlice};

use nix::errno::Errno;
use nix::sys::uio::{RemoteIoVec, process_vm_writev};
use nix::unistd::Pid;

use crate::address::LiveAddr;
use crate::elf::table::COUNTER_LEN;
use crate::memory::{CounterFault, ReadMemory, WriteMemory};
use crate::process::memory::{MAX_IOVECS, ProcessMemory};
use crate::sys::short_write_point;
use crate::trace::thread_calls::ThreadCalls;

/// The memory of a process whose threads are stopped.
#[derive(Debug)]
pub(crate) struct StoppedMemory<'m> {
    memory: &'m ProcessMemory,
    /// A stopped thread of the process; its address space is the process's.
    tid: i32,
    calls: ThreadCalls,
}

impl<'m> StoppedMemory<'m> {
    /// The thread `tid` has to be in a ptrace-stop.
    pub(crate) fn new(
        memory: &'m ProcessMemory,
        tid: i32,
        calls: ThreadCalls,
    ) -> StoppedMemory<'m> {
        StoppedMemory { memory, tid, calls }
    }

    fn write_one_by_one(&self, writes: &[(LiveAddr, u16)]) -> Result<(), CounterFault> {
        for (done, &(at, value)) in writes.iter().enumerate() {
            let written = self.calls.write(self.memory, at, &value.to_le_bytes());
            written.map_err(|source| CounterFault { done, source })?;
        }
        Ok(())
    }

    /// Writes counters, up to `MAX_IOVECS` of them by one call.
    fn write_many(&self, writes: &[(LiveAddr, u16)]) -> Result<(), CounterFault> {
        let mut done = 0;
        while done < writes.len() {
            let batch = &writes[done..writes.len().min(done + MAX_IOVECS)];
            let bytes: Vec<u8> = batch
                .iter()
                .flat_map(|(_, value)| value.to_le_bytes())
                .collect();
            let remote: Vec<RemoteIoVec> = batch
                .iter()
                .map(|(at, _)| RemoteIoVec {
                    base: at.0 as usize,
                    len: COUNTER_LEN as usize,
                })
                .collect();
            match write_vm(self.tid, &bytes, &remote) {
                // "Partial transfers apply at the granularity of iovec elements."
                Ok(written) if written >= COUNTER_LEN as usize => {
                    done += written / COUNTER_LEN as usize;
                }
                Ok(_) => {
                    let source = io::ErrorKind::UnexpectedEof.into();
                    return Err(CounterFault { done, source });
                }
                Err(errno) => {
                    let source = errno.into();
                    return Err(CounterFault { done, source });
                }
            }
        }
        Ok(())
    }
}

/// Returns whether ptrace may succeed where a write to /proc/PID/mem has failed. From Linux 6.12 on, with
/// proc_mem.force_override=never, /proc/PID/mem does not write read-only pages. On an unmapped page, both fail alike.
fn needs_ptrace(error: &io::Error) -> bool {
    error.raw_os_error() == Some(libc::EIO)
}

/// Makes one call; returns how many bytes were written.
fn write_vm(tid: i32, bytes: &[u8], remote: &[RemoteIoVec]) -> nix::Result<usize> {
    let write = |bytes: &[u8], remote| {
        process_vm_writev(Pid::from_raw(tid), &[IoSlice::new(bytes)], remote)
    };
    short_write_point!(WriteVm, remote.len(), |part: usize| {
        write(&bytes[..part * COUNTER_LEN as usize], &remote[..part])
    });
    write(bytes, remote)
}

impl ReadMemory for StoppedMemory<'_> {
    fn read(&self, at: LiveAddr, bytes: &mut [u8]) -> io::Result<()> {
        self.memory.read(at, bytes)
    }
}

impl WriteMemory for StoppedMemory<'_> {
    fn write_code(&mut self, at: LiveAddr, bytes: &[u8]) -> io::Result<()> {
        match self.calls.write(self.memory, at, bytes) {
            Err(error) if needs_ptrace(&error) => self.calls.poke_text(self.tid, at, bytes),
            result => result,
        }
    }

    fn write_pages(&mut self, at: LiveAddr, bytes: &[u8]) -> io::Result<bool> {
        match self.calls.write(self.memory, at, bytes) {
            Err(error) if needs_ptrace(&error) => Ok(false),
            result => result.map(|()| true),
        }
    }

    fn write_counters(&mut self, writes: &[(LiveAddr, u16)]) -> Result<(), CounterFault> {
        if let ThreadCalls::Leased(_) = self.calls {
            return self.write_one_by_one(writes);
        }
        let CounterFault { done, source } = match self.write_many(writes) {
            Ok(()) => return Ok(()),
            Err(fault) => fault,
        };
        // The seccomp profiles of some containers allow ptrace, but not process_vm_writev, which also does not write
        // where the process itself may not.
        if !matches!(
            source.raw_os_error().map(Errno::from_raw),
            Some(Errno::EPERM | Errno::ENOSYS | Errno::EFAULT)
        ) {
            return Err(CounterFault { done, source });
        }
        self.memory.write_each(writes, done)
    }
}
