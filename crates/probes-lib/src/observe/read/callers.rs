//! [`CallerLatency`]: how often one place in the code has called a function, and how long these calls lasted.

use std::cmp::Reverse;
use std::time::Duration;

use crate::address::LiveAddr;
use crate::error::Result;
use crate::observe::layout::calls::{CallsLayout, caller};
use crate::observe::read::ring::word;

/// How often one place in the code has called a function, and how long these calls lasted.
///
/// ```no_run
/// # let function: probes_lib::FunctionLatency = unimplemented!();
/// for caller in function.callers().unwrap_or_default() {
///     println!("{:?}: {} calls, mean {:?}", caller.address(), caller.count(), caller.mean());
/// }
/// ```
#[derive(Clone, Debug)]
pub struct CallerLatency {
    recorded: RecordedCaller,
    /// Whether its times are self times.
    of_self: bool,
    /// The length of a tick.
    nanoseconds: f64,
}

impl CallerLatency {
    /// Returns where its calls return to; `None` for all callers together for which there was no room. A function that
    /// is called by a jump (a tail call) returns to the caller of the code that jumps.
    pub fn address(&self) -> Option<LiveAddr> {
        self.recorded.address
    }

    /// Returns how many of its calls have ended with an exit.
    pub fn count(&self) -> u64 {
        self.recorded.calls
    }

    /// Returns the sum of their times; these are self times if the function's times are.
    pub fn sum(&self) -> Duration {
        self.time(self.recorded.sum)
    }

    /// Returns the mean; zero if there are none.
    pub fn mean(&self) -> Duration {
        let mean = self.sum().as_nanos().checked_div(u128::from(self.count()));
        Duration::from_nanos(mean.unwrap_or(0) as u64)
    }

    /// Returns the longest time.
    pub fn max(&self) -> Duration {
        self.time(self.recorded.longest)
    }

    /// Returns, if the times are self times, how long the calls lasted from entry to exit, all together.
    pub fn total(&self) -> Option<Duration> {
        self.of_self.then(|| self.time(self.recorded.all))
    }

    fn time(&self, ticks: u64) -> Duration {
        Duration::from_nanos((ticks as f64 * self.nanoseconds) as u64)
    }
}

/// What has been recorded of the callers of all functions.
pub(crate) struct RecordedCallers {
    layout: CallsLayout,
    /// Each with the function that it calls.
    callers: Vec<(u32, RecordedCaller)>,
}

/// Times are in ticks.
#[derive(Clone, Copy, Debug)]
struct RecordedCaller {
    address: Option<LiveAddr>,
    calls: u64,
    sum: u64,
    longest: u64,
    all: u64,
}

impl RecordedCallers {
    /// Reads them, if they are distinguished.
    ///
    /// # Errors
    ///
    /// If they cannot be read.
    pub(crate) fn read(
        layout: CallsLayout,
        read: impl Fn(u64, u64) -> Result<Vec<u8>>,
    ) -> Result<Option<RecordedCallers>> {
        if !layout.by_caller {
            return Ok(None);
        }
        let known = read(layout.callers(), layout.callers_len())?;
        let others_len = layout.other_callers(layout.functions) - layout.other_callers(0);
        let others = read(layout.other_callers(0), others_len)?;
        let known = known
            .chunks_exact(caller::LEN as usize)
            .filter_map(|bytes| {
                let key = word(bytes, caller::KEY);
                let function = (key >> caller::FUNCTION_AT).checked_sub(1)?;
                let address = LiveAddr(key & ((1 << caller::FUNCTION_AT) - 1));
                Some((function as u32, RecordedCaller::of(bytes, Some(address))))
            });
        let others = others.chunks_exact(caller::LEN as usize);
        let others = others.map(|bytes| RecordedCaller::of(bytes, None));
        let all = known.chain((0..).zip(others));
        let callers = all.filter(|(_, caller)| caller.calls > 0).collect();
        Ok(Some(RecordedCallers { layout, callers }))
    }

    /// Returns the callers of each function.
    pub(crate) fn latencies(mut self, nanoseconds: f64) -> Vec<Vec<CallerLatency>> {
        self.callers.sort_by_key(|(_, caller)| {
            (
                caller.address.is_none(),
                Reverse(caller.sum),
                caller.address,
            )
        });
        let mut latencies = vec![Vec::new(); self.layout.functions as usize];
        for (function, recorded) in self.callers {
            if let Some(callers) = latencies.get_mut(function as usize) {
                callers.push(CallerLatency {
                    recorded,
                    of_self: self.layout.of_self,
                    nanoseconds,
                });
            }
        }
        latencies
    }
}

impl RecordedCaller {
    fn of(bytes: &[u8], address: Option<LiveAddr>) -> RecordedCaller {
        RecordedCaller {
            address,
            calls: word(bytes, caller::CALLS),
            sum: word(bytes, caller::SUM),
            longest: word(bytes, caller::MAX),
            all: word(bytes, caller::ALL),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LAYOUT: CallsLayout = CallsLayout {
        functions: 2,
        of_self: false,
        by_caller: true,
        keeps_arguments: false,
    };

    #[test]
    fn callers_belong_to_functions() {
        let slots: [(u64, u64, u64, u64); 4] = [
            (LAYOUT.callers(), 1 << 48 | 0x1000, 3, 30),
            (LAYOUT.callers() + 5 * caller::LEN, 2 << 48 | 0x2000, 1, 10),
            (LAYOUT.callers() + 6 * caller::LEN, 2 << 48 | 0x3000, 2, 20),
            (LAYOUT.other_callers(1), 0, 7, 70),
        ];
        let read = |at: u64, len: u64| {
            let mut bytes = vec![0; len as usize];
            for (slot, key, calls, sum) in slots {
                if let Some(start) = slot.checked_sub(at).filter(|start| *start < len) {
                    for (field, value) in [
                        (caller::KEY, key),
                        (caller::CALLS, calls),
                        (caller::SUM, sum),
                    ] {
                        let field = &mut bytes[(start + field) as usize..][..8];
                        field.copy_from_slice(&value.to_le_bytes());
                    }
                }
            }
            Ok(bytes)
        };
        let callers = RecordedCallers::read(LAYOUT, read).unwrap().unwrap();
        let found: Vec<Vec<_>> = callers
            .latencies(0.5)
            .iter()
            .map(|callers| {
                let figures = callers.iter().map(|it| {
                    let address = it.address().map(|address| address.0);
                    (
                        address,
                        it.count(),
                        it.sum().as_nanos(),
                        it.mean().as_nanos(),
                    )
                });
                figures.collect()
            })
            .collect();
        let second = vec![
            (Some(0x3000), 2, 10, 5),
            (Some(0x2000), 1, 5, 5),
            (None, 7, 35, 5),
        ];
        assert_eq!(found, [vec![(Some(0x1000), 3, 15, 5)], second]);
    }

    #[test]
    fn any_bytes_can_be_read() {
        let read = |_, len: u64| Ok(vec![0xff; len as usize]);
        let callers = RecordedCallers::read(LAYOUT, read).unwrap().unwrap();
        let latencies = callers.latencies(1.0);
        // No key is of a function that exists; the other callers belong to one by their place.
        assert!(latencies.iter().all(|callers| callers.len() == 1));
    }
}
