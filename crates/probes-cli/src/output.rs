//! Formats the results of the commands as plain text, as a table, or as JSON.

mod answer_tables;
mod bars;
mod counted;
mod counted_stacks;
mod diagnosis;
mod format;
mod function_sources;
mod functions;
mod gc;
mod histograms;
mod hits;
mod holder;
mod keyed;
mod keyed_histograms;
mod latencies;
mod location;
mod message;
mod paths;
mod plain;
mod profiles;
mod quantiles;
mod recorded;
mod refused;
mod released;
mod runtime_events;
mod slow_pairs;
mod stack_quality;
mod stacks;
mod subjects;
mod svg;
mod table;
mod timeline;
mod usdt;
mod view;

use std::io::{self, Write};
use std::net::{IpAddr, SocketAddr};

use probes_lib::CleanReport;

pub(crate) use counted::CountReport;
pub(crate) use counted_stacks::CountedStacks;
pub(crate) use diagnosis::{Ability, CommandAnswer, DiagnosisReport};
pub(crate) use format::{Format, ReportedFigures};
use format::{VERSION, json, write_json};
pub(crate) use function_sources::FunctionSources;
pub(crate) use functions::FunctionListing;
pub(crate) use gc::{GcReport, LongPause};
pub(crate) use histograms::{EventHistogram, HistogramReading, Histograms};
pub(crate) use hits::{Field, Hits, Missing, ProcessHit, missing, why_lost};
pub(crate) use keyed::{KeyedReading, KeyedReport};
pub(crate) use keyed_histograms::{KeyedHistogramReading, KeyedHistogramReport, KeyedQuestion};
pub(crate) use latencies::{
    Evidence, Latencies, LatencyReading, RecordedPairs, TimesAsked, with_unit,
};
pub(crate) use message::{MessageKind, WarningKind, message};
pub(crate) use paths::PathForm;
pub(crate) use profiles::{
    IncompleteBecause, IncompleteStacks, PictureKind, ProfileBy, ProfileOptions, ProfileReport,
};
pub(crate) use recorded::{
    FrequentName, RecordCounts, RecordReport, hit_annotations, wait_annotations, wait_name,
};
pub(crate) use released::Released;
pub(crate) use runtime_events::{
    EventCounts, EventLine, EventLines, EventTotals, LostWords, sort_by_time,
};
pub(crate) use slow_pairs::SlowPairs;
pub(crate) use stacks::ThreadStacks;
pub(crate) use timeline::{
    Annotation, AnnotationValue, Encoder, NameId, SUFFIXES, TimelineFile, TimelineFormat,
    TracedProcess, TrackEvent, TrackEventKind, TrackId, TrackOf,
};
pub(crate) use usdt::{SiteSources, UsdtListing};
pub(crate) use view::{Changes, Detail, Listing, ProcessList, Update};

use crate::failure::Failure;

/// Formats the probes of a process or a file; tables show sites if `sites`, and each line begins with the pid if
/// `shows_pid`.
pub(crate) fn listing(
    format: Format,
    listing: &Listing<'_>,
    sites: bool,
    shows_pid: bool,
) -> Result<String, Failure> {
    match format {
        Format::Plain => Ok(plain::listing(listing, shows_pid)),
        Format::Table => Ok(answer_tables::listing(listing, sites, shows_pid)),
        Format::Json => json(listing),
    }
}

/// Writes the functions of a process or a file, one by one: a hostile file may have names that do not fit into memory.
pub(crate) fn functions(
    format: Format,
    listing: &FunctionListing<'_>,
    to: &mut dyn Write,
) -> io::Result<()> {
    match format {
        Format::Plain => listing.plain(to),
        Format::Table => listing.table(to),
        Format::Json => write_json(listing, to),
    }
}

/// Formats the USDT probes of a process or a file; tables show sites if `sites`.
pub(crate) fn usdt(
    format: Format,
    listing: &UsdtListing<'_>,
    sites: bool,
) -> Result<String, Failure> {
    match format {
        Format::Plain => Ok(listing.plain()),
        Format::Table => Ok(listing.table(sites)),
        Format::Json => json(listing),
    }
}

/// The processes that have probes.
pub(crate) fn processes(format: Format, processes: &ProcessList) -> Result<String, Failure> {
    match format {
        Format::Plain => Ok(plain::processes(processes)),
        Format::Table => Ok(answer_tables::processes(processes)),
        Format::Json => json(processes),
    }
}

