//! [`PointCounters`]: what is counted of the hits that are not recorded.

use crate::address::LiveAddr;
use crate::error::Result;
use crate::memory::ReadMemory;
use crate::observe::layout::arena::Arena;
use crate::observe::plan::{ObservationPlan, PlannedPoint};
use crate::observe::read::data_source;
use crate::observe::read::ring::word;

/// Counters of some points, which all threads share. For each such point, an `M` says what its counter means.
#[derive(Debug)]
pub(super) struct PointCounters<M> {
    /// For each arena, where its counters are, and which of its points have one.
    counters: Vec<(LiveAddr, Vec<Option<M>>)>,
    /// Their sum at the last reading.
    known: u64,
}

impl<M> PointCounters<M> {
    /// Returns the counters of the points of a plan for which `meaning` returns something. `first` returns the index of
    /// the counter of an arena's first point.
    pub(super) fn of(
        plan: &ObservationPlan,
        arenas: &[Arena],
        meaning: impl Fn(&PlannedPoint) -> Option<M>,
        first: impl Fn(&Arena) -> usize,
    ) -> PointCounters<M> {
        let counters = plan.points_by_arena(arenas).filter_map(|(arena, points)| {
            let meanings: Vec<Option<M>> = points.iter().map(&meaning).collect();
            let has_any = meanings.iter().any(Option::is_some);
            has_any.then(|| (arena.locked_counter(first(arena)), meanings))
        });
        PointCounters {
            counters: counters.collect(),
            known: 0,
        }
    }

    /// Whether no point has one.
    pub(super) fn is_empty(&self) -> bool {
        self.counters.is_empty()
    }

    /// Returns what was added since the last reading; `value` converts the number in a counter by its meaning.
    pub(super) fn read(
        &mut self,
        pid: i32,
        source: &impl ReadMemory,
        value: impl Fn(u64, &M) -> u64,
    ) -> Result<u64> {
        let mut sum = 0_u64;
        for (at, meanings) in &self.counters {
            let counters = data_source::read(pid, source, *at, 8 * meanings.len() as u64)?;
            let counters = counters.chunks_exact(8).zip(meanings);
            let values = counters.filter_map(|(counter, meaning)| {
                let meaning = meaning.as_ref()?;
                Some(value(word(counter, 0), meaning))
            });
            sum = values.fold(sum, u64::saturating_add);
        }
        let added = sum.saturating_sub(self.known);
        self.known = sum;
        Ok(added)
    }
}
