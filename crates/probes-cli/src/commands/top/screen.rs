//! The screen: a [`Model`] as text, for a terminal of any size.

mod cells;
mod foot;
mod pairs;

use std::cell::RefCell;
use std::collections::HashMap;

use probes_lib::{LiveAddr, State};
use ratatui::Frame;
use ratatui::buffer::Buffer;
use ratatui::layout::{Alignment, Constraint, Layout, Rect};
use ratatui::style::{Color, Style, Stylize};
use ratatui::text::{Line, Text};
use ratatui::widgets::{Cell, Paragraph, Row, Table, Widget};

use self::cells::{GAP, clipped, grouped, rate_text, sparkline};
use super::model::{CollectorFigures, HISTORY_LEN, Model, RowKind, Sort};
use crate::output::{FunctionSources, with_unit};
use crate::text::{Escaped, bytes_text, number_of};

/// The program that is shown.
pub(super) struct ShownProgram {
    pub(super) name: String,
    /// `process 4242`, or `2 processes: 4242, 4243 not read any more`.
    pub(super) processes: String,
    pub(super) sources: RowSources,
}

/// The source lines of functions, each looked up when it is first shown.
#[derive(Default)]
pub(super) struct RowSources {
    pub(super) functions: FunctionSources,
    known: RefCell<HashMap<LiveAddr, String>>,
}

impl RowSources {
    pub(super) fn of(functions: FunctionSources) -> RowSources {
        RowSources {
            functions,
            known: RefCell::default(),
        }
    }

    fn of_function(&self, address: LiveAddr) -> String {
        let mut known = self.known.borrow_mut();
        let locate = || self.functions.short(address);
        known.entry(address).or_insert_with(locate).clone()
    }
}

/// Which rows of the table are shown: a page that begins with `first`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Scroll {
    first: usize,
    /// How many rows fit.
    pub(super) page: usize,
    /// How many pages of help there are.
    pub(super) help_pages: usize,
}

/// A column of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Column {
    Name,
    Source,
    State,
    Hits,
    Rate,
    Share,
    History,
}

/// The columns with their least widths and titles; names get the width that is left.
const COLUMNS: [(Column, u16, &str); 7] = [
    (Column::Name, 12, "PROBE"),
    (Column::Source, SOURCE_WIDTH, "SOURCE"),
    (Column::State, 5, "STATE"),
    (Column::Hits, 13, "HITS"),
    (Column::Rate, 13, "HITS/S"),
    (Column::Share, 6, "SHARE"),
    (Column::History, MIN_HISTORY_WIDTH, "LATEST RATES"),
];

const LEAST_IMPORTANT_FIRST: [Column; 5] = [
    Column::History,
    Column::Share,
    Column::Source,
    Column::Hits,
    Column::State,
];

/// The width of source lines.
const SOURCE_WIDTH: u16 = 20;

/// The least width of a sparkline.
const MIN_HISTORY_WIDTH: u16 = 20;

/// The lines of the table, on any screen that has as many: the titles of the columns and a row.
const MIN_TABLE_HEIGHT: u16 = 2;

/// The height of the title, which has a line for the collector if that is known.
fn title_height(model: &Model) -> u16 {
    2 + u16::from(model.collector().is_some())
}

/// Draws the whole screen.
pub(super) fn draw(
    frame: &mut Frame<'_>,
    program: &ShownProgram,
    model: &Model,
    scroll: &mut Scroll,
) {
    let (width, height) = (frame.area().width, frame.area().height);
    let mut left = height.saturating_sub(MIN_TABLE_HEIGHT);
    let foot = foot::foot(model, width, left.into());
    scroll.help_pages = foot.help_pages;
    let mut take = |lines: usize| {
        let taken = u16::try_from(lines).unwrap_or(u16::MAX).min(left);
        left -= taken;
        taken
    };
    // The most important first.
    let least_foot = take(foot.needed);
    let title_height = take(title_height(model).into());
    let foot_height = least_foot + take(foot.lines.len() - usize::from(least_foot));
    // The lines of the pairs: below an empty line, and in no more than half of the screen.
    let pairs = match model.times().len() {
        0 => 0,
        pairs => pairs.saturating_add(2).min(usize::from(height) / 2),
    };
    let heights = [
        Constraint::Length(title_height),
        Constraint::Fill(1),
        Constraint::Length(take(pairs)),
        Constraint::Length(foot_height),
    ];
    let [top, middle, below, bottom] = Layout::vertical(heights).areas(frame.area());
    frame.render_widget(Paragraph::new(title(program, model)), top);
    draw_table(frame, middle, program, model, scroll);
    frame.render_widget(pairs::PairsTable(model.times()), below);
    let lines = foot::cut(foot.lines, foot_height.into(), width.into());
    frame.render_widget(Paragraph::new(lines), bottom);
}

