//! One process as /proc shows it: identity, state, threads, and why it cannot be worked on.
//!
//! Everything is opened relative to one descriptor of `/proc/PID`, which stays with the process it
//! was opened for: after that process has gone, opening fails, even if its pid is used again.
//! (The procfs crate is not used: it fails on names that are not UTF-8, cannot open for writing,
//! and as of 0.18 panics on a mapped file called `/SYSV`.)

pub(crate) mod denial;
pub(crate) mod image;
pub(crate) mod load_bias;
pub(crate) mod maps;
pub(crate) mod memory;
pub(crate) mod object;
pub(crate) mod objects;
pub(crate) mod opened;
pub(crate) mod pagemap;
pub(crate) mod program;

use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Read};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::str;
use std::sync::atomic::{AtomicU32, Ordering};

use nix::dir::Dir;
use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag, open, openat, readlinkat};
use nix::sys::stat::{Mode, fstatat};

use crate::error::{ErrorKind, Operation, Result};
use crate::sys::can_fail;

/// Files of /proc have no length; none that we read whole is larger than this.
const MAX_PROC_FILE: u64 = 256 << 20;

/// Nearly all are smaller than this.
const USUAL_PROC_FILE: usize = 8 << 10;

/// Bytes to read at a time where the first lines may be enough.
const FEW_LINES: usize = 1 << 10;

/// `PF_EXITING`, `PF_FORKNOEXEC` and `PF_KTHREAD` of the kernel's `include/linux/sched.h`.
const PF_EXITING: u64 = 0x4;
const PF_FORKNOEXEC: u64 = 0x40;
const PF_KTHREAD: u64 = 0x0020_0000;

/// `USER_HZ` of amd64: the unit of times in `stat`, in a second.
const TICKS: f64 = 100.0;

/// How long after its birth a process may be about to execute a program.
const YOUTH: f64 = 1.0;

/// How often the threads of a process without a leader are looked for anew.
const ATTEMPTS: usize = 100;

/// An open directory of /proc: a process's.
#[derive(Debug)]
pub(crate) struct Process {
    pid: i32,
    dir: OwnedFd,
}

/// The part of `/proc/…/status` that is of use here.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Status {
    pub(crate) name: String,
    pub(crate) state: char,
    pub(crate) tgid: i32,
    pub(crate) ppid: i32,
    pub(crate) tracer: i32,
    pub(crate) uid: u32,
    pub(crate) threads: usize,
    /// How many pid namespaces it has a number in, from that of this /proc on.
    pub(crate) levels: usize,
    /// Its id in the innermost of them, which is what it knows of itself.
    pub(crate) innermost: i32,
    /// 0 if no seccomp filter is in force, 1 if nothing but read(2) and write(2) is allowed.
    pub(crate) seccomp: u32,
    /// How many filters there are.
    pub(crate) filters: u32,
    /// Capabilities, as bits.
    pub(crate) permitted: u64,
    pub(crate) effective: u64,
    pub(crate) bounding: u64,
}

impl Process {
    /// Opens `/proc/pid`. Says nothing yet of whether the process can be worked on.
    pub(crate) fn open(pid: i32) -> Result<Process> {
        refuse_foreign_proc()?;
        Process::open_as(pid)
    }

    /// As `open`, `pid` being the number that this /proc has.
    fn open_as(pid: i32) -> Result<Process> {
        let gone = || crate::Error::from(ErrorKind::NoSuchProcess { pid });
        if pid <= 0 {
            return Err(gone());
        }
        let path = PathBuf::from(format!("/proc/{pid}"));
        let flags = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
        match open_folder(&path, flags) {
            Ok(dir) => Ok(Process { pid, dir }),
            Err(Errno::ENOENT | Errno::ESRCH) => Err(gone()),
            Err(errno) => Err(ErrorKind::OpenFile {
                path,
                source: errno.into(),
            }
            .into()),
        }
    }

    /// Opens our own process. Its number is the one that this /proc knows it by, which may be that
    /// of another pid namespace than ours.
    pub(crate) fn own() -> Result<Process> {
        let path = PathBuf::from("/proc/self");
        let number = fs::read_link(&path).and_then(|link| {
            let number = link.to_str().and_then(|link| link.parse().ok());
            number.ok_or_else(|| io::Error::other("it names no process"))
        });
        let pid = number.map_err(|source| ErrorKind::OpenFile { path, source })?;
        Process::open_as(pid)
    }

