//! Hits shown one by one, with their arguments.

use std::fs::{self, File};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, SystemTime};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use probes_lib::{
    Event, Events, Launch, Observation, ObservationReport, Observer, Selector, Target, Value,
};
use test_support::process::Image;
use test_support::{Guard, Scratch, Talker, fixture_forms};

use crate::observe::{anonymous_code, options};

fn watch(target: &Target, selector: Selector) -> Observer {
    let observation = Observation::new().watch(selector);
    target.observe(&observation, options()).unwrap()
}

/// The values of each hit of a probe.
fn values(events: &Events, name: &str) -> Vec<Vec<Value>> {
    assert_eq!(events.dropped, 0);
    let events = events.events.iter().filter(|event| event.name() == name);
    events.map(|event| event.arguments.clone()).collect()
}

fn ints(numbers: &[i64]) -> Vec<Value> {
    numbers.iter().copied().map(Value::Int).collect()
}

// promise: Observations: Arguments are shown from every place that a note can name (2)
#[test]
fn arguments_are_shown_from_every_place() {
    for file in fixture_forms("arguments") {
        let mut talker = Talker::start(&file);
        let before = Image::of(talker.pid()).text();
        let target = Target::open(talker.pid()).unwrap();
        let mut observer = watch(&target, Selector::All);
        assert!(observer.events().unwrap().events.is_empty());
        let started = SystemTime::now();
        talker.hits();
        let events = observer.events().unwrap();
        let ended = SystemTime::now();
        // The expected values are those in target.h.
        let hello = Value::String {
            bytes: b"hello".to_vec(),
            is_whole: true,
        };
        let places = values(&events, "places");
        assert_eq!(places.len(), 2, "{places:?}");
        assert!(matches!(places[0][0], Value::Int(index) if index / 1000 == 1));
        assert_eq!(places[0][1..], [Value::Int(-1), hello]);
        assert_eq!(places[1], [Value::Float(3.25), Value::Float(3.25)]);
        assert_eq!(values(&events, "widths"), [ints(&[-7, -7, -7, 200])]);
        assert_eq!(values(&events, "registers"), [ints(&[0, 1, 2, 3, 4, 5])]);
        assert_eq!(values(&events, "silent"), [vec![]]);
        let vector = &values(&events, "vector")[0];
        let Value::Int(a) = vector[1] else {
            panic!("{vector:?}");
        };
        assert_eq!(vector[0], Value::Float(f64::from_bits((2 * a + 1) as u64)));
        let mut last = started;
        for event in &events.events {
            assert_eq!(event.thread, Some(talker.pid()));
            let early = last.duration_since(event.time).unwrap_or_default();
            assert!(early < Duration::from_millis(1) && event.time < ended);
            last = event.time;
            let bias = event.object().unwrap().load_bias();
            assert_eq!(event.address(), bias.live(event.site().unwrap().address()));
        }
        talker.hits();
        let rest = observer.remove().unwrap().events;
        let second = values(&rest, "places");
        assert!(matches!(second[0][0], Value::Int(index) if index / 1000 == 2));
        assert_eq!(rest.events.len(), events.events.len());
        before.assert_same(&Image::of(talker.pid()).text(), "the program");
        assert_eq!(anonymous_code(talker.pid()), [""; 0]);
    }
}

// promise: Observations: Every hit is shown once, and dropped ones are reported (2 × 400,000)
#[test]
fn every_hit_is_shown_or_counted_as_dropped() {
    for file in fixture_forms("timed") {
        let mut talker = Talker::start(&file);
        let target = Target::open(talker.pid()).unwrap();
        for (threads, each) in [(1_u64, 200_000_u64), (4, 50_000)] {
            let mut observer = watch(&target, Selector::name("start"));
            talker.send(&format!("pairs {threads} {each}"));
            let mut all: Vec<Event> = Vec::new();
            let mut dropped = 0;
            let mut take = |events: Events| {
                dropped += events.dropped;
                all.extend(events.events);
            };
            for _ in 0..50 {
                take(observer.events().unwrap());
            }
            talker.expect("pairs");
            take(observer.remove().unwrap().events);
            assert_eq!(
                all.len() as u64 + dropped,
                threads * each,
                "{dropped} dropped"
            );
            // The hits of each thread are in order: their first argument, a number, increases.
            let mut by_thread = std::collections::BTreeMap::<i32, Vec<i64>>::new();
            for event in &all {
                let Value::Int(number) = event.arguments[0] else {
                    panic!("{event:?}");
                };
                let numbers = by_thread.entry(event.thread.unwrap()).or_default();
                numbers.push(number);
            }
            let seen = by_thread.len() as u64;
            assert!(seen == threads || seen < threads && dropped > 0);
            for numbers in by_thread.values() {
                assert!(numbers.is_sorted_by(|one, other| one < other));
            }
        }
    }
}

