//! [`ReportFile`]: the file of `-svg`, and that of `profile -o`.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

use crate::destination::{open_or_create, remove_new};
use crate::failure::Failure;
use crate::messages::Messages;
use crate::replacement::Replacement;

/// A file for a picture, or for a profile in another format. It is opened before anything is observed, so that a path
/// that cannot be written fails at once.
pub(super) struct ReportFile {
    path: PathBuf,
    file: File,
    /// Whether we have made it, and it is empty.
    is_new: bool,
}

impl ReportFile {
    /// Creates the file of a flag, if that was given.
    pub(super) fn create_if_given(
        path: Option<&Path>,
        messages: &Messages,
    ) -> Result<Option<ReportFile>, Failure> {
        path.map(|path| ReportFile::create(path, messages))
            .transpose()
    }

    pub(super) fn create(path: &Path, messages: &Messages) -> Result<ReportFile, Failure> {
        let path = path.to_owned();
        // An existing file keeps its contents until there is a new picture.
        match open_or_create(&path, messages) {
            Ok((file, is_new)) => Ok(ReportFile { path, file, is_new }),
            Err(error) => Err(Failure::WriteFile(path, error)),
        }
    }

    /// Writes the picture. If that fails, an existing file is as it was before, if it can be replaced as a whole.
    pub(super) fn write(mut self, picture: impl AsRef<[u8]>) -> Result<(), Failure> {
        let picture = picture.as_ref();
        if self.is_replaced_by(picture)? {
            self.is_new = false;
            return Ok(());
        }
        self.is_new = false;
        // A pipe or a terminal has no length.
        let _ = self.file.set_len(0);
        let written = self.file.write_all(picture);
        written.map_err(|error| Failure::WriteFile(self.path.clone(), error))
    }

    /// Replaces the file by another with the picture; returns false if it is no file that can be replaced.
    fn is_replaced_by(&self, picture: &[u8]) -> Result<bool, Failure> {
        let replace = || {
            if !self.file.metadata()?.is_file() {
                return Ok(false);
            }
            let Some(mut replacement) = Replacement::begin(&self.path)? else {
                return Ok(false);
            };
            replacement.write(picture)?;
            replacement.finish()?;
            Ok(true)
        };
        replace().map_err(|error| {
            if self.is_new {
                Failure::WriteFile(self.path.clone(), error)
            } else {
                Failure::KeptFile(self.path.clone(), error)
            }
        })
    }
}

impl Drop for ReportFile {
    /// Without a picture, no new file is left.
    fn drop(&mut self) {
        if self.is_new {
            remove_new(&self.path, &self.file);
        }
    }
}
