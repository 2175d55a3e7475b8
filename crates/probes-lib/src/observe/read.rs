//! [`ActiveObservation`]. The modules read the data that it records, while it is installed and when it ends.

pub(crate) mod callers;
pub(crate) mod calls;
pub(crate) mod copied_stack;
pub(crate) mod counts;
pub(crate) mod data_source;
pub(crate) mod discarded;
pub(crate) mod events;
pub(crate) mod forked;
pub(crate) mod histograms;
pub(crate) mod keyed_times;
pub(crate) mod keyed_values;
pub(crate) mod keys;
pub(crate) mod latency;
pub(crate) mod loaded_later;
pub(crate) mod page_table;
pub(crate) mod ring;
pub(crate) mod times;
pub(crate) mod value;
pub(crate) mod values;

use std::sync::Mutex;

use self::data_source::SharedData;
use self::events::EventReader;
use crate::observe::install::observer_lock::ObserverLock;
use crate::observe::layout::arena::Arena;
use crate::observe::plan::ObservationPlan;
use crate::observe::read::discarded::DiscardCheck;
use crate::observe::read::forked::ForkCheck;
use crate::observe::read::loaded_later::LoadedLater;
use crate::ticks::TickMeasurement;

/// An observation that is installed in a process.
pub(crate) struct ActiveObservation {
    pub(crate) plan: ObservationPlan,
    /// Together they hold the points of the plan in its order: first those of the first arena, then those of
    /// the second, and so on.
    pub(crate) arenas: Vec<Arena>,
    /// The recorded data, if they are in a file that the process shares with us.
    pub(crate) data: Option<SharedData>,
    pub(crate) ticks: TickMeasurement,
    pub(crate) events: Mutex<EventReader>,
    pub(crate) discards: Mutex<DiscardCheck>,
    pub(crate) loaded_later: Mutex<LoadedLater>,
    pub(crate) forked: Mutex<ForkCheck>,
    /// Tells other tools that we observe; `None` once it is released.
    pub(crate) lock: Option<ObserverLock>,
}
