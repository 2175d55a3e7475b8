//! Shows the progress of long work on a terminal, and nothing elsewhere.

use std::io::{IsTerminal, stderr};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use nix::sys::signal::{SigSet, SigmaskHow};

use crate::messages::Messages;
use crate::status_line;

/// The least time between two lines.
const INTERVAL: Duration = Duration::from_millis(200);

/// How long work goes on before it is shown; most work is done by then.
const DELAY: Duration = Duration::from_millis(500);

/// A line on standard error that is rewritten again and again, and erased when this is dropped.
///
/// indicatif is not used: version 0.18 fills the line with spaces, so that the `^C` of a terminal is written on the
/// next line, and clears only that one.
#[derive(Debug)]
pub(crate) struct Progress {
    written_at: Option<Instant>,
}

impl Progress {
    /// `None` if standard error is no terminal, or messages are only errors (`-quiet`) or JSON.
    pub(crate) fn begin(messages: &Messages) -> Option<Progress> {
        let is_shown = messages.may_show_progress() && stderr().is_terminal();
        is_shown.then_some(Progress { written_at: None })
    }

    /// Replaces the line, unless it is recent.
    pub(crate) fn update(&mut self, line: &str) {
        self.update_by(|| line.to_owned());
    }

    /// Same as [`Progress::update`]; the line is made only if it is needed.
    pub(crate) fn update_by(&mut self, line: impl FnOnce() -> String) {
        if self.written_at.is_some_and(|it| it.elapsed() < INTERVAL) {
            return;
        }
        self.written_at = Some(Instant::now());
        status_line::replace(&line());
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        status_line::erase();
    }
}

/// Work whose progress is unknown: a line says how long it has taken.
#[derive(Debug)]
pub(crate) struct LongWork {
    /// Dropped to end the thread.
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl LongWork {
    /// Shows how long it takes until this is dropped. `None` where nothing is shown.
    pub(crate) fn begin(what: String, messages: &Messages) -> Option<LongWork> {
        let mut progress = Progress::begin(messages)?;
        let (stop, stopped) = channel();
        let begun = Instant::now();
        // The new thread blocks signals: they are for the thread that works, which may have blocked them.
        let before = SigSet::all().thread_swap_mask(SigmaskHow::SIG_BLOCK).ok()?;
        let thread = Builder::new().spawn(move || {
            let mut wait = DELAY;
            while let Err(RecvTimeoutError::Timeout) = stopped.recv_timeout(wait) {
                wait = INTERVAL;
                let seconds = begun.elapsed().as_secs_f64();
                progress.update(&format!("{what}: {seconds:.1} s"));
            }
        });
        // Cannot fail: this was the thread's mask before.
        let _ = before.thread_set_mask();
        Some(LongWork {
            stop: Some(stop),
            // Without a thread, nothing is shown.
            thread: Some(thread.ok()?),
        })
    }
}

impl Drop for LongWork {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // The thread does not panic.
            let _ = thread.join();
        }
    }
}
