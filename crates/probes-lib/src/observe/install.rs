//! Installs an observation in a process, and removes it.

pub(crate) mod at_launch;
pub(crate) mod patch;
pub(crate) mod prepare;
pub(crate) mod remove;
mod tsc_access;

use crate::address::LiveAddr;
use crate::error::{Error, MemoryPart, Result};
use crate::inject::injector::Injector;
use crate::memory::WriteMemory;
use crate::trace::stopped::Stopped;

/// Writes into the code part of an arena.
fn write_code(
    injector: &Injector<'_>,
    stopped: &Stopped<'_>,
    at: LiveAddr,
    bytes: &[u8],
) -> Result<()> {
    let mut memory = stopped.memory(injector.memory)?;
    let written = memory.write_code(at, bytes);
    let pid = injector.process.pid();
    written.map_err(|source| Error::of_write(pid, MemoryPart::Trampoline, at, source))
}
