//! Where holds are recorded: each user has a directory with a file for each hold, which everybody can
//! read and only that user can write. The holder of a hold keeps its file locked (fcntl(2), "Open
//! file description locks"): the kernel releases the lock when the holder dies, however it dies.
//!
//! ```text
//! /run/ocaml-probes/PID.START.NAMESPACE.ID        of root
//! /tmp/ocaml-probes-UID/PID.START.NAMESPACE.ID    of others, and of root where /run cannot be written
//! ```
//!
//! Anybody can create files in /tmp, so a directory and its files are used only if they belong to the
//! user in the directory's name, and symbolic links are refused. A file is deleted only by the tool
//! that has locked it.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use nix::dir::Dir;
use nix::errno::Errno;
use nix::fcntl::{AT_FDCWD, OFlag, openat};
use nix::sys::stat::{FchmodatFlags, Mode, fchmod, fchmodat, mkdirat};
use nix::unistd::{UnlinkatFlags, geteuid, unlinkat};

use crate::error::is_shortage;
use crate::process::file_lock::{self, LockKind, WHOLE};
use crate::process::tool::new_id;
use crate::sys::fault_point;
use crate::update::holds::record::ProcessKey;

/// The largest record that is written or read: one of about 100,000 probes.
pub(crate) const MAX_RECORD: u64 = 16 << 20;

/// How many files of a directory are looked at, whichever processes they are about.
const MAX_FILES: usize = 10_000;

/// The end of the name of a mark: see [`Directory::mark_changed`].
const CHANGED: &str = ".changed";

const DIRECTORY: OFlag = OFlag::O_RDONLY
    .union(OFlag::O_DIRECTORY)
    .union(OFlag::O_NOFOLLOW)
    .union(OFlag::O_CLOEXEC);

/// Without O_NONBLOCK, opening a FIFO would wait for a writer.
const FILE: OFlag = OFlag::O_NOFOLLOW
    .union(OFlag::O_NONBLOCK)
    .union(OFlag::O_CLOEXEC);

/// The directory with the records of one user.
#[derive(Debug)]
pub(crate) struct Directory {
    dir: File,
    path: PathBuf,
    pub(crate) owner: u32,
}

/// Returns the directories of a user's records: all are read; new records go to the first that can be
/// used.
fn places(user: u32) -> Vec<PathBuf> {
    let mut places = Vec::new();
    if user == 0 {
        places.push(PathBuf::from("/run/ocaml-probes"));
    }
    places.push(PathBuf::from(format!("/tmp/ocaml-probes-{user}")));
    places
}

impl Directory {
    /// Opens those directories of these users that exist.
    ///
    /// # Errors
    ///
    /// If too many files are open.
    pub(crate) fn of_users(users: &[u32]) -> io::Result<Vec<Arc<Directory>>> {
        let mut directories = Vec::new();
        for (index, &user) in users.iter().enumerate() {
            if users[..index].contains(&user) {
                continue;
            }
            for path in places(user) {
                match Directory::open(path, user) {
                    Ok(directory) => directories.push(Arc::new(directory)),
                    Err(error) if is_shortage(&error) => return Err(error),
                    Err(_) => {}
                }
            }
        }
        Ok(directories)
    }

    /// Opens our own directory, and creates it if there is none.
    pub(crate) fn own() -> io::Result<Arc<Directory>> {
        let user = geteuid().as_raw();
        let mut refused = io::Error::from(Errno::ENOENT);
        for path in places(user) {
            match Directory::create(path, user) {
                Ok(directory) => return Ok(Arc::new(directory)),
                Err(error) => refused = error,
            }
        }
        Err(refused)
    }

    fn create(path: PathBuf, owner: u32) -> io::Result<Directory> {
        let access = Mode::from_bits_truncate(0o755);
        fault_point!(Record);
        match mkdirat(AT_FDCWD, &path, access) {
            // Whatever our umask: others see the holders of their probes. Before it is opened, as the umask may keep us
            // from that.
            Ok(()) => fchmodat(AT_FDCWD, &path, access, FchmodatFlags::FollowSymlink)
                .map_err(|errno| named(&path, errno.desc()))?,
            Err(Errno::EEXIST) => {}
            Err(errno) => return Err(named(&path, errno.desc())),
        }
        Directory::open(path, owner)
    }

    fn open(path: PathBuf, owner: u32) -> io::Result<Directory> {
        let opened = openat(AT_FDCWD, &path, DIRECTORY, Mode::empty());
        let dir = File::from(opened.map_err(|errno| match errno.into() {
            error if is_shortage(&error) => error,
            _ => named(&path, errno.desc()),
        })?);
        let found = dir.metadata()?;
        if found.uid() != owner || found.mode() & 0o022 != 0 {
            return Err(named(&path, "another user can write there"));
        }
        Ok(Directory { dir, path, owner })
    }

