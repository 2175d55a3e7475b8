//! Waits with poll(2): how long, and whether something can be written without waiting.

use std::io::{self, ErrorKind, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

/// The most that one write(2) to a pipe writes as a whole, pipe(7).
pub(crate) const PIPE_BUF: usize = 4096;

/// For how long a [`WaitingWriter`] waits until it tries again.
const WAIT_FOR_ROOM: Duration = Duration::from_secs(1);

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

/// Waits for room before it writes to a stream that does not block: another process that has it, too, has made it so.
pub(crate) struct WaitingWriter<W>(pub(crate) W);

impl<W: Write + AsFd> Write for WaitingWriter<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        loop {
            match self.0.write(bytes) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    is_writable_until(self.0.as_fd(), Instant::now() + WAIT_FOR_ROOM);
                }
                written => return written,
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

/// Rounded up, so that poll(2) is not called again and again in the last millisecond.
pub(crate) fn poll_timeout(left: Duration) -> PollTimeout {
    let timeout = left.saturating_add(Duration::from_micros(999));
    PollTimeout::try_from(timeout).unwrap_or(PollTimeout::MAX)
}
