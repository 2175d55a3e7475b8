//! Memory of another process: `/proc/PID/mem` and `process_vm_writev`.
//!
//! `/proc/PID/mem` reads and writes whatever the protection of the page, as long as the kernel lets
//! a debugger do so; `process_vm_writev` takes many small writes at once, to writable pages only.

use std::fs::File;
use std::io::{self, IoSlice};
use std::os::unix::fs::FileExt;

use nix::errno::Errno;
use nix::fcntl::OFlag;
use nix::sys::uio::{RemoteIoVec, process_vm_writev};
use nix::unistd::Pid;

use crate::address::LiveAddr;
use crate::elf::table::COUNTER_LEN;
use crate::memory::{CounterFault, ReadMemory, WriteMemory};
use crate::observe::shadow::Shadow;
use crate::process::Process;
use crate::sys::{can_end_early, can_fail, can_fail_within, ptrace};

/// `IOV_MAX`: process_vm_writev(2) fails with EINVAL above it.
const MAX_IOVECS: usize = 1024;

/// The address space that a process had when this was opened. If the process executes another
/// program, reads and writes find nothing, instead of reaching the new one.
///
/// Code that is observed looks as if it were not ([`Shadow`]), once it is known.
#[derive(Debug)]
pub(crate) struct ProcessMemory {
    file: File,
    shadow: Shadow,
}

impl ProcessMemory {
    /// Opens the memory of the program that the process runs.
    pub(crate) fn open(process: &Process, flags: OFlag) -> io::Result<ProcessMemory> {
        let file = process.look(|folder| {
            let file = process.open_file(&format!("{folder}/mem"), flags)?;
            // That of a thread which had exited cannot be read at any address, this one neither.
            match file.read_at(&mut [0], 0) {
                Ok(0) => Ok(None),
                Ok(_) | Err(_) => Ok(Some(file)),
            }
        })?;
        let shadow = Shadow::default();
        Ok(ProcessMemory { file, shadow })
    }

    /// The same, with what is observed behind a shadow.
    pub(crate) fn behind(mut self, shadow: Shadow) -> ProcessMemory {
        self.shadow = shadow;
        self
    }

    /// How many sites are behind the shadow.
    pub(crate) fn observed_sites(&self) -> usize {
        self.shadow.len()
    }

    /// Writes code, `write` being how, as it is to be seen.
    fn write_seen(
        &self,
        at: LiveAddr,
        bytes: &[u8],
        write: impl Fn(LiveAddr, &[u8]) -> io::Result<()>,
    ) -> io::Result<()> {
        if self.shadow.is_empty() {
            return write(at, bytes);
        }
        let behind = self
            .shadow
            .behind(at, bytes, |at, bytes| self.read_bare(at, bytes))?;
        if let Some(bytes) = behind.bytes {
            write(at, &bytes)?;
        }
        let mut tails = behind.tails.into_iter();
        tails.try_for_each(|(at, byte)| write(at, &[byte]))
    }

    fn read_bare(&self, at: LiveAddr, bytes: &mut [u8]) -> io::Result<()> {
        can_fail!(ReadMemory);
        self.file.read_exact_at(bytes, at.0)
    }

    fn write(&self, at: LiveAddr, bytes: &[u8]) -> io::Result<()> {
        can_fail_within!(WriteMemory, bytes.len(), |part: usize| {
            self.file.write_all_at(&bytes[..part], at.0)
        });
        self.file
            .write_all_at(bytes, at.0)
            .map_err(|error| match error.kind() {
                // A write of no bytes: the address space is gone.
                io::ErrorKind::WriteZero => io::ErrorKind::UnexpectedEof.into(),
                _ => error,
            })
    }

    /// Writes counters, all but the first `done`.
    fn write_each(&self, writes: &[(LiveAddr, u16)], done: usize) -> Result<(), CounterFault> {
        for (done, &(at, value)) in writes.iter().enumerate().skip(done) {
            self.write(at, &value.to_le_bytes())
                .map_err(|source| CounterFault { done, source })?;
        }
        Ok(())
    }

