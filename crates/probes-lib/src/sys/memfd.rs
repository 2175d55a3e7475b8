//! Files of no name, to be shared with a program that is started.

use std::fs::File;
use std::io;

use nix::sys::memfd::{MFdFlags, memfd_create};

/// An empty one, that no program inherits unless it is meant to.
pub(crate) fn create() -> io::Result<File> {
    Ok(memfd_create(c"ocaml-probes", MFdFlags::MFD_CLOEXEC)?.into())
}
