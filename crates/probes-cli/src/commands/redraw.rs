//! A table on a terminal that is drawn again and again.

use std::mem::take;

use nix::sys::signal::{SigSet, SigmaskHow, Signal};
use nix::sys::signalfd::SignalFd;
use ratatui::crossterm::terminal::window_size;

use super::gaps::Gaps;
use crate::failure::Failure;
use crate::interruptible_output::{InterruptibleOutput, Next};
use crate::signals::block;
use crate::text::{Escaped, beginning};

/// How much of the table is on the terminal.
#[derive(Debug)]
pub(super) struct RedrawnTable {
    /// How many of its lines were drawn last.
    lines: usize,
    /// SIGCONT.
    resumed: SignalFd,
}

impl RedrawnTable {
    /// A table of which nothing is drawn yet. It blocks SIGCONT, which resumes this process all the same.
    pub(super) fn new() -> Result<RedrawnTable, Failure> {
        let resumed = block(&SigSet::from(Signal::SIGCONT))?;
        Ok(RedrawnTable { lines: 0, resumed })
    }

    /// Draws a table in the place of the one before, with a line above it that says which figures are wrong, if any
    /// are. If it is larger than the terminal, only as much of it is drawn as there is room for.
    pub(super) fn redraw(
        &mut self,
        table: &str,
        gaps: &Gaps,
        output: &mut InterruptibleOutput,
    ) -> Result<Next, Failure> {
        // Ctrl-Z waits until the table is drawn: otherwise it would be drawn after `fg`, without a look at
        // whether this process was stopped. These calls do not fail.
        let stopping = SigSet::from(Signal::SIGTSTP);
        let before = stopping.thread_swap_mask(SigmaskHow::SIG_BLOCK);
        let size = window_size().map_or((0, 0), |size| (size.columns, size.rows));
        let caution = gaps
            .caution()
            .map_or_else(String::new, |caution| format!("{}\n", Escaped(&caution)));
        let table = clipped(&(caution + table), size.0.into(), size.1.into());
        let text = self.erase_sequence() + &table;
        self.lines = table.lines().count();
        let drawn = output.write(&text);
        let _ = before.and_then(|before| before.thread_set_mask());
        drawn
    }

    /// The control sequence that erases the table, unless this process was stopped since: then other programs
    /// may have written below it. ECMA-48: the cursor moves up by the number of lines drawn, to the start of
    /// that line, and everything from there on is erased.
    pub(super) fn erase_sequence(&mut self) -> String {
        // Read even if nothing is drawn: a stop before the table was drawn does not matter.
        let was_resumed = self.was_resumed();
        match take(&mut self.lines) {
            lines if lines > 0 && !was_resumed => format!("\x1b[{lines}F\x1b[J"),
            _ => String::new(),
        }
    }

    fn was_resumed(&self) -> bool {
        matches!(self.resumed.read_signal(), Ok(Some(_)))
    }
}

/// Returns the part of a table that fits on a terminal, with the cursor on the line below the table.
/// A size of 0 means that the size is unknown.
fn clipped(table: &str, columns: usize, rows: usize) -> String {
    let rows = rows.checked_sub(1).unwrap_or(usize::MAX);
    let columns = if columns == 0 { usize::MAX } else { columns };
    let lines = table.lines().take(rows);
    let lines = lines.map(|line| format!("{}\n", beginning(line, columns)));
    lines.collect()
}

#[cfg(test)]
mod tests {
    use nix::sys::signal::raise;

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
        // Each of these letters takes two columns.
        assert_eq!(clipped("日本 1\n", 6, 3), "日本 1\n");
        assert_eq!(clipped("日本 1\n", 5, 3), "日本 \n");
        assert_eq!(clipped("日本 1\n", 3, 3), "日\n");
        assert_eq!(clipped("日本 1\n", 1, 3), "\n");
    }

    #[test]
    fn table_is_erased_before_the_next() {
        let table = |lines| RedrawnTable {
            lines,
            ..RedrawnTable::new().unwrap()
        };
        assert_eq!(table(0).erase_sequence(), "");
        assert_eq!(table(3).erase_sequence(), "\x1b[3F\x1b[J");
        let mut resumed = table(0);
        raise(Signal::SIGCONT).unwrap();
        assert_eq!(resumed.erase_sequence(), "");
        resumed.lines = 3;
        assert_eq!(resumed.erase_sequence(), "\x1b[3F\x1b[J");
        resumed.lines = 3;
        raise(Signal::SIGCONT).unwrap();
        assert_eq!(resumed.erase_sequence(), "");
    }
}
