//! [`Model`]: what is shown, and how samples and keys change it. It knows neither a process nor a
//! terminal.

use std::collections::VecDeque;
use std::time::Duration;

use probes_lib::{LiveAddr, State};

use super::keys::KeyPress;
use crate::output::Evidence;
use crate::text::TERMINAL_LINES;

/// How many samples back a sparkline goes.
pub(super) const HISTORY_LEN: usize = 60;

/// The longest filter that can be typed, in characters.
const MAX_FILTER_LEN: usize = 64;

/// What is shown.
#[derive(Debug)]
pub(super) struct Model {
    /// In the order of their names.
    points: Vec<Point>,
    now: Readings,
    /// While paused: the readings that are shown instead of `now`.
    frozen: Option<Readings>,
    /// When the last sample was, since the beginning.
    at: Duration,
    sort: Sort,
    is_reversed: bool,
    filter: String,
    /// The filter before it was changed, while it is typed.
    filter_before_typing: Option<String>,
    /// The indices of the points that the filter lets pass, in the order in which they are shown.
    shown: Vec<usize>,
    /// The index of the selected point, which stays selected when the order changes.
    selected: Option<usize>,
    /// Which page of help is shown.
    help_page: Option<usize>,
    message: Option<String>,
    /// What is wrong with the figures.
    caution: Option<String>,
    /// Whether the runtime could write events of its collector, and does not.
    are_events_off: bool,
}

/// A probe or a function.
#[derive(Debug)]
struct Point {
    name: String,
    state: Option<State>,
    function: Option<CountedFunction>,
}

impl Point {
    fn kind(&self) -> RowKind {
        match &self.function {
            None => RowKind::Probe,
            Some(it) if it.is_usdt => RowKind::Usdt,
            Some(_) => RowKind::Function,
        }
    }

    /// Its hits, from those of probes by their names, and from those of functions.
    fn hits(&self, probes: impl Fn(&str) -> Option<u64>, functions: &[u64]) -> Option<u64> {
        match self.function {
            None => probes(&self.name),
            Some(function) => functions.get(function.index).copied(),
        }
    }
}

/// A function, or a site of a USDT probe, that is counted.
#[derive(Clone, Copy, Debug)]
struct CountedFunction {
    /// Its index among the counted functions.
    index: usize,
    address: LiveAddr,
    is_usdt: bool,
}

/// A row to be: a function, or a site of a USDT probe.
#[derive(Clone, Debug)]
pub(super) struct NewRow {
    pub(super) name: String,
    pub(super) address: LiveAddr,
    pub(super) is_usdt: bool,
}

/// What a row shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RowKind {
    /// A probe of OCaml.
    Probe,
    /// A function.
    Function,
    /// A site of a USDT probe of another provider.
    Usdt,
}

impl RowKind {
    /// In the order in which they are named.
    const ALL: [RowKind; 3] = [RowKind::Probe, RowKind::Function, RowKind::Usdt];

    pub(super) fn noun(self) -> &'static str {
        match self {
            RowKind::Probe => "probe",
            RowKind::Function => "function",
            RowKind::Usdt => "USDT site",
        }
    }
}

/// What was counted and timed.
#[derive(Clone, Debug, Default)]
struct Readings {
    /// In the order of `points`.
    figures: Vec<HitFigures>,
    /// Hits that are not counted because `-where` has no answer for them; `None` without it.
    untyped: Option<u64>,
    /// In the order in which the pairs were given.
    times: Vec<PairLatency>,
    /// `None` if there are no runtime events.
    collector: Option<CollectorFigures>,
}

/// The times of a pair, from the beginning.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct PairLatency {
    pub(super) start: String,
    pub(super) stop: String,
    /// How many latencies were measured.
    pub(super) count: u64,
    pub(super) mean: Duration,
    pub(super) p50: Duration,
    pub(super) p99: Duration,
    pub(super) max: Duration,
    pub(super) evidence: Evidence,
}

/// What the garbage collector has done since the sample before.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct CollectorFigures {
    /// The domain that was in pauses for longest.
    pub(super) domain: u32,
    /// Its share of the time in pauses, from 0 to 1.
    pub(super) share: f64,
    /// The longest of the pauses that have ended since then, or are under way, in any domain.
    pub(super) longest: Duration,
    /// Bytes a second, of all domains.
    pub(super) allocated: f64,
    /// Words of events that were lost since the beginning.
    pub(super) lost_words: u64,
    /// Whether events are off or paused.
    pub(super) events_are_paused: bool,
}

/// The figures of one probe or function.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct HitFigures {
    /// From the beginning.
    pub(super) hits: u64,
    /// Hits a second, since the sample before.
    pub(super) rate: f64,
    /// Its share of all hits since then, from 0 to 1.
    pub(super) share: f64,
    /// The rates of the last samples, the latest at the end.
    pub(super) history: VecDeque<f64>,
}

