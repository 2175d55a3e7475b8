//! How the waits of a profile were found, how long they were, and how large the errors of sampled times are.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::time::Duration;

use probes_lib::{Activity, Profile, ProfiledStack, WaitMethod, WaitTimes};
use serde::Serialize;

use super::ProfileOptions;
use crate::output::quantiles::Quantiles;
use crate::text::{number_of, or_dash};

/// By what the waits were found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Method {
    Recorded,
    Sampled,
    Unknown,
}

/// How the waits were found.
#[derive(Debug, Serialize)]
pub(super) struct Waits {
    method: Method,
    /// Why they were not recorded, if that is known.
    because: Option<String>,
    lost_records: u64,
    /// How many processors came online while it was recorded.
    unrecorded_processors: usize,
    pub(super) count: Option<u64>,
    /// How many there were beside these of which only a part was seen.
    parts: Option<u64>,
    seconds: f64,
    /// The sum of those that ended before they were looked at.
    unseen_seconds: f64,
    /// By how much that may be too long, at most, because of stops.
    unseen_excess_seconds: f64,
    /// Two standard deviations of `seconds`.
    error_seconds: f64,
}

impl Waits {
    /// `stacks` are those that are shown. Those of the threads for which `is_idle` is true are not among them.
    pub(super) fn of(
        profile: &Profile,
        stacks: &[&ProfiledStack],
        how: ProfileOptions,
        is_idle: impl Fn(&ProfiledStack) -> bool,
    ) -> Waits {
        let waits = || stacks.iter().filter(|it| it.activity != Activity::Running);
        let unseen = waits().filter(|it| it.activity == Activity::Unseen);
        let (lost_records, unrecorded_processors) = match profile.waits {
            WaitMethod::Recorded {
                lost,
                unrecorded_processors,
            } => (lost, unrecorded_processors),
            _ => (0, 0),
        };
        let (method, because) = match &profile.waits {
            WaitMethod::Recorded { .. } => (Method::Recorded, None),
            WaitMethod::Sampled { because: None } if how.tells_collections => {
                let why = "with -gc, collections are distinguished by samples";
                (Method::Sampled, Some(why.to_owned()))
            }
            WaitMethod::Sampled { because } => (Method::Sampled, because.clone()),
            _ => (Method::Unknown, None),
        };
        // Otherwise the process may be stopped, which wakes the threads that wait, and so makes two waits of one.
        let are_recorded = method == Method::Recorded;
        let is_counted = are_recorded && how.is_off_cpu;
        let sum = |number: fn(&WaitTimes) -> u64| {
            let numbers = waits().filter_map(|it| it.waits.as_ref()).map(number);
            is_counted.then(|| numbers.sum())
        };
        let variance = if are_recorded || how.is_on_cpu {
            0.0
        } else {
            let all = profile.stacks.iter().filter(|it| !is_idle(it));
            variance_of_waits(all, profile.seconds, profile.samples)
        };
        let unseen: Duration = unseen.map(|it| it.time).sum();
        Waits {
            method,
            because,
            lost_records,
            unrecorded_processors,
            count: sum(|it| it.times().count()),
            parts: sum(WaitTimes::parts),
            seconds: waits().map(|it| it.time).sum::<Duration>().as_secs_f64(),
            unseen_seconds: unseen.as_secs_f64(),
            // The excess is that of all threads; `unseen` lacks those that only work for the runtime.
            unseen_excess_seconds: profile.unseen_excess.min(unseen).as_secs_f64(),
            error_seconds: 2.0 * variance.sqrt(),
        }
    }

    /// Says by how much they may be too long, if they may.
    pub(super) fn excess(&self) -> Option<String> {
        let milliseconds = 1000.0 * self.unseen_excess_seconds;
        (milliseconds > 0.0).then(|| {
            format!("[unseen waits] may be too long by up to {milliseconds:.3} ms, because the process was stopped")
        })
    }

    pub(super) fn plain(&self) -> String {
        if self.method != Method::Recorded {
            let why = self.because.as_deref().unwrap_or("-");
            return format!("waits sampled error {:.3} {why}\n", self.error_seconds);
        }
        let [count, parts] = [self.count, self.parts].map(or_dash);
        let (unseen, lost) = (self.unseen_seconds, self.lost_records);
        let excess = self.unseen_excess_seconds;
        let mut text = format!(
            "waits recorded {count} unseen {unseen:.3} lost {lost} excess {excess:.6} parts {parts}\n"
        );
        if self.unrecorded_processors > 0 {
            let _ = writeln!(
                text,
                "waits unrecorded processors {}",
                self.unrecorded_processors
            );
        }
        text
    }

