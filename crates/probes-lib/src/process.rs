//! [`Process`]: one process as /proc shows it: identity, state, threads, and why it cannot be opened.
//!
//! Everything is opened relative to one descriptor of `/proc/PID`, which stays with the process it
//! was opened for: after that process has exited, opening fails, even if its pid is used again.
//! (The procfs crate is not used: it fails on names that are not UTF-8, cannot open for writing,
//! and its version 0.18 panics on a mapped file called `/SYSV`.)

mod cgroup;
pub(crate) mod children;
pub(crate) mod code_files;
pub(crate) mod code_fragments;
pub(crate) mod denial;
pub(crate) mod dynamic_loader;
pub(crate) mod file_lock;
pub(crate) mod image;
pub(crate) mod limits;
pub(crate) mod load_bias;
pub(crate) mod maps;
pub(crate) mod memory;
pub(crate) mod mounts;
pub(crate) mod object;
pub(crate) mod objects;
pub(crate) mod opened;
pub(crate) mod pagemap;
pub(crate) mod program;
pub(crate) mod seccomp;
pub(crate) mod sockets;
pub(crate) mod status;
pub(crate) mod stop_time;
pub(crate) mod tool;
pub(crate) mod translator;

use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Read};
use std::iter;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use nix::dir::Dir;
use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag, open, openat, readlinkat};
use nix::sys::signal::kill;
use nix::sys::stat::{Mode, fstat, fstatat};
use nix::unistd::Pid;

use crate::error::{
    Denial, Error, FileError, Operation, ProcessError, Result, Subject, SystemError,
};
use crate::process::status::Status;
use crate::process::stop_time::StopTime;
use crate::regular_file;
use crate::sys::fault_point;

/// Files of /proc report no length; none that is read whole here is larger than this.
const MAX_PROC_FILE: u64 = 256 << 20;

/// Most files of /proc are smaller than this.
const USUAL_PROC_FILE: usize = 8 << 10;

/// How many bytes to read at a time where the first lines may be enough.
const FEW_LINES: usize = 1 << 10;

/// How often it is checked whether a process that was just forked has called execve(2).
pub(crate) const EXECUTE_CHECK_INTERVAL: Duration = Duration::from_millis(1);

/// How often, at most, a thread that has not exited is looked for in a process whose leader has.
pub(crate) const ATTEMPTS: usize = 100;

/// The open directory of a process in /proc.
#[derive(Debug)]
pub(crate) struct Process {
    pid: i32,
    /// `None` once it was closed because the process was reaped.
    dir: Mutex<Option<Arc<OwnedFd>>>,
    stop_time: StopTime,
}

impl Process {
    /// Opens `/proc/pid`, whether the process can be observed and changed or not.
    pub(crate) fn open(pid: i32) -> Result<Process> {
        check_proc()?;
        Process::open_unchecked(pid)
    }

    /// Opens `/proc/pid` without checking that ptrace(2) knows the process by the same pid.
    fn open_unchecked(pid: i32) -> Result<Process> {
        let gone = || Error::of_process(pid, ProcessError::NotFound);
        if pid <= 0 {
            return Err(gone());
        }
        let path = PathBuf::from(format!("/proc/{pid}"));
        let flags = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
        match open_directory(&path, flags) {
            Ok(dir) => Ok(Process {
                pid,
                dir: Mutex::new(Some(Arc::new(dir))),
                stop_time: StopTime::default(),
            }),
            Err(errno) if is_gone(errno) && is_hidden(pid) => Err(hidden(pid, Operation::Read)),
            Err(errno) if is_gone(errno) => Err(gone()),
            Err(errno) => Err(Error::of_file(
                &path,
                FileError::Open {
                    source: errno.into(),
                },
            )),
        }
    }

    /// Opens our own process. Its pid is the one in this /proc, which may belong to another pid namespace
    /// than ours.
    pub(crate) fn own() -> Result<Process> {
        let path = PathBuf::from("/proc/self");
        let number = fs::read_link(&path).and_then(|link| {
            let number = link.to_str().and_then(|link| link.parse().ok());
            number.ok_or_else(|| io::Error::other("it names no process"))
        });
        let pid = number.map_err(|source| Error::of_file(&path, FileError::Open { source }))?;
        Process::open_unchecked(pid)
    }

