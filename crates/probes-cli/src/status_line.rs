//! The line on the terminal that shows progress: written again and again, and erased before a message.

use std::io::{Write, stderr};
use std::sync::atomic::{AtomicBool, Ordering};

/// Whether the line is on the terminal.
static IS_SHOWN: AtomicBool = AtomicBool::new(false);

/// Writes the line in place of the one before it.
pub(crate) fn replace(line: &str) {
    IS_SHOWN.store(true, Ordering::Relaxed);
    write(line);
}

/// Erases the line, if there is one: something else is about to be written in its place.
pub(crate) fn erase() {
    if IS_SHOWN.swap(false, Ordering::Relaxed) {
        write("");
    }
}

/// Replaces the line, and what the terminal has written after it (`^C`).
fn write(line: &str) {
    const ERASE_TO_END: &str = "\x1b[K";
    // An error means that the terminal is gone.
    let _ = write!(stderr(), "\r{line}{ERASE_TO_END}");
}
