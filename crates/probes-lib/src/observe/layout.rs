//! The memory that an observation maps into a process, as offsets and bytes. Pure functions
//! only: no system calls.

pub(crate) mod arena;
pub(crate) mod calls;
pub(crate) mod groups;
pub(crate) mod histogram;
pub(crate) mod kept_starts;
pub(crate) mod keyed_starts;
pub(crate) mod keys;
pub(crate) mod observer_record;
pub(crate) mod pair_slots;
pub(crate) mod readable_pages;
pub(crate) mod rows;
pub(crate) mod semaphores;
pub(crate) mod shared;
pub(crate) mod stack_copies;
pub(crate) mod values;
