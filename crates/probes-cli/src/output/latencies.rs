//! The latencies of pairs (the times from a start to a stop) and of functions (the times of calls), in one shape for
//! all formats. The field names are those of the JSON output.

mod by_key;
mod functions;

use std::fmt::{self, Write};
use std::time::Duration;

use probes_lib::{
    Counts, FunctionLatency, KeyedTimes, Latency, Observer, RefusedFunction, Target, Times,
};
use serde::{Serialize, Serializer};

use self::by_key::TimesByKey;
use self::functions::TimedFunctionsView;
use super::bars;
use super::format::{ReportedFigures, VERSION, seconds, seconds_or_null, time_prefix};
use super::function_sources::FunctionSources;
use super::quantiles::Quantiles;
use super::subjects::Subjects;
use super::svg::{self, Chart};
use super::table;
use crate::clock::in_nanoseconds;
use crate::question::CountedBy;
use crate::text::{Escaped, join_first_few, number_of, number_that_were, three_digits};

/// The times of the pairs of a process.
#[derive(Debug, Serialize)]
#[serde(tag = "type", rename = "latency")]
pub(crate) struct Latencies<'l> {
    version: u32,
    #[serde(flatten)]
    processes: Subjects<'l>,
    /// The time since the observation began; `None` once it has ended.
    #[serde(serialize_with = "seconds_or_null")]
    at: Option<Duration>,
    /// For how long latencies were measured.
    #[serde(serialize_with = "seconds")]
    seconds: Duration,
    pub(super) pairs: Vec<PairRow<'l>>,
    #[serde(skip_serializing_if = "TimedFunctionsView::is_empty", flatten)]
    pub(super) functions: TimedFunctionsView<'l>,
    /// If times are distinguished by keys.
    #[serde(skip_serializing_if = "Option::is_none")]
    keyed: Option<TimesByKey<'l>>,
}

/// What was asked beside the names.
#[derive(Clone, Copy)]
pub(crate) struct TimesAsked<'a> {
    /// What names callers.
    pub(crate) sources: &'a FunctionSources,
    /// By what times are distinguished.
    pub(crate) by: Option<&'a CountedBy>,
}

/// What an observer has measured so far.
#[derive(Clone)]
pub(crate) struct LatencyReading {
    /// If processes are distinguished, each with its pid.
    pairs: Vec<(Option<i32>, Latency)>,
    functions: Vec<(Option<i32>, FunctionLatency)>,
    /// Whether functions are those of several processes together, and have no address.
    are_together: bool,
    refused: Vec<RefusedFunction>,
    keyed: Option<KeyedTimes>,
}

impl LatencyReading {
    pub(crate) fn of(observer: &mut Observer) -> Result<LatencyReading, probes_lib::Error> {
        Ok(LatencyReading {
            pairs: of_one(observer.latencies()?),
            functions: of_one(observer.function_latencies()?),
            are_together: false,
            refused: observer.refused().to_vec(),
            keyed: observer.keyed_times()?,
        })
    }

    /// The pairs and functions of several processes, by their pids: of each by itself if they are `distinguished`, else
    /// together.
    pub(crate) fn of_processes(
        each: &[(i32, LatencyReading)],
        distinguished: bool,
    ) -> LatencyReading {
        let (pairs, functions) = if distinguished {
            let pairs = each
                .iter()
                .flat_map(|(pid, reading)| of_process(*pid, &reading.pairs));
            let functions = each
                .iter()
                .flat_map(|(pid, reading)| of_process(*pid, &reading.functions));
            (pairs.collect(), functions.collect())
        } else {
            let pairs: Vec<_> = each.iter().map(|(_, it)| without_pid(&it.pairs)).collect();
            let functions: Vec<_> = each
                .iter()
                .map(|(_, it)| without_pid(&it.functions))
                .collect();
            (
                of_one(Latency::of_processes(pairs.iter().map(|it| &it[..]))),
                of_one(FunctionLatency::of_processes(
                    functions.iter().map(|it| &it[..]),
                )),
            )
        };
        let refused = each.iter().flat_map(|(_, reading)| &reading.refused);
        let keyed = each
            .iter()
            .filter_map(|(pid, it)| Some((*pid, it.keyed.as_ref()?)));
        LatencyReading {
            pairs,
            functions,
            are_together: !distinguished,
            refused: refused.cloned().collect(),
            keyed: KeyedTimes::of_processes(keyed, distinguished),
        }
    }

