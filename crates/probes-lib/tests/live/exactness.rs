//! Observations compared with a program that counts its own hits: they agree to the last hit,
//! whatever its threads do when an observation starts and ends.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use probes_lib::{
    Action, Event, Events, Observation, ObservationReport, Options, Selector, Target, Value,
    ValueHistogram,
};
use test_support::process::Image;
use test_support::{Talker, eventually, fixture_forms};

use crate::observe::{anonymous_code, options};
use crate::session::all;

/// Observations for each number of threads: half of them of the program as PIE, half as non-PIE.
const CYCLES: usize = 100;

/// What a thread reports about itself.
#[derive(Clone, Copy, Debug)]
struct ThreadCounts {
    rounds: u64,
    /// How often the sites of `start` called a trampoline (while observed) or a handler (while
    /// enabled); `stops` likewise.
    starts: u64,
    stops: u64,
}

/// Starts a program with this many threads, which wait. They run with a lower priority than the tool.
fn start(file: &Path, threads: usize) -> Talker {
    let mut command = Command::new("nice");
    command.args(["-n", "10", "--"]).arg(file);
    let mut talker = Talker::spawn(command.arg(threads.to_string()));
    talker.expect("ready");
    talker
}

/// What each thread reports, once all wait between two rounds.
fn pause_and_report(talker: &mut Talker) -> Vec<ThreadCounts> {
    let line = talker.ask("pause", "paused");
    let words = line.split_ascii_whitespace().skip(1);
    let of = |word: &str| {
        let numbers: Vec<u64> = word.split('/').map(|it| it.parse().unwrap()).collect();
        ThreadCounts {
            rounds: numbers[0],
            starts: numbers[1],
            stops: numbers[2],
        }
    };
    words.map(of).collect()
}

/// What each thread did between two reports.
fn since(before: &[ThreadCounts], after: &[ThreadCounts]) -> Vec<ThreadCounts> {
    let both = before.iter().zip(after);
    both.map(|(before, after)| ThreadCounts {
        rounds: after.rounds - before.rounds,
        starts: after.starts - before.starts,
        stops: after.stops - before.stops,
    })
    .collect()
}

fn sum(own: &[ThreadCounts], of: impl Fn(&ThreadCounts) -> u64) -> u64 {
    own.iter().map(of).sum()
}

/// How an observation is made.
#[derive(Clone, Copy, Debug)]
struct Scenario {
    /// Whether all threads wait between rounds when it starts, and when it ends.
    begins_paused: bool,
    ends_paused: bool,
    /// Whether the probes are switched on and off meanwhile.
    switches: bool,
    /// Whether hits are shown, and whether they are read meanwhile.
    shows: bool,
    reads: bool,
    /// How many hits it waits for.
    hits: u64,
}

impl Scenario {
    fn of(cycle: usize) -> Scenario {
        Scenario {
            begins_paused: cycle % 3 == 1,
            ends_paused: cycle % 5 % 2 == 1,
            switches: cycle % 7 >= 4,
            // In every fourth cycle, threads do not sleep, and reading their hits takes long: in half of these cycles,
            // hits are not shown.
            shows: cycle % 8 != 4,
            reads: cycle % 9 < 5,
            hits: [1, 100, 1000, 3000][cycle % 5 % 4],
        }
    }

    fn observation(self) -> Observation {
        let observation = Observation::new().count(Selector::All);
        let observation = observation.time("start", "stop");
        if self.shows {
            observation.watch(Selector::name("start"))
        } else {
            observation
        }
    }
}

/// Makes an observation. All threads of the program wait before and after. Returns the report, all
/// events, including those that were read meanwhile, and what each thread reports at the end.
fn observe(
    talker: &mut Talker,
    target: &Target,
    scenario: Scenario,
) -> (ObservationReport, Events, Vec<ThreadCounts>) {
    let mut observer = if scenario.begins_paused {
        let observer = target.observe(&scenario.observation(), options()).unwrap();
        talker.ask("go", "going");
        observer
    } else {
        talker.ask("go", "going");
        target.observe(&scenario.observation(), options()).unwrap()
    };
    let mut events = Events::default();
    eventually("there are hits", || {
        if scenario.reads {
            let new = observer.events().unwrap();
            events.dropped += new.dropped;
            events.events.extend(new.events);
        }
        let total = observer.counts().unwrap().total();
        (total >= scenario.hits).then_some(())
    });
    if scenario.switches {
        for (action, live) in [(Action::Enable, false), (Action::Disable, true)] {
            let options = Options { live, ..options() };
            target.update_with(&all(action), options).unwrap();
        }
    }
    let (mut observed, own) = if scenario.ends_paused {
        let own = pause_and_report(talker);
        (observer.remove().unwrap(), own)
    } else {
        let observed = observer.remove().unwrap();
        (observed, pause_and_report(talker))
    };
    events.dropped += observed.events.dropped;
    events.events.append(&mut observed.events.events);
    (observed, events, own)
}

