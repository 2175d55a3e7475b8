//! Answers as text: plain, as a table, or as JSON.

mod counted;
mod format;
mod hits;
mod latencies;
mod plain;
mod svg;
mod table;
mod view;

use probes_lib::CleanReport;

pub(crate) use counted::Counted;
pub(crate) use format::Format;
use format::{VERSION, json};
pub(crate) use hits::Hits;
pub(crate) use latencies::{Latencies, in_words};
pub(crate) use view::{Changes, Detail, Listing, Processes};

use crate::failure::Failure;

/// The probes of a process or a file; with the pid in each line, if there are several processes.
pub(crate) fn listing(
    format: Format,
    listing: &Listing<'_>,
    sites: bool,
    several: bool,
) -> Result<String, Failure> {
    match format {
        Format::Plain => Ok(plain::listing(listing, several)),
        Format::Table => Ok(table::listing(listing, sites, several)),
        Format::Json => json(listing),
    }
}

/// The processes that have probes.
pub(crate) fn processes(format: Format, processes: &Processes) -> Result<String, Failure> {
    match format {
        Format::Plain => Ok(plain::processes(processes)),
        Format::Table => Ok(table::processes(processes)),
        Format::Json => json(processes),
    }
}

/// What an update changed; with the pid in each line, if there are several processes.
pub(crate) fn changes(
    format: Format,
    changes: &Changes<'_>,
    several: bool,
) -> Result<String, Failure> {
    match format {
        Format::Plain => Ok(plain::changes(changes, several)),
        Format::Table => Ok(table::changes(changes, several)),
        Format::Json => json(changes),
    }
}

/// The hits that were counted.
pub(crate) fn counted(format: Format, counted: &Counted<'_>) -> Result<String, Failure> {
    match format {
        Format::Plain => Ok(counted.plain()),
        Format::Table => Ok(counted.table()),
        Format::Json => json(counted),
    }
}

/// The times of pairs.
pub(crate) fn latencies(format: Format, latencies: &Latencies<'_>) -> Result<String, Failure> {
    match format {
        Format::Plain => Ok(latencies.plain()),
        Format::Table => Ok(latencies.charts()),
        Format::Json => json(latencies),
    }
}

/// How many sites of a process were given back their own code.
pub(crate) fn cleaned(format: Format, pid: i32, cleaned: CleanReport) -> Result<String, Failure> {
    #[derive(serde::Serialize)]
    struct View {
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
            Ok(table::table(&["pid", "sites"], std::iter::once(row)))
        }
        Format::Json => json(&View {
            version: VERSION,
            pid,
            sites,
            still_mapped: cleaned.still_mapped,
        }),
    }
}
