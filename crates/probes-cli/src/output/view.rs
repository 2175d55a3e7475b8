//! What all formats show of probes, processes and updates. The field names are those of the JSON output: new
//! ones may be added, none renamed.

use std::borrow::Cow;
use std::fmt::Display;
use std::time::Duration;

use probes_lib::{
    CodeDigest, FileAddr, Generation, Holders, LiveAddr, Object, Probe, ProbeChange, ProbeState,
    ProbeStates, ProbeTable, Report, Site, SiteCode, SourceMap, State, Survey, SurveyedProcess,
    Target, ToolProcess,
};
use serde::{Serialize, Serializer};

use super::format::{VERSION, seconds};
use super::function_sources::FunctionSources;
use super::holder::{self, HolderView};
use super::paths::{PathForm, ShownPaths};

/// The probes of a process, or of a file that is not running: what only a process has is then `None`.
#[derive(Debug, Serialize)]
pub(crate) struct Listing<'t> {
    r#type: &'static str,
    version: u32,
    pub(super) pid: Option<i32>,
    pub(super) program: Cow<'t, str>,
    build_id: Option<String>,
    /// How many sites are observed now.
    observed_sites: Option<usize>,
    /// How many functions are observed now.
    #[serde(skip_serializing_if = "Option::is_none")]
    observed_functions: Option<usize>,
    /// The process that observes them, or the killed one that has left them observed.
    observer: Option<ObserverView<'t>>,
    /// Whether other processes accept the closures that it marshals, if that depends on its probes.
    #[serde(skip_serializing_if = "Option::is_none")]
    code_digest: Option<&'static str>,
    pub(super) probes: Vec<ProbeView<'t>>,
    /// The paths in it, as text shows them.
    #[serde(skip)]
    pub(super) paths: ShownPaths,
    /// How many records of the holders of its probes cannot be read.
    #[serde(skip_serializing_if = "is_zero")]
    unreadable_holds: usize,
    /// Whether sites are shown.
    #[serde(skip)]
    pub(super) has_sites: bool,
}

/// The process that observes another one.
#[derive(Debug, Serialize)]
struct ObserverView<'t> {
    /// `None` if it is in another pid namespace.
    pid: Option<i32>,
    command: &'t str,
    /// How long ago the observation began.
    #[serde(serialize_with = "seconds")]
    seconds: Duration,
    /// Whether it still observes.
    alive: bool,
}

impl<'t> ObserverView<'t> {
    fn of(observer: &'t ToolProcess) -> ObserverView<'t> {
        ObserverView {
            pid: observer.is_in_our_namespace.then_some(observer.pid),
            command: &observer.command,
            seconds: observer.age,
            alive: observer.is_alive,
        }
    }
}

/// One probe: the sites and semaphores that have the same name.
#[derive(Debug, Serialize)]
pub(super) struct ProbeView<'t> {
    pub(super) name: &'t str,
    #[serde(serialize_with = "state_or_null")]
    pub(super) state: Option<State>,
    pub(super) counter: Option<u16>,
    #[serde(skip)]
    pub(super) site_count: usize,
    pub(super) sites: Vec<SiteView<'t>>,
    pub(super) semaphores: Vec<SemaphoreView<'t>>,
    /// The commands that have changed its counter and are to undo that.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) holders: Vec<HolderView<'t>>,
}

/// One site of a name.
#[derive(Debug, Serialize)]
pub(super) struct SiteView<'t> {
    pub(super) object: Cow<'t, str>,
    #[serde(serialize_with = "text_or_null")]
    pub(super) address: Option<LiveAddr>,
    #[serde(serialize_with = "text")]
    pub(super) file_address: FileAddr,
    #[serde(serialize_with = "provider")]
    generation: Generation,
    pub(super) enabled: Option<bool>,
    /// The bytes of the site, if more than the opcode differs from those in the file.
    #[serde(serialize_with = "text_or_null")]
    pub(super) bytes: Option<SiteCode>,
    pub(super) file: Option<String>,
    pub(super) line: Option<u32>,
    pub(super) function: Option<String>,
    pub(super) arguments: Vec<&'t str>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) argument_names: Vec<&'t str>,
}

/// One semaphore of a name.
#[derive(Debug, Serialize)]
pub(super) struct SemaphoreView<'t> {
    pub(super) object: Cow<'t, str>,
    #[serde(serialize_with = "text_or_null")]
    pub(super) address: Option<LiveAddr>,
    #[serde(serialize_with = "text")]
    pub(super) file_address: FileAddr,
    pub(super) value: Option<u16>,
}

/// What to show of each probe besides its state.
#[derive(Default)]
pub(crate) struct Detail {
    /// Its sites and semaphores.
    pub(crate) sites: bool,
    /// The functions and source lines of the sites, for each object.
    pub(crate) sources: Vec<Option<SourceMap>>,
    /// The source lines of functions that are counted.
    pub(crate) function_sources: FunctionSources,
    /// How paths are shown, except in JSON.
    pub(crate) paths: PathForm,
}

