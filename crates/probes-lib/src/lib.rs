//! Lists, enables, disables and observes the tracing probes of live, native OCaml programs on Linux
//! x86-64.
//!
//! `[%probe "name" handler]` in an OCaml program compiles to a **site** of six bytes, a note in the
//! program's file that says where the site is, and a **semaphore**, which counts the tools
//! that have enabled the probe. This crate finds the probes in the file, and enables and disables
//! them in the memory of the process while it runs: without root, a kernel module or a restart.
//!
//! ```text
//! ELF file ─▶ table ─▶ maps ─▶ load bias ─▶ select ─▶ plan ─▶ stop ─▶ patch ─▶ report
//! elf         name →   what    file addr →  actions   every   every   check,   before,
//! elf::note   sites,   is      live addr    → probe   write,  thread  write,   after,
//!             sema-    mapped               ids       with            read     stop
//!             phores   where                          what it         back,    time
//!                                                     expects         or restore
//! ```
//!
//! Everything before *stop* is done while the process runs, and changes nothing. A program that
//! switches its own probes ([`Target::current`]) stops nothing.
//!
//! ```no_run
//! use probes_lib::{Action, Actions, Options, Selector, Target};
//!
//! let target = Target::open(4242)?;
//! for probe in target.states()?.probes() {
//!     println!("{} {:?}", probe.name(), probe.state());
//! }
//! let report = target.update(&Actions::of(Action::Enable, Selector::name("req_start")))?;
//! println!("stopped for {:?}", report.stopped);
//! target.undo(&report, Options::default())?;
//! # Ok::<(), probes_lib::Error>(())
//! ```
//!
//! # Where to begin
//!
//! | to | use |
//! |---|---|
//! | read the probes of a file | [`ProbeTable::read`] |
//! | read the USDT probes of all providers, in a file or a process | [`UsdtProbes`] |
//! | list the processes that have probes | [`survey`](survey()) |
//! | list, enable and disable the probes of a process | [`Target`], [`Actions`], [`Report`] |
//! | count the hits of probes, time pairs of them, read their arguments | [`Target::observe`], with an [`Observation`]; the [`Observer`] reads |
//! | read the events that the runtime of OCaml 5 writes itself | [`RuntimeEvents`] |
//! | start a program with its probes set | [`Launch`] |
//! | set the probes of everything that processes fork, execute and load | [`Follow`]; [`Launch::split`] from the start of a program |
//! | list the functions of a file or a process | [`Functions`] |
//! | read the stacks of the threads of a process, or profile them | [`Stacks`], [`Profiler`] |
//! | find where code can be patched with a jump to a trampoline | [`PatchPlanner`] |
//! | know beforehand what a machine and a process allow | [`Diagnosis`] |
//! | know why something failed, and what the process is left with | [`Error::kind`], [`Error::effect`] |
//!
//! # The phases of an update
//!
//! 1. **Open** ([`Target::open`]): the maps of the process are read, and the ELF file of each object that
//!    is mapped, once.
//! 2. **Check** ([`Target::check`]): probes are selected, every write is planned with the bytes
//!    that it expects to find. An error up to here has changed nothing.
//! 3. **Update** ([`Target::update`]): all threads are stopped, everything is checked once more, written
//!    and read back, and the threads are resumed. Either all of it is done or, as far as the kernel
//!    permits, none.
//! 4. **Undo** ([`Target::undo`]): reverses what one report says was changed, and nothing else.
//!
//! An observation is installed and removed in the same steps: [`Target::observe`] to [`Observer::remove`].

#![deny(clippy::print_stdout, clippy::print_stderr)]

mod address;
mod build_id;
mod diagnosis;
mod elf;
mod error;
mod events_switch;
mod expression;
#[cfg(feature = "fault-injection")]
#[doc(hidden)]
pub mod faults;
mod follow;
mod functions;
mod hold;
mod inject;
mod job;
mod launch;
mod memory;
mod near;
mod numbers;
mod observe;
mod observer;
mod patch_plan;
mod process;
mod profile;
mod regular_file;
mod runtime_events;
mod select;
mod site;
mod stacks;
mod survey;
mod switched_events;
mod sys;
mod target;
#[cfg(test)]
mod testing;
mod ticks;
mod trace;
mod unwind;
mod update;
mod usdt;

/// Whether this library can inject faults.
#[doc(hidden)]
pub const HAS_FAULT_INJECTION: bool = cfg!(feature = "fault-injection");

// Files: what an ELF file says of probes.
pub use build_id::BuildId;
pub use elf::Linking;
pub use elf::arguments::{Argument, Operand};
pub use elf::functions::{
    FirstCall, Function, FunctionKind, FunctionName, FunctionTable, NameSource,
};
pub use elf::mangling::Language;
pub use elf::note::{Note, Notes, notes};
pub use elf::source::{SourceLocation, SourceMap};
pub use elf::table::{Generation, Probe, ProbeTable, Semaphore, Site};
pub use elf::usdt::UsdtSite;

