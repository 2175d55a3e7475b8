//! [`PointCounters`], [`SkippedHits`]: what is counted of the hits that are not recorded.

use std::num::NonZeroU64;

use crate::address::LiveAddr;
use crate::error::Result;
use crate::memory::ReadMemory;
use crate::observe::layout::arena::Arena;
use crate::observe::plan::{ObservationPlan, PlannedPoint};
use crate::observe::read::data_source;
use crate::observe::read::ring::word;

/// Counters of some points, which all threads share.
#[derive(Debug)]
pub(super) struct PointCounters {
    /// Where those of an arena are, and which of its points have them.
    counters: Vec<(LiveAddr, Vec<bool>)>,
    /// Their sum at the last reading.
    known: u64,
}

impl PointCounters {
    /// Returns those of the points of a plan that `have` them; the counter of the first point of an arena is the one
    /// with the index that `first` returns.
    pub(super) fn of(
        plan: &ObservationPlan,
        arenas: &[Arena],
        have: impl Fn(&PlannedPoint) -> bool,
        first: impl Fn(&Arena) -> usize,
    ) -> PointCounters {
        let mut points = plan.points.iter();
        let counters = arenas.iter().filter_map(|arena| {
            let these = points.by_ref().take(arena.points.len());
            let have: Vec<bool> = these.map(&have).collect();
            let has_any = have.contains(&true);
            has_any.then(|| (arena.locked_counter(first(arena)), have))
        });
        PointCounters {
            counters: counters.collect(),
            known: 0,
        }
    }

    /// Returns what was added to them since the last reading.
    pub(super) fn read(&mut self, pid: i32, source: &impl ReadMemory) -> Result<u64> {
        let mut sum = 0_u64;
        for (at, have) in &self.counters {
            let counters = data_source::read(pid, source, *at, 8 * have.len() as u64)?;
            let counters = counters.chunks_exact(8).zip(have);
            let counters = counters.filter(|(_, has_one)| **has_one);
            let values = counters.map(|(counter, _)| word(counter, 0));
            sum = values.fold(sum, u64::saturating_add);
        }
        let added = sum.saturating_sub(self.known);
        self.known = sum;
        Ok(added)
    }
}

/// Counters of the hits of which some are recorded.
#[derive(Debug, Default)]
pub(super) struct SkippedHits {
    /// Where those of an arena are, and for each of its points N if every Nth hit is recorded, `None` if all are.
    counters: Vec<(LiveAddr, Vec<Option<NonZeroU64>>)>,
    /// How many were not recorded at the last reading.
    known: u64,
}

impl SkippedHits {
    /// Whether all hits are recorded.
    pub(super) fn is_empty(&self) -> bool {
        self.counters.is_empty()
    }

    /// Returns where the counters of a plan are, whose points are in these arenas.
    pub(super) fn of(plan: &ObservationPlan, arenas: &[Arena]) -> SkippedHits {
        let mut points = plan.points.iter();
        let counters = arenas.iter().filter_map(|arena| {
            let these = points.by_ref().take(arena.points.len());
            let samples = these.map(|planned| planned.role.watched.as_ref()?.sample);
            let samples: Vec<Option<NonZeroU64>> = samples.collect();
            let at = arena.locked_counter(arena.sampled_counter(0));
            samples.iter().any(Option::is_some).then_some((at, samples))
        });
        SkippedHits {
            counters: counters.collect(),
            known: 0,
        }
    }

    /// Returns how many were not recorded since the last reading.
    pub(super) fn read(&mut self, pid: i32, source: &impl ReadMemory) -> Result<u64> {
        let mut sum = 0_u64;
        for (at, samples) in &self.counters {
            let counters = data_source::read(pid, source, *at, 8 * samples.len() as u64)?;
            let counters = counters.chunks_exact(8).zip(samples);
            let skipped = counters.filter_map(|(counter, sample)| {
                let hits = word(counter, 0);
                sample.map(|every| hits - hits / every)
            });
            sum = skipped.fold(sum, u64::saturating_add);
        }
        let skipped = sum.saturating_sub(self.known);
        self.known = sum;
        Ok(skipped)
    }
}