    /// The times of the pair with this index.
    pub(super) fn pair(&self, index: usize) -> Option<&Latency> {
        self.pairs.get(index).map(|(_, pair)| pair)
    }

    /// What it had measured when it ended.
    pub(crate) fn last(
        pairs: Vec<Latency>,
        functions: Vec<FunctionLatency>,
        keyed: Option<KeyedTimes>,
        counts: &Counts,
    ) -> LatencyReading {
        LatencyReading {
            pairs: of_one(pairs),
            functions: of_one(functions),
            are_together: false,
            refused: counts.refused().to_vec(),
            keyed,
        }
    }
}

fn of_one<T>(measured: Vec<T>) -> Vec<(Option<i32>, T)> {
    measured.into_iter().map(|it| (None, it)).collect()
}

fn of_process<T: Clone>(
    pid: i32,
    measured: &[(Option<i32>, T)],
) -> impl Iterator<Item = (Option<i32>, T)> {
    measured.iter().map(move |(_, it)| (Some(pid), it.clone()))
}

fn without_pid<T: Clone>(measured: &[(Option<i32>, T)]) -> Vec<T> {
    measured.iter().map(|(_, it)| it.clone()).collect()
}

/// A pair or a function, with its times.
pub(super) struct TimedSubject<'l> {
    pub(super) title: String,
    pub(super) summary: &'l Summary,
    /// What is wrong with the times.
    pub(super) caution: Option<String>,
    pub(super) buckets: &'l [LatencyBucket],
}

/// Figures of times.
#[derive(Debug, Serialize)]
pub(super) struct Summary {
    pub(super) count: u64,
    #[serde(rename = "mean_ns", serialize_with = "nanoseconds")]
    mean: Duration,
    #[serde(flatten)]
    quantiles: Quantiles,
}

/// The times of a pair.
#[derive(Debug, Serialize)]
pub(super) struct PairRow<'l> {
    /// If processes are distinguished.
    #[serde(skip_serializing_if = "Option::is_none")]
    pid: Option<i32>,
    pub(super) start: &'l str,
    pub(super) stop: &'l str,
    #[serde(flatten)]
    pub(super) summary: Summary,
    unmatched_starts: u64,
    unmatched_stops: u64,
    lost: u64,
    #[serde(flatten)]
    evidence: Evidence,
    /// As [`Latency::is_trusted`].
    trusted: Option<bool>,
    interleaving: Interleaving,
    untyped: u64,
    /// From the first to the last that is not empty.
    pub(super) buckets: Vec<LatencyBucket>,
}

/// Whether it was seen that events of a pair interleave in a thread, or move between threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Interleaving {
    Seen,
    NotSeen,
    /// Nothing tells the events apart, so interleaving may not be seen.
    Unknown,
}

impl Interleaving {
    fn of(latency: &Latency) -> Interleaving {
        if latency.is_trusted() == Some(false) {
            Interleaving::Seen
        } else if latency.detects_interleaving()
            && !(latency.is_by_key() && latency.is_trusted().is_none())
        {
            Interleaving::NotSeen
        } else {
            Interleaving::Unknown
        }
    }
}

