//! Counting hits inside a process: exactly, without touching what is enabled, and without a trace
//! afterwards.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use probes_lib::{
    Action, Counts, Effect, ErrorKind, FunctionSelector, MemoryError, Observation, ObserveError,
    Options, ProbeError, Refusal, Selector, State, Target,
};
use test_support::process::{Image, children};
use test_support::{Talker, fixture, fixture_forms};

use crate::session::{all, named};

fn hits(counts: &Counts) -> BTreeMap<String, u64> {
    let probes = counts.probes();
    probes.map(|(name, hits)| (name.to_owned(), hits)).collect()
}

pub(crate) fn options() -> Options {
    Options {
        time_limit: test_support::DEADLINE,
        ..Options::default()
    }
}

/// Mappings of code that belong to no file.
pub(crate) fn anonymous_code(pid: i32) -> Vec<String> {
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    let is_strange = |line: &&str| line.contains(" r-xp ") && line.contains(" 00:00 0");
    let lines = maps.lines().filter(is_strange);
    lines
        .filter(|line| !line.contains("[v"))
        .map(str::to_owned)
        .collect()
}

// promise: Observations: Every hit is counted, and nothing remains when the observation ends (16
//    programs)
#[test]
fn every_hit_is_counted_and_nothing_remains() {
    let mut files: Vec<PathBuf> = Vec::new();
    for name in [
        "gen_ocaml",
        "gen_ocaml_dot1",
        "gen_ocaml_1",
        "gen_ocaml_2_static",
        "mixed_generations",
        "page_borders",
        "segments",
        "multi_semaphore",
    ] {
        files.extend(fixture_forms(name));
    }
    for file in files {
        let mut talker = Talker::start(&file);
        let name = file.display();
        talker.hits();
        let before = Image::of(talker.pid()).text();
        let target = Target::open(talker.pid()).unwrap();
        let sites: BTreeMap<String, u64> = target
            .states()
            .unwrap()
            .probes()
            .map(|probe| (probe.name().to_owned(), probe.site_count() as u64))
            .filter(|(_, sites)| *sites > 0)
            .collect();
        let mut observer = target
            .observe(&Observation::new().count(Selector::All), options())
            .unwrap();
        let times = |times: u64| -> BTreeMap<String, u64> {
            let sites = sites.iter();
            sites
                .map(|(name, sites)| (name.clone(), times * sites))
                .collect()
        };
        assert_eq!(hits(&observer.counts().unwrap()), times(0), "{name}");
        for round in 1..=5 {
            talker.hits();
            assert_eq!(hits(&observer.counts().unwrap()), times(round), "{name}");
        }
        let started = Instant::now();
        let observed = observer.remove().unwrap();
        assert!(observed.stopped > Duration::ZERO && observed.stopped <= started.elapsed());
        let counts = observed.counts;
        assert_eq!(hits(&counts), times(5), "{name}");
        assert_eq!(counts.total(), 5 * sites.values().sum::<u64>());
        before.assert_same(&Image::of(talker.pid()).text(), "the program");
        assert_eq!(anonymous_code(talker.pid()), [""; 0]);
        talker.hits();
    }
}

// promise: Observations: Probes are switched and shown as usual while they are observed (6
//    programs)
#[test]
fn probes_are_switched_as_usual_while_observed() {
    let mut files: Vec<PathBuf> = fixture_forms("threads_spin").into();
    files.extend(fixture_forms("page_borders"));
    files.extend(fixture_forms("churn"));
    for file in files {
        let talker = Talker::start(&file);
        let target = Target::open(talker.pid()).unwrap();
        let states = || {
            let states = target.states().unwrap();
            let states: Vec<_> = states
                .probes()
                .map(|it| (it.counter(), it.state()))
                .collect();
            assert!(states.windows(2).all(|two| two[0] == two[1]), "{states:?}");
            states[0]
        };
        let on = (1, State::Enabled);
        let off = (0, State::Disabled);
        for live in [false, true] {
            let options = Options { live, ..options() };
            target.update_with(&all(Action::Enable), options).unwrap();
            let mut observer = target
                .observe(&Observation::new().count(Selector::All), options)
                .unwrap();
            assert_eq!(states(), on);
            target.update_with(&all(Action::Disable), options).unwrap();
            assert_eq!(states(), off);
            target.update_with(&all(Action::Enable), options).unwrap();
            assert_eq!(states(), on);
            target.update_with(&all(Action::Disable), options).unwrap();
            observer.remove().unwrap();
            assert_eq!(states(), off);
            let mut observer = target
                .observe(&Observation::new().count(Selector::All), options)
                .unwrap();
            target.update_with(&all(Action::Enable), options).unwrap();
            observer.remove().unwrap();
            assert_eq!(states(), on);
            target.update_with(&all(Action::Disable), options).unwrap();
        }
    }
}

