//! Patched functions compute the same as unpatched ones. A process, and a copy of it in which most functions are
//! observed, execute random functions with the same random registers and memory, one instruction at a time. Each call is
//! executed in two new processes, a fork of either:
//!
//! ```text
//! unpatched   i1 ──▶ i2 ──▶ i3 ──▶ i4 ──▶ …        the same registers and flags wherever both are,
//!              ‖                    ‖              and the same memory in the end
//! patched     jmp ─▶ trampoline ──▶ i4 ──▶ …
//! ```
//!
//! The patches, their trampolines and their places are those of an observation. `LOCKSTEP_CASES` is the number of calls
//! for each program and observation, `LOCKSTEP_SEED` selects them.

#[path = "lockstep/call.rs"]
mod call;
#[path = "lockstep/instruction.rs"]
mod instruction;
#[path = "lockstep/program.rs"]
mod program;
#[path = "lockstep/tracee.rs"]
pub(crate) mod tracee;

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::Command;

use test_support::{Guard, Scratch, Talker, program_forms};

use crate::patches::ocamlopt;
use call::{Call, End};
use program::{ObservedPlaces, Program, Twin};

/// Memory that random values, in registers and in memory, point into.
const DATA: Range<u64> = 0x10_0000_0000..0x10_0000_4000;
const STACK: Range<u64> = 0x10_1000_0000..0x10_1001_0000;
/// Code of ours: a system call, and after it `RETURN`, the address that functions return to.
const GATE: Range<u64> = 0x10_2000_0000..0x10_2000_1000;
const RETURN: u64 = GATE.start + 8;
const PAGE: u64 = 4096;

fn number(variable: &str, default: u64) -> u64 {
    let given = std::env::var(variable).ok();
    given.map_or(default, |text| text.parse().unwrap())
}

/// Calls random functions of a program, and of a copy that is observed, in each of these ways; asserts that most of
/// the calls can be compared, and that none differs.
fn compare(what: &str, program: &Program, observed: &[ObservedPlaces], default_cases: u64) {
    let seed = number("LOCKSTEP_SEED", 20_261_123);
    let cases = number("LOCKSTEP_CASES", default_cases);
    let mut random = fastrand::Rng::with_seed(seed);
    for &observed in observed {
        let twin = Twin::of(program, observed, &mut random);
        let (mut ends, mut trampolines, mut steps) = (BTreeMap::new(), 0, 0);
        for case in 0..cases {
            // At the entry of a function, or directly at a patched place.
            let start = if observed == ObservedPlaces::Instructions || random.bool() {
                *random.choice(&twin.sites).unwrap()
            } else {
                let (own, all) = (&program.callees[program.own.clone()], &program.callees[..]);
                let from = if random.bool() { own } else { all };
                random.choice(from).unwrap().code.start
            };
            let mut call = Call::new(&twin, start, random.u64(..));
            match call.run() {
                Ok(end) => *ends.entry(end).or_insert(0_u64) += 1,
                Err(error) => panic!(
                    "{what}, {observed:?}, LOCKSTEP_SEED={seed}, case {case}, from {}: {error}\n{}",
                    program.place(start),
                    call.last()
                ),
            }
            trampolines += call.trampolines;
            steps += call.path.len();
        }
        println!("{what}, {observed:?}: {steps} steps, {trampolines} trampolines, {ends:?}");
        let compared: u64 = ends
            .iter()
            .filter(|it| !matches!(it.0, End::WildJump | End::Incomparable))
            .map(|it| *it.1)
            .sum();
        assert!(
            compared * 2 > cases && trampolines as u64 > cases / 8,
            "{ends:?}"
        );
    }
}

// promise: Functions: Patched functions compute the same as unpatched ones, in every register, flag and byte (random calls)
#[test]
fn patched_ocaml_computes_the_same() {
    let all = [
        ObservedPlaces::Entries,
        ObservedPlaces::EntriesAndExits(&["*"]),
        ObservedPlaces::Instructions,
    ];
    for (file, observed) in program_forms("handlers")
        .into_iter()
        .zip([&all[1..], &all[..1]])
    {
        let talker = Talker::start(&file);
        let pid = talker.pid();
        let program = Program::of(talker, pid);
        compare(&file.display().to_string(), &program, observed, 30);
    }
}

#[test]
fn patched_c_computes_the_same() {
    let scratch = Scratch::new();
    let all = [
        ObservedPlaces::Entries,
        ObservedPlaces::EntriesAndExits(&["*"]),
        ObservedPlaces::Instructions,
    ];
    for (options, observed) in [
        (&["-O0"][..], &all[2..]),
        (&["-O3", "-fcf-protection=full"], &all[..2]),
        (&["-Os", "-no-pie", "-fno-pie"], &all[1..2]),
        (&["-O2", "-fno-omit-frame-pointer", "-static"], &all[1..]),
    ] {
        let file = compiled(&scratch, options);
        let talker = Talker::start(&file);
        let pid = talker.pid();
        let program = Program::of(talker, pid);
        compare(&options.join(" "), &program, observed, 30);
    }
}

#[test]
fn patched_compiler_computes_the_same() {
    let mut command = Command::new(ocamlopt());
    command
        .args(["-c", "-impl", "/dev/stdin"])
        .stdin(std::process::Stdio::piped());
    // It waits for its input, which never comes.
    let guard = Guard::spawn(&mut command);
    let pid = guard.pid();
    let program = Program::of(guard, pid);
    let timed = ObservedPlaces::EntriesAndExits(&["Stdlib.*", "T*", "caml_*"]);
    compare("ocamlopt", &program, &[timed], 40);
}

/// Compiles lockstep/functions.c with these options.
fn compiled(scratch: &Scratch, options: &[&str]) -> PathBuf {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/live/lockstep/functions.c");
    let file = scratch.file(&format!("lockstep{}", options.concat()));
    let mut gcc = Command::new("gcc");
    let gcc = gcc.args(options).arg("-o").arg(&file).arg(source);
    assert!(gcc.status().unwrap().success(), "{options:?}");
    file
}