/// What shows that times of a pair may not be those of an event.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub(crate) struct Evidence {
    /// How many stops show that pairs interleave.
    pub(crate) interleaved: u64,
    /// How many stops, or, by key, starts, show that pairs may interleave.
    pub(crate) doubtful: u64,
    /// At least how many events seem to move between threads.
    pub(crate) moved: u64,
    /// Whether stops find their starts by a key.
    by_key: bool,
    /// How many starts and stops have no key, if that is why times may be wrong.
    #[serde(skip)]
    without_key: u64,
    /// Whether nothing tells the events apart, if that is why times may be wrong.
    #[serde(skip)]
    pub(crate) is_unseen: bool,
}

impl Evidence {
    pub(crate) fn of(latency: &Latency) -> Evidence {
        let may_be_wrong = latency.is_trusted().is_none() && latency.doubtful() == 0;
        Evidence {
            interleaved: latency.interleaved(),
            doubtful: latency.doubtful(),
            moved: latency.moved(),
            by_key: latency.is_by_key(),
            without_key: if may_be_wrong {
                latency.without_key()
            } else {
                0
            },
            is_unseen: may_be_wrong && !latency.detects_interleaving(),
        }
    }

    /// Whether anything points to wrong times.
    pub(crate) fn is_any(self) -> bool {
        self.is_certain() || self.doubtful > 0 || self.without_key > 0
    }

    /// Whether no time can be trusted.
    pub(crate) fn is_certain(self) -> bool {
        self.interleaved > 0 || self.moved > 0
    }

    /// Why times may be wrong, the most certain first; `None` if they are trusted.
    fn doubt(self) -> Option<Doubt> {
        let many = |number: u64, doubt: fn(u64) -> Doubt| (number > 0).then(|| doubt(number));
        many(self.interleaved, Doubt::Interleaved)
            .or(many(self.moved, Doubt::Moved))
            .or(many(self.doubtful, Doubt::Doubtful))
            .or(many(self.without_key, Doubt::WithoutKey))
            .or(self.is_unseen.then_some(Doubt::Unseen))
    }

    /// Same as [`Evidence::doubt`], in one or two words, for a line about one pair; empty if the times are trusted.
    pub(super) fn short_words(self) -> &'static str {
        match self.doubt() {
            Some(Doubt::Interleaved(_) | Doubt::Moved(_)) => "untrusted",
            Some(Doubt::Doubtful(_) | Doubt::WithoutKey(_)) => "doubtful",
            Some(Doubt::Unseen) => MAY_INTERLEAVE,
            None => "",
        }
    }

    /// What to do about wrong times.
    fn advice(self) -> &'static str {
        if self.without_key > 0 {
            "use a key that all of these hits have: `ocaml-probes watch` shows their arguments"
        } else if self.by_key {
            "give a -key that differs between all events that are under way at a time; a start whose stop is skipped \
             by an exception does no harm"
        } else {
            "give -key EXPR, such as -key arg0: it says which stop belongs to which start; both probes need an \
             argument that identifies the event, in OCaml such as [@probe.args id]"
        }
    }

    /// What the evidence says about the times, in a sentence; `None` if they are trusted.
    pub(crate) fn caution(self) -> Option<String> {
        Some(match self.doubt()? {
            Doubt::Interleaved(stops) => format!(
                "no time can be trusted: pairs of a thread seem to interleave (shown by {})",
                number_of(stops, "stop")
            ),
            Doubt::Moved(events) => format!(
                "no time can be trusted: events seem to start in one thread and stop in another (shown by {} without \
                 a stop, and as many stops without a start)",
                number_of(events, "start")
            ),
            Doubt::Doubtful(starts) if self.by_key => format!(
                "either several events under way have one key, and times are wrong, or exceptions skip stops: \
                 {} had the key of an earlier start without a stop",
                number_of(starts, "start")
            ),
            Doubt::Doubtful(stops) => format!(
                "either pairs of a thread interleave, and no time can be trusted, or exceptions skip stops, and some \
                 times may be wrong: at {}, an earlier start of the stack frame waited",
                number_of(stops, "stop")
            ),
            Doubt::WithoutKey(ends) => format!(
                "some times may be wrong: {} without a key. If the stop of one event and the start of the next one \
                 with the same key are among them, the two events are taken for one",
                number_that_were(ends, "hit")
            ),
            Doubt::Unseen => UNSEEN.to_owned(),
        })
    }
}

