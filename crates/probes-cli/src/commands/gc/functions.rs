//! The collector of programs that have no runtime events: the calls of its functions, timed by trampolines.

use std::ffi::OsString;
use std::path::Path;
use std::process::{Command, ExitCode};
use std::time::Duration;

use probes_lib::{
    CollectorWork, Error, ErrorKind, FunctionError, FunctionLatency, FunctionSelector, Functions,
    Launch, Observation, ObservationReport, Observer, Stacks, Target,
};

use super::{Args, show_progress};
use crate::commands::observations::Observations;
use crate::commands::readings::{Display, ReadingHandler, ShownReadings};
use crate::commands::started_program::StartedProgram;
use crate::commands::step_failures::report_failures;
use crate::commands::uncounted::{warn_of_uncounted, warn_of_uncounted_from_start};
use crate::destination::Output;
use crate::failure::Failure;
use crate::hint;
use crate::interruptible_output::{InterruptibleOutput, Next};
use crate::messages::Messages;
use crate::output::{GcReport, WarningKind};
use crate::search_path::path_of;
use crate::text::number_that_were;
use crate::usage::UsageError;

/// The work that is timed; each is a phase of the report.
const WORK: [CollectorWork; 4] = [
    CollectorWork::Minor,
    CollectorWork::Slice,
    CollectorWork::Major,
    CollectorWork::Compact,
];

/// Times the functions of the collector of a process that has no events, as `why` says.
pub(super) fn of_process(
    args: &Args,
    target: &Target,
    why: Error,
    output: &Output,
) -> Result<(), Failure> {
    refuse_over(args, &why)?;
    let functions = Functions::of_process(target.pid());
    let functions = functions.map_err(Failure::of_process(target.pid()))?;
    let Some(mut timed) = CollectorFunctions::find(&functions) else {
        return Err(Failure::of_process(target.pid())(why));
    };
    let why = why.without_effect();
    output.messages.note(&format!(
        "{why}: the collector's functions are timed instead"
    ));
    let (options, duration) = (args.take_over.options(), args.until.duration);
    let active = loop {
        let observation = timed.observation();
        let observe = || target.observe(&observation, options);
        match Observations::of_process(target, duration, output, observe) {
            Err(Failure::Target(_, error)) if timed.leave_out(&error) => {
                warn_of_untimed_functions(error, &output.messages);
            }
            begun => break begun?,
        }
    };
    for (messages, observer) in active.each() {
        warn_of_uncounted(&messages, observer, "timed");
    }
    timed.report(args, target, active, output)
}

/// Starts a program that writes no events, as `why` says, and times the functions of its collector from its first
/// instruction on. Returns the program's status.
pub(super) fn of_program(
    args: &Args,
    path: &Path,
    arguments: &[OsString],
    why: &Error,
) -> Result<ExitCode, Failure> {
    refuse_over(args, why)?;
    let output = args.output.open_beside_program()?;
    let functions = Functions::of_file(path_of(path)).map_err(Failure::of_program(path))?;
    let Some(mut timed) = CollectorFunctions::find(&functions) else {
        return Err(Failure::NoRuntimeEvents {
            program: path.to_owned(),
            hint: hint::KEEP_SYMBOLS.to_owned(),
        });
    };
    output.messages.note(&format!(
        "{why}: the collector's functions are timed instead"
    ));
    let mut launched = loop {
        let mut command = Command::new(path);
        command.args(arguments);
        match Launch::new(command).observe(timed.observation()).spawn() {
            Err(error) if timed.leave_out(&error) => {
                warn_of_untimed_functions(error, &output.messages)
            }
            launched => break launched.map_err(Failure::of_program(path))?,
        }
    };
    let output = output.with_pid(launched.report().pid);
    let observer = launched.take_observer();
    let started = StartedProgram::of(launched.into_child());
    let done = observer.map_or(Ok(()), |observer| {
        warn_of_uncounted_from_start(&output.messages, &observer, "timed");
        let target = observer.target().clone();
        let active = Observations::of_program(&target, observer, args.until.duration, &output)?;
        timed.report(args, &target, active, &output)
    });
    started.wait(report_failures([done], &output.messages))
}

fn refuse_over(args: &Args, why: &Error) -> Result<(), Failure> {
    if args.over.is_none() {
        return Ok(());
    }
    let why = format!(
        "-over needs runtime events: {why}; `latency -gc minor,slice,major -over` shows long calls of the collector's functions"
    );
    Err(Failure::Usage(UsageError::new(Some("gc"), why)))
}

/// Warns of functions that are left out, as they cannot be timed.
fn warn_of_untimed_functions(why: Error, messages: &Messages) {
    let why = why.without_effect();
    messages.warning(
        WarningKind::Uncounted,
        &format!("not all of the collector is timed: {why}"),
        "the figures are those of the other functions",
    );
}

/// The names of the functions that are timed, each with its work.
struct CollectorFunctions(Vec<(String, CollectorWork)>);

impl CollectorFunctions {
    /// Finds those that a program has; `None` if it has none.
    fn find(functions: &Functions) -> Option<CollectorFunctions> {
        let mut timed = Vec::new();
        for work in WORK {
            let selector = [FunctionSelector::Collector(work)];
            let found = functions.select(&selector).unwrap_or_default();
            let names = found.iter().filter_map(|it| it.name());
            timed.extend(names.map(|name| (name.text, work)));
        }
        (!timed.is_empty()).then_some(CollectorFunctions(timed))
    }

