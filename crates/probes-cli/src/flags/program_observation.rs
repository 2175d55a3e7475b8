//! What `trace` observes of a program that it starts: -count, -hist, -latency, -watch and -gc.

use probes_lib::{FunctionSelector, Observation, Selector};

use super::buffer::BufferFlag;
use super::checked::{Checked, Flags, each_once};
use super::fields::FieldFlags;
use super::filter::FilterFlags;
use super::function_selection::FunctionOrCollectorFlags;
use super::keys::KeyFlags;
use super::pairs::{OverFlag, Pair, PairKeyFlag, pair};
use super::paths::PathFlags;
use super::probe_selection::{by_name, probe_name};
use super::sample::SampleFlag;
use super::usdt::UsdtFlags;
use super::wanted_histogram::{HistogramFlags, NEEDS_OF};
use super::watched::CallFlags;
use crate::output::{Field, PathForm};
use crate::question::{CountedBy, WantedHistogram};

// What to observe of a program that is started.
#[derive(Debug, clap::Args)]
pub(crate) struct ObserveFlags {
    /// Count the hits of all probes, or with -fn the calls of functions
    #[arg(long)]
    count: bool,
    #[command(flatten)]
    by: Checked<KeyFlags>,
    #[command(flatten)]
    filter: FilterFlags,
    #[command(flatten)]
    functions: FunctionOrCollectorFlags,
    #[command(flatten)]
    usdt: UsdtFlags,
    /// Time START,STOP in one thread, or the functions of -fn; may be repeated
    #[arg(long, value_name = "PAIR", value_parser = pair_or_functions, num_args = 0..=1, default_missing_value = "")]
    latency: Vec<LatencyArgument>,
    #[command(flatten)]
    key: PairKeyFlag,
    #[command(flatten)]
    over: OverFlag,
    /// Show hits of these probes, a comma list, or calls of -fn; may be repeated
    #[arg(long, value_name = "NAMES", value_parser = names_or_functions, num_args = 0..=1, default_missing_value = "")]
    watch: Vec<NamesArgument>,
    #[command(flatten)]
    calls: CallFlags,
    /// Histograms of -of at these probes, a comma list, or at calls of -fn
    #[arg(long, value_name = "NAMES", value_parser = names_or_functions, num_args = 0..=1, default_missing_value = "")]
    hist: Vec<NamesArgument>,
    #[command(flatten)]
    histogram: HistogramFlags,
    #[command(flatten)]
    sample: SampleFlag,
    #[command(flatten)]
    buffer: BufferFlag,
    #[command(flatten)]
    fields: Checked<FieldFlags>,
    #[command(flatten)]
    paths: PathFlags,
}

/// A value of `-latency`.
#[derive(Clone, Debug, PartialEq, Eq)]
enum LatencyArgument {
    Pair(Pair),
    /// The functions that `-fn` selects.
    Functions,
}

fn pair_or_functions(typed: &str) -> Result<LatencyArgument, String> {
    if typed.is_empty() {
        return Ok(LatencyArgument::Functions);
    }
    pair(typed).map(LatencyArgument::Pair)
}

/// A value of `-watch` and of `-hist`.
#[derive(Clone, Debug, PartialEq, Eq)]
enum NamesArgument {
    Probes(Vec<String>),
    /// The functions that `-fn` selects.
    Functions,
}

fn names_or_functions(typed: &str) -> Result<NamesArgument, String> {
    if typed.is_empty() {
        return Ok(NamesArgument::Functions);
    }
    let names = typed.split(',').map(probe_name);
    names.collect::<Result<_, _>>().map(NamesArgument::Probes)
}

/// Returns the names of probes in the values of a flag.
fn names(values: &[NamesArgument]) -> Vec<String> {
    let names = values.iter().filter_map(|given| match given {
        NamesArgument::Probes(names) => Some(names),
        NamesArgument::Functions => None,
    });
    names.flatten().cloned().collect()
}

