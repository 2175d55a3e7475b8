//! How far a profile is, on a terminal.

use std::io::{IsTerminal, Write, stderr};
use std::time::Duration;

/// How often it is written.
const INTERVAL: Duration = Duration::from_millis(200);

/// A line on standard error that is written again and again. It is gone when dropped.
#[derive(Debug)]
pub(super) struct Progress {
    all: Option<Duration>,
    written: Option<Duration>,
}

impl Progress {
    /// Begins to show how much of `all` the time is over, or how much time if there is no end; `None` if standard error is no terminal.
    pub(super) fn begin(all: Option<Duration>) -> Option<Progress> {
        let written = None;
        stderr().is_terminal().then_some(Progress { all, written })
    }

    /// Shows how long it has run, and how many samples there are.
    pub(super) fn update(&mut self, elapsed: Duration, samples: u64) {
        let is_recent = |written| elapsed < written + INTERVAL;
        if self.written.is_some_and(is_recent) {
            return;
        }
        self.written = Some(elapsed);
        let seconds = elapsed.as_secs_f64();
        let rest = match self.all {
            Some(all) => format!("of {} s, {samples} samples", all.as_secs_f64()),
            None => format!("s, {samples} samples; Ctrl-C ends it"),
        };
        write(&format!("profiling {seconds:.1} {rest}"));
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if self.written.is_some() {
            write("");
        }
    }
}

/// Replaces the line, also what the terminal has written behind it (`^C`).
fn write(line: &str) {
    const ERASE_TO_END: &str = "\x1b[K";
    // If the terminal is gone, nobody looks at it.
    let _ = write!(stderr(), "\r{line}{ERASE_TO_END}");
}