/// Why times may be wrong, with how many hits show it.
#[derive(Clone, Copy)]
enum Doubt {
    Interleaved(u64),
    Moved(u64),
    Doubtful(u64),
    WithoutKey(u64),
    /// If events interleave, that would not be seen.
    Unseen,
}

impl Doubt {
    /// In the words of the plain format.
    fn words(self) -> String {
        match self {
            Doubt::Interleaved(many) => format!("interleaved {many} untrusted"),
            Doubt::Moved(many) => format!("moved {many} untrusted"),
            Doubt::Doubtful(many) => format!("doubtful {many}"),
            Doubt::WithoutKey(many) => format!("without_key {many}"),
            Doubt::Unseen => MAY_INTERLEAVE.to_owned(),
        }
    }

    /// In a table: whether times are trusted.
    fn cell(self) -> String {
        match self {
            Doubt::Interleaved(many) => format!("no: {many} interleaved"),
            Doubt::Moved(many) => format!("no: {many} moved"),
            Doubt::Doubtful(many) => format!("unknown: {many} doubtful"),
            Doubt::WithoutKey(many) => format!("unknown: {many} without key"),
            Doubt::Unseen => format!("unknown: {MAY_INTERLEAVE}"),
        }
    }
}

/// For times of pairs whose interleaving would not be seen.
const MAY_INTERLEAVE: &str = "may interleave";

/// The same in a sentence.
const UNSEEN: &str = "if events interleave in a thread, that may not be seen, and times are wrong";

/// How many latencies were in `from_ns..to_ns`, from a power of two to the next.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(super) struct LatencyBucket {
    pub(super) from_ns: u64,
    pub(super) to_ns: u64,
    pub(super) count: u64,
}

/// The pairs of a recording, as they were timed in the process.
#[derive(Debug, Serialize)]
#[serde(transparent)]
pub(crate) struct RecordedPairs<'l>(Vec<PairRow<'l>>);

