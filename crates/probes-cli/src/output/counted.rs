//! Counts of hits, in one shape for all formats. The field names are those of the JSON output.

use std::borrow::Cow;
use std::cmp::Reverse;
use std::fmt::Write;
use std::time::Duration;

use probes_lib::{Counts, LiveAddr, SourceMap, Target};
use serde::{Serialize, Serializer};

use super::format::{VERSION, seconds, seconds_or_null};
use super::paths::ShownPaths;
use super::plain::{function_or_unknown, source_or_unknown};
use super::table;
use super::view::Detail;
use crate::text::Escaped;

/// The hits of the probes of a process, most first.
#[derive(Debug, Serialize)]
#[serde(tag = "type", rename = "count")]
pub(crate) struct CountReport<'c> {
    version: u32,
    pid: i32,
    program: Cow<'c, str>,
    /// The time since the observation began; `None` unless it still goes on.
    #[serde(serialize_with = "seconds_or_null")]
    at: Option<Duration>,
    /// How long the hits were counted.
    #[serde(serialize_with = "seconds")]
    seconds: Duration,
    probes: Vec<Row<'c>>,
    /// The paths of the source files, as text shows them.
    #[serde(skip)]
    paths: ShownPaths,
}

/// A probe, or a site of one.
#[derive(Clone, Debug, Serialize)]
struct Row<'c> {
    name: &'c str,
    hits: u64,
    /// Hits a second.
    rate: f64,
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    site: Option<SiteRow<'c>>,
}

#[derive(Clone, Debug, Serialize)]
struct SiteRow<'c> {
    object: Cow<'c, str>,
    #[serde(serialize_with = "text")]
    address: LiveAddr,
    function: Option<String>,
    file: Option<String>,
    line: Option<u32>,
}

impl Row<'_> {
    /// How many hits it had in `before`.
    fn hits_in(&self, before: Option<&Counts>) -> u64 {
        let Some(before) = before else {
            return 0;
        };
        let hits = match &self.site {
            Some(site) => before
                .sites(self.name)
                .find(|one| one.address == site.address)
                .map(|one| one.hits),
            None => before.hits(self.name),
        };
        hits.unwrap_or(0)
    }
}

impl<'c> CountReport<'c> {
    /// All hits: of each site, if that detail is wanted, otherwise of each probe.
    pub(crate) fn new(target: &'c Target, counts: &'c Counts, detail: &Detail) -> CountReport<'c> {
        let probes = counts.probes();
        let rows = probes.flat_map(|(name, hits)| {
            if detail.sites {
                return site_rows(counts, name, &detail.sources);
            }
            vec![Row {
                name,
                hits,
                rate: 0.0,
                site: None,
            }]
        });
        let rows: Vec<Row<'c>> = rows.collect();
        let sites = rows.iter().filter_map(|row| row.site.as_ref());
        let files = sites.filter_map(|site| site.file.as_deref());
        CountReport {
            version: VERSION,
            pid: target.pid(),
            program: target.program().to_string_lossy(),
            at: None,
            seconds: Duration::ZERO,
            paths: ShownPaths::new(detail.paths, files),
            probes: rows,
        }
    }

    /// Only the hits since `before`, which was `seconds` ago.
    pub(crate) fn hits_since(
        mut self,
        before: Option<&Counts>,
        seconds: Duration,
    ) -> CountReport<'c> {
        for row in &mut self.probes {
            row.hits = row.hits.saturating_sub(row.hits_in(before));
        }
        self.seconds = seconds;
        self.with_rates(None)
    }

    /// All hits so far, with the rates since `before`, which was `seconds` ago.
    pub(crate) fn with_rates_since(
        mut self,
        before: Option<&Counts>,
        seconds: Duration,
    ) -> CountReport<'c> {
        self.seconds = seconds;
        self.with_rates(before)
    }

    fn with_rates(mut self, before: Option<&Counts>) -> CountReport<'c> {
        let seconds = self.seconds.as_secs_f64().max(f64::MIN_POSITIVE);
        for row in &mut self.probes {
            row.rate = row.hits.saturating_sub(row.hits_in(before)) as f64 / seconds;
        }
        self.probes.sort_by_key(|row| Reverse(row.hits));
        self
    }

    /// The same, with the time since the beginning.
    pub(crate) fn at(mut self, at: Duration) -> CountReport<'c> {
        self.at = Some(at);
        self
    }

    /// A line for each row.
    pub(super) fn plain(&self) -> String {
        let mut text = String::new();
        for row in &self.probes {
            if let Some(at) = self.at {
                // Writing to a string does not fail.
                let _ = write!(text, "{:.1} ", at.as_secs_f64());
            }
            let _ = write!(text, "{} {:.1} {}", row.hits, row.rate, Escaped(row.name));
            if let Some(site) = &row.site {
                let _ = write!(
                    text,
                    " {} {} {}",
                    site.address,
                    site.function(),
                    site.source(&self.paths)
                );
            }
            text.push('\n');
        }
        text
    }

    /// A table; with the time since the beginning, if there is one.
    pub(crate) fn table(&self) -> String {
        let has_sites = self.probes.iter().any(|row| row.site.is_some());
        let at = self.at.map(|at| format!("{:.1}", at.as_secs_f64()));
        let mut head: Vec<&str> = at.iter().map(|_| "seconds").collect();
        head.extend(["probe", "hits", "hits/s"]);
        if has_sites {
            head.extend(["address", "function", "source"]);
        }
        let rows = self.probes.iter().map(|row| {
            let mut cells: Vec<String> = at.iter().cloned().collect();
            cells.extend([
                Escaped(row.name).to_string(),
                row.hits.to_string(),
                format!("{:.0}", row.rate),
            ]);
            if let Some(site) = &row.site {
                cells.extend([
                    site.address.to_string(),
                    site.function(),
                    site.source(&self.paths),
                ]);
            }
            cells
        });
        table::table(&head, rows)
    }
}

fn site_rows<'c>(counts: &'c Counts, name: &'c str, sources: &[Option<SourceMap>]) -> Vec<Row<'c>> {
    let sites = counts.sites(name).map(|one| {
        let mut objects = counts.objects().iter();
        let index = objects.position(|object| std::ptr::eq(object, one.object));
        let source = index.and_then(|index| sources.get(index)?.as_ref());
        let location = source.map(|source| source.locate(one.site.address()));
        let location = location.unwrap_or_default();
        Row {
            name,
            hits: one.hits,
            rate: 0.0,
            site: Some(SiteRow {
                object: one.object.path().to_string_lossy(),
                address: one.address,
                function: location.function,
                file: location.file,
                line: location.line,
            }),
        }
    });
    sites.collect()
}

impl SiteRow<'_> {
    fn function(&self) -> String {
        function_or_unknown(self.function.as_deref())
    }

    fn source(&self, paths: &ShownPaths) -> String {
        source_or_unknown(self.file.as_deref(), self.line, paths)
    }
}

fn text<S: Serializer>(value: &LiveAddr, to: S) -> Result<S::Ok, S::Error> {
    to.collect_str(value)
}
