//! The warnings of times of pairs and calls that may be wrong, or are missing.

use probes_lib::Observer;

use super::untyped::warn_of_times_without_key;
use crate::messages::Messages;
use crate::output::{Latencies, WarningKind};

/// Warns of times that may be wrong, and of times that are missing; notes those that end before what a function does.
pub(super) fn warn_of_doubts(messages: &Messages, latencies: &Latencies<'_>) {
    warn_of_interleaved(messages, latencies.cautions(), latencies.unknown());
    warn_of_lost(messages, latencies);
    warn_of_times_without_key(messages, latencies.only_without_key());
    if let Some(note) = latencies.that_jump() {
        messages.note_to_people(&format!("{note}: time that function, too"));
    }
}

/// Warns of calls and pairs that were not timed, which may be most of them.
fn warn_of_lost(messages: &Messages, latencies: &Latencies<'_>) {
    if let Some(caution) = latencies.lost_calls() {
        let hint = "the outermost 500 calls of each stack are timed, on at most 1,000 stacks (each fiber of OCaml 5 \
                    has one). With more busy threads than processors, calls of C functions are lost, too. Time fewer \
                    functions; docs/functions.md has the reasons";
        messages.warning(WarningKind::LostCalls, &caution, hint);
    }
    if let Some(caution) = latencies.lost_times() {
        let hint = "64 starts may wait in a thread; with -key, about 33,000 in the process";
        messages.warning(WarningKind::LostTimes, &caution, hint);
    }
}

/// Warns of calls that are not subtracted from the time of their caller, because they are on another stack.
pub(super) fn warn_of_separate_stacks(messages: &Messages, observer: &Observer) {
    // If the process has exited meanwhile, that is reported later.
    let timed = observer.function_latencies().unwrap_or_default();
    let on_fibers = timed.iter().filter(|it| it.is_on_fiber()).count();
    if on_fibers > 0 && on_fibers < timed.len() {
        messages.warning(
            WarningKind::SeparateStacks,
            "OCaml 5 executes C code on other stacks than OCaml code: self times of functions on fibers include their \
             calls of functions on threads, and the other way round",
            "the last words of each line, or the column stack, say which are on which",
        );
    }
}

/// Warns of pairs whose times are doubtful, and notes those for which that cannot be known.
pub(super) fn warn_of_interleaved(
    messages: &Messages,
    cautions: impl Iterator<Item = (String, &'static str)>,
    unknown: Option<String>,
) {
    for (caution, hint) in cautions {
        messages.warning(WarningKind::Interleaved, &caution, hint);
    }
    if let Some(caution) = unknown {
        messages.note_to_people(&format!(
            "{caution}: the probes have no int of one name as an argument; -key EXPR of `latency` and `record` says \
             which stop belongs to which start"
        ));
    }
}
