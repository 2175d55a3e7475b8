//! [`RefusedView`]: a function that was selected and cannot be observed.

use std::borrow::Cow;

use probes_lib::{LiveAddr, RefusedFunction};
use serde::Serialize;

use super::view::text;

/// A function that cannot be counted or timed.
#[derive(Debug, Serialize)]
pub(super) struct RefusedView<'r> {
    name: &'r str,
    object: Cow<'r, str>,
    #[serde(serialize_with = "text")]
    address: LiveAddr,
    /// The name of the reason, the same in all versions.
    reason: &'static str,
    /// The reason in words.
    text: String,
}

impl<'r> RefusedView<'r> {
    pub(super) fn of(function: &'r RefusedFunction) -> RefusedView<'r> {
        RefusedView {
            name: &function.name,
            object: function.object.to_string_lossy(),
            address: function.address,
            reason: function.why.name(),
            text: function.why.to_string(),
        }
    }
}
