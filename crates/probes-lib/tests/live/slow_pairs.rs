//! Slow pairs, which are reported one by one. The trampolines decide which pairs are slow.

use std::collections::HashSet;
use std::time::Duration;

use probes_lib::{
    EventKind, Events, FunctionSelector, Keys, Latency, Observation, SlowPair, Target, Value,
};
use test_support::process::Image;
use test_support::{Talker, fixture_forms, program_forms};

use crate::observe::options;

/// Observes pairs while a program executes `line`; returns their latency and what was recorded.
fn slow_pairs(
    talker: &mut Talker,
    observation: Observation,
    bound: Duration,
    line: &str,
) -> (Latency, Events) {
    let target = Target::open(talker.pid()).unwrap();
    let observation = observation.time("start", "stop").report_slow(bound);
    let mut observer = target.observe(&observation, options()).unwrap();
    let word = line.split_ascii_whitespace().next().unwrap();
    talker.ask(line, if word == "do" { "done" } else { word });
    let mut report = observer.remove().unwrap();
    (report.latencies.remove(0), report.events)
}

/// Returns the number of a request. Asserts that both ends of the pair have this number and its text.
fn number(pair: &SlowPair) -> i64 {
    let start = pair.start.as_ref().unwrap();
    assert_eq!((start.name(), pair.stop.name()), ("start", "stop"));
    assert_eq!(start.arguments, pair.stop.arguments);
    let [Value::Int(number), Value::String { bytes, is_whole }] = &start.arguments[..] else {
        panic!("{start:?}");
    };
    assert!(is_whole);
    assert_eq!(bytes, format!("request {number}").as_bytes());
    *number
}

// promise: Observations: Without a bound every slow pair is reported, with the arguments of its own start and stop (2 × 4)
#[test]
fn every_pair_is_reported_with_its_ends() {
    for file in program_forms("requests") {
        let mut talker = Talker::start(&file);
        for (line, key) in [
            ("flight 1 1000", None),
            ("flight 5 1000", Some("arg0")),
            ("flight 5 1000", Some("str(text)")),
            ("moving 250", Some("number")),
        ] {
            let mut observation = Observation::new();
            if let Some(key) = key {
                observation = observation.match_by(key.parse::<Keys>().unwrap());
            }
            let (latency, events) = slow_pairs(&mut talker, observation, Duration::ZERO, line);
            let pairs = &events.slow_pairs;
            assert_eq!((pairs.len() as u64, events.dropped), (latency.count(), 0));
            assert!(events.events.is_empty());
            let numbers: HashSet<i64> = pairs.iter().map(number).collect();
            assert_eq!(numbers.len(), pairs.len(), "{line}");
            let sum: Duration = pairs.iter().map(|pair| pair.duration).sum();
            let rounding = Duration::from_nanos(2 * latency.count());
            assert!(sum.abs_diff(latency.sum()) <= rounding + sum / 100_000);
            let longest = pairs.iter().map(|pair| pair.duration).max().unwrap();
            assert!(longest.abs_diff(latency.max()) <= longest / 100_000 + rounding);
            for SlowPair {
                start,
                stop,
                duration,
                ..
            } in pairs
            {
                let start = start.as_ref().unwrap();
                let between = stop.time.duration_since(start.time).unwrap();
                assert!(between.abs_diff(*duration) <= Duration::from_micros(1));
                // `moving` begins each request in one thread, and ends it in another.
                assert_eq!(start.thread == stop.thread, line.starts_with("flight"));
            }
        }
    }
}

// promise: Observations: Only pairs that last as long as the bound are reported, also if exceptions skip stops (2 × 3)
#[test]
fn only_pairs_of_the_bound_are_reported() {
    for file in fixture_forms("timed") {
        let mut talker = Talker::start(&file);
        let before = Image::of(talker.pid()).text();
        for (line, milliseconds, expected) in [
            // The inner takes a millisecond, the outer three.
            ("do (.(.).)(.)", 2, 1),
            ("do (.(.).)(.)", 1000, 0),
            // The outer has no stop.
            ("do ((.)(..)(...)", 2, 2),
        ] {
            let bound = Duration::from_millis(milliseconds);
            let (latency, events) = slow_pairs(&mut talker, Observation::new(), bound, line);
            let times: Vec<Duration> = events.slow_pairs.iter().map(|it| it.duration).collect();
            assert!(times.iter().all(|time| *time >= bound), "{times:?}");
            // Any pair may take longer than the program asks for. The histogram is accurate to 0.2 %.
            let longer_than = |bound: Duration| {
                let long = latency.times().filter(|(time, _)| *time >= bound);
                long.map(|(_, count)| count as usize).sum::<usize>()
            };
            let possible = longer_than(bound + bound / 300)..=longer_than(bound - bound / 300);
            assert!(
                possible.contains(&times.len()),
                "{line} {times:?} {possible:?}"
            );
            assert!(times.len() >= expected, "{line} {times:?}");
        }
        before.assert_same(&Image::of(talker.pid()).text(), "the program");
    }
}

