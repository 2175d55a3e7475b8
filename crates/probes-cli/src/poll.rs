//! Waits with poll(2): how long, and whether something can be written without waiting.

use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

/// The most that one write(2) to a pipe writes as a whole, pipe(7).
pub(crate) const PIPE_BUF: usize = 4096;

/// Returns whether [`PIPE_BUF`] bytes can be written without waiting: poll(2) reports a pipe as writable only if it
/// has room for that many.
pub(crate) fn is_writable(output: BorrowedFd<'_>) -> bool {
    is_writable_until(output, Instant::now())
}

/// Same as [`is_writable`], and waits for that until `deadline`.
pub(crate) fn is_writable_until(output: BorrowedFd<'_>, deadline: Instant) -> bool {
    loop {
        let mut fds = [PollFd::new(output, PollFlags::POLLOUT)];
        let left = deadline.saturating_duration_since(Instant::now());
        match poll(&mut fds, poll_timeout(left)) {
            // Job control has stopped and resumed this process.
            Err(Errno::EINTR) if !left.is_zero() => {}
            ready => return ready == Ok(1),
        }
    }
}

/// Rounded up, so that poll(2) is not called again and again in the last millisecond.
pub(crate) fn poll_timeout(left: Duration) -> PollTimeout {
    let timeout = left.saturating_add(Duration::from_micros(999));
    PollTimeout::try_from(timeout).unwrap_or(PollTimeout::MAX)
}