    pub(crate) fn pid(&self) -> i32 {
        self.pid
    }

    /// Opens a file of the process, `path` being relative to `/proc/PID`.
    pub(crate) fn open_file(&self, path: &str, flags: OFlag) -> io::Result<File> {
        can_fail!(Open);
        let fd = openat(&self.dir, path, flags | OFlag::O_CLOEXEC, Mode::empty())?;
        Ok(File::from(fd))
    }

    /// Reads a file of the process whole.
    pub(crate) fn read(&self, path: &str) -> io::Result<Vec<u8>> {
        // The kernel does not tell the length, and each read takes a while.
        let mut bytes = Vec::with_capacity(USUAL_PROC_FILE);
        let file = self.open_file(path, OFlag::O_RDONLY)?;
        can_fail!(ReadFile);
        file.take(MAX_PROC_FILE).read_to_end(&mut bytes)?;
        Ok(bytes)
    }

    /// Opens a regular file that the maps name, if it is the one that is `wanted`: as we see it, or
    /// as the process itself would name it, which may be in another mount namespace.
    ///
    /// Nothing else is opened but looked at: who made the name may have put a device there.
    pub(crate) fn open_mapped(
        &self,
        path: &Path,
        wanted: impl Fn(&File) -> io::Result<bool>,
    ) -> io::Result<File> {
        let relative = path.strip_prefix("/").unwrap_or(path);
        // An absolute path is not relative to the folder.
        let names = [path.to_owned(), Path::new("root").join(relative)];
        let mut refusal = io::Error::from(Errno::ENOENT);
        for name in names {
            match self.open_wanted(&name, &wanted) {
                Ok(Some(file)) => return Ok(file),
                Ok(None) => {
                    refusal = io::Error::other("another file is mapped than has this name now");
                }
                Err(error) if error.kind() != io::ErrorKind::NotFound => refusal = error,
                Err(_) => {}
            }
        }
        Err(refusal)
    }

    /// Opens the one of the regular files that the process itself has open that is `wanted`.
    pub(crate) fn open_held(&self, wanted: impl Fn(&File) -> io::Result<bool>) -> Option<File> {
        let folder = self.open_file("fd", OFlag::O_RDONLY | OFlag::O_DIRECTORY);
        let descriptors = Dir::from_fd(OwnedFd::from(folder.ok()?)).ok()?;
        descriptors.into_iter().flatten().find_map(|descriptor| {
            let name = Path::new("fd").join(descriptor.file_name().to_str().ok()?);
            self.open_wanted(&name, &wanted).ok()?
        })
    }

    /// Opens a regular file; `None` if it is not `wanted`.
    fn open_wanted(
        &self,
        name: &Path,
        wanted: &impl Fn(&File) -> io::Result<bool>,
    ) -> io::Result<Option<File>> {
        let flags = OFlag::O_PATH | OFlag::O_CLOEXEC;
        let found = File::from(openat(&self.dir, name, flags, Mode::empty())?);
        if !found.metadata()?.is_file() {
            return Err(Errno::EINVAL.into());
        }
        let file = File::open(format!("/proc/self/fd/{}", found.as_raw_fd()))?;
        Ok(wanted(&file)?.then_some(file))
    }

    pub(crate) fn read_link(&self, path: &str) -> io::Result<PathBuf> {
        can_fail!(ReadLink);
        Ok(readlinkat(&self.dir, path)?.into())
    }

    pub(crate) fn status(&self) -> io::Result<Status> {
        Ok(parse_status(&self.read("status")?))
    }

    pub(crate) fn thread_status(&self, tid: i32) -> io::Result<Status> {
        Ok(parse_status(&self.read(&format!("task/{tid}/status"))?))
    }

    /// Opens the list of threads, which can be read again and again.
    pub(crate) fn threads(&self) -> io::Result<ThreadList> {
        let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY;
        let file = self.open_file("task", flags)?;
        Ok(ThreadList(Dir::from_fd(OwnedFd::from(file))?))
    }

