//! Latencies between hits, measured inside a process.

use std::time::Duration;

use probes_lib::{Keys, Latency, Observation, Observer, Selector, Target};
use test_support::process::Image;
use test_support::{Talker, eventually, fixture_forms, program_forms};

use crate::observe::options;

fn observe(target: &Target) -> Observer {
    let observation = Observation::new().time("start", "stop");
    target.observe(&observation, options()).unwrap()
}

/// Sends `line` to a program, and returns the duration in its answer, a number of nanoseconds.
fn time_reported(talker: &mut Talker, line: &str) -> Duration {
    let word = line.split_ascii_whitespace().next().unwrap();
    let answer = talker.ask(line, if word == "do" { "done" } else { word });
    let number = answer.split_ascii_whitespace().next_back().unwrap();
    Duration::from_nanos(number.parse().unwrap())
}

fn is_about(time: Duration, wanted: Duration) -> bool {
    time.abs_diff(wanted) <= wanted / 500 + Duration::from_nanos(1)
}

// promise: Observations: Latencies are as long as the time that passed (2 × 20)
#[test]
fn latencies_equal_the_time_that_passed() {
    for file in fixture_forms("timed") {
        let mut talker = Talker::start(&file);
        let before = Image::of(talker.pid()).text();
        let target = Target::open(talker.pid()).unwrap();
        let mut observer = observe(&target);
        assert_eq!(observer.latencies().unwrap()[0].count(), 0);
        let mut all = Duration::ZERO;
        for _ in 0..20 {
            all += time_reported(&mut talker, "do (.)");
        }
        let so_far = observer.latencies().unwrap().remove(0);
        assert_eq!((so_far.start(), so_far.stop()), ("start", "stop"));
        let latency = observer.remove().unwrap().latencies.remove(0);
        for latency in [so_far, latency] {
            assert_eq!(latency.count(), 20);
            let shortest = latency.times().next().unwrap().0;
            assert!(shortest >= Duration::from_micros(998), "{latency:?}");
            // The time that the program itself measured includes all latencies.
            let sum = latency.mean() * 20;
            assert!(sum <= all + all / 100 && sum > Duration::from_millis(20));
            assert!(latency.max() <= all && latency.max() >= latency.quantile(0.99));
            assert!(
                is_about(latency.quantile(1.0), latency.max()),
                "{latency:?}"
            );
            assert!(latency.quantile(0.5) >= shortest && latency.mean() >= shortest);
            assert_eq!(latency.times().map(|(_, many)| many).sum::<u64>(), 20);
        }
        before.assert_same(&Image::of(talker.pid()).text(), "the program");
    }
}

/// The numbers of pairs timed, of starts without a stop, of stops without a start, and of
/// dropped times.
fn outcomes(latency: &Latency) -> [u64; 4] {
    let unmatched = [latency.unmatched_starts(), latency.unmatched_stops()];
    [
        latency.count(),
        unmatched[0],
        unmatched[1],
        latency.dropped(),
    ]
}

// promise: Observations: Pairs are matched as a stack; unmatched and too deep ones are reported (2
//    × 7)
#[test]
fn pairs_are_matched_as_a_stack() {
    for file in fixture_forms("timed") {
        let mut talker = Talker::start(&file);
        let target = Target::open(talker.pid()).unwrap();
        let (down, up) = ("(".repeat(130), ")".repeat(131));
        for (words, expected) in [
            (["()()", "()"], [3, 0, 0, 0]),
            (["(()(", "()))"], [4, 0, 0, 0]),
            ([")", "()"], [1, 0, 1, 0]),
            (["(()", ""], [1, 1, 0, 0]),
            ([")", ")"], [0, 0, 2, 0]),
            // Of pairs that are nested too deep, the innermost 64 are timed, the others dropped.
            ([&down, &up], [64, 0, 1, 66]),
            ([&down, "()()"], [2, 130, 0, 0]),
        ] {
            let mut observer = observe(&target);
            for words in words {
                talker.ask(&format!("do {words}"), "done");
            }
            let latency = observer.remove().unwrap().latencies.remove(0);
            assert_eq!(outcomes(&latency), expected, "{words:?}");
        }
        // The inner takes a millisecond, the outer three.
        let mut observer = observe(&target);
        talker.ask("do (.(.).)", "done");
        let latency = observer.remove().unwrap().latencies.remove(0);
        // Exact, unlike the times of the histogram.
        let outer = latency.max();
        let inner = latency.sum() - outer;
        let just_under = |milliseconds: u64| Duration::from_micros(998 * milliseconds);
        assert!(
            inner >= just_under(1) && outer >= inner + just_under(2),
            "{inner:?}, {outer:?}"
        );
    }
}

