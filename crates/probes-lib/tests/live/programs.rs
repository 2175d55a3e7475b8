//! OCaml programs: the handlers that run are those of the enabled probes, and the garbage
//! collector, exceptions and recursion work.

use probes_lib::{Action, Selector, State};
use test_support::{eventually, process, program_forms};

use crate::expected;
use crate::fixtures::{check_table, each_alone, on_and_off};
use crate::session::{Session, all, heavy_test_lock, named};

#[test]
fn programs_have_their_probes_and_run_the_handlers() {
    for subject in expected::round_programs() {
        let mut session = Session::start(&subject.file);
        check_table(&subject, &session);
        on_and_off(&subject, &mut session);
        session.end();
    }
}

#[test]
fn each_name_alone_runs_only_its_handlers() {
    for subject in expected::round_programs() {
        if subject.sum_only {
            continue; // `many` has its own test below, which selects fewer names
        }
        let mut session = Session::start(&subject.file);
        each_alone(&subject, &mut session);
        session.end();
    }
}

#[test]
fn regexp_selects_names_of_many_units() {
    for file in program_forms("many") {
        let mut session = Session::start(&file);
        let tens = |name: &str| name.starts_with("many_0") && name.ends_with('0');
        let regexp = || Selector::regexp("many_0.0").unwrap();
        session.update(Action::Enable, regexp(), tens);
        assert_eq!(session.run()["*"], 20, "ten names of two sites each");
        session.update(Action::Enable, Selector::name("many_199"), |name| {
            name == "many_199"
        });
        assert_eq!(session.run()["*"], 21);
        session.update(Action::Disable, regexp(), tens);
        assert_eq!(session.run()["*"], 1);
    }
}

#[test]
fn handlers_may_allocate_raise_and_recurse_when_switched() {
    for file in program_forms("handlers") {
        let mut session = Session::start(&file);
        for _ in 0..20 {
            session.apply(&all(Action::Enable)).unwrap();
            let line = session.talker.ask("run", "round");
            assert!(
                line.contains(" work=516 ") && line.contains(" recursive=10 "),
                "{line}"
            );
            session.apply(&all(Action::Disable)).unwrap();
            let line = session.talker.ask("run", "round");
            assert!(
                line.contains(" work=516 ") && line.contains(" recursive=0 "),
                "{line}"
            );
        }
        session.end();
    }
}

#[test]
fn inner_probe_is_hit_in_the_outer_handler() {
    for file in program_forms("handlers") {
        let mut session = Session::start(&file);
        session.apply(&named(Action::Enable, "inner")).unwrap();
        assert_eq!(session.run()["inner"], 0);
        session.apply(&named(Action::Enable, "outer")).unwrap();
        let hits = session.run();
        assert_eq!((hits["outer"], hits["inner"]), (1, 1));
    }
}

#[test]
fn probe_is_enabled_follows_the_counter() {
    for file in program_forms("init") {
        let mut session = Session::start(&file);
        let printed = |session: &mut Session| session.talker.ask("run", "enabled");
        assert_eq!(
            printed(&mut session),
            "enabled starts_on=true starts_on_twice=true starts_off=false tested_only=false"
        );
        session.apply(&all(Action::Enable)).unwrap();
        assert_eq!(
            printed(&mut session),
            "enabled starts_on=true starts_on_twice=true starts_off=true tested_only=true"
        );
        // The counters of the probes that are on from the start begin at 1.
        session.apply(&all(Action::Disable)).unwrap();
        assert_eq!(session.states()["starts_on"], (1, State::Enabled));
        let report = session.apply(&all(Action::Disable)).unwrap();
        assert_eq!(report.skipped, ["starts_off", "tested_only"]);
        assert_eq!(
            printed(&mut session),
            "enabled starts_on=false starts_on_twice=false starts_off=false tested_only=false"
        );
        assert_eq!(session.run().values().sum::<u64>(), 0);
    }
}

#[test]
fn sites_of_programs_have_source_lines() {
    for file in program_forms("terminating") {
        let table = probes_lib::ProbeTable::read(&file).unwrap();
        let sources = probes_lib::SourceMap::read(&file).unwrap();
        let site = table.probe("fooia").unwrap().sites().next().unwrap();
        let location = sources.locate(site.address());
        assert!(location.file.unwrap().ends_with("terminating.ml"));
        assert!(location.line.unwrap() > 1);
    }
}

// promise: Stopping and resuming: Every system thread of an OCaml program is stopped and runs on
//    afterwards (2 × 200 updates)
#[test]
fn system_threads_survive_two_hundred_updates() {
    let _lock = heavy_test_lock();
    for file in program_forms("threads") {
        let mut session = Session::start(&file);
        let text = process::Image::of(session.pid()).text();
        for _ in 0..100 {
            session.apply(&all(Action::Enable)).unwrap();
            session.apply(&all(Action::Disable)).unwrap();
        }
        let counts = |session: &mut Session, command: &str| -> Vec<[u64; 3]> {
            session.talker.send(command);
            let mut threads = Vec::new();
            loop {
                let line = session.talker.line().expect("a report");
                if line == "report end" {
                    return threads;
                }
                let numbers: Vec<u64> = line
                    .split_ascii_whitespace()
                    .filter_map(|word| word.split_once('=')?.1.parse().ok())
                    .collect();
                threads.push(numbers.try_into().expect("three numbers"));
            }
        };
        // All threads run on without hits; then, with the probes on, each iteration is one hit.
        let off = counts(&mut session, "report");
        let off = eventually("every thread iterates", || {
            let now = counts(&mut session, "report");
            let all = now.iter().zip(&off).all(|(now, then)| now[0] > then[0] + 2);
            all.then_some(now)
        });
        session.apply(&all(Action::Enable)).unwrap();
        eventually("every thread reaches its probes", || {
            let now = counts(&mut session, "report");
            let all = now
                .iter()
                .zip(&off)
                .all(|(now, then)| now[1] > then[1] && now[2] > then[2]);
            all.then_some(())
        });
        session.apply(&all(Action::Disable)).unwrap();
        process::Image::of(session.pid())
            .text()
            .assert_same(&text, "the text at the end");
        for [iterations, worker, even] in counts(&mut session, "quit") {
            assert!(worker <= iterations && even <= iterations / 2 + 1);
            assert!(worker > 0 && even > 0);
        }
        assert!(session.talker.guard().wait().success());
    }
}