impl<'l> RecordedPairs<'l> {
    pub(crate) fn of(pairs: &'l [Latency]) -> RecordedPairs<'l> {
        RecordedPairs(pairs.iter().map(|it| PairRow::of(None, it)).collect())
    }

    /// Same as [`Latencies::cautions`].
    pub(crate) fn cautions(&self) -> impl Iterator<Item = (String, &'static str)> {
        cautions(&self.0)
    }

    /// Same as [`Latencies::unknown`].
    pub(crate) fn unknown(&self) -> Option<String> {
        unknown(&self.0)
    }

    /// For each pair whose times may be wrong: its name, and what is seen, in the words of the plain format.
    pub(super) fn doubts(&self) -> impl Iterator<Item = (String, String)> {
        let doubt_of = |pair: &PairRow<'_>| Some((pair.name(), pair.evidence.doubt()?.words()));
        self.0.iter().filter_map(doubt_of)
    }
}

/// For each pair whose times may not be those of an event: its name and what is wrong, and what to do.
fn cautions(pairs: &[PairRow<'_>]) -> impl Iterator<Item = (String, &'static str)> {
    let doubted = pairs.iter().filter(|pair| pair.evidence.is_any());
    doubted.filter_map(|pair| {
        let caution = pair.caution()?;
        let caution = format!("{}: {caution}", pair.name());
        Some((caution, pair.evidence.advice()))
    })
}

/// A caution about the pairs that look right, but may interleave unseen.
fn unknown(pairs: &[PairRow<'_>]) -> Option<String> {
    let unseen = pairs.iter().filter(|pair| pair.evidence.is_unseen);
    let names = unseen.map(PairRow::name);
    let names: Vec<String> = names.collect();
    Some(format!("{}: {UNSEEN}", join_first_few(&names)?))
}

impl<'l> Latencies<'l> {
    /// The latencies that were measured in the time `seconds`.
    pub(crate) fn new(
        targets: &'l [Target],
        reading: &'l LatencyReading,
        seconds: Duration,
        asked: TimesAsked<'l>,
    ) -> Latencies<'l> {
        Latencies {
            version: VERSION,
            processes: Subjects::of(targets),
            at: None,
            seconds,
            pairs: reading
                .pairs
                .iter()
                .map(|(pid, latency)| PairRow::of(*pid, latency))
                .collect(),
            functions: TimedFunctionsView::of(
                &reading.functions,
                reading.are_together,
                &reading.refused,
                asked.sources,
            ),
            keyed: (reading.keyed.as_ref().zip(asked.by)).map(|(times, by)| {
                let what = match (reading.pairs.is_empty(), reading.functions.is_empty()) {
                    (true, _) => "function",
                    (false, true) => "pair",
                    (false, false) => "pair or function",
                };
                TimesByKey::of(times, by, what, asked.sources)
            }),
        }
    }

    /// For each pair whose times may not be those of an event: its name and what is wrong, and what to do.
    pub(crate) fn cautions(&self) -> impl Iterator<Item = (String, &'static str)> {
        cautions(&self.pairs)
    }

    /// A caution about the pairs that look right, but may interleave unseen.
    pub(crate) fn unknown(&self) -> Option<String> {
        unknown(&self.pairs)
    }

    /// Says how many calls have no times, because they were not recorded.
    pub(crate) fn lost_calls(&self) -> Option<String> {
        let (names, lost, calls) = self.functions.lost();
        let names = join_first_few(&names)?;
        let calls = number_of(calls, "call");
        let were = if lost == 1 { "was" } else { "were" };
        Some(format!(
            "{lost} of {calls} of {names} {were} not recorded: the figures are those of the others"
        ))
    }

    /// Says which functions can end with a jump, after which the time of a call does not run.
    pub(crate) fn that_jump(&self) -> Option<String> {
        let names = join_first_few(&self.functions.that_jump())?;
        Some(format!(
            "calls of {names} can end with a jump to another function, whose time is not part of theirs"
        ))
    }

    /// Says how many pairs have no times, because there was no room for their starts.
    pub(crate) fn lost_times(&self) -> Option<String> {
        let lost = self.pairs.iter().map(|it| it.lost);
        let lost = lost.fold(0, u64::saturating_add);
        let times = number_that_were(lost, "time");
        let why = "because there was no room for a start: the figures are those of the others";
        (lost > 0).then(|| format!("{times} not measured, {why}"))
    }

    /// How many times there are, if none has a key.
    pub(crate) fn only_without_key(&self) -> Option<u64> {
        self.keyed.as_ref()?.only_untyped()
    }

    fn table_of_pairs(&self) -> String {
        let is_matched = self
            .pairs
            .iter()
            .all(|pair| pair.unmatched_and_lost() == [0; 3]);
        let are_trusted = self.pairs.iter().all(|pair| pair.trusted == Some(true));
        let by_pid = self.pairs.iter().any(|pair| pair.pid.is_some());
        let mut head = if by_pid { vec!["pid"] } else { Vec::new() };
        head.extend(["start", "stop", "count"]);
        // Before the times: a narrow terminal cuts off the last columns.
        if !are_trusted {
            head.push("trusted");
        }
        head.extend(["mean", "p50", "p90", "p99", "p99.9", "max"]);
        if !is_matched {
            head.extend(["unmatched starts", "unmatched stops", "lost"]);
        }
        let are_typed = self.pairs.iter().all(|pair| pair.untyped == 0);
        if !are_typed {
            head.push("untyped");
        }
        let rows = self.pairs.iter().map(|pair| {
            let mut cells: Vec<String> = pair.pid.iter().map(i32::to_string).collect();
            cells.extend([
                Escaped(pair.start).to_string(),
                Escaped(pair.stop).to_string(),
                pair.summary.count.to_string(),
            ]);
            if !are_trusted {
                let doubt = pair.evidence.doubt();
                cells.push(doubt.map_or_else(|| "yes".to_owned(), Doubt::cell));
            }
            cells.extend(pair.summary.cells());
            if !is_matched {
                cells.extend(pair.unmatched_and_lost().map(|number| number.to_string()));
            }
            if !are_typed {
                cells.push(pair.untyped.to_string());
            }
            cells
        });
        table::table(&head, rows)
    }

    /// What has times: the pairs, then the functions.
    pub(super) fn subjects(&self) -> impl Iterator<Item = TimedSubject<'_>> {
        let pairs = self.pairs.iter().map(|pair| TimedSubject {
            title: match pair.pid {
                Some(pid) => format!("{pid} {} to {}", pair.start, pair.stop),
                None => format!("{} to {}", pair.start, pair.stop),
            },
            summary: &pair.summary,
            caution: pair.caution(),
            buckets: &pair.buckets,
        });
        pairs.chain(self.functions.subjects())
    }
}

impl ReportedFigures for Latencies<'_> {
    /// A line for each pair and each function.
    fn plain(&self) -> String {
        let (mut text, at) = (String::new(), time_prefix(self.at));
        for pair in &self.pairs {
            // Writing to a string does not fail.
            let _ = write!(text, "{at}{}", pair.summary);
            let [starts, stops, lost] = pair.unmatched_and_lost();
            let _ = write!(text, " {starts} {stops} {lost} {}", pair.name());
            match pair.evidence.doubt() {
                // How many are untyped follows, those without a key among them.
                None | Some(Doubt::WithoutKey(_)) => {}
                Some(doubt) => {
                    let _ = write!(text, " {}", doubt.words());
                }
            }
            if pair.untyped > 0 {
                let _ = write!(text, " untyped {}", pair.untyped);
            }
            text.push('\n');
        }
        text += &self.functions.plain(self.at);
        if let Some(keyed) = &self.keyed {
            text += &keyed.plain(self.at);
        }
        text
    }

