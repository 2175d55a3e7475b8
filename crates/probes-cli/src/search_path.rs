//! Finds the file of a program that is named without a slash.

use std::env;
use std::path::{Path, PathBuf};

use nix::unistd::{AccessFlags, access};

/// Where the C library looks if there is no PATH.
const DEFAULT: &str = "/bin:/usr/bin";

/// The path of a program that was started: what is found in PATH, or the name itself.
pub(crate) fn path_of(program: &Path) -> PathBuf {
    look_up(program).unwrap_or_else(|| program.to_owned())
}

/// Whether a program is named with a slash, and so not looked up in PATH.
pub(crate) fn has_slash(program: &Path) -> bool {
    program.as_os_str().as_encoded_bytes().contains(&b'/')
}

/// Looks a program up in PATH, as execvp(3) does: a file that may not be executed is passed over. A path with a slash
/// is returned as it is.
pub(crate) fn look_up(program: &Path) -> Option<PathBuf> {
    if has_slash(program) {
        return Some(program.to_owned());
    }
    let directories = env::var_os("PATH").unwrap_or_else(|| DEFAULT.into());
    let mut files = env::split_paths(&directories).map(|directory| directory.join(program));
    files.find(|file| file.is_file() && access(file, AccessFlags::X_OK).is_ok())
}