    /// Whether a thread has forbidden itself system calls, for any of which the kernel may kill the
    /// process. What it has from its parent, a container's filter or a service's, lets programs be loaded
    /// and map memory: it is applied for that if both have as many filters.
    fn is_filtered(&self, tid: i32) -> io::Result<bool> {
        let status = self.thread_status(tid)?;
        if status.seccomp == 0 {
            return Ok(false);
        }
        let parent = Process::open(status.ppid).map(|parent| parent.status());
        let is_parents = match parent {
            Ok(Ok(parent)) => parent.seccomp == status.seccomp && parent.filters == status.filters,
            Ok(Err(_)) | Err(_) => false,
        };
        Ok(status.seccomp == 1 || status.filters == 0 || !is_parents)
    }

    /// Whether any thread has forbidden itself system calls. seccomp(2): a filter is a thread's, and of
    /// those that it starts afterwards.
    pub(crate) fn has_filtered_itself(&self) -> io::Result<bool> {
        for tid in self.threads()?.read()? {
            match self.is_filtered(tid) {
                Ok(false) => {}
                Err(error) if is_gone(&error) => {}
                is_filtered => return is_filtered,
            }
        }
        Ok(false)
    }

    /// Makes sure that one of these threads can be made to make system calls.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::SeccompFiltered`] if each has forbidden itself some.
    pub(crate) fn refuse_filtered(&self, tids: impl IntoIterator<Item = i32>) -> Result<()> {
        let mut is_any = false;
        for tid in tids {
            match self.is_filtered(tid) {
                Ok(true) => is_any = true,
                Ok(false) => return Ok(()),
                Err(error) if is_gone(&error) => {}
                Err(error) => return Err(self.exited_or(error)),
            }
        }
        let pid = self.pid;
        Err(match is_any {
            true => ErrorKind::SeccompFiltered { pid },
            false => ErrorKind::Exited { pid },
        }
        .into())
    }

    /// Whether the thread has begun to exit: the kernel refuses to trace it, and it will be gone.
    pub(crate) fn is_exiting(&self, tid: i32) -> bool {
        self.is_exiting_in(&format!("task/{tid}"))
    }

    fn is_exiting_in(&self, folder: &str) -> bool {
        match self.read(&format!("{folder}/stat")) {
            Ok(stat) => stat_field(&stat, FLAGS).is_some_and(|flags| flags & PF_EXITING != 0),
            Err(error) => is_gone(&error),
        }
    }

    /// Whether every thread has at least begun to exit.
    pub(crate) fn has_ended(&self) -> bool {
        self.living_thread().is_none()
    }

    /// Refuses what has no OCaml program to work on.
    ///
    /// # Errors
    ///
    /// A thread's id, a kernel thread, or a process that has ended.
    pub(crate) fn refuse_unworkable(&self) -> Result<()> {
        let status = self.status().map_err(|source| self.exited_or(source))?;
        if status.tgid != self.pid {
            return Err(ErrorKind::NotAProcess {
                tid: self.pid,
                pid: status.tgid,
            }
            .into());
        }
        let stat = self.read("stat").map_err(|source| self.exited_or(source))?;
        if stat_field(&stat, FLAGS).is_some_and(|flags| flags & PF_KTHREAD != 0) {
            return Err(ErrorKind::KernelThread {
                pid: self.pid,
                name: status.name,
            }
            .into());
        }
        // A leader that has exited while other threads run is a zombie too; the program lives on.
        if matches!(status.state, 'Z' | 'X') && self.has_ended() {
            return Err(ErrorKind::Zombie {
                pid: self.pid,
                parent: status.ppid,
                parent_name: name_of(status.ppid),
            }
            .into());
        }
        Ok(())
    }

    /// Whether it was forked a moment ago and has executed nothing so far: it may be about to, as those
    /// are that a shell starts.
    pub(crate) fn was_just_forked(&self) -> bool {
        let uptime = fs::read_to_string("/proc/uptime").unwrap_or_default();
        let now = uptime.split_ascii_whitespace().next();
        match (self.read("stat"), now.and_then(|now| now.parse().ok())) {
            (Ok(stat), Some(now)) => was_just_forked(&stat, now),
            _ => false,
        }
    }

