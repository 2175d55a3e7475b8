//! [`WaitsReader`]: reads the waits of threads, with their stacks, beside what else is recorded. It has a thread of
//! its own, because a stack can be read only as long as the wait lasts.

use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::{Builder, JoinHandle};

use nix::sys::signal::SigSet;
use probes_lib::{Error, RecordedWait, WaitRecorder};

use crate::failure::Failure;

/// Waits that are read.
pub(super) struct WaitsReader {
    waits: Receiver<Vec<RecordedWait>>,
    /// Ends the thread when it is dropped.
    end: Sender<()>,
    thread: JoinHandle<WaitsEnd>,
}

/// What is known when no more waits are read.
pub(super) struct WaitsEnd {
    /// The waits that were not taken before; the last ones are parts.
    pub(super) rest: Vec<RecordedWait>,
    /// How many records of switches were lost.
    pub(super) lost: u64,
    /// How many processors have come online, where nothing was recorded.
    pub(super) unrecorded_processors: usize,
    /// Why the process could not be read any more, if it had not exited.
    pub(super) error: Option<Error>,
}

impl WaitsReader {
    /// Begins to record.
    ///
    /// # Errors
    ///
    /// If the waits of the process cannot be recorded.
    pub(super) fn begin(pid: i32) -> Result<WaitsReader, Failure> {
        let recorder = WaitRecorder::of_process(pid).map_err(Failure::of_process(pid))?;
        let (sender, waits) = channel();
        let (end, ended) = channel();
        let thread = Builder::new().spawn(move || {
            // Signals are for the thread that has begun this one.
            let _ = SigSet::all().thread_block();
            read_until(&ended, recorder, &sender)
        });
        let thread = thread.map_err(|source| Failure::System("start a thread", source))?;
        Ok(WaitsReader { waits, end, thread })
    }

    /// Returns the waits that have ended since the last call.
    pub(super) fn take(&self) -> impl Iterator<Item = RecordedWait> {
        self.waits.try_iter().flatten()
    }

    /// Returns whether no more waits are read: the process has exited, or cannot be read any more.
    pub(super) fn has_ended(&self) -> bool {
        self.thread.is_finished()
    }

    /// Ends the recording.
    pub(super) fn end(self) -> WaitsEnd {
        drop(self.end);
        let mut ended = match self.thread.join() {
            Ok(ended) => ended,
            Err(panic) => std::panic::resume_unwind(panic),
        };
        let mut waits: Vec<RecordedWait> = self.waits.try_iter().flatten().collect();
        waits.append(&mut ended.rest);
        WaitsEnd {
            rest: waits,
            ..ended
        }
    }
}

/// Reads waits until the recording is `ended`, or the process cannot be read any more.
fn read_until(
    ended: &Receiver<()>,
    mut recorder: WaitRecorder,
    to: &Sender<Vec<RecordedWait>>,
) -> WaitsEnd {
    let mut error = None;
    while let Err(RecvTimeoutError::Timeout) = ended.recv_timeout(recorder.pause()) {
        match recorder.read() {
            Ok(waits) if waits.is_empty() => {}
            // Fails only if the receiver is gone.
            Ok(waits) => drop(to.send(waits)),
            Err(source) => {
                error = Some(source).filter(|error| !error.is_gone());
                break;
            }
        }
    }
    WaitsEnd {
        rest: recorder.read_rest(),
        lost: recorder.lost(),
        unrecorded_processors: recorder.unrecorded_processors(),
        error,
    }
}
