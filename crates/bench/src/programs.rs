//! The programs that are measured, as paths in the built `test-programs`.

/// Where programs of C and assembly are.
pub(crate) const FIXTURES: &str = "fixtures";

/// A path relative to `FIXTURES`, unlike the others: `spin_10000.pie`, padded to 1 GiB.
pub(crate) const LARGE: &str = "large/spin_10000_1g.pie";

/// Executes sites of one kind in a loop: the same kind in all of its threads.
pub(crate) const KINDS_SPIN: &str = "fixtures/kinds_spin.pie";

/// Executes a given number of pairs.
pub(crate) const PAIRS: &str = "fixtures/timed.pie";

/// Calls functions in bursts.
pub(crate) const BURST: &str = "fixtures/calls.pie";

/// A program of OCaml that waits for a line of input, which says how often it calls its functions.
pub(crate) const CALLS: &str = "calls.exe";

/// Programs that have probes, and wait for a line of input.
pub(crate) const WAITING: [&str; 4] = [
    "fixtures/gen_ocaml_2.pie",
    "fixtures/gen_ocaml_2.nopie",
    "init.exe",
    "init_nopie.exe",
];