// Processes: where their objects are loaded, and which of them have probes.
pub use address::{CodeRange, FileAddr, LiveAddr, LoadBias};
pub use functions::{FunctionObject, Functions, SelectedFunction};
pub use process::object::{Object, UnreadableObject};
pub use process::{check_proc, pids, proc_hides_others};
pub use survey::{Survey, SurveyedProcess, UnreadProcess, survey};
pub use usdt::{PlacedUsdtSite, UsdtObject, UsdtProbe, UsdtProbes};

// Diagnoses: what this machine and a process allow.
pub use diagnosis::{Check, CheckKind, CheckResult, Diagnosis};

// The memory and the signals of the tool itself: for commands.
pub use sys::heap::keep_one_heap;
pub use sys::signals::survive_file_limit;

// Updates: what to do, with which probes, and what was done.
pub use hold::Hold;
pub use select::function::{CollectorWork, FunctionSelector};
pub use select::glob::{BadGlob, Glob};
pub use select::{Action, Actions, Selector};
pub use site::{SITE_LEN, SiteCode};
pub use target::Target;
pub use update::code_digest::CodeDigest;
pub use update::holds::{HeldProbe, Holder, Holders, ReleasedHold};
pub use update::options::Options;
pub use update::report::{ProbeChange, ProbeState, ProbeStates, Report, SemaphoreState, SiteState};
pub use update::snapshot::State;

// Expressions: what is asked of each hit.
pub use expression::{BadExpression, Expression, ExpressionProblem, Keys};
// For fuzz targets.
#[doc(hidden)]
pub use expression::{Answer, Filter, Hit, IntegerExpression, Parameter, ParameterKind, Scope};

// Observations: how often, how long and with which values probes are hit.
pub use observe::{
    AvailableObservation, BadLinear, CallFrame, CallerLatency, CleanReport, CopiedStack, Counts,
    DiscardedPatches, Event, EventBatch, EventKind, Events, ForkedChildren, FunctionHits,
    FunctionLatency, Key, KeyedCount, KeyedCounts, KeyedHistogram, KeyedHistograms, KeyedTime,
    KeyedTimes, Latency, Linear, ObservableFunctions, Observation, PairKey, Quantile,
    RefusedFunction, SiteHits, SlowPair, Times, Value, ValueBucket, ValueHistogram, ValueRecorder,
};
pub use observer::{ObservationReport, Observer};

// The events that the runtime of OCaml 5 writes itself.
pub use runtime_events::{
    CustomBytes, DomainPauses, DomainRequests, EventDurations, EventGaps, GcPause, GcPauses,
    GcTimes, PausePhase, PhaseUnderWay, RingEntry, RuntimeEventGroup, RuntimeEventKind,
    RuntimeEventName, RuntimeEvents, SelectedEntry, SelectedEvents, UserValue,
};
pub use switched_events::SwitchedEvents;

// Stacks: what the threads of a process do now.
pub use stacks::{
    HitStack, StackFrame, StackReport, Stacks, SystemCall, ThreadRole, ThreadStack, ThreadState,
    WaitsFor,
};
pub use unwind::StackEnd;

// Profiles: where the time goes.
pub use profile::{
    Activity, Profile, ProfiledStack, Profiler, RaisedPriority, RecordedWait, RunningMethod,
    ThreadTimes, WaitMethod, WaitRecorder, WaitTimes,
};

// Patches: where a jump to a trampoline can be put in any code.
pub use error::Refusal;
pub use patch_plan::{FunctionPlan, PatchPlanner};
// For tests and fuzz targets.
#[doc(hidden)]
pub use patch_plan::{
    ExitPlan, code::Code, displaced::DisplacedCopy, displaced::DisplacedExit, jump::Jump,
    site::PatchSite,
};

// Programs that are started, and processes that are followed.
pub use follow::{Follow, FollowEvent};
pub use job::ReceivedSignal;
pub use launch::split::{Follower, Split, Starter};
pub use launch::{Launch, Launched};

// Errors: what was tried, on what, why it failed, and what it left behind.
pub use error::{
    Denial, Effect, ElfDefect, Error, ErrorKind, FileError, FunctionError, LaunchError,
    MalformedNote, MemoryError, MemoryLimit, MemoryLimitKind, MemoryPart, NoteDefect, ObserveError,
    Operation, ProbeDefect, ProbeError, ProcessError, Result, RuntimeEventsError, SeccompAction,
    Subject, SystemError, ToolProcess, TscDenial, UnreadableFilter,
};
