//! Hits and calls in domains, threads and fibers are counted, timed and recorded, while the program
//! collects garbage.

use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use probes_lib::{
    Action, Actions, FunctionSelector, Observation, Options, Selector, Target, Value,
};
use test_support::{DEADLINE, Guard, Talker, eventually, program_forms, test_name};

use crate::chroot::{ChrootProgram, Isolation};
use crate::compound::assert_shown;
use crate::observations::{check, everything};

/// How many observations there are of domains, and of system threads in domains; each form of the
/// program has half of them.
const CYCLES: usize = 12;
const CYCLES_OF_THREADS: usize = 6;

/// How often the functions of each form of the program are observed.
const CALL_CYCLES: usize = 3;

/// How many observers of each program are killed.
const KILLS: usize = 4;

/// The environment variable that makes a test run as an observer: the pid of the process that it
/// observes.
const OBSERVED: &str = "MATRIX_OBSERVED";

/// Small minor heaps, so that values are moved all the time.
const OCAMLRUNPARAM: &str = "v=0,s=4k";

fn options() -> Options {
    Options {
        time_limit: DEADLINE,
        ..Options::default()
    }
}

/// Returns the rounds of all workers. Asserts that no value that is live across a site, or that a
/// handler has allocated, was corrupted.
fn rounds(talker: &mut Talker, ask: &str) -> u64 {
    talker.send(ask);
    let mut rounds = 0;
    loop {
        let line = talker.line().expect("a report");
        if line == "report end" {
            return rounds;
        }
        assert!(line.ends_with("broken=0"), "{line}");
        let number = line.split_once("rounds=").expect("its rounds").1;
        let number = number.split(' ').next().expect("a number");
        rounds += number.parse::<u64>().expect("a number");
    }
}

fn observe_domains(file: &Path, args: &[&str], cycles: usize) {
    let ChrootProgram {
        mut talker, pid, ..
    } = ChrootProgram::start_with(Isolation::Chroot, file, args, OCAMLRUNPARAM);
    let target = Target::open(pid).unwrap();
    let observation = everything(&target);
    for cycle in 0..cycles {
        let what = format!("{}: cycle {cycle}", file.display());
        let options = Options {
            live: cycle % 2 == 1,
            ..options()
        };
        let switch = |action| {
            let actions = Actions::of(action, Selector::All);
            target.update_with(&actions, options).unwrap();
        };
        // The probes are enabled during the whole observation, enabled and disabled in the
        // middle of it, or stay disabled.
        if cycle % 3 == 0 {
            switch(Action::Enable);
        }
        // If all workers pause when it begins and ends, every round is one hit of each probe.
        let is_exact = cycle % 5 == 0;
        let first = is_exact.then(|| rounds(&mut talker, "pause"));
        let mut observer = target.observe(&observation, options).unwrap();
        if is_exact {
            talker.ask("go", "going");
        }
        if cycle % 3 == 1 {
            switch(Action::Enable);
            switch(Action::Disable);
        }
        eventually("there are hits", || {
            (observer.counts().unwrap().total() > 0).then_some(())
        });
        let mut events = observer.events().unwrap();
        let last = is_exact.then(|| rounds(&mut talker, "pause"));
        let mut observed = observer.remove().unwrap();
        if is_exact {
            talker.ask("go", "going");
        }
        events.dropped += observed.events.dropped;
        events.events.append(&mut observed.events.events);
        check(&observed, &events, &what);
        if let (Some(first), Some(last)) = (first, last) {
            for (name, hits) in observed.counts.probes() {
                assert_eq!(hits, last - first, "{what}: {name}");
            }
        }
        if cycle % 3 == 0 {
            switch(Action::Disable);
        }
    }
    assert!(rounds(&mut talker, "report") > 0);
    talker.close_input();
    assert!(talker.guard().wait().success());
}

