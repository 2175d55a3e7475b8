//! A program sees the same environment (descriptors, limits, signals, identity) under the commands
//! that start it as without a tool.

use std::fs;

use test_support::Scratch;

use crate::case::Case;
use crate::program::Program;
use crate::ways::{LAUNCHES, every_way, launched};

// promise: Launching programs: A program sees the same descriptors, limits, signals, status,
//    environment and identity under `trace`, `record` and `profile` as without a tool, and while its probes
//    are changed and observed (2 × 14 starts, and every treatment of the adversary suite)
#[test]
fn programs_see_the_same_as_alone() {
    let scratch = Scratch::new();
    let file = scratch.file("seen");
    let program = Program::checked("environment").with_args([&file]);
    every_way("environment", &program);
    let mut case = Case::begin("environment under trace", 100);
    for form in 0..2 {
        program.start(form).end("alone");
        let alone = fs::read_to_string(&file).unwrap();
        // `gc` sets variables with which OCaml 5 writes its events.
        for launch in LAUNCHES.into_iter().filter(|launch| *launch != "gc") {
            fs::remove_file(&file).unwrap();
            launched(&mut case, &program, form, launch);
            let seen = fs::read_to_string(&file).unwrap();
            let differences: Vec<_> = alone.lines().zip(seen.lines()).collect();
            let differences: Vec<_> = differences.iter().filter(|(a, b)| a != b).collect();
            assert!(seen == alone, "{launch}: {differences:#?}");
        }
    }
}
