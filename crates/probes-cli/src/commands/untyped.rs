//! The warning that there is no result, because hits are untyped.

use crate::messages::Messages;
use crate::output::WarningKind;

/// Warns that so many hits are untyped, if there are no others; `None` if there are.
pub(super) fn warn_of_untyped(messages: &Messages, only_untyped: Option<u64>) {
    let Some(many) = only_untyped else {
        return;
    };
    let hits = if many == 1 {
        "1 hit is".to_owned()
    } else {
        format!("{many} hits are")
    };
    messages.warning(
        WarningKind::Untyped,
        &format!("no result, and {hits} untyped: an argument does not have the type that an expression needs"),
        "an argument alone is taken for an int, and str(arg0) for a string; strings and fields cannot be read at a null \
         pointer, in memory that was mapped just now, and in forked processes; `ocaml-probes watch` shows the arguments of \
         hits, docs/ask.md says what can be asked of which type",
    );
}