    /// Returns how long this tool has stopped the process since it was opened, at most. The holder of the update lock
    /// is the only one that adds to it.
    pub(crate) fn stop_time(&self) -> &StopTime {
        &self.stop_time
    }

    pub(crate) fn pid(&self) -> i32 {
        self.pid
    }

    fn lock_dir(&self) -> MutexGuard<'_, Option<Arc<OwnedFd>>> {
        self.dir.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the directory. Once it was closed, fails as the kernel does for a process that was reaped.
    fn dir(&self) -> io::Result<Arc<OwnedFd>> {
        self.lock_dir().clone().ok_or(Errno::ENOENT.into())
    }

    /// Closes the directory if the process was reaped, and returns whether it was: nothing can be read of it any more.
    pub(crate) fn close_if_reaped(&self) -> bool {
        let found = self.identity_of("stat");
        let is_reaped = found.is_err_and(|error| is_task_gone(&error)) && !self.is_hidden();
        if is_reaped {
            *self.lock_dir() = None;
        }
        is_reaped
    }

    /// Opens a file of the process by its path relative to `/proc/PID`.
    pub(crate) fn open_file(&self, path: &str, flags: OFlag) -> io::Result<File> {
        fault_point!(Open);
        let fd = openat(self.dir()?, path, flags | OFlag::O_CLOEXEC, Mode::empty())?;
        Ok(File::from(fd))
    }

    /// Returns the device and inode of a file of the process, without opening it: opening `mem` may wait for an
    /// execve.
    pub(crate) fn identity_of(&self, path: &str) -> io::Result<(u64, u64)> {
        fault_point!(Stat);
        let status = fstatat(self.dir()?, path, AtFlags::empty())?;
        Ok((status.st_dev, status.st_ino))
    }

    /// Reads a file of the process whole.
    pub(crate) fn read(&self, path: &str) -> io::Result<Vec<u8>> {
        // The kernel does not report the length, and each read takes time.
        let mut bytes = Vec::with_capacity(USUAL_PROC_FILE);
        let file = self.open_file(path, OFlag::O_RDONLY)?;
        fault_point!(ReadFile);
        file.take(MAX_PROC_FILE).read_to_end(&mut bytes)?;
        Ok(bytes)
    }

    /// Opens a regular file by its path in the maps, if it is the one that is `wanted`: in our mount
    /// namespace, or in that of the process.
    ///
    /// Only regular files are opened: the path may lead to a device by now.
    pub(crate) fn open_mapped(
        &self,
        path: &Path,
        wanted: impl Fn(&File) -> io::Result<bool>,
    ) -> io::Result<File> {
        // openat(2) looks an absolute path up in our own mount namespace; `root` below `/proc/PID`
        // leads into that of the process.
        let below_root = || {
            // In the maps, the path of a file below another root (chroot(2)) begins with the path of that root.
            let root = self.read_link("root").unwrap_or_else(|_| "/".into());
            let relative = path.strip_prefix(root).or_else(|_| path.strip_prefix("/"));
            Path::new("root").join(relative.unwrap_or(path))
        };
        let names = iter::once(path.to_owned()).chain(iter::once_with(below_root));
        let mut refusal = io::Error::from(Errno::ENOENT);
        for name in names {
            match self.open_wanted(&name, &wanted) {
                Ok(Some(file)) => return Ok(file),
                Ok(None) => {
                    refusal = io::Error::other("another file has that name now");
                }
                Err(error) if error.kind() != io::ErrorKind::NotFound => refusal = error,
                Err(_) => {}
            }
        }
        Err(refusal)
    }

    /// Returns how many files the process has open.
    pub(crate) fn count_files(&self) -> io::Result<u64> {
        let directory = self.open_file("fd", OFlag::O_RDONLY | OFlag::O_DIRECTORY)?;
        let names = Dir::from_fd(OwnedFd::from(directory))?
            .into_iter()
            .flatten();
        // Without `.` and `..`.
        Ok(names.count().saturating_sub(2) as u64)
    }

