//! The slots of a pair, each of which belongs to a thread, as offsets. Pure.

/// The number of slots of a pair.
pub(crate) const SLOTS: u64 = 1 << SLOT_BITS;
pub(crate) const SLOT_BITS: u32 = 10;
/// How many slots a thread tries, from the one that its hash selects. The table has this many extra
/// slots at its end, so that the search need not wrap around.
pub(crate) const SLOTS_TRIED: u64 = 16;
/// Binary logarithm of the bytes of a slot.
pub(crate) const SLOT_LEN_BITS: u32 = 11;
pub(crate) const SLOT_LEN: u64 = 1 << SLOT_LEN_BITS;

/// The fields of a slot, eight bytes each unless they say otherwise.
pub(crate) mod slot {
    /// The thread that owns it: the address of its control block.
    pub(crate) const OWNER: u64 = 0;
    /// The thread id of the owner: a later thread may have the same control block.
    pub(crate) const TID: u64 = 8;
    /// How many starts wait for their stop.
    pub(crate) const DEPTH: u64 = 16;
    /// How many starts of earlier threads with the same control block had no stop.
    pub(crate) const ABANDONED_STARTS: u64 = 24;
    /// Stops without a start.
    pub(crate) const UNMATCHED_STOPS: u64 = 32;
    /// Stops whose start was overwritten, because too many other starts came after it.
    pub(crate) const OVERWRITTEN_STARTS: u64 = 40;
    /// The sum of all times, in ticks.
    pub(crate) const SUM: u64 = 48;
    /// The longest time, in ticks.
    pub(crate) const MAX: u64 = 56;
    /// The innermost starts that wait for their stop; each entry is a depth and a time.
    pub(crate) const STARTS: u64 = 64;
    /// Set in the depth of a start that a filter leaves out, and that is kept so that its stop does not end another.
    pub(crate) const LEFT_OUT_BIT: u32 = 63;
    /// How many starts are kept, a power of two.
    pub(crate) const STARTS_KEPT: u64 = 64;
    /// For each of these starts, its frame ([`FrameId`](crate::observe::frame_id::FrameId)) and the low half of its
    /// first argument, four bytes each.
    pub(crate) const MARKS: u64 = STARTS + STARTS_KEPT * 16;
    /// Stops that end a start after a later start in the same frame was ended, if numbers do not tell which start is
    /// theirs. A number is a first argument that is an OCaml int.
    pub(crate) const SAME_FRAME: u64 = MARKS + STARTS_KEPT * 8;
    /// The same, if the number of the stop is that of the start that it ends.
    pub(crate) const SAME_FRAME_OWN: u64 = SAME_FRAME + 8;
    /// The same, if the number of the stop is that of another start.
    pub(crate) const SAME_FRAME_OTHER: u64 = SAME_FRAME + 16;
    /// Stops whose number is that of another start than the one that they end, unless their frame shows that this one
    /// is theirs.
    pub(crate) const OTHER_NUMBER: u64 = SAME_FRAME + 24;
    /// The same, if the number of the stop is that of no start in [`NUMBERS`].
    pub(crate) const UNKNOWN_NUMBER: u64 = SAME_FRAME + 32;
    /// Starts with the number of an earlier start, if no stop with this number has ended that one: numbers that
    /// distinguish events are not used twice.
    pub(crate) const REPEATED_NUMBER: u64 = SAME_FRAME + 40;
    /// Stops in the frame of an earlier start that waits, if that frame is not a caller of the last start's frame.
    pub(crate) const OTHER_FRAME: u64 = SAME_FRAME + 48;
    /// Stops that may belong to the start before the one that they end, because that start waits in the frame of the
    /// ended one, or of the stop.
    pub(crate) const DOUBTFUL: u64 = SAME_FRAME + 56;
    /// The first arguments of the latest starts, four bytes each, at a place that the number selects.
    pub(crate) const NUMBERS: u64 = SAME_FRAME + 64;
    pub(crate) const NUMBERS_KEPT: u64 = 64;
    /// Of pairs by key: starts that replaced one of the same key that waited.
    pub(crate) const REPLACED_STARTS: u64 = NUMBERS + NUMBERS_KEPT * 4;
    /// Of pairs by key: starts for which the bucket of their key had no free slot.
    pub(crate) const STARTS_WITHOUT_ROOM: u64 = REPLACED_STARTS + 8;
    /// Starts and stops for which an expression has no answer.
    pub(crate) const UNTYPED: u64 = REPLACED_STARTS + 16;
    /// How many of the starts in [`DEPTH`] and [`ABANDONED_STARTS`] a filter leaves out, as far as they are not
    /// overwritten.
    pub(crate) const LEFT_OUT: u64 = REPLACED_STARTS + 24;
    /// Stops whose number is not that of the start that they end, whatever else is known of them.
    pub(crate) const DIFFERENT_NUMBER: u64 = REPLACED_STARTS + 32;
    /// Stops that have no number, or whose start has none, though both have the argument that would be one.
    pub(crate) const NO_NUMBER: u64 = REPLACED_STARTS + 40;
    /// Of pairs by key: starts and stops that have no key.
    pub(crate) const WITHOUT_KEY: u64 = REPLACED_STARTS + 48;
}
const _: () = assert!(slot::WITHOUT_KEY + 8 <= SLOT_LEN);
