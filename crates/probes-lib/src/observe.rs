//! Observes points of a process with code inside that process, without the kernel: counts the hits
//! of the points, measures the times between hits, and records hits one by one.
//!
//! ```text
//! layout    the memory it takes, as offsets                     layout/
//! plan      which points, and the role of each                  plan/, functions/
//! code      the trampolines                                     trampoline/
//! install   place ─▶ stop ─▶ map ─▶ write ─▶ patch ─▶ resume    install/, crate::inject
//! read      counts, times, events, while it is installed        read/
//! remove    stop ─▶ restore ─▶ wait ─▶ unmap ─▶ resume          install/remove
//! ```
//!
//! All steps share what is wanted ([`observation`]), what a [`point`] is, and what is recorded there ([`role`]).
//!
//! All that is needed to remove an observation is in the process ([`layout::arena`]): if the tool is
//! killed, the next one finds it ([`install::installed`]) and removes it.

pub(crate) mod buckets;
pub(crate) mod frame_id;
pub(crate) mod functions;
pub(crate) mod install;
pub(crate) mod layout;
pub(crate) mod observation;
pub(crate) mod plan;
pub(crate) mod point;
pub(crate) mod read;
mod role;
mod trampoline;
mod value_pages;

pub use self::buckets::{BadLinear, Linear};
pub use self::functions::RefusedFunction;
pub use self::functions::observable::ObservableFunctions;
pub use self::install::remove::CleanReport;
pub use self::observation::Observation;
pub use self::plan::available::AvailableObservation;
pub use self::read::callers::CallerLatency;
pub use self::read::calls::FunctionLatency;
pub use self::read::copied_stack::CopiedStack;
pub use self::read::counts::{Counts, FunctionHits, SiteHits};
pub use self::read::discarded::DiscardedPatches;
pub use self::read::events::{CallFrame, Event, EventBatch, EventKind, Events, PairKey, SlowPair};
pub use self::read::forked::ForkedChildren;
pub use self::read::keyed_times::{KeyedTime, KeyedTimes};
pub use self::read::keyed_values::{KeyedHistogram, KeyedHistograms};
pub use self::read::keys::{Key, KeyedCount, KeyedCounts};
pub use self::read::latency::Latency;
pub use self::read::times::Times;
pub use self::read::value::Value;
pub use self::read::values::{Quantile, ValueBucket, ValueHistogram, ValueRecorder};