    /// Writes one byte of code that is already there: the kernel gives the process its own copy of
    /// the page now, and not while it has to stand still, or says that it does not.
    pub(crate) fn touch(&self, at: LiveAddr, byte: u8) -> io::Result<()> {
        if self.shadow.covers(at) {
            // The page is the process's own already.
            return Ok(());
        }
        self.write(at, &[byte])
    }

    /// The memory, to be changed while the process runs.
    pub(crate) fn while_it_runs(&self) -> RunningMemory<'_> {
        RunningMemory(self)
    }
}

impl ReadMemory for ProcessMemory {
    fn read(&self, at: LiveAddr, bytes: &mut [u8]) -> io::Result<()> {
        self.read_bare(at, bytes)?;
        match self.shadow.is_empty() {
            true => Ok(()),
            false => self
                .shadow
                .show(at, bytes, |at, bytes| self.read_bare(at, bytes)),
        }
    }
}

/// The memory of a process that runs. All is written through /proc/PID/mem, which stays with the
/// program that it was opened for: there is nothing else to keep us from writing to the next one.
#[derive(Debug)]
pub(crate) struct RunningMemory<'m>(&'m ProcessMemory);

impl ReadMemory for RunningMemory<'_> {
    fn read(&self, at: LiveAddr, bytes: &mut [u8]) -> io::Result<()> {
        self.0.read(at, bytes)
    }
}

impl WriteMemory for RunningMemory<'_> {
    fn write_code(&mut self, at: LiveAddr, bytes: &[u8]) -> io::Result<()> {
        self.0
            .write_seen(at, bytes, |at, bytes| self.0.write(at, bytes))
    }

    fn write_counters(&mut self, writes: &[(LiveAddr, u16)]) -> Result<(), CounterFault> {
        self.0.write_each(writes, 0)
    }
}

/// The memory of a process whose threads we have stopped.
#[derive(Debug)]
pub(crate) struct StoppedMemory<'m> {
    memory: &'m ProcessMemory,
    /// A stopped thread of the process; its address space is the process's.
    tid: i32,
}

impl<'m> StoppedMemory<'m> {
    /// `tid` has to be in a ptrace-stop of the calling thread's.
    pub(crate) fn new(memory: &'m ProcessMemory, tid: i32) -> StoppedMemory<'m> {
        StoppedMemory { memory, tid }
    }

    /// Writes through as few calls as there are thousands of counters.
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
                Ok(written) if written > 0 => done += written / COUNTER_LEN as usize,
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

/// Whether /proc/PID/mem may not be written there, though it may by ptrace itself: from Linux 6.12 on,
/// proc_mem.force_override=never keeps it from read-only pages.
fn is_for_ptrace_alone(error: &io::Error) -> bool {
    error.raw_os_error() == Some(libc::EIO)
}

/// One call: says how many bytes were written.
fn write_vm(tid: i32, bytes: &[u8], remote: &[RemoteIoVec]) -> nix::Result<usize> {
    let write = |bytes: &[u8], remote| {
        process_vm_writev(Pid::from_raw(tid), &[IoSlice::new(bytes)], remote)
    };
    can_end_early!(WriteVm, remote.len(), |part: usize| {
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
        let write = |at, bytes: &[u8]| match self.memory.write(at, bytes) {
            Err(error) if is_for_ptrace_alone(&error) => {
                ptrace::poke_text(self.tid, at, bytes).map_err(|_| error)
            }
            result => result,
        };
        self.memory.write_seen(at, bytes, write)
    }

    fn write_code_at_once(&mut self, at: LiveAddr, bytes: &[u8]) -> io::Result<bool> {
        let write = |at, bytes: &[u8]| self.memory.write(at, bytes);
        match self.memory.write_seen(at, bytes, write) {
            Err(error) if is_for_ptrace_alone(&error) => Ok(false),
            result => result.map(|()| true),
        }
    }

    fn write_counters(&mut self, writes: &[(LiveAddr, u16)]) -> Result<(), CounterFault> {
        let CounterFault { done, source } = match self.write_many(writes) {
            Ok(()) => return Ok(()),
            Err(fault) => fault,
        };
        // Some containers' seccomp profiles allow ptrace and not this call; and it does not write
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
