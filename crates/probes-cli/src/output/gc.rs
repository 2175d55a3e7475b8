//! What the garbage collector of a process does, in one shape for all formats. The field names are those of the JSON
//! output.

use std::fmt::Write;
use std::path::Path;
use std::time::Duration;

use probes_lib::{DomainPauses, FunctionLatency, GcPause, GcPauses, GcTimes};
use serde::Serialize;

use super::format::{Format, VERSION, json, seconds, seconds_or_null, time_prefix};
use super::latencies::{LatencyBucket, buckets, chart, with_unit};
use super::quantiles::Quantiles;
use super::runtime_events::LostWords;
use super::table::table;
use crate::clock::in_nanoseconds;
use crate::failure::Failure;
use crate::text::{number_of, or_dash};

/// The pauses of a process, by domain and by phase, and what it allocates.
#[derive(Debug, Serialize)]
#[serde(tag = "type", rename = "gc")]
pub(crate) struct GcReport<'g> {
    version: u32,
    pid: i32,
    program: String,
    /// The version of OCaml, if that is known.
    ocaml: Option<&'g str>,
    /// What the figures are of.
    from: FiguresOf,
    /// The time since the beginning of the observation; `None` in its last report.
    #[serde(serialize_with = "seconds_or_null")]
    at: Option<Duration>,
    #[serde(serialize_with = "seconds")]
    seconds: Duration,
    pauses: PauseTimes,
    /// These four are `None` if the figures are of functions; `heap_bytes` also before a major collection has ended.
    allocated_bytes: Option<u64>,
    promoted_bytes: Option<u64>,
    heap_bytes: Option<u64>,
    lost_words: Option<u64>,
    /// `None` if compactions are not timed.
    compactions: Option<u64>,
    domains: Vec<DomainView>,
    phases: Vec<PhaseView>,
    /// How many pauses took how long.
    #[serde(skip)]
    lengths: Vec<LatencyBucket>,
}

/// What the figures are of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum FiguresOf {
    /// The events of the runtime.
    Events,
    /// The calls of the collector's functions.
    Functions,
}

#[derive(Debug, Serialize)]
struct PauseTimes {
    count: u64,
    total_ns: u64,
    #[serde(flatten)]
    quantiles: Quantiles,
}

#[derive(Debug, Serialize)]
struct DomainView {
    domain: u32,
    #[serde(flatten)]
    pauses: PauseTimes,
    /// Its pauses as a share of the time, from 0 to 1.
    share: f64,
    allocated_bytes: Option<u64>,
    promoted_bytes: Option<u64>,
    lost_words: Option<u64>,
    stop_the_world: Option<Requests>,
}

/// What a domain had to do with stop-the-world requests.
#[derive(Debug, Serialize)]
struct Requests {
    led: u64,
    /// How many requests of other domains it was the last to join, so that they waited for it.
    last: u64,
    /// How long after each request of another domain it joined.
    late: PauseTimes,
    /// How long it waited for other domains at barriers.
    waits: PauseTimes,
}

#[derive(Debug, Serialize)]
struct PhaseView {
    phase: &'static str,
    #[serde(flatten)]
    times: PauseTimes,
}

impl PauseTimes {
    fn of(times: &GcTimes) -> PauseTimes {
        PauseTimes {
            count: times.count(),
            total_ns: in_nanoseconds(times.total()),
            quantiles: Quantiles::of(|part| times.per_mille(part.into()), times.max()),
        }
    }

    fn plain(&self) -> String {
        let quantiles = self.quantiles.named();
        let quantiles = quantiles.map(|(name, time)| format!("{name} {time}"));
        let (count, total) = (self.count, self.total_ns);
        format!("count {count} total {total} {}", quantiles.join(" "))
    }

    fn cells(&self) -> Vec<String> {
        let quantiles = self.quantiles.named().map(|(_, time)| time);
        let times = [self.total_ns].into_iter().chain(quantiles);
        let times = times.map(|time| with_unit(Duration::from_nanos(time)));
        [self.count.to_string()].into_iter().chain(times).collect()
    }
}

/// The phase that is a compaction.
const COMPACT: &str = "compact";

/// What tables say of figures that are not of events.
const FROM_FUNCTIONS: &str =
    "from the calls of the collector's functions: what is allocated is not known";

const COLUMNS: [&str; 7] = ["count", "total", "p50", "p90", "p99", "p99.9", "max"];

