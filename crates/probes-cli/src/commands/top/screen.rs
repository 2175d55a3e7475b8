//! The screen: a [`Model`] as text, for a terminal of any size.

mod cells;
mod pairs;

use probes_lib::State;
use ratatui::Frame;
use ratatui::layout::{Alignment, Constraint, Layout, Rect};
use ratatui::style::{Color, Style, Stylize};
use ratatui::text::{Line, Text};
use ratatui::widgets::{Cell, Paragraph, Row, Table};

use self::cells::{GAP, clipped, grouped, rate_text, sparkline};
use super::model::{HISTORY_LEN, Model, Sort};
use crate::text::{Escaped, number_of};

const KEYS: &str = "q quit  s sort  r reverse  / filter  e enable or disable  p pause  ? keys";

const HELP: [&str; 4] = [
    "arrows j k PgUp PgDn Home End: select   e Enter space: enable or disable the selected probe",
    "s: sort by rate, hits, name   r: reverse   /: filter names, Enter keeps it, Esc cancels",
    "p: pause, counting goes on   Ctrl-L: redraw   Ctrl-Z: suspend   q Esc Ctrl-C: quit",
    "Quitting undoes everything: what was enabled or disabled here, too.   ?: less help",
];

/// The program that is shown.
#[derive(Debug)]
pub(super) struct ShownProgram {
    pub(super) name: String,
    pub(super) pid: i32,
}

/// Which rows of the table are shown: a page that begins with `first`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Scroll {
    first: usize,
    /// How many rows fit.
    pub(super) page: usize,
}

/// A column of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Column {
    Name,
    State,
    Hits,
    Rate,
    Share,
    History,
}

/// The columns with their least widths and titles; names get the width that is left.
const COLUMNS: [(Column, u16, &str); 6] = [
    (Column::Name, 12, "PROBE"),
    (Column::State, 5, "STATE"),
    (Column::Hits, 13, "HITS"),
    (Column::Rate, 13, "HITS/S"),
    (Column::Share, 6, "SHARE"),
    (Column::History, LEAST_HISTORY_WIDTH, "LATEST RATES"),
];

const LEAST_IMPORTANT_FIRST: [Column; 4] =
    [Column::History, Column::Share, Column::Hits, Column::State];

/// The least width of a sparkline.
const LEAST_HISTORY_WIDTH: u16 = 20;

/// Draws the whole screen.
pub(super) fn draw(
    frame: &mut Frame<'_>,
    program: &ShownProgram,
    model: &Model,
    scroll: &mut Scroll,
) {
    let foot = foot(model, frame.area().width);
    // The lines of the pairs: below an empty line, and in no more than half of the screen.
    let pairs = match model.times().len() {
        0 => 0,
        pairs => pairs
            .saturating_add(2)
            .min(usize::from(frame.area().height) / 2),
    };
    let heights = [
        Constraint::Length(2),
        Constraint::Fill(1),
        Constraint::Length(pairs as u16),
        Constraint::Length(foot.len() as u16),
    ];
    let [top, middle, below, bottom] = Layout::vertical(heights).areas(frame.area());
    frame.render_widget(Paragraph::new(title(program, model)), top);
    draw_table(frame, middle, model, scroll);
    pairs::draw(frame, below, model.times());
    frame.render_widget(Paragraph::new(foot), bottom);
}

fn title(program: &ShownProgram, model: &Model) -> Text<'static> {
    let name = Escaped(&program.name).to_string();
    let mut first = Line::from(vec![
        "top".bold(),
        format!(" {name}, process {}", program.pid).into(),
    ]);
    if model.is_paused() {
        first.push_span("  PAUSED".bold());
    }
    let (hits, rate) = model.totals();
    let (sort, is_reversed) = model.sort();
    let by = match sort {
        Sort::Rate => "rate",
        Sort::Hits => "hits",
        Sort::Name => "name",
    };
    let reversed = if is_reversed { ", reversed" } else { "" };
    let probes = number_of(model.len(), "probe");
    let mut second = format!(
        "{probes}, {} on; {} hits, {}/s; by {by}{reversed}",
        model.enabled_count(),
        grouped(hits),
        rate_text(rate),
    );
    if !model.filter().is_empty() {
        let filter = Escaped(model.filter());
        second += &format!("; {} with \"{filter}\"", model.shown_count());
    }
    Text::from(vec![first, second.into()])
}

fn foot(model: &Model, width: u16) -> Vec<Line<'static>> {
    if model.is_typing() {
        let filter = Escaped(model.filter()).to_string();
        return vec![Line::from(vec![
            "filter: ".bold(),
            filter.into(),
            "_".into(),
        ])];
    }
    let mut lines: Vec<Line<'static>> = Vec::new();
    if let Some(message) = model.message() {
        let message = wrapped(&Escaped(message).to_string(), usize::from(width));
        lines.extend(message.into_iter().map(|line| Line::from(line).bold()));
    }
    if model.has_help() {
        lines.extend(HELP.map(Line::from));
    } else if lines.is_empty() {
        lines.push(KEYS.into());
    }
    lines
}

