//! Every fixture: what its probes are, and that each selector changes exactly what it selects.

use std::collections::BTreeMap;

use probes_lib::{Action, Actions, Effect, ErrorKind, ProbeError, Selector, State};
use test_support::fixture_forms;
use test_support::process::{Image, settle};

use crate::expected::{self, Subject};
use crate::session::{Session, all, heavy_test_lock, named};

/// Fixtures with a test of their own: counters that contradict sites, code that cannot be written
/// or is no longer that of the file, programs that never pause.
const TESTED_ELSEWHERE: [&str; 14] = [
    "interrupted",
    "shared_text",
    "huge_text",
    "blocking_calls",
    "siginfo",
    "threads_spin",
    "kinds_spin",
    "interrupted_trampolines",
    "squatter",
    "sequences",
    "self_counting",
    "churn",
    "churn_1000",
    "fork_storm",
];

pub(crate) fn ordinary() -> impl Iterator<Item = Subject> {
    expected::fixtures().into_iter().filter(|subject| {
        let stem = subject.file.file_stem().unwrap().to_str().unwrap();
        !TESTED_ELSEWHERE.contains(&stem)
    })
}

#[test]
fn fixtures_have_the_probes_counted_by_hand() {
    let mut fixtures = 0;
    for subject in expected::fixtures() {
        fixtures += 1;
        let session = Session::start(&subject.file);
        check_table(&subject, &session);
        let object = session.object();
        let table = object.table();
        assert_eq!(
            object.load_bias().0 == 0,
            table.linking() == probes_lib::Linking::Fixed,
            "{}",
            subject.file.display()
        );
    }
    assert!(fixtures > 120, "{fixtures}");
}

pub(crate) fn check_table(subject: &Subject, session: &Session) {
    let object = session.object();
    let table = object.table();
    let found: BTreeMap<&str, (usize, usize)> = table
        .probes()
        .map(|probe| {
            (
                probe.name(),
                (probe.sites().len(), probe.semaphores().len()),
            )
        })
        .collect();
    let expected: BTreeMap<&str, (usize, usize)> = subject
        .probes
        .iter()
        .map(|(name, probe)| (name.as_str(), (probe.sites, probe.semaphores)))
        .collect();
    assert_eq!(found, expected, "{}", subject.file.display());
}

// promise: All or nothing: After enabling and disabling, all memory is as it was (6 updates of each
//    of more than 60 fixtures, byte by byte)
#[test]
fn all_fixture_probes_are_enabled_and_disabled_twice() {
    for subject in ordinary() {
        let mut session = Session::start(&subject.file);
        on_and_off(&subject, &mut session);
        session.end();
    }
}

/// Enables all twice, disables all twice, and checks hits, states and memory each time.
pub(crate) fn on_and_off(subject: &Subject, session: &mut Session) {
    let what = subject.file.display();
    let built = subject.hits(|_, probe| probe.built);
    let on = subject.hits(|_, probe| probe.on);
    let text = session.image().text();
    let states = session.states();
    for (name, probe) in &subject.probes {
        // A name without sites has no hits that could show its state.
        if probe.sites > 0 {
            let state = [State::Disabled, State::Enabled][usize::from(probe.built > 0)];
            assert_eq!(
                states[name],
                (u16::from(probe.built > 0), state),
                "{what}: {name}"
            );
        }
    }
    assert_eq!(session.run(), built, "{what}: as built");

    for round in 0..2 {
        session.update(Action::Enable, Selector::All, |_| true);
        assert_eq!(session.run(), on, "{what}: on, {round}");
    }
    session.update(Action::Disable, Selector::All, |_| true);
    assert_eq!(session.run(), on, "{what}: enabled twice, disabled once");
    session.update(Action::Disable, Selector::All, |_| true);
    assert_eq!(session.run(), built, "{what}: both undone");
    assert_eq!(session.states(), states, "{what}");
    session
        .image()
        .text()
        .assert_same(&text, "the code at the end");

    // If the program does not run in between, all its memory has to be the same as before.
    let before = session.image();
    session.apply(&all(Action::Enable)).unwrap();
    session.apply(&all(Action::Disable)).unwrap();
    session.image().assert_same(&before, "on and off again");
}

