//! Observations that count, take times and show hits, all at once, and what holds for all their
//! results.

use probes_lib::{Events, Observation, ObservationReport, Selector, Target};

/// Counts and shows the hits of all probes, and times two pairs.
pub(crate) fn everything(target: &Target) -> Observation {
    all_but_watch(target).watch(Selector::All)
}

/// The same, without shown hits: if threads never pause, reading them takes long.
pub(crate) fn all_but_watch(target: &Target) -> Observation {
    let states = target.states().unwrap();
    let sites = states.probes().filter(|probe| probe.site_count() > 0);
    let names: Vec<String> = sites.map(|probe| probe.name().to_owned()).collect();
    let (first, last) = (names.first().unwrap(), names.last().unwrap());
    Observation::new()
        .count(Selector::All)
        .time(last, first)
        .time(first, first)
}

/// Asserts that the results add up.
pub(crate) fn check(observed: &ObservationReport, events: &Events, what: &str) {
    let counts = &observed.counts;
    let shown = events.events.len() as u64 + events.dropped;
    assert_eq!(shown, counts.total(), "{what}: {} dropped", events.dropped);
    if events.dropped == 0 {
        for (name, hits) in counts.probes() {
            let shown = events.events.iter().filter(|event| event.name() == name);
            assert_eq!(shown.count() as u64, hits, "{what}: {name}");
        }
    }
    check_times(observed, what);
}

/// Asserts that the counts and the times add up.
pub(crate) fn check_times(observed: &ObservationReport, what: &str) {
    let counts = &observed.counts;
    for latency in &observed.latencies {
        let hits = |name| counts.hits(name).unwrap();
        let all = latency.count() + latency.dropped();
        let what = format!("{what}: {latency:?}");
        assert_eq!(latency.dropped(), 0, "{what}");
        // A hit may start a pair and stop one.
        assert_eq!(
            all + latency.unmatched_starts(),
            hits(latency.start()),
            "{what}"
        );
        assert_eq!(
            all + latency.unmatched_stops(),
            hits(latency.stop()),
            "{what}"
        );
    }
}
