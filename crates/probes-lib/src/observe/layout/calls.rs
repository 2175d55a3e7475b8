//! [`CallsLayout`]: the layout of the data about functions that are timed, as offsets. Pure functions only: no system
//! calls.
//!
//! ```text
//! functions   64 bytes each: what is counted of its calls (function_data)
//! slots       the calls that have not ended: one slot for each stack that functions are timed on (call_slot)
//! histograms  one for each function; if at most 64 are timed, several, one for each group of threads
//! ```
//!
//! A stack is that of a thread, or that of a fiber of OCaml 5. Only the thread that executes on it writes to its calls;
//! what several threads write is written by locked instructions.
//!
//! For self times, a call is twice as long, and two sums are before each histogram. If slow calls are reported, a call
//! is four times as long.
//!
//! If callers are distinguished, a table of callers follows (caller), and for each function a caller that stands for
//! all that found no room in the table.

use crate::address::PAGE;
use crate::observe::layout::histogram::{self, LONGEST_BITS};

/// The most functions that are timed at once.
pub(crate) const MAX_TIMED: usize = 1 << 14;

/// The fields of a function, eight bytes each.
pub(crate) mod function_data {
    /// Binary logarithm of the length of the data about a function, in bytes.
    pub(crate) const LEN_BITS: u32 = 6;
    pub(crate) const LEN: u64 = 1 << LEN_BITS;
    /// A bit for each octave of its histograms, the times from a power of two to the next: whether any was counted.
    pub(crate) const OCTAVES: u64 = 0;
    /// The longest time, in ticks.
    pub(crate) const MAX: u64 = 8;
    /// Calls whose frames have gone without an exit: an exception or longjmp(3) has unwound them.
    pub(crate) const UNWOUND: u64 = 16;
    /// Exits whose call is not recorded: it began before the observation, or was lost.
    pub(crate) const UNMATCHED: u64 = 24;
    /// Calls that were not recorded, and records that were dropped because another fiber has taken the slot.
    pub(crate) const LOST: u64 = 32;
    /// If self times are measured: calls that include a call whose time is not known.
    pub(crate) const DOUBTFUL: u64 = 40;
    /// Calls that a filter leaves out because it has no answer for them.
    pub(crate) const UNTYPED: u64 = 48;
    /// If there are several groups of threads, a bit for each that has counted a time.
    pub(crate) const GROUPS: u64 = 56;
}

/// The callers of functions. All that is counted there is written by locked instructions.
pub(crate) mod caller {
    pub(crate) const LEN_BITS: u32 = 6;
    pub(crate) const LEN: u64 = 1 << LEN_BITS;
    /// How many there is room for.
    pub(crate) const COUNT: u64 = 1 << COUNT_BITS;
    pub(crate) const COUNT_BITS: u32 = 13;
    /// How many rows are tried for a caller, from the one that the hash of its address selects.
    pub(crate) const TRIED: u64 = 16;

    /// The return address of its calls, in the bits below [`FUNCTION_AT`]; in those above, one more than the index of
    /// the function that it calls. Zero: free.
    pub(crate) const KEY: u64 = 0;
    pub(crate) const FUNCTION_AT: u32 = 48;
    /// How many of its calls have ended with an exit.
    pub(crate) const CALLS: u64 = 8;
    /// The sum of their times, and the longest, in ticks.
    pub(crate) const SUM: u64 = 16;
    pub(crate) const MAX: u64 = 24;
    /// If self times are measured: the sum of the times from entry to exit.
    pub(crate) const ALL: u64 = 32;
}
const _: () = assert!(MAX_TIMED < 1 << (64 - caller::FUNCTION_AT));

/// The two sums before each histogram of self times, eight bytes each.
pub(crate) mod sums {
    /// The sum of its times.
    pub(crate) const OWN: u64 = 0;
    /// The sum of the times from entry to exit.
    pub(crate) const ALL: u64 = 8;
    pub(crate) const LEN: u64 = 64;
}

/// The fields of a slot, which has the calls on one stack: eight bytes each.
pub(crate) mod call_slot {
    /// How many slots there are, besides the extra ones.
    pub(crate) const COUNT: u64 = 1 << COUNT_BITS;
    pub(crate) const COUNT_BITS: u32 = 10;
    /// How many slots are tried for a stack, from the one that its hash selects. The table has this many extra slots at
    /// its end, so that the search need not wrap around.
    pub(crate) const TRIED: u64 = 16;
    pub(crate) const ALL: u64 = COUNT + TRIED;