impl<'t> Listing<'t> {
    /// The probes of a running process.
    pub(crate) fn of_process(
        target: &'t Target,
        states: &'t ProbeStates,
        digest: CodeDigest,
        holders: &'t Holders,
        detail: &Detail,
    ) -> Listing<'t> {
        let by_probe = holder::by_probe(holders);
        let view = |state: ProbeState<'t>| ProbeView {
            holders: by_probe.get(state.name()).cloned().unwrap_or_default(),
            ..ProbeView::of_process(&state, states.objects(), detail)
        };
        let probes: Vec<_> = states.probes().map(view).collect();
        Listing {
            r#type: "info",
            version: VERSION,
            pid: Some(target.pid()),
            program: target.program().to_string_lossy(),
            build_id: target.build_id().map(|it| it.to_string()),
            observed_sites: Some(states.observed_sites()),
            observed_functions: Some(states.observed_functions()),
            observer: states.observer().map(ObserverView::of),
            code_digest: digest_word(digest),
            unreadable_holds: holders.unreadable,
            has_sites: detail.sites,
            paths: shown_paths(&probes, detail),
            probes,
        }
    }

    /// The probes of a file.
    pub(crate) fn of_file(table: &'t ProbeTable, detail: &Detail) -> Listing<'t> {
        let object = table.path().to_string_lossy();
        let view = |probe| ProbeView::of_file(probe, &object, detail);
        let probes: Vec<_> = table.probes().map(view).collect();
        Listing {
            r#type: "list",
            version: VERSION,
            pid: None,
            program: object.clone(),
            build_id: table.build_id().map(ToString::to_string),
            observed_sites: None,
            observed_functions: None,
            observer: None,
            code_digest: None,
            unreadable_holds: 0,
            has_sites: detail.sites,
            paths: shown_paths(&probes, detail),
            probes,
        }
    }
}

/// The paths of the source files and objects of probes.
fn shown_paths(probes: &[ProbeView<'_>], detail: &Detail) -> ShownPaths {
    let mut paths: Vec<&str> = Vec::new();
    for probe in probes {
        for site in &probe.sites {
            paths.push(&site.object);
            paths.extend(site.file.as_deref());
        }
        paths.extend(probe.semaphores.iter().map(|one| &*one.object));
    }
    paths.sort_unstable();
    paths.dedup();
    ShownPaths::new(detail.paths, paths)
}

impl Listing<'_> {
    /// Whether it shows sites or semaphores of other objects than the executable.
    pub(super) fn has_other_objects(&self) -> bool {
        self.probes.iter().any(|probe| {
            let sites = probe.sites.iter().map(|site| &site.object);
            let semaphores = probe.semaphores.iter().map(|one| &one.object);
            sites.chain(semaphores).any(|one| *one != self.program)
        })
    }
}

impl<'t> ProbeView<'t> {
    fn of_process(probe: &ProbeState<'t>, objects: &'t [Object], detail: &Detail) -> ProbeView<'t> {
        let (mut sites, mut semaphores) = (Vec::new(), Vec::new());
        if detail.sites {
            let source = |object: &Object| {
                let index = objects.iter().position(|one| std::ptr::eq(one, object))?;
                detail.sources.get(index)?.as_ref()
            };
            sites.extend(probe.sites().map(|state| SiteView {
                address: Some(state.address),
                enabled: state.enabled(),
                bytes: differing(state.code, state.site.code()),
                ..SiteView::of_file(
                    state.site,
                    &state.object.path().to_string_lossy(),
                    source(state.object),
                )
            }));
            semaphores.extend(probe.semaphores().map(|state| SemaphoreView {
                object: state.object.path().to_string_lossy(),
                address: Some(state.address),
                file_address: state.semaphore.counter(),
                value: Some(state.value),
            }));
        }
        ProbeView {
            name: probe.name(),
            state: Some(probe.state()),
            counter: Some(probe.counter()),
            holders: Vec::new(),
            site_count: probe.site_count(),
            sites,
            semaphores,
        }
    }

    fn of_file(probe: Probe<'t>, object: &Cow<'t, str>, detail: &Detail) -> ProbeView<'t> {
        let (mut sites, mut semaphores) = (Vec::new(), Vec::new());
        if detail.sites {
            let source = detail.sources.first().and_then(Option::as_ref);
            let site = |site| SiteView::of_file(site, object, source);
            sites.extend(probe.sites().map(site));
            semaphores.extend(probe.semaphores().map(|semaphore| SemaphoreView {
                object: object.clone(),
                address: None,
                file_address: semaphore.counter(),
                value: None,
            }));
        }
        ProbeView {
            name: probe.name(),
            state: None,
            counter: None,
            holders: Vec::new(),
            site_count: probe.sites().len(),
            sites,
            semaphores,
        }
    }
}

