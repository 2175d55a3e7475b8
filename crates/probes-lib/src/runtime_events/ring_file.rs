//! [`RingFile`]: the file that a runtime would create for its events (runtime/runtime_events.c). If it cannot create
//! the file, it aborts the program, and if the disk is full, the program dies of SIGBUS: so both are checked before.

use std::ffi::OsStr;
use std::fs::{File, Metadata};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag, OpenHow, ResolveFlag, openat, openat2};
use nix::sys::stat::{Mode, SFlag, fstatat, major, minor};
use nix::sys::statvfs::{FsFlags, Statvfs, fstatvfs};
use nix::unistd::{UnlinkatFlags, unlinkat};

use super::header::{HEADER_LEN, NAME_LEN, RING_HEADER_LEN, USER_EVENTS};
use crate::process::Process;
use crate::process::limits::{self, NeededMemory};
use crate::process::maps::Mapping;
use crate::process::status::Status;
use crate::sys::xattr;

/// `CAP_DAC_OVERRIDE` of capability.h.
const CAP_DAC_OVERRIDE: u64 = 1 << 1;

/// How many domains a program may have, unless OCAMLRUNPARAM says otherwise.
const USUAL_DOMAINS: u64 = 128;

/// How many more files a process must be able to open.
const SPARE_FILES: u64 = 8;

/// The least room on the disk with which events stay on: enough for the rings of sixteen more domains.
const LEAST_ROOM: u64 = 8 << 20;

/// The file of the events of a process, which may exist or not.
#[derive(Debug)]
pub(crate) struct RingFile {
    directory: File,
    /// The directory as the process names it; a relative path begins in its working directory.
    given: PathBuf,
    path: PathBuf,
    name: String,
    /// Whether no file had the name there when it was looked at.
    was_absent: bool,
    owner: u32,
    len: u64,
    /// Its length, if the number of domains in OCAMLRUNPARAM counts: it does from OCaml 5.3 on.
    len_as_asked: u64,
}

impl RingFile {
    /// Finds where a process creates the file, in `directory` or else in its working directory, and how long the file
    /// is at most, with rings of `words`.
    ///
    /// # Errors
    ///
    /// Why it cannot be found.
    pub(crate) fn of(
        process: &Process,
        directory: Option<&[u8]>,
        words: u64,
    ) -> Result<RingFile, String> {
        let status = process.status();
        let status = status.map_err(|error| format!("its status cannot be read: {error}"))?;
        let given = Path::new(OsStr::from_bytes(directory.unwrap_or(b".")));
        let opened = open_directory(process, given);
        let path = match process.read_link("cwd") {
            Ok(working) if given == Path::new(".") => working,
            // An absolute path stays as it is.
            Ok(working) => working.join(given),
            Err(_) => given.to_owned(),
        };
        let directory = opened.map_err(|error| {
            format!(
                "the directory of their file, {}, cannot be opened: {error}",
                path.display()
            )
        })?;
        let parameters = process.read_of_living_thread("environ").unwrap_or_default();
        let len = |domains: u64| {
            let ring = words.saturating_mul(8).saturating_add(RING_HEADER_LEN);
            let rings = domains.saturating_mul(ring);
            rings.saturating_add(USER_EVENTS * NAME_LEN + HEADER_LEN as u64)
        };
        let asked = max_domains(&parameters);
        Ok(RingFile {
            directory,
            given: given.to_owned(),
            path,
            name: format!("{}.events", status.innermost),
            was_absent: false,
            owner: status.file_uid,
            len: len(asked.max(USUAL_DOMAINS)),
            len_as_asked: len(asked),
        })
    }

