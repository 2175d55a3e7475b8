//! Plain text, for programs: stable, one line for each thing.

use std::fmt::Write;

use super::holder::HolderView;
use super::location::{function_or_unknown, source_or_unknown};
use super::paths::ShownPaths;
use super::view::{
    ChangeView, Changes, Listing, ProbeView, ProcessList, SemaphoreView, SiteView, state_word,
};
use crate::text::{Escaped, number_of};

/// The probes of a process or a file. What is not in the executable comes after a line that names its
/// object.
pub(super) fn listing(listing: &Listing<'_>, shows_pid: bool) -> String {
    let mut text = String::new();
    for probe in &listing.probes {
        push_name_line(probe, &mut text);
        let paths = &listing.paths;
        let sites = probe.sites.iter();
        let sites = sites.map(|it| (&it.object, site_line(it, paths)));
        let semaphores = probe.semaphores.iter();
        let semaphores = semaphores.map(|it| (&it.object, semaphore_line(it)));
        let mut object = &listing.program;
        for (in_object, line) in sites.chain(semaphores) {
            if object != in_object {
                // Writing to a string does not fail.
                let _ = writeln!(text, "  in {}", Escaped(paths.show(in_object)));
                object = in_object;
            }
            text += &line;
        }
        if listing.has_sites {
            text.extend(probe.holders.iter().map(HolderView::line));
        }
    }
    match listing.pid {
        Some(pid) if shows_pid => text.lines().map(|line| format!("{pid} {line}\n")).collect(),
        _ => text,
    }
}

/// Without allocation: there may be thousands of these lines.
fn push_name_line(probe: &ProbeView<'_>, text: &mut String) {
    // Writing to a string does not fail.
    let _ = write!(text, "{}", Escaped(probe.name));
    if let Some(state) = probe.state {
        text.push(' ');
        text.push_str(state_word(state));
    }
    text.push('\n');
}

fn site_line(site: &SiteView<'_>, paths: &ShownPaths) -> String {
    let mut words = vec!["  site".to_owned()];
    match site.address {
        Some(address) => words.extend([address.to_string(), site_state(site)]),
        None => words.push(site.file_address.to_string()),
    }
    words.push(function(site));
    words.push(source(site, paths));
    words.extend(arguments(site));
    words.join(" ") + "\n"
}

fn semaphore_line(semaphore: &SemaphoreView<'_>) -> String {
    match (semaphore.address, semaphore.value) {
        (Some(address), Some(value)) => format!("  semaphore {address} {value}\n"),
        _ => format!("  semaphore {}\n", semaphore.file_address),
    }
}

/// `enabled`, `disabled` or `foreign`, and the bytes if they are not what they should be.
pub(super) fn site_state(site: &SiteView<'_>) -> String {
    let word = match site.enabled {
        Some(true) => "enabled",
        Some(false) => "disabled",
        None => "foreign",
    };
    match site.bytes {
        Some(code) => format!("{word}({})", code.to_string().replace(' ', "")),
        None => word.to_owned(),
    }
}

/// The name of the function of a site, which may have spaces; `-` if it is unknown.
pub(super) fn function(site: &SiteView<'_>) -> String {
    function_or_unknown(site.function.as_deref())
}

/// `file:line` of a site.
pub(super) fn source(site: &SiteView<'_>, paths: &ShownPaths) -> String {
    source_or_unknown(site.file.as_deref(), site.line, paths)
}

/// The arguments of a site.
pub(super) fn arguments(site: &SiteView<'_>) -> impl Iterator<Item = String> {
    let mut names = site.argument_names.iter();
    site.arguments.iter().map(move |text| match names.next() {
        Some(name) => format!("{}={}", Escaped(name), Escaped(text)),
        None => Escaped(text).to_string(),
    })
}

pub(super) fn changes(changes: &Changes<'_>, shows_pid: bool) -> String {
    let process = shows_pid.then_some(changes.pid);
    let lines = changes.changed.iter().map(|it| change(it, process));
    lines.collect()
}

/// One change, with the pid of the process if it is given.
pub(super) fn change(change: &ChangeView<'_>, process: Option<i32>) -> String {
    let process = process.map_or_else(String::new, |pid| format!("{pid} "));
    let name = Escaped(change.name);
    let sites = number_of(change.sites, "site");
    format!(
        "{process}{name} {} -> {}, {sites}\n",
        change.before, change.after
    )
}

pub(super) fn processes(processes: &ProcessList) -> String {
    let lines = processes.processes.iter().map(|process| {
        format!(
            "{} {} {} {} {} {}\n",
            process.pid,
            Escaped(&process.user),
            process.providers.join(","),
            process.probes,
            process.enabled,
            Escaped(&process.program)
        )
    });
    lines.collect()
}
