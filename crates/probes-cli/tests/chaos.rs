//! The chaos suite: everything that can go wrong while a process is changed, made to go wrong, and
//! the process looked at afterwards. `make test` runs each case for its least number of rounds,
//! `make chaos` for an hour.
//!
//! It needs the feature `fault-injection`, which builds for use lack. The cases share the faults, and
//! the machine, so one runs at a time; each has a deadline, and prints what it counted.

#![allow(clippy::unwrap_used, clippy::expect_used)]

// What the cases are made of: their time and counts, and the process that is changed.
#[path = "chaos/case.rs"]
mod case;
#[path = "chaos/subject.rs"]
mod subject;
#[path = "chaos/tool.rs"]
mod tool;

// Every call that fails, in turn.
#[path = "chaos/failing_calls.rs"]
mod failing_calls;

// Tools killed at each call, in each write, at any moment; signals without a pause.
#[path = "chaos/kills.rs"]
mod kills;
#[path = "chaos/storm.rs"]
mod storm;

// Threads that come and go, processes that end, execute or fork meanwhile, other tools at work.
#[path = "chaos/concurrent_tools.rs"]
mod concurrent_tools;
#[path = "chaos/exits.rs"]
mod exits;
#[path = "chaos/new_threads.rs"]
mod new_threads;

// Changed without a stop.
#[path = "chaos/live_updates.rs"]
mod live_updates;

// Processes that are followed.
#[path = "chaos/follow.rs"]
mod follow;

// Hits that are counted meanwhile, timed and shown.
#[path = "chaos/counting.rs"]
mod counting;
#[path = "chaos/learnt.rs"]
mod learnt;
#[path = "chaos/observed_process.rs"]
mod observed_process;
#[path = "chaos/observers.rs"]
mod observers;

// The screen that shows them.
#[path = "chaos/top.rs"]
mod top;

// Programs started with their probes set.
#[path = "chaos/launches.rs"]
mod launches;