/// Formats what an update changed; each line begins with the pid if `shows_pid`.
pub(crate) fn changes(
    format: Format,
    changes: &Changes<'_>,
    shows_pid: bool,
) -> Result<String, Failure> {
    match format {
        Format::Plain => Ok(plain::changes(changes, shows_pid)),
        Format::Table => Ok(answer_tables::changes(changes, shows_pid)),
        Format::Json => json(changes),
    }
}

/// What was undone for dead holders.
pub(crate) fn released(
    format: Format,
    released: &[Released<'_>],
    shows_pid: bool,
) -> Result<String, Failure> {
    match format {
        Format::Plain => Ok(released::plain(released, shows_pid)),
        Format::Table => Ok(released::table(released, shows_pid)),
        Format::Json => released.iter().map(json).collect(),
    }
}

/// The hits that were counted.
pub(crate) fn counted(format: Format, counted: &CountReport<'_>) -> Result<String, Failure> {
    match format {
        Format::Plain => Ok(counted.plain()),
        Format::Table => Ok(counted.table()),
        Format::Json => json(counted),
    }
}

/// The hits that were counted by keys.
pub(crate) fn keyed(format: Format, keyed: &KeyedReport<'_>) -> Result<String, Failure> {
    match format {
        Format::Plain => Ok(keyed.plain()),
        Format::Table => Ok(keyed.table()),
        Format::Json => json(keyed),
    }
}

/// How many sites and functions of a process were restored.
pub(crate) fn cleaned(format: Format, pid: i32, cleaned: CleanReport) -> Result<String, Failure> {
    #[derive(serde::Serialize)]
    #[serde(tag = "type", rename = "cleaned")]
    struct CleanedView {
        version: u32,
        pid: i32,
        sites: usize,
        still_mapped: u64,
    }
    let sites = cleaned.sites;
    match format {
        Format::Plain => Ok(format!("{pid} {sites}\n")),
        Format::Table => {
            let row = vec![pid.to_string(), sites.to_string()];
            Ok(table::table(&["pid", "observed"], std::iter::once(row)))
        }
        Format::Json => json(&CleanedView {
            version: VERSION,
            pid,
            sites,
            still_mapped: cleaned.still_mapped,
        }),
    }
}

/// The address at which `serve` answers, and how many processes it observes.
pub(crate) fn serving(
    format: Format,
    address: SocketAddr,
    processes: usize,
) -> Result<String, Failure> {
    #[derive(serde::Serialize)]
    #[serde(tag = "type", rename = "serving")]
    struct ServingView<'v> {
        version: u32,
        url: &'v str,
        address: IpAddr,
        port: u16,
        processes: usize,
    }
    let url = format!("http://{address}/metrics");
    match format {
        Format::Plain | Format::Table => Ok(url + "\n"),
        Format::Json => json(&ServingView {
            version: VERSION,
            url: &url,
            address: address.ip(),
            port: address.port(),
            processes,
        }),
    }
}

/// The version of the tool, and what it was built from.
pub(crate) fn release(format: Format) -> Result<String, Failure> {
    #[derive(serde::Serialize)]
    #[serde(tag = "type", rename = "version")]
    struct View {
        version: u32,
        release: &'static str,
        commit: Option<&'static str>,
        target: &'static str,
        features: Vec<&'static str>,
    }
    let features = [("fault-injection", probes_lib::HAS_FAULT_INJECTION)];
    let features = features.into_iter().filter(|(_, is_on)| *is_on);
    let view = View {
        version: VERSION,
        release: env!("CARGO_PKG_VERSION"),
        // See build.rs.
        commit: option_env!("OCAML_PROBES_BUILD_COMMIT"),
        target: env!("OCAML_PROBES_BUILD_TARGET"),
        features: features.map(|(name, _)| name).collect(),
    };
    if format == Format::Json {
        return json(&view);
    }
    let or_none = |text: &str| if text.is_empty() { "none" } else { text }.to_owned();
    Ok(format!(
        "ocaml-probes {}\ncommit {}\ntarget {}\nfeatures {}\n",
        view.release,
        view.commit.unwrap_or("unknown"),
        view.target,
        or_none(&view.features.join(" ")),
    ))
}