    /// Checks that the process can create the file, which does not exist, and that there is room for all of it.
    ///
    /// # Errors
    ///
    /// Why it cannot.
    pub(crate) fn refuse(&mut self, process: &Process) -> Result<(), String> {
        let has_link = fstatat(
            &self.directory,
            self.name.as_str(),
            AtFlags::AT_SYMLINK_NOFOLLOW,
        );
        let path = self.path.display();
        match has_link {
            Err(Errno::ENOENT) => {}
            Ok(_) => return Err(format!("{path} already has a file {}", self.name)),
            Err(errno) => {
                return Err(format!(
                    "the directory of their file, {path}: {}",
                    io::Error::from(errno)
                ));
            }
        }
        self.was_absent = true;
        self.refuse_circumstances(process)?;
        // Such as a directory that may not be changed (chattr +i), which its mode does not tell.
        let flags = OFlag::O_TMPFILE | OFlag::O_RDWR | OFlag::O_CLOEXEC;
        match openat(&self.directory, ".", flags, Mode::S_IRUSR) {
            Err(errno @ (Errno::EPERM | Errno::EDQUOT | Errno::ENOSPC)) => Err(format!(
                "no file can be created in {}, where theirs is: {}",
                self.path.display(),
                io::Error::from(errno)
            )),
            // Others are about this tool, or what the file system can do.
            _ => Ok(()),
        }
    }

    /// Checks the same again, except whether the file exists: the process may have created it meanwhile. That is
    /// checked only if it now works in another directory.
    ///
    /// # Errors
    ///
    /// Why it cannot.
    pub(crate) fn refuse_again(&self, process: &Process) -> Result<(), String> {
        let directory = open_directory(process, &self.given);
        let now = RingFile {
            directory: directory.map_err(|error| {
                format!("the directory of their file cannot be opened any more: {error}")
            })?,
            given: self.given.clone(),
            path: self.path.clone(),
            name: self.name.clone(),
            ..*self
        };
        let identity = |file: &File| file.metadata().map(|it| (it.dev(), it.ino())).ok();
        if identity(&now.directory) != identity(&self.directory) {
            let name = self.name.as_str();
            let has_link = fstatat(&now.directory, name, AtFlags::AT_SYMLINK_NOFOLLOW);
            if has_link != Err(Errno::ENOENT) {
                return Err(format!(
                    "where it works now, there is a file {name} already"
                ));
            }
        }
        now.refuse_circumstances(process)
    }

    /// Checks that there is still room for what the process writes to the file.
    ///
    /// # Errors
    ///
    /// How many bytes there are, if that is too little.
    pub(crate) fn refuse_full(&self) -> Result<(), u64> {
        let volume = fstatvfs(&self.directory);
        let free = volume.map_or(u64::MAX, |volume| free_bytes(&volume));
        if free < LEAST_ROOM { Err(free) } else { Ok(()) }
    }

    fn refuse_circumstances(&self, process: &Process) -> Result<(), String> {
        let (path, len) = (self.path.display(), self.len);
        let unknown = |error: io::Error| format!("the directory of their file, {path}: {error}");
        let status = process.status().map_err(unknown)?;
        let directory = self.directory.metadata().map_err(unknown)?;
        if directory.nlink() == 0 {
            return Err(format!("{path}, where their file is, has been removed"));
        }
        let has_our_capabilities = is_in_our_user_namespace(process);
        if !may_create(&directory, &status, has_our_capabilities) {
            let user = status.file_uid;
            return Err(format!(
                "it runs as user {user}, who may not write to {path}, where their file is"
            ));
        }
        // With an ACL, the mode bits of a group are what any entry permits at most (acl(5)).
        let is_decided_by_acl = status.file_uid != directory.uid()
            && !(has_our_capabilities && status.effective & CAP_DAC_OVERRIDE != 0)
            && xattr::is_present(&self.directory, c"system.posix_acl_access");
        if is_decided_by_acl {
            return Err(format!(
                "{path}, where their file is, has an access control list, which may not let it create the file"
            ));
        }
        let volume = fstatvfs(&self.directory).map_err(|errno| unknown(errno.into()))?;
        if volume.flags().contains(FsFlags::ST_RDONLY) {
            return Err(format!("{path}, where their file is, is mounted read-only"));
        }
        let free = free_bytes(&volume);
        if volume.files() > 0 && volume.files_available() == 0 {
            return Err(format!("{path} has no inode free for their file"));
        }
        if free < len {
            return Err(format!(
                "their file may need {len} bytes, and {path} has {free} free"
            ));
        }
        if let Some(most) = limits::limit_of(process, "Max file size").filter(|it| *it < len) {
            return Err(format!(
                "their file needs {len} bytes, and RLIMIT_FSIZE is {most}"
            ));
        }
        let files = process.count_files().map_err(unknown)?;
        let most = limits::limit_of(process, "Max open files").unwrap_or(u64::MAX);
        if files.saturating_add(SPARE_FILES) > most {
            return Err(format!(
                "it has {files} files open, RLIMIT_NOFILE is {most}, and it needs {SPARE_FILES} more"
            ));
        }
        let needed = NeededMemory { all: len, data: 0 };
        limits::refuse_tight(process, needed).map_err(|error| error.to_string())
    }

