//! [`Shared`]: the data that all sites of an observation share, as offsets. Pure.
//!
//! ```text
//! header   64 bytes: where in its control block a thread has its id, until when pages are believed
//! pairs    of each: a header, a slot for each thread, a histogram for each group of threads
//! rings    one for each group of threads: how many records were begun, and the last of them
//! pages    which pages may be read
//! ```
//!
//! A slot belongs to one thread, which alone writes there; what several threads write is locked.

use crate::observe::layout::arena::GROUPS;

/// Kept at the beginning of each part.
pub(crate) const HEADER_LEN: u64 = 64;

/// Where in the header the offset from `fs` of the thread's id is, four bytes.
pub(crate) const TID_AT: u64 = 0;

/// Where in the header it is until when the table of pages is to be believed, in ticks: whoever keeps it
/// up to date may be killed.
pub(crate) const PAGES_VALID_UNTIL: u64 = 8;

/// More pairs than anybody looks at.
pub(crate) const MAX_PAIRS: u32 = 64;

/// Slots of a pair.
pub(crate) const SLOTS: u64 = 1 << SLOT_BITS;
pub(crate) const SLOT_BITS: u32 = 10;
/// How many slots from its own on a thread may have, so that there are more by as many.
pub(crate) const SEEK: u64 = 16;
/// Binary logarithm of the bytes of a slot.
pub(crate) const SLOT_LEN_BITS: u32 = 11;
pub(crate) const SLOT_LEN: u64 = 1 << SLOT_LEN_BITS;

/// What a slot holds, eight bytes each.
pub(crate) mod slot {
    /// Whose it is: where the control block of its thread is.
    pub(crate) const OWNER: u64 = 0;
    /// The id of its thread.
    pub(crate) const TID: u64 = 8;
    /// How many starts wait for their stop.
    pub(crate) const DEPTH: u64 = 16;
    /// Starts that threads of the same block have left behind.
    pub(crate) const LEFT: u64 = 24;
    /// Stops without a start.
    pub(crate) const STOPS: u64 = 32;
    /// Stops whose start had been given up, as too many came after it.
    pub(crate) const DEEP: u64 = 40;
    /// All times together, in ticks.
    pub(crate) const SUM: u64 = 48;
    /// The longest, in ticks.
    pub(crate) const MAX: u64 = 56;
    /// The starts that wait, the last ones of them: of each how deep it is, and when it was.
    pub(crate) const STARTS: u64 = 64;
    /// How many of them are kept, a power of two.
    pub(crate) const ROOM: u64 = 64;
    /// Binary logarithm of the bytes of each.
    pub(crate) const START_LEN_BITS: u32 = 4;
}

/// In the header of a pair: stops of threads for which there was no slot.
pub(crate) const SLOT_OVERFLOWS: u64 = 0;

/// Times are told apart by so many bits from the first that is set: to a thousandth.
pub(crate) const PRECISION: u32 = 9;
/// Longer times than 2 to this, in ticks, are counted as that.
pub(crate) const LONGEST_BITS: u32 = 48;
pub(crate) const BUCKETS: u64 = ((LONGEST_BITS - PRECISION + 1) as u64) << PRECISION;
pub(crate) const HISTOGRAM_LEN: u64 = BUCKETS * 8;

const SLOTS_AT: u64 = HEADER_LEN;
const HISTOGRAMS_AT: u64 = SLOTS_AT + (SLOTS + SEEK) * SLOT_LEN;
pub(crate) const PAIR_LEN: u64 = HISTOGRAMS_AT + GROUPS as u64 * HISTOGRAM_LEN;

/// About how much a ring holds, in bytes.
const RING: u64 = 1 << 20;

/// What a record holds.
pub(crate) mod record {
    /// One more than its position in the ring, once it is complete.
    pub(crate) const NUMBER: u64 = 0;
    /// When it was, in ticks.
    pub(crate) const TIME: u64 = 8;
    /// The thread, and the index of the site: four bytes each.
    pub(crate) const TID: u64 = 16;
    pub(crate) const SITE: u64 = 20;
    /// Of each argument, a byte: 0 if it is no block that can be read, else one more than how many
    /// words of it were copied.
    pub(crate) const COPIED: u64 = 24;
    pub(crate) const ARGUMENTS: u64 = 32;

