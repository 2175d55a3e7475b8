//! [`SeenExec`]: whether a program that was started to be observed has executed another one, which is not observed.

use std::time::Duration;

use crate::messages::Messages;
use crate::output::{WarningKind, with_unit};

/// When it was seen that the program had executed another, since the beginning; `None` if it was not seen.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct SeenExec(Option<Duration>);

impl SeenExec {
    /// Takes what a check of the observation of `pid` has found at this time. Warns of the first one that was seen.
    pub(super) fn note(
        &mut self,
        checked: &probes_lib::Result<()>,
        at: Duration,
        (pid, messages): (i32, &Messages),
    ) {
        let is_exec = checked.as_ref().is_err_and(probes_lib::Error::is_exec);
        if self.0.is_some() || !is_exec {
            return;
        }
        self.0 = Some(at);
        messages.warning(
            WarningKind::UnreadEnd,
            &format!(
                "the program has executed a new one, which is not observed: seen {} after the start",
                with_unit(at)
            ),
            &format!("start that program itself, or observe it while it runs: -pid {pid}"),
        );
    }

    /// How long the program was observed, of the time until the end.
    pub(super) fn lasted(self, until_end: Duration) -> Duration {
        self.0.unwrap_or(until_end)
    }
}