    /// Removes the name of the file, if it is the one that is mapped. The mapping stays.
    ///
    /// # Errors
    ///
    /// If another file has the name, or it cannot be found or removed.
    pub(crate) fn remove(&self, process: &Process, mapping: &Mapping) -> io::Result<()> {
        if mapping.is_deleted() {
            return Ok(());
        }
        let name = self.name.as_str();
        let find = |directory: &File| fstatat(directory, name, AtFlags::AT_SYMLINK_NOFOLLOW);
        let moved;
        let mut directory = &self.directory;
        let mut found = find(directory);
        if found == Err(Errno::ENOENT) {
            // The process may have begun to work in another directory before it created the file.
            moved = open_directory(process, &self.given)?;
            directory = &moved;
            found = find(directory);
        }
        let found = found?;
        let device = (major(found.st_dev) as u32, minor(found.st_dev) as u32);
        let is_mapped =
            (device, found.st_ino) == ((mapping.device.0, mapping.device.1), mapping.inode);
        // With some file systems, /proc/PID/maps has another device or inode. Before, no file had the name.
        let was_absent = self.was_absent && std::ptr::eq(directory, &raw const self.directory);
        let is_alike = was_absent
            && found.st_uid == self.owner
            && [self.len, self.len_as_asked].contains(&(found.st_size as u64))
            && SFlag::from_bits_truncate(found.st_mode).contains(SFlag::S_IFREG);
        if !(is_mapped || is_alike) {
            return Err(io::Error::other("another file has that name now"));
        }
        unlinkat(directory, name, UnlinkatFlags::NoRemoveDir)?;
        Ok(())
    }

    /// Returns the file's path, as the process knows it.
    pub(crate) fn path(&self) -> PathBuf {
        self.path.join(&self.name)
    }
}

/// How many bytes of a volume a process without privileges can use.
fn free_bytes(volume: &Statvfs) -> u64 {
    let blocks = volume.blocks_available();
    blocks.saturating_mul(volume.fragment_size())
}

/// Opens a directory as a process sees it.
fn open_directory(process: &Process, path: &Path) -> io::Result<File> {
    let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
    let Ok(below) = path.strip_prefix("/") else {
        let start = process.open_file("cwd", flags)?;
        return Ok(openat(&start, path, flags, Mode::empty())?.into());
    };
    let root = process.open_file("root", flags)?;
    let below = if below.as_os_str().is_empty() {
        Path::new(".")
    } else {
        below
    };
    // So that absolute symbolic links lead where they lead for the process.
    let how = OpenHow::new()
        .flags(flags)
        .resolve(ResolveFlag::RESOLVE_IN_ROOT);
    match openat2(&root, below, how) {
        // Some seccomp filters do not know openat2(2).
        Err(Errno::ENOSYS | Errno::EPERM) => Ok(openat(&root, below, flags, Mode::empty())?.into()),
        opened => Ok(opened?.into()),
    }
}

fn is_in_our_user_namespace(process: &Process) -> bool {
    let own = std::fs::metadata("/proc/self/ns/user");
    let own = own.map(|it| (it.dev(), it.ino())).ok();
    own.is_some() && process.identity_of("ns/user").ok() == own
}

