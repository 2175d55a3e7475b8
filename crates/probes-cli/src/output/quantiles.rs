//! The quantiles that are shown of times, and the longest.

use std::time::Duration;

use probes_lib::Times;
use serde::Serialize;

use crate::clock::in_nanoseconds;

/// Quantiles of times, and the longest, in nanoseconds; zero if there are no times.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct Quantiles {
    pub(super) p50_ns: u64,
    pub(super) p90_ns: u64,
    pub(super) p99_ns: u64,
    pub(super) p999_ns: u64,
    pub(super) max_ns: u64,
}

impl Quantiles {
    pub(super) fn of_times(times: &Times) -> Quantiles {
        let quantile = |per_mille| times.quantile(f64::from(per_mille) / 1000.0);
        Quantiles::of(quantile, times.max())
    }

    /// `per_mille` returns the time that so many of 1,000 do not exceed.
    pub(super) fn of(per_mille: impl Fn(u16) -> Duration, max: Duration) -> Quantiles {
        let part = |part| in_nanoseconds(per_mille(part));
        Quantiles {
            p50_ns: part(500),
            p90_ns: part(900),
            p99_ns: part(990),
            p999_ns: part(999),
            max_ns: in_nanoseconds(max),
        }
    }

    /// All of them, each with its name.
    pub(super) fn named(&self) -> [(&'static str, u64); 5] {
        [
            ("p50", self.p50_ns),
            ("p90", self.p90_ns),
            ("p99", self.p99_ns),
            ("p99.9", self.p999_ns),
            ("max", self.max_ns),
        ]
    }
}