/// Asserts that each hit is shown once, or counted as dropped.
fn check_events(events: &Events, before: &[ThreadCounts], own: &[ThreadCounts], what: &str) {
    assert_eq!(
        events.events.len() as u64 + events.dropped,
        sum(own, |own| own.starts),
        "{what}"
    );
    let mut numbers = BTreeMap::<i64, Vec<u64>>::new();
    let mut threads = BTreeMap::<i64, Option<i32>>::new();
    for event in &events.events {
        let Event { arguments, .. } = event;
        let [Value::Int(number), Value::Int(1)] = arguments[..] else {
            panic!("{what}: {event:?}");
        };
        let (thread, round) = (number >> 40, number & ((1 << 40) - 1));
        numbers.entry(thread).or_default().push(round as u64);
        let tid = *threads.entry(thread).or_insert(event.thread);
        assert!(tid.is_some() && tid == event.thread, "{what}: {event:?}");
    }
    for (thread, rounds) in &numbers {
        let (before, own) = (before[*thread as usize], own[*thread as usize]);
        let all = before.rounds..before.rounds + own.rounds;
        assert!(rounds.iter().all(|round| all.contains(round)), "{what}");
        // The clocks that events are sorted by may differ a little between processors.
        let mut sorted = rounds.clone();
        sorted.sort_unstable();
        sorted.dedup();
        assert_eq!(sorted.len(), rounds.len(), "{what}: shown twice");
        assert!(sorted.len() as u64 <= own.starts, "{what}");
        if events.dropped == 0 {
            assert_eq!(sorted.len() as u64, own.starts, "{what}");
            assert!(sorted.windows(2).all(|two| two[0] + 1 == two[1]), "{what}");
        }
    }
}

fn check(
    scenario: Scenario,
    before: &[ThreadCounts],
    after: &[ThreadCounts],
    observed: &ObservationReport,
    events: &Events,
) {
    let own = since(before, after);
    let (starts, stops) = (sum(&own, |own| own.starts), sum(&own, |own| own.stops));
    let what = format!("{scenario:?}: {own:?}");
    let counts = &observed.counts;
    assert_eq!(counts.hits("start"), Some(starts), "{what}");
    assert_eq!(counts.hits("stop"), Some(stops), "{what}");
    if scenario.begins_paused && scenario.ends_paused {
        for own in &own {
            assert_eq!((own.starts, own.stops), (own.rounds, own.rounds), "{what}");
        }
    }
    // A thread may be between the two sites at the start or at the end.
    let latency = &observed.latencies[0];
    let unmatched = (latency.unmatched_starts(), latency.unmatched_stops());
    assert_eq!(latency.count() + unmatched.0, starts, "{what}");
    assert_eq!(latency.count() + unmatched.1, stops, "{what}");
    assert_eq!(latency.dropped(), 0, "{what}");
    let most = |is_paused| if is_paused { 0 } else { own.len() as u64 };
    assert!(unmatched.0 <= most(scenario.ends_paused), "{what}");
    assert!(unmatched.1 <= most(scenario.begins_paused), "{what}");
    if scenario.shows {
        check_events(events, before, &own, &what);
    }
}

// promise: Observations: Counts, times and shown hits agree to the last hit with a program that
//    counts its own (100 observations each of 1, 4 and 16 threads, 600 million hits)
#[test]
fn observation_equals_the_programs_own_count() {
    for file in fixture_forms("self_counting") {
        for threads in [1, 4, 16] {
            let mut talker = start(&file, threads);
            let text = Image::of(talker.pid()).text();
            let target = Target::open(talker.pid()).unwrap();
            let mut before = pause_and_report(&mut talker);
            let mut lossless = 0;
            for cycle in 0..CYCLES / 2 {
                // If threads sleep, hits are seldom dropped.
                let sleeps = cycle % 4 != 0;
                talker.ask(&format!("sleep {}", u8::from(sleeps)), "sleeping");
                let scenario = Scenario::of(cycle);
                let (observed, events, after) = observe(&mut talker, &target, scenario);
                check(scenario, &before, &after, &observed, &events);
                lossless += usize::from(sleeps && scenario.shows && events.dropped == 0);
                before = after;
            }
            assert!(lossless > 0);
            text.assert_same(&Image::of(talker.pid()).text(), "the program");
            assert_eq!(anonymous_code(talker.pid()), [""; 0]);
        }
    }
}

