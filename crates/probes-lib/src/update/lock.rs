//! [`UpdateLock`]: one update of a process at a time. If two updates added one to a counter at the same
//! time, one of them could be lost. Two that stop the process exclude each other, as a process has at most
//! one tracer; updates without a stop would exclude nothing.
//!
//! It is a lock (flock(2)) on the process's `mem` in /proc: opening that needs the permission to change the
//! process, no lock file is left behind, and the lock is released when its holder exits. Once the thread group leader has
//! exited, its `mem` belongs to root, and that of other threads is locked: of several, as they may exit, too.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg, OFlag};
use nix::sys::stat::{major, minor};

use crate::error::{Denial, Error, ErrorKind, Operation, ProcessError, Result};
use crate::process::{ATTEMPTS, Process, name_of};

/// How many times the lock is tried after the deadline if /proc/locks names no holder: a holder may have
/// released it just before /proc/locks was read, and so may the next holder.
const TRIES_WITHOUT_HOLDER: usize = 20;

/// The `mem` of how many threads is locked if the leader has exited: the oldest ones, which the next tool finds as well,
/// unless all of them have exited meanwhile.
const LOCKED_THREADS: usize = 16;

/// The lock, held while a process is updated, or trampolines are installed or removed.
pub(crate) struct UpdateLock {
    _locks: Vec<Flock<File>>,
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
        let mut tries_without_holder = 0;
        loop {
            // Which files they are changes when the leader exits.
            let files = lock_files(process).map_err(|source| {
                crate::process::denial::denied_or_exited(process, operation, source)
            })?;
            let locked_by_other = match lock_all(files) {
                Ok(locks) => return Ok(UpdateLock { _locks: locks }),
                Err((file, Errno::EWOULDBLOCK | Errno::EINTR)) => file,
                Err((_, errno)) => {
                    let (pid, operation) = (process.pid(), Operation::Lock);
                    return Err(Error::of_call(pid, operation, errno.into()));
                }
            };
            if Instant::now() >= deadline {
                let holder = holder_of(&locked_by_other);
                // It has just been released, or its holder is in another pid namespace.
                tries_without_holder += usize::from(holder.is_none());
                if holder.is_some() || tries_without_holder >= TRIES_WITHOUT_HOLDER {
                    let denial = being_changed_by(holder.unwrap_or(0));
                    let pid = process.pid();
                    return Err(Error::of_process(
                        pid,
                        ProcessError::Denied { operation, denial },
                    ));
                }
            }
            pause();
        }
    }
}

/// Makes attempts until `deadline` while another tool has threads of the process that it has not let go. It may be a tool in a
/// container, whose lock we cannot see; or one that was killed, or an attempt of this one that has failed: the kernel detaches
/// it a little after its lock is free.
pub(crate) fn while_being_changed<T>(
    deadline: Instant,
    mut attempt: impl FnMut() -> Result<T>,
) -> Result<T> {
    loop {
        match attempt() {
            Err(error) if error.is_being_updated() && Instant::now() < deadline => pause(),
            done => return done,
        }
    }
}

/// Locks all these files; returns the first that cannot be locked.
fn lock_all(files: Vec<File>) -> std::result::Result<Vec<Flock<File>>, (File, Errno)> {
    let lock = |file| Flock::lock(file, FlockArg::LockExclusiveNonblock);
    files.into_iter().map(lock).collect()
}

/// Waits for about as long as an update takes. Tools that wait do not try again all at once.
pub(crate) fn pause() {
    let own = u64::from(std::process::id() % 8);
    std::thread::sleep(Duration::from_micros(300 + 150 * own));
}

/// Opens the files that are locked, the same for all tools: `mem` of the thread group leader or, if it has exited, of
/// the oldest other threads.
fn lock_files(process: &Process) -> io::Result<Vec<File>> {
    let has_exited = || process.is_exiting(process.pid());
    if has_exited() {
        return thread_files(process);
    }
    match process.open_file("mem", OFlag::O_RDONLY) {
        // The leader has exited since.
        Err(_) if has_exited() => thread_files(process),
        opened => opened.map(|file| vec![file]),
    }
}