    /// Refuses to stop ourselves or a process that we descend from.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::SelfOrAncestor`].
    pub(crate) fn refuse_self_and_ancestors(&self) -> Result<()> {
        let own = std::process::id() as i32;
        let mut pid = own;
        // No chain of parents is as long as the pids there are.
        for _ in 0..1 << 22 {
            if pid == self.pid {
                return Err(ErrorKind::SelfOrAncestor {
                    pid,
                    own: pid == own,
                }
                .into());
            }
            match Process::open(pid).ok().and_then(|p| p.status().ok()) {
                Some(status) if status.ppid > 0 => pid = status.ppid,
                _ => break,
            }
        }
        Ok(())
    }

    /// A thread that has not begun to exit, if there is one.
    fn living_thread(&self) -> Option<i32> {
        if !self.is_exiting(self.pid) {
            return Some(self.pid);
        }
        // The leader has exited, and other threads may live on. Where they start each other and
        // end, a list of them is old when it is read.
        for _ in 0..ATTEMPTS {
            let tids = self.threads().and_then(|mut list| list.read());
            let mut tids = tids.unwrap_or_default().into_iter();
            if let Some(living) = tids.find(|&tid| !self.is_exiting(tid)) {
                return Some(living);
            }
            // A leader is counted until its last thread has gone.
            if self.status().map_or(true, |status| status.threads <= 1) {
                break;
            }
        }
        None
    }

    /// Looks at the program: what `look` finds in the folder of a living thread (`task/TID`, below
    /// `/proc/PID`), as that of a thread which has exited, the leader perhaps, is all but empty.
    /// Looks again if the thread has ended meanwhile.
    pub(crate) fn look<T>(&self, look: impl Fn(&str) -> io::Result<Option<T>>) -> io::Result<T> {
        // Nearly always the leader has it, and asking for its state takes longer than looking.
        if let Ok(Some(found)) = look(&format!("task/{}", self.pid)) {
            return Ok(found);
        }
        for _ in 0..ATTEMPTS {
            let Some(tid) = self.living_thread() else {
                break;
            };
            match look(&format!("task/{tid}")) {
                Ok(Some(found)) => return Ok(found),
                // To others than root, the memory of a thread that is just exiting is not gone but
                // denied.
                Err(error) if !is_gone(&error) && !self.is_exiting(tid) => return Err(error),
                Ok(None) | Err(_) => {}
            }
        }
        Err(Errno::ESRCH.into())
    }

    /// The user that the program's files in /proc belong to.
    pub(crate) fn owner(&self) -> io::Result<u32> {
        self.look(|folder| {
            let path = format!("{folder}/maps");
            can_fail!(Stat);
            let status = fstatat(&self.dir, path.as_str(), AtFlags::empty())?;
            // What is left of a thread that has exited belongs to root.
            Ok((!self.is_exiting_in(folder)).then_some(status.st_uid))
        })
    }

    /// Reads a file of the program whole: `maps`, `auxv`, which are empty only if it has ended.
    pub(crate) fn read_program(&self, name: &str) -> io::Result<Vec<u8>> {
        self.look(|folder| {
            let bytes = self.read(&format!("{folder}/{name}"))?;
            Ok((!bytes.is_empty()).then_some(bytes))
        })
    }

    /// Whether a file of the program has all these lines, which are wanted in the order that they
    /// have there. Reads no further than it has to: the kernel makes up each line when it is read.
    pub(crate) fn has_lines(&self, name: &str, wanted: &[&[u8]]) -> io::Result<bool> {
        self.look(|folder| {
            can_fail!(ReadFile);
            let file = self.open_file(&format!("{folder}/{name}"), OFlag::O_RDONLY)?;
            let mut lines = BufReader::with_capacity(FEW_LINES, file.take(MAX_PROC_FILE));
            let mut wanted = wanted.iter().peekable();
            let mut line = Vec::new();
            let mut is_empty = true;
            while wanted.peek().is_some() {
                line.clear();
                if lines.read_until(b'\n', &mut line)? == 0 {
                    // That of a program which has ended has no lines at all.
                    return Ok((!is_empty).then_some(false));
                }
                is_empty = false;
                let line = line.strip_suffix(b"\n").unwrap_or(&line);
                wanted.next_if(|wanted| **wanted == line);
            }
            Ok(Some(true))
        })
    }