/// What the rows are sorted by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sort {
    Rate,
    Hits,
    Name,
}

/// A line of the table.
#[derive(Debug)]
pub(super) struct TableRow<'m> {
    pub(super) name: &'m str,
    pub(super) state: Option<State>,
    /// Where it is in the process, if it is a function.
    pub(super) function: Option<LiveAddr>,
    pub(super) figures: &'m HitFigures,
    pub(super) is_selected: bool,
}

/// What a key asks for that the model cannot do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Request {
    Quit,
    /// To switch this probe on or off.
    Switch {
        name: String,
        on: bool,
    },
    Suspend,
    Redraw,
}

impl Model {
    /// A model of these probes and functions, without any hits.
    pub(super) fn new<'n>(
        probes: impl IntoIterator<Item = &'n str>,
        functions: impl IntoIterator<Item = &'n NewRow>,
    ) -> Model {
        let point = |name: &str, function| Point {
            name: name.to_owned(),
            state: None,
            function,
        };
        let probes = probes.into_iter().map(|name| point(name, None));
        let mut points: Vec<Point> = probes.collect();
        let functions = functions.into_iter().enumerate().map(|(index, row)| {
            let function = CountedFunction {
                index,
                address: row.address,
                is_usdt: row.is_usdt,
            };
            point(&row.name, Some(function))
        });
        points.extend(functions);
        points.sort_by(|one, other| one.name.cmp(&other.name));
        let mut model = Model {
            now: Readings {
                figures: vec![HitFigures::default(); points.len()],
                ..Readings::default()
            },
            points,
            frozen: None,
            at: Duration::ZERO,
            sort: Sort::Rate,
            is_reversed: false,
            filter: String::new(),
            filter_before_typing: None,
            shown: Vec::new(),
            selected: None,
            help_page: None,
            message: None,
            caution: None,
            are_events_off: false,
        };
        model.arrange();
        model
    }

    /// Sets the hits before the first interval; the arguments are those of [`Model::set_counts`]. Rates are those since
    /// then: of several processes, some have been observed for longer than others.
    pub(super) fn begin(
        &mut self,
        at: Duration,
        hits: impl Fn(&str) -> Option<u64>,
        functions: &[u64],
    ) {
        for (point, figures) in self.points.iter().zip(&mut self.now.figures) {
            figures.hits = point.hits(&hits, functions).unwrap_or_default();
        }
        self.at = at;
    }

    /// Sets the hits since the beginning, as they were at `at`: `hits` returns those of a probe, by its name;
    /// `functions` are those of the functions, in the order in which these were given.
    pub(super) fn set_counts(
        &mut self,
        at: Duration,
        hits: impl Fn(&str) -> Option<u64>,
        functions: &[u64],
    ) {
        let seconds = at.saturating_sub(self.at).as_secs_f64();
        let mut total = 0.0;
        for (point, figures) in self.points.iter().zip(&mut self.now.figures) {
            let hits = point.hits(&hits, functions).unwrap_or(figures.hits);
            let new = hits.saturating_sub(figures.hits) as f64;
            figures.hits = hits;
            figures.rate = new / seconds.max(0.001);
            if figures.history.len() == HISTORY_LEN {
                figures.history.pop_front();
            }
            figures.history.push_back(figures.rate);
            total += figures.rate;
        }
        for figures in &mut self.now.figures {
            figures.share = figures.rate / total.max(f64::MIN_POSITIVE);
        }
        self.at = at;
        if self.frozen.is_none() {
            self.arrange();
        }
    }

    /// Sets how many hits are not counted because `-where` has no answer for them.
    pub(super) fn set_untyped(&mut self, untyped: Option<u64>) {
        self.now.untyped = untyped;
    }

    /// Sets the times of all pairs.
    pub(super) fn set_times(&mut self, times: Vec<PairLatency>) {
        self.now.times = times;
    }

    /// Sets the figures of the collector.
    pub(super) fn set_collector(&mut self, collector: Option<CollectorFigures>) {
        self.now.collector = collector;
    }

    /// Notes that the runtime could write events of its collector, and does not.
    pub(super) fn set_events_off(&mut self) {
        self.are_events_off = true;
    }

    /// Sets the states of the probes.
    pub(super) fn set_states(&mut self, state: impl Fn(&str) -> Option<State>) {
        let is_probe = |point: &&mut Point| point.function.is_none();
        for probe in self.points.iter_mut().filter(is_probe) {
            probe.state = state(&probe.name);
        }
    }

    /// Shows a message until the next key.
    pub(super) fn show_message(&mut self, message: impl Into<String>) {
        self.message = Some(message.into());
    }

    /// Shows what is wrong with the figures, as long as it is.
    pub(super) fn set_caution(&mut self, caution: Option<String>) {
        self.caution = caution;
    }

    /// Handles a key; a page has `rows` rows.
    pub(super) fn press(&mut self, key: KeyPress, rows: usize) -> Option<Request> {
        self.message = None;
        match key {
            KeyPress::Control('c') => return Some(Request::Quit),
            KeyPress::Control('z') => return Some(Request::Suspend),
            KeyPress::Control('l') => return Some(Request::Redraw),
            _ if self.filter_before_typing.is_some() => self.type_filter(key),
            KeyPress::Escape if self.help_page.is_some() => self.help_page = None,
            KeyPress::Escape if !self.filter.is_empty() => {
                self.filter.clear();
                self.arrange();
            }
            KeyPress::Character('q') | KeyPress::Escape => return Some(Request::Quit),
            KeyPress::Character('e' | ' ') | KeyPress::Enter => return self.switch(),
            KeyPress::Character('s') => {
                self.sort = self.sort.next();
                self.is_reversed = false;
                self.arrange();
            }
            KeyPress::Character('r') => {
                self.is_reversed = !self.is_reversed;
                self.arrange();
            }
            KeyPress::Character('/') => self.filter_before_typing = Some(self.filter.clone()),
            KeyPress::Character('p') => {
                if self.frozen.is_none() {
                    self.frozen = Some(self.now.clone());
                } else {
                    self.resume();
                }
            }
            KeyPress::Character('?') => {
                self.help_page = Some(self.help_page.map_or(0, |page| page + 1));
            }
            _ => self.select(key, rows.max(1)),
        }
        None
    }

    fn type_filter(&mut self, key: KeyPress) {
        match key {
            KeyPress::Enter => self.filter_before_typing = None,
            KeyPress::Escape => self.filter = self.filter_before_typing.take().unwrap_or_default(),
            KeyPress::Backspace => drop(self.filter.pop()),
            KeyPress::Control('u') => self.filter.clear(),
            KeyPress::Character(character) if self.filter.chars().count() < MAX_FILTER_LEN => {
                self.filter.push(character);
            }
            _ => {}
        }
        self.arrange();
    }

    /// Shows the latest figures again, after a pause.
    pub(super) fn resume(&mut self) {
        self.frozen = None;
        self.arrange();
    }

    fn switch(&mut self) -> Option<Request> {
        if let ([only], None) = (self.shown.as_slice(), self.selected) {
            self.selected = Some(*only);
        }
        let Some(probe) = self.selected.map(|selected| &self.points[selected]) else {
            self.show_message(if self.shown.is_empty() && !self.filter.is_empty() {
                "no row has the filter in its name: / changes it"
            } else {
                "no probe is selected: the arrow keys select one"
            });
            return None;
        };
        if probe.kind() != RowKind::Probe {
            let message = format!(
                "{} is a {}: only probes of OCaml can be enabled or disabled",
                probe.name,
                probe.kind().noun()
            );
            self.show_message(message);
            return None;
        }
        Some(Request::Switch {
            name: probe.name.clone(),
            on: probe.state != Some(State::Enabled),
        })
    }

    fn select(&mut self, key: KeyPress, page: usize) {
        let Some(last) = self.shown.len().checked_sub(1) else {
            return;
        };
        let row = match (key, self.selected_row()) {
            (KeyPress::Down | KeyPress::Character('j') | KeyPress::PageDown, None) => 0,
            (KeyPress::Up | KeyPress::Character('k') | KeyPress::PageUp, None) => 0,
            (KeyPress::Down | KeyPress::Character('j'), Some(row)) => row + 1,
            (KeyPress::Up | KeyPress::Character('k'), Some(row)) => row.saturating_sub(1),
            (KeyPress::PageDown, Some(row)) => row.saturating_add(page),
            (KeyPress::PageUp, Some(row)) => row.saturating_sub(page),
            (KeyPress::Home, _) => 0,
            (KeyPress::End, _) => last,
            _ => return,
        };
        self.selected = Some(self.shown[row.min(last)]);
    }

    /// Filters and sorts.
    fn arrange(&mut self) {
        let before = self.selected_row();
        let figures = &self.readings().figures;
        let filter = self.filter.to_lowercase();
        let are_many = self.points.len() - self.count(RowKind::Probe) > TERMINAL_LINES;
        let passes = |&point: &usize| {
            let Point { name, function, .. } = &self.points[point];
            // As in `count`: of many functions, those without calls are left out.
            let is_idle = are_many && function.is_some() && figures[point].hits == 0;
            !is_idle && (filter.is_empty() || name.to_lowercase().contains(&filter))
        };
        let mut shown: Vec<usize> = (0..self.points.len()).filter(passes).collect();
        // Points with the same rate, such as 0 when a program is idle, are sorted by all their hits. Equal ones stay in
        // the order of their names.
        shown.sort_by(|&one, &other| {
            let by_hits = figures[other].hits.cmp(&figures[one].hits);
            let order = match self.sort {
                Sort::Rate => {
                    let by_rate = figures[other].rate.total_cmp(&figures[one].rate);
                    by_rate.then(by_hits)
                }
                Sort::Hits => by_hits,
                Sort::Name => one.cmp(&other),
            };
            if self.is_reversed {
                order.reverse()
            } else {
                order
            }
        });
        self.shown = shown;
        if self.selected_row().is_none() {
            // The selected point was filtered out: select the one that is in its row now.
            let last = self.shown.len().checked_sub(1);
            let row = before.and_then(|row| Some(row.min(last?)));
            self.selected = row.map(|row| self.shown[row]);
        }
    }

    /// The kinds of which there may be rows: that of probes, if there is nothing.
    pub(super) fn kinds(&self) -> Vec<RowKind> {
        let is_there = |it: &RowKind| match it {
            RowKind::Probe if self.points.is_empty() => true,
            _ => self.points.iter().any(|point| point.kind() == *it),
        };
        RowKind::ALL.into_iter().filter(is_there).collect()
    }

    /// How many of a kind there are, shown or not.
    pub(super) fn count(&self, kind: RowKind) -> usize {
        let of_kind = self.points.iter().filter(|it| it.kind() == kind);
        of_kind.count()
    }

    /// How many of a kind were called, or hit.
    pub(super) fn hit_count(&self, kind: RowKind) -> usize {
        let points = self.points.iter().zip(&self.readings().figures);
        let hit = points.filter(|(point, figures)| point.kind() == kind && figures.hits > 0);
        hit.count()
    }

    /// How many probes are enabled.
    pub(super) fn enabled_count(&self) -> usize {
        let is_on = |point: &&Point| point.state == Some(State::Enabled);
        self.points.iter().filter(is_on).count()
    }

    /// How many hits are not counted because `-where` has no answer for them; `None` without it.
    pub(super) fn untyped(&self) -> Option<u64> {
        self.readings().untyped
    }

    /// All hits together, and their rate.
    pub(super) fn totals(&self) -> (u64, f64) {
        let figures = self.readings().figures.iter();
        figures.fold((0, 0.0), |(hits, rate), one| {
            (u64::saturating_add(hits, one.hits), rate + one.rate)
        })
    }

    /// How many rows there are that the filter lets pass.
    pub(super) fn shown_count(&self) -> usize {
        self.shown.len()
    }

    /// Which row is selected, of those that are shown.
    pub(super) fn selected_row(&self) -> Option<usize> {
        let selected = self.selected?;
        self.shown.iter().position(|&point| point == selected)
    }

    /// Some of the rows that are shown.
    pub(super) fn rows(&self, from: usize, count: usize) -> impl Iterator<Item = TableRow<'_>> {
        let shown = self.shown.iter().skip(from).take(count);
        shown.map(|&point| TableRow {
            name: &self.points[point].name,
            state: self.points[point].state,
            function: self.points[point].function.map(|function| function.address),
            figures: &self.readings().figures[point],
            is_selected: self.selected == Some(point),
        })
    }

    /// The times of each pair.
    pub(super) fn times(&self) -> &[PairLatency] {
        &self.readings().times
    }

    /// The figures of the collector, if there are any.
    pub(super) fn collector(&self) -> Option<&CollectorFigures> {
        self.readings().collector.as_ref()
    }

    pub(super) fn are_events_off(&self) -> bool {
        self.are_events_off
    }

    fn readings(&self) -> &Readings {
        self.frozen.as_ref().unwrap_or(&self.now)
    }

    pub(super) fn sort(&self) -> (Sort, bool) {
        (self.sort, self.is_reversed)
    }

    pub(super) fn filter(&self) -> &str {
        &self.filter
    }

    pub(super) fn is_typing(&self) -> bool {
        self.filter_before_typing.is_some()
    }

    pub(super) fn is_paused(&self) -> bool {
        self.frozen.is_some()
    }

    /// The requested page of the help, which may have fewer pages.
    pub(super) fn help_page(&self) -> Option<usize> {
        self.help_page
    }

    /// Closes the help after the last of its pages.
    pub(super) fn close_help_after(&mut self, pages: usize) {
        self.help_page = self.help_page.filter(|page| *page < pages);
    }

    pub(super) fn caution(&self) -> Option<&str> {
        self.caution.as_deref()
    }

    pub(super) fn message(&self) -> Option<&str> {
        self.message.as_deref()
    }
}

impl Sort {
    fn next(self) -> Sort {
        match self {
            Sort::Rate => Sort::Hits,
            Sort::Hits => Sort::Name,
            Sort::Name => Sort::Rate,
        }
    }
}

#[cfg(test)]
mod tests;
