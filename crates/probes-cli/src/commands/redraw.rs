//! A table on a terminal that is drawn again and again.

use probes_lib::DiscardedPatches;
use ratatui::crossterm::terminal::window_size;

use super::discarded::caution;
use crate::failure::Failure;
use crate::say::{InterruptibleOutput, Next};
use crate::text::Escaped;

/// How much of the table is on the terminal: the number of its lines that were drawn last.
#[derive(Debug, Default)]
pub(super) struct RedrawnTable {
    lines: usize,
}

impl RedrawnTable {
    /// Draws a table in the place of the one before, below what is wrong with its figures. If it is larger
    /// than the terminal, only as much of it is drawn as there is room for.
    pub(super) fn redraw(
        &mut self,
        table: &str,
        discarded: &DiscardedPatches,
        output: &mut InterruptibleOutput,
    ) -> Result<Next, Failure> {
        let size = window_size().map_or((0, 0), |size| (size.columns, size.rows));
        let caution = caution(discarded)
            .map_or_else(String::new, |caution| format!("{}\n", Escaped(&caution)));
        let table = clipped(&(caution + table), size.0.into(), size.1.into());
        let text = self.erase_sequence() + &table;
        self.lines = table.lines().count();
        output.write(&text)
    }

    /// The control sequence that erases the table. ECMA-48: the cursor moves up by the number of lines
    /// drawn, to the start of that line, and everything from there on is erased.
    pub(super) fn erase_sequence(&self) -> String {
        match self.lines {
            0 => String::new(),
            lines => format!("\x1b[{lines}F\x1b[J"),
        }
    }
}

/// Returns the part of a table that fits on a terminal, with the cursor on the line below the table.
/// A size of 0 means that the size is unknown.
fn clipped(table: &str, columns: usize, rows: usize) -> String {
    let rows = rows.checked_sub(1).unwrap_or(usize::MAX);
    let columns = if columns == 0 { usize::MAX } else { columns };
    let lines = table.lines().take(rows);
    let line = |line: &str| line.chars().take(columns).chain(['\n']).collect();
    lines.map(line).collect::<Vec<String>>().concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_beyond_the_terminal_are_left_out() {
        let table = "name hits\nlong 1\nü 2\n";
        assert_eq!(clipped(table, 80, 24), table);
        assert_eq!(clipped(table, 0, 0), table);
        assert_eq!(clipped(table, 9, 4), table);
        assert_eq!(clipped(table, 4, 3), "name\nlong\n");
        assert_eq!(clipped(table, 4, 1), "");
        assert_eq!(clipped("", 4, 3), "");
    }

    #[test]
    fn table_is_erased_before_the_next() {
        assert_eq!(RedrawnTable { lines: 0 }.erase_sequence(), "");
        assert_eq!(RedrawnTable { lines: 3 }.erase_sequence(), "\x1b[3F\x1b[J");
    }
}
