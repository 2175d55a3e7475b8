//! Closures that programs with sites in their OCaml code marshal: other processes of the program accept
//! them, whatever was done to either.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use md5::{Digest, Md5};
use probes_lib::{Action, CodeDigest, Launch, Observation, Options, Selector, Target};
use test_support::process::{peek, poke};
use test_support::{Guard, Scratch, Talker, fixture_forms, program, program_forms};

use crate::session::{all, named, patient};

/// What is done to a process before it first marshals or reads a closure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Treatment {
    Nothing,
    Switched,
    SwitchedAndBack,
    Observed,
    ObservedBefore,
    SwitchedAndObserved,
}

const TREATMENTS: [Treatment; 6] = [
    Treatment::Nothing,
    Treatment::Switched,
    Treatment::SwitchedAndBack,
    Treatment::Observed,
    Treatment::ObservedBefore,
    Treatment::SwitchedAndObserved,
];

/// Starts the program and applies the treatment, whose result lasts until the program exits.
fn start(file: &Path, treatment: Treatment) -> Talker {
    let talker = Talker::start(file);
    let target = Target::open(talker.pid()).unwrap();
    let switch = |action| {
        let report = target.update_with(&all(action), patient()).unwrap();
        assert!(report.changed.iter().all(|change| change.sites > 0));
        report.code_digest
    };
    let observe = || {
        let observation = Observation::new().count(Selector::All);
        target.observe(&observation, patient()).unwrap()
    };
    match treatment {
        Treatment::Nothing => {}
        Treatment::Switched => assert_eq!(switch(Action::Enable), CodeDigest::OfFile),
        Treatment::SwitchedAndBack => {
            switch(Action::Enable);
            assert_eq!(switch(Action::Disable), CodeDigest::Computed);
        }
        Treatment::Observed => assert_eq!(observe().code_digest(), CodeDigest::OfFile),
        Treatment::ObservedBefore => drop(observe().remove().unwrap()),
        Treatment::SwitchedAndObserved => {
            switch(Action::Enable);
            observe();
        }
    }
    talker
}

fn write(talker: &mut Talker, file: &Path) {
    let asked = talker.ask(&format!("write {}", file.display()), "");
    assert_eq!(asked, "written");
}

fn read(talker: &mut Talker, file: &Path) -> String {
    talker.ask(&format!("read {}", file.display()), "")
}

fn digest(talker: &Talker) -> CodeDigest {
    let target = Target::open(talker.pid()).unwrap();
    target.code_digest(&target.states().unwrap()).unwrap()
}

fn programs() -> [PathBuf; 2] {
    program_forms("closures/within")
}

// promise: Closures: Processes accept each other's closures, whether either was or still is
//    switched or observed when it first marshals or reads one (72 pairs)
#[test]
fn closures_pass_whatever_was_switched_or_observed() {
    let scratch = Scratch::new();
    let closure = scratch.file("closure");
    for file in programs() {
        for writer in TREATMENTS {
            write(&mut start(&file, writer), &closure);
            for reader in TREATMENTS {
                let mut talker = start(&file, reader);
                assert_eq!(
                    read(&mut talker, &closure),
                    "got 42",
                    "{writer:?} {reader:?}"
                );
                assert_eq!(digest(&talker), CodeDigest::OfFile, "{reader:?}");
            }
        }
    }
}

// promise: Closures: A program started with its probes enabled, or observed, exchanges
//    closures with others (2 × 2)
#[test]
fn closures_pass_from_and_to_started_programs() {
    let scratch = Scratch::new();
    let closure = scratch.file("closure");
    for file in programs() {
        for is_observed in [false, true] {
            let mut command = Command::new(&file);
            command.stdin(Stdio::piped()).stdout(Stdio::piped());
            let mut launch = Launch::new(command).options(patient());
            if is_observed {
                launch = launch.observe(Observation::new().count(Selector::All));
            } else {
                launch = launch.actions(all(Action::Enable));
            }
            let mut launched = launch.spawn().unwrap();
            let observer = launched.take_observer();
            let digest = match &observer {
                Some(observer) => observer.code_digest(),
                None => launched.report().code_digest,
            };
            assert_eq!(digest, CodeDigest::OfFile);
            let mut talker = Talker::of(Guard::from(launched.into_child()));
            talker.expect("ready");
            write(&mut talker, &closure);
            let mut plain = Talker::start(&file);
            assert_eq!(read(&mut plain, &closure), "got 42");
            write(&mut plain, &closure);
            assert_eq!(read(&mut talker, &closure), "got 42");
        }
    }
}

/// Flips the opcode of the only site and leaves the digest alone, like a tool that knows nothing of digests.
fn flip(talker: &Talker) {
    let target = Target::open(talker.pid()).unwrap();
    let states = target.states().unwrap();
    let site = states.probes().flat_map(|probe| probe.sites()).next();
    let opcode = site.unwrap().address.0 + 1;
    let flipped = match peek(talker.pid(), opcode, 1)[..] {
        [0x3d] => 0xe8,
        _ => 0x3d,
    };
    poke(talker.pid(), opcode, &[flipped]);
}

