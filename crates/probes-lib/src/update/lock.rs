//! [`UpdateLock`]: one update of a process at a time. If two updates added one to a counter at the same
//! time, one of them could be lost. Two that stop the process exclude each other, as a process has at most
//! one tracer; updates without a stop would exclude nothing.
//!
//! It is a lock (flock(2)) on the process's `mem` in /proc: opening that needs the permission to change the
//! process, no lock file is left behind, and the lock is released when its holder exits.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg, OFlag};
use nix::sys::stat::{major, minor};

use crate::error::{Denial, Error, ErrorKind, Operation, ProcessError, Result};
use crate::process::{Process, name_of};

/// How many times the lock is tried after the deadline if /proc/locks names no holder: a holder may have
/// released it just before /proc/locks was read, and so may the next holder.
const TRIES_WITHOUT_HOLDER: usize = 20;

/// The lock, held while a process is updated, or trampolines are installed or removed.
pub(crate) struct UpdateLock {
    _lock: Flock<File>,
}

impl UpdateLock {
    /// Waits for the lock until `deadline`.
    ///
    /// # Errors
    ///
    /// If another tool still holds the lock then ([`Denial::BeingChanged`]), or if the kernel denies access
    /// to the process.
    pub(crate) fn wait(process: &Process, deadline: Instant) -> Result<UpdateLock> {
        let operation = Operation::Attach;
        let mut file = lock_file(process).map_err(|source| {
            crate::process::denial::denied_or_exited(process, operation, source)
        })?;
        let mut tries_without_holder = 0;
        loop {
            match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
                Ok(lock) => return Ok(UpdateLock { _lock: lock }),
                Err((same, Errno::EWOULDBLOCK | Errno::EINTR)) => {
                    if Instant::now() >= deadline {
                        let holder = holder_of(&same);
                        // It has just been released, or its holder is in another pid namespace.
                        tries_without_holder += usize::from(holder.is_none());
                        if holder.is_none() && tries_without_holder < TRIES_WITHOUT_HOLDER {
                            file = same;
                            pause();
                            continue;
                        }
                        let denial = being_changed_by(holder.unwrap_or(0));
                        let pid = process.pid();
                        return Err(Error::of_process(
                            pid,
                            ProcessError::Denied { operation, denial },
                        ));
                    }
                    file = same;
                }
                Err((_, errno)) => {
                    let (pid, operation) = (process.pid(), Operation::Lock);
                    return Err(Error::of_call(pid, operation, errno.into()));
                }
            }
            pause();
        }
    }
}

/// Waits for about as long as an update takes. Tools that wait do not try again all at once.
pub(crate) fn pause() {
    let own = u64::from(std::process::id() % 8);
    std::thread::sleep(Duration::from_micros(300 + 150 * own));
}

/// Opens the file that is locked, the same for all tools: `mem` of the thread group leader or, if the
/// leader has exited, the directory of the threads (`task`), because `mem` may then belong to root.
fn lock_file(process: &Process) -> io::Result<File> {
    let flags = OFlag::O_RDONLY;
    let has_exited = || process.is_exiting(process.pid());
    let directory = || process.open_file("task", flags | OFlag::O_DIRECTORY);
    if has_exited() {
        return directory();
    }
    match process.open_file("mem", flags) {
        // The leader has exited since.
        Err(_) if has_exited() => directory(),
        opened => opened,
    }
}

/// Returns the pid of the process that holds the lock, as an error says; 0 if it is not known.
pub(crate) fn holder_in(error: &Error) -> i32 {
    match error.kind() {
        ErrorKind::Process(ProcessError::Denied {
            denial: Denial::BeingChanged { updater, .. },
            ..
        }) => *updater,
        _ => 0,
    }
}

/// Returns the pid that /proc/locks names as the holder of a lock on this file.
fn holder_of(file: &File) -> Option<i32> {
    let metadata = file.metadata().ok()?;
    let locks = fs::read_to_string("/proc/locks").unwrap_or_default();
    holder(&locks, metadata.dev(), metadata.ino())
}

fn being_changed_by(updater: i32) -> Denial {
    let name = name_of(updater);
    Denial::BeingChanged { updater, name }
}

/// Returns the pid that holds a lock on a file, if it is in our pid namespace.
fn holder(locks: &str, device: u64, inode: u64) -> Option<i32> {
    // "1: FLOCK  ADVISORY  WRITE 25800 00:15:2881552 0 EOF", with the device in hex.
    let file = format!("{:02x}:{:02x}:{inode}", major(device), minor(device));
    let mut lines = locks.lines().map(str::split_ascii_whitespace);
    let pid = lines.find_map(|mut fields| {
        let (kind, pid) = (fields.nth(1)?, fields.nth(2)?);
        (kind == "FLOCK" && fields.next()? == file).then_some(pid)
    })?;
    pid.parse().ok().filter(|&pid| pid > 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use test_support::{Talker, fixture};

    #[test]
    fn lock_holder_is_found_by_device_and_inode() {
        let locks = "\
1: POSIX  ADVISORY  WRITE 11 00:15:2881552 0 EOF\n\
2: FLOCK  ADVISORY  WRITE 12 00:16:2881552 0 EOF\n\
2: -> FLOCK  ADVISORY  WRITE 13 00:15:2881552 0 EOF\n\
3: FLOCK  ADVISORY  WRITE 14 00:15:2881552 0 EOF\n\
4: FLOCK  ADVISORY  WRITE 0 00:15:77 0 EOF\n\
5: FLOCK";
        let device = nix::sys::stat::makedev(0, 0x15);
        assert_eq!(holder(locks, device, 2_881_552), Some(14));
        // The pid of a holder in another pid namespace is 0; on 78 there is no lock.
        assert_eq!(holder(locks, device, 77), None);
        assert_eq!(holder(locks, device, 78), None);
    }

    #[test]
    fn waiting_for_the_lock_names_its_holder() {
        let talker = Talker::start(&fixture("gen_ocaml_2.pie"));
        let process = Process::open(talker.pid()).unwrap();
        let lock = UpdateLock::wait(&process, Instant::now()).unwrap();
        let Err(error) = UpdateLock::wait(&process, Instant::now()) else {
            panic!("two hold the lock");
        };
        let own = std::process::id() as i32;
        let ErrorKind::Process(ProcessError::Denied {
            denial: Denial::BeingChanged { updater, name },
            ..
        }) = error.kind()
        else {
            panic!("{error}");
        };
        assert_eq!((*updater, name), (own, &name_of(own)));
        drop(lock);
        assert!(UpdateLock::wait(&process, Instant::now()).is_ok());
    }
}
