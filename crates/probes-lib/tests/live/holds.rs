//! Updates that are recorded, so that other tools can release them.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use probes_lib::{Actions, Options, Selector, Target};
use test_support::process::{self, Image};
use test_support::{Talker, eventually, fixture_forms};

use crate::refusals::traced_by;

fn enable(name: &str) -> Actions {
    Actions::new().enable(Selector::name(name))
}

// promise: Updates for a time: A hold that is dropped without being released is undone as one of the dead (2)
#[test]
fn dropped_hold_is_undone_as_dead() {
    for file in fixture_forms("gen_ocaml_2") {
        let mut talker = Talker::start(&file);
        let target = Target::open(talker.pid()).unwrap();
        // Binds all functions that it calls: their addresses are part of the image.
        talker.hits();
        let before = Image::of(talker.pid());
        let kept = target.hold(&enable("flag"), Options::default()).unwrap();
        let with_one = Image::of(talker.pid());
        let dropped = target.hold(&enable("plain"), Options::default()).unwrap();
        assert_eq!(
            (dropped.unrecorded(), dropped.report().changed.len()),
            (None, 1)
        );
        assert_eq!(target.holders().list.len(), 2);
        assert!(target.holders().list.iter().all(|it| it.tool.is_alive));
        assert!(target.release_dead(Options::default()).unwrap().is_empty());
        drop(dropped);
        // Another test may have forked: its child has the descriptor until it executes a program.
        let released = eventually("it is dead", || {
            let released = target.release_dead(Options::default()).unwrap();
            (!released.is_empty()).then_some(released)
        });
        let [one] = &released[..] else {
            panic!("{released:?}");
        };
        assert_eq!(one.holder.tool.pid, std::process::id() as i32);
        assert_eq!(
            (
                one.holder.probes[0].name.as_str(),
                one.holder.probes[0].amount
            ),
            ("plain", 1)
        );
        assert_eq!(one.report.as_ref().unwrap().changed[0].after, 0);
        Image::of(talker.pid()).assert_same(&with_one, "what is held still");
        let undone = kept.release(Options::default()).unwrap();
        assert_eq!(undone.changed[0].name, "flag");
        // Released already: there is nothing left.
        assert!(kept.release(Options::default()).unwrap().changed.is_empty());
        Image::of(talker.pid()).assert_same(&before, "as before");
        assert!(target.holders().list.is_empty());
    }
}

#[test]
fn hold_that_fails_leaves_no_record() {
    for file in fixture_forms("gen_ocaml_2") {
        let talker = Talker::start(&file);
        let target = Target::open(talker.pid()).unwrap();
        let unknown = target.hold(&enable("no_such_probe"), Options::default());
        assert!(unknown.is_err_and(|error| error.is_missing_name()));
        let off = Actions::new().disable(Selector::name("plain"));
        assert!(target.hold(&off, Options::default()).is_err());
        assert!(target.holders().list.is_empty());
        assert!(target.release_dead(Options::default()).unwrap().is_empty());
    }
}

/// Holds a probe and drops the hold, as a killed tool does.
fn hold_and_die(target: &Target, name: &str) {
    drop(target.hold(&enable(name), Options::default()).unwrap());
    // Another test may have forked: its child has the descriptor until it executes a program.
    eventually("the holder is dead", || {
        let holders = target.holders().list;
        holders.iter().all(|it| !it.tool.is_alive).then_some(())
    });
}

/// The probes that are held.
fn held(target: &Target) -> Vec<String> {
    let holders = target.holders().list.into_iter();
    let probes = holders.flat_map(|holder| holder.probes);
    probes.map(|probe| probe.name).collect()
}

#[test]
fn forced_update_that_fails_forgets_no_holder() {
    for file in fixture_forms("gen_ocaml_2") {
        let talker = Talker::start(&file);
        let target = Target::open(talker.pid()).unwrap();
        hold_and_die(&target, "plain");
        let off = Actions::new().disable(Selector::name("plain")).force(true);
        let mut strace = Command::new("strace");
        let pid = talker.pid().to_string();
        strace.args(["-f", "-e", "trace=none", "-p", &pid]);
        let strace = traced_by(talker.pid(), &mut strace);
        target.update(&off).unwrap_err();
        drop(strace);
        eventually("strace has detached", || {
            (process::status(talker.pid(), "TracerPid") == "0").then_some(())
        });
        assert_eq!(held(&target), ["plain"]);
        // After that, there is nothing to release.
        target.update(&off).unwrap();
        assert!(held(&target).is_empty());
    }
}

#[test]
fn hold_released_twice_undoes_once() {
    for file in fixture_forms("gen_ocaml_2") {
        let talker = Talker::start(&file);
        process::settle(talker.pid());
        let target = Target::open(talker.pid()).unwrap();
        let hold = target.hold(&enable("plain"), Options::default()).unwrap();
        hold.release(Options::default()).unwrap();
        // By another tool, whose update stays.
        target.update(&enable("plain")).unwrap();
        let other = Image::of(talker.pid());
        let again = hold.release(Options::default()).unwrap();
        assert!(again.changed.is_empty(), "{again:?}");
        Image::of(talker.pid()).assert_same(&other, "enabled by another tool");
    }
}

/// The files with records of a process.
fn records(pid: i32) -> Vec<PathBuf> {
    let user = nix::unistd::geteuid();
    let directories = [
        PathBuf::from("/run/ocaml-probes"),
        PathBuf::from(format!("/tmp/ocaml-probes-{user}")),
    ];
    let files = directories
        .iter()
        .filter_map(|it| fs::read_dir(it).ok())
        .flatten();
    let files = files.map(|file| file.unwrap().path());
    let is_of = |file: &PathBuf| {
        let name = file.file_name().unwrap().to_string_lossy().into_owned();
        name.starts_with(&format!("{pid}."))
    };
    files.filter(is_of).collect()
}

#[test]
fn many_or_long_records_are_read_in_part() {
    const MANY: usize = 300;
    for file in fixture_forms("gen_ocaml_2") {
        let talker = Talker::start(&file);
        let target = Target::open(talker.pid()).unwrap();
        hold_and_die(&target, "plain");
        let record = records(talker.pid()).remove(0);
        let copies: Vec<PathBuf> = (0..MANY)
            .map(|number| {
                let copy = record.with_extension(format!("{number:016x}"));
                fs::copy(&record, &copy).unwrap();
                copy
            })
            .collect();
        let holders = target.holders();
        assert!(holders.list.len() < MANY, "{}", holders.list.len());
        assert_eq!(holders.list.len() + holders.unreadable, MANY + 1);
        let (long, others) = copies.split_at(4);
        others
            .iter()
            .for_each(|file| fs::remove_file(file).unwrap());
        for file in long {
            let file = fs::File::options().write(true).open(file).unwrap();
            file.set_len(10 << 20).unwrap();
        }
        let holders = target.holders();
        let read = holders.list.len();
        // The true one is as long as before.
        assert!((1..=2).contains(&read), "{read}");
        assert_eq!(read + holders.unreadable, 5);
        records(talker.pid())
            .iter()
            .for_each(|file| fs::remove_file(file).unwrap());
    }
}
