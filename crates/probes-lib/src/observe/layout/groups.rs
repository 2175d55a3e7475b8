//! Groups of threads: each has histograms, a table of keys and a ring of its own, so that threads rarely
//! contend for cache lines. Hits are counted in [rows](crate::observe::layout::rows) instead.

/// How many groups there are.
pub(crate) const GROUPS: usize = 1 << GROUP_BITS;
pub(crate) const GROUP_BITS: u32 = 4;
