//! [`UsdtListing`]: the USDT probes of all providers of a process or a file, in all formats. The field names are
//! those of the JSON output: new ones may be added, none renamed.

use std::borrow::Cow;
use std::collections::HashMap;
use std::fmt::Write;

use probes_lib::{
    Error, FileAddr, FunctionTable, LiveAddr, PlacedUsdtSite, SourceMap, UsdtObject, UsdtProbe,
    UsdtProbes,
};
use serde::Serialize;

use super::format::VERSION;
use super::functions::UnreadableView;
use super::location::{function_or_unknown, source_or_unknown};
use super::paths::{PathForm, ShownPaths};
use super::table::table;
use super::view::{text, text_or_null};
use crate::text::{Escaped, number_of};

/// Probes, sorted by `PROVIDER:NAME`.
#[derive(Serialize)]
#[serde(tag = "type", rename = "usdt")]
pub(crate) struct UsdtListing<'u> {
    version: u32,
    pid: Option<i32>,
    program: Cow<'u, str>,
    probes: Vec<UsdtProbeView<'u>>,
    /// The mapped files whose probes are not known.
    unreadable: Vec<UnreadableView>,
    /// How plain text and tables show the paths in it.
    #[serde(skip)]
    paths: ShownPaths,
}

#[derive(Serialize)]
struct UsdtProbeView<'u> {
    provider: &'u str,
    name: &'u str,
    #[serde(skip)]
    site_count: usize,
    sites: Vec<UsdtSiteView<'u>>,
    semaphores: Vec<UsdtSemaphoreView<'u>>,
}

#[derive(Serialize)]
struct UsdtSiteView<'u> {
    object: Cow<'u, str>,
    #[serde(serialize_with = "text_or_null")]
    address: Option<LiveAddr>,
    #[serde(serialize_with = "text")]
    file_address: FileAddr,
    function: Option<String>,
    file: Option<String>,
    line: Option<u32>,
    arguments: Cow<'u, str>,
}

#[derive(Serialize)]
struct UsdtSemaphoreView<'u> {
    object: Cow<'u, str>,
    #[serde(serialize_with = "text_or_null")]
    address: Option<LiveAddr>,
    #[serde(serialize_with = "text")]
    file_address: FileAddr,
}

/// The functions and source lines of sites; each file is read when its first site is shown.
#[derive(Default)]
pub(crate) struct SiteSources {
    objects: HashMap<*const UsdtObject, (Option<FunctionTable>, Option<SourceMap>)>,
    /// Why functions or source lines are not known.
    pub(crate) unknown: Vec<Error>,
}

impl SiteSources {
    fn of(&mut self, object: &UsdtObject) -> (Option<&FunctionTable>, Option<&SourceMap>) {
        let unknown = &mut self.unknown;
        let (functions, lines) = self.objects.entry(object).or_insert_with(|| {
            let functions = object.functions().map_err(|why| unknown.push(why));
            let lines = object.source_map().map_err(|why| unknown.push(why));
            (functions.ok(), lines.ok())
        });
        (functions.as_ref(), lines.as_ref())
    }
}

impl<'u> UsdtListing<'u> {
    /// The `selected` ones of `probes`, which are those of the process `pid`, or of a file. Sites are shown if there
    /// are `sources` for them.
    pub(crate) fn of(
        probes: &'u UsdtProbes,
        selected: &[UsdtProbe<'u>],
        pid: Option<i32>,
        form: PathForm,
        mut sources: Option<&mut SiteSources>,
    ) -> UsdtListing<'u> {
        let view = |probe: &UsdtProbe<'u>| UsdtProbeView::of(probe, sources.as_deref_mut());
        let views: Vec<UsdtProbeView<'u>> = selected.iter().map(view).collect();
        let sites = views.iter().flat_map(|probe| &probe.sites);
        let paths = sites.flat_map(|site| [Some(&*site.object), site.file.as_deref()]);
        let semaphores = views.iter().flat_map(|probe| &probe.semaphores);
        let paths = paths.chain(semaphores.map(|it| Some(&*it.object)));
        let unreadable = probes.unreadable().iter().map(UnreadableView::of);
        UsdtListing {
            version: VERSION,
            pid,
            program: probes.program().to_string_lossy(),
            paths: ShownPaths::new(form, paths.flatten()),
            probes: views,
            unreadable: unreadable.collect(),
        }
    }

    pub(super) fn plain(&self) -> String {
        let mut text = String::new();
        for probe in &self.probes {
            // Writing to a string does not fail.
            let _ = writeln!(text, "{}", probe.shown());
            for site in &probe.sites {
                let words = site.cells(&self.paths);
                let words: Vec<&str> = words.iter().map(String::as_str).collect();
                let _ = writeln!(text, "  site {}", words.join(" ").trim_end());
            }
            for semaphore in &probe.semaphores {
                let _ = writeln!(text, "  semaphore {}", semaphore.shown_address());
            }
        }
        text
    }