// promise: Observations: Counts of domains that collect garbage all the time agree to the last hit
//    (12 observations of 8 domains in each chroot)
#[test]
fn domains_that_collect_garbage_are_counted_exactly() {
    for file in program_forms("ocaml5/domains") {
        observe_domains(&file, &["8", "1", "collect"], CYCLES / 2);
    }
}

// promise: Functions: Calls of a function in 1, 4 and 16 domains, with threads and while one collects garbage, are
//    counted, timed and in histograms to the last one (36 observations in each chroot)
#[test]
fn calls_in_domains_are_counted_and_timed() {
    let [pie, nopie] = program_forms("ocaml5/domains");
    for (file, args) in [
        (&pie, ["1", "1"].as_slice()),
        (&pie, &["4", "2", "collect"]),
        (&nopie, &["4", "2", "collect"]),
        (&nopie, &["16", "1"]),
    ] {
        let ChrootProgram {
            mut talker, pid, ..
        } = ChrootProgram::start_with(Isolation::Chroot, file, args, OCAMLRUNPARAM);
        let target = Target::open(pid).unwrap();
        let round = FunctionSelector::Glob("Domains.round".parse().unwrap());
        let counting = Observation::new().count_functions(round.clone());
        let values = counting.clone().histogram_of("7".parse().unwrap());
        let timing = Observation::new().time_functions(round);
        for cycle in 0..3 * CALL_CYCLES {
            let first = rounds(&mut talker, "pause");
            let observation = [&counting, &timing, &values][cycle % 3];
            let mut observer = target.observe(observation, options()).unwrap();
            talker.ask("go", "going");
            eventually("there are calls", || {
                let timed = observer.function_latencies().unwrap();
                let timed: u64 = timed.iter().map(|it| it.count()).sum();
                let values = observer.histograms().unwrap();
                let values: u64 = values.iter().map(|it| it.count()).sum();
                (observer.counts().unwrap().total() + timed + values > 0).then_some(())
            });
            let last = rounds(&mut talker, "pause");
            let report = observer.remove().unwrap();
            talker.ask("go", "going");
            let counted = report.counts.functions().map(|it| it.hits);
            let values = report.histograms.iter().map(|it| {
                assert_eq!(it.sum(), Some(7 * i128::from(it.count())));
                it.count() + it.untyped()
            });
            // The handler of one of its probes raises an exception.
            let timed = report.function_latencies.iter().map(|it| {
                assert_eq!((it.lost(), it.unmatched_exits()), (0, 0));
                it.count() + it.unwound() + it.running()
            });
            let calls: Vec<u64> = counted.chain(timed).chain(values).collect();
            // Each of its three probes has code of the same name, which is left out.
            assert_eq!(calls, [last - first], "{}: {cycle}", file.display());
        }
        talker.close_input();
        assert!(talker.guard().wait().success());
    }
}

// promise: Functions: Calls in domains that begin and end meanwhile, and in more domains than there are counters of their own,
//    are counted to the last one (6 observations of up to 48 domains in each chroot)
#[test]
fn calls_in_short_lived_domains_are_counted_exactly() {
    for file in program_forms("ocaml5/domains") {
        let ChrootProgram {
            mut talker, pid, ..
        } = ChrootProgram::start(Isolation::Chroot, &file, &["0"]);
        let target = Target::open(pid).unwrap();
        let functions = FunctionSelector::Glob("Domains.*".parse().unwrap());
        let observation = Observation::new().count_functions(functions);
        for (generations, domains, calls) in [(20, 2, 200_000), (10, 8, 50_000), (1, 47, 20_000)] {
            let mut observer = target.observe(&observation, options()).unwrap();
            let ask = format!("generations {generations} {domains} {calls}");
            talker.ask(&ask, "generations");
            let counts = observer.remove().unwrap().counts;
            let hits = |name: &str| {
                let named = counts.functions().filter(|it| it.name == name);
                named.map(|it| it.hits).collect::<Vec<u64>>()
            };
            // The domain that spawns the others calls the function as well.
            let expected = generations * (domains + 1) * calls;
            assert_eq!(hits("Domains.step"), [expected], "{ask}");
            assert_eq!(hits("Domains.generations"), [1], "{ask}");
        }
        talker.close_input();
        assert!(talker.guard().wait().success());
    }
}

