//! Warnings of functions that were selected and cannot be counted, timed or watched, or whose results or exits cannot.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use probes_lib::{Counts, Observer, Refusal, RefusedFunction, UnreadableObject};

use super::open_target::warn_of_unreadable;
use crate::flags::CallArgumentsFlag;
use crate::messages::Messages;
use crate::output::WarningKind;
use crate::text::{join_first, number_of};

/// The most functions that a warning names; of more, it names none.
const FEW: usize = 3;

/// Warns of functions that `observer` does not observe although they were selected, and of files that may have some.
/// `counted` is the word for what is done with the others: counted, timed, watched, observed or recorded. Files that
/// were named when the process was opened are not named again.
pub(super) fn warn_of_uncounted(messages: &Messages, observer: &Observer, counted: &str) {
    warn_except(messages, observer, counted, &observer.target().unreadable());
}

/// The same for a program that was started: no file was named before.
pub(super) fn warn_of_uncounted_from_start(
    messages: &Messages,
    observer: &Observer,
    counted: &str,
) {
    warn_except(messages, observer, counted, &[]);
}

fn warn_except(
    messages: &Messages,
    observer: &Observer,
    counted: &str,
    named: &[UnreadableObject],
) {
    warn_of_failed_sections(messages, observer);
    // If the process has exited meanwhile, that is reported later.
    let Ok(counts) = observer.counts() else {
        return;
    };
    let pid = observer.target().pid();
    let is_named = |file: &UnreadableObject| {
        let why = file.why.to_string();
        named.iter().any(|other| other.why.to_string() == why)
    };
    let unreadable = counts.unreadable().iter();
    let unreadable: Vec<_> = unreadable.filter(|it| !is_named(it)).cloned().collect();
    warn_of_unreadable(messages, &unreadable, pid, "functions");
    let refused = counts.refused();
    for function in refused {
        messages.step(format_args!(
            "{} at {} in {} is not {counted}: it {}",
            function.name,
            function.address,
            function.object.display(),
            function.why
        ));
    }
    let is_copy = |it: &RefusedFunction| it.why == Refusal::MappedAgain;
    let (copies, refused): (Vec<_>, Vec<_>) = refused.iter().cloned().partition(is_copy);
    let names: Vec<&str> = copies.iter().map(|it| &*it.name).collect();
    if let Some(names) = join_first(FEW, &names) {
        messages.warning(
            WarningKind::Uncounted,
            &format!("calls of {names} in a second mapping of the file are not {counted}: figures are too low"),
            "the program has mapped its own code again, as V8 does; -v gives the addresses",
        );
    }
    let selected = counts.selected_functions().saturating_sub(copies.len());
    if let Some(warning) = warning(&refused, selected, counted) {
        let what = what(&refused);
        let too_low = of_part(&counts).map_or_else(String::new, |names| {
            format!(", so figures of {names} are too low")
        });
        let hint = format!(
            "all others are {counted}{too_low}; -v gives each {what} and its reason in words"
        );
        messages.warning(WarningKind::Uncounted, &warning, &hint);
    }
}

/// Warns that figures of `-gc stw` are not those of stop-the-world sections alone.
fn warn_of_failed_sections(messages: &Messages, observer: &Observer) {
    if !observer.has_failed_sections() {
        return;
    }
    messages.warning(
        WarningKind::FailedSections,
        "-gc stw observes all calls of caml_try_run_on_all_domains_with_spin_work, and most may be no stop-the-world sections: \
         while another domain leads one, the function returns 0 at once",
        "`gc` reports the sections by runtime events; `count -gc stw -where 'retval == 1'` counts them",
    );
}

/// Warns of functions whose results are not shown although they were asked for.
pub(super) fn warn_of_missing_results(messages: &Messages, observer: &Observer) {
    warn_of_missing(messages, observer, ("the results", "are not shown"));
}

/// Warns of functions whose calls are recorded without their ends.
pub(super) fn warn_of_missing_exits(messages: &Messages, observer: &Observer) {
    warn_of_missing(
        messages,
        observer,
        ("the ends of calls", "are not recorded"),
    );
}

fn warn_of_missing(messages: &Messages, observer: &Observer, (what, are_missing): (&str, &str)) {
    let without = observer.without_results();
    for function in without {
        messages.step(format_args!(
            "{what} of {} at {} in {} {are_missing}: it {}",
            function.name,
            function.address,
            function.object.display(),
            function.why
        ));
    }
    if !without.is_empty() {
        let functions = number_of(without.len(), "function");
        let why = why(without);
        let warning = format!("{what} of {functions} {are_missing}: {why}");
        let hint =
            "their calls are; docs/functions.md explains the reasons; -v names each function";
        messages.warning(WarningKind::Uncounted, &warning, hint);
    }
}

fn warning(refused: &[RefusedFunction], selected: usize, counted: &str) -> Option<String> {
    if refused.is_empty() {
        return None;
    }
    let all = number_of(selected, what(refused));
    Some(format!(
        "{} of {all} cannot be {counted}: {}",
        refused.len(),
        why(refused)
    ))
}

/// The USDT probes of which some sites are refused, and others are not; of many, none is named.
fn of_part(counts: &Counts) -> Option<String> {
    let sites = counts.refused().iter().filter(|it| it.is_usdt);
    let refused: BTreeSet<&str> = sites.map(|it| probe_of(&it.name)).collect();
    let left: BTreeSet<&str> = counts.usdt_sites().map(probe_of).collect();
    let names: Vec<&str> = refused.intersection(&left).copied().collect();
    match names[..] {
        [] => None,
        [name] => Some(name.to_owned()),
        _ if names.len() > FEW => Some(format!("each of {} probes", names.len())),
        _ => Some(names.join(", ")),
    }
}

/// The name of a site's probe, maybe followed by that of its function.
fn probe_of(site: &str) -> &str {
    site.split_once(" in ").map_or(site, |(probe, _)| probe)
}

/// The noun for what was selected: `function`, or `place` if USDT sites are among it.
fn what(refused: &[RefusedFunction]) -> &'static str {
    if refused.iter().any(|it| it.is_usdt) {
        "place"
    } else {
        "function"
    }
}

/// Up to [`FEW`] functions, each with its reason; of more, how many there are for each reason.
fn why(refused: &[RefusedFunction]) -> String {
    if refused.len() <= FEW {
        let named = refused.iter().map(|it| {
            let place = if it.is_usdt {
                let object = it.object.file_name().map_or(&*it.object, Path::new);
                format!(" at {} in {}", it.address, object.display())
            } else {
                String::new()
            };
            format!("{}{place} {}", it.name, it.why)
        });
        return named.collect::<Vec<_>>().join("; ");
    }
    let mut reasons: BTreeMap<&str, usize> = BTreeMap::new();
    for function in refused {
        *reasons.entry(function.why.name()).or_default() += 1;
    }
    let reasons = reasons
        .iter()
        .map(|(reason, count)| format!("{count} {reason}"));
    reasons.collect::<Vec<_>>().join(", ")
}

/// Says of how many functions no arguments are shown, because it is not known how many they have.
pub(super) fn note_unknown_arguments(
    messages: &Messages,
    observer: &Observer,
    arguments: CallArgumentsFlag,
) {
    let unknown = observer.functions_of_unknown_arguments();
    if unknown > 0 && !arguments.is_given() {
        let functions = number_of(unknown, "function");
        let note = format!(
            "how many arguments {functions} {} is not known, and none are shown: -args N shows N",
            if unknown == 1 { "has" } else { "have" }
        );
        messages.note(&note);
    }
}
