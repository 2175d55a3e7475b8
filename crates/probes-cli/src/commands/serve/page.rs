//! The metrics: their names, and the page that shows those of all processes. Pure.

use std::collections::BTreeMap;
use std::time::Duration;

use super::exposition::{Exposition, Family, Labels, MetricKind, TextFormat};
use super::figures::{CALL_PROBLEMS, PAIR_PROBLEMS, ProcessFigures, TimedFigures};

/// One process as it is shown.
#[derive(Debug, Default)]
pub(super) struct ShownProcess {
    pub(super) pid: i32,
    pub(super) program: String,
    pub(super) is_observed: bool,
    /// Why it is not, if it still runs.
    pub(super) refused: Option<String>,
    pub(super) figures: ProcessFigures,
    /// The value of each probe's state.
    pub(super) states: Vec<(String, &'static str)>,
    /// How long it was stopped, in all.
    pub(super) stopped: Duration,
    /// How many sites and functions record nothing any more.
    pub(super) discarded: usize,
    /// How many functions were selected and cannot be observed.
    pub(super) refused_functions: usize,
    /// How many rows are left out.
    pub(super) left_out: usize,
    /// How many selections it does not have although it is observed, by the kinds of their errors.
    pub(super) missing: BTreeMap<String, usize>,
    /// Whether its runtime events are read; `None` if they are not asked for, or the process is not observed.
    pub(super) collector: Option<bool>,
}

/// What is shown of the exporter itself.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ShownExporter {
    /// How long it took to read all processes.
    pub(super) collection: Duration,
    pub(super) scrapes: u64,
    pub(super) connections: u64,
    /// Connections that were closed because they were too slow, and because there were too many.
    pub(super) timed_out: u64,
    pub(super) over_limit: u64,
    /// How long it took to look for processes.
    pub(super) scan: Duration,
    /// How many processes are refused and not shown, because there are too many.
    pub(super) unshown: usize,
}

const fn family(
    name: &'static str,
    kind: MetricKind,
    unit: &'static str,
    help: &'static str,
) -> Family {
    Family {
        name,
        kind,
        unit,
        help,
    }
}

use MetricKind::{Counter, Gauge, Histogram, Info};

