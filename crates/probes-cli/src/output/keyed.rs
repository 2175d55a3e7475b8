//! Hits by keys: what all formats show of them. The field names are those of the JSON output.

use std::collections::{BTreeSet, HashMap};
use std::fmt::Write;
use std::time::Duration;

use probes_lib::{Counts, Key, KeyedCounts, LiveAddr, Observer, RefusedFunction, Target};
use serde::Serialize;

use super::FunctionSources;
use super::format::{VERSION, seconds, seconds_or_null, time_prefix};
use super::function_sources::CallSite;
use super::hits::Text;
use super::refused::RefusedView;
use super::subjects::Subjects;
use super::table;
use super::view::text;
use crate::question::CountedBy;
use crate::text::{Escaped, TERMINAL_LINES, number_of, ocaml_string};

/// The hits by keys that one observer or several have counted, and the functions that are not counted.
#[derive(Clone)]
pub(crate) struct KeyedReading {
    counts: KeyedCounts,
    refused: Vec<RefusedFunction>,
    /// The keys of the probes and functions that are counted by name, whether they were hit or not.
    named: BTreeSet<Vec<Key>>,
    /// For how long hits were counted before the time of the observation began: of several processes, the first is
    /// observed for longer.
    extra_time: Duration,
    /// Of several processes.
    rates: Option<KeyedRates>,
}

/// How many hits a second there were since the beginning.
#[derive(Clone, Default)]
struct KeyedRates {
    keys: HashMap<Vec<Key>, f64>,
    other: f64,
    untyped: f64,
}

impl KeyedReading {
    pub(crate) fn of(observer: &mut Observer) -> Result<KeyedReading, probes_lib::Error> {
        Ok(KeyedReading::last(
            observer.keyed_counts()?,
            observer.refused(),
        ))
    }

    /// The hits of a process by the names of its probes and functions.
    pub(crate) fn by_name(counts: &Counts) -> KeyedReading {
        let functions = counts.functions().map(|it| it.name);
        let names = counts.probes().map(|(name, _)| name).chain(functions);
        KeyedReading {
            named: names.map(|it| vec![Key::Probe(it.to_owned())]).collect(),
            ..KeyedReading::last(Some(KeyedCounts::by_name(counts)), counts.refused())
        }
    }

    /// The same of a process that was observed for so long before the time of the observation began.
    pub(crate) fn with_extra_time(self, extra_time: Duration) -> KeyedReading {
        KeyedReading { extra_time, ..self }
    }

    /// The hits of several processes together, so long after the beginning. If they are `distinguished`, the pid is
    /// the first part of each key.
    pub(crate) fn of_processes(
        each: &[(i32, KeyedReading)],
        distinguished: bool,
        at: Duration,
    ) -> KeyedReading {
        let counts = each.iter().map(|(pid, reading)| (*pid, &reading.counts));
        let (mut rates, mut named) = (KeyedRates::default(), BTreeSet::new());
        for (pid, reading) in each {
            let process = distinguished.then_some(Key::Process(*pid));
            let keys = reading.named.iter();
            named.extend(keys.map(|key| process.iter().chain(key).cloned().collect()));
            let during = at + reading.extra_time;
            rates.other += rate(reading.counts.other(), during);
            rates.untyped += rate(reading.counts.untyped(), during);
            for counted in reading.counts.keys() {
                let key = process.iter().chain(&counted.key).cloned();
                *rates.keys.entry(key.collect()).or_default() += rate(counted.hits, during);
            }
        }
        KeyedReading {
            counts: KeyedCounts::of_processes(counts, distinguished),
            refused: each.iter().flat_map(|(_, it)| it.refused.clone()).collect(),
            named,
            extra_time: Duration::ZERO,
            rates: Some(rates),
        }
    }

    /// A reading made of counts that were read already; these are `None` if hits are not counted by keys.
    pub(crate) fn last(counts: Option<KeyedCounts>, refused: &[RefusedFunction]) -> KeyedReading {
        KeyedReading {
            counts: counts.unwrap_or_default(),
            refused: refused.to_vec(),
            named: BTreeSet::new(),
            extra_time: Duration::ZERO,
            rates: None,
        }
    }
}

/// Hits a second.
fn rate(hits: u64, during: Duration) -> f64 {
    hits as f64 / during.as_secs_f64().max(f64::MIN_POSITIVE)
}

