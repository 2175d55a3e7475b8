//! [`StepFailures`]: what failed of a command that goes on nevertheless.

use crate::failure::Failure;
use crate::messages::Messages;

/// For a command that started a program: reports what failed while the program ran, and returns whether nothing did.
/// That the reader of standard output has exited is not reported, and does not count as a failure.
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

/// The failures of a command that goes on after each of them, to print what it knows.
#[derive(Debug, Default)]
pub(crate) struct StepFailures(Vec<Failure>);

impl StepFailures {
    /// Adds the failure of a step, if it has failed.
    pub(crate) fn add(&mut self, step: Result<(), Failure>) {
        self.0.extend(step.err());
    }

    /// Reports all failures but the last, and returns the last, which becomes the failure of the command. That the
    /// reader of standard output has exited is left out if anything else failed.
    pub(crate) fn finish(mut self, messages: &Messages) -> Result<(), Failure> {
        if self.0.iter().any(|failure| !failure.is_closed_pipe()) {
            self.0.retain(|failure| !failure.is_closed_pipe());
        }
        // The same failure is reported once: standard output, for example, fails at each write.
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