impl<'t> SiteView<'t> {
    fn of_file(site: Site<'t>, object: &Cow<'t, str>, source: Option<&SourceMap>) -> SiteView<'t> {
        let location = source.map(|source| source.locate(site.address()));
        let location = location.unwrap_or_default();
        SiteView {
            object: object.clone(),
            address: None,
            file_address: site.address(),
            generation: site.generation(),
            enabled: None,
            bytes: None,
            file: location.file,
            line: location.line,
            function: location.function,
            arguments: site.argument_texts().collect(),
            argument_names: site.argument_names().collect(),
        }
    }
}

fn differing(found: SiteCode, in_file: SiteCode) -> Option<SiteCode> {
    let operand = |code: SiteCode| code.0[2..].to_vec();
    let same = found.is_pristine() && operand(found) == operand(in_file);
    (!same).then_some(found)
}

/// The processes that have probes.
#[derive(Debug, Serialize)]
#[serde(tag = "type", rename = "ps")]
pub(crate) struct ProcessList {
    version: u32,
    pub(super) processes: Vec<ProcessView>,
    /// How many processes there was no permission to read.
    denied: usize,
}

/// One process.
#[derive(Debug, Serialize)]
pub(super) struct ProcessView {
    pub(super) pid: i32,
    pub(super) user: String,
    uid: u32,
    pub(super) program: String,
    pub(super) providers: Vec<&'static str>,
    pub(super) probes: usize,
    pub(super) enabled: usize,
    inconsistent: usize,
}

impl ProcessList {
    /// The processes that `survey` has found; `user` returns the name of a user.
    pub(crate) fn of(survey: &Survey, user: impl Fn(u32) -> String) -> ProcessList {
        let view = |process: &SurveyedProcess| ProcessView {
            pid: process.pid,
            user: user(process.uid),
            uid: process.uid,
            program: process.program.to_string_lossy().into_owned(),
            providers: process.generations.iter().map(|it| it.provider()).collect(),
            probes: process.probes,
            enabled: process.enabled,
            inconsistent: process.inconsistent,
        };
        ProcessList {
            version: VERSION,
            processes: survey.processes.iter().map(view).collect(),
            denied: survey.denied.len(),
        }
    }
}

/// What an update did to a process.
#[derive(Debug, Serialize)]
pub(crate) struct Changes<'r> {
    r#type: Update,
    version: u32,
    pub(super) pid: i32,
    pub(super) changed: Vec<ChangeView<'r>>,
    passed_over: &'r [String],
    stopped_us: u128,
    /// Whether other processes accept the closures that it marshals, if that depends on these probes.
    #[serde(skip_serializing_if = "Option::is_none")]
    code_digest: Option<&'static str>,
}

/// Which kind of update it was.
#[derive(Clone, Copy, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Update {
    /// Of a running process.
    Changed,
    /// Of a program that was just started, before it ran.
    Started,
    /// One that undid another one.
    Undone,
}

/// What an update did to one name.
#[derive(Debug, Serialize)]
pub(super) struct ChangeView<'r> {
    pub(super) name: &'r str,
    pub(super) before: u16,
    pub(super) after: u16,
    pub(super) sites: usize,
}

impl<'r> Changes<'r> {
    /// The changes in `report`, which is that of `update`.
    pub(crate) fn of(update: Update, report: &'r Report) -> Changes<'r> {
        Changes {
            r#type: update,
            version: VERSION,
            pid: report.pid,
            changed: report.changed.iter().map(ChangeView::of).collect(),
            passed_over: &report.skipped,
            stopped_us: report.stopped.as_micros(),
            code_digest: digest_word(report.code_digest),
        }
    }
}

impl<'r> ChangeView<'r> {
    pub(super) fn of(change: &'r ProbeChange) -> ChangeView<'r> {
        ChangeView {
            name: &change.name,
            before: change.before,
            after: change.after,
            sites: change.sites,
        }
    }
}

fn is_zero(count: &usize) -> bool {
    *count == 0
}

fn digest_word(digest: CodeDigest) -> Option<&'static str> {
    match digest {
        CodeDigest::Unaffected => None,
        CodeDigest::OfFile => Some("of_file"),
        CodeDigest::Computed => Some("computed"),
        CodeDigest::NotComputed => Some("not_computed"),
        CodeDigest::Pending => Some("pending"),
        CodeDigest::OfPatchedCode => Some("of_patched_code"),
        CodeDigest::Unknown => Some("unknown"),
    }
}

pub(super) fn state_word(state: State) -> &'static str {
    match state {
        State::Enabled => "enabled",
        State::Disabled => "disabled",
        State::Inconsistent => "inconsistent",
    }
}

fn state_or_null<S: Serializer>(state: &Option<State>, to: S) -> Result<S::Ok, S::Error> {
    state.map(state_word).serialize(to)
}

fn provider<S: Serializer>(generation: &Generation, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_str(generation.provider())
}

pub(super) fn text<S: Serializer>(value: &impl Display, to: S) -> Result<S::Ok, S::Error> {
    to.collect_str(value)
}

pub(super) fn text_or_null<S: Serializer>(
    value: &Option<impl Display>,
    to: S,
) -> Result<S::Ok, S::Error> {
    match value {
        Some(value) => to.collect_str(value),
        None => to.serialize_none(),
    }
}
