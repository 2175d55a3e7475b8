//! [`OutputFile`]: a file that the tool writes. Its old contents stay until something is written. If it is new and
//! nothing was written, it is removed.

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};

use crate::failure::Failure;
use crate::messages::Messages;

/// A file that is open for writing.
#[derive(Debug)]
pub(crate) struct OutputFile {
    path: PathBuf,
    file: File,
    is_regular: bool,
    /// Whether [`OutputFile::create`] has created it, and nothing was written.
    is_new: AtomicBool,
}

impl OutputFile {
    /// Opens a file, or creates it. An existing one keeps its contents. Waits for a reader if it is a pipe without one,
    /// and says so. Has to be called before signals are blocked, so that they end the wait.
    pub(crate) fn create(path: &Path, messages: &Messages) -> Result<OutputFile, Failure> {
        let open = || {
            let (file, is_new) = open_or_create(path, messages)?;
            Ok(OutputFile {
                path: path.to_owned(),
                is_regular: file.metadata()?.is_file(),
                file,
                is_new: AtomicBool::new(is_new),
            })
        };
        open().map_err(|error| Failure::WriteFile(path.to_owned(), error))
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn file(&self) -> &File {
        &self.file
    }

    /// Whether it is neither a pipe nor a device.
    pub(crate) fn is_regular(&self) -> bool {
        self.is_regular
    }

    /// Whether it is removed if nothing is written.
    pub(crate) fn is_new(&self) -> bool {
        self.is_new.load(Ordering::Relaxed)
    }

    /// It is written to: from now on, it is not removed.
    pub(crate) fn keep(&self) {
        self.is_new.store(false, Ordering::Relaxed);
    }
}

impl Drop for OutputFile {
    /// If nothing was written, no new file is left.
    fn drop(&mut self) {
        if self.is_new() {
            remove_empty(&self.path, &self.file);
        }
    }
}

/// Returns the file, and whether it is new.
fn open_or_create(path: &Path, messages: &Messages) -> io::Result<(File, bool)> {
    let mut options = OpenOptions::new();
    let options = options.write(true);
    match options.clone().create_new(true).open(path) {
        Err(error) if error.kind() == ErrorKind::AlreadyExists => {
            let options = options.create(true).truncate(false);
            Ok((open_to_write(options, path, messages)?, false))
        }
        created => Ok((created?, true)),
    }
}

fn open_to_write(options: &mut OpenOptions, path: &Path, messages: &Messages) -> io::Result<File> {
    let mut at_once = options.clone();
    match at_once.custom_flags(OFlag::O_NONBLOCK.bits()).open(path) {
        Ok(file) => {
            // From here on, writes block until there is room.
            let flags = OFlag::from_bits_retain(fcntl(&file, FcntlArg::F_GETFL)?);
            fcntl(&file, FcntlArg::F_SETFL(flags - OFlag::O_NONBLOCK))?;
            Ok(file)
        }
        Err(error) if is_pipe_without_reader(path, &error) => {
            let path_shown = path.display();
            messages.note(&format!(
                "{path_shown} is a pipe that no process reads; waiting for a reader (Ctrl-C stops waiting)"
            ));
            options.open(path)
        }
        Err(error) => Err(error),
    }
}

/// fifo(7): "A process can open a FIFO in nonblocking mode. [...] opening for write-only will fail with ENXIO (no such
/// device or address) unless the other end has already been opened."
fn is_pipe_without_reader(path: &Path, error: &io::Error) -> bool {
    let is_pipe = || path.metadata().is_ok_and(|it| it.file_type().is_fifo());
    error.raw_os_error() == Some(Errno::ENXIO as i32) && is_pipe()
}

/// Removes a file that we have created, unless it has contents by now, or its path leads to another file.
fn remove_empty(path: &Path, file: &File) {
    let (Ok(created), Ok(found)) = (file.metadata(), fs::symlink_metadata(path)) else {
        return;
    };
    let is_same = (created.dev(), created.ino()) == (found.dev(), found.ino());
    if is_same && created.len() == 0 {
        // An empty file that stays does no harm.
        let _ = fs::remove_file(path);
    }
}

#[cfg(test)]
mod tests {
    use test_support::Scratch;

    use super::*;

    #[test]
    fn new_file_with_contents_is_kept() {
        let scratch = Scratch::new();
        let [empty, filled, moved] = ["empty", "filled", "moved"].map(|name| {
            let path = scratch.file(name);
            let file = OutputFile::create(&path, &Messages::default()).unwrap();
            (path, file)
        });
        // By another process.
        fs::write(&filled.0, "its answer").unwrap();
        fs::remove_file(&moved.0).unwrap();
        fs::write(&moved.0, "").unwrap();
        let are_kept = [empty, filled, moved].map(|(path, file)| {
            drop(file);
            path.exists()
        });
        assert_eq!(are_kept, [false, true, true]);
    }
}
