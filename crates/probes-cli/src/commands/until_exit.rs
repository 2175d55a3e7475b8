//! How `trace` and `record` observe a program that they start: one thread waits for it, as the shell expects, and
//! another reads what is recorded.

use std::io;
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::ScopedJoinHandle;

use nix::sys::signal::{Signal, kill};
use nix::unistd::getpid;
use probes_lib::Launched;

use super::wait::{Wait, lock};
use crate::failure::Failure;

/// What `record` gets from the thread that waits for the program.
pub(super) struct Waiter {
    /// Disconnected once the program has exited.
    pub exited: Receiver<()>,
    /// See [`Wait`].
    stop_lock: Arc<Mutex<()>>,
}

impl Waiter {
    /// Does `work` that may trace the program. If the program stops meanwhile, we stop only once the work is done:
    /// stopped earlier, we would leave the program in a ptrace-stop, from which SIGCONT does not wake it.
    pub(super) fn trace<T>(&self, work: impl FnOnce() -> T) -> T {
        let guard = lock(&self.stop_lock);
        let done = work();
        drop(guard);
        // The waiting thread has not seen the stops of the program meanwhile: makes it look again.
        let _ = kill(getpid(), Signal::SIGCHLD);
        done
    }
}

/// Waits for the program in this thread, and calls `record` in another, or after the wait if there can be no other.
/// Returns the program's status, and what `record` has returned.
pub(super) fn wait_and_record(
    launched: Launched,
    wait: Wait,
    record: impl FnOnce(&Waiter) -> Result<(), Failure> + Send,
) -> (io::Result<u8>, Result<(), Failure>) {
    let (exit_sender, exited) = channel::<()>();
    let stop_lock = wait.stop_lock();
    let parts = Mutex::new(Some((record, Waiter { exited, stop_lock })));
    let record = || match parts.lock().unwrap_or_else(PoisonError::into_inner).take() {
        Some((record, waiter)) => record(&waiter),
        None => Ok(()),
    };
    std::thread::scope(|scope| {
        let recording = std::thread::Builder::new().spawn_scoped(scope, record);
        let status = wait.until_exit(launched);
        drop(exit_sender);
        let recorded = match recording.map(ScopedJoinHandle::join) {
            Ok(Ok(recorded)) => recorded,
            Ok(Err(panic)) => std::panic::resume_unwind(panic),
            // The thread could not be started: what the program has left is read now.
            Err(_) => record(),
        };
        (status, recorded)
    })
}