// promise: Observations: Starts by threads that have exited are not matched by other threads (2 ×
//    50 threads)
#[test]
fn starts_of_exited_threads_are_not_matched() {
    for file in fixture_forms("timed") {
        let mut talker = Talker::start(&file);
        let target = Target::open(talker.pid()).unwrap();
        let mut observer = observe(&target);
        // A thread reuses the control block of the one before.
        talker.ask("starts 50", "starts");
        talker.ask("pairs 1 10", "pairs");
        let latency = observer.remove().unwrap().latencies.remove(0);
        assert_eq!(outcomes(&latency), [10, 50, 0, 0]);
    }
}

// promise: Observations: Every pair is timed, whatever the number of threads (1 to 200 threads)
#[test]
fn every_pair_is_timed_with_many_threads() {
    for file in fixture_forms("timed") {
        let mut talker = Talker::start(&file);
        let target = Target::open(talker.pid()).unwrap();
        for (threads, each) in [(1, 1_000_000), (4, 200_000), (16, 20_000), (200, 1_000)] {
            let observation = Observation::new()
                .count(Selector::All)
                .time("start", "stop")
                .time("stop", "start")
                .time("start", "start");
            let mut observer = target.observe(&observation, options()).unwrap();
            talker.ask(&format!("pairs {threads} {each}"), "pairs");
            let observed = observer.remove().unwrap();
            let all = threads * each;
            let counts = &observed.counts;
            assert_eq!(counts.hits("start"), Some(all));
            assert_eq!(counts.hits("stop"), Some(all));
            let [to, back, round] = &observed.latencies[..] else {
                panic!("{:?}", observed.latencies);
            };
            assert_eq!(outcomes(to), [all, 0, 0, 0], "{threads} threads");
            // A start comes first, and a stop last.
            assert_eq!(outcomes(back), [all - threads, threads, threads, 0]);
            assert_eq!(outcomes(round), [all - threads, threads, threads, 0]);
            assert!(round.mean() >= to.mean(), "{round:?} {to:?}");
        }
    }
}

// promise: Observations: Times of threads beyond the slots are counted as dropped, one by one (2 ×
//    1,200 threads)
#[test]
fn times_beyond_the_slots_are_counted_as_dropped() {
    for file in fixture_forms("timed") {
        let mut talker = Talker::start(&file);
        let target = Target::open(talker.pid()).unwrap();
        let (threads, each) = (1_200, 10);
        let mut observer = observe(&target);
        talker.ask(&format!("pairs {threads} {each}"), "pairs");
        let latency = observer.remove().unwrap().latencies.remove(0);
        let lost = latency.dropped();
        assert!(lost > 0 && lost % each == 0, "{lost}");
        assert_eq!(outcomes(&latency), [threads * each - lost, 0, 0, lost]);
    }
}