// promise: Functions: The collector of OCaml 5 is timed: collections and what all domains do together (4 kinds of work in each
//    chroot)
#[test]
fn work_of_the_collector_is_timed() {
    let [file, _] = program_forms("ocaml5/domains");
    let args = ["4", "1", "collect"];
    let ChrootProgram {
        mut talker, pid, ..
    } = ChrootProgram::start_with(Isolation::Chroot, &file, &args, OCAMLRUNPARAM);
    let target = Target::open(pid).unwrap();
    let work = ["minor", "major", "compact", "stw"];
    let work = work.map(|it| FunctionSelector::Collector(it.parse().unwrap()));
    let observation = work
        .into_iter()
        .fold(Observation::new(), Observation::time_functions);
    let mut observer = target.observe(&observation, options()).unwrap();
    assert!(observer.has_failed_sections());
    eventually("all kinds of work were timed", || {
        let timed = observer.function_latencies().unwrap();
        assert_eq!(timed.len(), 4);
        timed.iter().all(|it| it.count() > 0).then_some(())
    });
    let report = observer.remove().unwrap();
    for function in &report.function_latencies {
        let others = (function.lost(), function.unwound());
        assert_eq!(others, (0, 0), "{}", function.name());
    }
    talker.close_input();
    assert!(talker.guard().wait().success());
}

// promise: Functions: Calls that are suspended in fibers, and calls on stacks that grow and are moved, are timed to the last
//    one (2 programs in each chroot)
#[test]
fn calls_on_fibers_are_timed_exactly() {
    const ROUNDS: u64 = 100;
    for file in program_forms("ocaml5/fibers") {
        let ChrootProgram {
            mut talker, pid, ..
        } = ChrootProgram::start(Isolation::Chroot, &file, &[]);
        let target = Target::open(pid).unwrap();
        for (function, name, calls) in [
            ("Fibers.event", "overlapping", 8),
            ("Fibers.within", "nested", 9),
            ("Fibers.descend", "growing", 10_001),
        ] {
            let function = FunctionSelector::Glob(function.parse().unwrap());
            let observation = Observation::new().time_functions(function);
            let mut observer = target.observe(&observation, options()).unwrap();
            talker.ask(&format!("{name} {ROUNDS}"), name);
            let latencies = observer.remove().unwrap().function_latencies;
            // The code of the function's two probes has the same name.
            let longest = latencies.iter().max_by_key(|it| it.max()).unwrap();
            // The first 500 calls on each stack are timed.
            let timed = calls.min(500) * ROUNDS;
            let lost = (calls - calls.min(500)) * ROUNDS;
            assert_eq!((longest.count(), longest.lost()), (timed, lost), "{name}");
            assert_eq!((longest.unwound(), longest.running()), (0, 0), "{name}");
            assert_eq!(longest.unmatched_exits(), 0, "{name}");
        }
    }
}

