//! [`TimelineFile`]: the file that a timeline is written to. Its contents are valid at each moment, even if the disk is
//! full or the tool is killed.
//!
//! ```text
//! earlier blocks | end            the next write replaces the end by a block and the end
//! ```
//!
//! A file that is written only at the end ([`TimelineFile::replace`]) keeps its old contents until the new ones are
//! complete.

use std::io::{self, ErrorKind, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::failure::Failure;
use crate::messages::Messages;
use crate::output_file::OutputFile;
use crate::poll::{PIPE_BUF, is_writable_until};
use crate::replacement::Replacement;

/// How long the reader of a pipe may take to make room: then the recording ends.
const MAX_WAIT_FOR_ROOM: Duration = Duration::from_secs(10);

/// A file that is written block by block.
#[derive(Debug)]
pub(crate) struct TimelineFile {
    /// A regular file, whose end is overwritten by the next block; or a pipe, to which the end is written once, last.
    file: OutputFile,
    /// The length without the end.
    len: u64,
    end: &'static [u8],
    /// Whether a block could not be written: then no more are.
    has_failed: bool,
    /// If there is one, all is written to it, and it replaces this file when it is complete.
    replacement: Option<Replacement>,
}

impl TimelineFile {
    /// Opens a file, or creates it. Its old contents stay until the first block is written.
    pub(crate) fn create(path: &Path, messages: &Messages) -> Result<TimelineFile, Failure> {
        Ok(TimelineFile {
            file: OutputFile::create(path, messages)?,
            len: 0,
            end: b"",
            has_failed: false,
            replacement: None,
        })
    }

    /// From now on, writes to another file, which replaces this one once it is finished, if that is possible.
    ///
    /// # Errors
    ///
    /// If there is no room for it.
    pub(crate) fn replace(&mut self) -> Result<(), Failure> {
        if self.file.is_regular() {
            let begun = Replacement::begin(self.path());
            self.replacement = begun.map_err(|error| self.give_up_replacement(error))?;
        }
        Ok(())
    }

    /// Removes the replacement, which could not be written. This file is unchanged.
    fn give_up_replacement(&mut self, error: io::Error) -> Failure {
        self.has_failed = true;
        self.replacement = None;
        (self.len, self.end) = (0, b"");
        Failure::KeptFile(self.path().to_owned(), error)
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
        self.file.path()
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
            return written.map_err(|error| self.give_up_replacement(error));
        }
        self.file.keep();
        let is_regular = self.file.is_regular();
        let written = if is_regular {
            block.extend(end);
            self.write_over(block)
        } else {
            self.write_pieces(block)
        };
        block.clear();
        if let Err(error) = written {
            self.has_failed = true;
            if is_regular {
                // The end was there before, so the disk has room for it.
                let file = self.file.file();
                let _ = file.write_all_at(self.end, self.len);
                let _ = file.set_len(self.len + self.end.len() as u64);
            }
            return Err(Failure::CutFile(self.path().to_owned(), self.len(), error));
        }
        self.len += len;
        if is_regular {
            self.end = end;
        }
        Ok(())
    }

    /// Writes the end of a file whose end cannot be written over, or that replaces another.
    pub(crate) fn finish(&mut self, end: &'static [u8]) -> Result<(), Failure> {
        if let Some(mut replacement) = self.replacement.take() {
            self.end = end;
            let written = replacement.write(end).and_then(|()| replacement.finish());
            written.map_err(|error| self.give_up_replacement(error))?;
            self.file.keep();
            return Ok(());
        }
        if self.file.is_regular() || self.has_failed {
            return Ok(());
        }
        self.end = end;
        let written = self.write_pieces(end);
        written.map_err(|error| Failure::CutFile(self.path().to_owned(), self.len, error))
    }

    /// Writes to a pipe. Waits at most [`MAX_WAIT_FOR_ROOM`] for its reader: termination signals are blocked, so nothing
    /// else would end the wait.
    fn write_pieces(&mut self, block: &[u8]) -> io::Result<()> {
        for piece in block.chunks(PIPE_BUF) {
            if !self.has_room() {
                let seconds = MAX_WAIT_FOR_ROOM.as_secs();
                let why = format!("its reader has read nothing for {seconds} s");
                return Err(io::Error::new(ErrorKind::TimedOut, why));
            }
            self.file.file().write_all(piece)?;
        }
        Ok(())
    }

    /// Waits until there is room for [`PIPE_BUF`] bytes; returns whether there is. Waits twice: if job control has stopped
    /// this process and the reader, the first wait is over once both go on, and the reader has had no time to read.
    fn has_room(&self) -> bool {
        let wait = || {
            is_writable_until(
                self.file.file().as_fd(),
                Instant::now() + MAX_WAIT_FOR_ROOM / 2,
            )
        };
        wait() || wait()
    }

    fn write_over(&mut self, block: &[u8]) -> io::Result<()> {
        let file = self.file.file();
        if self.len == 0 {
            file.set_len(0)?;
        }
        file.write_all_at(block, self.len)
    }
}