/// The hits of the probes and functions of a process by their keys, most first.
#[derive(Serialize)]
#[serde(tag = "type", rename = "keyed_count")]
pub(crate) struct KeyedReport<'k> {
    version: u32,
    #[serde(flatten)]
    subjects: Subjects<'k>,
    /// The time since the observation began; `None` in the report of the total.
    #[serde(serialize_with = "seconds_or_null")]
    at: Option<Duration>,
    /// How long the hits were counted.
    #[serde(serialize_with = "seconds")]
    seconds: Duration,
    /// The expressions.
    by: Vec<&'k str>,
    keys: Vec<KeyRow<'k>>,
    /// What is counted by name, if there are no hits at all.
    #[serde(skip)]
    unhit: Vec<Vec<KeyView<'k>>>,
    /// Hits of keys for which there was no room.
    other: u64,
    /// Hits without a key.
    untyped: u64,
    #[serde(skip)]
    other_rate: f64,
    #[serde(skip)]
    untyped_rate: f64,
    /// The functions that are not counted.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    refused: Vec<RefusedView<'k>>,
    #[serde(skip)]
    shown: usize,
    /// Whether there may be hits of other keys, or without one.
    #[serde(skip)]
    has_others: bool,
}

#[derive(Serialize)]
struct KeyRow<'k> {
    key: Vec<KeyView<'k>>,
    hits: u64,
    /// Hits a second.
    rate: f64,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum KeyView<'k> {
    Int(i128),
    String(Text),
    Thread(u32),
    Caller(CallerView),
    Probe(&'k str),
    Process(i32),
}

#[derive(Debug, Serialize)]
pub(super) struct CallerView {
    #[serde(serialize_with = "text")]
    address: LiveAddr,
    #[serde(flatten)]
    site: Option<CallSite>,
}

impl<'k> KeyedReport<'k> {
    /// The hits since `before`, which was `elapsed` ago; `sources` name callers.
    pub(crate) fn new(
        targets: &'k [Target],
        reading: &'k KeyedReading,
        before: Option<&KeyedReading>,
        elapsed: Duration,
        by: &'k CountedBy,
        sources: &FunctionSources,
    ) -> KeyedReport<'k> {
        let rates = reading.rates.as_ref().filter(|_| before.is_none());
        let known = before.iter().flat_map(|before| before.counts.keys());
        let known: HashMap<&[Key], u64> = known.map(|it| (&it.key[..], it.hits)).collect();
        let rows = reading.counts.keys().iter().map(|keyed| {
            let before = known.get(&keyed.key[..]).copied().unwrap_or(0);
            let hits = keyed.hits.saturating_sub(before);
            KeyRow {
                key: keyed
                    .key
                    .iter()
                    .map(|it| KeyView::of(it, sources))
                    .collect(),
                hits,
                rate: rates
                    .and_then(|rates| rates.keys.get(&keyed.key).copied())
                    .unwrap_or_else(|| rate(hits, elapsed)),
            }
        });
        let mut keys: Vec<KeyRow<'k>> = rows.filter(|row| row.hits > 0).collect();
        // The sort is stable: keys with equally many hits stay in the order of the keys.
        keys.sort_by_key(|row| std::cmp::Reverse(row.hits));
        let since = |of: fn(&KeyedCounts) -> u64| {
            let before = before.map_or(0, |before| of(&before.counts));
            of(&reading.counts).saturating_sub(before)
        };
        let (other, untyped) = (since(KeyedCounts::other), since(KeyedCounts::untyped));
        let has_hits = !keys.is_empty() || other > 0 || untyped > 0;
        let unhit = reading.named.iter().filter(|_| !has_hits);
        let view = |key: &'k Vec<Key>| key.iter().map(|it| KeyView::of(it, sources)).collect();
        let unhit = unhit.map(view).collect();
        KeyedReport {
            version: VERSION,
            subjects: Subjects::of(targets),
            at: None,
            seconds: elapsed,
            by: by.texts().collect(),
            keys,
            unhit,
            other,
            untyped,
            other_rate: rates.map_or_else(|| rate(other, elapsed), |it| it.other),
            untyped_rate: rates.map_or_else(|| rate(untyped, elapsed), |it| it.untyped),
            refused: reading.refused.iter().map(RefusedView::of).collect(),
            shown: by.shown(),
            has_others: by.has_expressions(),
        }
    }

    /// Makes it a report in between, `at` after the beginning: only the last report has the refused functions.
    pub(crate) fn at(mut self, at: Duration) -> KeyedReport<'k> {
        self.at = Some(at);
        self.refused.clear();
        self
    }

    /// How many hits there are, if all are untyped.
    pub(crate) fn only_untyped(&self) -> Option<u64> {
        let are_typed = !self.keys.is_empty() || self.other > 0;
        (self.untyped > 0 && !are_typed).then_some(self.untyped)
    }

    /// How many hits have keys that found no room.
    pub(crate) fn of_other_keys(&self) -> u64 {
        self.other
    }

    /// How many keys there are, and what their hits add up to: `12 keys, 4711 hits, 0 other, 0 untyped`.
    pub(crate) fn sum(&self) -> (usize, String) {
        let keys = number_of(self.keys.len(), "key");
        let hits = self.keys.iter().map(|it| it.hits);
        let hits = hits.fold(0, u64::saturating_add);
        let (hits, other, untyped) = (number_of(hits, "hit"), self.other, self.untyped);
        let sum = format!("{keys}, {hits}, {other} other, {untyped} untyped");
        (self.keys.len(), sum)
    }

    /// The lines below those of the keys that are shown: how many hits, and of what (`of 3 more keys`, `other`,
    /// `untyped`).
    fn rest(&self) -> Vec<(u64, f64, String)> {
        let mut rest = Vec::new();
        let hidden = self.keys.get(self.shown..).unwrap_or_default();
        if !hidden.is_empty() {
            let hits = hidden.iter().map(|it| it.hits);
            let rate = hidden.iter().map(|it| it.rate).sum();
            let keys = format!("of {} more", number_of(hidden.len(), "key"));
            rest.push((hits.fold(0, u64::saturating_add), rate, keys));
        }
        if !self.shows_unhit() {
            let keys = number_of(self.unhit.len(), "key");
            rest.push((0, 0.0, format!("of {keys}")));
        }
        // An answer without a line would look like no answer.
        let has_others = self.has_others || (self.keys.is_empty() && self.unhit.is_empty());
        if has_others {
            rest.push((self.other, self.other_rate, "other".to_owned()));
        }
        if has_others || self.untyped > 0 {
            rest.push((self.untyped, self.untyped_rate, "untyped".to_owned()));
        }
        rest
    }

    /// The keys that are shown, with their hits and hits a second: those with hits; or, if nothing was hit, all that
    /// are counted by name, unless they are many.
    fn shown_keys(&self) -> impl Iterator<Item = (Vec<String>, u64, f64)> {
        let hit = self.keys.iter().take(self.shown);
        let hit = hit.map(|row| (&row.key, row.hits, row.rate));
        let unhit = self.unhit.iter().filter(|_| self.shows_unhit());
        let all = hit.chain(unhit.map(|key| (key, 0, 0.0)));
        all.map(|(key, hits, rate)| (key.iter().map(KeyView::plain).collect(), hits, rate))
    }

    /// Whether each key without hits is shown.
    fn shows_unhit(&self) -> bool {
        self.unhit.len() <= self.shown.min(TERMINAL_LINES)
    }

    /// A line for each key that is shown, and for what is left.
    pub(super) fn plain(&self) -> String {
        let (mut text, at) = (String::new(), time_prefix(self.at));
        for (key, hits, rate) in self.shown_keys() {
            // Writing to a string does not fail.
            let _ = writeln!(text, "{at}{hits} {rate:.1} {}", key.join(" "));
        }
        for (hits, rate, what) in self.rest() {
            let _ = writeln!(text, "{at}{hits} {rate:.1} {what}");
        }
        text
    }

    /// A table; with the time since the beginning, if there is one.
    pub(crate) fn table(&self) -> String {
        let at = self.at.map(|at| format!("{:.1}", at.as_secs_f64()));
        let mut head: Vec<String> = at.iter().map(|_| "seconds".to_owned()).collect();
        head.extend(self.by.iter().map(|it| Escaped(it).to_string()));
        head.extend(["hits", "hits/s"].map(str::to_owned));
        let row = |key: Vec<String>, hits: u64, rate: f64| {
            let cells = at.iter().cloned().chain(key);
            let cells = cells.chain([hits.to_string(), format!("{rate:.0}")]);
            cells.collect::<Vec<_>>()
        };
        let shown = self.shown_keys();
        let shown = shown.map(|(key, hits, rate)| row(key, hits, rate));
        let rest = self.rest().into_iter().map(|(hits, rate, what)| {
            let mut key = vec![String::new(); self.by.len()];
            key[0] = what;
            row(key, hits, rate)
        });
        let head: Vec<&str> = head.iter().map(String::as_str).collect();
        table::table(&head, shown.chain(rest))
    }
}