    /// Of an argument: its value, the header of its block, and the beginning of that.
    pub(crate) const VALUE: u64 = 0;
    pub(crate) const BLOCK: u64 = 8;
    pub(crate) const COPY: u64 = 16;
    /// In words: one more than is watched, for the end of a string that just fits.
    pub(crate) const COPY_WORDS: u64 = 9;
    pub(crate) const ARGUMENT_LEN: u64 = COPY + COPY_WORDS * 8;

    /// Of one with so many arguments, in bytes.
    pub(crate) fn len(arguments: usize) -> u32 {
        let len = ARGUMENTS + ARGUMENT_LEN * arguments as u64;
        len.next_multiple_of(64) as u32
    }
}

/// What is shared, and where.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Shared {
    pub(crate) pairs: u32,
    /// The bytes of a record; 0 if no hits are watched.
    pub(crate) record_len: u32,
}

impl Shared {
    /// Whether numbers that were read from a process can be those of one.
    pub(crate) fn is_possible(self) -> bool {
        let longest = record::len(crate::observe::plan::MOST_ARGUMENTS);
        self.pairs <= MAX_PAIRS && self.record_len <= longest && self.record_len % 64 == 0
    }

    pub(crate) fn is_empty(self) -> bool {
        self == Shared::default()
    }

    pub(crate) fn pair(self, index: u32) -> u64 {
        HEADER_LEN + PAIR_LEN * u64::from(index)
    }

    pub(crate) fn slots(self, pair: u32) -> u64 {
        self.pair(pair) + SLOTS_AT
    }

    pub(crate) fn histograms(self, pair: u32) -> u64 {
        self.pair(pair) + HISTOGRAMS_AT
    }

    /// How many records a ring holds, a power of two.
    pub(crate) fn records(self) -> u64 {
        let fit = RING / u64::from(self.record_len.max(64));
        1 << fit.ilog2()
    }

    pub(crate) fn ring_len(self) -> u64 {
        match self.record_len {
            0 => 0,
            len => HEADER_LEN + self.records() * u64::from(len),
        }
    }

    pub(crate) fn ring(self, group: usize) -> u64 {
        self.pair(self.pairs) + self.ring_len() * group as u64
    }

    /// Where it is told which pages may be read.
    pub(crate) fn pages(self) -> u64 {
        self.ring(GROUPS)
    }

    /// In bytes.
    pub(crate) fn len(self) -> u64 {
        match (self.is_empty(), self.record_len) {
            (true, _) => 0,
            (_, 0) => self.pages(),
            _ => self.pages() + super::readable_pages::LEN,
        }
    }
}

/// The bucket of a time, as the trampolines find it.
#[cfg(test)]
pub(crate) fn bucket(ticks: u64) -> u64 {
    let ticks = ticks.min((1 << LONGEST_BITS) - 1);
    let shift = (ticks | 1 << PRECISION).ilog2() - PRECISION;
    (u64::from(shift) << PRECISION) + (ticks >> shift)
}

/// The times that a bucket stands for: the least, and how many.
pub(crate) fn times_of(bucket: u64) -> (u64, u64) {
    let shift = (bucket >> PRECISION).saturating_sub(1);
    let top = bucket - (shift << PRECISION);
    (top << shift, 1 << shift)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_cover_all_times_without_a_gap() {
        let mut next = 0;
        for index in 0..BUCKETS {
            let (least, many) = times_of(index);
            assert_eq!(least, next);
            assert_eq!((bucket(least), bucket(least + many - 1)), (index, index));
            assert!(many == 1 || least / many >= 1 << PRECISION);
            next = least + many;
        }
        assert_eq!(next, 1 << LONGEST_BITS);
        assert_eq!(bucket(u64::MAX), BUCKETS - 1);
    }

    #[test]
    fn parts_follow_each_other() {
        assert_eq!(Shared::default().len(), 0);
        for arguments in 0..=6 {
            let record_len = record::len(arguments);
            let shared = Shared {
                pairs: 3,
                record_len,
            };
            assert!(shared.is_possible());
            assert!(shared.slots(2) > shared.pair(2) && shared.histograms(2) > shared.slots(2));
            assert_eq!(shared.pair(3), shared.ring(0));
            assert!(shared.ring(1) - shared.ring(0) <= RING + HEADER_LEN);
            assert!(shared.len() > shared.pages() && shared.len() < 1 << 31);
        }
    }
}
