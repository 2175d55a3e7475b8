//! The adversary suite: programs that check themselves behave the same without the tool, while
//! their probes are switched, while they are observed in every way, under both in random order,
//! and when the tool starts them. `make adversary` runs each of them for ten minutes; by
//! default, each case runs its least number of rounds.
//!
//! The programs are in `test-programs/adversary`: signals, threads, processes, limits, what a
//! program can see and do to itself, and what else the OCaml runtimes offer. Each prints its verdict.
//! Fixtures have the probes of compilers that this machine lacks.

#![allow(clippy::unwrap_used, clippy::expect_used)]

/// The name of this suite in the output of its cases, and in the variable ADVERSARY_SECONDS.
const SUITE: &str = "adversary";

// Helpers: time and counts of a case, the command `ocaml-probes`.
#[path = "chaos/case.rs"]
#[allow(dead_code, reason = "counts of the other suite")]
mod case;
#[path = "cli/support.rs"]
#[allow(dead_code, reason = "only the tests in tests/cli use golden files")]
mod support;

// A program, and what is done to it.
#[path = "adversary/program.rs"]
mod program;
#[path = "adversary/shown.rs"]
mod shown;
#[path = "adversary/ways.rs"]
mod ways;

// The programs, each treated in every way, and what they see.
#[path = "adversary/environment.rs"]
mod environment;
#[path = "adversary/programs.rs"]
mod programs;

// The screen of `top`, which needs tmux.
#[path = "adversary/top.rs"]
mod top;