    /// A table of all pairs and functions, and a chart of the times of each.
    fn charts(&self) -> String {
        let mut text = self.table();
        for subject in self.subjects().filter(|it| it.summary.count > 0) {
            // Writing to a string does not fail.
            let _ = writeln!(text, "\n{}:", Escaped(&subject.title));
            text.push_str(&chart(subject.buckets));
        }
        text
    }

    /// A table of all pairs, and one of all functions.
    fn table(&self) -> String {
        let mut tables = Vec::new();
        if !self.pairs.is_empty() {
            tables.push(self.table_of_pairs());
        }
        if !self.functions.is_empty() {
            tables.push(self.functions.table());
            tables.extend(self.functions.table_of_callers());
        }
        tables.extend(self.keyed.as_ref().map(TimesByKey::table));
        tables.join("\n")
    }

    /// A picture of the times of each.
    fn picture(&self) -> String {
        let charts = self.subjects().map(|subject| {
            let range = |bucket: &LatencyBucket| {
                let (from, to) = (of_nanoseconds(bucket.from_ns), of_nanoseconds(bucket.to_ns));
                format!("{from} .. {to}")
            };
            let bars = subject.buckets.iter().map(|it| (range(it), it.count));
            Chart {
                figures: subject.summary.line(),
                bars: bars.collect(),
                title: subject.title,
                caution: subject.caution,
            }
        });
        svg::picture(&charts.collect::<Vec<_>>())
    }

    fn so_far(mut self) -> Self {
        self.at = Some(self.seconds);
        self
    }

