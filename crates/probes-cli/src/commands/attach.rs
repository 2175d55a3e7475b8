//! `attach`: changes the probes of running processes. All processes are checked before the first is changed.

use std::time::{Duration, Instant};

use probes_lib::{Actions, Effect, Error, Follow, Hold, Options, Target};

use super::changes::{self, print_changes, print_undone};
use super::follow;
use super::holds;
use super::open_target::describe;
use super::process_failures::ProcessFailures;
use super::step_failures::StepFailures;
use super::undo::{fail_unless_all_undone, retry_each, undone_changes};
use crate::destination::Output;
use crate::failure::Failure;
use crate::flags::{
    ChangeFlags, Checked, OutputFlags, RequestedChange, TargetSelection, duration, with_regexp_help,
};
use crate::interruptible_output::{InterruptibleOutput, Next};
use crate::messages::Messages;
use crate::output::Update;
use crate::signals::{TerminationSignals, WaitEnd};

const HELP: &str = "\
Prints what was changed; in plain format as a line for each probe, in the order of the changes:
    NAME BEFORE -> AFTER, N sites
with its counter before and after, and how many of its sites were changed. -force repairs probes
that `info` calls inconsistent. Of several processes, all are checked before the first is changed,
and each line begins with the PID. With -quiet this is printed only if -format, -json or -o asks for
it.

With -live one byte of code is changed at a time while the process runs, which also works where it
cannot be stopped: under a debugger, or busy in the kernel.

With -for, the command waits that long, or until Ctrl-C, SIGTERM, SIGHUP or SIGQUIT (unless they
were ignored from the start, as by nohup), and then subtracts from each counter what it has added;
what others have changed meanwhile stays. It prints what was undone. If the command is killed before
that, `info` shows what it still holds, and `attach -release-dead`, run by the same user or root,
undoes and prints it; what running commands hold stays.

With -follow, the command goes on tracing the processes, what they start, and the programs that
these execute, until all have exited or one of these signals arrives; its changes are not undone.
Names that another program or a library does not have are skipped there; processes without probes (a
shell) are detached, and what they start is not followed. A name that an attached process itself
does not have gives a warning. -v reports what happens.

Give one kind of action; only -enable and -disable can be combined. Enabling adds one to a probe's
counter and disabling subtracts one; its sites change when the counter leaves or reaches 0.
Disabling a named probe that is disabled is an error and changes nothing; the other kinds skip such
probes and report it.";

#[derive(Debug, clap::Args)]
#[command(override_usage = "ocaml-probes attach -pid N ACTIONS [FLAGS]")]
#[command(after_help = with_regexp_help(HELP))]
#[command(next_help_heading = "Flags")]
pub(crate) struct Args {
    #[command(flatten)]
    selection: Checked<TargetSelection>,
    #[command(flatten)]
    change: Checked<ChangeFlags>,
    /// Set counters to 1 or 0 and the sites to match, whatever they were
    #[arg(long)]
    force: bool,
    /// Change the process while it runs: no thread is stopped
    #[arg(long)]
    live: bool,
    /// Follow fork, exec and dlopen
    #[arg(long, conflicts_with_all = ["live", "duration"])]
    follow: bool,
    /// Undo everything after 30s, 5m, 1h30m, or when interrupted
    #[arg(long = "for", value_name = "DURATION", value_parser = duration)]
    duration: Option<Duration>,
    /// Allow text on 1 GiB huge pages: a first write copies a gigabyte
    #[arg(long)]
    gigatext: bool,
    #[command(flatten)]
    pub(super) output: Checked<OutputFlags>,
}

impl Args {
    /// What to do with which probes; `None` with -release-dead.
    pub(crate) fn actions(&self) -> Option<Actions> {
        match &*self.change {
            RequestedChange::Actions(actions) => Some(actions.clone().force(self.force)),
            RequestedChange::ReleaseDead => None,
        }
    }

    fn options(&self) -> Options {
        Options {
            live: self.live,
            gigatext: self.gigatext,
            ..Options::default()
        }
    }

    /// Why a process could not be opened or changed.
    fn failure(&self, pid: i32, error: Error) -> Failure {
        if self.follow {
            // -follow needs ptrace.
            Failure::of_process(pid)(error)
        } else {
            Failure::of_attached(pid)(error)
        }
    }
}

