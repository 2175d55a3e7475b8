//! The collector of programs that have no runtime events: the calls of its functions, timed by trampolines.

use std::time::Duration;

use probes_lib::{
    CollectorWork, Error, ErrorKind, FunctionError, FunctionLatency, FunctionSelector, Functions,
    Observation, Target,
};

use super::Args;
use crate::commands::observe_loop::{ActiveObservation, Display};
use crate::commands::uncounted::warn_of_uncounted;
use crate::destination::Output;
use crate::failure::Failure;
use crate::output::{GcReport, WarningKind};
use crate::usage::UsageError;

/// What is timed: a phase each.
const WORK: [CollectorWork; 4] = [
    CollectorWork::Minor,
    CollectorWork::Slice,
    CollectorWork::Major,
    CollectorWork::Compact,
];

/// Times the functions of the collector of a process that has no events, as `why` says.
pub(super) fn run(
    args: &Args,
    target: &Target,
    why: Error,
    output: &Output,
) -> Result<(), Failure> {
    if args.over.is_some() {
        let why = "-over needs runtime events, which only OCaml 5 has; `latency -gc minor,slice,major -over` shows long calls of the collector's functions";
        return Err(Failure::Usage(UsageError::new(Some("gc"), why)));
    }
    let pid = target.pid();
    let messages = &output.messages;
    let functions = Functions::of_process(pid).map_err(Failure::of_process(pid))?;
    let mut timed = Vec::new();
    for work in WORK {
        // A program need not have all of them.
        let selector = [FunctionSelector::Collector(work)];
        let found = functions.select(&selector).unwrap_or_default();
        let names = found.iter().filter_map(|it| it.name());
        timed.extend(names.map(|name| (name.text, work)));
    }
    if timed.is_empty() {
        return Err(Failure::of_process(pid)(why));
    }
    messages.note(&format!("{why}: its functions are timed"));
    let display = Display {
        interval: args.interval,
        table: None,
    };
    let active = loop {
        let observation = timed.iter().fold(
            // The time of each without that of the others in it.
            Observation::new().self_times(),
            |all, (_, work)| all.time_functions(FunctionSelector::Collector(*work)),
        );
        let (options, duration) = (args.take_over.options(), args.until.duration);
        let begun = ActiveObservation::begin(target, &observation, options, duration, output);
        match begun {
            Err(Failure::Target(_, error)) if leave_out(&mut timed, &error) => {
                messages.warning(
                    WarningKind::Uncounted,
                    &format!("not all of the collector is timed: {error}"),
                    "the figures are those of the other functions",
                );
            }
            begun => break begun?,
        }
    };
    warn_of_uncounted(messages, active.observer(), "timed");
    let report = |latencies: &[FunctionLatency], seconds: Duration| {
        let phases = latencies.iter().filter_map(|function| {
            let found = timed.iter().find(|(name, _)| name == function.name())?;
            Some((found.1.word(), function))
        });
        let phases: Vec<_> = phases.collect();
        GcReport::of_functions(pid, target.program(), seconds, &phases)
    };
    let mut shown_last = None;
    let mut outcome = active.run(
        display,
        |observer| observer.function_latencies(),
        |shown, interruptible| {
            let text = report(&shown.reading, shown.at)
                .so_far()
                .text(output.format)?;
            shown_last = Some((shown.reading, shown.at));
            interruptible.write(&text)
        },
    );
    let lasted = outcome.lasted;
    let latencies = match outcome.observed.take() {
        Some(report) => Some((report.function_latencies, lasted)),
        None => outcome.last.take().or(shown_last),
    };
    if let Some((latencies, seconds)) = latencies {
        outcome.print(output, report(&latencies, seconds).text(output.format));
        let lost: u64 = latencies.iter().map(FunctionLatency::lost).sum();
        if lost > 0 && outcome.was_read {
            messages.warning(
                WarningKind::LostCalls,
                &format!("{lost} calls were not recorded: the figures are those of the others"),
                "`latency -gc minor,slice,major` says of which functions",
            );
        }
    }
    outcome.finish(messages)
}

/// Leaves out the functions that cannot be timed, as `error` says; returns whether others are left, and these are fewer.
fn leave_out(timed: &mut Vec<(String, CollectorWork)>, error: &Error) -> bool {
    let ErrorKind::Function(FunctionError::NonePossible { refused }) = error.kind() else {
        return false;
    };
    let before = timed.len();
    timed.retain(|(name, _)| !refused.iter().any(|(other, _)| other == name));
    !timed.is_empty() && timed.len() < before
}