#[test]
fn handlers_run_as_usual_while_observed() {
    for file in fixture_forms("gen_ocaml_2") {
        let mut talker = Talker::start(&file);
        let target = Target::open(talker.pid()).unwrap();
        let mut observer = target
            .observe(
                &Observation::new().count(Selector::name("plain")),
                options(),
            )
            .unwrap();
        let of = |talker: &mut Talker| BTreeMap::from_iter(talker.hits())["plain"];
        assert_eq!(of(&mut talker), 0);
        target.update(&named(Action::Enable, "plain")).unwrap();
        assert_eq!(of(&mut talker), 1);
        assert_eq!(of(&mut talker), 2);
        target.update(&named(Action::Disable, "plain")).unwrap();
        assert_eq!(of(&mut talker), 2);
        assert_eq!(hits(&observer.remove().unwrap().counts)["plain"], 4);
    }
}

// promise: Observations: Every hit is counted, whatever the number of threads (1 to 200 threads)
#[test]
fn every_hit_is_counted_with_many_threads() {
    for file in fixture_forms("idle_threads") {
        for threads in [1_u64, 4, 16, 200] {
            let mut talker = Talker::start_with(&file, [threads.to_string()]);
            let target = Target::open(talker.pid()).unwrap();
            let mut observer = target
                .observe(&Observation::new().count(Selector::All), options())
                .unwrap();
            for _ in 0..20 {
                talker.ask("round", "round");
            }
            let counts = hits(&observer.remove().unwrap().counts);
            assert_eq!(counts["ping"], 20 * 3 * threads);
            assert_eq!(counts["pong"], 20 * threads);
        }
    }
}

// promise: Observations: Observations start and end under threads that never pause (4 × 20)
#[test]
fn observations_start_and_end_under_busy_threads() {
    let mut files: Vec<PathBuf> = fixture_forms("threads_spin").into();
    files.extend(fixture_forms("churn"));
    for file in files {
        const THREADS: u64 = 4;
        let mut talker = Talker::start(&file);
        let before = Image::of(talker.pid()).text();
        let target = Target::open(talker.pid()).unwrap();
        let mut total = 0;
        for _ in 0..20 {
            let mut observer = target
                .observe(&Observation::new().count(Selector::All), options())
                .unwrap();
            let counts = observer.remove().unwrap().counts;
            // Each thread executes one site after the other, over and over.
            let mut sites = Vec::new();
            for name in ["ping", "pong"] {
                sites.extend(counts.sites(name).map(|site| site.hits));
            }
            let (least, most) = (sites.iter().min().unwrap(), sites.iter().max().unwrap());
            assert!(most - least <= THREADS, "{sites:?}");
            total += counts.total();
        }
        assert!(total > 0);
        talker.ask("report", "report");
        before.assert_same(&Image::of(talker.pid()).text(), "the program");
        assert_eq!(anonymous_code(talker.pid()), [""; 0]);
    }
}

#[test]
fn orphaned_observation_is_reported_and_removed() {
    for file in fixture_forms("gen_ocaml_2") {
        let mut talker = Talker::start(&file);
        let before = Image::of(talker.pid()).text();
        let target = Target::open(talker.pid()).unwrap();
        assert_eq!(target.states().unwrap().observed_sites(), 0);
        drop(
            target
                .observe(&Observation::new().count(Selector::All), options())
                .unwrap(),
        );
        talker.hits();
        assert_eq!(target.states().unwrap().observed_sites(), 2);
        // The next observation starts from zero.
        drop(
            target
                .observe(
                    &Observation::new().count(Selector::name("plain")),
                    options(),
                )
                .unwrap(),
        );
        assert_eq!(target.states().unwrap().observed_sites(), 1);
        assert_eq!(target.clean(options()).unwrap().sites, 1);
        assert_eq!(target.clean(options()).unwrap().sites, 0);
        before.assert_same(&Image::of(talker.pid()).text(), "the program");
        assert_eq!(anonymous_code(talker.pid()), [""; 0]);
    }
}

#[test]
fn waiting_calls_continue_after_their_thread_mapped_memory() {
    for file in fixture_forms("gen_ocaml_2") {
        // Its only thread waits for a line.
        let mut talker = Talker::start(&file);
        let target = Target::open(talker.pid()).unwrap();
        for _ in 0..20 {
            target
                .observe(&Observation::new().count(Selector::All), options())
                .unwrap()
                .remove()
                .unwrap();
        }
        talker.hits();
    }
}