// promise: Observations: Counts agree to the last hit with handlers that count (2 × 3 × 10
//    observations)
#[test]
fn observation_equals_the_handlers_count() {
    for file in fixture_forms("self_counting") {
        for threads in [1, 4, 16] {
            let mut talker = start(&file, threads);
            let target = Target::open(talker.pid()).unwrap();
            let mut before = pause_and_report(&mut talker);
            for cycle in 0..10 {
                let options = Options {
                    live: cycle % 2 == 0,
                    ..options()
                };
                let handled: BTreeMap<_, _> = talker.hits().into_iter().collect();
                target.update_with(&all(Action::Enable), options).unwrap();
                let scenario = Scenario {
                    begins_paused: true,
                    ends_paused: true,
                    switches: false,
                    ..Scenario::of(cycle)
                };
                let (observed, events, after) = observe(&mut talker, &target, scenario);
                target.update_with(&all(Action::Disable), options).unwrap();
                check(scenario, &before, &after, &observed, &events);
                for (name, hits) in talker.hits() {
                    let counted = observed.counts.hits(&name);
                    assert_eq!(counted, Some(hits - handled[&name]), "{name}");
                }
                before = after;
            }
        }
    }
}

/// Asserts that a histogram has as many values for each thread as the program reports as `hits`. A value is the number
/// of the thread or, if `has_rounds`, made of that number and the number of the round.
fn check_histogram(
    histogram: &ValueHistogram,
    has_rounds: bool,
    before: &[ThreadCounts],
    own: &[ThreadCounts],
    hits: impl Fn(&ThreadCounts) -> u64,
) {
    let what = format!("{}: {own:?}", histogram.name());
    let mut found = vec![0; own.len()];
    for bucket in histogram.buckets() {
        let least = bucket.least.unwrap();
        let thread = if has_rounds { least >> 40 } else { least };
        found[thread as usize] += bucket.count;
    }
    let expected: Vec<u64> = own.iter().map(&hits).collect();
    assert_eq!(found, expected, "{what}");
    assert_eq!(histogram.untyped(), 0, "{what}");
    // The observed rounds of a thread follow each other. Which is the first one is known only if the thread waited before.
    let (mut least, mut most) = (0, 0);
    for (thread, (before, own)) in (0_i128..).zip(before.iter().zip(own)) {
        let (many, rounds) = (i128::from(hits(own)), i128::from(own.rounds));
        let number = if has_rounds { thread << 40 } else { thread };
        let mut from_first = many * number;
        if has_rounds {
            from_first += many * i128::from(before.rounds) + many * (many - 1) / 2;
            most += many * (rounds - many);
        }
        least += from_first;
        most += from_first;
    }
    let sum = histogram.sum().unwrap();
    assert!((least..=most).contains(&sum), "{sum}, {what}");
    if has_rounds && own.len() == 1 && histogram.count() > 0 {
        let (first, last) = (histogram.min().unwrap(), histogram.max().unwrap());
        let count = i128::from(histogram.count());
        assert_eq!(
            (last - first + 1, (first + last) * count / 2),
            (count, sum),
            "{what}"
        );
    }
}

// promise: Observations: Histograms agree to the last hit, with their exact sum, with a program that counts the hits of each of its
//    threads (40 observations each of 1, 4 and 16 threads)
#[test]
fn histograms_equal_the_programs_own_count() {
    for file in fixture_forms("self_counting") {
        for threads in [1, 4, 16] {
            let mut talker = start(&file, threads);
            let target = Target::open(talker.pid()).unwrap();
            let mut before = pause_and_report(&mut talker);
            for cycle in 0..20 {
                let has_rounds = cycle % 2 == 1;
                let of = if has_rounds { "arg0" } else { "arg0 >> 40" };
                let observation = Observation::new().count(Selector::All);
                let observation = observation.histogram_of(of.parse().unwrap());
                if cycle % 3 > 0 {
                    talker.ask("go", "going");
                }
                let mut observer = target.observe(&observation, options()).unwrap();
                if cycle % 3 == 0 {
                    talker.ask("go", "going");
                }
                eventually("there are values", || {
                    let histograms = observer.histograms().unwrap();
                    let have_values = histograms.iter().all(|it| it.count() > 1000);
                    have_values.then_some(())
                });
                let (observed, after) = if cycle % 5 == 0 {
                    let after = pause_and_report(&mut talker);
                    (observer.remove().unwrap(), after)
                } else {
                    let observed = observer.remove().unwrap();
                    (observed, pause_and_report(&mut talker))
                };
                let own = since(&before, &after);
                let [starts, stops] = &observed.histograms[..] else {
                    panic!("{:?}", observed.histograms);
                };
                check_histogram(starts, has_rounds, &before, &own, |own| own.starts);
                check_histogram(stops, has_rounds, &before, &own, |own| own.stops);
                assert_eq!(observed.counts.total(), 0);
                before = after;
            }
        }
    }
}