    /// Whether we may write and delete the records in it.
    pub(crate) fn can_write(&self) -> bool {
        let user = geteuid();
        user.is_root() || user.as_raw() == self.owner
    }

    /// Whether there are records, or marks of records, of processes with this pid.
    ///
    /// # Errors
    ///
    /// If the directory cannot be read.
    pub(crate) fn has_records_of(&self, pid: i32) -> io::Result<bool> {
        let prefix = format!("{pid}.");
        Ok(self.names()?.iter().any(|name| name.starts_with(&prefix)))
    }

    /// Returns the names of the records that may be about a process.
    ///
    /// # Errors
    ///
    /// If the directory cannot be read.
    pub(crate) fn records_of(
        &self,
        pid: i32,
        start: u64,
        namespace: u64,
    ) -> io::Result<Vec<String>> {
        let prefix = format!("{pid}.{start}.{namespace}.");
        let mut names = self.names()?;
        names.retain(|name| name.starts_with(&prefix) && !name.ends_with(CHANGED));
        names.sort_unstable();
        Ok(names)
    }

    fn names(&self) -> io::Result<Vec<String>> {
        // A new open file description has an offset of its own; that of `self.dir` is shared.
        let opened = openat(&self.dir, ".", DIRECTORY, Mode::empty());
        let names = opened.and_then(Dir::from_fd)?.into_iter().flatten();
        let names = names.filter_map(|entry| entry.file_name().to_str().ok().map(str::to_owned));
        Ok(names
            .filter(|name| !name.starts_with('.'))
            .take(MAX_FILES)
            .collect())
    }

    /// Opens a record. To be locked, it has to be opened `to_write`.
    pub(crate) fn record(
        self: &Arc<Directory>,
        name: &str,
        to_write: bool,
    ) -> io::Result<RecordFile> {
        let access = if to_write {
            OFlag::O_RDWR
        } else {
            OFlag::O_RDONLY
        };
        let file = File::from(openat(&self.dir, name, FILE | access, Mode::empty())?);
        let found = file.metadata()?;
        if !found.is_file() || found.uid() != self.owner || found.nlink() > 1 {
            return Err(io::Error::other("it is not a file of that user alone"));
        }
        if found.len() > MAX_RECORD {
            return Err(Errno::EFBIG.into());
        }
        Ok(RecordFile {
            file,
            directory: self.clone(),
            name: name.to_owned(),
        })
    }

    /// Creates a record of a process, and locks it.
    pub(crate) fn new_record(
        self: &Arc<Directory>,
        process: &ProcessKey,
    ) -> io::Result<LockedRecord> {
        let id = new_id();
        let name = format!("{}.{id:016x}", prefix(process));
        let file = self.new_file(&name)?;
        let file = RecordFile {
            file,
            directory: self.clone(),
            name,
        };
        let locked = file.lock();
        locked.ok_or_else(|| named(&self.path, "files there cannot be locked"))
    }

    fn new_file(&self, name: &str) -> io::Result<File> {
        fault_point!(Record);
        let flags = FILE | OFlag::O_RDWR | OFlag::O_CREAT | OFlag::O_EXCL;
        let access = Mode::from_bits_truncate(0o644);
        let created = openat(&self.dir, name, flags, access);
        let file = File::from(created.map_err(|errno| named(&self.path, errno.desc()))?);
        fchmod(&file, access)?;
        Ok(file)
    }

    /// Marks a record of another user, which we cannot write, as outdated: we change the counters
    /// that it is about, so nothing counts as held by it any more.
    pub(crate) fn mark_changed(&self, record: &str) {
        // That it exists already is fine, and nothing else can be done.
        let _ = self.new_file(&format!("{record}{CHANGED}"));
    }

    /// Whether there is such a mark.
    pub(crate) fn is_marked_changed(&self, record: &str) -> bool {
        let name = format!("{record}{CHANGED}");
        let found = openat(&self.dir, name.as_str(), FILE, Mode::empty());
        let found = found.map(|file| File::from(file).metadata());
        matches!(found, Ok(Ok(found)) if found.uid() == self.owner)
    }