    /// How many lines it has if there is one for each pair and each function, and what they add up to:
    /// `1 pair, 1600 functions (12 of them called), 4711 calls`.
    fn sum(&self) -> (usize, String) {
        let (functions, called, calls) = self.functions.sum();
        let mut sum = Vec::new();
        if !self.pairs.is_empty() {
            sum.push(number_of(self.pairs.len(), "pair"));
        }
        if functions > 0 {
            let functions = number_of(functions, "function");
            sum.push(format!("{functions} ({called} of them called)"));
            sum.push(number_of(calls, "call"));
        }
        sum.extend(self.keyed.as_ref().map(TimesByKey::sum));
        (self.pairs.len() + functions, sum.join(", "))
    }

    /// How many hits and calls there are, if all are untyped.
    fn only_untyped(&self) -> Option<u64> {
        let (functions, untyped) = self.functions.typed_and_untyped();
        let pairs = self.pairs.iter().map(|it| it.summary.count);
        let typed = pairs.fold(functions, u64::saturating_add);
        let pairs = self.pairs.iter().map(|it| it.untyped);
        let untyped = pairs.fold(untyped, u64::saturating_add);
        (untyped > 0 && typed == 0).then_some(untyped)
    }

    fn of_other_keys(&self) -> u64 {
        self.keyed.as_ref().map_or(0, TimesByKey::of_other_keys)
    }
}

impl<'l> PairRow<'l> {
    fn of(pid: Option<i32>, latency: &'l Latency) -> PairRow<'l> {
        PairRow {
            pid,
            start: latency.start(),
            stop: latency.stop(),
            summary: Summary::of(latency),
            unmatched_starts: latency.unmatched_starts(),
            unmatched_stops: latency.unmatched_stops(),
            lost: latency.dropped(),
            evidence: Evidence::of(latency),
            trusted: latency.is_trusted(),
            interleaving: Interleaving::of(latency),
            untyped: latency.untyped(),
            buckets: buckets(latency.times()),
        }
    }

    /// `req_start,req_end`, with the pid before it if processes are distinguished.
    fn name(&self) -> String {
        let (start, stop) = (Escaped(self.start), Escaped(self.stop));
        match self.pid {
            Some(pid) => format!("{pid} {start},{stop}"),
            None => format!("{start},{stop}"),
        }
    }

    /// What is wrong with the times, if anything is.
    pub(super) fn caution(&self) -> Option<String> {
        self.evidence.caution()
    }

    /// How many starts and stops were not matched, and how many times were lost.
    fn unmatched_and_lost(&self) -> [u64; 3] {
        [self.unmatched_starts, self.unmatched_stops, self.lost]
    }
}

impl Summary {
    fn of(times: &Times) -> Summary {
        Summary {
            count: times.count(),
            mean: times.mean(),
            quantiles: Quantiles::of_times(times),
        }
    }

    /// The mean, and the quantiles, in nanoseconds, each with its name.
    fn times(&self) -> impl Iterator<Item = (&'static str, u64)> {
        let mean = ("mean", in_nanoseconds(self.mean));
        [mean].into_iter().chain(self.quantiles.named())
    }

    /// The times of a table.
    fn cells(&self) -> impl Iterator<Item = String> {
        self.times().map(|(_, time)| match self.count {
            0 => "-".to_owned(),
            _ => of_nanoseconds(time),
        })
    }

    /// All of them in one line.
    pub(super) fn line(&self) -> String {
        let times = self.times();
        let times = times.map(|(name, time)| format!("{name} {}", of_nanoseconds(time)));
        let times: Vec<String> = times.collect();
        match self.count {
            0 => "no latencies".to_owned(),
            count => format!("{count} latencies: {}", times.join(", ")),
        }
    }
}

/// In nanoseconds, as in the plain format.
impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.count)?;
        self.times().try_for_each(|(_, time)| write!(f, " {time}"))
    }
}