impl<'g> GcReport<'g> {
    pub(crate) fn new(
        pid: i32,
        program: &Path,
        ocaml: &'g str,
        elapsed: Duration,
        pauses: &GcPauses,
    ) -> GcReport<'g> {
        let requests = |number, domain: &DomainPauses| {
            let requests = pauses.requests(number);
            Requests {
                led: requests.led,
                last: requests.last,
                late: PauseTimes::of(&requests.late),
                waits: PauseTimes::of(&domain.waits),
            }
        };
        let domains = pauses.domains().map(|(number, domain)| DomainView {
            domain: number,
            pauses: PauseTimes::of(&domain.pauses),
            share: domain.pauses.total().as_secs_f64() / elapsed.as_secs_f64().max(1e-9),
            allocated_bytes: Some(domain.allocated),
            promoted_bytes: Some(domain.promoted),
            lost_words: Some(domain.lost_words),
            stop_the_world: Some(requests(number, domain)),
        });
        let domains: Vec<DomainView> = domains.collect();
        let phases = pauses.phases().map(|(phase, times)| PhaseView {
            phase,
            times: PauseTimes::of(times),
        });
        let mut phases: Vec<PhaseView> = phases.collect();
        phases.sort_by_key(|it| std::cmp::Reverse(it.times.total_ns));
        let sum = |of: fn(&DomainView) -> Option<u64>| {
            let all = domains.iter().filter_map(of);
            Some(all.fold(0, u64::saturating_add))
        };
        let all = pauses.all();
        GcReport {
            version: VERSION,
            pid,
            program: program.to_string_lossy().into_owned(),
            ocaml: Some(ocaml),
            from: FiguresOf::Events,
            at: None,
            seconds: elapsed,
            pauses: PauseTimes::of(&all),
            allocated_bytes: sum(|it| it.allocated_bytes),
            promoted_bytes: sum(|it| it.promoted_bytes),
            heap_bytes: pauses.heap(),
            lost_words: sum(|it| it.lost_words),
            compactions: Some(pauses.compactions()),
            domains,
            phases,
            lengths: buckets(all.times()),
        }
    }

    /// The same from the calls of the collector's functions, given with the phases that they are.
    pub(crate) fn of_functions(
        pid: i32,
        program: &Path,
        elapsed: Duration,
        functions: &[(&'static str, &FunctionLatency)],
    ) -> GcReport<'g> {
        let mut all = GcTimes::default();
        let mut phases: Vec<PhaseView> = Vec::new();
        for (phase, function) in functions {
            let times = GcTimes::of(function.times(), function.sum(), function.max());
            all.merge(&times);
            let times = PauseTimes::of(&times);
            phases.push(PhaseView { phase, times });
        }
        let compactions = phases.iter().find(|it| it.phase == COMPACT);
        let compactions = compactions.map(|it| it.times.count);
        phases.sort_by_key(|it| std::cmp::Reverse(it.times.total_ns));
        let domain = DomainView {
            domain: 0,
            pauses: PauseTimes::of(&all),
            share: all.total().as_secs_f64() / elapsed.as_secs_f64().max(1e-9),
            allocated_bytes: None,
            promoted_bytes: None,
            lost_words: None,
            stop_the_world: None,
        };
        GcReport {
            version: VERSION,
            pid,
            program: program.to_string_lossy().into_owned(),
            ocaml: None,
            from: FiguresOf::Functions,
            at: None,
            seconds: elapsed,
            pauses: PauseTimes::of(&all),
            allocated_bytes: None,
            promoted_bytes: None,
            heap_bytes: None,
            lost_words: None,
            compactions,
            domains: vec![domain],
            phases,
            lengths: buckets(all.times()),
        }
    }

    /// The same as a report while the observation goes on.
    pub(crate) fn so_far(mut self) -> GcReport<'g> {
        self.at = Some(self.seconds);
        self
    }

    /// How many words of events were lost in which domains.
    pub(crate) fn lost(&self) -> LostWords {
        let mut lost = LostWords::default();
        for it in &self.domains {
            if let Some(words) = it.lost_words.filter(|words| *words > 0) {
                lost.add(it.domain, words);
            }
        }
        lost
    }

    pub(crate) fn text(&self, format: Format) -> Result<String, Failure> {
        match format {
            Format::Plain => Ok(self.plain()),
            Format::Table => Ok(self.tables()),
            Format::Json => json(self),
        }
    }

    fn plain(&self) -> String {
        let (at, heap) = (time_prefix(self.at), or_dash(self.heap_bytes));
        let mut text = format!(
            "{at}all {} seconds {:.3} allocated {} promoted {} heap {heap} lost {} compactions {}\n",
            self.pauses.plain(),
            self.seconds.as_secs_f64(),
            or_dash(self.allocated_bytes),
            or_dash(self.promoted_bytes),
            or_dash(self.lost_words),
            or_dash(self.compactions)
        );
        for it in &self.domains {
            // Writing to a String does not fail.
            let _ = writeln!(
                text,
                "{at}domain {} {} share {:.4} allocated {} promoted {} lost {}",
                it.domain,
                it.pauses.plain(),
                it.share,
                or_dash(it.allocated_bytes),
                or_dash(it.promoted_bytes),
                or_dash(it.lost_words)
            );
        }
        for it in &self.domains {
            let (Some(stw), domain) = (&it.stop_the_world, it.domain) else {
                continue;
            };
            let (late, waits) = (stw.late.plain(), stw.waits.plain());
            let _ = writeln!(
                text,
                "{at}stw domain {domain} led {} last {} joined {late} waits {waits}",
                stw.led, stw.last
            );
        }
        for it in &self.phases {
            let _ = writeln!(text, "{at}phase {} {}", it.phase, it.times.plain());
        }
        text
    }

    fn tables(&self) -> String {
        let mut text = self.domain_table() + "\n";
        if self.pauses.count > 0 {
            text += "pauses:\n";
            text += &chart(&self.lengths);
            text += "\n";
        }
        if self.from == FiguresOf::Events {
            text += &self.stop_the_world_table();
            text += "\n";
        }
        text + &self.phase_table() + "\n" + &self.foot() + "\n"
    }

    fn domain_table(&self) -> String {
        let rate = |bytes: Option<u64>| {
            let Some(bytes) = bytes else {
                return "-".to_owned();
            };
            let rate = bytes as f64 / self.seconds.as_secs_f64().max(1e-9);
            format!("{:.1} MB/s", rate / 1e6)
        };
        let domains = self.domains.iter().map(|it| {
            let mut row = vec![it.domain.to_string()];
            row.extend(it.pauses.cells());
            row.push(format!("{:.2} %", it.share * 100.0));
            row.extend([rate(it.allocated_bytes), rate(it.promoted_bytes)]);
            row.push(or_dash(it.lost_words));
            row
        });
        let shares = ["share", "allocated", "promoted", "lost words"];
        let head = [&["domain"], COLUMNS.as_slice(), &shares].concat();
        table(&head, domains)
    }

    fn stop_the_world_table(&self) -> String {
        let time = |time| with_unit(Duration::from_nanos(time));
        let requests = self.domains.iter().filter_map(|it| {
            let stw = it.stop_the_world.as_ref()?;
            Some(vec![
                it.domain.to_string(),
                stw.led.to_string(),
                stw.late.count.to_string(),
                stw.last.to_string(),
                time(stw.late.quantiles.p50_ns),
                time(stw.late.quantiles.max_ns),
                time(stw.waits.total_ns),
                time(stw.waits.quantiles.max_ns),
            ])
        });
        let head = [
            "stop the world",
            "led",
            "joined",
            "as last",
            "late p50",
            "late max",
            "waited",
            "wait max",
        ];
        table(&head, requests)
    }

    fn phase_table(&self) -> String {
        let phases = self.phases.iter().map(|it| {
            let mut row = vec![it.phase.to_owned()];
            row.extend(it.times.cells());
            row
        });
        table(&[&["phase"], COLUMNS.as_slice()].concat(), phases)
    }

    /// The line below the tables.
    fn foot(&self) -> String {
        let seconds = self.seconds.as_secs_f64();
        if self.from == FiguresOf::Functions {
            return format!("{seconds:.1} s, {FROM_FUNCTIONS}");
        }
        let heap = self.heap_bytes.map_or_else(
            || "not known before a major collection ends".to_owned(),
            |heap| format!("{:.1} MB", heap as f64 / 1e6),
        );
        let compactions = number_of(self.compactions.unwrap_or(0) as usize, "compaction");
        let version = self.ocaml.unwrap_or("of an unknown version");
        format!("OCaml {version}, {seconds:.1} s, heap {heap}, {compactions}")
    }
}

