//! The library on live processes: OCaml programs and fixtures, in both forms (PIE and fixed
//! address).
//!
//! Every test asserts the same as root and as an ordinary user. To run the binary as another user,
//! set the directory of the built test programs:
//! `OCAML_PROBES_TARGETS=…/_build/default/test-programs`.

#![allow(clippy::unwrap_used, clippy::expect_used)]

// Helpers: a test in its own process, what is expected of each program, a checked session.
#[path = "live/expected.rs"]
mod expected;
#[path = "live/own_process.rs"]
mod own_process;
#[path = "live/session.rs"]
mod session;

// States, enabling, disabling and every selector, compared byte by byte.
#[path = "live/fixtures.rs"]
mod fixtures;
#[path = "live/programs.rs"]
mod programs;

// Probes in shared objects, with another C library, and in programs in their own namespaces.
#[path = "live/containers.rs"]
mod containers;
#[path = "live/mounts.rs"]
mod mounts;
#[path = "live/musl.rs"]
mod musl;
#[path = "live/objects.rs"]
mod objects;

// Functions of files and processes.
#[path = "live/functions.rs"]
mod functions;

// A program that uses the library, as an example.
#[path = "live/exporter.rs"]
mod exporter;

// All processes of the machine.
#[path = "live/survey.rs"]
mod survey;

// Updates without a stop of the process, updates that are undone, and holds of killed tools that are released.
#[path = "live/holds.rs"]
mod holds;
#[path = "live/undo.rs"]
mod undo;
#[path = "live/without_stop.rs"]
mod without_stop;

// Two thousand updates of one process.
#[path = "live/endurance.rs"]
mod endurance;

// Following processes.
#[path = "live/follow.rs"]
mod follow;

// Programs started with their probes set.
#[path = "live/launch.rs"]
mod launch;

// Stacks that overflow in observed code.
#[path = "live/overflow.rs"]
mod overflow;

// Signals, threads, stops, exec, fork, vfork.
#[path = "live/stopping.rs"]
mod stopping;

// System calls that wait during an update, and the information that signals carry.
#[path = "live/interrupted_calls.rs"]
mod interrupted_calls;

// Processes that are frozen, under seccomp, privileged, or have a thousand threads; code that is
// moved or has a uprobe.
#[path = "live/code.rs"]
mod code;
#[path = "live/hazards.rs"]
mod hazards;

// Threads that are created and exit all the time, and tools that are interrupted.
#[path = "live/churn.rs"]
mod churn;

// Processes and memory that are refused, and the state in which they are left.
#[path = "live/damage.rs"]
mod damage;
#[path = "live/files.rs"]
mod files;
#[path = "live/refusals.rs"]
mod refusals;

// Observations: what is counted, timed and shown is exact.
#[path = "live/discarded.rs"]
mod discarded;
#[path = "live/exactness.rs"]
mod exactness;
#[path = "live/injected_calls.rs"]
mod injected_calls;
#[path = "live/latency.rs"]
mod latency;
#[path = "live/leaning.rs"]
mod leaning;
#[path = "live/observe.rs"]
mod observe;
#[path = "live/observers.rs"]
mod observers;
#[path = "live/orphaned.rs"]
mod orphaned;
#[path = "live/rows.rs"]
mod rows;
#[path = "live/seccomp.rs"]
mod seccomp;
#[path = "live/slow_pairs.rs"]
mod slow_pairs;
#[path = "live/trampolines.rs"]
mod trampolines;
#[path = "live/tsc_access.rs"]
mod tsc_access;
#[path = "live/watch.rs"]
mod watch;

// Digests of OCaml code.
#[path = "live/closures.rs"]
mod closures;

// Other tools as oracles, and the examples.
#[path = "live/examples.rs"]
mod examples;
#[path = "live/oracles.rs"]
mod oracles;

// Patches of any instruction, and the code that is executed instead.
#[path = "live/displaced.rs"]
mod displaced;
#[path = "live/lockstep.rs"]
mod lockstep;
#[path = "live/patches.rs"]
mod patches;
#[path = "live/stepping.rs"]
mod stepping;