    /// Opens the regular file that is `wanted` among those that the process has open.
    pub(crate) fn open_held(&self, wanted: impl Fn(&File) -> io::Result<bool>) -> Option<File> {
        let directory = self.open_file("fd", OFlag::O_RDONLY | OFlag::O_DIRECTORY);
        let descriptors = Dir::from_fd(OwnedFd::from(directory.ok()?)).ok()?;
        descriptors.into_iter().flatten().find_map(|descriptor| {
            let name = Path::new("fd").join(descriptor.file_name().to_str().ok()?);
            self.open_wanted(&name, &wanted).ok()?
        })
    }

    /// Opens a regular file; returns `None` if it is not `wanted`.
    fn open_wanted(
        &self,
        name: &Path,
        wanted: &impl Fn(&File) -> io::Result<bool>,
    ) -> io::Result<Option<File>> {
        let flags = OFlag::O_PATH | OFlag::O_CLOEXEC;
        let found = File::from(openat(self.dir()?, name, flags, Mode::empty())?);
        let file = regular_file::open_found(&found)?;
        Ok(wanted(&file)?.then_some(file))
    }

    pub(crate) fn read_link(&self, path: &str) -> io::Result<PathBuf> {
        fault_point!(ReadLink);
        Ok(readlinkat(self.dir()?, path)?.into())
    }

    pub(crate) fn status(&self) -> io::Result<Status> {
        Ok(Status::parse(&self.read("status")?))
    }

    pub(crate) fn thread_status(&self, tid: i32) -> io::Result<Status> {
        Ok(Status::parse(&self.read(&format!("task/{tid}/status"))?))
    }

    /// Opens the list of threads, which can be read repeatedly.
    pub(crate) fn threads(&self) -> io::Result<ThreadList> {
        let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY;
        let file = self.open_file("task", flags)?;
        Ok(ThreadList(Dir::from_fd(OwnedFd::from(file))?))
    }

    /// Returns whether the thread has begun to exit, so that the kernel refuses to trace it.
    pub(crate) fn is_exiting(&self, tid: i32) -> bool {
        self.is_exiting_in(&format!("task/{tid}"))
    }

    pub(crate) fn is_exiting_in(&self, directory: &str) -> bool {
        match self.read(&format!("{directory}/stat")) {
            Ok(stat) => status::is_exiting(&stat),
            Err(error) => is_task_gone(&error),
        }
    }

    /// Returns whether every thread has at least begun to exit.
    pub(crate) fn has_exited(&self) -> bool {
        self.living_thread().is_none() && !self.is_hidden()
    }

    /// Checks that it is a process with a program.
    ///
    /// # Errors
    ///
    /// If it is a thread's id, a kernel thread, or a zombie.
    pub(crate) fn refuse_without_program(&self) -> Result<()> {
        let status = self.status().map_err(|source| self.exited_or(source))?;
        if status.tgid != self.pid {
            let (pid, tid) = (status.tgid, self.pid);
            return Err(Error::new(
                Subject::Thread { pid, tid },
                ProcessError::NotAProcess,
            ));
        }
        let stat = self.read("stat").map_err(|source| self.exited_or(source))?;
        if status::is_kernel_thread(&stat) {
            return Err(Error::of_process(
                self.pid,
                ProcessError::KernelThread { name: status.name },
            ));
        }
        // A leader that has exited while other threads run is a zombie, too; the program lives on.
        if matches!(status.state, 'Z' | 'X') && self.has_exited() {
            return Err(Error::of_process(
                self.pid,
                ProcessError::Zombie {
                    parent: status.ppid,
                    parent_name: name_of(status.ppid),
                },
            ));
        }
        Ok(())
    }

    /// Returns whether it was forked within the last second and has not called execve(2) so far: it
    /// may be about to, like a process that a shell starts.
    pub(crate) fn was_just_forked(&self) -> bool {
        self.read("stat")
            .is_ok_and(|stat| status::was_just_forked(&stat, tool::since_boot()))
    }

    /// Waits until it has called execve(2), or is older than a second, if it was just forked.
    pub(crate) fn wait_until_executed(&self) {
        // Its start may be by another clock than ours, so the wait has a limit of its own.
        let begun = Instant::now();
        while self.was_just_forked() && begun.elapsed() < status::JUST_FORKED {
            thread::sleep(EXECUTE_CHECK_INTERVAL);
        }
    }

