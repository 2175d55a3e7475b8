//! Programs that use the C library musl, whose dynamic loader differs from that of glibc.

use std::path::Path;
use std::process::{Command, Stdio};

use probes_lib::{Action, Effect, ErrorKind, Launch, ProbeError};
use test_support::{Guard, Talker, fixture, fixture_forms};

use crate::session::{Session, all, named};

fn load_plugin(session: &mut Session) {
    let plugin = fixture("objects/musl/plugin.so");
    let line = format!("load {}", plugin.display());
    session.talker.ask(&line, "loaded");
}

fn plugin_hits(session: &mut Session) -> String {
    session.talker.ask("plugins", "plugins")
}

/// Starts a program with the probe `plug` set in the library that it is linked with.
fn launch(file: &Path) -> Session {
    let mut command = Command::new(file);
    command.stdin(Stdio::piped()).stdout(Stdio::piped());
    let enable = named(Action::Enable, "plug");
    let launched = Launch::new(command).actions(enable).spawn().unwrap();
    assert_eq!(launched.report().changed[0].sites, 2);
    let mut talker = Talker::of(Guard::from(launched.into_child()));
    talker.expect("ready");
    Session::of(talker)
}

#[test]
fn musl_program_is_switched_with_its_plugin() {
    for file in fixture_forms("objects/musl/host") {
        let mut session = Session::start(&file);
        load_plugin(&mut session);
        session.apply(&all(Action::Enable)).unwrap();
        assert_eq!(plugin_hits(&mut session), "plugins 0:ping=1,plug=2");
        assert_eq!(session.run()["ping"], 3);
        session.apply(&all(Action::Disable)).unwrap();
        assert_eq!(plugin_hits(&mut session), "plugins 0:ping=1,plug=2");
        assert_eq!(session.run()["ping"], 0);
        session.end();
    }
}

#[test]
fn musl_program_is_changed_live_without_its_plugin() {
    for file in fixture_forms("objects/musl/host") {
        let mut session = Session::start(&file).live();
        load_plugin(&mut session);
        session.apply(&named(Action::Enable, "pong")).unwrap();
        assert_eq!(session.run()["pong"], 1);
        let error = session.apply(&named(Action::Enable, "plug")).unwrap_err();
        assert!(
            matches!(
                error.kind(),
                ErrorKind::Probe(ProbeError::LiveUnloadable { .. })
            ),
            "{error}"
        );
        assert_eq!(error.effect(), Effect::NothingChanged);
        session.end();
    }
}

#[test]
fn library_probes_are_set_before_musl_programs_start() {
    for file in fixture_forms("objects/musl/linked") {
        let mut session = launch(&file);
        assert_eq!(plugin_hits(&mut session), "plugins 0:ping=0,plug=2");
        session.apply(&all(Action::Enable)).unwrap();
        assert_eq!(plugin_hits(&mut session), "plugins 0:ping=1,plug=4");
        session.end();
    }
}

#[test]
fn musl_program_started_through_its_loader_is_found() {
    for file in fixture_forms("objects/musl/host") {
        let mut command = Command::new("/lib/ld-musl-x86_64.so.1");
        let mut talker = Talker::spawn(command.arg(&file));
        talker.expect("ready");
        let mut session = Session::of(talker);
        assert_eq!(session.object().path(), file);
        session.apply(&all(Action::Enable)).unwrap();
        assert_eq!(session.run()["ping"], 3);
        session.end();
    }
}