/// Returns whether a process may create files in a directory, by mode bits and capabilities (path_resolution(7)).
fn may_create(directory: &Metadata, status: &Status, has_our_capabilities: bool) -> bool {
    const WRITE_AND_SEARCH: u32 = 0o3;
    if has_our_capabilities && status.effective & CAP_DAC_OVERRIDE != 0 {
        return true;
    }
    let is_in_group =
        status.file_gid == directory.gid() || status.groups.contains(&directory.gid());
    let shift = if status.file_uid == directory.uid() {
        6
    } else if is_in_group {
        3
    } else {
        0
    };
    directory.mode() >> shift & WRITE_AND_SEARCH == WRITE_AND_SEARCH
}

/// Returns the largest `d=` in OCAMLRUNPARAM and CAMLRUNPARAM; 0 if there is none.
fn max_domains(environment: &[u8]) -> u64 {
    let variables = environment.split(|&byte| byte == 0);
    let parameters = variables.filter_map(|variable| {
        let value = variable.strip_prefix(b"OCAMLRUNPARAM=");
        value.or_else(|| variable.strip_prefix(b"CAMLRUNPARAM="))
    });
    let parts = parameters.flat_map(|it| it.split(|&byte| byte == b','));
    let numbers = parts.filter_map(|part| part.strip_prefix(b"d="));
    numbers.map(runtime_number).max().unwrap_or(0)
}

/// Returns the number at the beginning of a value in OCAMLRUNPARAM, as the runtime's `scanmult` reads it: decimal, or
/// hexadecimal after `0x`, and maybe followed by `k`, `M` or `G`; 1 if there is none.
fn runtime_number(text: &[u8]) -> u64 {
    let (digits, radix) = match text.strip_prefix(b"0x") {
        Some(digits) => (digits, 16),
        None => (text, 10),
    };
    let digit = |byte: &u8| char::from(*byte).to_digit(radix);
    let len = digits.iter().take_while(|byte| digit(byte).is_some());
    let (digits, rest) = digits.split_at(len.count());
    if digits.is_empty() {
        return 1;
    }
    let value = digits.iter().filter_map(digit).fold(0u64, |value, digit| {
        let value = value.saturating_mul(u64::from(radix));
        value.saturating_add(u64::from(digit))
    });
    let factor = match rest.first() {
        Some(b'k') => 1 << 10,
        Some(b'M') => 1 << 20,
        Some(b'G') => 1 << 30,
        _ => 1,
    };
    value.saturating_mul(factor)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn number_of_domains_is_that_of_the_environment() {
        for (environment, domains) in [
            (&b""[..], 0),
            (b"A=d=7\0OCAMLRUNPARAM=b,e=10,d=300\0B=1\0", 300),
            (b"CAMLRUNPARAM=d=2", 2),
            (b"OCAMLRUNPARAM=d=-3,d=x\xff", 1),
            (b"OCAMLRUNPARAM=d=0x20", 32),
            (b"OCAMLRUNPARAM=v=0,d=1k", 1024),
            (b"OCAMLRUNPARAM=d=99999999999999999999G", u64::MAX),
        ] {
            assert_eq!(max_domains(environment), domains);
        }
    }

    #[test]
    fn mode_bits_of_the_first_class_decide() {
        let directory = File::open(std::env::temp_dir())
            .unwrap()
            .metadata()
            .unwrap();
        let (owner, group) = (directory.uid(), directory.gid());
        let status = |file_uid, file_gid, effective| Status {
            file_uid,
            file_gid,
            effective,
            ..Status::default()
        };
        let bits = |shift: u32| directory.mode() >> shift & 3 == 3;
        let other = owner.wrapping_add(1);
        assert_eq!(
            may_create(&directory, &status(owner, group, 0), true),
            bits(6)
        );
        assert_eq!(
            may_create(&directory, &status(other, group, 0), true),
            bits(3)
        );
        let in_none = status(other, group.wrapping_add(1), 0);
        assert_eq!(may_create(&directory, &in_none, true), bits(0));
        assert!(may_create(
            &directory,
            &status(other, group, CAP_DAC_OVERRIDE),
            true
        ));
    }
}
