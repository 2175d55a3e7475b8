//! The processes that a command observes: one, or several that give one answer.

use probes_lib::{Observer, Target};

use super::observe_loop::ObservationLoop;
use super::open_target::open_to_observe;
use super::process_failures::ProcessFailures;
use super::readings::{Display, Outcome, ReadingHandler};
use super::several::{ObservationRequest, SeveralObservations};
use crate::destination::Output;
use crate::failure::Failure;
use crate::flags::{ForkedFlag, TargetSelection};
use crate::messages::Messages;

/// Processes that are opened, to be observed.
pub(super) struct OpenedProcesses {
    targets: Vec<Target>,
    /// `None` if the answer is about one process.
    failures: Option<ProcessFailures>,
    forked: ForkedFlag,
}

impl OpenedProcesses {
    /// Opens the selected processes. If there is one, and the answer does not have the form for several
    /// (`is_of_several`), a failure to open it is returned; otherwise it is recorded, and the others are observed.
    /// Also returns the output, whose messages are about the process if there is one.
    pub(super) fn open(
        selection: &TargetSelection,
        pids: &[i32],
        is_of_several: bool,
        needs_probes: bool,
        forked: ForkedFlag,
        output: Output,
    ) -> Result<(OpenedProcesses, Output), Failure> {
        if let (&[pid], false) = (pids, is_of_several) {
            let output = output.with_pid(pid);
            let opened = OpenedProcesses {
                targets: vec![open_to_observe(pid, needs_probes, &output.messages)?],
                failures: None,
                forked,
            };
            return Ok((opened, output));
        }
        let mut failures = ProcessFailures::new(selection, pids.len(), output.messages);
        if forked.follow {
            failures = failures.of_any_number();
        }
        let mut targets = Vec::new();
        for &pid in pids {
            let messages = failures.messages(pid);
            let opened = open_to_observe(pid, needs_probes, &messages);
            targets.extend(failures.record_unless_exited(pid, opened));
        }
        let opened = OpenedProcesses {
            targets,
            failures: Some(failures),
            forked,
        };
        Ok((opened, output))
    }

    pub(super) fn targets(&self) -> &[Target] {
        &self.targets
    }

    /// The process, if the answer is about one.
    pub(super) fn only(&self) -> Option<&Target> {
        self.targets.first().filter(|_| self.failures.is_none())
    }

    /// Begins to observe them.
    pub(super) fn begin(
        self,
        request: ObservationRequest,
        output: &Output,
    ) -> Result<ObservedProcesses<'_>, Failure> {
        Ok(match self.failures {
            None => {
                let (observation, options) = (&request.observation, request.options);
                let (target, duration) = (&self.targets[0], request.duration);
                let active =
                    ObservationLoop::begin(target, observation, options, duration, output)?;
                ObservedProcesses::One(Box::new(active))
            }
            Some(failures) => {
                let (targets, forked) = (self.targets, self.forked);
                let active =
                    SeveralObservations::begin(targets, request, forked, failures, output)?;
                ObservedProcesses::Several(Box::new(active))
            }
        })
    }
}

/// Processes that are observed.
pub(super) enum ObservedProcesses<'o> {
    One(Box<ObservationLoop<'o>>),
    Several(Box<SeveralObservations<'o>>),
}

impl ObservedProcesses<'_> {
    /// The observer, if the answer is about one process.
    pub(super) fn only(&self) -> Option<&Observer> {
        match self {
            ObservedProcesses::One(active) => Some(active.observer()),
            ObservedProcesses::Several(_) => None,
        }
    }

    /// The observers, each with the [`Messages`] for its process.
    pub(super) fn each(&self) -> Vec<(Messages, &Observer)> {
        match self {
            ObservedProcesses::One(active) => vec![(active.messages(), active.observer())],
            ObservedProcesses::Several(active) => active.each().collect(),
        }
    }

    /// Reads and shows them until the observation is over.
    pub(super) fn run<H: ReadingHandler>(
        self,
        display: Display,
        handler: &mut H,
    ) -> Outcome<H::Reading> {
        match self {
            ObservedProcesses::One(active) => active.run(display, handler),
            ObservedProcesses::Several(active) => active.run(display, handler),
        }
    }
}