    /// What a failed read of /proc means: usually that the process has ended.
    pub(crate) fn exited_or(&self, source: io::Error) -> crate::Error {
        if is_gone(&source) {
            return ErrorKind::Exited { pid: self.pid }.into();
        }
        ErrorKind::system(self.pid, Operation::Read, source).into()
    }
}

/// Refuses a /proc that has other numbers for processes than ptrace(2) takes: that of another pid
/// namespace, in which one of ours may have the number of a stranger.
///
/// # Errors
///
/// [`ErrorKind::ForeignProc`], [`ErrorKind::NoProc`].
pub(crate) fn refuse_foreign_proc() -> Result<()> {
    /// For which of us it has been found to be right.
    static RIGHT_FOR: AtomicU32 = AtomicU32::new(0);
    let own = std::process::id();
    if RIGHT_FOR.load(Ordering::Relaxed) == own {
        return Ok(());
    }
    let own_process = Process::own();
    let status = own_process.map(|process| (process.status(), process.pid()));
    match status {
        Ok((Ok(status), pid)) if status.levels <= 1 && pid.unsigned_abs() == own => {
            RIGHT_FOR.store(own, Ordering::Relaxed);
            Ok(())
        }
        Ok((Ok(_), _)) => Err(ErrorKind::ForeignProc.into()),
        Ok((Err(_), _)) | Err(_) => Err(ErrorKind::NoProc.into()),
    }
}

fn open_folder(path: &Path, flags: OFlag) -> nix::Result<OwnedFd> {
    can_fail!(OpenProcess);
    open(path, flags, Mode::empty())
}

/// The threads of a process, as /proc lists them.
pub(crate) struct ThreadList(Dir);

impl ThreadList {
    /// Reads the list from its start. It may lack threads that are starting or ending.
    pub(crate) fn read(&mut self) -> io::Result<Vec<i32>> {
        can_fail!(ListThreads);
        let mut tids = Vec::new();
        for entry in self.0.iter() {
            let entry = match entry {
                Ok(entry) => entry,
                // The directory of a process that has just ended.
                Err(Errno::ENOENT | Errno::ESRCH) => break,
                Err(errno) => return Err(errno.into()),
            };
            if let Some(tid) = entry.file_name().to_str().ok().and_then(|s| s.parse().ok()) {
                tids.push(tid);
            }
        }
        Ok(tids)
    }
}

/// Whether opening or reading failed because there is no such process or thread any more.
fn is_gone(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error().map(Errno::from_raw),
        Some(Errno::ENOENT | Errno::ESRCH)
    )
}

/// The command name of a process, for messages; `?` if it cannot be read.
pub(crate) fn name_of(pid: i32) -> String {
    Process::open(pid)
        .ok()
        .and_then(|process| process.status().ok())
        .map_or_else(|| "?".to_owned(), |status| status.name)
}

/// proc(5): "To parse this file, look for the last ')' character before parsing the remaining
/// fields", the first of which, the state, is field 3.
const FLAGS: usize = 9;
const STARTTIME: usize = 22;

/// `now` in seconds, as its start.
fn was_just_forked(stat: &[u8], now: f64) -> bool {
    let (flags, start) = (stat_field(stat, FLAGS), stat_field(stat, STARTTIME));
    let has_executed = flags.is_none_or(|flags| flags & PF_FORKNOEXEC == 0);
    let age = start.map(|start| now - start as f64 / TICKS);
    !has_executed && age.is_some_and(|age| age < YOUTH)
}

fn stat_field(stat: &[u8], field: usize) -> Option<u64> {
    let end_of_name = stat.iter().rposition(|&byte| byte == b')')?;
    let rest = str::from_utf8(stat.get(end_of_name + 1..)?).ok()?;
    rest.split_ascii_whitespace().nth(field - 3)?.parse().ok()
}