// promise: Observations: Slow pairs that come faster than they are read are counted, every one (1 and 4 threads)
#[test]
fn slow_pairs_beyond_the_ring_are_counted() {
    for file in fixture_forms("timed") {
        let mut talker = Talker::start(&file);
        for threads in [1, 4] {
            let line = format!("pairs {threads} 100000");
            let no_bound = Duration::ZERO;
            let (latency, events) = slow_pairs(&mut talker, Observation::new(), no_bound, &line);
            assert_eq!(latency.count(), threads * 100_000);
            let shown = events.slow_pairs.len() as u64;
            assert!(
                shown > 0 && events.dropped > 0,
                "{shown} {}",
                events.dropped
            );
            assert_eq!(shown + events.dropped, latency.count());
        }
    }
}

// promise: Observations: Of a slow pair whose start is not kept any more, that is said (2 × 20 starts)
#[test]
fn starts_that_are_too_deep_are_unknown() {
    for file in fixture_forms("timed") {
        let mut talker = Talker::start(&file);
        let line = format!("do {}{}", "(".repeat(20), ")".repeat(20));
        let (latency, events) = slow_pairs(&mut talker, Observation::new(), Duration::ZERO, &line);
        assert_eq!(latency.count(), 20);
        let known: Vec<bool> = events
            .slow_pairs
            .iter()
            .map(|it| it.start.is_some())
            .collect();
        let expected: Vec<bool> = (0..20).map(|index| index < 16).collect();
        assert_eq!(known, expected);
    }
}

// promise: Observations: A point that ends pairs and is watched has slow pairs and hits, each once (2 × 100)
#[test]
fn watched_ends_have_hits_and_pairs() {
    for file in program_forms("requests") {
        let mut talker = Talker::start(&file);
        let all = || probes_lib::Selector::All;
        let watching = Observation::new().watch(all()).count(all());
        let watching = watching.time("stop", "start").time("start", "start");
        let no_bound = Duration::ZERO;
        let (latency, events) = slow_pairs(&mut talker, watching, no_bound, "flight 1 100");
        assert_eq!((latency.count(), events.dropped), (100, 0));
        assert_eq!(events.events.len(), 202);
        let of = |index| {
            events
                .slow_pairs
                .iter()
                .filter(|it| it.pair == Some(index))
                .count()
        };
        assert_eq!([of(0), of(1), of(2)], [100, 100, 101]);
        events
            .slow_pairs
            .iter()
            .filter(|it| it.pair == Some(2))
            .for_each(|pair| {
                number(pair);
            });
    }
}

// promise: Observations: The exit of a slow call is a return or, without a result, a jump to another function (2 × 50)
#[test]
fn exits_of_slow_calls_are_returns_or_jumps() {
    for file in fixture_forms("lasting") {
        let mut talker = Talker::start(&file);
        let target = Target::open_any(talker.pid()).unwrap();
        let tail = FunctionSelector::Glob("tail".parse().unwrap());
        let observation = Observation::new().time_functions(tail);
        let observation = observation.report_slow(Duration::ZERO);
        let mut observer = target.observe(&observation, options()).unwrap();
        talker.ask("call 1 50", "called");
        let events = observer.remove().unwrap().events;
        let stops = events.slow_pairs.iter().map(|it| &it.stop);
        let exits: Vec<_> = stops.map(|it| (it.kind, it.arguments.len())).collect();
        // Those of even numbers return; the others end with a jump.
        let pair = [(EventKind::Return, 1), (EventKind::Jump, 0)];
        assert_eq!(exits, pair.repeat(25));
    }
}