/// The figures as text, for a terminal of this size: title, as many rows as there is room for, and pairs.
pub(super) fn text(program: &ShownProgram, model: &Model, width: u16, height: u16) -> String {
    // Room for the lines printed below it: that the process has exited, and the prompt of the
    // shell.
    const BELOW: u16 = 4;
    let pairs = match u16::try_from(model.times().len()).unwrap_or(u16::MAX) {
        0 => 0,
        pairs => pairs.saturating_add(2).min(height / 2),
    };
    let room = height.saturating_sub(title_height(model) + 1 + BELOW + pairs);
    let shown = model.shown_count().min(room.max(1).into());
    let heights = [shown as u16 + 1, pairs];
    let area = Rect::new(0, 0, width, heights.iter().sum());
    let mut buffer = Buffer::empty(area);
    let [above, below] = Layout::vertical(heights.map(Constraint::Length)).areas(area);
    Widget::render(table(program, model, width, 0, shown), above, &mut buffer);
    pairs::PairsTable(model.times()).render(below, &mut buffer);
    let title = title(program, model).lines.into_iter();
    let mut lines: Vec<String> = title.map(|line| line.to_string()).collect();
    lines.extend((0..above.height).map(|y| line(&buffer, y)));
    let others = model.shown_count() - shown;
    if others > 0 {
        let what = match model.kinds()[..] {
            [kind] => kind.noun(),
            _ => "row",
        };
        lines.push(format!("and {} more", number_of(others, what)));
    }
    lines.extend((above.height..area.height).map(|y| line(&buffer, y)));
    lines.join("\n") + "\n"
}

/// A line of a buffer, without the spaces at its end.
fn line(buffer: &Buffer, y: u16) -> String {
    let mut text = String::new();
    let mut x = 0;
    while x < buffer.area.width {
        let symbol = buffer[(x, y)].symbol();
        text.push_str(symbol);
        // A wide character is followed by cells that have no symbol of their own.
        x += u16::try_from(Line::from(symbol).width()).map_or(1, |width| width.max(1));
    }
    text.trim_end().to_owned()
}

fn title(program: &ShownProgram, model: &Model) -> Text<'static> {
    let name = Escaped(&program.name).to_string();
    let mut first = Line::from(vec![
        "top".bold(),
        format!(" {name}, {}", program.processes).into(),
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
    let mut second = String::new();
    for kind in model.kinds() {
        let all = number_of(model.count(kind), kind.noun());
        let some = match kind {
            RowKind::Probe => format!("{} on", model.enabled_count()),
            RowKind::Function => format!("{} called", model.hit_count(kind)),
            RowKind::Usdt => format!("{} hit", model.hit_count(kind)),
        };
        second += &format!("{all}, {some}; ");
    }
    let noun = if hits == 1 { "hit" } else { "hits" };
    second += &format!("{} {noun}, {}/s; ", grouped(hits), rate_text(rate));
    if let Some(untyped) = model.untyped() {
        second += &format!("{} untyped; ", grouped(untyped));
    }
    second += &format!("by {by}{reversed}");
    if !model.filter().is_empty() {
        let filter = Escaped(model.filter());
        second += &format!("; {} with \"{filter}\"", model.shown_count());
    }
    let collector = model.collector().map(collector_line);
    Text::from_iter([first, second.into()].into_iter().chain(collector))
}

/// What the collector does.
fn collector_line(figures: &CollectorFigures) -> Line<'static> {
    let mut line = Line::from("GC: ");
    if figures.events_are_paused {
        line.push_span("its runtime events are off or paused");
    } else if figures.longest.is_zero() {
        line.push_span("no pauses");
    } else {
        let (share, domain) = (100.0 * figures.share, figures.domain);
        let longest = with_unit(figures.longest);
        line.push_span(format!(
            "domain {domain} {share:.1}% in pauses, longest {longest}"
        ));
    }
    if !figures.events_are_paused {
        let allocated = bytes_text(figures.allocated);
        line.push_span(format!("; {allocated}/s allocated"));
    }
    if figures.lost_words > 0 {
        let lost = grouped(figures.lost_words);
        let noun = if figures.lost_words == 1 {
            "word"
        } else {
            "words"
        };
        line.push_span(format!("; {lost} {noun} of events lost").red());
    }
    line
}

