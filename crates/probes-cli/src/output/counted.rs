//! Counts of hits, in one shape for all formats. The field names are those of the JSON output.

mod functions;

use std::borrow::Cow;
use std::cmp::Reverse;
use std::fmt::Write;
use std::iter::repeat;
use std::time::Duration;

use probes_lib::{Counts, LiveAddr, SourceMap, Target};
use serde::Serialize;

use self::functions::{CountedFunctions, FunctionRow};
use super::format::{VERSION, seconds, seconds_or_null, time_prefix};
use super::location::{function_or_unknown, source_or_unknown};
use super::paths::ShownPaths;
use super::table;
use super::view::{Detail, text};
use crate::text::Escaped;

/// The hits of the probes and functions of a process, most first.
#[derive(Serialize)]
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
    probes: Vec<CountRow<'c>>,
    /// `None` if only probes are counted.
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    functions: Option<CountedFunctions<'c>>,
    #[serde(skip)]
    detail: &'c Detail,
}

/// A probe, a site of one, or a function.
#[derive(Clone, Debug, Serialize)]
struct CountRow<'c> {
    name: &'c str,
    hits: u64,
    /// Hits a second.
    rate: f64,
    /// Other hits, for which a filter has no answer; `None` without a filter.
    #[serde(skip_serializing_if = "Option::is_none")]
    untyped: Option<u64>,
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    site: Option<SiteRow<'c>>,
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    function: Option<FunctionRow<'c>>,
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

/// How many hits a row had before.
#[derive(Clone, Copy, Default)]
struct Before {
    hits: u64,
    untyped: u64,
}

impl CountRow<'_> {
    /// How many hits a probe or site had in `before`.
    fn hits_in(&self, before: Option<&Counts>) -> Before {
        let Some(before) = before else {
            return Before::default();
        };
        let (hits, untyped) = match &self.site {
            Some(site) => before
                .sites(self.name)
                .find(|one| one.address == site.address)
                .map_or((None, None), |one| (Some(one.hits), one.untyped)),
            None => (before.hits(self.name), before.untyped(self.name)),
        };
        Before {
            hits: hits.unwrap_or(0),
            untyped: untyped.unwrap_or(0),
        }
    }

    /// Where it is: address, function or object, source; `None` for a probe.
    fn place(&self, paths: &ShownPaths) -> Option<[String; 3]> {
        let site = self.site.as_ref().map(|site| {
            let source = source_or_unknown(site.file.as_deref(), site.line, paths);
            let function = function_or_unknown(site.function.as_deref());
            [site.address.to_string(), function, source]
        });
        site.or_else(|| self.function.as_ref()?.place(paths))
    }
}

