//! Groups of threads.

/// Groups of threads: each has counters, histograms and a ring of its own, so that threads do not
/// contend for cache lines.
pub(crate) const GROUPS: usize = 1 << GROUP_BITS;
pub(crate) const GROUP_BITS: u32 = 4;
