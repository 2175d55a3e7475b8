//! Tables, for people.

use std::mem::take;

use ratatui::crossterm::terminal::window_size;
use tabled::Table;
use tabled::builder::Builder;
use tabled::grid::util::string::get_string_width;
use tabled::settings::peaker::Priority;
use tabled::settings::{Style, Width};

pub(super) fn table(head: &[&str], rows: impl Iterator<Item = Vec<String>>) -> String {
    format!("{}\n", build(head, rows))
}

/// The same; if a terminal shows it that is narrower, long cells have several lines.
pub(super) fn wrapped_table(
    is_terminal: bool,
    head: &[&str],
    rows: impl Iterator<Item = Vec<String>>,
) -> String {
    let mut table = build(head, rows);
    // A size of 0 means that it is unknown.
    let columns = window_size().map_or(0, |size| size.columns);
    if is_terminal && columns > 0 {
        let widest_first = Priority::max(true);
        let wrap = Width::wrap(usize::from(columns)).keep_words(true);
        table.with(wrap.priority(widest_first));
    }
    format!("{table}\n")
}

fn build(head: &[&str], rows: impl Iterator<Item = Vec<String>>) -> Table {
    let mut builder = Builder::new();
    builder.push_record(head.iter().copied());
    for row in rows {
        builder.push_record(row);
    }
    let mut table = builder.build();
    table.with(Style::psql());
    table
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

    /// Appends the lines of the `pending` rows, and empties these. If there are none, appends nothing, not even the
    /// head.
    pub(super) fn append(
        &mut self,
        head: &[&str],
        pending: &mut Vec<Vec<String>>,
        lines: &mut String,
    ) {
        if !pending.is_empty() {
            *lines += &self.rows(head, &take(pending));
        }
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
