//! The slots of a pair, each of which belongs to a thread, as offsets. Pure.

/// Slots of a pair.
pub(crate) const SLOTS: u64 = 1 << SLOT_BITS;
pub(crate) const SLOT_BITS: u32 = 10;
/// How many slots a thread tries, from the one that its hash selects. The table has this many extra
/// slots at its end, so that a thread need not wrap around.
pub(crate) const SLOTS_TRIED: u64 = 16;
/// Binary logarithm of the bytes of a slot.
pub(crate) const SLOT_LEN_BITS: u32 = 11;
pub(crate) const SLOT_LEN: u64 = 1 << SLOT_LEN_BITS;

/// The fields of a slot, eight bytes each.
pub(crate) mod slot {
    /// The thread that owns it: the address of its control block.
    pub(crate) const OWNER: u64 = 0;
    /// The id of its thread.
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
    /// Set in the depth of a start that a filter leaves out: so its stop does not end another one.
    pub(crate) const LEFT_OUT_BIT: u32 = 63;
    /// How many starts are kept, a power of two.
    pub(crate) const STARTS_KEPT: u64 = 64;
    /// Of each of these starts, four bytes each: its frame, as [`Frame`](crate::observe::frame::Frame) says, and the
    /// low half of its first argument.
    pub(crate) const MARKS: u64 = STARTS + STARTS_KEPT * 16;
    /// Stops that end a start after a later one in the same frame was ended: if their first arguments are not
    /// known, if these are the same number, and if that of the stop is the number of another start.
    pub(crate) const SAME_FRAME: u64 = MARKS + STARTS_KEPT * 8;
    pub(crate) const SAME_FRAME_OWN: u64 = SAME_FRAME + 8;
    pub(crate) const SAME_FRAME_OTHER: u64 = SAME_FRAME + 16;
    /// Stops whose first argument is not the number of the start that they end, but that of another start, or
    /// of none that is known.
    pub(crate) const OTHER_NUMBER: u64 = SAME_FRAME + 24;
    pub(crate) const UNKNOWN_NUMBER: u64 = SAME_FRAME + 32;
    /// Starts whose number is that of an earlier start, which no stop of this number has ended: numbers that
    /// distinguish events are not used twice.
    pub(crate) const REPEATED_NUMBER: u64 = SAME_FRAME + 40;
    /// Stops in the frame of another start that waits.
    pub(crate) const OTHER_FRAME: u64 = SAME_FRAME + 48;
    /// Stops while the start before the one that they end waits in the same frame, and may be theirs.
    pub(crate) const DOUBTFUL: u64 = SAME_FRAME + 56;
    /// The first arguments of the latest starts, four bytes each, at a place that the number selects.
    pub(crate) const NUMBERS: u64 = SAME_FRAME + 64;
    pub(crate) const NUMBERS_KEPT: u64 = 64;
    /// Of pairs by key: starts whose key was that of a start that waited, which they replace.
    pub(crate) const REPLACED_STARTS: u64 = NUMBERS + NUMBERS_KEPT * 4;
    /// Starts for which there was no room.
    pub(crate) const STARTS_WITHOUT_ROOM: u64 = REPLACED_STARTS + 8;
    /// Starts and stops for which an expression has no answer.
    pub(crate) const UNTYPED: u64 = REPLACED_STARTS + 16;
}
const _: () = assert!(slot::UNTYPED + 8 <= SLOT_LEN);