    /// Returns whether it was forked and has not called execve(2) since, however long ago that was.
    pub(crate) fn was_only_forked(&self) -> bool {
        self.read("stat")
            .is_ok_and(|stat| status::was_only_forked(&stat))
    }

    /// Checks that it is neither this process nor one of its ancestors, which must not be stopped.
    ///
    /// # Errors
    ///
    /// [`ProcessError::SelfOrAncestor`].
    pub(crate) fn refuse_self_and_ancestors(&self) -> Result<()> {
        let own = std::process::id() as i32;
        let mut pid = own;
        // A chain of parents is shorter than the number of possible pids.
        for _ in 0..1 << 22 {
            if pid == self.pid {
                return Err(Error::of_process(
                    pid,
                    ProcessError::SelfOrAncestor { own: pid == own },
                ));
            }
            match Process::open(pid).ok().and_then(|p| p.status().ok()) {
                Some(status) if status.ppid > 0 => pid = status.ppid,
                _ => break,
            }
        }
        Ok(())
    }

    /// Returns a thread that has not begun to exit, if there is one.
    fn living_thread(&self) -> Option<i32> {
        if !self.is_exiting(self.pid) {
            return Some(self.pid);
        }
        // The leader has exited, and other threads may live on. If they start each other and exit, a
        // list of them is outdated when it is read.
        for _ in 0..ATTEMPTS {
            let tids = self.threads().and_then(|mut list| list.read());
            let mut tids = tids.unwrap_or_default().into_iter();
            if let Some(living) = tids.find(|&tid| !self.is_exiting(tid)) {
                return Some(living);
            }
            // A leader is counted until the last thread has exited.
            if self.status().map_or(true, |status| status.threads <= 1) {
                break;
            }
        }
        None
    }

    /// Calls `read` with the directory of a living thread (`task/TID`, below `/proc/PID`): that of an
    /// exited thread, perhaps the leader, is all but empty. Calls it again with another thread if that
    /// one has exited meanwhile, or if `read` returns `None`.
    pub(crate) fn with_thread_directory<T>(
        &self,
        read: impl Fn(&str) -> io::Result<Option<T>>,
    ) -> io::Result<T> {
        // The leader is nearly always alive, and reading its state takes longer than trying.
        if let Ok(Some(found)) = read(&format!("task/{}", self.pid)) {
            return Ok(found);
        }
        for _ in 0..ATTEMPTS {
            let Some(tid) = self.living_thread() else {
                break;
            };
            match read(&format!("task/{tid}")) {
                Ok(Some(found)) => return Ok(found),
                // To users other than root, the kernel denies the memory of an exiting thread
                // instead of reporting that it is gone.
                Err(error) if !is_task_gone(&error) && !self.is_exiting(tid) => return Err(error),
                Ok(None) | Err(_) => {}
            }
        }
        Err(Errno::ESRCH.into())
    }

    /// Returns the user that the process runs as: its effective uid.
    pub(crate) fn effective_user(&self) -> u32 {
        // task_dump_owner in the kernel's fs/proc/base.c: the directory belongs to the effective uid even if the
        // process is not dumpable, so that the files in it belong to root.
        let found = self.dir().and_then(|dir| Ok(fstat(dir)?));
        found.map_or(0, |found| found.st_uid)
    }

    /// Returns the user that the program's files in /proc belong to.
    pub(crate) fn owner(&self) -> io::Result<u32> {
        self.with_thread_directory(|directory| {
            let path = format!("{directory}/maps");
            fault_point!(Stat);
            let status = fstatat(self.dir()?, path.as_str(), AtFlags::empty())?;
            // The files of a thread that has exited belong to root.
            Ok((!self.is_exiting_in(directory)).then_some(status.st_uid))
        })
    }

    /// Reads a file in the directory of a living thread whole, such as `maps` or `auxv`, which is
    /// empty only if the thread has exited.
    pub(crate) fn read_of_living_thread(&self, name: &str) -> io::Result<Vec<u8>> {
        self.with_thread_directory(|directory| {
            let bytes = self.read(&format!("{directory}/{name}"))?;
            Ok((!bytes.is_empty()).then_some(bytes))
        })
    }