// promise: Functions: Calls of fibers that an exception has ended are unwound, and those of thousands of such fibers are not lost; each way
//    of timing them (5 ways, 2 programs in each chroot)
#[test]
fn calls_of_ended_fibers_are_unwound() {
    const ROUNDS: u64 = 5000;
    let times = || {
        let fails = FunctionSelector::Glob("Fibers.fails".parse().unwrap());
        Observation::new().time_functions(fails)
    };
    let one = |name: &str| FunctionSelector::Glob(name.parse().unwrap());
    for file in program_forms("ocaml5/fibers") {
        let ChrootProgram {
            mut talker, pid, ..
        } = ChrootProgram::start(Isolation::Chroot, &file, &[]);
        let target = Target::open(pid).unwrap();
        for (way, observation) in [
            times(),
            times().self_times().by_caller(),
            times().only_starts_where("arg0 > 1".parse().unwrap()),
            // The function that frees the stacks is observed, too.
            times().count_functions(one("caml_free_stack")),
            times().time_functions(one("caml_free_stack")),
        ]
        .into_iter()
        .enumerate()
        {
            let mut observer = target.observe(&observation, options()).unwrap();
            talker.ask(&format!("failing {ROUNDS}"), "failing");
            let counts = observer.counts().unwrap();
            let counted: Vec<u64> = counts.functions().map(|it| it.hits).collect();
            let is_counted = way == 3;
            assert_eq!(counted.len(), usize::from(is_counted), "{way}");
            assert!(counted.iter().all(|it| *it >= ROUNDS), "{counted:?}");
            assert_eq!(counts.selected_functions(), 1 + usize::from(way >= 3));
            let latencies = observer.remove().unwrap().function_latencies;
            let fails = latencies.iter().find(|it| it.name() == "Fibers.fails");
            let fails = fails.unwrap();
            // The filter selects the calls with 2 and 3.
            let calls = if way == 2 { 2 } else { 4 };
            let ended = (fails.unwound(), fails.running(), fails.lost());
            assert_eq!(ended, (calls * ROUNDS, 0, 0), "{way}");
            assert_eq!((fails.count(), fails.unmatched_exits()), (0, 0), "{way}");
            let times_of_freeing = latencies.iter().filter(|it| !std::ptr::eq(*it, fails));
            let freed: Vec<u64> = times_of_freeing.map(|it| it.count()).collect();
            assert_eq!(freed.len(), usize::from(way == 4), "{way}");
            assert!(freed.iter().all(|it| *it >= ROUNDS), "{freed:?}");
        }
        talker.close_input();
        assert!(talker.guard().wait().success());
    }
}

// promise: Functions: Self times of calls on fibers add up, calls too deep to be recorded are counted as lost, and calls on other stacks
//    are not subtracted; callers are distinguished (1 program in each chroot)
#[test]
fn self_times_are_those_of_a_fiber() {
    const ROUNDS: u64 = 20;
    let [file, _] = program_forms("ocaml5/fibers");
    let ChrootProgram {
        mut talker, pid, ..
    } = ChrootProgram::start(Isolation::Chroot, &file, &[]);
    let target = Target::open(pid).unwrap();
    let functions = ["Fibers.growing", "Fibers.fun", "Fibers.descend"];
    let functions = functions.map(|it| FunctionSelector::Glob(it.parse().unwrap()));
    let minor = FunctionSelector::Collector("minor".parse().unwrap());
    let functions = functions.into_iter().chain([minor]);
    let observation = functions.fold(Observation::new(), Observation::time_functions);
    let mut observer = target
        .observe(&observation.self_times().by_caller(), options())
        .unwrap();
    talker.ask(&format!("growing {ROUNDS}"), "growing");
    let latencies = observer.remove().unwrap().function_latencies;
    let of = |name: &str| {
        let named = latencies.iter().filter(|it| it.name() == name);
        named.max_by_key(|it| it.count()).unwrap()
    };
    let [root, fiber, calls] = ["Fibers.growing", "Fibers.fun", "Fibers.descend"].map(of);
    assert_eq!(
        (root.count(), fiber.count(), calls.count()),
        (1, ROUNDS, 499 * ROUNDS)
    );
    // The deepest call that is timed on each stack is doubtful: the calls below it are lost.
    assert_eq!((calls.doubtful(), calls.lost()), (ROUNDS, 9502 * ROUNDS));
    // The callers are the function itself and the function of the fiber.
    let callers = calls.callers().unwrap().iter();
    let mut callers: Vec<u64> = callers.map(|it| it.count()).collect();
    callers.sort_unstable();
    assert_eq!(callers, [ROUNDS, 498 * ROUNDS]);
    let total = fiber.total().unwrap().as_nanos();
    let own = fiber.sum().as_nanos() + calls.sum().as_nanos();
    assert!(total.abs_diff(own) <= 2, "{total} {own}");
    // `root` waits for the fibers, which have other stacks: their time is not subtracted.
    assert!(root.sum() > fiber.total().unwrap());
    assert_eq!((root.doubtful(), fiber.doubtful()), (0, 0));
    let minor = of("caml_empty_minor_heaps_once");
    assert!(calls.is_on_fiber() && !minor.is_on_fiber());
}

