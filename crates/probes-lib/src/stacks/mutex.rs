//! Which thread has the mutex that another one waits for, as the C library notes it in the mutex.
//!
//! ```text
//! glibc    lock (4 bytes; the futex): 2 = taken, and others wait; count (4 bytes); thread id of the owner (4 bytes)
//!          mutexes that are robust or inherit priorities: as in musl
//! musl     lock (the futex): the thread id of the owner or, in a default mutex, which notes no owner, EBUSY (16); bit 31:
//!          others wait
//! ```
//!
//! Other locks may look the same, so one of these functions has to be among the innermost frames.

use std::sync::Arc;

use super::StackFrame;
use crate::address::LiveAddr;
use crate::memory::ReadMemory;

/// A thread that holds a mutex.
#[derive(Clone, Copy, Debug)]
pub(super) struct MutexOwner {
    /// Its id in the innermost of its pid namespaces.
    pub(super) own_id: i32,
    pub(super) tid: i32,
    /// Whether it held the mutex at the moment of its stack; if it runs and has none, at a moment close to it.
    pub(super) held_it_then: bool,
}

impl MutexOwner {
    /// Returns whether the thread `tid` is this owner, and holds the mutex of this futex now.
    pub(super) fn holds_as(&self, tid: i32, memory: &impl ReadMemory, futex: LiveAddr) -> bool {
        self.tid == tid && owner(memory, futex) == Some(self.own_id)
    }
}

/// How many frames there are, at most, from the system call to the function that takes the mutex.
const INNER_FRAMES: usize = 4;

/// What follows `pthread_mutex_` in the names of these functions. After a wait for a condition, glibc takes the mutex by
/// one of its own.
const LOCKING: [&str; 6] = [
    "lock",
    "lock_full",
    "timedlock",
    "clocklock",
    "cond_lock",
    "cond_lock_full",
];

/// The value of the lock of a mutex of glibc that is taken, and that others wait for.
const CONTENDED: u32 = 2;

/// The bits of a lock that holds a thread id: others wait (`FUTEX_WAITERS`), and the id (`FUTEX_TID_MASK`).
const HAS_WAITERS: u32 = 1 << 31;
const OWNER_MASK: u32 = (1 << 30) - 1;

/// What musl has there instead of the id in a mutex that notes no owner.
const NO_OWNER: u32 = libc::EBUSY as u32;

/// Returns whether a thread with these frames takes a mutex.
pub(super) fn is_taking_mutex(frames: &[Arc<StackFrame>]) -> bool {
    let mut names = frames
        .iter()
        .take(INNER_FRAMES)
        .filter_map(|it| it.function.as_deref());
    names.any(|name| {
        let name = name.trim_start_matches('_');
        let of_mutex = name.strip_prefix("pthread_mutex_");
        of_mutex.is_some_and(|rest| LOCKING.contains(&rest))
    })
}

/// Returns the owner of a mutex that a thread waits for, by the address of its futex: its id in the innermost of its pid
/// namespaces.
pub(super) fn owner(memory: &impl ReadMemory, futex: LiveAddr) -> Option<i32> {
    let mut bytes = [0; 12];
    memory.read(futex, &mut bytes).ok()?;
    let word = |at: usize| bytes[at..].first_chunk().map(|it| u32::from_le_bytes(*it));
    let owner = match word(0)? {
        CONTENDED => word(8)?,
        lock if lock & HAS_WAITERS != 0 && lock & OWNER_MASK != NO_OWNER => lock & OWNER_MASK,
        _ => return None,
    };
    i32::try_from(owner).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::double::SliceMemory;

    #[test]
    fn owners_are_found_in_the_lock() {
        let of = |words: [u32; 3]| {
            let bytes: Vec<u8> = words.iter().flat_map(|it| it.to_le_bytes()).collect();
            owner(&SliceMemory::new([(0x1000, bytes)]), LiveAddr(0x1000))
        };
        assert_eq!(of([CONTENDED, 1, 4247]), Some(4247));
        assert_eq!(of([HAS_WAITERS | 4247, 0, 9]), Some(4247));
        assert_eq!(of([HAS_WAITERS | NO_OWNER, 0, 9]), None);
        // Nobody waits for it, or it is no mutex.
        assert_eq!(of([1, 1, 4247]), None);
        assert_eq!(of([CONTENDED, 1, u32::MAX]), None);
        assert_eq!(owner(&SliceMemory::new([]), LiveAddr(0x1000)), None);
    }
}
