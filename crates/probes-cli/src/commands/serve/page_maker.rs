//! [`PageMaker`]: the thread that makes pages. One of 20,000 rows takes so long that runtime events would be lost meanwhile.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Sender, channel};
use std::thread;
use std::time::Duration;

use hyper::body::Bytes;
use tokio::sync::oneshot;

use super::exposition::TextFormat;
use super::notifications::{Notification, NotificationSender};
use super::page::{ShownExporter, ShownProcess, page};
use crate::failure::Failure;

/// What a page shows, and who waits for it.
pub(super) struct PageRequest {
    pub(super) bounds: Vec<Duration>,
    pub(super) processes: Vec<ShownProcess>,
    pub(super) exporter: ShownExporter,
    pub(super) scrapes: Vec<(TextFormat, oneshot::Sender<Bytes>)>,
}

/// Makes pages until it is dropped.
pub(super) struct PageMaker(Sender<PageRequest>);

impl PageMaker {
    /// Starts the thread, which notifies of each page that is made.
    pub(super) fn start(notifications: NotificationSender) -> Result<PageMaker, Failure> {
        let (sender, requests) = channel();
        let make = move || {
            for request in requests {
                notifications.send(match catch_unwind(AssertUnwindSafe(|| answer(request))) {
                    Ok(()) => Notification::PageMade,
                    Err(panic) => Notification::Panicked(panic),
                });
            }
        };
        let started = thread::Builder::new().spawn(make);
        started.map_err(|source| Failure::System("start a thread", source))?;
        Ok(PageMaker(sender))
    }

    pub(super) fn make(&self, request: PageRequest) {
        // The thread ends when this is dropped.
        let _ = self.0.send(request);
    }
}

/// Makes a page of each format that is asked for.
fn answer(request: PageRequest) {
    let PageRequest {
        bounds,
        processes,
        exporter,
        scrapes,
    } = request;
    let mut pages: [Option<Bytes>; 2] = [None, None];
    for (format, reply) in scrapes {
        let page = pages[format as usize]
            .get_or_insert_with(|| page(format, &bounds, &processes, &exporter).into());
        // If the client has gone, it needs no answer.
        let _ = reply.send(page.clone());
    }
}
