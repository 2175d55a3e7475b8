//! Tables, for people.

use tabled::builder::Builder;
use tabled::grid::util::string::get_string_width;
use tabled::settings::Style;

use super::holds::held_by;
use super::paths::ShownPaths;
use super::plain::{arguments, function, site_state, source};
use super::view::{Changes, Listing, ProbeView, Processes, state_word};
use crate::text::{Escaped, number_of};

pub(super) fn listing(listing: &Listing<'_>, sites: bool, names_process: bool) -> String {
    let pid = listing.pid.filter(|_| names_process);
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

pub(super) fn changes(changes: &Changes<'_>, names_process: bool) -> String {
    let pid = names_process.then(|| changes.pid.to_string());
    let rows = changes.changed.iter().map(|change| {
        let mut row: Vec<String> = pid.iter().cloned().collect();
        row.extend([
            Escaped(change.name).to_string(),
            change.before.to_string(),
            change.after.to_string(),
            change.sites.to_string(),
        ]);
        row
    });
    let mut head = vec!["probe", "before", "after", "sites"];
    if names_process {
        head.insert(0, "pid");
    }
    table(&head, rows)
}

pub(super) fn processes(processes: &Processes) -> String {
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

pub(super) fn table(head: &[&str], rows: impl Iterator<Item = Vec<String>>) -> String {
    let mut builder = Builder::new();
    builder.push_record(head.iter().copied());
    for row in rows {
        builder.push_record(row);
    }
    format!("{}\n", builder.build().with(Style::psql()))
}

/// A table whose rows come one after another, in the style of [`table`]. A column is as wide as its widest cell
/// so far.
#[derive(Debug, Default)]
pub(super) struct StreamedTable {
    widths: Vec<usize>,
    has_head: bool,
}

impl StreamedTable {
    /// The lines of these rows; before the first ones, also those of the head.
    pub(super) fn rows(&mut self, head: &[&str], rows: &[Vec<String>]) -> String {
        let head: Vec<String> = head.iter().map(ToString::to_string).collect();
        for row in rows.iter().chain([&head]) {
            self.widen(row);
        }
        let mut lines = String::new();
        if !self.has_head {
            self.has_head = true;
            lines += &self.line(&head);
            let rules: Vec<String> = self
                .widths
                .iter()
                .map(|width| "-".repeat(width + 2))
                .collect();
            lines += &(rules.join("+") + "\n");
        }
        rows.iter()
            .fold(lines, |lines, row| lines + &self.line(row))
    }

    /// Makes the columns wide enough for a row that comes later.
    pub(super) fn widen(&mut self, row: &[String]) {
        self.widths.resize(row.len().max(self.widths.len()), 0);
        for (width, cell) in self.widths.iter_mut().zip(row) {
            *width = get_string_width(cell).max(*width);
        }
    }

    fn line(&self, cells: &[String]) -> String {
        let cells = self.widths.iter().zip(cells).map(|(width, cell)| {
            let padding = " ".repeat(width - get_string_width(cell));
            format!(" {cell}{padding} ")
        });
        let line: Vec<String> = cells.collect();
        line.join("|").trim_end().to_owned() + "\n"
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn streamed_columns_grow_with_their_cells() {
        let row = |cells: [&str; 2]| cells.map(str::to_owned).to_vec();
        let mut table = StreamedTable::default();
        assert_eq!(
            table.rows(&["name", "args"], &[row(["tick", "1"]), row(["日本", ""])]),
            " name | args\n------+------\n tick | 1\n 日本 |\n"
        );
        assert_eq!(
            table.rows(
                &["name", "args"],
                &[row(["req_start", "22222"]), row(["a", "3"])]
            ),
            " req_start | 22222\n a         | 3\n"
        );
    }

    #[test]
    fn widened_columns_are_those_of_a_table() {
        let rows = [["tick", "1"], ["日本", "22"]].map(|row| row.map(str::to_owned).to_vec());
        let mut streamed = StreamedTable::default();
        rows.iter().for_each(|row| streamed.widen(row));
        let head = ["name", "arguments"];
        let mut lines = streamed.rows(&head, &[]);
        for row in &rows {
            lines += &streamed.rows(&head, std::slice::from_ref(row));
        }
        let whole = table(&head, rows.into_iter());
        let whole: Vec<&str> = whole.lines().map(str::trim_end).collect();
        assert_eq!(lines.lines().collect::<Vec<_>>(), whole);
    }
}
