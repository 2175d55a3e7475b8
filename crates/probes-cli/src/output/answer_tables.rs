//! The answers of `info`, `list`, `attach` and `ps` as tables.

use super::holder::held_by;
use super::paths::ShownPaths;
use super::plain::{arguments, function, site_state, source};
use super::table::table;
use super::view::{ChangeView, Changes, Listing, ProbeView, ProcessList, state_word};
use crate::text::{Escaped, number_of};

pub(super) fn listing(listing: &Listing<'_>, sites: bool, shows_pid: bool) -> String {
    let pid = listing.pid.filter(|_| shows_pid);
    let mut head: Vec<&str> = pid.map(|_| "pid").into_iter().collect();
    head.push("probe");
    if listing.pid.is_some() {
        head.extend(["state", "counter"]);
    }
    let objects = listing.has_other_objects();
    let held = listing.probes.iter().any(|probe| !probe.holders.is_empty());
    if sites {
        head.push("kind");
        head.extend(objects.then_some("object"));
        head.extend(["address", "function", "source", "arguments"]);
    } else {
        head.push("sites");
    }
    head.extend(held.then_some("held by"));
    let columns = head.len() - usize::from(pid.is_some());
    let rows = listing.probes.iter().flat_map(|probe| {
        let mut row = name_row(probe, sites);
        if held {
            row.resize(columns - 1, String::new());
            row.push(held_by(&probe.holders));
        }
        let mut rows = vec![row];
        if sites {
            rows.extend(site_rows(probe, objects, &listing.paths));
        }
        if let Some(pid) = pid {
            for row in &mut rows {
                row.insert(0, pid.to_string());
            }
        }
        rows
    });
    table(&head, rows)
}

/// A probe with its state, if it has one, and the number of its sites.
fn name_row(probe: &ProbeView<'_>, with_sites: bool) -> Vec<String> {
    let mut row = vec![Escaped(probe.name).to_string()];
    if let (Some(state), Some(counter)) = (probe.state, probe.counter) {
        row.extend([state_word(state).to_owned(), counter.to_string()]);
    }
    row.push(if with_sites {
        number_of(probe.site_count, "site")
    } else {
        probe.site_count.to_string()
    });
    row
}

/// The sites and semaphores of a probe, below its row.
fn site_rows(probe: &ProbeView<'_>, objects: bool, paths: &ShownPaths) -> Vec<Vec<String>> {
    let in_object = |object: &str| objects.then(|| Escaped(paths.show(object)).to_string());
    let sites = probe.sites.iter().map(|site| {
        let mut row = vec![String::new()];
        let address = match site.address {
            Some(address) => {
                row.extend([site_state(site), String::new()]);
                address.to_string()
            }
            None => site.file_address.to_string(),
        };
        let arguments: Vec<_> = arguments(site).collect();
        row.push("site".to_owned());
        row.extend(in_object(&site.object));
        row.extend([
            address,
            function(site),
            source(site, paths),
            arguments.join(" "),
        ]);
        row
    });
    let semaphores = probe.semaphores.iter().map(|semaphore| {
        let mut row = vec![String::new()];
        let address = match (semaphore.address, semaphore.value) {
            (Some(address), Some(value)) => {
                row.extend([String::new(), value.to_string()]);
                address.to_string()
            }
            _ => semaphore.file_address.to_string(),
        };
        row.push("semaphore".to_owned());
        row.extend(in_object(&semaphore.object));
        row.push(address);
        row
    });
    sites.chain(semaphores).collect()
}

pub(super) const CHANGE_HEAD: [&str; 4] = ["probe", "before", "after", "sites"];

/// The cells of a change, below [`CHANGE_HEAD`].
pub(super) fn change_cells(change: &ChangeView<'_>) -> [String; 4] {
    [
        Escaped(change.name).to_string(),
        change.before.to_string(),
        change.after.to_string(),
        change.sites.to_string(),
    ]
}

pub(super) fn changes(changes: &Changes<'_>, shows_pid: bool) -> String {
    let pid = shows_pid.then(|| changes.pid.to_string());
    let rows = changes.changed.iter().map(|change| {
        let mut row: Vec<String> = pid.iter().cloned().collect();
        row.extend(change_cells(change));
        row
    });
    let mut head = CHANGE_HEAD.to_vec();
    if shows_pid {
        head.insert(0, "pid");
    }
    table(&head, rows)
}

pub(super) fn processes(processes: &ProcessList) -> String {
    let rows = processes.processes.iter().map(|process| {
        vec![
            process.pid.to_string(),
            Escaped(&process.user).to_string(),
            process.providers.join(" "),
            process.probes.to_string(),
            process.enabled.to_string(),
            Escaped(&process.program).to_string(),
        ]
    });
    let head = ["pid", "user", "providers", "probes", "enabled", "program"];
    table(&head, rows)
}
