//! The line on the terminal that shows progress: written again and again, and erased before a message.

use std::io::{Write, stderr};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};

use ratatui::crossterm::terminal::window_size;

use crate::poll::is_writable;
use crate::text::beginning;

/// Whether the line is on the terminal.
static IS_SHOWN: AtomicBool = AtomicBool::new(false);

/// Writes the line in place of the one before it.
pub(crate) fn replace(line: &str) {
    IS_SHOWN.store(true, Ordering::Relaxed);
    // A line that is wrapped, by itself or by a `^C` after it, would stay when the next one is written. A size of 0 means
    // that it is unknown.
    let columns = window_size().map_or(0, |size| usize::from(size.columns));
    match columns {
        0 => write(line),
        _ => write(beginning(line, columns.saturating_sub(3))),
    }
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
    let mut terminal = stderr();
    // Progress waits for nothing: a user may have stopped the terminal's output, by Ctrl-S.
    if is_writable(terminal.as_fd()) {
        // An error means that the terminal is gone.
        let _ = write!(terminal, "\r{line}{ERASE_TO_END}");
    }
}
