//! [`ObserverLock`]: held by an observer as long as it observes. It tells a live observer from one that
//! was killed.
//!
//! It is a lock on one byte (fcntl(2), "Open file description locks") of the `status` of the observed
//! process in /proc: a random byte, which the header of each arena names. It is released when its
//! holder drops it or dies, however it dies. (A child that the holder has forked keeps it until the child exits or
//! calls execve.) A pid in the header would not be enough: another process may have it by now, it means nothing in
//! another pid namespace, and /proc may hide the process.
//!
//! ```text
//! same mount of /proc        fcntl(2) says whether the byte is locked
//! another mount of /proc     has files of its own; /proc/locks lists the locks of all of them
//! ```

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::time::Duration;

use nix::fcntl::OFlag;

use crate::error::{Error, Operation, Result, ToolProcess};
use crate::observe::layout::observer_record::ObserverRecord;
use crate::process::Process;
use crate::process::file_lock::{self, LockKind};
use crate::process::tool::{new_id, own_command, own_namespace, since_boot};

/// The file of a process that is locked: everybody may open it, also once its first thread has exited.
const LOCKED: &str = "status";

/// The mask of the offset of the random byte: offsets of files are signed.
const MAX_OFFSET: u64 = i64::MAX as u64 >> 1;

/// How many times /proc/locks is read before a lock that it does not list is assumed to be released. The kernel writes
/// the list a page at a time, and skips a lock if an earlier one is released meanwhile.
const MAX_LISTINGS: usize = 5;

/// Shows that an observation has a live observer, until this value is dropped.
#[derive(Debug)]
pub(crate) struct ObserverLock {
    file: File,
    device: u64,
    byte: u64,
}

impl Drop for ObserverLock {
    fn drop(&mut self) {
        file_lock::unlock(&self.file, self.byte..self.byte + 1);
    }
}

impl ObserverLock {
    /// Takes the lock of a new observation of a process.
    ///
    /// # Errors
    ///
    /// If the process has exited, or the kernel refuses.
    pub(crate) fn take(process: &Process) -> Result<ObserverLock> {
        let byte = new_id() & MAX_OFFSET;
        let opened = process.open_file(LOCKED, OFlag::O_RDONLY);
        let file = opened.map_err(|source| process.exited_or(source))?;
        let failed = |source| Error::of_call(process.pid(), Operation::Lock, source);
        let device = file.metadata().map_err(failed)?.dev();
        // A shared lock is enough to be seen, and the file need not be writable for it.
        file_lock::lock(&file, LockKind::Shared, byte..byte + 1)
            .map_err(|errno| failed(errno.into()))?;
        Ok(ObserverLock { file, device, byte })
    }

    /// Returns the record of this tool with this lock: as the observer in the header of an arena, or as its
    /// successor.
    pub(crate) fn record(&self) -> ObserverRecord {
        ObserverRecord {
            pid: std::process::id() as i32,
            namespace: own_namespace(),
            proc_device: self.device,
            begun: since_boot().as_nanos() as u64,
            lock: self.byte,
            command: own_command(),
        }
    }
}

/// Returns the observer of a process, as an arena has recorded it, and whether it is still there.
pub(crate) fn observer_of(process: &Process, record: &ObserverRecord) -> ToolProcess {
    let is_alive = is_held(process, record);
    ToolProcess {
        pid: record.pid,
        is_in_our_namespace: record.namespace == own_namespace(),
        command: record.command.clone(),
        age: since_boot().saturating_sub(Duration::from_nanos(record.begun)),
        is_alive,
        observes_another: !is_alive && is_held_anywhere(record),
    }
}

/// Returns whether the lock that a record names is held; true if that cannot be found out.
pub(crate) fn is_held(process: &Process, record: &ObserverRecord) -> bool {
    match is_locked_here(process, record) {
        Ok((true, _)) | Err(_) => true,
        Ok((false, device)) if device == record.proc_device => false,
        Ok((false, _)) => is_held_anywhere(record),
    }
}

/// Returns whether the lock that a record names is held for any process: each observer locks a different byte, and a
/// forked process has a copy of the record of its parent. True if that cannot be found out.
fn is_held_anywhere(record: &ObserverRecord) -> bool {
    (0..MAX_LISTINGS).any(|_| {
        let locks = fs::read_to_string("/proc/locks");
        locks.map_or(true, |locks| is_listed(&locks, locked_byte(record)))
    })
}

/// Returns the byte that a record names. The record is in the memory of the process, which may have changed it.
fn locked_byte(record: &ObserverRecord) -> u64 {
    record.lock & MAX_OFFSET
}

/// Returns whether the byte is locked in our mount of /proc, and the device of that mount.
fn is_locked_here(process: &Process, record: &ObserverRecord) -> io::Result<(bool, u64)> {
    let file = process.open_file(LOCKED, OFlag::O_RDONLY)?;
    let byte = locked_byte(record);
    let is_locked = file_lock::is_excluded(&file, LockKind::Exclusive, byte..byte + 1)?;
    Ok((is_locked, file.metadata()?.dev()))
}

/// Returns whether /proc/locks lists a lock of this byte.
fn is_listed(locks: &str, byte: u64) -> bool {
    // "3: OFDLCK ADVISORY  READ -1 00:15:394043 START END"; -1: an open file description has it, not a process.
    let byte = byte.to_string();
    locks.lines().any(|line| {
        let mut fields = line.split_ascii_whitespace();
        fields.nth(1) == Some("OFDLCK") && fields.nth(4) == Some(byte.as_str())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lock_is_found_by_its_byte() {
        let locks = "\
1: POSIX  ADVISORY  WRITE 11 00:15:2881552 14 14\n\
2: OFDLCK ADVISORY  READ -1 00:15:394043 12 12\n\
3: FLOCK  ADVISORY  WRITE 12 00:15:394043 0 EOF\n\
4: OFDLCK";
        assert!(is_listed(locks, 12));
        assert!(!is_listed(locks, 14) && !is_listed(locks, 0) && !is_listed("", 12));
    }

    #[test]
    fn lock_is_held_until_it_is_dropped() {
        let own = Process::open(std::process::id() as i32).unwrap();
        let lock = ObserverLock::take(&own).unwrap();
        let other = ObserverLock::take(&own).unwrap();
        let (record, of_other) = (lock.record(), other.record());
        assert_ne!(record.lock, of_other.lock);
        // The same lock, taken through another mount of /proc.
        let elsewhere = ObserverRecord {
            proc_device: u64::MAX,
            ..record.clone()
        };
        assert!(is_held(&own, &record) && is_held(&own, &elsewhere));
        drop(lock);
        // Another test may have forked: its child has the descriptor until it executes a program.
        test_support::eventually("the lock is released", || {
            (!is_held(&own, &record) && !is_held(&own, &elsewhere)).then_some(())
        });
        assert!(is_held(&own, &of_other));
    }

    #[test]
    fn observer_is_known_by_pid_command_and_age() {
        let own = Process::open(std::process::id() as i32).unwrap();
        let lock = ObserverLock::take(&own).unwrap();
        let observer = observer_of(&own, &lock.record());
        assert_eq!((observer.pid, observer.is_alive), (own.pid(), true));
        assert!(observer.is_in_our_namespace && observer.age < Duration::from_secs(3600));
        let program = std::env::current_exe().unwrap();
        let name = program.file_name().unwrap().to_str().unwrap();
        assert!(observer.command.starts_with(name), "{}", observer.command);
    }
}