/// Observes pairs by a key while the program `requests` executes `line`; returns the latency, how many requests there
/// were, and the sums of their times by the program's own clock, measured outside and inside of the probes.
fn requests_by_key(
    talker: &mut Talker,
    observation: Observation,
    line: &str,
) -> (Latency, u32, [Duration; 2]) {
    let target = Target::open(talker.pid()).unwrap();
    let observation = observation.time("start", "stop");
    let mut observer = target.observe(&observation, options()).unwrap();
    let answer = talker.ask(line, line.split_ascii_whitespace().next().unwrap());
    let numbers: Vec<u64> = answer
        .split_ascii_whitespace()
        .skip(1)
        .map(|it| it.parse().unwrap())
        .collect();
    let latency = observer.remove().unwrap().latencies.remove(0);
    let sums = [numbers[1], numbers[2]].map(Duration::from_nanos);
    (latency, numbers[0] as u32, sums)
}

// promise: Observations: Requests that interleave in a thread, or start in one thread and stop in another, are timed by
//    their key, every one; also those of Lwt (4 × 8)
#[test]
fn requests_are_timed_by_their_key() {
    for file in ["requests", "lwt/lwt_requests"]
        .into_iter()
        .flat_map(program_forms)
    {
        let mut talker = Talker::start(&file);
        for key in ["arg0", "number", "str(text)", "str(arg1), number"] {
            let key: Keys = key.parse().unwrap();
            for line in ["flight 5 300", "moving 100"] {
                let observation = Observation::new().match_by(key.clone());
                let (latency, many, [outer, inner]) =
                    requests_by_key(&mut talker, observation, line);
                assert_eq!(outcomes(&latency), [u64::from(many), 0, 0, 0], "{key:?}");
                assert!(latency.is_by_key() && latency.is_trusted() == Some(true));
                // A thread may have to wait for a processor anywhere. The program's clock has microseconds, and the
                // mean nanoseconds.
                let ours = latency.mean() * many;
                let unknown = Duration::from_micros(2) * many;
                assert!(
                    ours <= outer + unknown && ours + unknown >= inner,
                    "{ours:?} of {outer:?} to {inner:?}"
                );
            }
        }
    }
}

// promise: Observations: Only the pairs are timed whose start a filter chooses; their stops end no other start (2 × 3)
#[test]
fn filters_choose_the_starts_of_pairs() {
    for file in program_forms("requests") {
        let mut talker = Talker::start(&file);
        for (line, by_key, expected) in [
            ("flight 5 1000", true, 503),
            ("moving 500", true, 1000),
            ("flight 1 1000", false, 501),
        ] {
            let even = "number & 1 == 0".parse().unwrap();
            let mut observation = Observation::new().only_starts_where(even);
            if by_key {
                observation = observation.match_by("arg0".parse().unwrap());
            }
            let (latency, ..) = requests_by_key(&mut talker, observation, line);
            assert_eq!(outcomes(&latency), [expected, 0, 0, 0], "{line}");
            assert_eq!((latency.untyped(), latency.is_trusted()), (0, Some(true)));
        }
    }
}

// promise: Observations: A start that a filter leaves out does not count as one without a stop (2 × 2)
#[test]
fn starts_left_out_are_not_unmatched() {
    for file in program_forms("requests") {
        let mut talker = Talker::start(&file);
        for by_key in [false, true] {
            let even = "number & 1 == 0".parse().unwrap();
            let mut observation = Observation::new().only_starts_where(even);
            if by_key {
                observation = observation.match_by("number".parse().unwrap());
            }
            let target = Target::open(talker.pid()).unwrap();
            let observation = observation.time("start", "stop");
            let mut observer = target.observe(&observation, options()).unwrap();
            talker.ask("start 1 40", "start");
            let waiting = observer.latencies().unwrap().remove(0);
            assert_eq!(outcomes(&waiting), [0, 20, 0, 0], "{by_key}");
            talker.ask("stop", "stop");
            // Without a key, the innermost 64 of the 130 starts are kept. Half of the 66 others would have been timed.
            talker.ask("start 1 130", "start");
            talker.ask("stop", "stop");
            let latency = observer.remove().unwrap().latencies.remove(0);
            let lost = if by_key { 0 } else { 66 };
            let timed = 20 + 65 - lost / 2;
            assert_eq!(outcomes(&latency), [timed, 0, 0, lost], "{by_key}");
        }
    }
}

