//! Writes messages to standard error. While termination signals are blocked, a reader that does not read must not
//! keep the command from ending: after a second, messages are dropped, and counted.

use std::io::{Write, stderr};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::poll::{PIPE_BUF, WaitingWriter, is_writable, is_writable_until};

/// How long the first message waits for room.
const MAX_WAIT: Duration = Duration::from_secs(1);

/// Whether termination signals are blocked, so that nothing would interrupt a write that waits.
static SIGNALS_ARE_BLOCKED: AtomicBool = AtomicBool::new(false);

/// How many messages have been dropped since that was said last.
static DROPPED: AtomicU64 = AtomicU64::new(0);

/// Whether the last write ended within a line.
static IS_CUT: AtomicBool = AtomicBool::new(false);

/// Termination signals are blocked from now on, or are not any more.
pub(crate) fn set_signals_blocked(are_blocked: bool) {
    SIGNALS_ARE_BLOCKED.store(are_blocked, Ordering::Relaxed);
}

/// Writes the lines of a message, each with its newline. If earlier ones were dropped, and these can be written,
/// `line_of_dropped` says before them how many.
pub(crate) fn write_message(lines: &[String], line_of_dropped: impl FnOnce(u64) -> String) {
    let dropped = DROPPED.swap(0, Ordering::Relaxed);
    // Once a message was dropped, the next ones do not wait.
    let wait = if dropped > 0 {
        Duration::ZERO
    } else {
        MAX_WAIT
    };
    let deadline = Instant::now() + wait;
    if dropped > 0 && !write_line(&line_of_dropped(dropped), deadline) {
        let this_one = u64::from(!lines.is_empty());
        DROPPED.fetch_add(dropped + this_one, Ordering::Relaxed);
    } else if !lines.iter().all(|line| write_line(line, deadline)) {
        DROPPED.fetch_add(1, Ordering::Relaxed);
    }
}

/// Says how many messages were dropped, if any were, and there is room for that now.
pub(crate) fn say_dropped(line_of_dropped: impl FnOnce(u64) -> String) {
    if DROPPED.load(Ordering::Relaxed) > 0 && is_writable(stderr().as_fd()) {
        write_message(&[], line_of_dropped);
    }
}

/// Writes a line; returns false if there was no room for it until `deadline`.
fn write_line(line: &str, deadline: Instant) -> bool {
    let mut errors = stderr();
    let end_of_cut = if IS_CUT.swap(false, Ordering::Relaxed) {
        "\n"
    } else {
        ""
    };
    let line = format!("{end_of_cut}{line}");
    if !SIGNALS_ARE_BLOCKED.load(Ordering::Relaxed) {
        // One write for each line, because a traced program may write to the same place. If standard error is
        // closed, there is no place to report that.
        let _ = WaitingWriter(errors).write_all(line.as_bytes());
        return true;
    }
    for (index, piece) in line.as_bytes().chunks(PIPE_BUF).enumerate() {
        if !is_writable_until(errors.as_fd(), deadline) {
            let is_cut = index > 0 || !end_of_cut.is_empty();
            IS_CUT.store(is_cut, Ordering::Relaxed);
            return false;
        }
        let _ = errors.write_all(piece);
    }
    true
}