    /// Whose stack it is: the address of the thread's control block, or of a fiber, twice its number plus one. Zero:
    /// free.
    pub(crate) const OWNER: u64 = 0;
    /// The owner of a slot whose fiber has ended, while its calls are dropped. Not odd: no fiber takes the slot over.
    pub(crate) const OF_NONE: u64 = 2;
    /// How many calls have not ended.
    pub(crate) const DEPTH: u64 = 8;
    /// In the first slot, a bit for each four slots: whether one of them was ever taken. The others need not be read.
    pub(crate) const TAKEN: u64 = 16;
    pub(crate) const SLOTS_OF_BIT: u32 = 2;
    pub(crate) const TAKEN_LEN: u64 = CALLS - TAKEN;
    const _: () = assert!(ALL >> SLOTS_OF_BIT <= 8 * TAKEN_LEN);
    /// The calls, the innermost last.
    pub(crate) const CALLS: u64 = 64;
    /// How many calls of a stack are recorded. The slot has room for some more, which are not used.
    pub(crate) const MAX_CALLS: u32 = 500;

    /// The fields of a call: its frame, when it began (in ticks), its function (four bytes); of a call on a
    /// fiber only, the [`OWNER`] of the slot when it began, as another fiber may have taken the slot since.
    ///
    /// A frame is identified by the address of its return address, which is the stack pointer at the entry and at the
    /// exits; on a fiber, less the upper end of the stack, which moves when it grows. Zero: not yet written, or freed.
    pub(crate) const FRAME: u64 = 0;
    pub(crate) const TIME: u64 = 8;
    pub(crate) const FUNCTION: u64 = 16;
    pub(crate) const CALL_OWNER: u64 = 24;

    /// If self times are measured, or calls are filtered or have keys, four bytes: what has happened to the
    /// call, and from [`HISTOGRAM_AT`] on the number of the histogram of its key.
    pub(crate) const FLAGS: u64 = 20;
    /// The sum of the times of the calls that it has made, and when the last one ended.
    pub(crate) const CHILDREN: u64 = 32;
    pub(crate) const CHILD_ENDED: u64 = 40;
    /// If signal handlers that interrupted the trampoline before the record was complete have made calls: when the last
    /// of these ended. The call begins no earlier. Zero: none were made.
    pub(crate) const NOT_BEFORE: u64 = 48;

    /// If slow calls are reported, the arguments at the entry, eight bytes each.
    pub(crate) const ARGUMENTS: u64 = 64;

    /// It has made a call whose time is not known.
    pub(crate) const IS_DOUBTFUL: u32 = 1;
    /// A filter leaves it out: it is recorded so that its exit is known, and its time is not.
    pub(crate) const IS_LEFT_OUT: u32 = 2;
    pub(crate) const HISTOGRAM_AT: u32 = 16;
}

/// Which functions are timed, and where the data of each are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct CallsLayout {
    pub(crate) functions: u32,
    /// Whether self times are counted in the histograms.
    pub(crate) of_self: bool,
    /// Whether the callers of each function are distinguished.
    pub(crate) by_caller: bool,
    /// Whether calls have their arguments, because slow ones are reported.
    pub(crate) keeps_arguments: bool,
}

/// Bits in the number of a layout: it has self times, callers, or arguments.
const OF_SELF: u32 = 1 << 16;
const BY_CALLER: u32 = 1 << 17;
const KEEPS_ARGUMENTS: u32 = 1 << 18;

impl CallsLayout {
    /// Returns whether it can be one of ours: its numbers may have been read from a process.
    pub(crate) fn is_possible(self) -> bool {
        self.functions as usize <= MAX_TIMED
    }

    /// Returns the layout that has this number; see [`CallsLayout::number`].
    pub(crate) const fn of_number(number: u32) -> CallsLayout {
        CallsLayout {
            functions: number & !(OF_SELF | BY_CALLER | KEEPS_ARGUMENTS),
            of_self: number & OF_SELF != 0,
            by_caller: number & BY_CALLER != 0,
            keeps_arguments: number & KEEPS_ARGUMENTS != 0,
        }
    }

    /// Returns a number that encodes the layout.
    pub(crate) fn number(self) -> u32 {
        let of_self = if self.of_self { OF_SELF } else { 0 };
        let by_caller = if self.by_caller { BY_CALLER } else { 0 };
        let arguments = if self.keeps_arguments {
            KEEPS_ARGUMENTS
        } else {
            0
        };
        self.functions | of_self | by_caller | arguments
    }

    /// Returns the binary logarithm of the length of a call in bytes.
    pub(crate) fn call_len_bits(self) -> u32 {
        if self.keeps_arguments {
            7
        } else if self.of_self {
            6
        } else {
            5
        }
    }

    /// Returns the binary logarithm of the length of a slot in bytes.
    pub(crate) fn slot_len_bits(self) -> u32 {
        self.call_len_bits() + 9
    }

    /// Returns the length of a slot in bytes.
    pub(crate) fn slot_len(self) -> u64 {
        1 << self.slot_len_bits()
    }

    /// Returns the offset of a slot.
    pub(crate) fn slot(self, index: u64) -> u64 {
        self.slots() + index * self.slot_len()
    }

