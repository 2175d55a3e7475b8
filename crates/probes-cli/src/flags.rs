//! Groups of flags that several commands share: how each is typed, and what it means.

mod actions;
mod call_arguments;
mod checked;
mod counted;
mod duration;
mod events;
mod fields;
mod filter;
mod forked;
mod function_selection;
mod keys;
mod misplaced;
mod output_options;
mod pairs;
mod paths;
mod probe_selection;
mod process_or_program;
mod recorded;
mod sample;
mod seccomp;
mod served;
mod stack;
mod take_over;
mod target_selection;
mod timed;
mod usdt;
mod wanted_histogram;
mod watched;

pub(crate) use actions::{ActionFlags, ChangeFlags, RequestedChange};
pub(crate) use call_arguments::CallArgumentsFlag;
pub(crate) use checked::{Checked, Flags, each_once};
pub(crate) use counted::{Counted, CountedFlags};
pub(crate) use duration::{DurationFlag, duration, positive};
pub(crate) use events::{EventsOr, EventsOrHits};
pub(crate) use fields::{FieldFlags, refuse_fields_in_json};
pub(crate) use filter::FilterFlags;
pub(crate) use forked::ForkedFlag;
pub(crate) use function_selection::{
    FunctionArgument, FunctionList, FunctionOrCollectorFlags, ends_part, functions,
};
pub(crate) use keys::KeyFlags;
pub(crate) use misplaced::Misplaced;
pub(crate) use output_options::{OutputFlags, VerbosityFlags};
pub(crate) use pairs::{OverFlag, Pair, PairFlags, PairKeyFlag, pair};
pub(crate) use paths::PathFlags;
pub(crate) use probe_selection::{by_name, probe_name, with_regexp_help};
pub(crate) use process_or_program::{GivenTarget, ProcessOrProgram};
pub(crate) use recorded::{RecordedFlags, selects};
pub(crate) use sample::SampleFlag;
pub(crate) use seccomp::SeccompFlag;
pub(crate) use served::ServedFlags;
pub(crate) use take_over::{FORCE_HELP, TakeOver};
pub(crate) use target_selection::{OneProcess, TargetSelection, comm, pid, program_of};
pub(crate) use timed::TimedFlags;
pub(crate) use usdt::{ProviderArgument, UsdtFlags, provider, usdt_name};
pub(crate) use wanted_histogram::{
    HistogramFlags, HistogramSource, HistogramSourceFlags, LATENCY_COMMAND, NEEDS_OF,
};
pub(crate) use watched::{CallFlags, Watched, WatchedFlags};
