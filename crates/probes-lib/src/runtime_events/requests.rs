//! [`StwRequests`]: the stop-the-world requests of a process: which domain has made each, and how late the others
//! joined. Pure.
//!
//! ```text
//! domain 0   stw_leader ├──────────────────────┤
//! domain 1      stw_handler ├──────────────────┤     joined early, waits for domain 2
//! domain 2                     stw_handler ├───┤     joined last: the others waited for it
//! ```
//!
//! The rings are read one after another, so a join may be read before its request. A join is matched with its request
//! once all rings were read again, and all joins of a request are known by the second read after the one that had it.

use std::collections::BTreeMap;
use std::mem::take;
use std::time::Duration;

use super::gaps::EventGaps;
use super::gc_times::GcTimes;

/// How many requests, and how many joins, are kept that are not yet matched.
const MAX_UNMATCHED: usize = 1 << 16;

/// The stop-the-world requests of a process.
#[derive(Debug, Default)]
pub(super) struct StwRequests {
    /// By when they began.
    open: BTreeMap<u64, StwRequest>,
    /// Which domain joined when: of this read, and of the one before.
    joins: [Vec<(u64, u32)>; 2],
    /// The last request of the last read, and of the one before.
    newest: [u64; 2],
    domains: BTreeMap<u32, DomainRequests>,
}

#[derive(Debug)]
struct StwRequest {
    /// When its leader went on; `None` if it has not.
    ended: Option<u64>,
    /// Which domain joined last, and how late.
    last: Option<(u64, u32)>,
}

/// What a domain had to do with stop-the-world requests.
///
/// [`GcPauses`](crate::GcPauses) has an example.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct DomainRequests {
    /// How many it has made.
    pub led: u64,
    /// How many requests of other domains it was the last to join: these have waited for it.
    pub last: u64,
    /// How long after a request of another domain it joined, if that domain still waited then.
    pub late: GcTimes,
}

impl StwRequests {
    /// Adds a request that a domain has made.
    pub(super) fn led(&mut self, domain: u32, time: u64) {
        self.domains.entry(domain).or_default().led += 1;
        if self.open.len() >= MAX_UNMATCHED {
            self.open.pop_first();
        }
        let (ended, last) = (None, None);
        self.open.insert(time, StwRequest { ended, last });
    }

    /// Adds when the domain goes on that has made a request.
    pub(super) fn ended(&mut self, began: u64, time: u64) {
        if let Some(request) = self.open.get_mut(&began) {
            request.ended = Some(time);
        }
    }

    /// Adds when a domain has joined the request of another one.
    pub(super) fn joined(&mut self, domain: u32, time: u64) {
        if self.joins[0].len() < MAX_UNMATCHED {
            self.joins[0].push((time, domain));
        }
    }

    /// Events were lost: what was not yet matched cannot be any more.
    pub(super) fn forget(&mut self) {
        self.open.clear();
        self.joins = Default::default();
    }

    /// To be called after all rings were read once more: matches the joins of the previous read with their requests.
    pub(super) fn match_joins(&mut self, gaps: &EventGaps) {
        let [these, before] = &mut self.joins;
        let ready = std::mem::replace(before, take(these));
        for (time, domain) in ready {
            let Some((began, request)) = self.open.range_mut(..=time).next_back() else {
                continue;
            };
            // Its own request was not written.
            if gaps.last_in(*began, time).is_some() {
                continue;
            }
            // The leader went on without waiting for this domain.
            if request.ended.is_some_and(|ended| ended < time) {
                continue;
            }
            let late = time - began;
            let joined = self.domains.entry(domain).or_default();
            joined.late.add(Duration::from_nanos(late));
            request.last = request.last.max(Some((late, domain)));
        }
        let newest = self.open.last_key_value().map_or(0, |(began, _)| *began);
        let complete = self.newest[1];
        self.newest = [newest, self.newest[0]];
        let still_open = self.open.split_off(&complete);
        let closed = std::mem::replace(&mut self.open, still_open);
        self.close(closed);
    }

    /// Matches what is left, as no more is read.
    pub(super) fn finish(&mut self, gaps: &EventGaps) {
        self.match_joins(gaps);
        self.match_joins(gaps);
        let closed = take(&mut self.open);
        self.close(closed);
    }

    fn close(&mut self, requests: BTreeMap<u64, StwRequest>) {
        let last = requests.values().filter_map(|request| request.last);
        for (_, domain) in last {
            self.domains.entry(domain).or_default().last += 1;
        }
    }

    pub(super) fn of(&self, domain: u32) -> DomainRequests {
        self.domains.get(&domain).cloned().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(requests: &StwRequests, domain: u32) -> (u64, u64, u64, u128) {
        let of = requests.of(domain);
        let late = of.late.total().as_nanos();
        (of.led, of.late.count(), of.last, late)
    }

    #[test]
    fn last_to_join_is_the_one_waited_for() {
        let mut requests = StwRequests::default();
        // In the order of the rings: the handlers of domain 0 come before their leader.
        requests.joined(0, 215);
        requests.led(0, 100);
        requests.ended(100, 150);
        requests.joined(1, 110);
        requests.led(1, 200);
        requests.match_joins(&EventGaps::default());
        requests.joined(2, 130);
        requests.joined(2, 205);
        requests.finish(&EventGaps::default());
        assert_eq!(counts(&requests, 0), (1, 1, 1, 15));
        assert_eq!(counts(&requests, 1), (1, 1, 0, 10));
        assert_eq!(counts(&requests, 2), (0, 2, 1, 35));
    }

    #[test]
    fn joins_without_their_request_are_dropped() {
        let mut requests = StwRequests::default();
        requests.joined(1, 50);
        requests.led(0, 100);
        requests.ended(100, 120);
        requests.joined(1, 121);
        requests.finish(&EventGaps::default());
        assert_eq!(counts(&requests, 1), (0, 0, 0, 0));
        requests.led(0, 200);
        requests.joined(1, 201);
        requests.forget();
        requests.finish(&EventGaps::default());
        assert_eq!(counts(&requests, 1), (0, 0, 0, 0));
        assert_eq!(counts(&requests, 0), (2, 0, 0, 0));
    }

    #[test]
    fn joins_across_a_pause_are_dropped() {
        let mut requests = StwRequests::default();
        let mut gaps = EventGaps::default();
        gaps.add(100);
        gaps.add(110);
        requests.led(0, 50);
        requests.joined(1, 60);
        // Of a request that was made meanwhile.
        requests.joined(2, 115);
        requests.finish(&gaps);
        assert_eq!(counts(&requests, 1), (0, 1, 1, 10));
        assert_eq!(counts(&requests, 2), (0, 0, 0, 0));
    }

    #[test]
    fn requests_are_closed_as_reads_go_on() {
        let mut requests = StwRequests::default();
        for round in 0..100_u64 {
            requests.led(0, 10 * round + 1);
            requests.joined(1, 10 * round + 2);
            requests.match_joins(&EventGaps::default());
            assert!(requests.open.len() <= 4 && requests.joins[1].len() <= 1);
        }
        requests.finish(&EventGaps::default());
        assert_eq!(counts(&requests, 1), (0, 100, 100, 100));
        for time in 0..200_000 {
            requests.led(0, time);
            requests.joined(1, time);
        }
        assert!(requests.open.len() <= MAX_UNMATCHED && requests.joins[0].len() <= MAX_UNMATCHED);
    }
}