/// Checks the value of `-by`.
fn by(is_counted: bool, given: &Option<CountedBy>) -> Result<Option<CountedBy>, String> {
    let why = match given {
        Some(_) if !is_counted => "-by needs -count or -hist: it says what hits are counted by",
        Some(by) if by.is_stack() => "-by stack can only be used with `count -pid`",
        Some(by) if by.has_pid() => {
            "-by pid is for `count` and `hist`: the hits of one program are counted"
        }
        Some(by) if by.has_caller() => {
            "-by caller is for `count` and `hist`: once the program has exited, its return addresses cannot be named"
        }
        _ => return Ok(given.clone()),
    };
    Err(why.to_owned())
}

/// The checked form of [`ObserveFlags`]: what to observe of a program that is started, if anything.
#[derive(Debug)]
pub(crate) struct ProgramObservation {
    /// Whether its collector is reported, from its runtime events.
    pub(crate) reports_collector: bool,
    pub(crate) counts: bool,
    /// The keys of counts or histograms; `None`: by probe and function.
    pub(crate) by: Option<CountedBy>,
    /// Which hits are counted, in histograms, or shown. Of an observation of times alone: which are timed, by their starts.
    filter: FilterFlags,
    /// The functions that are counted; without any, `-count` counts all probes.
    functions: Vec<FunctionSelector>,
    timed_functions: Vec<FunctionSelector>,
    pairs: Vec<Pair>,
    key: PairKeyFlag,
    pub(crate) over: OverFlag,
    pub(crate) watched: Vec<Selector>,
    watched_functions: Vec<FunctionSelector>,
    pub(crate) calls: CallFlags,
    /// What histograms are made of, if any.
    pub(crate) histogram: Option<WantedHistogram>,
    histogram_probes: Vec<Selector>,
    histogram_functions: Vec<FunctionSelector>,
    sample: SampleFlag,
    buffer: BufferFlag,
    /// The fields of a hit that are shown; `None`: all.
    pub(crate) fields: Option<Vec<Field>>,
    pub(crate) paths: PathForm,
}

impl Flags for ObserveFlags {
    type Value = ProgramObservation;

    fn check(self) -> Result<ProgramObservation, String> {
        let pairs = self.pairs();
        each_once("-latency", &pairs)?;
        let uses = self.uses_of_functions();
        self.refuse_without_latency(&pairs, uses.times)?;
        self.refuse_without_watch()?;
        let by = by(self.count || !self.hist.is_empty(), &self.by)?;
        self.refuse_filter_of_nothing()?;
        let histogram = self.wanted_histogram()?;
        self.calls
            .refuse_results_of_some(&self.filter, self.sample)?;
        let (mut functions, reports_collector) = self.functions.check()?;
        let has_functions = !functions.is_empty();
        let usdt = self.usdt.selectors()?;
        if uses.times && !usdt.is_empty() {
            return Err("-usdt needs -count, -watch or -hist: its probes are not timed".to_owned());
        }
        functions.extend(usdt);
        if functions.is_empty() {
            uses.refuse_without_functions()?;
        } else {
            uses.refuse_none()?;
        }
        uses.refuse_several()?;
        if !uses.watches || !has_functions {
            self.calls.refuse_without("-watch -fn")?;
        }
        let functions_if = |is_chosen: bool| {
            if is_chosen {
                functions.clone()
            } else {
                Vec::new()
            }
        };
        Ok(ProgramObservation {
            reports_collector,
            counts: self.count,
            by,
            filter: self.filter,
            functions: functions_if(uses.counts),
            timed_functions: functions_if(uses.times),
            pairs,
            key: self.key,
            over: self.over,
            watched: by_name("-watch", &names(&self.watch))?,
            watched_functions: functions_if(uses.watches),
            calls: self.calls,
            histogram,
            histogram_probes: by_name("-hist", &names(&self.hist))?,
            histogram_functions: functions_if(uses.has_histograms),
            sample: self.sample,
            buffer: self.buffer,
            fields: self.fields.clone(),
            paths: self.paths.form(),
        })
    }
}

