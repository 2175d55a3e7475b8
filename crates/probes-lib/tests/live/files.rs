//! The file that is read is the one that the process executes, whatever has happened to its
//! path since.

use std::fs;

use probes_lib::{Action, Selector, Target};
use test_support::process::{Image, settle};
use test_support::{Scratch, Talker, fixture_forms};

use crate::expected;
use crate::session::Session;

#[test]
fn program_with_deleted_file_is_controlled() {
    for subject in expected::fixture_subjects("gen_ocaml_2") {
        let scratch = Scratch::new();
        let file = scratch.copy(&subject.file, "a program");
        let talker = Talker::start(&file);
        fs::remove_file(&file).unwrap();
        let mut session = Session::of(talker);
        assert_eq!(session.target.program(), file);
        session.update(Action::Enable, Selector::All, |_| true);
        assert_eq!(session.run(), subject.hits(|_, probe| probe.on));
        session.update(Action::Disable, Selector::All, |_| true);
        let location = session.object().source_map();
        assert!(location.is_ok(), "its debugging information is still there");
        session.end();
    }
}

// promise: Processes that are hard to change: A program whose file was deleted or replaced is
//    switched according to the notes of the file that it executes (2)
#[test]
fn program_with_replaced_file_uses_its_own_notes() {
    for subject in expected::fixture_subjects("multi_semaphore") {
        let other = expected::fixture_subjects("mixed_generations");
        let scratch = Scratch::new();
        let file = scratch.copy(&subject.file, "program");
        let mut started_before = Session::start(&file);
        // As an installer does it: a new file of the same name.
        scratch.copy(&other[0].file, "program");
        let mut started_after = Session::of(Talker::start(&file));
        assert!(started_after.object().table().probe("zero").is_some());
        started_after.update(Action::Enable, Selector::All, |_| true);
        assert_eq!(started_after.run(), other[0].hits(|_, probe| probe.on));

        started_before.target = Target::open(started_before.pid()).unwrap();
        assert!(started_before.object().table().probe("many").is_some());
        started_before.update(Action::Enable, Selector::All, |_| true);
        assert_eq!(started_before.run(), subject.hits(|_, probe| probe.on));
        started_before.update(Action::Disable, Selector::All, |_| true);
        started_before.end();
        started_after.end();
    }
}

#[test]
fn program_with_a_strange_path_is_controlled() {
    for file in fixture_forms("gen_ocaml_dot1") {
        let scratch = Scratch::new();
        let copy = scratch.copy(&file, "odd \u{e4}\\012 name");
        let session = Session::start(&copy);
        assert_eq!(session.target.program(), copy);
        session.update(Action::Enable, Selector::All, |_| true);
        session.update(Action::Disable, Selector::All, |_| true);
    }
}

// promise: Processes that are hard to change: Execute-only code is changed (2)
#[test]
fn execute_only_code_is_changed() {
    for file in fixture_forms("execonly") {
        let mut session = Session::start(&file);
        session.update(Action::Enable, Selector::name("guarded"), |name| {
            name == "guarded"
        });
        let hits = session.run();
        assert_eq!((hits["guarded"], hits["free"]), (2, 0));
        session.update(Action::Disable, Selector::name("guarded"), |name| {
            name == "guarded"
        });
        session.end();
    }
}

#[test]
fn copies_of_one_program_are_changed_separately() {
    for file in fixture_forms("gen_ocaml_dot1") {
        let one = Session::start(&file);
        let mut other = Session::start(&file);
        settle(other.pid());
        let image = Image::of(other.pid());
        one.update(Action::Enable, Selector::All, |_| true);
        Image::of(other.pid()).assert_same(&image, "the other process");
        assert!(other.run().values().all(|&hits| hits == 0));
        // And the file is unchanged.
        let table = probes_lib::ProbeTable::read(&file).unwrap();
        let mut sites = table.probes().flat_map(|probe| probe.sites());
        assert!(sites.all(|site| site.code().enabled() == Some(false)));
    }
}