// promise: Observations: Keys that are no answer, that several requests have at a time, or for which there is no room
//    are counted as such (2 × 4)
#[test]
fn requests_that_keys_do_not_distinguish_are_counted() {
    for file in program_forms("requests") {
        let mut talker = Talker::start(&file);
        let by = |key: &str| Observation::new().match_by(key.parse().unwrap());
        let (latency, ..) = requests_by_key(&mut talker, by("str(arg0)"), "flight 5 100");
        assert_eq!((outcomes(&latency), latency.untyped()), ([0; 4], 210));
        // With a filter that has no answer either, or that chooses no start: each hit is untyped once at most.
        for (filter, untyped) in [(r#"str(arg0) == "x""#, 210), ("number < 0", 105)] {
            let chosen = by("str(arg0)").only_starts_where(filter.parse().unwrap());
            let (latency, ..) = requests_by_key(&mut talker, chosen, "flight 5 100");
            assert_eq!((outcomes(&latency), latency.untyped()), ([0; 4], untyped));
        }
        // The other four wait while one ends; each replaces the one before.
        let (latency, ..) = requests_by_key(&mut talker, by("tid"), "flight 5 100");
        assert_eq!(outcomes(&latency), [101, 4, 4, 0]);
        assert_eq!((latency.doubtful(), latency.is_trusted()), (4, None));
        let started = |talker: &mut Talker, many: u64| {
            let target = Target::open(talker.pid()).unwrap();
            let observation = by("number").time("start", "stop");
            let mut observer = target.observe(&observation, options()).unwrap();
            talker.ask(&format!("start 1 {many}"), "start");
            let waiting = observer.latencies().unwrap().remove(0);
            talker.ask("stop", "stop");
            (waiting, observer.remove().unwrap().latencies.remove(0))
        };
        let (waiting, latency) = started(&mut talker, 10_000);
        assert_eq!(outcomes(&waiting), [0, 10_000, 0, 0]);
        assert_eq!(outcomes(&latency), [10_000, 0, 0, 0]);
        let (waiting, latency) = started(&mut talker, 100_000);
        let lost = latency.dropped();
        assert!((20_000..90_000).contains(&lost), "{lost}");
        assert_eq!(outcomes(&waiting), [0, 100_000 - lost, 0, lost]);
        assert_eq!(outcomes(&latency), [100_000 - lost, 0, lost, lost]);
    }
}

#[test]
fn pair_observations_start_and_end_under_load() {
    for file in fixture_forms("timed") {
        let mut talker = Talker::start(&file);
        let before = Image::of(talker.pid()).text();
        let target = Target::open(talker.pid()).unwrap();
        let mut observer = observe(&target);
        talker.send("pairs 4 3000000");
        // All pairs may be done before a later observation begins: only the first has to see some.
        eventually("pairs are timed", || {
            (observer.latencies().unwrap()[0].count() > 0).then_some(())
        });
        for _ in 0..20 {
            let latency = observer.remove().unwrap().latencies.remove(0);
            // When an observation starts or ends, each of the 4 threads may be between a start
            // and a stop.
            assert!(latency.unmatched_stops() <= 4, "{latency:?}");
            assert!(latency.unmatched_starts() <= 4, "{latency:?}");
            observer = observe(&target);
        }
        observer.remove().unwrap();
        talker.expect("pairs");
        before.assert_same(&Image::of(talker.pid()).text(), "the program");
    }
}

/// Has the program execute the command `name`, and returns the times from start to stop.
fn times_of(talker: &mut Talker, target: &Target, name: &str, rounds: u32) -> Latency {
    let mut observer = observe(target);
    talker.ask(&format!("{name} {rounds}"), name);
    observer.remove().unwrap().latencies.remove(0)
}

// promise: Observations: Pairs that interleave in a thread are noticed, by their numbers or by their stack
//    frames (2 × 5 programs)
#[test]
fn pairs_that_interleave_are_noticed() {
    for file in program_forms("interleaved") {
        let mut talker = Talker::start(&file);
        let target = Target::open(talker.pid()).unwrap();
        for name in ["steady", "bursts", "numbered", "connection", "tasks"] {
            let latency = times_of(&mut talker, &target, name, 100);
            let (interleaved, count) = (latency.interleaved(), latency.count());
            assert!(
                interleaved <= count && interleaved > count / 4,
                "{name}: {interleaved} of {count}"
            );
        }
    }
}

// promise: Observations: Pairs are never trusted without a key if a number of one name differs between start and stop, as if
//    threads hand requests to each other (2 programs)
#[test]
fn requests_that_threads_hand_over_are_noticed() {
    for file in program_forms("requests") {
        let mut talker = Talker::start(&file);
        let target = Target::open(talker.pid()).unwrap();
        let latency = times_of(&mut talker, &target, "handed", 100);
        assert_eq!((latency.count(), latency.interleaved()), (200, 200));
        assert_eq!(latency.is_trusted(), Some(false), "{latency:?}");
        // The numbers also differ between a start and the next one, which is no sign of interleaving.
        let observation = Observation::new().time("start", "start");
        let mut observer = target.observe(&observation, options()).unwrap();
        talker.ask("flight 1 100", "flight");
        let latency = observer.remove().unwrap().latencies.remove(0);
        assert_eq!((latency.count(), latency.interleaved()), (100, 0));
    }
}

// promise: Observations: Pairs that may interleave, or whose stops exceptions skip, are reported as doubtful
//    (2 × 4 programs)
#[test]
fn doubtful_pairs_are_noticed() {
    for file in program_forms("interleaved") {
        let mut talker = Talker::start(&file);
        let target = Target::open(talker.pid()).unwrap();
        for (name, doubtful) in [
            ("always_open", 100),
            ("open_connection", 100),
            ("deeper", 100),
            // The first exception is in round 5, and there is one in each ten rounds.
            ("unnumbered_exceptions", 86),
        ] {
            let latency = times_of(&mut talker, &target, name, 100);
            let found = (latency.interleaved(), latency.doubtful());
            assert_eq!(found, (0, doubtful), "{name}");
            assert_eq!(latency.is_trusted(), None, "{name}");
        }
    }
}

// promise: Observations: Pairs that interleave on several stacks of a thread are noticed (2 × 100 times)
#[test]
fn fibers_that_interleave_are_noticed() {
    for file in fixture_forms("timed") {
        let mut talker = Talker::start(&file);
        let target = Target::open(talker.pid()).unwrap();
        // Of four stops, the first two are in frames below that of the last start.
        let latency = times_of(&mut talker, &target, "fibers", 100);
        assert_eq!((latency.count(), latency.interleaved()), (400, 200));
        let latency = times_of(&mut talker, &target, "nested", 100);
        assert_eq!((latency.count(), latency.interleaved()), (400, 0));
        assert_eq!(latency.doubtful(), 0);
    }
}

// promise: Observations: Pairs that nest are not taken for interleaving ones: recursion, tail calls,
//    exceptions, threads (2 × 10 programs)
#[test]
fn nested_pairs_do_not_interleave() {
    for file in program_forms("interleaved") {
        let mut talker = Talker::start(&file);
        let target = Target::open(talker.pid()).unwrap();
        for name in [
            "recursion",
            "lengths",
            "deep",
            "requests",
            "tail_calls",
            "exceptions",
            "spans",
            "states",
            "sizes",
            "threads",
        ] {
            let latency = times_of(&mut talker, &target, name, 1000);
            assert!(latency.count() > 100, "{name}");
            assert_ne!(latency.is_trusted(), Some(false), "{name}: {latency:?}");
            assert_eq!(latency.doubtful(), 0, "{name}: {latency:?}");
        }
    }
}