// promise: Observations: A string in memory that is mapped and unmapped during an observation is shown whole, or as
//    unread (2 × 10,000 pages)
#[test]
fn strings_in_fresh_memory_are_whole_or_unread() {
    for file in fixture_forms("timed") {
        let mut talker = Talker::start(&file);
        let target = Target::open(talker.pid()).unwrap();
        let mut observer = watch(&target, Selector::name("start"));
        let was_read = |event: &Event| match &event.arguments[0] {
            Value::String { bytes, is_whole } => {
                assert_eq!((&bytes[..], *is_whole), (&b"fresh"[..], true));
                true
            }
            Value::Unread(at) => {
                assert_eq!(at % 4096, 8);
                false
            }
            other => panic!("{other:?}"),
        };
        let (mut read, mut unread) = (0, 0);
        for _ in 0..200 {
            talker.ask("fresh 50", "fresh");
            for event in observer.events().unwrap().events {
                if was_read(&event) {
                    read += 1
                } else {
                    unread += 1
                }
            }
        }
        // Whether the page was in the table of readable pages at the hit is chance.
        assert_eq!(read + unread, 200 * 50);
        observer.remove().unwrap();
        talker.hits();
    }
}

/// Observes a program from its start to its exit; `commands` is what it reads on standard input.
fn observe_to_exit(file: &Path, observation: Observation, commands: &str) -> ObservationReport {
    let scratch = Scratch::new();
    let (input, output) = (scratch.file("words"), scratch.file("said"));
    fs::write(&input, commands).unwrap();
    let mut command = Command::new(file);
    command.stdin(File::open(&input).unwrap());
    command.stdout(File::create(&output).unwrap());
    let launch = Launch::new(command).options(options()).observe(observation);
    let mut launched = launch.spawn().unwrap();
    let mut observer = launched.take_observer().unwrap();
    assert!(launched.take_observer().is_none());
    assert!(launched.child().wait().unwrap().success());
    let said = fs::read_to_string(output).unwrap();
    assert!(!said.is_empty());
    observer.remove().unwrap()
}

// promise: Observations: A program is observed from its first hit to its last (8 programs)
#[test]
fn programs_are_observed_from_first_to_last_hit() {
    for name in ["timed", "gen_ocaml_2", "gen_ocaml_2_static", "objects/host"] {
        for file in fixture_forms(name) {
            let observation = Observation::new().count(Selector::All).watch(Selector::All);
            // The program has exited by the time the events are read.
            let observed = observe_to_exit(&file, observation, "run\nrun\nrun\nquit\n");
            let name = file.display();
            for (probe, hits) in observed.counts.probes() {
                let sites = observed.counts.sites(probe).count() as u64;
                assert_eq!(hits, 3 * sites, "{probe} in {name}");
            }
            assert_eq!(observed.events.dropped, 0);
            let all = observed.events.events.len() as u64;
            assert_eq!(all, observed.counts.total(), "{name}");
        }
    }
}

#[test]
fn pairs_of_an_exited_program_are_complete() {
    for file in fixture_forms("timed") {
        let observation = Observation::new()
            .count(Selector::All)
            .time("start", "stop");
        let observed = observe_to_exit(&file, observation, "pairs 4 50000\ndo (\nquit\n");
        let latency = &observed.latencies[0];
        assert_eq!(latency.count(), 4 * 50_000);
        assert_eq!((latency.unmatched_starts(), latency.dropped()), (1, 0));
        assert_eq!(observed.counts.hits("start"), Some(4 * 50_000 + 1));
    }
}

#[test]
fn observation_from_launch_is_removed_like_any_other() {
    for file in fixture_forms("timed") {
        let mut command = Command::new(&file);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let launch = Launch::new(command)
            .options(options())
            .observe(Observation::new().count(Selector::All));
        let mut launched = launch.spawn().unwrap();
        let mut observer = launched.take_observer().unwrap();
        let target = observer.target().clone();
        let mut talker = Talker::of(Guard::from(launched.into_child()));
        for descriptor in fs::read_dir(format!("/proc/{}/fd", target.pid())).unwrap() {
            let file = fs::read_link(descriptor.unwrap().path()).unwrap();
            assert!(!file.to_str().unwrap().contains("memfd"), "{file:?}");
        }
        talker.hits();
        assert_eq!(observer.counts().unwrap().total(), 2);
        let observed = observer.remove().unwrap();
        assert_eq!(observed.counts.total(), 2);
        assert_eq!(anonymous_code(target.pid()), [""; 0]);
        let maps = fs::read_to_string(format!("/proc/{}/maps", target.pid())).unwrap();
        assert!(!maps.contains("memfd"), "{maps}");
        talker.hits();
    }
}