// promise: Closures: It is reported if the digest was, or would be, computed while sites are
//    patched (2)
#[test]
fn digest_of_patched_code_is_reported() {
    let scratch = Scratch::new();
    let closure = scratch.file("closure");
    for file in programs() {
        let mut talker = Talker::start(&file);
        assert_eq!(digest(&talker), CodeDigest::NotComputed);
        flip(&talker);
        assert_eq!(digest(&talker), CodeDigest::Pending);
        write(&mut talker, &closure);
        assert_eq!(digest(&talker), CodeDigest::OfPatchedCode);
        flip(&talker);
        assert_eq!(digest(&talker), CodeDigest::OfPatchedCode);
        assert_eq!(read(&mut Talker::start(&file), &closure), "refused");
    }
    let talker = Talker::start(&program("closures/closures"));
    flip(&talker);
    assert_eq!(digest(&talker), CodeDigest::Unaffected);
}

// promise: Closures: The next update of a patched process that has marshalled nothing writes the
//    digest (2)
#[test]
fn digest_is_right_though_sites_are_patched_already() {
    let scratch = Scratch::new();
    let closure = scratch.file("closure");
    for file in programs() {
        let mut talker = Talker::start(&file);
        let target = Target::open(talker.pid()).unwrap();
        let live = Options {
            live: true,
            ..patient()
        };
        let report = target.update_with(&all(Action::Enable), live).unwrap();
        assert_eq!(report.code_digest, CodeDigest::Pending);
        let report = target.update_with(&all(Action::Enable), patient()).unwrap();
        assert_eq!(report.code_digest, CodeDigest::OfFile);
        write(&mut talker, &closure);
        assert_eq!(read(&mut Talker::start(&file), &closure), "got 42");
    }
}

/// The fixtures with tables of code fragments, as PIE and as non-PIE.
fn tables() -> impl Iterator<Item = PathBuf> {
    let versions = ["4_11", "4_12", "5_0", "5_1"];
    versions
        .into_iter()
        .flat_map(|version| fixture_forms(&format!("code_table_{version}")))
}

/// What the fixture says of its code: where it is, and its digest.
fn fragment(talker: &mut Talker) -> (Range<u64>, Option<String>) {
    let line = talker.ask("digest", "digest ");
    let words: Vec<&str> = line.split(' ').collect();
    let address = |word: &str| u64::from_str_radix(word.trim_start_matches("0x"), 16).unwrap();
    let digest = words.get(4).map(|word| (*word).to_owned());
    (address(words[1])..address(words[2]), digest)
}

// promise: Closures: The digest in the tables of OCaml 4.11 to 5.x is the MD5 of the code in the file (2 × 4)
#[test]
fn digest_is_the_md5_of_the_code() {
    for file in tables() {
        let mut talker = Talker::start(&file);
        let (code, before) = fragment(&mut talker);
        assert_eq!(before, None);
        let bytes = peek(talker.pid(), code.start, (code.end - code.start) as usize);
        let md5: [u8; 16] = Md5::digest(bytes).into();
        let md5: String = md5.iter().map(|byte| format!("{byte:02x}")).collect();
        let target = Target::open(talker.pid()).unwrap();
        let report = target.update_with(&named(Action::Enable, "pong"), patient());
        assert_eq!(report.unwrap().code_digest, CodeDigest::OfFile, "{file:?}");
        assert_eq!(fragment(&mut talker).1, Some(md5));
        assert_eq!(digest(&talker), CodeDigest::OfFile);
    }
}

// promise: Closures: A digest that a thread is computing is not written over (2 × 4)
#[test]
fn digest_that_is_being_computed_is_left_alone() {
    for file in tables() {
        let mut talker = Talker::start(&file);
        talker.ask("compute", "computing");
        let target = Target::open(talker.pid()).unwrap();
        let impatient = Options {
            time_limit: Duration::from_secs(1),
            ..Options::default()
        };
        let report = target.update_with(&all(Action::Enable), impatient).unwrap();
        assert_eq!(report.code_digest, CodeDigest::Pending, "{file:?}");
        assert_eq!(fragment(&mut talker).1, None);
        talker.ask("finish", "finished");
        assert_eq!(fragment(&mut talker).1, Some("aa".repeat(16)));
        let report = target.update_with(&all(Action::Disable), patient());
        assert_eq!(report.unwrap().code_digest, CodeDigest::Computed);
        assert_eq!(fragment(&mut talker).1, Some("aa".repeat(16)));
    }
}

// promise: Closures: A process whose code differs from the file outside of sites gets no digest (2 × 4)
#[test]
fn no_digest_is_written_for_changed_code() {
    for file in tables() {
        let mut talker = Talker::start(&file);
        let (code, _) = fragment(&mut talker);
        let last = peek(talker.pid(), code.end - 1, 1);
        poke(talker.pid(), code.end - 1, &[!last[0]]);
        let target = Target::open(talker.pid()).unwrap();
        let report = target.update_with(&all(Action::Enable), patient()).unwrap();
        assert_eq!(report.code_digest, CodeDigest::Pending, "{file:?}");
        poke(talker.pid(), code.end - 1, &last);
        assert_eq!(fragment(&mut talker).1, None);
    }
}