    /// A sentence below a table.
    pub(super) fn sentence(&self) -> String {
        if self.method != Method::Recorded {
            let (seconds, error) = (self.seconds, self.error_seconds);
            let why = self.because.iter().map(|why| format!("; {why}"));
            let why: String = why.collect();
            return format!("waits are sampled: {seconds:.2} s, +- {error:.2} s (95 %){why}\n");
        }
        let count = self.count.map(|count| format!("{count} "));
        let count = count.unwrap_or_default();
        let unseen = self.unseen_seconds;
        let mut text = format!("{count}waits, each recorded");
        if let Some(parts @ 1..) = self.parts {
            let _ = write!(
                text,
                "; {parts} more (after +) seen in part: they count in the times, not in the percentiles"
            );
        }
        if unseen > 0.0 {
            let _ = write!(
                text,
                "; {unseen:.3} s of waits ended before their stack was read"
            );
        }
        if let Some(excess) = self.excess() {
            let _ = write!(text, "; {excess}");
        }
        if self.lost_records > 0 {
            let _ = write!(
                text,
                "; {} of switches lost",
                number_of(self.lost_records, "record")
            );
        }
        if self.unrecorded_processors > 0 {
            let processors = number_of(self.unrecorded_processors, "processor");
            let _ = write!(text, "; {processors} came online meanwhile, not recorded");
        }
        text + "\n"
    }
}

/// The variance of a time that one sample stands for, in seconds squared.
pub(super) fn variance_of_sample(seconds: Duration, samples: u64) -> f64 {
    (seconds.as_secs_f64() / (samples.max(1) as f64)).powi(2)
}

/// Returns the variance of the time in which a thread did one thing, in seconds squared, from that of the samples
/// that found it doing so and that of all samples.
///
/// If it does so in a share p of the samples, the variance of a sample that stands for a time t is t² p (1 - p). The
/// share is estimated by the rule of succession, as if there were `one` sample more of both: what was never seen may
/// have happened all the same.
pub(super) fn variance_of_part(part: f64, all: f64, one: f64) -> f64 {
    let share = (part + one) / (all + 2.0 * one).max(f64::MIN_POSITIVE);
    all * share * (1.0 - share)
}

/// Returns the variance of the time of all waits, in seconds squared, that is due to sampling: in each sample that is
/// not exact, a thread either waits or runs.
fn variance_of_waits<'s>(
    stacks: impl Iterator<Item = &'s ProfiledStack>,
    seconds: Duration,
    samples: u64,
) -> f64 {
    let one = variance_of_sample(seconds, samples);
    let mut threads: HashMap<(i32, &str), [f64; 2]> = HashMap::new();
    for stack in stacks {
        let thread = threads.entry((stack.tid, &stack.thread_name)).or_default();
        thread[usize::from(stack.activity == Activity::Running)] += stack.variance;
    }
    let of_thread = |[waits, runs]: [f64; 2]| variance_of_part(waits, waits + runs, one);
    threads.into_values().map(of_thread).sum::<f64>().abs()
}

/// How long the waits of a function or a stack were.
#[derive(Debug, Serialize)]
pub(super) struct Distribution {
    /// Of those that were seen whole; the others are `parts`.
    pub(super) count: u64,
    pub(super) parts: u64,
    #[serde(flatten)]
    pub(super) lengths: Option<Quantiles>,
}

impl Distribution {
    pub(super) fn of(waits: &WaitTimes) -> Distribution {
        let times = waits.times();
        Distribution {
            count: times.count(),
            parts: waits.parts(),
            lengths: (times.count() > 0).then(|| Quantiles::of_times(&times)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::stack;
    use super::*;

    #[test]
    fn errors_of_waits_are_never_forgotten() {
        let of = |waits: f64, runs: f64| {
            let stack = |activity, variance| ProfiledStack {
                activity,
                ..stack(Duration::ZERO, variance)
            };
            let stacks = [
                stack(Activity::Running, runs),
                stack(Activity::Waiting, waits),
            ];
            // 100 samples of 10 ms.
            variance_of_waits(stacks.iter(), Duration::from_secs(1), 100).sqrt()
        };
        assert_eq!(of(0.0, 0.0), 0.0, "each is exact");
        // Never seen to wait, and never seen to run: as if it was once.
        for never in [of(0.0, 100e-4), of(100e-4, 0.0)] {
            assert!((0.009..0.011).contains(&never), "{never}");
        }
        // Half of 100 samples: 10 ms * sqrt(100 / 4).
        let half = of(50e-4, 50e-4);
        assert!((0.0499..0.0501).contains(&half), "{half}");
    }
}