#[test]
fn probes_of_objects_are_counted_with_the_program() {
    for file in fixture_forms("objects/host") {
        let mut talker = Talker::start(&file);
        let plugin = fixture("objects/plugin.so");
        talker.ask(&format!("load {}", plugin.display()), "loaded");
        let target = Target::open(talker.pid()).unwrap();
        let mut observer = target
            .observe(&Observation::new().count(Selector::All), options())
            .unwrap();
        talker.hits();
        talker.ask("plugins", "plugins");
        let counts = observer.remove().unwrap().counts;
        assert_eq!(hits(&counts)["ping"], 3 + 1);
        assert_eq!(hits(&counts)["plug"], 2);
        assert_eq!(
            counts
                .sites("ping")
                .map(|site| site.hits)
                .collect::<Vec<_>>(),
            [1; 4]
        );
        assert_eq!(anonymous_code(talker.pid()), [""; 0]);
    }
}

// promise: Observations: A forked child runs on with the trampolines that it inherits, and they
//    can be removed from it without the observer of its parent (2 × 2)
#[test]
fn trampolines_that_a_child_inherits_can_be_removed() {
    for file in fixture_forms("forker") {
        let mut talker = Talker::start(&file);
        let parent = talker.pid();
        let before = Image::of(parent).text();
        let target = Target::open(parent).unwrap();
        let observation = Observation::new()
            .count(Selector::All)
            .time("ping", "pong")
            .watch(Selector::All);
        let mut observer = target.observe(&observation, options()).unwrap();
        talker.hits();
        talker.ask("fork", "forked");
        talker.ask("child", "child");
        let child = children(parent)[0];
        talker.hits();
        let its = Target::open(child).unwrap();
        assert_eq!(its.states().unwrap().observed_sites(), 4);
        // What it has inherited from its parent is removed first.
        let mut own = its.observe(&observation, options()).unwrap();
        talker.hits();
        talker.hits();
        let observed = own.remove().unwrap();
        assert_eq!(observed.counts.total(), 2 * 4);
        assert_eq!(observed.events.events.len(), 2 * 4);
        let mut threads = observed.events.events.iter().map(|event| event.thread);
        assert!(threads.all(|thread| thread == Some(child)));
        assert_eq!(observed.latencies[0].count(), 2);
        before.assert_same(&Image::of(child).text(), "the child");
        assert_eq!(anonymous_code(child), [""; 0]);
        // In the next child, the trampolines are left for `clean` to remove.
        talker.ask("quit", "forked");
        talker.ask("child", "child");
        let child = children(parent)[0];
        assert_eq!(
            Target::open(child).unwrap().clean(options()).unwrap().sites,
            4
        );
        assert_eq!(anonymous_code(child), [""; 0]);
        talker.hits();
        talker.ask("quit", "forked");
        let observed = observer.remove().unwrap();
        assert_eq!(observed.counts.total(), 4, "those of the parent alone");
        assert_eq!(observed.events.events.len(), 4);
        before.assert_same(&Image::of(parent).text(), "the parent");
        talker.hits();
    }
}

#[test]
fn unobservable_probes_are_refused_and_nothing_changes() {
    for file in fixture_forms("gen_ocaml_2") {
        let talker = Talker::start(&file);
        let before = Image::of(talker.pid()).text();
        let target = Target::open(talker.pid()).unwrap();
        let refused =
            |selector| match target.observe(&Observation::new().count(selector), options()) {
                Ok(_) => panic!("it is observed"),
                Err(error) => error,
            };
        let error = refused(Selector::name("flag"));
        assert!(
            matches!(error.kind(), ErrorKind::Observe(ObserveError::NoSites)),
            "{error}"
        );
        let error = refused(Selector::name("nothing"));
        assert!(
            matches!(error.kind(), ErrorKind::Probe(ProbeError::Unknown { .. })),
            "{error}"
        );
        assert!(
            error.to_string().ends_with("nothing was changed"),
            "{error}"
        );
        before.assert_same(&Image::of(talker.pid()).text(), "the program");
    }
}

