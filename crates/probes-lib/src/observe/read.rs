//! Reads what an observation has recorded.

pub(crate) mod counts;
pub(crate) mod data_source;
pub(crate) mod events;
pub(crate) mod latency;
pub(crate) mod ring;
pub(crate) mod value;