// promise: Observations: Values that are made of others are shown one level deep with OCaml 5 (2 programs in each chroot)
#[test]
fn compound_values_are_shown_one_level_deep() {
    for file in program_forms("compound") {
        let ChrootProgram {
            mut talker, pid, ..
        } = ChrootProgram::start(Isolation::Chroot, &file, &[]);
        assert_shown(&mut talker, pid);
        talker.close_input();
        assert!(talker.guard().wait().success());
    }
}

// promise: Observations: Fields of values are those of the hit, in domains while one collects and compacts all the time (2 programs
//    of 4 domains in each chroot)
#[test]
fn fields_are_those_of_the_hit() {
    for file in program_forms("ocaml5/domains") {
        let args = ["4", "1", "collect"];
        let ChrootProgram {
            mut talker, pid, ..
        } = ChrootProgram::start_with(Isolation::Chroot, &file, &args, OCAMLRUNPARAM);
        let target = Target::open(pid).unwrap();
        let observation = Observation::new().watch(Selector::name("hit"));
        let mut observer = target.observe(&observation, options()).unwrap();
        let mut compared = 0;
        eventually("there are many hits", || {
            for event in observer.events().unwrap().events {
                let (number, fields) = match &event.arguments[..] {
                    [Value::Int(number), Value::Block { fields, .. }] => (number, fields),
                    // Pages that were mapped just now are not read yet.
                    [Value::Int(_), Value::Unread(_)] => continue,
                    _ => panic!("{event:?}"),
                };
                let [
                    seed,
                    Value::Block {
                        tag: 0, size: 2, ..
                    },
                    text,
                    floats,
                ] = &fields[..]
                else {
                    let is_unread = |it: &Value| matches!(it, Value::Unread(_));
                    assert!(
                        fields.is_empty() || fields.iter().any(is_unread),
                        "{event:?}"
                    );
                    continue;
                };
                assert_eq!(*seed, Value::Int(*number), "{event:?}");
                if let Value::String { bytes, is_whole } = text {
                    assert_eq!((&**bytes, *is_whole), (number.to_string().as_bytes(), true));
                    compared += 1;
                }
                let is_expected = matches!(
                    floats,
                    Value::Block {
                        tag: 254,
                        size: 5,
                        ..
                    } | Value::Unread(_)
                );
                assert!(is_expected, "{event:?}");
            }
            (compared > 20_000).then_some(())
        });
        observer.remove().unwrap();
        assert!(rounds(&mut talker, "report") > 0);
        talker.close_input();
        assert!(talker.guard().wait().success());
    }
}

// promise: Observations: Counts of system threads in domains agree to the last hit (6 observations
//    in each chroot)
#[test]
fn system_threads_in_domains_are_observed() {
    for file in program_forms("ocaml5/domains") {
        observe_domains(&file, &["2", "3"], CYCLES_OF_THREADS / 2);
    }
}