/// How long trampolines rely on the table of readable pages, and a little more.
const PAGES_VALID_FOR: Duration = Duration::from_millis(1100);

// promise: Observations: No values are read once the observer is gone, or while it is stopped, also if
//    the process is stopped meanwhile (4)
#[test]
fn values_are_not_read_without_an_observer() {
    for file in fixture_forms("arguments") {
        expect_expiry(&file, |_| std::thread::sleep(PAGES_VALID_FOR));
        expect_expiry(&file, |pid| {
            kill(pid, Signal::SIGSTOP).unwrap();
            std::thread::sleep(PAGES_VALID_FOR);
            kill(pid, Signal::SIGCONT).unwrap();
        });
    }
}

/// Asserts that no string is read after `idle`. Meanwhile the observer does not renew the table of readable pages, as
/// if it were dead.
fn expect_expiry(file: &Path, idle: impl Fn(Pid)) {
    let mut talker = Talker::start(file);
    let target = Target::open(talker.pid()).unwrap();
    let mut observer = watch(&target, Selector::name("places"));
    let runs = expect_read(&mut talker, &mut observer);
    idle(Pid::from_raw(talker.pid()));
    talker.hits();
    let hits = values(&observer.events().unwrap(), "places");
    assert!(matches!(hits[0][2], Value::Unread(_)), "{hits:?}");
    assert_eq!(hits[0][1], Value::Int(-(runs + 1)));
    expect_read(&mut talker, &mut observer);
    observer.remove().unwrap();
}

/// Has the program execute its sites until a string is read; returns how often. On a busy machine, the table of
/// readable pages may expire before a hit.
fn expect_read(talker: &mut Talker, observer: &mut Observer) -> i64 {
    let mut runs = 0;
    test_support::eventually("the string is read", || {
        talker.hits();
        runs += 1;
        let hits = values(&observer.events().unwrap(), "places");
        matches!(hits[0][2], Value::String { .. }).then_some(())
    });
    runs
}

/// Starts a program and observes it from its first instruction.
pub(crate) fn launch_observed(file: &Path, observation: Observation) -> (Talker, Observer) {
    let mut command = Command::new(file);
    command.stdin(Stdio::piped()).stdout(Stdio::piped());
    let launch = Launch::new(command).options(options()).observe(observation);
    let mut launched = launch.spawn().unwrap();
    let observer = launched.take_observer().unwrap();
    (Talker::of(Guard::from(launched.into_child())), observer)
}

/// Starts a program twice: one process is observed later, the other from its launch on.
fn observed_both_ways(file: &Path, selector: fn() -> Selector) -> [(Talker, Observer); 2] {
    let talker = Talker::start(file);
    let observer = watch(&Target::open(talker.pid()).unwrap(), selector());
    let launched = launch_observed(file, Observation::new().watch(selector()));
    [(talker, observer), launched]
}

/// The string that the program passes.
fn fresh() -> Value {
    Value::String {
        bytes: b"fresh".to_vec(),
        is_whole: true,
    }
}

/// Has the program execute a site with a string until the string is read.
fn hold(talker: &mut Talker, observer: &mut Observer) {
    test_support::eventually("the string is read", || {
        talker.ask("hold", "held");
        let hits = values(&observer.events().unwrap(), "start");
        let last = hits.last()?;
        (last[0] == fresh()).then_some(())
    });
}

// promise: Observations: A forked child that unmaps a page does not read it, though its parent does (4)
#[test]
fn forked_child_does_not_touch_unmapped_memory() {
    for file in fixture_forms("timed") {
        for (mut talker, mut observer) in observed_both_ways(&file, || Selector::name("start")) {
            hold(&mut talker, &mut observer);
            // The table of pages has just been renewed, and is renewed again and again.
            for _ in 0..20 {
                assert_eq!(talker.ask("fork", "forked"), "forked 0");
                observer.events().unwrap();
            }
            talker.ask("hold", "held");
            let hits = values(&observer.events().unwrap(), "start");
            assert_eq!(hits.last().unwrap()[0], fresh());
            observer.remove().unwrap();
            talker.hits();
        }
    }
}

// promise: Observations: A child that shares the memory of its parent (vfork) reads values like it (4)
#[test]
fn child_that_shares_memory_reads_values() {
    for file in fixture_forms("timed") {
        for (mut talker, mut observer) in observed_both_ways(&file, || Selector::name("start")) {
            hold(&mut talker, &mut observer);
            talker.ask("vfork", "vforked");
            let hits = values(&observer.events().unwrap(), "start");
            assert_eq!(hits.len(), 1);
            assert_eq!(hits[0][0], fresh());
            observer.remove().unwrap();
        }
    }
}