    /// Returns whether a file of a living thread has all these lines, in this order. Reads no
    /// further than it has to: the kernel generates each line when it is read.
    pub(crate) fn has_lines(&self, name: &str, wanted: &[&[u8]]) -> io::Result<bool> {
        self.with_thread_directory(|directory| {
            fault_point!(ReadFile);
            let file = self.open_file(&format!("{directory}/{name}"), OFlag::O_RDONLY)?;
            let mut lines = BufReader::with_capacity(FEW_LINES, file.take(MAX_PROC_FILE));
            let mut wanted = wanted.iter().peekable();
            let mut line = Vec::new();
            let mut is_empty = true;
            while wanted.peek().is_some() {
                line.clear();
                if lines.read_until(b'\n', &mut line)? == 0 {
                    // The file of a thread that has exited is empty.
                    return Ok((!is_empty).then_some(false));
                }
                is_empty = false;
                let line = line.strip_suffix(b"\n").unwrap_or(&line);
                wanted.next_if(|wanted| **wanted == line);
            }
            Ok(Some(true))
        })
    }

    /// Returns whether /proc hides the process from us (proc(5), `hidepid`): it then looks like one that has exited, or
    /// denies all reads.
    pub(crate) fn is_hidden(&self) -> bool {
        let found = self.identity_of("stat");
        let errno = found.err().and_then(|error| error.raw_os_error());
        // For a process that has been reaped, the kernel returns ESRCH.
        let is_refused = matches!(
            errno.map(Errno::from_raw),
            Some(Errno::ENOENT | Errno::EPERM)
        );
        is_refused && is_hidden(self.pid)
    }

    /// Returns the error for a failed read of /proc: usually, that the process has exited.
    pub(crate) fn exited_or(&self, source: io::Error) -> Error {
        let is_refusal = source.raw_os_error() == Some(Errno::EPERM as i32);
        if (is_refusal || is_task_gone(&source)) && self.is_hidden() {
            return hidden(self.pid, Operation::Read);
        }
        if is_task_gone(&source) {
            return Error::of_process(self.pid, ProcessError::Exited);
        }
        Error::of_call(self.pid, Operation::Read, source)
    }
}

/// Checks that pids in /proc are those that ptrace(2) takes: in a /proc of another pid namespace, a pid
/// may be that of another process. All functions that open a process call this.
///
/// ```
/// probes_lib::check_proc()?;
/// # Ok::<(), probes_lib::Error>(())
/// ```
///
/// # Errors
///
/// [`SystemError::ForeignProc`], [`SystemError::NoProc`].
pub fn check_proc() -> Result<()> {
    /// The pid of our process for which /proc has been checked.
    static CHECKED_FOR: AtomicU32 = AtomicU32::new(0);
    let own = std::process::id();
    if CHECKED_FOR.load(Ordering::Relaxed) == own {
        return Ok(());
    }
    let own_process = Process::own();
    let status = own_process.map(|process| (process.status(), process.pid()));
    match status {
        Ok((Ok(status), pid)) if status.levels <= 1 && pid.unsigned_abs() == own => {
            CHECKED_FOR.store(own, Ordering::Relaxed);
            Ok(())
        }
        Ok((Ok(_), _)) => Err(SystemError::ForeignProc.into()),
        Ok((Err(_), _)) | Err(_) => Err(SystemError::NoProc.into()),
    }
}

/// Returns whether /proc hides processes of other users from this one (proc(5), `hidepid`).
///
/// ```
/// println!("some processes are not shown: {}", probes_lib::proc_hides_others());
/// ```
pub fn proc_hides_others() -> bool {
    // Every pid namespace has a process 1, and it nearly always belongs to root.
    !Path::new("/proc/1/stat").exists() && is_hidden(1)
}

/// Returns whether /proc is mounted to hide processes, and there is a process or thread of this id. To be called if
/// /proc does not show it.
fn is_hidden(pid: i32) -> bool {
    // "If sig is 0, then no signal is sent" (kill(2)).
    let is_there = !matches!(kill(Pid::from_raw(pid), None), Err(Errno::ESRCH));
    is_there && mounts::hidepid(&mounts::own()).is_some()
}

/// Returns the error for an `operation` on a process that /proc hides.
pub(crate) fn hidden(pid: i32, operation: Operation) -> Error {
    let denial = Denial::Hidden;
    Error::of_process(pid, ProcessError::Denied { operation, denial })
}

