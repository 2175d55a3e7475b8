//! Tables, for people.

use std::mem::take;

use ratatui::crossterm::terminal::window_size;
use tabled::Table;
use tabled::builder::Builder;
use tabled::grid::util::string::get_string_width;
use tabled::settings::peaker::Priority;
use tabled::settings::{Style, Width};

use super::stack_quality::is_mark;

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
    if let Some(columns) = terminal_width(is_terminal) {
        let widest_first = Priority::max(true);
        let wrap = Width::wrap(columns).keep_words(true);
        table.with(wrap.priority(widest_first));
    }
    format!("{table}\n")
}

/// A table whose last cells are stacks, the outermost function first. If a terminal shows it that is narrower, they
/// lose outer functions, and a line below says so.
pub(super) fn table_of_stacks(
    is_terminal: bool,
    head: &[&str],
    rows: impl Iterator<Item = Vec<String>>,
) -> String {
    match terminal_width(is_terminal) {
        Some(columns) => table_within(columns, head, rows.collect()),
        None => table(head, rows),
    }
}

/// Same as [`table_of_stacks`], in this many columns if possible.
fn table_within(columns: usize, head: &[&str], mut rows: Vec<Vec<String>>) -> String {
    /// Cells shorter than this help nobody.
    const MIN_ROOM: usize = 20;
    let Some(last) = head.len().checked_sub(1) else {
        return String::new();
    };
    let widths = (0..last).map(|column| {
        let cells = rows.iter().filter_map(|row| row.get(column));
        let widths = cells.map(|cell| get_string_width(cell));
        widths.fold(get_string_width(head[column]), usize::max)
    });
    // A cell has a blank on each side, and there is a line after each but the last.
    let others: usize = widths.map(|width| width + 3).sum();
    let room = columns.saturating_sub(others + 2).max(MIN_ROOM);
    let mut is_shortened = false;
    for stack in rows.iter_mut().filter_map(|row| row.get_mut(last)) {
        if let Some(shorter) = without_outer(stack, room) {
            *stack = shorter;
            is_shortened = true;
        }
    }
    let mut text = table(head, rows.into_iter());
    if is_shortened {
        text += "\n... stands for outer functions; -format plain shows all\n";
    }
    text
}

/// Returns a stack without so many of its outer functions that it fits in `room`, or the innermost is left, with its
/// caller if it has no name; `None` if none has to be left out. Marks before the functions stay.
fn without_outer(stack: &str, room: usize) -> Option<String> {
    const LEFT_OUT: &str = "...;";
    if get_string_width(stack) <= room {
        return None;
    }
    let mut functions = stack;
    while let Some((first, others)) = functions.split_once(';') {
        if !is_mark(first) {
            break;
        }
        functions = others;
    }
    let marks = &stack[..stack.len() - functions.len()];
    let room = room.saturating_sub(get_string_width(marks) + LEFT_OUT.len());
    // From the innermost one on: a stack may have a thousand times as many as fit.
    let mut inner = functions
        .rmatch_indices(';')
        .map(|(at, _)| &functions[at + 1..]);
    let mut innermost = inner.next()?;
    if innermost.starts_with('[') {
        innermost = inner.next()?;
    }
    let fitting = inner.take_while(|inner| get_string_width(inner) <= room);
    let inner = fitting.last().unwrap_or(innermost);
    Some(format!("{marks}{LEFT_OUT}{inner}"))
}

/// The width of the terminal, if one shows the output and its width is known.
fn terminal_width(is_terminal: bool) -> Option<usize> {
    let size = is_terminal.then(window_size)?.ok()?;
    // 0 means that it is unknown.
    (size.columns > 0).then(|| usize::from(size.columns))
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
    fn long_stacks_lose_outer_functions() {
        let stack = "_start;main;serve;handle;lock";
        assert_eq!(without_outer(stack, stack.len()), None);
        let shorter = |room| without_outer(stack, room).unwrap();
        let shorter_of = |stack| without_outer(stack, 3).unwrap();
        assert_eq!(shorter(28), "...;main;serve;handle;lock");
        assert_eq!(shorter(26), "...;main;serve;handle;lock");
        assert_eq!(shorter(25), "...;serve;handle;lock");
        assert_eq!(shorter(3), "...;lock");
        let cut = without_outer("[cut];main;serve;lock", 16).unwrap();
        assert_eq!(cut, "[cut];...;lock");
        let marked = without_outer("[collection];[guessed];[a.so];main;lock", 30).unwrap();
        assert_eq!(marked, "[collection];[guessed];...;lock");
        assert_eq!(shorter_of("main;serve;wait;[futex]"), "...;wait;[futex]");
        let deep = without_outer(&"f;".repeat(1 << 20), 20).unwrap();
        assert_eq!(deep, "...;f;f;f;f;f;f;f;f;");
        // Nothing can be left out.
        assert_eq!(without_outer("a_long_name", 3), None);
        assert_eq!(without_outer("[cut];a_long_name", 3), None);
    }

    #[test]
    fn tables_of_stacks_fit_the_terminal() {
        let rows = || vec![["12", "_start;main;serve;handle;lock"], ["3", "main"]];
        let rows = || {
            rows()
                .into_iter()
                .map(|row| row.map(str::to_owned).to_vec())
        };
        let head = ["hits", "stack"];
        let wide = table_within(80, &head, rows().collect());
        assert_eq!(wide, table(&head, rows()));
        let narrow = table_within(31, &head, rows().collect());
        let lines: Vec<&str> = narrow.lines().collect();
        assert_eq!(lines[2].trim_end(), " 12   | ...;serve;handle;lock");
        assert!(
            lines.iter().take(4).all(|line| line.len() <= 31),
            "{narrow}"
        );
        assert!(lines[5].starts_with("... stands for outer functions"));
    }

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
