//! Updates that are undone: exactly what was added is removed, whatever other tools have changed
//! meanwhile.

use probes_lib::{
    Action, Actions, Effect, ErrorKind, ProbeError, ProcessError, Report, Selector, State, Target,
};
use test_support::process::Image;
use test_support::{fixture_forms, program_forms};

use crate::expected;
use crate::fixtures::ordinary;
use crate::session::{Session, all, named};

fn undo(session: &Session, report: &Report) -> Report {
    session.target.undo(report, session.options).unwrap()
}

#[test]
fn changes_are_undone_to_the_last_byte() {
    for subject in ordinary().chain(expected::round_programs()) {
        let stopped = Session::start(&subject.file);
        for session in [stopped, Session::start(&subject.file).live()] {
            let what = subject.file.display();
            let before = session.image();
            let states = session.states();
            let on = session.apply(&all(Action::Enable)).unwrap();
            undo(&session, &on);
            let after = session.image();
            after.assert_same(&before, &format!("{what}, enabled and undone"));

            let off = session.apply(&all(Action::Disable)).unwrap();
            undo(&session, &off);
            let after = session.image();
            after.assert_same(&before, &format!("{what}, disabled and undone"));
            assert_eq!(session.states(), states);
        }
    }
}

#[test]
fn mixed_update_is_undone_as_one() {
    for file in fixture_forms("gen_ocaml_2") {
        let session = Session::start(&file);
        session.apply(&named(Action::Enable, "plain")).unwrap();
        let before = session.image();
        let actions = Actions::new()
            .disable(Selector::name("plain"))
            .enable(Selector::name("flag"));
        let report = session.apply(&actions).unwrap();
        assert_eq!(session.states()["plain"], (0, State::Disabled));
        let back = undo(&session, &report);
        let names: Vec<&str> = back.changed.iter().map(|it| &it.name[..]).collect();
        assert_eq!(names, ["flag", "plain"]);
        session.image().assert_same(&before, "undone");
    }
}

// promise: Updates for a time: What other callers have changed meanwhile stays when the library
//    restores
#[test]
fn changes_by_other_callers_stay() {
    for file in fixture_forms("gen_ocaml_2") {
        let session = Session::start(&file);
        let enable = named(Action::Enable, "plain");
        let disable = named(Action::Disable, "plain");
        let state = || session.states()["plain"];

        // Another tool enables it too.
        let report = session.apply(&enable).unwrap();
        session.apply(&enable).unwrap();
        let back = undo(&session, &report);
        assert_eq!((back.changed[0].before, back.changed[0].after), (2, 1));
        assert_eq!(state(), (1, State::Enabled));

        // Another tool has disabled it for all.
        let report = session.apply(&enable).unwrap();
        session.apply(&disable.clone().force(true)).unwrap();
        let back = undo(&session, &report);
        assert_eq!(back.skipped, ["plain"]);
        assert!(back.changed.is_empty() && back.stopped.is_zero());
        assert_eq!(state(), (0, State::Disabled));

        // It was forced, from 3 to 1.
        for _ in 0..3 {
            session.apply(&enable).unwrap();
        }
        let report = session.apply(&enable.clone().force(true)).unwrap();
        assert_eq!(state(), (1, State::Enabled));
        undo(&session, &report);
        assert_eq!(state(), (3, State::Enabled));
    }
}

#[test]
fn nothing_is_undone_after_exit_or_exec() {
    for file in fixture_forms("exec_self") {
        let mut session = Session::start(&file);
        let report = session.apply(&all(Action::Enable)).unwrap();
        session.talker.ask("exec", "ready");
        let text = Image::of(session.pid()).text();
        let error = session.target.undo(&report, session.options);
        let error = error.unwrap_err();
        assert!(
            matches!(error.kind(), ErrorKind::Process(ProcessError::Executed)),
            "{error}"
        );
        assert_eq!(error.effect(), Effect::NothingChanged);
        let after = Image::of(session.pid()).text();
        after.assert_same(&text, "the text of the new program");
    }
    for file in program_forms("service") {
        let mut session = Session::start(&file);
        let report = session.apply(&all(Action::Enable)).unwrap();
        let _ = session.talker.guard().child().kill();
        session.talker.guard().wait();
        let error = session.target.undo(&report, session.options);
        let error = error.unwrap_err();
        assert!(
            matches!(error.kind(), ErrorKind::Process(ProcessError::Exited)),
            "{error}"
        );
    }
}

#[test]
fn update_is_not_undone_in_another_program() {
    let [file, _] = fixture_forms("gen_ocaml_2");
    let [other, _] = fixture_forms("forker");
    let session = Session::start(&file);
    let report = session.apply(&named(Action::Enable, "plain")).unwrap();
    let stranger = Session::start(&other);
    let before = stranger.image();
    let error = Target::open(stranger.pid())
        .unwrap()
        .undo(&report, stranger.options)
        .unwrap_err();
    assert!(
        matches!(error.kind(), ErrorKind::Probe(ProbeError::Unknown { .. })),
        "{error}"
    );
    stranger.image().assert_same(&before, "the stranger");
}
