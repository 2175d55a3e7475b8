//! [`ReportFile`]: the file of `-svg`, and that of `profile -o`.

use std::io::Write;
use std::path::Path;

use crate::failure::Failure;
use crate::messages::Messages;
use crate::output_file::OutputFile;
use crate::replacement::Replacement;

/// A file for a picture, or for a profile in another format. It is opened before anything is observed, so that a path
/// that cannot be written fails at once. An existing file keeps its contents until there is a new picture.
pub(super) struct ReportFile(OutputFile);

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
        OutputFile::create(path, messages).map(ReportFile)
    }

    /// Writes the picture. If that fails, an existing file is as it was before, if it can be replaced as a whole.
    pub(super) fn write(self, picture: impl AsRef<[u8]>) -> Result<(), Failure> {
        let picture = picture.as_ref();
        let is_replaced = self.is_replaced_by(picture)?;
        self.0.keep();
        if is_replaced {
            return Ok(());
        }
        let mut file = self.0.file();
        // A pipe or a terminal has no length.
        let _ = file.set_len(0);
        let written = file.write_all(picture);
        written.map_err(|error| Failure::WriteFile(self.0.path().to_owned(), error))
    }

    /// Replaces the file by another with the picture; returns false if it is no file that can be replaced.
    fn is_replaced_by(&self, picture: &[u8]) -> Result<bool, Failure> {
        if !self.0.is_regular() {
            return Ok(false);
        }
        let path = self.0.path();
        let replace = || {
            let Some(mut replacement) = Replacement::begin(path)? else {
                return Ok(false);
            };
            replacement.write(picture)?;
            replacement.finish()?;
            Ok(true)
        };
        replace().map_err(|error| {
            if self.0.is_new() {
                Failure::WriteFile(path.to_owned(), error)
            } else {
                Failure::KeptFile(path.to_owned(), error)
            }
        })
    }
}