fn parse_status(bytes: &[u8]) -> Status {
    let mut status = Status::default();
    for line in bytes.split(|&byte| byte == b'\n') {
        let Some(colon) = line.iter().position(|&byte| byte == b':') else {
            continue;
        };
        let value = String::from_utf8_lossy(line[colon + 1..].trim_ascii());
        let first = value.split_ascii_whitespace().next().unwrap_or_default();
        match &line[..colon] {
            b"Name" => status.name = value.into_owned(),
            b"State" => status.state = first.chars().next().unwrap_or('?'),
            b"Tgid" => status.tgid = first.parse().unwrap_or(0),
            b"PPid" => status.ppid = first.parse().unwrap_or(0),
            b"NSpid" => {
                status.levels = value.split_ascii_whitespace().count();
                let last = value.split_ascii_whitespace().next_back();
                status.innermost = last.and_then(|id| id.parse().ok()).unwrap_or(0);
            }
            b"TracerPid" => status.tracer = first.parse().unwrap_or(0),
            b"Uid" => status.uid = first.parse().unwrap_or(0),
            b"Threads" => status.threads = first.parse().unwrap_or(0),
            b"Seccomp" => status.seccomp = first.parse().unwrap_or(0),
            b"Seccomp_filters" => status.filters = first.parse().unwrap_or(0),
            b"CapPrm" => status.permitted = u64::from_str_radix(first, 16).unwrap_or(0),
            b"CapBnd" => status.bounding = u64::from_str_radix(first, 16).unwrap_or(0),
            b"CapEff" => status.effective = u64::from_str_radix(first, 16).unwrap_or(0),
            _ => {}
        }
    }
    status
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn state_is_read_despite_a_hostile_name() {
        let status = parse_status(
            b"Name:\t\xff) R 1\\n\nState:\tZ (zombie)\nTgid:\t42\nPPid:\t1\nTracerPid:\t7\n\
              Uid:\t1000\t1001\t1002\t1003\nThreads:\t3\n",
        );
        assert_eq!((status.state, status.tgid, status.ppid), ('Z', 42, 1));
        assert_eq!((status.tracer, status.uid, status.threads), (7, 1000, 3));

        let stat = b"42 (a) b (c) R 1 42 42 0 -1 2097152 0";
        assert_eq!(stat_field(stat, FLAGS), Some(PF_KTHREAD));
        assert_eq!(stat_field(b"42 (a", FLAGS), None);
        assert_eq!(stat_field(b"42 (a) R", FLAGS), None);
    }

    #[test]
    fn newborn_process_was_just_forked_without_exec() {
        let stat = |flags: u64| {
            format!("42 (a) R 1 42 42 0 -1 {flags} 0 0 0 0 0 0 0 0 20 0 1 0 3000 0").into_bytes()
        };
        assert!(was_just_forked(&stat(PF_FORKNOEXEC), 30.0));
        assert!(was_just_forked(&stat(PF_FORKNOEXEC | 0x0040_0000), 30.99));
        assert!(!was_just_forked(&stat(PF_FORKNOEXEC), 31.01));
        assert!(!was_just_forked(&stat(0x0040_0000), 30.0));
        assert!(!was_just_forked(b"42 (a) R", 30.0));
        // We have been executed.
        assert!(!Process::own().unwrap().was_just_forked());
    }

    #[test]
    fn lines_are_found_in_order_and_others_not() {
        let own = Process::open(std::process::id() as i32).unwrap();
        // Other threads of the tests map memory meanwhile; nobody has two programs.
        let status = own.read_program("cmdline").unwrap();
        let line = status.strip_suffix(b"\n").unwrap_or(&status);
        assert!(own.has_lines("cmdline", &[line]).unwrap());
        assert!(own.has_lines("cmdline", &[]).unwrap());
        assert!(!own.has_lines("cmdline", &[line, line]).unwrap());
        assert!(!own.has_lines("cmdline", &[b"another"]).unwrap());
        let maps = own.read_program("maps").unwrap();
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
    fn own_process_may_not_be_stopped_from_here() {
        let own = Process::open(std::process::id() as i32).unwrap();
        own.refuse_unworkable().unwrap();
        let error = own.refuse_self_and_ancestors().unwrap_err();
        assert!(matches!(
            error.kind(),
            ErrorKind::SelfOrAncestor { own: true, .. }
        ));
        let tids = own.threads().unwrap().read().unwrap();
        assert!(tids.contains(&own.pid()));
    }
}
