//! The programs that are measured, as paths in the built `test-programs`.

/// Where programs of C and assembly are.
pub(crate) const FIXTURES: &str = "fixtures";

/// In `FIXTURES`: `spin_10000.pie`, padded to 1 GiB.
pub(crate) const LARGE: &str = "large/spin_10000_1g.pie";

/// Executes sites of one kind in a loop, in each of its threads.
pub(crate) const KINDS: &str = "fixtures/kinds_spin.pie";

/// Executes a given number of pairs.
pub(crate) const PAIRS: &str = "fixtures/timed.pie";

/// Programs with probes that wait for a line.
pub(crate) const WAITING: [&str; 4] = [
    "fixtures/gen_ocaml_2.pie",
    "fixtures/gen_ocaml_2.nopie",
    "init.exe",
    "init_nopie.exe",
];
