//! See and steer the tracing probes of live, native OCaml programs on Linux x86-64.
//!
//! `[%probe "name" handler]` in an OCaml program compiles to a site of six bytes, a note that says
//! where it is, and a counter. This crate finds them in the program's file, and switches them in
//! its memory while it runs: no root, no kernel module, no restart.
//!
//! ```text
//! ELF file ─▶ table ─▶ maps ─▶ bias ─▶ select ─▶ plan ─▶ stop ─▶ patch ─▶ report
//! elf         name →   what    file    actions   every   every   check,   before,
//! elf::note   sites,   is      addr →  → probe   write,  thread  write,   after,
//!             sema-    mapped  live    ids       with    (sys)   read     how long
//!             phores   where   addr              what it         back,    it stop_time
//!                                                expects         or undo
//! ```
//!
//! Everything before *stop* is done while the process runs, and changes nothing. A program that
//! switches its own probes ([`Target::current`]) stops nothing.
//!
//! ```no_run
//! use probes_lib::{Action, Actions, Selector, Target};
//!
//! let target = Target::open(4242)?;
//! for probe in target.states()?.probes() {
//!     println!("{} {:?}", probe.name(), probe.state());
//! }
//! let report = target.update(&Actions::of(Action::Enable, Selector::name("req_start")))?;
//! println!("stopped for {:?}", report.stopped);
//! # Ok::<(), probes_lib::Error>(())
//! ```

#![deny(clippy::print_stdout, clippy::print_stderr)]

mod address;
mod elf;
mod error;
#[cfg(feature = "fault-injection")]
#[doc(hidden)]
pub mod faults;
mod follow;
mod inject;
mod launch;
mod memory;
mod observe;
mod process;
mod select;
mod site;
mod survey;
mod sys;
mod target;
#[cfg(test)]
mod testing;
mod trace;
mod update;

pub use address::{FileAddr, LiveAddr, LoadBias};
pub use elf::Linking;
pub use elf::arguments::{Argument, Place};
pub use elf::build_id::BuildId;
pub use elf::note::{MalformedNote, Note, NoteDefect, Notes, notes};
pub use elf::source::{SourceLocation, SourceMap};
pub use elf::table::{Generation, Probe, ProbeTable, Semaphore, Site};
pub use error::{
    Denial, Effect, ElfDefect, Error, ErrorKind, MemoryPart, Operation, ProbeDefect, Result,
};
pub use follow::{Follow, FollowEvent};
pub use launch::{Follower, Launch, Launched, ReceivedSignal, Split, Starter};
pub use observe::{
    CleanReport, Counts, Event, Events, Installed, Latency, Observation, Observed, Observer,
    SiteHits, Value,
};
pub use process::object::{Object, UnreadableObject};
pub use select::{Action, Actions, Selector};
pub use site::{SITE_LEN, SiteCode};
pub use survey::{Survey, SurveyedProcess, survey};
pub use target::Target;
pub use update::options::Options;
pub use update::report::{ProbeChange, ProbeState, ProbeStates, Report, SemaphoreState, SiteState};
pub use update::snapshot::State;