/// Opens `mem` of the oldest threads that have not exited. If the threads start each other and exit, a list of them may be
/// outdated when it is read.
fn thread_files(process: &Process) -> io::Result<Vec<File>> {
    for _ in 0..ATTEMPTS {
        let files = listed_thread_files(process)?;
        if !files.is_empty() {
            return Ok(files);
        }
        if process.has_exited() {
            break;
        }
    }
    Err(Errno::ESRCH.into())
}

/// The same; empty if all threads in the list have exited.
fn listed_thread_files(process: &Process) -> io::Result<Vec<File>> {
    let mut tids = process.threads()?.read()?;
    tids.sort_unstable();
    let mut files = Vec::new();
    for tid in tids.into_iter().filter(|&tid| tid != process.pid()) {
        match process.open_file(&format!("task/{tid}/mem"), OFlag::O_RDONLY) {
            Ok(file) => files.push(file),
            Err(_) if process.is_exiting(tid) => {}
            Err(error) => return Err(error),
        }
        if files.len() == LOCKED_THREADS {
            break;
        }
    }
    Ok(files)
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
    use std::sync::mpsc;

    use test_support::{Talker, fixture};

    use super::*;
    use crate::sys::ptrace::TraceScope;
    use crate::trace::tracer::with_tracer;

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

    // promise: Other tracers and tools: A tool that has failed to stop a process, or was killed, and that the kernel has not detached
    //    yet is waited for
    #[test]
    fn tracer_about_to_detach_is_waited_for() {
        let talker = Talker::start(&fixture("idle_threads.pie"));
        let process = Process::open(talker.pid()).unwrap();
        let (seized, is_seized) = mpsc::channel();
        let (end, ends) = mpsc::channel();
        let process = &process;
        std::thread::scope(|scope| {
            scope.spawn(move || {
                with_tracer(&[process], move |tracer| {
                    tracer.seize(process.pid(), TraceScope::Threads).unwrap();
                    seized.send(()).unwrap();
                    // It never sees the thread stop, so the kernel detaches it when the tracer ends.
                    ends.recv().unwrap();
                    Ok(())
                })
            });
            is_seized.recv().unwrap();
            let mut tries = 0;
            let mut stop = |deadline| {
                while_being_changed(deadline, || {
                    tries += 1;
                    if tries == 3 {
                        end.send(()).unwrap();
                    }
                    let limit = Duration::from_secs(1);
                    with_tracer(&[process], |tracer| {
                        tracer.stop(process, limit).map(|it| it.tids().count())
                    })
                })
            };
            assert!(stop(Instant::now()).unwrap_err().is_being_updated());
            let stopped = stop(Instant::now() + test_support::DEADLINE);
            assert!(matches!(stopped, Ok(2..)), "{stopped:?}");
        });
    }

    /// Takes the lock, and asserts that only one can have it.
    fn assert_is_exclusive(process: &Process) {
        let lock = UpdateLock::wait(process, Instant::now()).unwrap();
        let Err(error) = UpdateLock::wait(process, Instant::now()) else {
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
        assert!(UpdateLock::wait(process, Instant::now()).is_ok());
    }

    #[test]
    fn waiting_for_the_lock_names_its_holder() {
        let talker = Talker::start(&fixture("gen_ocaml_2.pie"));
        assert_is_exclusive(&Process::open(talker.pid()).unwrap());
    }

    #[test]
    fn outsiders_cannot_lock_leaderless_process() {
        let talker = Talker::start(&fixture("zombie_leader.pie"));
        let process = Process::open(talker.pid()).unwrap();
        assert!(process.is_exiting(talker.pid()));
        // Everybody may open these.
        let directories = ["", "/task"].map(|name| {
            let directory = File::open(format!("/proc/{}{name}", talker.pid())).unwrap();
            Flock::lock(directory, FlockArg::LockExclusiveNonblock).unwrap()
        });
        assert_is_exclusive(&process);
        drop(directories);
    }
}