    fn observation(&self) -> Observation {
        self.0.iter().fold(
            // The time of each without that of the others that it calls.
            Observation::new().self_times(),
            |all, (_, work)| all.time_functions(FunctionSelector::Collector(*work)),
        )
    }

    /// Leaves out the functions that cannot be timed, as `error` says. Returns whether to try again: some were left
    /// out, and others are left.
    fn leave_out(&mut self, error: &Error) -> bool {
        let ErrorKind::Function(FunctionError::NonePossible { refused, .. }) = error.kind() else {
            return false;
        };
        let before = self.0.len();
        self.0
            .retain(|(name, _)| !refused.iter().any(|(other, _)| other == name));
        !self.0.is_empty() && self.0.len() < before
    }

    /// Warns of pauses that had begun before they were timed, or have not ended, if there is more than one for each
    /// hundred that were seen whole. A pause that lasts all the time is seen only on the stack of its thread.
    fn warn_of_unseen(&self, pid: i32, latencies: &[FunctionLatency], messages: &Messages) {
        let total = |of: fn(&FunctionLatency) -> u64| {
            let each = latencies.iter().map(of);
            each.fold(0, u64::saturating_add)
        };
        let partly = total(|it| it.running().saturating_add(it.unmatched_exits()));
        let whole = total(|it| it.count());
        let what = if partly > whole / 100 {
            let were = number_that_were(partly, "pause");
            format!("{were} not seen from beginning to end: the figures are those of the others")
        } else if partly.max(whole) == 0 && self.are_on_a_stack(pid) {
            "the process is in a pause that began before the observation and has not ended: it is left out"
                .to_owned()
        } else {
            return;
        };
        let hint = "look for longer, so that whole pauses are seen";
        messages.warning(WarningKind::PauseLeftOut, &what, hint);
    }

    /// Returns whether one of them is on the stack of a thread, of those that can be read.
    fn are_on_a_stack(&self, pid: i32) -> bool {
        let report = Stacks::of_process(pid).and_then(|mut stacks| stacks.read(false));
        let threads = report.map_or_else(|_| Vec::new(), |report| report.threads);
        let mut frames = threads.iter().flat_map(|thread| &thread.frames);
        frames.any(|frame| {
            let function = frame.function.as_deref();
            self.0.iter().any(|(name, _)| function == Some(name))
        })
    }

    /// Prints what their calls add up to, when the observation is over, and at the intervals of `args`.
    fn report(
        &self,
        args: &Args,
        target: &Target,
        active: Observations<'_>,
        output: &Output,
    ) -> Result<(), Failure> {
        let mut printer = CallsPrinter {
            functions: self,
            target,
            output,
        };
        let display = Display {
            interval: args.interval,
            table: None,
        };
        let progress = show_progress(args, &output.messages);
        let mut outcome = active.run(display, &mut printer);
        drop(progress);
        if let Some((_, latencies)) = outcome.last.pop() {
            let report = printer.report(&latencies, outcome.read_until);
            outcome.print(output, report.text(output.format));
            if outcome.output_was_read {
                self.warn_of_unseen(target.pid(), &latencies, &output.messages);
                warn_of_lost_calls(&latencies, &output.messages);
            }
        }
        outcome.finish(&output.messages)
    }
}

/// Reads and shows the calls of the collector's functions.
struct CallsPrinter<'c> {
    functions: &'c CollectorFunctions,
    target: &'c Target,
    output: &'c Output,
}

impl<'c> CallsPrinter<'c> {
    fn report(&self, latencies: &[FunctionLatency], elapsed: Duration) -> GcReport<'c> {
        let phases = latencies.iter().filter_map(|function| {
            let mut functions = self.functions.0.iter();
            let (_, work) = functions.find(|(name, _)| name == function.name())?;
            Some((work.word(), function))
        });
        let phases: Vec<_> = phases.collect();
        GcReport::of_functions(self.target.pid(), self.target.program(), elapsed, &phases)
    }
}

impl ReadingHandler for CallsPrinter<'_> {
    type Reading = Vec<FunctionLatency>;

    fn read(
        &mut self,
        _: i32,
        observer: &mut Observer,
        _: Duration,
    ) -> probes_lib::Result<Option<Vec<FunctionLatency>>> {
        observer.function_latencies().map(Some)
    }

    fn last(&mut self, _: i32, report: ObservationReport, _: Duration) -> Vec<FunctionLatency> {
        report.function_latencies
    }

    fn show(
        &mut self,
        shown: ShownReadings<'_, Vec<FunctionLatency>>,
        interruptible: &mut InterruptibleOutput,
    ) -> Result<Next, Failure> {
        let each = shown.each.iter();
        let texts = each.map(|(_, latencies)| {
            let report = self.report(latencies, shown.at).so_far();
            report.text(self.output.format)
        });
        interruptible.write(&texts.collect::<Result<String, Failure>>()?)
    }
}

/// Warns of calls whose times were not recorded, if there are any.
fn warn_of_lost_calls(latencies: &[FunctionLatency], messages: &Messages) {
    let each = latencies.iter().map(FunctionLatency::lost);
    let lost = each.fold(0, u64::saturating_add);
    if lost > 0 {
        messages.warning(
            WarningKind::LostCalls,
            &format!(
                "{} not recorded: the figures are those of the others",
                number_that_were(lost, "call")
            ),
            "`latency -gc minor,slice,major` says of which functions",
        );
    }
}
