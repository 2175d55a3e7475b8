//! The memory that an observation maps into a process, as offsets and bytes. Pure.

pub(crate) mod arena;
pub(crate) mod readable_pages;
pub(crate) mod shared;