// promise: Observations: An observer killed at any moment leaves domains, and threads that wait in
//    handlers, running (16 kills in each chroot)
#[test]
fn killed_observer_leaves_domains_and_parked_threads_running() {
    let name = test_name(killed_observer_leaves_domains_and_parked_threads_running);
    if let Ok(pid) = std::env::var(OBSERVED) {
        let target = Target::open(pid.parse().unwrap()).unwrap();
        let observation = everything(&target);
        loop {
            let mut observer = target.observe(&observation, options()).unwrap();
            observer.events().unwrap();
            observer.remove().unwrap();
        }
    }
    let domains = program_forms("ocaml5/domains").map(|file| (file, vec!["4", "1", "collect"]));
    let parked = program_forms("parked").map(|file| (file, vec!["4"]));
    for (file, args) in domains.into_iter().chain(parked) {
        let ChrootProgram {
            mut talker, pid, ..
        } = ChrootProgram::start_with(Isolation::Chroot, &file, &args, OCAMLRUNPARAM);
        let target = Target::open(pid).unwrap();
        let actions = Actions::of(Action::Enable, Selector::All);
        target.update_with(&actions, options()).unwrap();
        for kill in 0..KILLS {
            let mut observer = Command::new(std::env::current_exe().unwrap());
            observer.args(["--exact", "--nocapture", name]);
            observer.env(OBSERVED, pid.to_string());
            observer.stdin(Stdio::null()).stdout(Stdio::null());
            let mut observer = Guard::spawn(&mut observer);
            // The delays are spread over a tenth of a second, and the same in every run.
            let delay = Duration::from_micros(kill as u64 * 7919 % 100_000);
            let started = Instant::now();
            while started.elapsed() < delay {
                std::thread::sleep(Duration::from_micros(100));
            }
            observer.child().kill().unwrap();
            assert_eq!(observer.wait().signal(), Some(9));
            if kill % 10 == 0 {
                rounds(&mut talker, "report");
            }
        }
        target.clean(options()).unwrap();
        let states = target.states().unwrap();
        assert_eq!(
            (states.observed_sites(), states.observed_functions()),
            (0, 0)
        );
        let before = rounds(&mut talker, "report");
        eventually("it runs on", || {
            (rounds(&mut talker, "report") > before).then_some(())
        });
        talker.close_input();
        assert!(talker.guard().wait().success());
    }
}

/// Asserts that the observation finds the pairs of each command in `names` interleaved, or not.
fn assert_interleaved(program: &str, names: &[&str], is_expected: bool) {
    for file in program_forms(program) {
        let ChrootProgram {
            mut talker, pid, ..
        } = ChrootProgram::start(Isolation::Chroot, &file, &[]);
        let target = Target::open(pid).unwrap();
        for name in names {
            let observation = Observation::new().time("start", "stop");
            let mut observer = target.observe(&observation, options()).unwrap();
            talker.ask(&format!("{name} 1000"), name);
            let latency = observer.remove().unwrap().latencies.remove(0);
            let (count, interleaved) = (latency.count(), latency.interleaved());
            assert!(count >= 900, "{name}: {count}");
            assert_eq!(latency.is_trusted() == Some(false), is_expected, "{name}");
            assert!(is_expected || latency.doubtful() == 0, "{name}");
            assert!(
                !is_expected || (count / 10..=count).contains(&interleaved),
                "{name}: {interleaved} of {count}"
            );
        }
    }
}

// promise: Observations: Pairs that interleave are noticed with OCaml 5, where sites are called on the stack of C (2
//    × 4 programs in each chroot)
#[test]
fn interleaving_pairs_are_noticed() {
    assert_interleaved("interleaved", &["steady", "bursts", "tasks"], true);
    assert_interleaved("ocaml5/fibers", &["overlapping"], true);
}

// promise: Observations: Pairs that nest are not taken for interleaving ones, nor in fibers and on stacks that grow (2
//    × 8 programs in each chroot)
#[test]
fn nested_pairs_do_not_interleave() {
    let names = [
        "recursion",
        "deep",
        "requests",
        "exceptions",
        "spans",
        "threads",
    ];
    assert_interleaved("interleaved", &names, false);
    assert_interleaved("ocaml5/fibers", &["nested", "growing"], false);
}

