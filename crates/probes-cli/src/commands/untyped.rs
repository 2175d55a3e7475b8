//! The warning that there is no result, or no key, because hits are untyped.

use probes_lib::Counts;

use super::other_keys::warn_of_other_keys;
use crate::messages::Messages;
use crate::output::{ReportedFigures, WarningKind};
use crate::text::number_of;

const HINT: &str = "an argument alone is taken for an int, and str(arg0) for a string; strings and fields cannot be \
                    read at a null pointer, in memory that processes share or that was mapped just now, in the last \
                    bytes before memory that is not mapped, and in processes that were forked just now; `ocaml-probes \
                    watch` shows the arguments of hits, docs/ask.md says what can be asked of which type";

const HINT_OF_RESULTS: &str = "a function that is left by a call in tail position has no retval: ask for that of the \
                               function that it calls; retval alone is taken for an int, and str(retval) for a \
                               string; `ocaml-probes watch -results` shows the results, docs/ask.md says what can be \
                               asked of which type";

/// Warns that so many hits are untyped, if there are no others; `None` if there are. `of_results` is whether the
/// results of functions were asked for.
pub(super) fn warn_of_untyped(messages: &Messages, only_untyped: Option<u64>, of_results: bool) {
    if let Some(many) = only_untyped {
        let hits = number_of(many, "hit");
        let are = if many == 1 { "is" } else { "are" };
        let what = format!("no result, and {hits} {are} untyped");
        if of_results {
            let why = "the function has no result there, or one without the type that an expression needs";
            messages.warning(
                WarningKind::Untyped,
                &format!("{what}: {why}"),
                HINT_OF_RESULTS,
            );
        } else {
            warn(messages, &what);
        }
    }
}

/// How many hits there are, if all are untyped.
pub(super) fn only_untyped(counts: &Counts) -> Option<u64> {
    let untyped = counts.total_untyped().filter(|&many| many > 0);
    untyped.filter(|_| counts.total() == 0)
}

/// Warns of figures that have no result, or keys that found no room.
pub(super) fn warn_of_figures(
    messages: &Messages,
    report: &impl ReportedFigures,
    of_results: bool,
) {
    warn_of_untyped(messages, report.only_untyped(), of_results);
    warn_of_other_keys(messages, report.of_other_keys());
}

/// Warns that so many times have no key, if no others were measured; `None` if there are.
pub(super) fn warn_of_times_without_key(messages: &Messages, only_untyped: Option<u64>) {
    if let Some(many) = only_untyped {
        let times = number_of(many, "time");
        let are = if many == 1 { "is" } else { "are" };
        warn(messages, &format!("no key, and {times} {are} untyped"));
    }
}

/// Warns that ends of pairs are not recorded: `what` says how many.
pub(super) fn warn_of_slices_without_key(messages: &Messages, what: &str) {
    warn(messages, what);
}

fn warn(messages: &Messages, what: &str) {
    let why = "an argument does not have the type that an expression needs";
    messages.warning(WarningKind::Untyped, &format!("{what}: {why}"), HINT);
}