fn draw_table(
    frame: &mut Frame<'_>,
    area: Rect,
    program: &ShownProgram,
    model: &Model,
    scroll: &mut Scroll,
) {
    // The first line has the titles of the columns, if there is room for more than a row.
    let titles = usize::from(area.height >= MIN_TABLE_HEIGHT);
    scroll.page = usize::from(area.height) - titles;
    scroll.first = first_row(model, *scroll);
    let mut table = table(program, model, area.width, scroll.first, scroll.page);
    if titles == 0 {
        table = table.header(Row::default().height(0));
    }
    frame.render_widget(table, area);
}

/// Some of the rows, below the titles of their columns.
fn table(
    program: &ShownProgram,
    model: &Model,
    width: u16,
    first: usize,
    count: usize,
) -> Table<'static> {
    let columns = columns(model, width);
    let shown = COLUMNS
        .iter()
        .filter(|(column, ..)| columns.contains(column));
    let history = history_width(width);
    let rates = || model.rows(first, count).map(|row| row.figures.rate);
    let (mut widths, mut titles) = (Vec::new(), Vec::new());
    let mut name_width = width;
    for (column, least, title) in shown {
        let of_column = match column {
            Column::Name => 0,
            Column::History => history,
            // There is no other column that could be left out.
            Column::Rate if needed(&columns) > width => rate_width(rates(), title),
            _ => *least,
        };
        widths.push(match column {
            Column::Name => Constraint::Fill(1),
            _ => Constraint::Length(of_column),
        });
        if *column != Column::Name {
            name_width = name_width.saturating_sub(of_column + GAP);
        }
        let title = match column {
            Column::Name => name_title(model),
            _ => (*title).to_owned(),
        };
        titles.push(Cell::from(aligned(*column, title)));
    }
    let (name_width, history) = (usize::from(name_width), usize::from(history));
    let rows = model.rows(first, count).map(|row| {
        let cells = columns.iter().map(|&column| {
            let text = match column {
                Column::Name => clipped(row.name, name_width),
                Column::Source => row.function.map_or(String::new(), |it| {
                    source_text(&program.sources.of_function(it))
                }),
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
    Table::new(rows.collect::<Vec<_>>(), widths)
        .header(Row::new(titles).style(Style::new().bold()))
        .column_spacing(GAP)
}

fn name_title(model: &Model) -> String {
    let kinds = model.kinds().into_iter();
    let kinds: Vec<String> = kinds.map(|it| it.noun().to_uppercase()).collect();
    kinds.join(", ")
}

/// A source line that fits into its column: of a long one the end, which has the line's number.
fn source_text(source: &str) -> String {
    let escaped = Escaped(source).to_string();
    let mut rest = escaped.as_str();
    if Line::from(rest).width() <= SOURCE_WIDTH.into() {
        return escaped;
    }
    while Line::from(rest).width() >= SOURCE_WIDTH.into() {
        let mut characters = rest.chars();
        characters.next();
        rest = characters.as_str();
    }
    format!("…{rest}")
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

/// The columns that fit and say something, the least important left out first.
fn columns(model: &Model, width: u16) -> Vec<Column> {
    let mut columns: Vec<Column> = COLUMNS.iter().map(|(column, ..)| *column).collect();
    let kinds = model.kinds();
    columns.retain(|column| match column {
        Column::Source => kinds != [RowKind::Probe],
        Column::State => kinds.contains(&RowKind::Probe),
        _ => true,
    });
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

/// The width that rates need.
fn rate_width(rates: impl Iterator<Item = f64>, title: &str) -> u16 {
    let widths = rates.map(|rate| rate_text(rate).len());
    widths.fold(title.len(), usize::max) as u16
}

/// The width of sparklines: the least width, and half of the columns that the terminal has beyond
/// 100, but no more than [`HISTORY_LEN`].
fn history_width(width: u16) -> u16 {
    let spare = width.saturating_sub(100) / 2;
    MIN_HISTORY_WIDTH
        .saturating_add(spare)
        .min(HISTORY_LEN as u16)
}

fn aligned(column: Column, text: String) -> Text<'static> {
    let alignment = match column {
        Column::Name | Column::Source | Column::State => Alignment::Left,
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