// promise: Observations: Requests that interleave are timed by their key with OCaml 5, also those of Lwt, and in fibers that another
//    domain resumes (2 × 5 in each chroot)
#[test]
fn requests_are_timed_by_their_key() {
    for (program, line) in [
        ("requests", "flight 5 300"),
        ("requests", "moving 100"),
        ("lwt/lwt_requests", "flight 5 60"),
        ("lwt/lwt_requests", "moving 20"),
        ("ocaml5/moving", "moving 2000"),
    ] {
        for file in program_forms(program) {
            let ChrootProgram {
                mut talker, pid, ..
            } = ChrootProgram::start(Isolation::Chroot, &file, &[]);
            let target = Target::open(pid).unwrap();
            let observation = Observation::new().time("start", "stop");
            let observation = observation.match_by("arg0".parse().unwrap());
            let mut observer = target.observe(&observation, options()).unwrap();
            let answer = talker.ask(line, line.split_ascii_whitespace().next().unwrap());
            let latency = observer.remove().unwrap().latencies.remove(0);
            let numbers = answer.split_ascii_whitespace().skip(1);
            let numbers: Vec<u64> = numbers.map(|it| it.parse().unwrap()).collect();
            assert_eq!(latency.count(), numbers[0], "{program} {line}");
            assert_eq!(latency.unmatched_starts() + latency.unmatched_stops(), 0);
            assert_eq!((latency.dropped(), latency.is_trusted()), (0, Some(true)));
            // The program has measured its requests from outside both probes, and between them; our time is in between.
            // Each may be wrong by 2 us.
            let unknown = Duration::from_micros(2 * numbers[0]);
            let ours = latency.mean() * numbers[0] as u32;
            let [outer, inner] = [1, 2].map(|index| Duration::from_nanos(numbers[index]));
            assert!(
                ours <= outer + unknown && ours + unknown >= inner,
                "{ours:?}: {answer}"
            );
        }
    }
}

// promise: Observations: Requests that another domain resumes are not trusted without a key with OCaml 5 (2 in each chroot)
#[test]
fn moved_requests_are_untrusted_without_key() {
    for file in program_forms("ocaml5/moving") {
        let ChrootProgram {
            mut talker, pid, ..
        } = ChrootProgram::start(Isolation::Chroot, &file, &[]);
        let target = Target::open(pid).unwrap();
        let observation = Observation::new().time("start", "stop");
        let mut observer = target.observe(&observation, options()).unwrap();
        let answer = talker.ask("moving 2000", "moving");
        let latency = observer.remove().unwrap().latencies.remove(0);
        let numbers = answer.split_ascii_whitespace().skip(1);
        let numbers: Vec<u64> = numbers.map(|it| it.parse().unwrap()).collect();
        // Our sum of times is less than that of the program's own clock.
        let (truth, unknown) = (Duration::from_nanos(numbers[2]), Duration::from_millis(4));
        let ours = latency.mean() * numbers[0] as u32;
        assert!(ours + unknown < truth, "{ours:?}: {answer}");
        assert!(latency.interleaved() > 0, "{latency:?}");
        assert_eq!(latency.is_trusted(), Some(false));
    }
}

// promise: Observations: Overflows of stacks that OCaml 5 checks itself are caught while they are
//    observed (2 × 2 observations of 4 threads in each chroot)
#[test]
fn checked_overflows_are_caught_while_observed() {
    for file in program_forms("overflow") {
        let ChrootProgram {
            mut talker, pid, ..
        } = ChrootProgram::start(Isolation::Chroot, &file, &[]);
        let target = Target::open(pid).unwrap();
        for action in [Action::Disable, Action::Enable] {
            let actions = Actions::of(action, Selector::All);
            target.update_with(&actions, options()).unwrap();
            let mut observer = target.observe(&everything(&target), options()).unwrap();
            let answer = talker.ask("overflow 3", "overflow");
            assert_eq!(answer, "overflow caught=9 others=same");
            observer.remove().unwrap();
        }
    }
}