pub(super) fn run(args: &Args) -> Result<(), Failure> {
    let output = &args.output.open()?;
    let messages = output.messages;
    let (actions, options) = (args.actions(), args.options());
    let pids = args.selection.pids(true, &messages)?;
    let mut failures = ProcessFailures::new(&args.selection, pids.len(), messages);
    let targets = open(args, &pids, &mut failures)?;
    if targets.is_empty() {
        // All processes that were selected by name have exited.
        return output.begin();
    }
    for target in &targets {
        describe(&failures.messages(target.pid()), target);
    }
    let Some(actions) = actions else {
        return holds::release_dead(&targets, options, output, failures);
    };
    if args.follow {
        return follow::attach_and_follow(targets, actions, options, output);
    }
    let mut steps = match args.duration {
        None => change(args, output, &targets, &actions, &mut failures),
        Some(duration) => change_for(duration, args, output, &targets, &actions, &mut failures)?,
    };
    steps.add(failures.finish("the others were changed"));
    steps.finish(&messages)?;
    // If all processes have exited, nothing was printed, and the file of -o still has to be emptied.
    output.begin()
}

/// Changes every process; returns the failures to print the changes.
fn change(
    args: &Args,
    output: &Output,
    targets: &[Target],
    actions: &Actions,
    failures: &mut ProcessFailures,
) -> StepFailures {
    let mut unprinted = StepFailures::default();
    for target in targets {
        let report = target.update_with(actions, args.options());
        let pid = target.pid();
        let report = report.map_err(Failure::of_attached(pid));
        if let Some(report) = failures.record_unless_exited(pid, report) {
            let messages = failures.messages(pid);
            let shows_pid = failures.shows_pid();
            unprinted.add(print_changes(
                output,
                messages,
                &report,
                shows_pid,
                actions.is_forced(),
            ));
        }
    }
    unprinted
}

/// Changes every process, and undoes that when the time is over or a signal comes.
fn change_for(
    duration: Duration,
    args: &Args,
    output: &Output,
    targets: &[Target],
    actions: &Actions,
    failures: &mut ProcessFailures,
) -> Result<StepFailures, Failure> {
    let messages = match targets {
        [target] => output.messages.with_pid(target.pid()),
        _ => output.messages,
    };
    // Signals are blocked before anything is changed, so that none can prevent the undoing.
    let signals = TerminationSignals::block()?;
    let mut interruptible = InterruptibleOutput::new(output, signals)?;
    let changed = hold_each(args, targets, actions, failures);
    let mut text = String::new();
    let mut unprinted = Ok(());
    for (_, hold) in &changed {
        match changes::text_of(output, Update::Changed, hold.report(), failures.shows_pid()) {
            Ok(one) => text += &one,
            Err(failure) => unprinted = Err(failure),
        }
    }
    let is_changed = |(_, hold): &(&Target, Hold)| hold.has_changes();
    let sum_up_each = |failures: &ProcessFailures| {
        for (target, hold) in &changed {
            changes::sum_up(output, &failures.messages(target.pid()), hold.report());
        }
    };
    let mut steps = StepFailures::default();
    if !changed.iter().any(is_changed) {
        interruptible.end().1?;
        if !failures.are_of_all() {
            messages.note("nothing was changed: -for has nothing to undo, and does not wait");
        }
        // Printing nothing empties the file of -o as well.
        if !changed.is_empty() {
            steps.add(unprinted.and_then(|()| output.print(&text)));
        }
        sum_up_each(failures);
        return Ok(steps);
    }
    // Even if nobody reads the output, the changes are undone when the time is over or a signal arrives.
    let deadline = Instant::now().checked_add(duration);
    interruptible.set_deadline(deadline);
    let printed = match interruptible.write(&text) {
        Ok(next) => {
            sum_up_each(failures);
            Ok(next)
        }
        Err(failure) => Err(failure.after_undoing()),
    };
    let held: Vec<&(&Target, Hold)> = changed.iter().filter(|it| is_changed(it)).collect();
    let waited = match printed {
        Ok(Next::Stop) => Ok(()),
        Ok(Next::Continue) | Err(_) => wait(&interruptible, &held, duration, deadline, &messages),
    };
    steps.add(waited);
    steps.add(unprinted.and(printed.map(drop)));
    // The changes are undone, whatever has failed so far.
    undo(args, output, &held, interruptible, failures, &mut steps);
    Ok(steps)
}