impl ObserveFlags {
    /// Returns the pairs of `-latency`.
    fn pairs(&self) -> Vec<Pair> {
        let pairs = self.latency.iter().filter_map(|given| match given {
            LatencyArgument::Pair(pair) => Some(pair.clone()),
            LatencyArgument::Functions => None,
        });
        pairs.collect()
    }

    fn uses_of_functions(&self) -> FunctionUses {
        FunctionUses {
            counts: self.count,
            times: self.latency.contains(&LatencyArgument::Functions),
            watches: self.watch.contains(&NamesArgument::Functions),
            has_histograms: self.hist.contains(&NamesArgument::Functions),
        }
    }

    /// Refuses flags that say how something is timed, if nothing is.
    fn refuse_without_latency(&self, pairs: &[Pair], times_functions: bool) -> Result<(), String> {
        if self.key.is_given() && pairs.is_empty() {
            let why = "-key needs -latency START,STOP: it says which STOP belongs to which START";
            return Err(why.to_owned());
        }
        if self.over.is_given() && pairs.is_empty() && !times_functions {
            let why = "-over needs -latency: it shows slow pairs and calls";
            return Err(why.to_owned());
        }
        Ok(())
    }

    /// Refuses flags that say what is shown of hits, if none are.
    fn refuse_without_watch(&self) -> Result<(), String> {
        if !self.watch.is_empty() {
            return Ok(());
        }
        if !self.over.is_given() {
            self.buffer
                .refuse_without("-watch, or -latency with -over")?;
        }
        if self.fields.is_some() {
            return Err("-fields needs -watch: it chooses what is shown of a hit".to_owned());
        }
        if self.sample.is_given() {
            return Err("-sample needs -watch: it chooses the hits that are recorded".to_owned());
        }
        if self.paths.is_given() {
            return Err("-paths needs -watch: it says how files are shown in its lines".to_owned());
        }
        Ok(())
    }

    fn refuse_filter_of_nothing(&self) -> Result<(), String> {
        let has_hits = self.count || !self.hist.is_empty() || !self.watch.is_empty();
        if self.filter.is_given() && !has_hits && self.latency.is_empty() {
            let why = "-where needs -count, -hist, -latency or -watch: it chooses the hits that are counted, in a histogram, timed, or shown";
            return Err(why.to_owned());
        }
        Ok(())
    }

    /// Checks what histograms are made of, and that `-hist` asks for them.
    fn wanted_histogram(&self) -> Result<Option<WantedHistogram>, String> {
        let histogram = self.histogram.given();
        if self.hist.is_empty() && (histogram.is_some() || self.histogram.is_linear()) {
            return Err(
                "-of and -linear need -hist: they say what histograms are made of".to_owned(),
            );
        }
        if !self.hist.is_empty() && histogram.is_none() {
            return Err(format!("-hist {NEEDS_OF}"));
        }
        if !self.hist.is_empty() && self.count {
            return Err("-hist and -count cannot be combined: histograms have counts".to_owned());
        }
        Ok(histogram)
    }
}

/// What the functions of `-fn`, `-usdt` and `-gc` are selected for.
#[derive(Clone, Copy)]
struct FunctionUses {
    counts: bool,
    times: bool,
    watches: bool,
    has_histograms: bool,
}

impl FunctionUses {
    /// Refuses uses that need functions. -count needs none: without functions, it counts all probes.
    fn refuse_without_functions(self) -> Result<(), String> {
        let why = if self.times {
            "-latency needs START,STOP, or -fn GLOBS or -gc WORK beside it"
        } else if self.watches {
            "-watch needs NAMES, or -fn GLOBS, -usdt GLOBS or -gc WORK beside it"
        } else if self.has_histograms {
            "-hist needs NAMES, or -fn GLOBS, -usdt GLOBS or -gc WORK beside it"
        } else {
            return Ok(());
        };
        Err(why.to_owned())
    }

