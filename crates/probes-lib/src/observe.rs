//! Observes points of a process with code inside that process, without the kernel: counts the hits
//! of the points, measures the times between hits, and records hits one by one.
//!
//! ```text
//! plan               which points, and the role of each             plan, point, functions
//! layout             the memory it takes, at which addresses        layout/, placement
//! code               the trampolines                                trampoline/
//! install            stop ─▶ map ─▶ write ─▶ patch ─▶ resume        install/, crate::inject
//! read               counts, times, events, while it is installed   read/
//! remove             stop ─▶ restore ─▶ wait ─▶ unmap ─▶ resume     install/remove
//! ```
//!
//! All that is needed to remove an observation is in the process ([`layout::arena`]): if the tool is
//! killed, the next one finds it ([`installed`]) and removes it.

mod arities;
pub(crate) mod available;
pub(crate) mod buckets;
pub(crate) mod discarded;
mod fibers;
pub(crate) mod forked;
pub(crate) mod frame_id;
pub(crate) mod functions;
pub(crate) mod install;
pub(crate) mod installed;
pub(crate) mod layout;
pub(crate) mod loaded_later;
pub(crate) mod observation;
pub(crate) mod observer_lock;
pub(crate) mod page_table;
mod placement;
pub(crate) mod plan;
mod point;
pub(crate) mod read;
mod role;
pub(crate) mod shadow;
mod trampoline;
mod usdt_arguments;
mod value_pages;
mod watching;

pub use self::available::AvailableObservation;
pub use self::buckets::{BadLinear, Linear};
pub use self::discarded::DiscardedPatches;
pub use self::forked::ForkedChildren;
pub use self::functions::RefusedFunction;
pub use self::install::remove::CleanReport;
pub use self::observation::Observation;
pub use self::read::callers::CallerLatency;
pub use self::read::calls::FunctionLatency;
pub use self::read::copied_stack::CopiedStack;
pub use self::read::counts::{Counts, FunctionHits, SiteHits};
pub use self::read::events::{CallFrame, Event, EventBatch, EventKind, Events, PairKey, SlowPair};
pub use self::read::keyed_times::{KeyedTime, KeyedTimes};
pub use self::read::keyed_values::{KeyedHistogram, KeyedHistograms};
pub use self::read::keys::{Key, KeyedCount, KeyedCounts};
pub use self::read::latency::Latency;
pub use self::read::times::Times;
pub use self::read::value::Value;
pub use self::read::values::{Quantile, ValueBucket, ValueHistogram, ValueRecorder};
