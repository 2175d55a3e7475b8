//! [`TimelineFile`]: the file that a time line is written to. It can be read at any moment, even after the disk is full
//! or the tool was killed.
//!
//! ```text
//! earlier blocks | end            the next write replaces the end by a block and the end
//! ```
//!
//! A file that is written only in the end ([`TimelineFile::replace`]) keeps its old contents until the new ones are
//! complete.

use std::fs::File;
use std::io::{self, ErrorKind, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::destination::{open_or_create, remove_new};
use crate::failure::Failure;
use crate::messages::Messages;
use crate::poll::{PIPE_BUF, is_writable_until};
use crate::replacement::Replacement;

/// How long the reader of a pipe may take to make room: then the recording ends.
const MAX_WAIT_FOR_ROOM: Duration = Duration::from_secs(10);

/// A file that is written block by block.
#[derive(Debug)]
pub(crate) struct TimelineFile {
    path: PathBuf,
    file: File,
    /// Whether the end can be written over. In a pipe it cannot, so there the end is written last.
    is_regular: bool,
    /// The length without the end.
    len: u64,
    end: &'static [u8],
    /// Whether a block could not be written: then no more are.
    has_failed: bool,
    /// The file that is written instead, and replaces this one in the end.
    replacement: Option<Replacement>,
    /// Whether we have made it, and nothing was written.
    is_new: bool,
}

impl TimelineFile {
    /// Opens a file, or creates it. Its old contents stay until the first block is written.
    pub(crate) fn create(path: &Path, messages: &Messages) -> Result<TimelineFile, Failure> {
        let open = || {
            let (file, is_new) = open_or_create(path, messages)?;
            let is_regular = file.metadata()?.is_file();
            Ok((file, is_regular, is_new))
        };
        let (file, is_regular, is_new) =
            open().map_err(|error| Failure::WriteFile(path.to_owned(), error))?;
        Ok(TimelineFile {
            path: path.to_owned(),
            file,
            is_regular,
            len: 0,
            end: b"",
            has_failed: false,
            replacement: None,
            is_new,
        })
    }

    /// From now on, writes to another file, which replaces this one once it is finished, if that is possible.
    ///
    /// # Errors
    ///
    /// If there is no room for it.
    pub(crate) fn replace(&mut self) -> Result<(), Failure> {
        if self.is_regular {
            let begun = Replacement::begin(&self.path);
            self.replacement = begun.map_err(|error| self.kept(error))?;
        }
        Ok(())
    }

    /// The other file could not be written: it is removed, and this file is as it was.
    fn kept(&mut self, error: io::Error) -> Failure {
        self.has_failed = true;
        self.replacement = None;
        (self.len, self.end) = (0, b"");
        Failure::KeptFile(self.path.clone(), error)
    }

    /// How many bytes were written.
    pub(crate) fn len(&self) -> u64 {
        self.len + self.end.len() as u64
    }

    /// Whether a block could not be written: the file ends before it.
    pub(crate) fn is_cut(&self) -> bool {
        self.has_failed
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Writes a block after the earlier ones, and the `end` of the file after it. Empties `block`.
    ///
    /// # Errors
    ///
    /// If it cannot be written: then a regular file ends before the block.
    pub(crate) fn write(&mut self, block: &mut Vec<u8>, end: &'static [u8]) -> Result<(), Failure> {
        if self.has_failed || block.is_empty() {
            block.clear();
            return Ok(());
        }
        let len = block.len() as u64;
        if let Some(replacement) = &mut self.replacement {
            let written = replacement.write(block);
            block.clear();
            self.len += len;
            return written.map_err(|error| self.kept(error));
        }
        self.is_new = false;
        let written = if self.is_regular {
            block.extend(end);
            self.write_over(block)
        } else {
            self.write_pieces(block)
        };
        block.clear();
        if let Err(error) = written {
            self.has_failed = true;
            if self.is_regular {
                // The end was there before, so the disk has room for it.
                let _ = self.file.write_all_at(self.end, self.len);
                let _ = self.file.set_len(self.len + self.end.len() as u64);
            }
            return Err(Failure::CutFile(self.path.clone(), self.len(), error));
        }
        self.len += len;
        if self.is_regular {
            self.end = end;
        }
        Ok(())
    }

    /// Writes the end of a file whose end cannot be written over, or that replaces another.
    pub(crate) fn finish(&mut self, end: &'static [u8]) -> Result<(), Failure> {
        if let Some(mut replacement) = self.replacement.take() {
            self.end = end;
            let written = replacement.write(end).and_then(|()| replacement.finish());
            written.map_err(|error| self.kept(error))?;
            self.is_new = false;
            return Ok(());
        }
        if self.is_regular || self.has_failed {
            return Ok(());
        }
        self.end = end;
        let written = self.write_pieces(end);
        written.map_err(|error| Failure::CutFile(self.path.clone(), self.len, error))
    }

    /// Writes to a pipe. Termination signals are blocked meanwhile, so it waits only so long for a reader that does not
    /// read.
    fn write_pieces(&mut self, block: &[u8]) -> io::Result<()> {
        for piece in block.chunks(PIPE_BUF) {
            if !self.has_room() {
                let seconds = MAX_WAIT_FOR_ROOM.as_secs();
                let why = format!("its reader has made no room for {seconds} s");
                return Err(io::Error::new(ErrorKind::TimedOut, why));
            }
            self.file.write_all(piece)?;
        }
        Ok(())
    }

    /// Waits until there is room for [`PIPE_BUF`] bytes; returns whether there is. Waits twice: if job control has stopped
    /// this process and the reader, the first wait is over once both go on, and the reader has had no time to read.
    fn has_room(&self) -> bool {
        let wait = || is_writable_until(self.file.as_fd(), Instant::now() + MAX_WAIT_FOR_ROOM / 2);
        wait() || wait()
    }

    fn write_over(&mut self, block: &[u8]) -> io::Result<()> {
        if self.len == 0 {
            self.file.set_len(0)?;
        }
        self.file.write_all_at(block, self.len)
    }
}

impl Drop for TimelineFile {
    /// If nothing was written, no new file is left.
    fn drop(&mut self) {
        if self.is_new {
            remove_new(&self.path, &self.file);
        }
    }
}
