//! The times of pairs, below the probes.

use ratatui::buffer::Buffer;
use ratatui::layout::{Alignment, Constraint, Layout, Rect};
use ratatui::style::{Style, Stylize};
use ratatui::text::{Line, Text};
use ratatui::widgets::{Cell, Row, Table, Widget};

use super::cells::{GAP, clipped, grouped};
use crate::commands::top::model::PairLatency;
use crate::output::with_unit;
use crate::text::Escaped;

/// The least width of names.
const NAME_WIDTH: u16 = 12;

/// The columns after the names: title, width, and the width of the screen from which on they are shown.
const COLUMNS: [(&str, u16, u16); 5] = [
    ("COUNT", 13, 71),
    ("MEAN", 9, 56),
    ("P50", 9, 34),
    ("P99", 9, 0),
    ("MAX", 9, 45),
];

/// As many pairs as fit, below a line that is empty or says that times may be wrong.
pub(super) struct PairsTable<'m>(pub(super) &'m [PairLatency]);

impl Widget for PairsTable<'_> {
    fn render(self, area: Rect, buffer: &mut Buffer) {
        let [above, area] =
            Layout::vertical([Constraint::Length(1), Constraint::Fill(1)]).areas(area);
        // What is certain is said first.
        let certain = self.0.iter().filter(|pair| pair.evidence.is_certain());
        let seen = self.0.iter().filter(|pair| pair.evidence.is_any());
        let mut doubted = certain.chain(seen).chain(self.0);
        if let Some((pair, caution)) = doubted.find_map(|pair| Some((pair, caution_of(pair)?))) {
            let line = Line::from(caution);
            let line = if pair.evidence.is_any() {
                line.red()
            } else {
                line
            };
            line.render(above, buffer);
        }
        if area.height > 1 {
            table(self.0, area).render(area, buffer);
        }
    }
}

/// Says if times of a pair may be wrong.
fn caution_of(pair: &PairLatency) -> Option<String> {
    let caution = pair.evidence.caution()?;
    let (start, stop) = (Escaped(&pair.start), Escaped(&pair.stop));
    Some(format!("{start},{stop}: {caution}"))
}

fn table(times: &[PairLatency], area: Rect) -> Table<'static> {
    let is_wide = |from: u16| area.width >= from;
    let shown = COLUMNS.iter().filter(|(_, _, from)| is_wide(*from));
    let others: u16 = shown.clone().map(|(_, width, _)| width + GAP).sum();
    let names = area.width.saturating_sub(others).max(NAME_WIDTH);
    let mut widths = vec![Constraint::Length(names)];
    widths.extend(
        shown
            .clone()
            .map(|(_, width, _)| Constraint::Length(*width)),
    );
    let mut head = vec![Cell::from("PAIR")];
    head.extend(shown.map(|(title, ..)| right((*title).to_owned())));
    let room = usize::from(area.height.saturating_sub(1));
    let rows = times.iter().take(room).map(|pair| {
        let figures = [
            grouped(pair.count),
            with_unit(pair.mean),
            with_unit(pair.p50),
            with_unit(pair.p99),
            with_unit(pair.max),
        ];
        let shown = COLUMNS.iter().zip(figures);
        let shown = shown.filter(|((_, _, from), _)| is_wide(*from));
        let mut cells = vec![Cell::from(name(pair, usize::from(names)))];
        cells.extend(shown.map(|(_, text)| right(text)));
        let row = Row::new(cells);
        if pair.evidence.is_any() {
            row.red()
        } else {
            row
        }
    });
    Table::new(rows, widths)
        .header(Row::new(head).style(Style::new().bold()))
        .column_spacing(GAP)
}

fn right(text: String) -> Cell<'static> {
    Cell::from(Text::from(text).alignment(Alignment::Right))
}

/// Both names, each in half of the width, or in what the other leaves.
fn name(pair: &PairLatency, width: usize) -> String {
    let room = width.saturating_sub(1);
    let whole = |name: &str| Line::from(clipped(name, room)).width();
    let (start, stop) = (whole(&pair.start), whole(&pair.stop));
    let half = room / 2;
    let for_start = if start <= half {
        start
    } else if stop <= half {
        room - stop
    } else {
        half
    };
    let start = clipped(&pair.start, for_start);
    let stop = clipped(&pair.stop, room - for_start);
    format!("{start},{stop}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_share_the_available_width() {
        let pair = |start: &str, stop: &str| PairLatency {
            start: start.to_owned(),
            stop: stop.to_owned(),
            ..PairLatency::default()
        };
        for (start, stop, width, expected) in [
            ("a", "b", 12, "a,b"),
            ("start", "a_very_long_stop", 12, "start,a_ver…"),
            ("a_very_long_start", "stop", 12, "a_very…,stop"),
            ("a_very_long_start", "a_very_long_stop", 12, "a_ve…,a_ver…"),
            ("a\x1bb", "c", 30, "a\\u{1b}b,c"),
            ("start", "stop", 1, "…,…"),
        ] {
            assert_eq!(name(&pair(start, stop), width), expected);
        }
    }
}
