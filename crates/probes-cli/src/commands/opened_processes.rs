//! The processes that a command observes: chosen by its flags, then opened.

use probes_lib::Target;

use super::observations::{ObservationRequest, Observations};
use super::open_target::open_to_observe;
use super::process_failures::ProcessFailures;
use crate::destination::Output;
use crate::failure::Failure;
use crate::flags::{ForkedFlag, TargetSelection};

/// Processes that are to be observed, before anything is done with them.
pub(super) struct ChosenProcesses<'s> {
    selection: &'s TargetSelection,
    pids: Vec<i32>,
    needs_probes: bool,
    forked: ForkedFlag,
    /// Whether the answer has the form for several processes, even if there is one.
    pub(super) is_of_several: bool,
}

impl ChosenProcesses<'_> {
    /// Those that the flags select. The form of the answer is that for several also if it is to be distinguished
    /// `by_pid`.
    pub(super) fn of<'s>(
        selection: &'s TargetSelection,
        needs_probes: bool,
        by_pid: bool,
        forked: ForkedFlag,
        output: &Output,
    ) -> Result<ChosenProcesses<'s>, Failure> {
        let pids = selection.pids(needs_probes, &output.messages)?;
        Ok(ChosenProcesses {
            is_of_several: by_pid || selection.is_of_several(&pids, forked),
            selection,
            pids,
            needs_probes,
            forked,
        })
    }

    /// Opens them. If there is one, and the answer does not have the form for several, a failure to open it is returned;
    /// otherwise it is recorded, and the others are observed. Also returns the output, whose messages are about the process
    /// if there is one.
    pub(super) fn open(self, output: Output) -> Result<(OpenedProcesses, Output), Failure> {
        let follows_forks = self.forked.follow;
        if let (&[pid], false) = (&self.pids[..], self.is_of_several) {
            let output = output.with_pid(pid);
            let opened = OpenedProcesses {
                targets: vec![open_to_observe(pid, self.needs_probes, &output.messages)?],
                failures: None,
                follows_forks,
            };
            return Ok((opened, output));
        }
        let mut failures = ProcessFailures::new(self.selection, self.pids.len(), output.messages);
        if follows_forks {
            failures = failures.of_any_number();
        }
        let mut targets = Vec::new();
        for pid in self.pids {
            let messages = failures.messages(pid);
            let opened = open_to_observe(pid, self.needs_probes, &messages);
            targets.extend(failures.record_unless_exited(pid, opened));
        }
        let opened = OpenedProcesses {
            targets,
            failures: Some(failures),
            follows_forks,
        };
        Ok((opened, output))
    }
}

/// Why callers are not distinguished if there may be several processes, or they are distinguished `by_pid`.
pub(super) fn why_not_by_caller(by_pid: bool) -> &'static str {
    if by_pid {
        "-by caller is for one process, because addresses differ between processes: give one -pid, without -follow, and -by without pid"
    } else {
        "-by caller is for one process, because addresses differ between processes: give one -pid, without -follow"
    }
}

/// Processes that are opened, to be observed.
pub(super) struct OpenedProcesses {
    targets: Vec<Target>,
    /// `None` if the answer is about one process.
    failures: Option<ProcessFailures>,
    follows_forks: bool,
}

impl OpenedProcesses {
    pub(super) fn targets(&self) -> &[Target] {
        &self.targets
    }

    /// The process, if the answer is about one.
    pub(super) fn only(&self) -> Option<&Target> {
        self.targets.first().filter(|_| self.failures.is_none())
    }

    /// Begins to observe them, until the time is over or a signal comes.
    pub(super) fn begin(
        self,
        request: ObservationRequest,
        output: &Output,
    ) -> Result<Observations<'_>, Failure> {
        if let Some(failures) = self.failures {
            let (targets, follows_forks) = (self.targets, self.follows_forks);
            return Observations::of_several(targets, request, follows_forks, failures, output);
        }
        let (target, observation) = (&self.targets[0], &request.observation);
        let observe = || target.observe(observation, request.options);
        let observed = Observations::of_process(target, request.duration, output, observe)?;
        Ok(observed.of_results(observation.asks_for_results()))
    }
}
