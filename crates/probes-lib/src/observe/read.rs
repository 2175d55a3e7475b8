//! Reads what an observation has recorded, while it is installed and when it ends.

pub(crate) mod counts;
pub(crate) mod data_source;
pub(crate) mod events;
pub(crate) mod latency;
pub(crate) mod ring;
pub(crate) mod value;

use self::data_source::SharedData;
use self::events::EventReader;
use crate::observe::layout::arena::Arena;
use crate::observe::plan::ObservationPlan;
use crate::sys::ticks::Ticks;

/// An observation that is installed in a process.
pub(crate) struct ActiveObservation {
    pub(crate) plan: ObservationPlan,
    /// The points of the plan, in the same order, are those of the first arena, then of the second...
    pub(crate) arenas: Vec<Arena>,
    /// The recorded data, if they are in a file that the process shares with us.
    pub(crate) data: Option<SharedData>,
    pub(crate) ticks: Ticks,
    pub(crate) events: EventReader,
}
