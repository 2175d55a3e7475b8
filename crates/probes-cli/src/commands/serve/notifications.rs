//! What the other threads of `serve` (the scanner, the HTTP server and the one that makes pages) tell the main
//! thread, and how they wake it.

use std::any::Any;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use hyper::body::Bytes;
use nix::sys::eventfd::{EfdFlags, EventFd};
use probes_lib::RuntimeEvents;
use tokio::sync::oneshot;

use super::exposition::TextFormat;
use super::observed::Observed;
use crate::failure::Failure;

/// What has happened.
pub(super) enum Notification {
    /// A process is observed now.
    Observed(Box<Observed>),
    /// A process cannot be observed.
    Refused {
        pid: i32,
        program: String,
        failure: Failure,
    },
    /// Why selections are left out that an observed process does not have.
    Missing(i32, Vec<Failure>),
    /// The runtime events of a process that is observed can be read now.
    RuntimeEvents(i32, Box<RuntimeEvents>),
    /// The runtime events of a process that is observed cannot be read.
    NoRuntimeEvents(i32, Failure),
    /// A process that was looked at has exited or exec'd, or its pid was reused. Without effect while it is still
    /// observed: then, the next reading finds that out.
    Gone(i32),
    /// All processes that there are have been looked at; how long it took.
    Scanned(Duration),
    /// The scanner, or what makes pages, has panicked with this.
    Panicked(Box<dyn Any + Send>),
    /// A client asks for the page.
    Scrape {
        format: TextFormat,
        reply: oneshot::Sender<Bytes>,
    },
    /// The clients that waited for a page have it.
    PageMade,
}

/// Sends notifications, and wakes the thread that reads them.
#[derive(Clone)]
pub(super) struct NotificationSender {
    channel: Sender<Notification>,
    wake: Arc<EventFd>,
}

/// Receives notifications. Readable, as poll(2) says, if there may be some.
pub(super) struct NotificationReceiver {
    channel: Receiver<Notification>,
    wake: Arc<EventFd>,
}

/// Makes both ends.
pub(super) fn notifications() -> Result<(NotificationSender, NotificationReceiver), Failure> {
    let flags = EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK;
    let wake = EventFd::from_flags(flags)
        .map_err(|errno| Failure::System("make an event descriptor", errno.into()))?;
    let (wake, (sender, receiver)) = (Arc::new(wake), channel());
    let sender = NotificationSender {
        channel: sender,
        wake: wake.clone(),
    };
    let receiver = NotificationReceiver {
        channel: receiver,
        wake,
    };
    Ok((sender, receiver))
}

impl NotificationSender {
    /// Does nothing if the receiver is gone: then the command ends.
    pub(super) fn send(&self, notification: Notification) {
        if self.channel.send(notification).is_ok() {
            // It fails only if the counter is full, and then the receiver is awake anyway.
            let _ = self.wake.write(1);
        }
    }
}

impl NotificationReceiver {
    /// The next notification, if one has come. Those that nobody takes stay.
    pub(super) fn next(&self) -> Option<Notification> {
        // The eventfd is reset before the channel is read: a notification that is sent in between makes it readable
        // again, and is not missed.
        let _ = self.wake.read();
        self.channel.try_recv().ok()
    }
}

impl AsFd for NotificationReceiver {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }
}
