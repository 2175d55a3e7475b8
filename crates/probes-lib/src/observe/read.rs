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

use self::events::EventReader;
use self::page_table::PageTable;
use crate::address::LiveAddr;
use crate::observe::install::data_mapping::SharedData;
use crate::observe::install::map_and_write::Installed;
use crate::observe::install::observer_lock::ObserverLock;
use crate::observe::layout::arena::Arena;
use crate::observe::plan::ObservationPlan;
use crate::observe::read::discarded::DiscardCheck;
use crate::observe::read::forked::ForkCheck;
use crate::observe::read::loaded_later::LoadedLater;
use crate::observe::value_pages::ValuePages;
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

impl ActiveObservation {
    /// Begins to read what an observation records.
    pub(crate) fn of(installed: Installed) -> ActiveObservation {
        let Installed {
            plan, arenas, data, ..
        } = installed;
        let shared_at = arenas.first().map_or(LiveAddr(0), Arena::shared_at);
        let are_recorded = data.is_some() || plan.shares_data();
        let asks_kernel = plan.asks_kernel();
        let valid = installed.pages;
        let pages = PageTable::of(plan.shared, valid.pages, valid.ticks, asks_kernel);
        // If the runtime has a table of the pages of values, the child has a copy of it.
        let needs_own = plan.shared.value_pages == ValuePages::TableOfObserver || asks_kernel;
        let pages_of_forked = needs_own && plan.shared.has_pages();
        let pages_of_forked = pages_of_forked.then(|| pages.of_forked());
        let events = EventReader::begin(&plan, &arenas, shared_at, installed.thread_ids, pages);
        let (begun, has_times) = (installed.at, plan.has_times());
        ActiveObservation {
            events: Mutex::new(events),
            discards: Mutex::new(DiscardCheck::new(&plan)),
            loaded_later: Mutex::new(LoadedLater::new(&plan.functions)),
            forked: Mutex::new(ForkCheck::new(
                begun,
                are_recorded,
                has_times,
                pages_of_forked,
            )),
            plan,
            arenas,
            data,
            ticks: installed.ticks,
            lock: Some(installed.lock),
        }
    }
}
