//! [`Failed`]: what failed of a command that goes on nevertheless.

use crate::failure::Failure;
use crate::messages::Messages;

/// Says what has failed beside a program that was started, but for a reader that has gone; returns whether nothing else has.
pub(crate) fn report_failures(
    results: impl IntoIterator<Item = Result<(), Failure>>,
    messages: &Messages,
) -> bool {
    let mut is_complete = true;
    for failure in results.into_iter().filter_map(Result::err) {
        if !failure.is_closed_pipe() {
            messages.failure(&failure);
            is_complete = false;
        }
    }
    is_complete
}

/// What failed of a command that goes on nevertheless, to print what it knows.
#[derive(Debug, Default)]
pub(crate) struct Failed(Vec<Failure>);

impl Failed {
    /// Adds the failure of a step, if it has failed.
    pub(crate) fn add(&mut self, step: Result<(), Failure>) {
        self.0.extend(step.err());
    }

    /// Says all failures but the last, and returns that, which is the failure of the command. A reader of
    /// standard output that has gone is no failure if there is another.
    pub(crate) fn finish(mut self, messages: &Messages) -> Result<(), Failure> {
        if self.0.iter().any(|failure| !failure.is_closed_pipe()) {
            self.0.retain(|failure| !failure.is_closed_pipe());
        }
        // Standard output fails each time that it is written to.
        let mut said: Vec<String> = Vec::new();
        self.0.retain(|failure| {
            let text = failure.to_string();
            let is_new = !said.contains(&text);
            said.push(text);
            is_new
        });
        let last = self.0.pop();
        self.0.iter().for_each(|failure| messages.failure(failure));
        last.map_or(Ok(()), Err)
    }
}
