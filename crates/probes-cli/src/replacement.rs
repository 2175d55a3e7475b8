//! [`Replacement`]: a temporary file beside another, which replaces the other once it is complete. Until then, the
//! other file is unchanged, even if the disk is full or the tool is killed.

use std::fs::{self, File, Metadata, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, fchown};
use std::path::{Path, PathBuf};
use std::process;

use nix::fcntl::OFlag;
use nix::sys::signal::{SigSet, SigmaskHow};

/// How many more names are tried if one is taken, by the file of a tool that was killed.
const MAX_NAMES: u32 = 16;

/// A file that is to replace another. It is removed when this is dropped, unless it has replaced the other.
///
/// Signals are blocked meanwhile, so that none ends the tool before the file is removed. SIGKILL leaves it.
#[derive(Debug)]
pub(crate) struct Replacement {
    file: File,
    temporary: PathBuf,
    replaced: PathBuf,
    /// The signals that were blocked before.
    blocked: Option<SigSet>,
    has_replaced: bool,
}

impl Replacement {
    /// Makes a file beside `path`, with the permissions and the owner of the file there. `None` if it cannot replace
    /// that file: it is not regular, or has other names, or is mounted by itself, or no file of its owner can be made in
    /// its directory.
    ///
    /// # Errors
    ///
    /// If there is no room for it.
    pub(crate) fn begin(path: &Path) -> io::Result<Option<Replacement>> {
        // Resolved, so that a symbolic link stays one.
        let found = fs::canonicalize(path).and_then(|it| Ok((fs::metadata(&it)?, it)));
        let (old, replaced) = match found {
            Ok((old, _)) if !old.is_file() || old.nlink() > 1 => return Ok(None),
            // rename(2) onto it fails.
            Ok((_, replaced)) if is_mount_point(&replaced) => return Ok(None),
            Ok((old, replaced)) => (Some(old), replaced),
            // The file was removed after it was opened.
            Err(error) if error.kind() == ErrorKind::NotFound => (None, path.to_owned()),
            Err(error) => return Err(error),
        };
        let blocked = SigSet::all().thread_swap_mask(SigmaskHow::SIG_BLOCK).ok();
        let made = make_beside(&replaced);
        let (file, temporary) = match made {
            Ok(made) => made,
            Err(error) => {
                unblock(blocked);
                return match error.kind() {
                    ErrorKind::PermissionDenied | ErrorKind::ReadOnlyFilesystem => Ok(None),
                    _ => Err(error),
                };
            }
        };
        let replacement = Replacement {
            file,
            temporary,
            replaced,
            blocked,
            has_replaced: false,
        };
        let is_alike = old.is_none_or(|old| replacement.become_like(&old).is_ok());
        Ok(is_alike.then_some(replacement))
    }

    fn become_like(&self, old: &Metadata) -> io::Result<()> {
        let new = self.file.metadata()?;
        if (new.uid(), new.gid()) != (old.uid(), old.gid()) {
            fchown(&self.file, Some(old.uid()), Some(old.gid()))?;
        }
        self.file.set_permissions(old.permissions())
    }

    pub(crate) fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.file.write_all(bytes)
    }

    /// The file is complete: it replaces the other one.
    ///
    /// # Errors
    ///
    /// If it cannot be written to its end after all: some file systems say only now that they are full.
    pub(crate) fn finish(mut self) -> io::Result<()> {
        match self.file.sync_all() {
            // Not every file system can sync.
            Err(error) if error.kind() != ErrorKind::InvalidInput => return Err(error),
            _ => {}
        }
        fs::rename(&self.temporary, &self.replaced)?;
        self.has_replaced = true;
        Ok(())
    }
}

impl Drop for Replacement {
    fn drop(&mut self) {
        if !self.has_replaced {
            // If this fails, the file is left.
            let _ = fs::remove_file(&self.temporary);
        }
        unblock(self.blocked.take());
    }
}

/// Returns whether a file is mounted by itself, as those that a container is given. False if that cannot be found out.
fn is_mount_point(path: &Path) -> bool {
    let mounts = [path, path.parent().unwrap_or(path)].map(mount_of);
    matches!(&mounts, [Ok(of_file), Ok(of_directory)] if of_file != of_directory)
}

/// Returns the line of /proc/PID/fdinfo/FD (proc(5)) that says in which mount a file is.
fn mount_of(path: &Path) -> io::Result<Option<String>> {
    let mut options = OpenOptions::new();
    let file = options.read(true).custom_flags(OFlag::O_PATH.bits());
    let file = file.open(path)?;
    let info = fs::read_to_string(format!("/proc/self/fdinfo/{}", file.as_raw_fd()))?;
    let mut lines = info.lines();
    Ok(lines
        .find(|line| line.starts_with("mnt_id:"))
        .map(str::to_owned))
}

/// Makes a file in the directory of another.
fn make_beside(path: &Path) -> io::Result<(File, PathBuf)> {
    let mut tried = 0;
    loop {
        let temporary = path.with_file_name(format!(".ocaml-probes-{}-{tried}", process::id()));
        let mut options = OpenOptions::new();
        match options.write(true).create_new(true).open(&temporary) {
            Ok(file) => return Ok((file, temporary)),
            Err(error) if error.kind() != ErrorKind::AlreadyExists || tried >= MAX_NAMES => {
                return Err(error);
            }
            Err(_) => tried += 1,
        }
    }
}

/// Restores the signals that a thread blocks.
fn unblock(before: Option<SigSet>) {
    if let Some(before) = before {
        // Cannot fail: this was the thread's mask before.
        let _ = before.thread_set_mask();
    }
}