    /// Refuses functions that are selected for nothing.
    fn refuse_none(self) -> Result<(), String> {
        if self.use_count() == 0 {
            let why = "-fn, -usdt and -gc WORK need one of -count, or -latency, -watch or -hist without a value";
            return Err(why.to_owned());
        }
        Ok(())
    }

    fn refuse_several(self) -> Result<(), String> {
        let flags = [
            (self.counts, "-count"),
            (self.times, "-latency without START,STOP"),
            (self.watches, "-watch without NAMES"),
            (self.has_histograms, "-hist without NAMES"),
        ];
        let given = flags.into_iter().filter(|(is_given, _)| *is_given);
        let given: Vec<&str> = given.map(|(_, flag)| flag).collect();
        match given.as_slice() {
            [] | [_] => Ok(()),
            [first @ .., last] => Err(format!(
                "-fn, -usdt and -gc WORK choose what is counted, timed or shown: give only one of {} and {last}",
                first.join(", ")
            )),
        }
    }

    fn use_count(self) -> usize {
        let uses = [self.counts, self.times, self.watches, self.has_histograms];
        uses.into_iter().filter(|is_wanted| *is_wanted).count()
    }
}

impl ProgramObservation {
    pub(crate) fn observes_anything(&self) -> bool {
        self.reports_collector || self.observes_hits()
    }

    pub(crate) fn observes_hits(&self) -> bool {
        self.counts || self.times() || self.watches() || self.histogram.is_some()
    }

    pub(crate) fn times(&self) -> bool {
        !self.pairs.is_empty() || !self.timed_functions.is_empty()
    }

    /// Whether hits, slow pairs or slow calls are shown.
    pub(crate) fn shows_records(&self) -> bool {
        self.watches() || self.over.is_given()
    }

    pub(crate) fn watches(&self) -> bool {
        !self.watched.is_empty() || self.watches_functions()
    }

    pub(crate) fn watches_functions(&self) -> bool {
        !self.watched_functions.is_empty()
    }

    /// Returns what is done with functions, one word for each use, such as "counted"; nothing without functions.
    pub(crate) fn function_uses(&self) -> Vec<&'static str> {
        let uses = [
            (&self.functions, "counted"),
            (&self.histogram_functions, "observed"),
            (&self.timed_functions, "timed"),
            (&self.watched_functions, "watched"),
        ];
        let uses = uses.iter().filter(|(functions, _)| !functions.is_empty());
        uses.map(|(_, verb)| *verb).collect()
    }

    pub(crate) fn observation(&self) -> Observation {
        let observation = self.sample.add_to(Observation::new());
        let mut observation = if self.counts || self.watches() || self.histogram.is_some() {
            self.filter.add_to(observation)
        } else {
            self.filter.add_to_starts(observation)
        };
        if self.counts && self.functions.is_empty() {
            observation = observation.count(Selector::All);
        }
        if let Some(by) = &self.by {
            observation = by.add_to(observation);
        }
        if let Some(histogram) = &self.histogram {
            observation = histogram.add_to(observation);
            let probes = self.histogram_probes.iter().cloned();
            observation = probes.fold(observation, Observation::count);
        }
        let functions = self.functions.iter().chain(&self.histogram_functions);
        let functions = functions.cloned();
        observation = functions.fold(observation, Observation::count_functions);
        let timed = self.timed_functions.iter().cloned();
        observation = timed.fold(observation, Observation::time_functions);
        for pair in &self.pairs {
            observation = observation.time(&pair.start, &pair.stop);
        }
        observation = self.over.add_to(self.key.add_to(observation));
        let watched = self.watched.iter().cloned();
        observation = watched.fold(observation, Observation::watch);
        let observation = self.buffer.add_to(observation);
        self.calls.add_to(observation, &self.watched_functions)
    }
}