// promise: Observations: A program without a code cave for an injected call is refused with that
//    reason (2)
#[test]
fn program_without_a_code_cave_is_refused() {
    for file in fixture_forms("full_page_static") {
        let mut talker = Talker::start(&file);
        let before = Image::of(talker.pid()).text();
        let target = Target::open(talker.pid()).unwrap();
        let Err(error) = target.observe(&Observation::new().count(Selector::All), options()) else {
            panic!("it is observed");
        };
        let pid = talker.pid();
        let why = format!(
            "process {pid} has no loaded object with 320 free bytes after its code, which observing \
             needs to inject system calls; nothing was changed"
        );
        assert_eq!(error.to_string(), why);
        before.assert_same(&Image::of(pid).text(), "the program");
        talker.hits();
    }
}

// promise: Observations: Code that is mapped shared is not observed, and the refusal comes before
//    the process is stopped (2)
#[test]
fn code_mapped_shared_is_refused_others_are_observed() {
    for file in fixture_forms("shared_text") {
        let mut talker = Talker::start(&file);
        let before = Image::of(talker.pid()).text();
        let target = Target::open(talker.pid()).unwrap();
        let all = Observation::new().count(Selector::All);
        let Err(error) = target.observe(&all, options()) else {
            panic!("it is observed");
        };
        let kind = error.kind();
        assert!(
            matches!(kind, ErrorKind::Memory(MemoryError::Shared { .. })),
            "{error}"
        );
        assert_eq!(error.effect(), Effect::NothingChanged);
        before.assert_same(&Image::of(talker.pid()).text(), "the program");
        let free = Observation::new().count(Selector::name("free"));
        let mut observer = target.observe(&free, options()).unwrap();
        talker.hits();
        assert_eq!(hits(&observer.remove().unwrap().counts)["free"], 1);
        before.assert_same(&Image::of(talker.pid()).text(), "the program");
    }
}

#[test]
fn functions_mapped_shared_are_refused_alone() {
    for file in fixture_forms("shared_text") {
        let talker = Talker::start(&file);
        let before = Image::of(talker.pid()).text();
        let target = Target::open(talker.pid()).unwrap();
        let functions = |glob: &str| FunctionSelector::Glob(glob.parse().unwrap());
        let plain = Observation::new().count_functions(functions("Guarded.plain"));
        let error = target.observe(&plain, options()).err().unwrap();
        assert!(error.to_string().contains("is mapped shared"), "{error}");
        let both = plain.count_functions(functions("fflush"));
        let error = target.observe(&both, options()).err().unwrap();
        assert_eq!(error.effect(), Effect::NothingChanged);
        let all = Observation::new().count_functions(functions("*"));
        let mut observer = target.observe(&all, options()).unwrap();
        let counts = observer.remove().unwrap().counts;
        let refused = counts.refused().iter();
        let shared = refused.filter(|it| it.why == Refusal::SharedCode);
        let names: Vec<&str> = shared.map(|it| &*it.name).collect();
        assert_eq!(names, ["Guarded.plain"]);
        before.assert_same(&Image::of(talker.pid()).text(), "the program");
    }
}

#[test]
fn counts_of_an_unloaded_object_are_kept() {
    for file in fixture_forms("objects/host") {
        let mut talker = Talker::start(&file);
        let plugin = fixture("objects/plugin.so");
        talker.ask(&format!("load {}", plugin.display()), "loaded");
        let target = Target::open(talker.pid()).unwrap();
        let observation = Observation::new().count(Selector::All);
        let mut observer = target.observe(&observation, options()).unwrap();
        talker.hits();
        talker.ask("plugins", "plugins");
        talker.ask("unload 0", "unloaded");
        talker.hits();
        let counts = observer.remove().unwrap().counts;
        assert_eq!(hits(&counts)["plug"], 2);
        assert_eq!(hits(&counts)["ping"], 2 * 3 + 1);
        assert_eq!(anonymous_code(talker.pid()), [""; 0]);
        assert_eq!(target.clean(options()).unwrap().sites, 0);
        talker.hits();
    }
}

// promise: Observations: Observations begin while an object with probes is loaded and unloaded all the
//    time (2 × 50)
#[test]
fn observations_begin_while_objects_load_and_unload() {
    for file in fixture_forms("objects/host") {
        let mut talker = Talker::start(&file);
        let plugin = fixture("objects/plugin.so");
        let target = Target::open(talker.pid()).unwrap();
        talker.send(&format!("churn 2000 {}", plugin.display()));
        let observation = Observation::new().count(Selector::All);
        for _ in 0..50 {
            // If an object is unloaded before its sites are patched, the next attempt skips it.
            let mut observer = target.observe(&observation, options()).unwrap();
            observer.remove().unwrap();
        }
        talker.expect("churned 2000");
        assert_eq!(target.clean(options()).unwrap().sites, 0);
        assert_eq!(anonymous_code(talker.pid()), [""; 0]);
        talker.hits();
    }
}