impl<'c> CountReport<'c> {
    /// All hits: of each site, if that detail is wanted, otherwise of each probe; and of each function.
    pub(crate) fn new(
        target: &'c Target,
        counts: &'c Counts,
        detail: &'c Detail,
    ) -> CountReport<'c> {
        let probes = counts.probes();
        let rows = probes.flat_map(|(name, hits)| {
            if detail.sites {
                return site_rows(counts, name, &detail.sources);
            }
            vec![CountRow {
                name,
                hits,
                rate: 0.0,
                untyped: counts.untyped(name),
                site: None,
                function: None,
            }]
        });
        CountReport {
            version: VERSION,
            pid: target.pid(),
            program: target.program().to_string_lossy(),
            at: None,
            seconds: Duration::ZERO,
            probes: rows.collect(),
            functions: CountedFunctions::of(counts),
            detail,
        }
    }

    /// Only the hits since `before`, which was `elapsed` ago.
    pub(crate) fn hits_since(
        mut self,
        before: Option<&Counts>,
        elapsed: Duration,
    ) -> CountReport<'c> {
        for (row, before) in self.rows_with_hits_in(before) {
            row.hits = row.hits.saturating_sub(before.hits);
            row.untyped = row.untyped.map(|it| it.saturating_sub(before.untyped));
        }
        self.seconds = elapsed;
        self.with_rates(None)
    }

    /// All hits so far, with the rates since `before`, which was `elapsed` ago.
    pub(crate) fn with_rates_since(
        mut self,
        before: Option<&Counts>,
        elapsed: Duration,
    ) -> CountReport<'c> {
        self.seconds = elapsed;
        self.with_rates(before)
    }

    fn with_rates(mut self, before: Option<&Counts>) -> CountReport<'c> {
        let seconds = self.seconds.as_secs_f64().max(f64::MIN_POSITIVE);
        for (row, before) in self.rows_with_hits_in(before) {
            row.rate = row.hits.saturating_sub(before.hits) as f64 / seconds;
        }
        self.probes.sort_by_key(|row| Reverse(row.hits));
        if let Some(functions) = &mut self.functions {
            functions.select(&self.detail.function_sources);
        }
        self
    }

    /// The rows, each with how many hits it had in `before`. Those of functions have not been selected yet.
    fn rows_with_hits_in<'r>(
        &'r mut self,
        before: Option<&'r Counts>,
    ) -> impl Iterator<Item = (&'r mut CountRow<'c>, Before)> {
        let probes = self.probes.iter_mut().map(move |row| {
            let before = row.hits_in(before);
            (row, before)
        });
        let before = before.into_iter().flat_map(Counts::functions);
        let before = before.map(|function| Before {
            hits: function.hits,
            untyped: function.untyped.unwrap_or(0),
        });
        let before = before.chain(repeat(Before::default()));
        let functions = self.functions.iter_mut().flat_map(|it| &mut it.rows);
        probes.chain(functions.zip(before))
    }

    /// The same, with the time since the beginning. What cannot be counted is left to the last report.
    pub(crate) fn at(mut self, at: Duration) -> CountReport<'c> {
        self.at = Some(at);
        if let Some(functions) = &mut self.functions {
            functions.leave_out_refused();
        }
        self
    }

    /// All rows, most hits first.
    fn rows(&self) -> Vec<&CountRow<'c>> {
        let functions = self.functions.iter().flat_map(|it| &it.rows);
        let mut rows: Vec<&CountRow<'c>> = self.probes.iter().chain(functions).collect();
        rows.sort_by_key(|row| Reverse(row.hits));
        rows
    }

    /// The paths in it, as text shows them.
    fn paths(&self) -> ShownPaths {
        let sites = self.probes.iter().filter_map(|row| row.site.as_ref());
        let files = sites.filter_map(|site| site.file.as_deref());
        let functions = self.functions.iter().flat_map(CountedFunctions::paths);
        ShownPaths::new(self.detail.paths, files.chain(functions))
    }

    /// A line for each row.
    pub(super) fn plain(&self) -> String {
        let (mut text, paths) = (String::new(), self.paths());
        let at = time_prefix(self.at);
        for row in self.rows() {
            let name = Escaped(row.name);
            // Writing to a string does not fail.
            let _ = write!(text, "{at}{} {:.1} {name}", row.hits, row.rate);
            for word in row.place(&paths).into_iter().flatten() {
                let _ = write!(text, " {word}");
            }
            if let Some(untyped) = row.untyped {
                let _ = write!(text, " untyped {untyped}");
            }
            text.push('\n');
        }
        text
    }

    /// A table; with the time since the beginning, if there is one.
    pub(crate) fn table(&self) -> String {
        let (rows, paths) = (self.rows(), self.paths());
        let at = self.at.map(|at| format!("{:.1}", at.as_secs_f64()));
        let mut head: Vec<&str> = at.iter().map(|_| "seconds").collect();
        let (what, is_in) = match &self.functions {
            None => ("probe", "function"),
            Some(_) if self.probes.is_empty() => ("function", "object"),
            Some(_) => ("name", "in"),
        };
        head.extend([what, "hits", "hits/s"]);
        if rows.iter().any(|row| row.untyped.is_some()) {
            head.push("untyped");
        }
        if rows.iter().any(|row| row.place(&paths).is_some()) {
            head.extend(["address", is_in, "source"]);
        }
        let rows = rows.into_iter().map(|row| {
            let mut cells: Vec<String> = at.iter().cloned().collect();
            cells.extend([
                Escaped(row.name).to_string(),
                row.hits.to_string(),
                format!("{:.0}", row.rate),
            ]);
            cells.extend(row.untyped.map(|untyped| untyped.to_string()));
            cells.extend(row.place(&paths).into_iter().flatten());
            cells
        });
        table::table(&head, rows)
    }
}

fn site_rows<'c>(
    counts: &'c Counts,
    name: &'c str,
    sources: &[Option<SourceMap>],
) -> Vec<CountRow<'c>> {
    let sites = counts.sites(name).map(|one| {
        let mut objects = counts.objects().iter();
        let index = objects.position(|object| std::ptr::eq(object, one.object));
        let source = index.and_then(|index| sources.get(index)?.as_ref());
        let location = source.map(|source| source.locate(one.site.address()));
        let location = location.unwrap_or_default();
        CountRow {
            name,
            hits: one.hits,
            rate: 0.0,
            untyped: one.untyped,
            site: Some(SiteRow {
                object: one.object.path().to_string_lossy(),
                address: one.address,
                function: location.function,
                file: location.file,
                line: location.line,
            }),
            function: None,
        }
    });
    sites.collect()
}
