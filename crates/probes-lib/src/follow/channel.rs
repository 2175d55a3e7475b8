//! The queue of events between a tracer thread and the user of its handle.
//!
//! ```text
//! EventSender (tracer thread)              EventReceiver (user)
//! send     ──▶ event, event, event ──▶     next
//!              eventfd, readable while     poll(2), epoll(7)
//!              `next` should be called
//! end_is_requested                   ◀──   request_end
//! wait_until_all_are_done            ◀──   next, once more
//! drop     ──▶ closed                      is_drained
//! ```
//!
//! The queue is unbounded: `send` never waits for the user, as tracees may be waiting for the
//! tracer thread.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use nix::Result;
use nix::sys::eventfd::{EfdFlags, EventFd};

struct Channel<E> {
    state: Mutex<ChannelState<E>>,
    changed: Condvar,
    readable: EventFd,
}

struct ChannelState<E> {
    events: VecDeque<E>,
    /// Whether the eventfd `readable` is readable. Only a `next` that finds no event makes it
    /// unreadable. So it stays readable after the last event was returned, while the tracer thread
    /// waits in `wait_until_all_are_done` for one more `next`.
    is_readable: bool,
    is_closed: bool,
    end_is_requested: bool,
    /// How many events were sent.
    sent: u64,
    /// With how many the user is done: those that had been returned when `next` was called last.
    done: u64,
}

impl<E> Channel<E> {
    fn lock(&self) -> MutexGuard<'_, ChannelState<E>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the state, and wakes the threads that wait for a change.
    fn change(&self, change: impl FnOnce(&mut ChannelState<E>)) {
        change(&mut self.lock());
        self.changed.notify_all();
    }

    fn set_readable(&self, state: &mut ChannelState<E>, is_readable: bool) {
        if state.is_readable != is_readable {
            state.is_readable = is_readable;
            // Neither the write nor the read would block: the counter is 0 before the write, and 1
            // before the read.
            let _ = if is_readable {
                self.readable.write(1).map(drop)
            } else {
                self.readable.read().map(drop)
            };
        }
    }
}

/// The tracer thread's side. Dropping it closes the channel.
pub(crate) struct EventSender<E>(Arc<Channel<E>>);

/// The user's side. Dropping it asks the tracer thread to end.
pub(super) struct EventReceiver<E>(Arc<Channel<E>>);

/// Returns both sides of a new channel.
pub(super) fn channel<E>() -> Result<(EventSender<E>, EventReceiver<E>)> {
    let flags = EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK;
    let channel = Arc::new(Channel {
        state: Mutex::new(ChannelState {
            events: VecDeque::new(),
            is_readable: false,
            is_closed: false,
            end_is_requested: false,
            sent: 0,
            done: 0,
        }),
        changed: Condvar::new(),
        readable: EventFd::from_flags(flags)?,
    });
    Ok((EventSender(channel.clone()), EventReceiver(channel)))
}

impl<E> EventSender<E> {
    /// Queues an event.
    pub(crate) fn send(&self, event: E) {
        self.0.change(|state| {
            state.events.push_back(event);
            state.sent += 1;
            self.0.set_readable(state, true);
        });
    }

    /// Returns whether the user has asked the tracer thread to end.
    pub(crate) fn end_is_requested(&self) -> bool {
        self.0.lock().end_is_requested
    }

    /// Waits until the user is done with all events that were sent, or asks the tracer thread to end.
    pub(crate) fn wait_until_all_are_done(&self) {
        let waits =
            |state: &mut ChannelState<E>| state.done < state.sent && !state.end_is_requested;
        drop(self.0.changed.wait_while(self.0.lock(), waits));
    }
}

impl<E> Drop for EventSender<E> {
    fn drop(&mut self) {
        self.0.change(|state| {
            state.is_closed = true;
            self.0.set_readable(state, true);
        });
    }
}

impl<E> EventReceiver<E> {
    /// Returns the next event, as soon as there is one; `None` after `timeout`, or once the channel is
    /// closed and empty.
    pub(super) fn next(&self, timeout: Duration) -> Option<E> {
        self.0.change(|state| {
            state.done = state.sent - state.events.len() as u64;
            if state.events.is_empty() && !state.is_closed {
                self.0.set_readable(state, false);
            }
        });
        let waits = |state: &mut ChannelState<E>| state.events.is_empty() && !state.is_closed;
        let changed = &self.0.changed;
        let waited = changed.wait_timeout_while(self.0.lock(), timeout, waits);
        let (mut state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        state.events.pop_front()
    }

    /// Returns whether no event is left, and none will come.
    pub(super) fn is_drained(&self) -> bool {
        let state = self.0.lock();
        state.is_closed && state.events.is_empty()
    }

    /// Asks the tracer thread to end.
    pub(super) fn request_end(&self) {
        self.0.change(|state| state.end_is_requested = true);
    }
}

impl<E> Drop for EventReceiver<E> {
    fn drop(&mut self) {
        self.request_end();
    }
}

/// Readable for poll(2) from when an event is sent until `next` finds no event, and once the
/// channel is closed.
impl<E> AsFd for EventReceiver<E> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.readable.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

    use super::*;

    fn is_readable(receiver: &EventReceiver<u8>) -> bool {
        let mut fds = [PollFd::new(receiver.as_fd(), PollFlags::POLLIN)];
        poll(&mut fds, PollTimeout::ZERO).unwrap() > 0
    }

    #[test]
    fn descriptor_is_readable_until_next_finds_no_event() {
        let (sender, receiver) = channel().unwrap();
        assert!(!is_readable(&receiver));
        for event in [1, 2] {
            sender.send(event);
        }
        for event in [1, 2] {
            assert!(is_readable(&receiver));
            assert_eq!(receiver.next(Duration::ZERO), Some(event));
        }
        assert!(is_readable(&receiver));
        assert_eq!(receiver.next(Duration::ZERO), None);
        assert!(!is_readable(&receiver));
    }

    #[test]
    fn closed_channel_still_returns_its_events() {
        let (sender, receiver) = channel().unwrap();
        sender.send(1);
        drop(sender);
        assert!(!receiver.is_drained());
        assert_eq!(receiver.next(Duration::MAX), Some(1));
        for _ in 0..2 {
            assert!(receiver.is_drained() && is_readable(&receiver));
            assert_eq!(receiver.next(Duration::MAX), None);
        }
    }

    #[test]
    fn sender_waits_for_one_next_more_than_events() {
        let (sender, receiver) = channel().unwrap();
        sender.send(1);
        sender.send(2);
        let waiting = std::thread::spawn(move || {
            sender.wait_until_all_are_done();
            sender.send(3);
        });
        for event in [1, 2] {
            assert_eq!(receiver.next(Duration::MAX), Some(event));
            // If it did not wait, it would end in this time.
            std::thread::sleep(Duration::from_millis(20));
            assert!(!waiting.is_finished() && is_readable(&receiver));
        }
        assert_eq!(receiver.next(Duration::MAX), Some(3));
        waiting.join().unwrap();
    }

    #[test]
    fn sender_does_not_wait_when_asked_to_end() {
        for is_dropped in [false, true] {
            let (sender, receiver) = channel::<u8>().unwrap();
            assert!(!sender.end_is_requested());
            if is_dropped {
                drop(receiver);
            } else {
                receiver.request_end();
            }
            sender.wait_until_all_are_done();
            assert!(sender.end_is_requested());
        }
    }
}