    /// Deletes the records for which `is_stale(pid, start, namespace, record)` is true, unless they
    /// are locked.
    pub(crate) fn sweep(
        self: &Arc<Directory>,
        is_stale: impl Fn(i32, u64, u64, &RecordFile) -> bool,
    ) {
        for name in self.names().unwrap_or_default() {
            let mut parts = name.split('.');
            let mut number = || parts.next()?.parse::<u64>().ok();
            let (Some(pid), Some(start), Some(namespace)) = (number(), number(), number()) else {
                continue;
            };
            let Ok(file) = self.record(&name, true) else {
                continue;
            };
            if is_stale(pid as i32, start, namespace, &file) {
                if let Some(locked) = file.lock() {
                    locked.remove();
                }
            }
        }
    }
}

/// Returns the part of the name that says which process a record is about.
fn prefix(process: &ProcessKey) -> String {
    format!("{}.{}.{}", process.pid, process.start, process.namespace)
}

fn named(path: &Path, why: &str) -> io::Error {
    io::Error::other(format!("{}: {why}", path.display()))
}

/// A record that is open.
#[derive(Debug)]
pub(crate) struct RecordFile {
    file: File,
    directory: Arc<Directory>,
    pub(crate) name: String,
}

impl RecordFile {
    pub(crate) fn directory(&self) -> &Arc<Directory> {
        &self.directory
    }

    /// Reads it whole.
    ///
    /// # Errors
    ///
    /// Also if it has more than `limit` bytes.
    pub(crate) fn read(&self, limit: u64) -> io::Result<Vec<u8>> {
        let mut file = &self.file;
        file.seek(SeekFrom::Start(0))?;
        let mut bytes = Vec::new();
        file.take(limit.saturating_add(1)).read_to_end(&mut bytes)?;
        if bytes.len() as u64 > limit {
            return Err(Errno::EFBIG.into());
        }
        Ok(bytes)
    }

    /// Whether its holder, or a tool that undoes for a dead one, has it locked. True if the
    /// kernel does not tell.
    pub(crate) fn is_locked(&self) -> bool {
        // Only an exclusive lock counts, which takes write access: with a shared one, any user who
        // can read the file could pretend that its holder lives.
        file_lock::is_excluded(&self.file, LockKind::Shared, WHOLE).unwrap_or(true)
    }

    /// Locks it; returns `None` if another tool has locked it, it was deleted, or the kernel refuses.
    pub(crate) fn lock(self) -> Option<LockedRecord> {
        file_lock::lock(&self.file, LockKind::Exclusive, WHOLE).ok()?;
        let is_there = self.file.metadata().is_ok_and(|found| found.nlink() == 1);
        is_there.then_some(LockedRecord(self))
    }
}

/// A record that no other tool changes until this is dropped.
#[derive(Debug)]
pub(crate) struct LockedRecord(RecordFile);

impl LockedRecord {
    pub(crate) fn file(&self) -> &RecordFile {
        &self.0
    }

    /// Writes a part after the first `complete` bytes, in place of all that follows them, and `room` bytes that
    /// [`LockedRecord::settle`] overwrites. If it fails, the complete bytes are left.
    pub(crate) fn append(&self, complete: usize, part: &str, room: usize) -> io::Result<()> {
        fault_point!(Record);
        if (complete + part.len() + room) as u64 > MAX_RECORD {
            return Err(Errno::EFBIG.into());
        }
        let file = &self.0.file;
        file.set_len(complete as u64)?;
        // Empty lines are no part.
        let part = part.to_owned() + &"\n".repeat(room);
        file.write_all_at(part.as_bytes(), complete as u64)
            .inspect_err(|_| drop(file.set_len(complete as u64)))
    }

    /// Writes a last part after the first `complete` bytes, for which there is room: on most file systems, this
    /// succeeds even if the disk is full.
    pub(crate) fn settle(&self, complete: usize, part: &str) -> io::Result<()> {
        fault_point!(Record);
        let end = (complete + part.len()) as u64;
        if end > MAX_RECORD {
            return Err(Errno::EFBIG.into());
        }
        self.0.file.write_all_at(part.as_bytes(), complete as u64)?;
        self.0.file.set_len(end)
    }

    /// Deletes it.
    pub(crate) fn remove(self) {
        // If it cannot be deleted, it says nothing any more.
        if self.unlink().is_err() {
            let _ = self.0.file.set_len(0);
        }
    }