#[test]
fn counters_printed_by_a_fixture_equal_those_written() {
    for subject in ordinary() {
        let mut session = Session::start(&subject.file);
        session.apply(&all(Action::Enable)).unwrap();
        let states = session.states();
        let line = session.talker.ask("counters", "sem");
        let stem = subject.file.file_stem().unwrap().to_str().unwrap();
        let is_4_11_1 = stem.starts_with("gen_ocaml_4_11_1");
        for entry in line.split_ascii_whitespace().skip(1) {
            let (name, counters) = entry.split_once(':').unwrap();
            let (stap, ocaml) = counters
                .strip_prefix("stap=")
                .and_then(|rest| rest.split_once(",ocaml="))
                .unwrap();
            let is_oldest = generation_of(&session, name).is_some_and(|one| one == "ocaml");
            // Compilers of 4.11.0 share one counter with SystemTap; later ones have one for each.
            let is_shared_with_stap = is_oldest && !is_4_11_1;
            let (stap_expected, ocaml_expected) = match states.get(name) {
                Some((counter, _)) => {
                    let stap_of_shared = if is_shared_with_stap { *counter } else { 0 };
                    (stap_of_shared, *counter)
                }
                None => (0, 0), // another provider's
            };
            // Two semaphores of one name may be of two generations or layouts.
            let is_mixed = stem.starts_with("mixed_") && (is_oldest || name == "shared");
            if !is_mixed {
                assert_eq!(stap, stap_expected.to_string(), "{line}");
            }
            assert_eq!(ocaml, ocaml_expected.to_string(), "{line}");
        }
    }
}

fn generation_of(session: &Session, name: &str) -> Option<&'static str> {
    let object = session.object();
    let probe = object.table().probe(name)?;
    let semaphore = probe.semaphores().next()?;
    Some(semaphore.generation().provider())
}

#[test]
fn each_name_is_changed_by_every_selector() {
    for subject in ordinary().filter(|subject| subject.probes.len() < 20) {
        let mut session = Session::start(&subject.file);
        each_alone(&subject, &mut session);
        session.end();
    }
}

/// Enables and disables every name by itself, with every kind of selector that can select one name.
pub(crate) fn each_alone(subject: &Subject, session: &mut Session) {
    for name in subject.probes.keys() {
        let is_it = |other: &str| other == name;
        session.update(Action::Enable, Selector::name(name), is_it);
        let hits = subject.hits(|other, probe| {
            if other == name {
                probe.alone
            } else {
                probe.built
            }
        });
        assert_eq!(
            session.run(),
            hits,
            "{}: {name} alone",
            subject.file.display()
        );

        let regexp = Selector::regexp(&format!("{name}$")).unwrap();
        session.update(Action::Enable, regexp, is_it);
        let wanted = name.clone();
        let predicate = Selector::predicate(move |other| other == wanted);
        session.update(Action::Disable, predicate, is_it);
        session.update(Action::Disable, Selector::name(name), is_it);
        let built = subject.hits(|_, probe| probe.built);
        assert_eq!(
            session.run(),
            built,
            "{}: {name} off",
            subject.file.display()
        );
    }
}

#[test]
fn pair_is_changed_as_one() {
    for subject in ordinary().filter(|subject| (2..20).contains(&subject.probes.len())) {
        let session = Session::start(&subject.file);
        let names: Vec<&str> = subject.probes.keys().map(String::as_str).collect();
        let (start, stop) = (names[0], names[names.len() - 1]);
        let pair = || Selector::Pair {
            start: start.to_owned(),
            stop: stop.to_owned(),
        };
        let chosen = |name: &str| name == start || name == stop;
        let report = session.update(Action::Enable, pair(), chosen);
        let order: Vec<&str> = report.changed.iter().map(|one| one.name.as_str()).collect();
        assert_eq!(
            order,
            [stop, start],
            "the stop probe is enabled before the start probe"
        );
        let report = session.update(Action::Disable, pair(), chosen);
        let order: Vec<&str> = report.changed.iter().map(|one| one.name.as_str()).collect();
        assert_eq!(order, [start, stop]);
    }
}

