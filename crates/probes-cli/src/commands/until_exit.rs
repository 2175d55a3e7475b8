//! How `trace` and `record` observe a program that they start: one thread waits for it, as the shell expects, and
//! another reads what is recorded.

use std::io;
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Mutex, PoisonError};
use std::thread::ScopedJoinHandle;

use nix::sys::signal::{Signal, kill};
use nix::unistd::getpid;
use probes_lib::Launched;

use super::wait::Wait;
use crate::failure::Failure;

/// Waits for the program in this thread, and calls `record` in another, or after the wait if there can be no other. The
/// channel that `record` is passed is disconnected once the program has exited. Returns the program's status, and what
/// `record` has returned.
pub(super) fn wait_and_record(
    launched: Launched,
    wait: Wait,
    record: impl FnOnce(&Receiver<()>) -> Result<(), Failure> + Send,
) -> (io::Result<u8>, Result<(), Failure>) {
    let (exit_sender, exited) = channel::<()>();
    let parts = Mutex::new(Some((record, exited)));
    let record = || match parts.lock().unwrap_or_else(PoisonError::into_inner).take() {
        Some((record, exited)) => {
            let recorded = record(&exited);
            // While the removal traced the program, the waiting thread learned nothing of its stops: now it looks
            // again.
            let _ = kill(getpid(), Signal::SIGCHLD);
            recorded
        }
        None => Ok(()),
    };
    std::thread::scope(|scope| {
        let recording = std::thread::Builder::new().spawn_scoped(scope, record);
        let status = wait.until_exit(launched);
        drop(exit_sender);
        let recorded = match recording.map(ScopedJoinHandle::join) {
            Ok(Ok(recorded)) => recorded,
            Ok(Err(panic)) => std::panic::resume_unwind(panic),
            // There can be no thread for it: what the program has left is read now.
            Err(_) => record(),
        };
        (status, recorded)
    })
}