/// A pause that was longer than asked for.
#[derive(Debug, Serialize)]
#[serde(tag = "type", rename = "gc_pause")]
pub(crate) struct LongPause {
    version: u32,
    pid: i32,
    domain: u32,
    /// When it began, in nanoseconds of CLOCK_MONOTONIC.
    began_ns: u64,
    ns: u64,
    phases: Vec<InnerPhase>,
}

#[derive(Debug, Serialize)]
struct InnerPhase {
    phase: &'static str,
    depth: usize,
    ns: u64,
}

impl LongPause {
    pub(crate) fn new(pid: i32, pause: GcPause) -> LongPause {
        let phases = pause.phases.iter().map(|it| InnerPhase {
            phase: it.name,
            depth: it.depth,
            ns: in_nanoseconds(it.time),
        });
        LongPause {
            version: VERSION,
            pid,
            domain: pause.domain,
            began_ns: pause.began,
            ns: in_nanoseconds(pause.time),
            phases: phases.collect(),
        }
    }

    pub(crate) fn text(&self, format: Format) -> Result<String, Failure> {
        match format {
            Format::Plain => {
                let inner = self.phases.iter().map(|it| {
                    let depth = ">".repeat(it.depth);
                    format!(" {depth}{} {}", it.phase, it.ns)
                });
                let (domain, began, ns) = (self.domain, self.began_ns, self.ns);
                let inner: String = inner.collect();
                Ok(format!("pause {ns} domain {domain} began {began}{inner}\n"))
            }
            Format::Table => {
                let inner = self.phases.iter().map(|it| {
                    let depth = "  ".repeat(it.depth + 1);
                    let time = with_unit(Duration::from_nanos(it.ns));
                    format!("{depth}{} {time}\n", it.phase)
                });
                let time = with_unit(Duration::from_nanos(self.ns));
                let inner: String = inner.collect();
                Ok(format!("domain {} paused for {time}\n{inner}", self.domain))
            }
            Format::Json => json(self),
        }
    }
}
