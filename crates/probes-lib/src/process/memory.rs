//! Memory of another process: `/proc/PID/mem`, which reads and writes whatever the protection of the
//! page, as long as the kernel lets a debugger do so.

use std::fs::File;
use std::io::{self, IoSliceMut};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::FileExt;

use nix::fcntl::OFlag;
use nix::sys::uio::{RemoteIoVec, process_vm_readv};
use nix::unistd::Pid;

use crate::address::{LiveAddr, PAGE};
use crate::memory::{CounterFault, ReadMemory, WriteMemory};
use crate::process::Process;
use crate::process::load_bias::auxv_value;
use crate::sys::{fault_point, fault_point_within};

/// `AT_RANDOM` of getauxval(3): "The address of sixteen bytes containing a random value."
const AT_RANDOM: u64 = 25;

/// `IOV_MAX`: process_vm_readv(2) and process_vm_writev(2) fail with EINVAL above it.
pub(crate) const MAX_IOVECS: usize = 1024;

/// Returns the address of the random bytes that the kernel has given to the program that a process runs; `None` if the
/// process is exiting.
pub(crate) fn random_bytes_at(process: &Process) -> io::Result<Option<LiveAddr>> {
    let auxv = process.read_of_living_thread("auxv")?;
    Ok(auxv_value(&auxv, AT_RANDOM).map(LiveAddr))
}

/// A page of memory.
pub(crate) type Page = Box<[u8; PAGE as usize]>;

/// Reads the pages that begin at these addresses by one system call, at most [`MAX_IOVECS`], up to the first one that
/// cannot be read. The process has to be stopped: otherwise it may execute a new program meanwhile, whose memory is read
/// then.
pub(crate) fn read_pages(process: &Process, starts: &[u64]) -> Vec<Page> {
    let starts = &starts[..starts.len().min(MAX_IOVECS)];
    let mut pages: Vec<Page> = starts
        .iter()
        .map(|_| Box::new([0; PAGE as usize]))
        .collect();
    let place = |&start: &u64| RemoteIoVec {
        base: start as usize,
        len: PAGE as usize,
    };
    let remote: Vec<RemoteIoVec> = starts.iter().map(place).collect();
    let mut local: Vec<IoSliceMut<'_>> = pages
        .iter_mut()
        .map(|page| IoSliceMut::new(&mut page[..]))
        .collect();
    let read = process_vm_readv(Pid::from_raw(process.pid()), &mut local, &remote);
    pages.truncate(read.unwrap_or(0) / PAGE as usize);
    pages
}

/// The address space that a process had when this was opened. After the process has exec'd a new
/// program, reads and writes never reach that program: they fail, unless another process still has
/// the old address space (vfork(2)).
#[derive(Debug)]
pub(crate) struct ProcessMemory {
    file: File,
}

impl ProcessMemory {
    /// Returns memory that was opened already, perhaps by another process.
    pub(crate) fn of_file(file: File) -> ProcessMemory {
        ProcessMemory { file }
    }

    pub(crate) fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Opens the memory of the program that the process runs.
    pub(crate) fn open(process: &Process, flags: OFlag) -> io::Result<ProcessMemory> {
        let file = process.with_thread_directory(|directory| {
            let file = process.open_file(&format!("{directory}/mem"), flags)?;
            // If the thread had exited before the open, reading `mem` returns 0 bytes at every
            // address; if not, it returns bytes or an error at address 0.
            match file.read_at(&mut [0], 0) {
                Ok(0) => Ok(None),
                Ok(_) | Err(_) => Ok(Some(file)),
            }
        })?;
        Ok(ProcessMemory { file })
    }

    /// Returns the random bytes that the kernel has given to the program that `process` runs now, which tell
    /// one program from another; `None` if the process is exiting, or this is the memory of a program that it ran before.
    pub(crate) fn random_bytes(&self, process: &Process) -> io::Result<Option<[u8; 16]>> {
        let mut bytes = [0; 16];
        let Some(at) = random_bytes_at(process)? else {
            return Ok(None);
        };
        match self.read(at, &mut bytes) {
            Ok(()) => Ok(Some(bytes)),
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(None),
            // Another process still has that memory, without these bytes.
            Err(error) if error.raw_os_error() == Some(libc::EIO) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Writes `bytes` at `at`, whatever the protection of the page.
    pub(crate) fn write(&self, at: LiveAddr, bytes: &[u8]) -> io::Result<()> {
        fault_point_within!(WriteMemory, bytes.len(), |part: usize| {
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

    /// Writes counters one by one, all but the first `done`.
    pub(crate) fn write_each(
        &self,
        writes: &[(LiveAddr, u16)],
        done: usize,
    ) -> Result<(), CounterFault> {
        for (done, &(at, value)) in writes.iter().enumerate().skip(done) {
            self.write(at, &value.to_le_bytes())
                .map_err(|source| CounterFault { done, source })?;
        }
        Ok(())
    }

    /// Returns the same memory as a [`WriteMemory`], for changes while the process runs.
    pub(crate) fn while_it_runs(&self) -> RunningMemory<'_> {
        RunningMemory(self)
    }
}

impl ReadMemory for ProcessMemory {
    fn read(&self, at: LiveAddr, bytes: &mut [u8]) -> io::Result<()> {
        fault_point!(ReadMemory);
        self.file.read_exact_at(bytes, at.0)
    }
}

/// The memory of a process that runs. All writes go through /proc/PID/mem, which stays with the
/// program that it was opened for: only this keeps them from reaching a program that is executed later.
#[derive(Debug)]
pub(crate) struct RunningMemory<'m>(&'m ProcessMemory);

impl ReadMemory for RunningMemory<'_> {
    fn read(&self, at: LiveAddr, bytes: &mut [u8]) -> io::Result<()> {
        self.0.read(at, bytes)
    }
}

impl WriteMemory for RunningMemory<'_> {
    fn write_code(&mut self, at: LiveAddr, bytes: &[u8]) -> io::Result<()> {
        self.0.write(at, bytes)
    }

    fn write_counters(&mut self, writes: &[(LiveAddr, u16)]) -> Result<(), CounterFault> {
        self.0.write_each(writes, 0)
    }
}