/// Breaks a message into lines between its words; a very long one is cut.
fn wrapped(message: &str, width: usize) -> Vec<String> {
    const MAX_LINES: usize = 4;
    let mut lines = vec![String::new()];
    for word in message.split(' ') {
        let Some(line) = lines.last_mut() else { break };
        let joined = if line.is_empty() {
            word.to_owned()
        } else {
            format!("{line} {word}")
        };
        if line.is_empty() || Line::from(joined.as_str()).width() <= width {
            *line = joined;
        } else if lines.len() < MAX_LINES {
            lines.push(word.to_owned());
        } else {
            break;
        }
    }
    lines
}

fn draw_table(frame: &mut Frame<'_>, area: Rect, model: &Model, scroll: &mut Scroll) {
    // The first line of the area has the titles of the columns.
    scroll.page = usize::from(area.height.saturating_sub(1));
    scroll.first = first_row(model, *scroll);
    let columns = columns(area.width);
    let shown = COLUMNS
        .iter()
        .filter(|(column, ..)| columns.contains(column));
    let history = history_width(area.width);
    let (mut widths, mut titles) = (Vec::new(), Vec::new());
    for (column, width, title) in shown {
        widths.push(match column {
            Column::Name => Constraint::Fill(1),
            Column::History => Constraint::Length(history),
            _ => Constraint::Length(*width),
        });
        titles.push(Cell::from(aligned(*column, (*title).to_owned())));
    }
    let name_width = name_width(area.width, &columns);
    let history = usize::from(history);
    let rows = model.rows(scroll.first, scroll.page).map(|row| {
        let cells = columns.iter().map(|&column| {
            let text = match column {
                Column::Name => clipped(row.name, name_width),
                Column::State => state(row.state).to_owned(),
                Column::Hits => grouped(row.figures.hits),
                Column::Rate => rate_text(row.figures.rate),
                Column::Share => format!("{:.1}%", row.figures.share * 100.0),
                Column::History => sparkline(row.figures.history.iter().copied(), history),
            };
            let cell = Cell::from(aligned(column, text));
            match (column, row.state) {
                (Column::State, Some(State::Enabled)) => cell.style(Style::new().fg(Color::Green)),
                (Column::State, Some(State::Inconsistent)) => {
                    cell.style(Style::new().fg(Color::Red))
                }
                _ => cell,
            }
        });
        let mut style = Style::new();
        if row.is_selected {
            style = style.reversed();
        }
        Row::new(cells.collect::<Vec<_>>()).style(style)
    });
    let table = Table::new(rows.collect::<Vec<_>>(), widths)
        .header(Row::new(titles).style(Style::new().bold()))
        .column_spacing(GAP);
    frame.render_widget(table, area);
}

/// The first row to show, so that the selected one is on the page.
fn first_row(model: &Model, scroll: Scroll) -> usize {
    let Some(selected) = model.selected_row() else {
        return 0;
    };
    let last = model.shown_count().saturating_sub(scroll.page);
    let least = (selected + 1).saturating_sub(scroll.page);
    scroll.first.clamp(least, selected.max(least)).min(last)
}

/// The columns that fit, the least important left out first.
fn columns(width: u16) -> Vec<Column> {
    let mut columns: Vec<Column> = COLUMNS.iter().map(|(column, ..)| *column).collect();
    for column in LEAST_IMPORTANT_FIRST {
        if needed(&columns) > width {
            columns.retain(|one| *one != column);
        }
    }
    columns
}

/// The least width of these columns.
fn needed(columns: &[Column]) -> u16 {
    let of_them = COLUMNS
        .iter()
        .filter(|(column, ..)| columns.contains(column));
    let widths: u16 = of_them.map(|(_, width, _)| width + GAP).sum();
    widths.saturating_sub(GAP)
}

fn name_width(width: u16, columns: &[Column]) -> usize {
    let (_, least, _) = COLUMNS[0];
    let history = if columns.contains(&Column::History) {
        history_width(width) - LEAST_HISTORY_WIDTH
    } else {
        0
    };
    usize::from((width + least).saturating_sub(needed(columns) + history))
}

/// The width of sparklines: the least width, and half of the columns that the terminal has beyond
/// 100, but no more than [`HISTORY_LEN`].
fn history_width(width: u16) -> u16 {
    let spare = width.saturating_sub(100) / 2;
    LEAST_HISTORY_WIDTH
        .saturating_add(spare)
        .min(HISTORY_LEN as u16)
}

fn aligned(column: Column, text: String) -> Text<'static> {
    let alignment = match column {
        Column::Name | Column::State => Alignment::Left,
        Column::Hits | Column::Rate | Column::Share | Column::History => Alignment::Right,
    };
    Text::from(text).alignment(alignment)
}

fn state(state: Option<State>) -> &'static str {
    match state {
        Some(State::Enabled) => "on",
        Some(State::Disabled) => "off",
        Some(State::Inconsistent) => "mixed",
        None => "",
    }
}

#[cfg(test)]
mod tests;