static UP: Family = family("ocaml_probes_up", Gauge, "", "1: the exporter runs.");
static BUILD: Family = family(
    "ocaml_probes_build",
    Info,
    "",
    "The version of the exporter.",
);
static PROCESSES: Family = family(
    "ocaml_probes_processes",
    Gauge,
    "",
    "How many processes are observed, are refused, and have exited in the last minute.",
);
static OBSERVED: Family = family(
    "ocaml_probes_process_observed",
    Gauge,
    "",
    "1: the process is observed; 0: it is refused, or has exited.",
);
static REFUSED: Family = family(
    "ocaml_probes_process_refused",
    Gauge,
    "",
    "1: the process runs and cannot be observed; the reason is the kind of the error.",
);
static MISSING: Family = family(
    "ocaml_probes_missing_selections",
    Gauge,
    "",
    "Probes, pairs and functions that were selected and that the process lacks; the reason is the kind of the error.",
);
static UNSHOWN: Family = family(
    "ocaml_probes_unshown_processes",
    Gauge,
    "",
    "Processes that are refused and are not shown by themselves, because there are too many.",
);
static STOPPED: Family = family(
    "ocaml_probes_process_stopped_seconds",
    Counter,
    "seconds",
    "How long the process was stopped to be observed.",
);
static HITS: Family = family(
    "ocaml_probes_hits",
    Counter,
    "",
    "Hits of the probe, whether it is enabled or not.",
);
static ENABLED: Family = family(
    "ocaml_probes_probe_enabled",
    Gauge,
    "",
    "1: the probe is enabled; 0: it is disabled; NaN: its counters and sites disagree.",
);
static PAIR: Family = family(
    "ocaml_probes_pair_duration_seconds",
    Histogram,
    "seconds",
    "How long it took from the one probe to the other.",
);
static PAIR_OPEN: Family = family(
    "ocaml_probes_pair_unmatched_starts",
    Gauge,
    "",
    "Starts that have no stop: those that wait for it, and those whose threads have exited.",
);
static PAIR_TROUBLE: Family = family(
    "ocaml_probes_pair_problems",
    Counter,
    "",
    "Times of the pair that are missing or doubtful; interleaved: none of its times can be trusted; may_interleave: \
     nothing tells whether that is so.",
);
static CALL: Family = family(
    "ocaml_probes_call_duration_seconds",
    Histogram,
    "seconds",
    "How long those calls of the function lasted that ended with an exit.",
);
static CALL_OPEN: Family = family(
    "ocaml_probes_calls_running",
    Gauge,
    "",
    "Calls of the function that have not ended.",
);
static CALL_TROUBLE: Family = family(
    "ocaml_probes_call_problems",
    Counter,
    "",
    "Calls of the function whose times are missing.",
);
static GC_READ: Family = family(
    "ocaml_probes_gc_observed",
    Gauge,
    "",
    "1: the runtime events of the process are read; 0: they cannot be.",
);
static GC_PAUSE: Family = family(
    "ocaml_probes_gc_pause_seconds",
    Histogram,
    "seconds",
    "Pauses of the collector in all domains.",
);
static GC_ALLOCATED: Family = family(
    "ocaml_probes_gc_minor_allocated_bytes",
    Counter,
    "bytes",
    "What was allocated in the minor heaps.",
);
static GC_PROMOTED: Family = family(
    "ocaml_probes_gc_promoted_bytes",
    Counter,
    "bytes",
    "What was promoted from the minor heaps to the major heap.",
);
static GC_HEAP: Family = family(
    "ocaml_probes_gc_heap_bytes",
    Gauge,
    "bytes",
    "The major heap, as of the end of the last major collection.",
);
static GC_LOST: Family = family(
    "ocaml_probes_gc_lost_words",
    Counter,
    "words",
    "Words of runtime events that were overwritten before they were read.",
);
static DISCARDED: Family = family(
    "ocaml_probes_discarded_sites",
    Gauge,
    "",
    "Sites and functions that record nothing any more: the figures of the process are too low.",
);
static REFUSED_FUNCTIONS: Family = family(
    "ocaml_probes_refused_functions",
    Gauge,
    "",
    "Functions that were selected and cannot be observed.",
);
static LEFT_OUT: Family = family(
    "ocaml_probes_left_out_rows",
    Gauge,
    "",
    "Probes, pairs and functions that are left out, because there are too many.",
);
static COLLECTION: Family = family(
    "ocaml_probes_collection_duration_seconds",
    Gauge,
    "seconds",
    "How long it took to read all processes for this scrape.",
);
static SCAN: Family = family(
    "ocaml_probes_scan_duration_seconds",
    Gauge,
    "seconds",
    "How long the last search for processes took, with beginning to observe those that were found.",
);
static SCRAPES: Family = family(
    "ocaml_probes_scrapes",
    Counter,
    "",
    "Scrapes that were answered, with this one.",
);
static CONNECTIONS: Family = family(
    "ocaml_probes_connections",
    Counter,
    "",
    "Connections that were accepted.",
);
static CLOSED: Family = family(
    "ocaml_probes_connections_closed",
    Counter,
    "",
    "Connections that were closed before they were answered: too slow, or too many at a time.",
);

