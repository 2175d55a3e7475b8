//! `attach`: changes the probes of running processes: first all are checked, then each is changed.

use std::time::Duration;

use probes_lib::{Effect, Options, ProbeChange, Report, Target};

use super::failures::Failures;
use super::follow;
use super::put_back::{Endings, Over, put_back, refuse_leftovers};
use super::whom::{has_ended_since, pids};
use super::{Failure, answer_change, few, say_passed_over, say_what};
use crate::messages::Messages;
use crate::output::Format;
use crate::request::Attach;

pub(super) fn run(request: &Attach) -> Result<(), Failure> {
    let messages = request.answer.messages;
    let options = Options {
        live: request.live,
        gigatext: request.gigatext,
        ..Options::default()
    };
    let pids = pids(&request.whom, &messages)?;
    let mut failures = Failures::of(&request.whom, pids.len(), messages);
    let targets = open(request, &pids, options, &mut failures)?;
    for target in &targets {
        say_what(&failures.messages(target.pid()), target);
    }
    if request.follow {
        return follow::attached(request, targets, options);
    }
    // From here on, so that what is changed is put back whenever they come.
    let endings = match request.duration {
        Some(duration) => Some((Endings::hold_back()?, duration)),
        None => None,
    };
    let mut answered = Ok(());
    let mut changed = Vec::with_capacity(targets.len());
    for target in &targets {
        let report = target.update_with(&request.actions, options);
        if let Some(report) = failures.but(target.pid(), report) {
            let messages = failures.messages(report.pid);
            let said = answer(request.answer.format, messages, &report, failures.several());
            answered = answered.and(said);
            changed.push((target, report));
        }
    }
    if let Some((endings, duration)) = endings {
        changed.retain(|(_, report)| report.changed.iter().any(is_change));
        if changed.is_empty() {
            messages.note("nothing was changed, and there is nothing to put back");
        } else {
            let over = wait(&endings, &changed, duration, &messages);
            // Whatever has gone wrong so far, it is put back.
            let mut backs = Vec::with_capacity(changed.len());
            for (target, report) in &changed {
                let messages = failures.messages(report.pid);
                match put_back(target, report, options, &endings, &messages) {
                    Ok(back) => backs.extend(back.map(|back| (report, back))),
                    Err(failure) => failures.add(report.pid, failure),
                }
            }
            answered = answered.map_err(Failure::after_putting_back);
            for (report, back) in &backs {
                answered = answered.and(answer_back(request, back, &failures));
                if let Err(failure) = refuse_leftovers(report, back) {
                    failures.add(report.pid, failure);
                }
            }
            over?;
        }
    }
    failures.end("the others were changed")?;
    answered
}

/// Opens all processes, and, if there are several, checks what is to be done to each.
fn open(
    request: &Attach,
    pids: &[i32],
    options: Options,
    failures: &mut Failures,
) -> Result<Vec<Target>, Failure> {
    let mut targets = Vec::with_capacity(pids.len());
    for &pid in pids {
        let opened = if request.follow {
            Target::open_any(pid)
        } else {
            Target::open(pid)
        };
        let opened = opened.map_err(|error| error.leaving(Effect::NothingChanged));
        match opened {
            Err(error) if has_ended_since(&request.whom, pid, &error) => {}
            opened => targets.extend(failures.but(pid, opened)),
        }
    }
    if pids.len() > 1 {
        for target in &targets {
            match target.check(&request.actions, options) {
                // It may come.
                Err(error) if request.follow && follow::is_not_yet(&error) => {}
                checked => drop(failures.but(target.pid(), checked)),
            }
        }
    }
    failures.end_with("nothing was changed in any")?;
    Ok(targets)
}

fn wait(
    endings: &Endings,
    changed: &[(&Target, Report)],
    duration: Duration,
    messages: &Messages,
) -> Result<(), Failure> {
    messages.note(&format!(
        "to be put back in {}, or on Ctrl-C",
        humantime::format_duration(duration)
    ));
    match endings.wait(changed.iter().map(|(target, _)| *target), duration)? {
        Over::Time => {}
        Over::Told => messages.step(format_args!("told to end")),
        Over::Exited => messages.step(format_args!("no process is left")),
    }
    Ok(())
}

/// Whether anything has changed.
fn is_change(change: &ProbeChange) -> bool {
    change.before != change.after || change.sites > 0
}

/// Says what was done.
pub(super) fn answer(
    format: Format,
    messages: Messages,
    report: &Report,
    several: bool,
) -> Result<(), Failure> {
    say_passed_over(&messages, report);
    say(&messages, report);
    answer_change(format, report, several, || {
        "the probes were changed".to_owned()
    })
}

/// Says what was put back.
fn answer_back(request: &Attach, back: &Report, failures: &Failures) -> Result<(), Failure> {
    let (messages, several) = (failures.messages(back.pid), failures.several());
    if let Some(names) = few(&back.skipped) {
        messages.note(&format!("nothing is left to put back of {names}"));
    }
    say(&messages, back);
    answer_change(request.answer.format, back, several, String::new)
        .map_err(Failure::after_putting_back)
}

/// Says what is to be known beside what has changed.
fn say(messages: &Messages, report: &Report) {
    say_still_on(messages, report);
    if report.stopped > Duration::ZERO {
        messages.note(&format!("stopped {} us", report.stopped.as_micros()));
    }
}

/// Names the probes that were disabled and stay on, because others have enabled them as well.
fn say_still_on(messages: &Messages, report: &Report) {
    let still_on = |change: &&ProbeChange| change.after > 0 && change.after < change.before;
    let names = report.changed.iter().filter(still_on);
    let names: Vec<String> = names
        .map(|change| format!("{} ({})", change.name, change.after))
        .collect();
    if let Some(names) = few(&names) {
        messages.warning(
            &format!("still on, as others have enabled them too: {names}"),
            &format!(
                "`ocaml-probes attach -pid {} -force` with -disable or -disable-all turns them off for all",
                report.pid
            ),
        );
    }
}
