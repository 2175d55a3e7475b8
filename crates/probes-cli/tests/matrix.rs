//! The distribution matrix: programs built by other compilers, in chroots, observed and updated from
//! outside.
//!
//! `scripts/matrix` makes the chroots, builds the programs in them, and runs this once for each.
//! OCAML_PROBES_CHROOT names the chroot's directory, OCAML_PROBES_TARGETS the programs in it.
//!
//! `// promise: Section: sentence (how often)` above a test is a row of docs/promises.md: what the test tries to
//! break, and on how many programs or how many times.

#![allow(clippy::unwrap_used, clippy::expect_used)]

// What the cases use: programs in the chroot, the command `ocaml-probes`, and an observation's
// results.
#[path = "matrix/chroot.rs"]
mod chroot;
#[path = "cli/compound.rs"]
mod compound;
#[path = "chaos/observations.rs"]
mod observations;
#[path = "cli/support.rs"]
#[allow(dead_code, reason = "only the tests in tests/cli use golden files")]
mod support;

// Cases for the programs of any compiler.
#[path = "matrix/programs.rs"]
mod programs;

// Programs of Debian's archive; not of a chroot.
#[path = "matrix/stripped.rs"]
mod stripped;

// Domains and effects, also while they are observed.
#[path = "matrix/domains.rs"]
mod domains;
#[path = "matrix/effects.rs"]
mod effects;
#[path = "matrix/events.rs"]
mod events;
#[path = "matrix/gc.rs"]
mod gc;
#[path = "cli/hit_stacks.rs"]
mod hit_stacks;
#[path = "matrix/hits.rs"]
mod hits;
#[path = "cli/stacks.rs"]
#[allow(dead_code, reason = "some of it is only for the tests in tests/cli")]
mod json_stacks;
#[path = "matrix/observe.rs"]
mod observe;
#[path = "matrix/raw_events.rs"]
mod raw_events;
#[path = "matrix/record.rs"]
mod record;
#[path = "matrix/record_events.rs"]
mod record_events;
#[path = "matrix/serve.rs"]
mod serve;
#[path = "cli/serving.rs"]
#[allow(dead_code, reason = "some of it is only for the tests in tests/cli")]
mod serving;
#[path = "matrix/stacks.rs"]
mod stacks;
#[path = "matrix/top.rs"]
mod top;