/// The page of all metrics.
pub(super) fn page(
    format: TextFormat,
    bounds: &[Duration],
    processes: &[ShownProcess],
    exporter: &ShownExporter,
) -> String {
    let none = Labels::default();
    let mut page = Exposition::new(format);
    page.family(&UP).add(&none, 1);
    let version = none.with("version", env!("CARGO_PKG_VERSION"));
    page.family(&BUILD).add(&version, 1);
    add_numbers_of_processes(&mut page, processes, exporter);
    let each: Vec<(Labels, &ShownProcess)> = processes
        .iter()
        .map(|process| {
            let pid = none.with("pid", &process.pid.to_string());
            (pid.with("program", &process.program), process)
        })
        .collect();
    add_states(&mut page, &each);
    add_probes(&mut page, &each);
    let pairs = |process: &'_ ShownProcess| {
        let pairs = process.figures.pairs.iter();
        let named = pairs.map(|((start, stop), times)| {
            (
                [("start", start.clone()), ("stop", stop.clone())],
                times.clone(),
            )
        });
        named.collect()
    };
    let families = [&PAIR, &PAIR_OPEN, &PAIR_TROUBLE];
    add_timed(&mut page, &each, families, bounds, &PAIR_PROBLEMS, pairs);
    let calls = |process: &'_ ShownProcess| {
        let calls = process.figures.calls.iter();
        let named = calls.map(|((function, object), times)| {
            let labels = [("function", function.clone()), ("object", object.clone())];
            (labels, times.clone())
        });
        named.collect()
    };
    let families = [&CALL, &CALL_OPEN, &CALL_TROUBLE];
    add_timed(&mut page, &each, families, bounds, &CALL_PROBLEMS, calls);
    add_collector(&mut page, &each, bounds);
    add_numbers(&mut page, &each, &DISCARDED, |it| it.discarded);
    add_numbers(&mut page, &each, &REFUSED_FUNCTIONS, |it| {
        it.refused_functions
    });
    add_numbers(&mut page, &each, &LEFT_OUT, |it| it.left_out);
    page.family(&COLLECTION)
        .add_seconds(&none, exporter.collection);
    page.family(&SCAN).add_seconds(&none, exporter.scan);
    page.family(&SCRAPES).add(&none, exporter.scrapes);
    page.family(&CONNECTIONS).add(&none, exporter.connections);
    let mut closed = page.family(&CLOSED);
    for (reason, number) in [
        ("too_slow", exporter.timed_out),
        ("too_many", exporter.over_limit),
    ] {
        closed.add(&none.with("reason", reason), number);
    }
    page.finish()
}

/// Adds how many processes there are, by what has become of them.
fn add_numbers_of_processes(
    page: &mut Exposition,
    processes: &[ShownProcess],
    exporter: &ShownExporter,
) {
    let none = Labels::default();
    let mut numbers = page.family(&PROCESSES);
    let observed = processes.iter().filter(|it| it.is_observed).count();
    let others = || processes.iter().filter(|it| !it.is_observed);
    let refused = others().filter(|it| it.refused.is_some()).count();
    let exited = others().count() - refused;
    for (state, number) in [
        ("observed", observed),
        ("refused", refused + exporter.unshown),
        ("exited", exited),
    ] {
        numbers.add(&none.with("state", state), number);
    }
    page.family(&UNSHOWN).add(&none, exporter.unshown);
}

/// Adds whether each process is observed, and what is missing of it.
fn add_states(page: &mut Exposition, each: &[(Labels, &ShownProcess)]) {
    let mut samples = page.family(&OBSERVED);
    for (labels, process) in each {
        samples.add(labels, u8::from(process.is_observed));
    }
    let mut samples = page.family(&REFUSED);
    for (labels, process) in each {
        if let Some(reason) = &process.refused {
            samples.add(&labels.with("reason", reason), 1);
        }
    }
    let mut samples = page.family(&MISSING);
    for (labels, process) in each {
        for (reason, number) in &process.missing {
            samples.add(&labels.with("reason", reason), number);
        }
    }
    let mut samples = page.family(&STOPPED);
    for (labels, process) in each {
        samples.add_seconds(labels, process.stopped);
    }
}

/// Adds a number of each process.
fn add_numbers(
    page: &mut Exposition,
    each: &[(Labels, &ShownProcess)],
    family: &'static Family,
    number: impl Fn(&ShownProcess) -> usize,
) {
    let mut samples = page.family(family);
    for (labels, process) in each {
        samples.add(labels, number(process));
    }
}

