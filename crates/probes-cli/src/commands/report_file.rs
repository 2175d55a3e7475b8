//! [`ReportFile`]: the file of `-svg`, and that of `profile -o`.

use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};

use crate::failure::Failure;

/// A file for a picture, or for a profile in another format. It is opened before anything is observed, so that a path
/// that cannot be written fails at once.
pub(super) struct ReportFile {
    path: PathBuf,
    file: File,
    /// Whether we have made it, and it is empty.
    is_new: bool,
}

impl ReportFile {
    pub(super) fn create(path: &Path) -> Result<ReportFile, Failure> {
        let path = path.to_owned();
        // An existing file keeps its contents until there is a new picture.
        let mut file = OpenOptions::new();
        let file = file.write(true);
        let (file, is_new) = match file.clone().create_new(true).open(&path) {
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {
                (file.create(true).truncate(false).open(&path), false)
            }
            opened => (opened, true),
        };
        match file {
            Ok(file) => Ok(ReportFile { path, file, is_new }),
            Err(error) => Err(Failure::WriteFile(path, error)),
        }
    }

    pub(super) fn write(mut self, picture: impl AsRef<[u8]>) -> Result<(), Failure> {
        self.is_new = false;
        // A pipe or a terminal has no length.
        let _ = self.file.set_len(0);
        let written = self.file.write_all(picture.as_ref());
        written.map_err(|error| Failure::WriteFile(self.path.clone(), error))
    }
}

impl Drop for ReportFile {
    /// Without a picture, no new file is left.
    fn drop(&mut self) {
        if self.is_new {
            // It is empty; that it stays does no harm.
            let _ = fs::remove_file(&self.path);
        }
    }
}
