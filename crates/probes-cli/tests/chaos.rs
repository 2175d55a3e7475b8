//! The chaos suite: system calls of the tool fail, the tool is killed, and processes exit, exec and
//! fork during updates and observations; afterwards the process is checked. `make chaos` runs it
//! for an hour; by default, each case runs its minimum number of rounds.
//!
//! It needs the feature `fault-injection` of probes-lib, with which all that is tested is built. The cases
//! share the machine, so only one runs at a time; each has a deadline, and prints what it counted.
//!
//! `// promise: Section: sentence (how often)` above a test is a row of docs/promises.md: what the test tries to
//! break, and on how many programs or how many times.

#![allow(clippy::unwrap_used, clippy::expect_used)]

/// The name of the suite, which its cases print. In capitals, it begins the name of the environment
/// variable that says how long the cases run: `CHAOS_SECONDS`.
const SUITE: &str = "chaos";

// Helpers: time and counts of a case, the process under test, how it ends, the tool.
#[path = "chaos/case.rs"]
mod case;
#[path = "chaos/process_with_event.rs"]
mod process_with_event;
#[path = "cli/schema.rs"]
#[allow(dead_code, reason = "it is shared with other suites")]
mod schema;
#[path = "chaos/subject.rs"]
mod subject;
#[path = "chaos/tool.rs"]
mod tool;

// Every system call fails, in turn.
#[path = "chaos/failing_calls.rs"]
mod failing_calls;

// Tools killed at each call, in each write, at any moment; signals without a pause.
#[path = "chaos/holds.rs"]
mod holds;
#[path = "chaos/kills.rs"]
mod kills;
#[path = "chaos/storm.rs"]
mod storm;

// Threads that come and go, processes that exit, exec or fork meanwhile, several tools at once.
#[path = "chaos/concurrent_tools.rs"]
mod concurrent_tools;
#[path = "chaos/exits.rs"]
mod exits;
#[path = "chaos/new_threads.rs"]
mod new_threads;

// Updates without a stop.
#[path = "chaos/live_updates.rs"]
mod live_updates;

// Followed processes.
#[path = "chaos/follow.rs"]
mod follow;

// Observations that count, time and show hits.
#[path = "chaos/counting.rs"]
mod counting;
#[path = "chaos/function_observers.rs"]
mod function_observers;
#[path = "chaos/observations.rs"]
mod observations;
#[path = "chaos/observed_process.rs"]
mod observed_process;
#[path = "chaos/observers.rs"]
mod observers;

// The screen of `top`.
#[path = "chaos/top.rs"]
mod top;

// The exporter.
#[path = "chaos/serve.rs"]
mod serve;

// Programs that the tool starts with probes enabled or disabled.
#[path = "chaos/launches.rs"]
mod launches;