    fn unlink(&self) -> io::Result<()> {
        fault_point!(Record);
        let RecordFile {
            directory, name, ..
        } = &self.0;
        unlinkat(&directory.dir, name.as_str(), UnlinkatFlags::NoRemoveDir)?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use test_support::{Scratch, eventually};

    use super::*;

    const KEY: ProcessKey = ProcessKey {
        pid: 42,
        start: 7,
        namespace: 1,
        random: 0,
    };

    fn own() -> u32 {
        geteuid().as_raw()
    }

    fn directory(scratch: &Scratch) -> Arc<Directory> {
        Arc::new(Directory::create(scratch.file("holds"), own()).unwrap())
    }

    #[test]
    fn directory_of_another_user_is_refused() {
        let scratch = Scratch::new();
        let path = scratch.file("holds");
        let directory = Directory::create(path.clone(), own()).unwrap();
        assert!(directory.can_write());
        // It is there already.
        Directory::create(path.clone(), own()).unwrap();
        assert!(Directory::open(path.clone(), own() + 1).is_err());
        let link = scratch.file("link");
        symlink(&path, &link).unwrap();
        assert!(Directory::open(link.clone(), own()).is_err());
        assert!(Directory::create(link, own()).is_err());
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o775)).unwrap();
        let error = Directory::create(path.clone(), own()).unwrap_err();
        let expected = format!("{}: another user can write there", path.display());
        assert_eq!(error.to_string(), expected);
        let file = scratch.file("file");
        std::fs::write(&file, "").unwrap();
        assert!(Directory::create(file, own()).is_err());
    }

    #[test]
    fn record_is_alive_while_it_is_locked() {
        let scratch = Scratch::new();
        let directory = directory(&scratch);
        let locked = directory.new_record(&KEY).unwrap();
        locked.append(0, "one", 0).unwrap();
        let names = directory.records_of(42, 7, 1).unwrap();
        let [name] = &names[..] else {
            panic!("{names:?}");
        };
        assert!(directory.has_records_of(42).unwrap() && !directory.has_records_of(4).unwrap());
        assert!(
            directory.records_of(42, 7, 2).unwrap().is_empty()
                && directory.records_of(42, 8, 1).unwrap().is_empty()
        );
        let seen = directory.record(name, false).unwrap();
        assert!(seen.is_locked());
        assert!(directory.record(name, true).unwrap().lock().is_none());
        // What comes after the complete part is replaced.
        locked.append(1, "two", 0).unwrap();
        assert_eq!(seen.read(9).unwrap(), b"otwo");
        drop(locked);
        // Another test may have forked: its child has the descriptor until it executes a program.
        eventually("the lock is released", || (!seen.is_locked()).then_some(()));
        // A shared lock, which read access is enough for, does not count as that of a holder.
        file_lock::lock(&seen.file, LockKind::Shared, WHOLE).unwrap();
        assert!(!directory.record(name, false).unwrap().is_locked());
        drop(seen);
        let dead = directory.record(name, true).unwrap();
        eventually("it can be locked", || {
            directory
                .record(name, true)
                .unwrap()
                .lock()
                .map(LockedRecord::remove)
        });
        assert!(dead.lock().is_none(), "it was deleted");
        assert!(!directory.has_records_of(42).unwrap());
    }

    #[test]
    fn linked_or_large_file_is_refused() {
        let scratch = Scratch::new();
        let directory = directory(&scratch);
        let other = scratch.file("other");
        std::fs::write(&other, "").unwrap();
        symlink(&other, scratch.file("holds/42.7.1.a")).unwrap();
        std::fs::hard_link(&other, scratch.file("holds/42.7.1.b")).unwrap();
        for name in ["42.7.1.a", "42.7.1.b"] {
            assert!(directory.record(name, true).is_err(), "{name}");
        }
        let large = std::fs::File::create(scratch.file("holds/42.7.1.c")).unwrap();
        large.set_len(MAX_RECORD + 1).unwrap();
        assert!(directory.record("42.7.1.c", true).is_err());
    }

    #[test]
    fn sweep_deletes_what_is_stale_and_not_held() {
        let scratch = Scratch::new();
        let directory = directory(&scratch);
        let held = directory.new_record(&KEY).unwrap();
        drop(directory.new_record(&KEY).unwrap());
        drop(
            directory
                .new_record(&ProcessKey { pid: 43, ..KEY })
                .unwrap(),
        );
        std::fs::write(scratch.file("holds/note"), "").unwrap();
        directory.mark_changed(&held.file().name);
        assert!(directory.is_marked_changed(&held.file().name));
        eventually("all but the held one are deleted", || {
            directory.sweep(|pid, start, namespace, _| (pid, start, namespace) == (42, 7, 1));
            let mut names = directory.names().unwrap();
            names.sort();
            let expected = [held.file().name.clone(), "note".to_owned()];
            let is_other = |name: &String| name.starts_with("43.");
            names.iter().any(is_other).then_some(())?;
            names.retain(|name| !is_other(name));
            (names == expected).then_some(())
        });
    }
}