#[test]
fn several_actions_are_carried_out_at_once() {
    for file in fixture_forms("mixed_generations") {
        let mut session = Session::start(&file);
        session.apply(&all(Action::Enable)).unwrap();
        session.run();
        let actions = Actions::new()
            .disable(Selector::regexp("sh").unwrap())
            .disable(Selector::name("zero"))
            .enable(Selector::predicate(|name| name.len() == 3 && name != "two"));
        let report = session.apply(&actions).unwrap();
        let order: Vec<(&str, u16)> = report
            .changed
            .iter()
            .map(|change| (change.name.as_str(), change.after))
            .collect();
        assert_eq!(order, [("shared", 0), ("zero", 0), ("dot", 2), ("one", 2)]);
        let hits = session.run();
        let on: Vec<&str> = hits
            .iter()
            .filter(|&(_, &count)| count > 0)
            .map(|(name, _)| name.as_str())
            .collect();
        assert_eq!(on, ["dot", "one", "two"]);
    }
}

#[test]
fn wrong_actions_are_refused_and_change_nothing() {
    type Wrong = (Actions, fn(&ErrorKind) -> bool, &'static str);
    let enable = |name: &str| named(Action::Enable, name);
    let cases: Vec<Wrong> = vec![
        (
            enable("onyl_alpha"),
            |kind| matches!(kind, ErrorKind::Probe(ProbeError::Unknown { .. })),
            "no probe \"onyl_alpha\" in gen_ocaml.FORM; did you mean \"only_alpha\"? nothing was changed",
        ),
        (
            enable("shared").disable(Selector::All),
            |kind| matches!(kind, ErrorKind::Probe(ProbeError::Conflict { .. })),
            "probe \"shared\" is to be both enabled and disabled; nothing was changed",
        ),
        (
            enable("shared").enable(Selector::regexp("s").unwrap()),
            |kind| matches!(kind, ErrorKind::Probe(ProbeError::SelectedTwice { .. })),
            "probe \"shared\" is selected twice; nothing was changed",
        ),
        (
            enable("only_alpha").disable(Selector::name("shared")),
            |kind| matches!(kind, ErrorKind::Probe(ProbeError::NotEnabled { .. })),
            "probe \"shared\" is not enabled; nothing was changed",
        ),
        (
            enable("shared").enable(Selector::regexp("hared").unwrap()),
            |kind| matches!(kind, ErrorKind::Probe(ProbeError::NoMatch { .. })),
            "no probe in gen_ocaml.FORM matches \"hared\"; nothing was changed",
        ),
        (
            enable("shared").enable(Selector::predicate(|_| false)),
            |kind| matches!(kind, ErrorKind::Probe(ProbeError::NoMatch { .. })),
            "no probe in gen_ocaml.FORM matches the predicate; nothing was changed",
        ),
    ];
    for file in fixture_forms("gen_ocaml") {
        let session = Session::start(&file);
        let before = session.image();
        for (actions, is_kind, message) in &cases {
            let error = session.apply(actions).unwrap_err();
            assert!(is_kind(error.kind()), "{error:?}");
            assert_eq!(error.effect(), Effect::NothingChanged);
            let form = file.extension().unwrap().to_str().unwrap();
            assert_eq!(error.to_string(), message.replace("FORM", form));
        }
        session
            .image()
            .assert_same(&before, "after refused actions");
    }
}

#[test]
fn empty_actions_change_and_stop_nothing() {
    for file in fixture_forms("gen_ocaml_2") {
        let session = Session::start(&file);
        let before = session.image();
        let report = session.apply(&Actions::new()).unwrap();
        assert!(report.changed.is_empty() && report.skipped.is_empty());
        assert!(report.stopped.is_zero());
        session.update(Action::Disable, Selector::All, |_| true);
        session
            .image()
            .assert_same(&before, "after nothing was done");
    }
}

// promise: Death of the tool: Half an update left by a killed tool is refused by the next one, and
//    repaired with `-force` (2)
#[test]
fn interrupted_update_is_refused_and_repaired_by_force() {
    for subject in expected::fixture_subjects("interrupted") {
        let mut session = Session::start(&subject.file);
        let inconsistent = |name: &str| name != "whole";
        for (name, (_, state)) in session.states() {
            let expected = [State::Disabled, State::Inconsistent][usize::from(inconsistent(&name))];
            assert_eq!(state, expected, "{name}");
        }
        let before = session.image();
        for (actions, message) in [
            (
                all(Action::Enable),
                "0 of 1 site of \"counter\" are enabled and its counter is 1 (was an update cut off?); nothing was changed",
            ),
            (
                named(Action::Disable, "part"),
                "1 of 3 sites of \"part\" are enabled and its counter is 1 (was an update cut off?); nothing was changed",
            ),
            (
                named(Action::Enable, "site"),
                "1 of 1 site of \"site\" are enabled and its counter is 0 (was an update cut off?); nothing was changed",
            ),
        ] {
            let error = session.apply(&actions).unwrap_err();
            assert!(
                matches!(
                    error.kind(),
                    ErrorKind::Probe(ProbeError::Inconsistent { .. })
                ),
                "{error}"
            );
            assert_eq!(error.to_string(), message);
        }
        session.image().assert_same(&before, "after refusals");
        assert_eq!(session.run(), subject.hits(|_, probe| probe.built));

        // What is intact can be changed all the same.
        session.update(Action::Enable, Selector::name("whole"), |name| {
            name == "whole"
        });

        session.apply(&all(Action::Enable).force(true)).unwrap();
        session.assert_all((1, State::Enabled));
        assert_eq!(session.run(), subject.hits(|_, probe| probe.on));
        session.apply(&all(Action::Disable).force(true)).unwrap();
        session.assert_all((0, State::Disabled));
        assert_eq!(session.run(), subject.hits(|_, _| 0));

        // The probes are consistent again: their counters go up and down as usual.
        session.update(Action::Enable, Selector::All, |_| true);
        session.update(Action::Disable, Selector::All, |_| true);
    }
}

#[test]
fn force_sets_counters_whatever_they_were() {
    for file in fixture_forms("multi_semaphore") {
        let mut session = Session::start(&file);
        for _ in 0..3 {
            session.apply(&all(Action::Enable)).unwrap();
        }
        let report = session.apply(&all(Action::Enable).force(true)).unwrap();
        assert!(
            report
                .changed
                .iter()
                .all(|one| (one.before, one.after, one.sites) == (3, 1, 0))
        );
        assert!(session.run().values().all(|&hits| hits > 0));
        // With force, it is no error to disable a named probe that is already off.
        let off = named(Action::Disable, "many").force(true);
        session.apply(&off).unwrap();
        let report = session.apply(&off).unwrap();
        assert!(report.stopped.is_zero(), "nothing was left to do");
        assert_eq!(session.state("many"), State::Disabled);
        assert_eq!(session.state("single"), State::Enabled);
    }
}

#[test]
fn threads_hit_probes_only_while_enabled() {
    let _lock = heavy_test_lock();
    for subject in expected::fixture_subjects("threads_spin") {
        let mut session = Session::start(&subject.file);
        let pid = session.pid();
        let text = Image::of(pid).text();
        let rounds = |session: &mut Session| -> Vec<u64> {
            let line = session.talker.ask("report", "report");
            let words = line.split_ascii_whitespace().skip(1);
            words.map(|word| word.parse().unwrap()).collect()
        };
        session.apply(&named(Action::Enable, "pong")).unwrap();
        // Each thread is seen to finish a round: it runs, and has reached the probe.
        let started = rounds(&mut session);
        test_support::eventually("every thread finishes a round", || {
            let now = rounds(&mut session);
            now.iter()
                .zip(&started)
                .all(|(now, then)| now > &(then + 1))
                .then_some(())
        });
        let hits = session.run();
        assert!(hits["pong"] >= 4 && hits["ping"] == 0, "{hits:?}");

        session.apply(&all(Action::Enable)).unwrap();
        session.apply(&all(Action::Disable)).unwrap();
        session.apply(&named(Action::Disable, "pong")).unwrap();
        session.assert_all((0, State::Disabled));
        Image::of(pid)
            .text()
            .assert_same(&text, "the code at the end");
        // Handlers that were running then may still have counted; from now on, none does.
        let started = rounds(&mut session);
        test_support::eventually("every thread finishes a round again", || {
            let now = rounds(&mut session);
            now.iter()
                .zip(&started)
                .all(|(now, then)| now > &(then + 1))
                .then_some(())
        });
        session.run();
        assert!(session.run().values().all(|&hits| hits == 0));
        settle(pid);
    }
}
