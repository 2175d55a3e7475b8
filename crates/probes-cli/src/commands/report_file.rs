//! [`ReportFile`]: the file of `-svg`, and that of `profile -o`.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

use crate::failure::Failure;

/// A file for a picture, or for a profile in another format. It is opened before anything is observed, so that a path that cannot be
/// written fails at once.
pub(super) struct ReportFile {
    path: PathBuf,
    file: File,
}

impl ReportFile {
    pub(super) fn create(path: &Path) -> Result<ReportFile, Failure> {
        let path = path.to_owned();
        // An existing file keeps its contents until there is a new picture.
        let mut file = OpenOptions::new();
        match file.write(true).create(true).truncate(false).open(&path) {
            Ok(file) => Ok(ReportFile { path, file }),
            Err(error) => Err(Failure::WriteFile(path, error)),
        }
    }

    pub(super) fn write(mut self, picture: impl AsRef<[u8]>) -> Result<(), Failure> {
        // A pipe or a terminal has no length.
        let _ = self.file.set_len(0);
        let written = self.file.write_all(picture.as_ref());
        written.map_err(|error| Failure::WriteFile(self.path, error))
    }
}