fn add_probes(page: &mut Exposition, each: &[(Labels, &ShownProcess)]) {
    let mut samples = page.family(&HITS);
    for (labels, process) in each {
        for (probe, hits) in &process.figures.hits {
            samples.add(&labels.with("probe", probe), hits);
        }
    }
    let mut samples = page.family(&ENABLED);
    for (labels, process) in each {
        for (probe, state) in &process.states {
            samples.add(&labels.with("probe", probe), state);
        }
    }
}

/// Adds the histograms, what is open, and the problems of pairs or calls.
fn add_timed(
    page: &mut Exposition,
    each: &[(Labels, &ShownProcess)],
    [times, open, problems]: [&'static Family; 3],
    bounds: &[Duration],
    reasons: &[&'static str],
    of: impl Fn(&ShownProcess) -> Vec<([(&'static str, String); 2], TimedFigures)>,
) {
    let timed: Vec<(Labels, TimedFigures)> = each
        .iter()
        .flat_map(|(labels, process)| {
            of(process).into_iter().map(|([one, other], times)| {
                let labels = labels.with(one.0, &one.1).with(other.0, &other.1);
                (labels, times)
            })
        })
        .collect();
    let mut samples = page.family(times);
    for (labels, TimedFigures { times, .. }) in &timed {
        let buckets = bounds.iter().zip(&times.not_longer);
        samples.add_histogram(labels, buckets, times.count, times.sum);
    }
    let mut samples = page.family(open);
    for (labels, timed) in &timed {
        samples.add(labels, timed.open);
    }
    let mut samples = page.family(problems);
    for (labels, timed) in &timed {
        for reason in reasons {
            let number = timed.problems.get(reason).copied().unwrap_or(0);
            samples.add(&labels.with("reason", reason), number);
        }
    }
}

fn add_collector(page: &mut Exposition, each: &[(Labels, &ShownProcess)], bounds: &[Duration]) {
    let mut samples = page.family(&GC_READ);
    for (labels, process) in each {
        if let Some(is_read) = process.collector {
            samples.add(labels, u8::from(is_read));
        }
    }
    let with = each.iter().filter_map(|(labels, process)| {
        let collector = process.figures.collector.as_ref();
        collector.map(|collector| (labels, collector))
    });
    let mut samples = page.family(&GC_PAUSE);
    for (labels, collector) in with.clone() {
        let pauses = &collector.pauses;
        let buckets = bounds.iter().zip(&pauses.not_longer);
        samples.add_histogram(labels, buckets, pauses.count, pauses.sum);
    }
    let mut samples = page.family(&GC_ALLOCATED);
    for (labels, collector) in with.clone() {
        samples.add(labels, collector.allocated);
    }
    let mut samples = page.family(&GC_PROMOTED);
    for (labels, collector) in with.clone() {
        samples.add(labels, collector.promoted);
    }
    let mut samples = page.family(&GC_HEAP);
    for (labels, collector) in with.clone() {
        if let Some(heap) = collector.heap {
            samples.add(labels, heap);
        }
    }
    let mut samples = page.family(&GC_LOST);
    for (labels, collector) in with {
        samples.add(labels, collector.lost_words);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_process_is_in_one_state() {
        // The pid of the first was used again before its exit was noticed.
        let shown = |is_observed, is_refused: bool| ShownProcess {
            is_observed,
            refused: is_refused.then(|| "denied".to_owned()),
            ..ShownProcess::default()
        };
        let processes = [shown(true, true), shown(false, true), shown(false, false)];
        let text = |shown: &[ShownProcess]| {
            page(
                TextFormat::OpenMetrics,
                &[],
                shown,
                &ShownExporter::default(),
            )
        };
        let none = "ocaml_probes_processes{state=\"exited\"} 0\n";
        assert!(text(&processes[..1]).contains(none));
        let page = text(&processes);
        for state in ["observed", "refused", "exited"] {
            let line = format!("ocaml_probes_processes{{state=\"{state}\"}} 1\n");
            assert!(page.contains(&line), "{page}");
        }
    }
}
