//! [`StopTime`]: how long a process has been stopped by this tool, in all.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::numbers::nanoseconds;

/// A sum of durations, which its clones share.
#[derive(Clone, Debug, Default)]
pub(crate) struct StopTime(Arc<AtomicU64>);

impl StopTime {
    pub(crate) fn add(&self, duration: Duration) {
        self.0.fetch_add(nanoseconds(duration), Ordering::Relaxed);
    }

    pub(crate) fn total(&self) -> Duration {
        Duration::from_nanos(self.0.load(Ordering::Relaxed))
    }

    /// Returns what has been added since the total was `before`.
    pub(crate) fn since(&self, before: Duration) -> Duration {
        self.total().saturating_sub(before)
    }
}
