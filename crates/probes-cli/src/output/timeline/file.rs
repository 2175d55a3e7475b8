//! [`TimelineFile`]: the file that a time line is written to. It can be read at any moment, even after the disk is full
//! or the tool was killed.
//!
//! ```text
//! earlier blocks | end            the next write replaces the end by a block and the end
//! ```

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use crate::failure::Failure;

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
}

impl TimelineFile {
    /// Opens a file, or creates it. Its old contents stay until the first block is written.
    pub(crate) fn create(path: &Path) -> Result<TimelineFile, Failure> {
        let open = || {
            let mut options = OpenOptions::new();
            let file = options.write(true).create(true).truncate(false);
            let file = file.open(path)?;
            let is_regular = file.metadata()?.is_file();
            Ok((file, is_regular))
        };
        let (file, is_regular) =
            open().map_err(|error| Failure::WriteFile(path.to_owned(), error))?;
        Ok(TimelineFile {
            path: path.to_owned(),
            file,
            is_regular,
            len: 0,
            end: b"",
            has_failed: false,
        })
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

    /// Writes a block behind the earlier ones, and the `end` of the file behind it. Empties `block`.
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
        let written = if self.is_regular {
            block.extend(end);
            self.write_over(block)
        } else {
            self.file.write_all(block)
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

    /// Writes the end of a file that cannot be written over.
    pub(crate) fn finish(&mut self, end: &'static [u8]) -> Result<(), Failure> {
        if self.is_regular || self.has_failed {
            return Ok(());
        }
        self.end = end;
        let written = self.file.write_all(end);
        written.map_err(|error| Failure::CutFile(self.path.clone(), self.len, error))
    }

    fn write_over(&mut self, block: &[u8]) -> io::Result<()> {
        if self.len == 0 {
            self.file.set_len(0)?;
        }
        self.file.write_all_at(block, self.len)
    }
}