fn open_directory(path: &Path, flags: OFlag) -> nix::Result<OwnedFd> {
    fault_point!(OpenProcess);
    open(path, flags, Mode::empty())
}

/// The threads of a process, as /proc lists them.
pub(crate) struct ThreadList(Dir);

impl ThreadList {
    /// Reads the list from its start. It may lack threads that are starting or exiting.
    pub(crate) fn read(&mut self) -> io::Result<Vec<i32>> {
        fault_point!(ListThreads);
        let mut tids = Vec::new();
        for entry in self.0.iter() {
            let entry = match entry {
                Ok(entry) => entry,
                // The directory of a process that has just exited.
                Err(errno) if is_gone(errno) => break,
                Err(errno) => return Err(errno.into()),
            };
            if let Some(tid) = entry.file_name().to_str().ok().and_then(|s| s.parse().ok()) {
                tids.push(tid);
            }
        }
        Ok(tids)
    }

    /// Returns how many threads there are. Reading the status, which says so, too, takes ten times as long.
    pub(crate) fn count(&self) -> io::Result<usize> {
        fault_point!(Stat);
        // Each thread is a directory, with a link to this one, which has two other links.
        let links = fstat(&self.0)?.st_nlink;
        Ok(usize::try_from(links)
            .unwrap_or(usize::MAX)
            .saturating_sub(2))
    }
}

/// Returns whether opening or reading failed because there is no such process or thread any more.
pub(crate) fn is_task_gone(error: &io::Error) -> bool {
    error
        .raw_os_error()
        .is_some_and(|errno| is_gone(Errno::from_raw(errno)))
}

/// Same as [`is_task_gone`], for a failed system call.
fn is_gone(errno: Errno) -> bool {
    matches!(errno, Errno::ENOENT | Errno::ESRCH)
}

/// Returns the command name of a process, for messages; `?` if it cannot be read.
pub(crate) fn name_of(pid: i32) -> String {
    Process::open(pid)
        .ok()
        .and_then(|process| process.status().ok())
        .map_or_else(|| "?".to_owned(), |status| status.name)
}

/// Returns the pids of all processes that /proc shows.
///
/// # Errors
///
/// If /proc cannot be read.
pub fn pids() -> io::Result<Vec<i32>> {
    let names = fs::read_dir("/proc")?;
    let pid = |entry: io::Result<fs::DirEntry>| entry.ok()?.file_name().to_str()?.parse().ok();
    Ok(names.filter_map(pid).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;

    #[test]
    fn lines_are_found_in_order_and_others_not() {
        let own = Process::open(std::process::id() as i32).unwrap();
        // Other threads of the tests map memory meanwhile; the command line stays.
        let cmdline = own.read_of_living_thread("cmdline").unwrap();
        let line = cmdline.strip_suffix(b"\n").unwrap_or(&cmdline);
        assert!(own.has_lines("cmdline", &[line]).unwrap());
        assert!(own.has_lines("cmdline", &[]).unwrap());
        assert!(!own.has_lines("cmdline", &[line, line]).unwrap());
        assert!(!own.has_lines("cmdline", &[b"another"]).unwrap());
        let maps = own.read_of_living_thread("maps").unwrap();
        let code: Vec<&[u8]> = maps
            .split(|&byte| byte == b'\n')
            .filter(|line| line.windows(6).any(|part| part == b" r-xp "))
            .collect();
        assert!(own.has_lines("maps", &code).unwrap());
        let mut backwards = code.clone();
        backwards.reverse();
        assert!(code.len() > 1 && !own.has_lines("maps", &backwards).unwrap());
    }

    #[test]
    fn own_process_cannot_be_stopped() {
        let own = Process::open(std::process::id() as i32).unwrap();
        own.refuse_without_program().unwrap();
        // It has called execve(2).
        assert!(!own.was_just_forked());
        let error = own.refuse_self_and_ancestors().unwrap_err();
        assert!(matches!(
            error.kind(),
            ErrorKind::Process(ProcessError::SelfOrAncestor { own: true, .. })
        ));
        let tids = own.threads().unwrap().read().unwrap();
        assert!(tids.contains(&own.pid()));
    }
}
