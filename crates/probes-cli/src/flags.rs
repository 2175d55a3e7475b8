//! Groups of flags that several commands share: how each is typed, and what it means.

mod actions;
mod checked;
mod output_options;
mod pairs;
mod probe_selection;
mod target_selection;
mod until;

pub(crate) use actions::{ActionFlags, RequiredActionFlags};
pub(crate) use checked::{Checked, Flags, each_once};
pub(crate) use output_options::{OutputFlags, OutputOptions, VerbosityFlags};
pub(crate) use pairs::{Pair, PairFlags, pair};
pub(crate) use probe_selection::{ProbeFlags, by_name, probe_name};
pub(crate) use target_selection::{OneProcess, TargetSelection};
pub(crate) use until::{Until, duration, positive};