    /// Returns the offset of a function.
    pub(crate) fn function(self, index: u32) -> u64 {
        function_data::LEN * u64::from(index)
    }

    /// Returns the length of all functions in bytes.
    pub(crate) fn functions_len(self) -> u64 {
        self.function(self.functions)
    }

    /// Returns the offset of the slots.
    pub(crate) fn slots(self) -> u64 {
        self.functions_len().next_multiple_of(PAGE)
    }

    /// Returns the offset of the bits that say which slots were taken.
    pub(crate) fn taken(self) -> u64 {
        self.slots() + call_slot::TAKEN
    }

    /// Returns the binary logarithm of how many groups of threads have a histogram of their own: fewer if there are
    /// many functions.
    pub(crate) fn group_bits(self) -> u32 {
        histogram::group_bits(self.functions)
    }

    /// Returns the mantissa bits of a bucket: fewer if there are many functions.
    pub(crate) fn precision(self) -> u32 {
        histogram::precision(self.functions)
    }

    /// Returns how many octaves a histogram has.
    pub(crate) fn octaves(self) -> u64 {
        u64::from(LONGEST_BITS - self.precision() + 1)
    }

    /// Returns the length of an octave in bytes.
    pub(crate) fn octave_len(self) -> u64 {
        8 << self.precision()
    }

    /// Returns the length of a histogram in bytes, with the sums before it.
    pub(crate) fn histogram_len(self) -> u64 {
        self.sums_len() + self.octaves() * self.octave_len()
    }

    /// Returns the length of what is before a histogram.
    fn sums_len(self) -> u64 {
        if self.of_self { sums::LEN } else { 0 }
    }

    /// Returns the offset of the histogram of a group.
    pub(crate) fn histogram(self, function: u32, group: u64) -> u64 {
        self.sums(function, group) + self.sums_len()
    }

    /// Returns the offset of the sums of a group: only of self times.
    pub(crate) fn sums(self, function: u32, group: u64) -> u64 {
        let before = (u64::from(function) << self.group_bits()) + group;
        self.slot(call_slot::ALL) + before * self.histogram_len()
    }

    /// Returns the offset of the callers.
    pub(crate) fn callers(self) -> u64 {
        self.sums(self.functions, 0).next_multiple_of(PAGE)
    }

    /// Returns the length of all callers in bytes.
    pub(crate) fn callers_len(self) -> u64 {
        (caller::COUNT + caller::TRIED) * caller::LEN
    }

    /// Returns the offset of the caller that stands for all others of a function.
    pub(crate) fn other_callers(self, function: u32) -> u64 {
        self.callers() + self.callers_len() + u64::from(function) * caller::LEN
    }

    /// Returns the length of all data in bytes, whole pages.
    pub(crate) fn len(self) -> u64 {
        if self.functions == 0 {
            return 0;
        }
        if self.by_caller {
            return self.other_callers(self.functions).next_multiple_of(PAGE);
        }
        self.callers()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_follow_each_other_within_reach() {
        let most = histogram::PRECISIONS.map(|(most, _)| most);
        let more = most.map(|most| (most + 1).min(MAX_TIMED as u32));
        let functions = [1, 2, 7, 8, 9].into_iter().chain(most).chain(more);
        let kinds = [(false, false), (true, false), (false, true), (true, true)];
        let layouts = functions.flat_map(|it| kinds.map(|kind| (it, kind)));
        for (functions, (of_self, keeps_arguments)) in layouts {
            let calls = CallsLayout {
                functions,
                of_self,
                by_caller: false,
                keeps_arguments,
            };
            let by_caller = CallsLayout {
                by_caller: true,
                ..calls
            };
            assert_eq!(CallsLayout::of_number(by_caller.number()), by_caller);
            let end = by_caller.other_callers(functions - 1) + caller::LEN;
            assert!(calls.len() == by_caller.callers() && by_caller.len() >= end);
            assert!(calls.is_possible());
            assert_eq!(CallsLayout::of_number(calls.number()), calls);
            let calls_of_stack = u64::from(call_slot::MAX_CALLS + 10) << calls.call_len_bits();
            assert!(call_slot::CALLS + calls_of_stack <= calls.slot_len());
            assert!(calls.slots() >= calls.functions_len() && calls.slots() % PAGE == 0);
            let last = (1 << calls.group_bits()) - 1;
            let end = calls.sums(functions - 1, last) + calls.histogram_len();
            assert!((end..end + PAGE).contains(&calls.len()) && calls.len() % PAGE == 0);
            assert!(
                calls.octaves() <= 64 && calls.len() < 192 << 20,
                "{functions}"
            );
        }
        assert_eq!(CallsLayout::default().len(), 0);
        assert!(!CallsLayout::of_number(16385).is_possible());
        assert!(!CallsLayout::of_number(u32::MAX).is_possible());
    }
}