pub(super) fn buckets(times: impl Iterator<Item = (Duration, u64)>) -> Vec<LatencyBucket> {
    let mut counts = [0_u64; u64::BITS as usize];
    for (time, count) in times {
        let nanoseconds = in_nanoseconds(time);
        let sum = &mut counts[nanoseconds.max(1).ilog2() as usize];
        *sum = sum.saturating_add(count);
    }
    let first = counts.iter().position(|&count| count > 0).unwrap_or(0);
    let end = counts.iter().rposition(|&count| count > 0);
    let end = end.map_or(first, |last| last + 1);
    let bucket = |power: usize| LatencyBucket {
        // The first bucket has the times of 0 ns, too.
        from_ns: if power == 0 { 0 } else { 1 << power },
        to_ns: 1_u64.checked_shl(power as u32 + 1).unwrap_or(u64::MAX),
        count: counts[power],
    };
    (first..end).map(bucket).collect()
}

/// A bar for each bucket.
pub(super) fn chart(buckets: &[LatencyBucket]) -> String {
    let bars = buckets.iter().map(|bucket| {
        let (from, to) = (of_nanoseconds(bucket.from_ns), of_nanoseconds(bucket.to_ns));
        (format!("{from:>8} .. {to:<8}"), bucket.count)
    });
    bars::chart(&bars.collect::<Vec<_>>())
}

pub(super) fn of_nanoseconds(nanoseconds: u64) -> String {
    with_unit(Duration::from_nanos(nanoseconds))
}

/// A time to three digits, in the unit that fits.
pub(crate) fn with_unit(time: Duration) -> String {
    let units = [("ns", 1.0), ("us", 1e3), ("ms", 1e6), ("s", 1e9)];
    three_digits(time.as_nanos() as f64, units)
}

fn nanoseconds<S: Serializer>(value: &Duration, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_u64(in_nanoseconds(*value))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_three_significant_digits() {
        let words = |nanoseconds| with_unit(Duration::from_nanos(nanoseconds));
        let shown = [0, 7, 999, 1000, 1024, 12_345, 999_499, 999_500, 1_000_000].map(words);
        let expected = [
            "0 ns", "7 ns", "999 ns", "1.00 us", "1.02 us", "12.3 us", "999 us", "1.00 ms",
            "1.00 ms",
        ];
        assert_eq!(shown, expected);
        assert_eq!(words(61_000_000_000), "61.0 s");
        assert_eq!(words(86_400_000_000_000), "86400 s");
    }

    #[test]
    fn buckets_are_powers_of_two_without_empty_ends() {
        let times = [(1000, 3), (1023, 1), (1024, 2), (9000, 5)];
        let times = times.map(|(time, count)| (Duration::from_nanos(time), count));
        let found = buckets(times.into_iter());
        let numbers: Vec<_> = found
            .iter()
            .map(|it| (it.from_ns, it.to_ns, it.count))
            .collect();
        assert_eq!(
            numbers,
            [
                (512, 1024, 4),
                (1024, 2048, 2),
                (2048, 4096, 0),
                (4096, 8192, 0),
                (8192, 16384, 5)
            ]
        );
        assert_eq!(buckets(std::iter::empty()), []);
        let extremes = [(Duration::ZERO, 1), (Duration::MAX, u64::MAX)];
        let extremes = buckets(extremes.into_iter());
        assert_eq!((extremes.len(), extremes[0].from_ns), (64, 0));
        assert_eq!(extremes[63].to_ns, u64::MAX);
        assert!(chart(&extremes).lines().count() == 64);
    }

    #[test]
    fn bars_are_proportional_to_their_share() {
        let bucket = |from_ns, count| LatencyBucket {
            from_ns,
            to_ns: 2 * from_ns,
            count,
        };
        let chart = chart(&[bucket(512, 100), bucket(1024, 1), bucket(2048, 0)]);
        let lines: Vec<&str> = chart.lines().collect();
        assert_eq!(
            lines[0],
            format!("  512 ns .. 1.02 us  100 |{}|", "@".repeat(50))
        );
        assert_eq!(
            lines[1],
            format!(" 1.02 us .. 2.05 us    1 |@{}|", " ".repeat(49))
        );
        assert!(lines[2].ends_with(&format!("  0 |{}|", " ".repeat(50))));
    }
}
