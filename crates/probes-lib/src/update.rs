//! Enables and disables probes: snapshot, plan, lock, stop, patch, report.

pub(crate) mod attempt;
pub(crate) mod breakpoints;
pub(crate) mod code_digest;
pub(crate) mod holds;
pub(crate) mod lock;
pub(crate) mod options;
pub(crate) mod own_process;
pub(crate) mod patch;
pub(crate) mod plan;
pub(crate) mod prepare;
pub(crate) mod report;
pub(crate) mod snapshot;
pub(crate) mod states;