/// Changes every process; returns the holds, which undo the changes.
fn hold_each<'t>(
    args: &Args,
    targets: &'t [Target],
    actions: &Actions,
    failures: &mut ProcessFailures,
) -> Vec<(&'t Target, Hold)> {
    let mut held = Vec::with_capacity(targets.len());
    for target in targets {
        let hold = target.hold(actions, args.options());
        let pid = target.pid();
        let hold = hold.map_err(Failure::of_attached(pid));
        if let Some(hold) = failures.record_unless_exited(pid, hold) {
            let messages = failures.messages(pid);
            holds::warn_of_unrecorded(&messages, &hold);
            holds::warn_of_dead(&messages, pid, &target.holders());
            changes::say_about_changes(&messages, hold.report(), actions.is_forced());
            held.push((target, hold));
        }
    }
    held
}

/// Opens all processes, and, if there are several, checks what is to be done to each.
fn open(args: &Args, pids: &[i32], failures: &mut ProcessFailures) -> Result<Vec<Target>, Failure> {
    let mut targets = Vec::with_capacity(pids.len());
    for &pid in pids {
        let opened = if args.follow {
            Target::open_any(pid)
        } else {
            Target::open(pid)
        };
        let opened = opened.map_err(|error| error.with_effect_if_none(Effect::NothingChanged));
        let opened = opened.map_err(|error| args.failure(pid, error));
        targets.extend(failures.record_unless_exited(pid, opened));
    }
    if let Some(actions) = args.actions().filter(|_| pids.len() > 1) {
        for target in &targets {
            let options = args.options();
            let checked = if args.follow {
                Follow::check(target, &actions, options)
            } else {
                target.check(&actions, options)
            };
            match checked {
                // A program that is executed later may have a probe of that name.
                Err(error) if args.follow && error.is_missing_name() => {}
                checked => {
                    let pid = target.pid();
                    let checked = checked.map_err(|error| args.failure(pid, error));
                    failures.record(pid, checked);
                }
            }
        }
    }
    failures.finish_all("no process was changed")?;
    Ok(targets)
}

fn wait(
    interruptible: &InterruptibleOutput,
    held: &[&(&Target, Hold)],
    duration: Duration,
    deadline: Option<Instant>,
    messages: &Messages,
) -> Result<(), Failure> {
    messages.note(&format!(
        "the changes will be undone in {}, or on Ctrl-C",
        humantime::format_duration(duration)
    ));
    let left = deadline.map_or(duration, |it| it.saturating_duration_since(Instant::now()));
    let signals = interruptible.signals();
    match signals.wait(held.iter().map(|(target, _)| *target), left)? {
        WaitEnd::Timeout => {}
        WaitEnd::Interrupted => messages.step(format_args!("interrupted")),
        WaitEnd::Exited => messages.step(format_args!("all processes have exited")),
    }
    Ok(())
}

/// Undoes the changes in every process, then prints what was undone.
fn undo(
    args: &Args,
    output: &Output,
    held: &[&(&Target, Hold)],
    interruptible: InterruptibleOutput,
    failures: &mut ProcessFailures,
    steps: &mut StepFailures,
) {
    let options = args.options();
    let mut holds: Vec<&Hold> = held.iter().map(|(_, hold)| hold).collect();
    let results = retry_each(
        interruptible.signals(),
        &mut holds,
        |hold| failures.messages(hold.report().pid),
        |hold| hold.release(options),
    );
    let mut all_undone = Vec::with_capacity(holds.len());
    for (hold, result) in holds.into_iter().zip(results) {
        let pid = hold.report().pid;
        let messages = failures.messages(pid);
        match undone_changes(hold, result, options, &messages) {
            Ok(undone) => all_undone.extend(undone.map(|undone| (hold, undone))),
            Err(failure) => failures.add(pid, failure),
        }
    }
    let (output_was_read, rest_printed) = interruptible.end();
    steps.add(rest_printed.map_err(Failure::after_undoing));
    for (hold, undone) in &all_undone {
        let messages = failures.messages(undone.pid);
        let shows_pid = failures.shows_pid();
        let printed = print_undone(output, messages, undone, shows_pid, output_was_read);
        steps.add(printed);
        if let Err(failure) = fail_unless_all_undone(hold, options, undone) {
            failures.add(undone.pid, failure);
        }
    }
}