impl<'k> KeyView<'k> {
    pub(super) fn of(key: &'k Key, sources: &FunctionSources) -> KeyView<'k> {
        match key {
            Key::Integer(number) => KeyView::Int(*number),
            Key::Text { bytes, is_whole } => KeyView::String(Text::of(bytes, *is_whole)),
            Key::Thread(tid) => KeyView::Thread(*tid),
            Key::Caller(address) => KeyView::Caller(CallerView {
                address: *address,
                site: sources.call_site(*address),
            }),
            Key::Probe(name) => KeyView::Probe(name),
            Key::Process(pid) => KeyView::Process(*pid),
            // The type is non-exhaustive; the library makes no other keys yet.
            _ => KeyView::Probe("?"),
        }
    }

    pub(super) fn plain(&self) -> String {
        match self {
            KeyView::Int(number) => number.to_string(),
            KeyView::String(text) => {
                let more = if text.is_whole { "" } else { "..." };
                ocaml_string(&text.raw) + more
            }
            KeyView::Thread(tid) => tid.to_string(),
            KeyView::Process(pid) => pid.to_string(),
            KeyView::Caller(caller) => {
                let site = caller.site.as_ref().and_then(CallSite::short);
                site.unwrap_or_else(|| caller.address.to_string())
            }
            KeyView::Probe(name) => Escaped(name).to_string(),
        }
    }
}