    pub(super) fn table(&self, sites: bool) -> String {
        if !sites {
            let rows = self.probes.iter();
            let rows = rows.map(|probe| vec![probe.shown(), probe.site_count.to_string()]);
            return table(&["probe", "sites"], rows);
        }
        let head = [
            "probe",
            "kind",
            "address",
            "object",
            "function",
            "source",
            "arguments",
        ];
        let rows = self.probes.iter().flat_map(|probe| {
            let name = vec![probe.shown(), number_of(probe.site_count, "site")];
            let sites = probe.sites.iter().map(|site| {
                let cells = site.cells(&self.paths);
                let kind = ["", "site"].map(str::to_owned).into_iter();
                kind.chain(cells).collect()
            });
            let semaphores = probe.semaphores.iter().map(|one| {
                let object = Escaped(self.paths.show(&one.object)).to_string();
                let kind = ["", "semaphore"].map(str::to_owned).into_iter();
                kind.chain([one.shown_address(), object]).collect()
            });
            let rows: Vec<Vec<String>> =
                [name].into_iter().chain(sites).chain(semaphores).collect();
            rows
        });
        table(&head, rows)
    }

    /// `12 probes, 30 sites`.
    pub(crate) fn sum(&self) -> String {
        let sites: usize = self.probes.iter().map(|probe| probe.site_count).sum();
        let probes = number_of(self.probes.len(), "probe");
        format!("{probes}, {}", number_of(sites, "site"))
    }
}

impl<'u> UsdtProbeView<'u> {
    fn of(probe: &UsdtProbe<'u>, sources: Option<&mut SiteSources>) -> UsdtProbeView<'u> {
        let placed = probe.sites().iter();
        let site_count = placed.filter(|it| it.site.address.is_some()).count();
        let (mut sites, mut semaphores) = (Vec::new(), Vec::new());
        if let Some(sources) = sources {
            let placed = probe.sites().iter();
            sites.extend(placed.filter_map(|it| UsdtSiteView::of(it, sources)));
            semaphores = semaphores_of(probe);
        }
        UsdtProbeView {
            provider: probe.provider(),
            name: probe.name(),
            site_count,
            sites,
            semaphores,
        }
    }

    /// `PROVIDER:NAME`.
    fn shown(&self) -> String {
        format!("{}:{}", Escaped(self.provider), Escaped(self.name))
    }
}

impl<'u> UsdtSiteView<'u> {
    /// `None` if the note has only a semaphore.
    fn of(placed: &PlacedUsdtSite<'u>, sources: &mut SiteSources) -> Option<UsdtSiteView<'u>> {
        let PlacedUsdtSite { object, site } = *placed;
        let file_address = site.address?;
        let (functions, lines) = sources.of(object);
        let function = functions.and_then(|functions| functions.function_at(file_address)?.name());
        let (file, line) = lines.map_or((None, None), |lines| lines.line(file_address));
        Some(UsdtSiteView {
            object: object.path().to_string_lossy(),
            address: placed.address(),
            file_address,
            function: function.map(|name| name.text),
            file: file.map(str::to_owned),
            line,
            arguments: String::from_utf8_lossy(&site.arguments),
        })
    }

    /// Its address, object, function, source and arguments.
    fn cells(&self, paths: &ShownPaths) -> [String; 5] {
        [
            shown_address(self.address, self.file_address),
            Escaped(paths.show(&self.object)).to_string(),
            function_or_unknown(self.function.as_deref()),
            source_or_unknown(self.file.as_deref(), self.line, paths),
            Escaped(&self.arguments).to_string(),
        ]
    }
}

impl UsdtSemaphoreView<'_> {
    fn shown_address(&self) -> String {
        shown_address(self.address, self.file_address)
    }
}

/// The semaphores of a probe, each once, by object and address.
fn semaphores_of<'u>(probe: &UsdtProbe<'u>) -> Vec<UsdtSemaphoreView<'u>> {
    let of_object = |one: &PlacedUsdtSite<'_>, other: &PlacedUsdtSite<'_>| {
        std::ptr::eq(one.object, other.object)
    };
    let mut views = Vec::new();
    for sites in probe.sites().chunk_by(of_object) {
        let object = sites[0].object;
        let mut semaphores: Vec<FileAddr> =
            sites.iter().filter_map(|it| it.site.semaphore).collect();
        semaphores.sort_unstable();
        semaphores.dedup();
        views.extend(
            semaphores
                .into_iter()
                .map(|file_address| UsdtSemaphoreView {
                    object: object.path().to_string_lossy(),
                    address: object.live(file_address),
                    file_address,
                }),
        );
    }
    views
}

/// The address in the process, or else that in the file.
fn shown_address(address: Option<LiveAddr>, file_address: FileAddr) -> String {
    address.map_or_else(|| file_address.to_string(), |address| address.to_string())
}
