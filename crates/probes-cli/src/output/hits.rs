//! Formats hits, one per line: the chosen fields, as text or as columns of a table, or JSON.

mod json;
mod values;

pub(crate) use json::missing;
pub(super) use json::{Argument, Text};

use std::collections::HashMap;
use std::time::SystemTime;

use probes_lib::{Event, EventKind, LiveAddr, SourceLocation, SourceMap, Stacks, Target};
use strum::VariantArray;

pub(super) use self::values::in_ocaml;
use super::format::Format;
use super::function_sources::{FirstCallView, FunctionSources};
use super::location::{function_or_unknown, source_or_unknown};
use super::paths::{PathForm, ShownPaths};
use super::stacks::FoundStack;
use super::table::StreamedTable;
use crate::failure::Failure;
use crate::text::{Escaped, or_dash};

/// A part of the line of a hit.
#[derive(
    Clone,
    Copy,
    Debug,
    PartialEq,
    Eq,
    strum::Display,
    strum::EnumString,
    strum::IntoStaticStr,
    strum::VariantArray,
)]
#[strum(serialize_all = "lowercase")]
pub(crate) enum Field {
    Time,
    Pid,
    Thread,
    Name,
    Address,
    Function,
    Source,
    Args,
}

/// How many hits were not shown.
#[derive(Clone, Copy, Debug, Default, serde::Serialize)]
pub(crate) struct Missing {
    /// Those that could not be read in time.
    pub(crate) lost: u64,
    /// How many of these have found no room for their stack.
    #[serde(skip)]
    pub(crate) without_place: u64,
    /// Those that `-sample` or `-rate` left out.
    pub(crate) skipped: u64,
    /// Those for which `-where` is neither true nor false; `None` without it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) untyped: Option<u64>,
}

impl Missing {
    pub(crate) fn is_none(self) -> bool {
        self.lost == 0 && self.skipped == 0 && self.untyped.unwrap_or(0) == 0
    }
}

/// Says why hits are lost, of which `without_place` have found no room for their stack ([`Events::without_place`]).
///
/// [`Events::without_place`]: probes_lib::Events::without_place
pub(crate) fn why_lost(without_place: u64) -> String {
    let why = "they came faster than they could be read";
    if without_place == 0 {
        return why.to_owned();
    }
    format!(
        "{why}, or ({without_place} of them) found no room for their stack, because other hits have not finished copying \
         theirs there: a signal handler that calls siglongjmp(3) may have ended that"
    )
}

/// Where a site or function is.
struct HitLocation {
    function: Option<String>,
    file: Option<String>,
    line: Option<u32>,
    first_call: Option<FirstCallView>,
    /// The source line as text.
    source: String,
}

/// Formats hits.
pub(crate) struct Hits {
    format: Format,
    fields: Vec<Field>,
    form: PathForm,
    /// Whether they are of several processes: then JSON has their pids, too.
    are_of_several: bool,
    /// How many frames of the stack of a hit are shown at most.
    frames: usize,
    /// By their pids.
    processes: HashMap<i32, HitProcess>,
    table: StreamedTable,
}

/// A process that has hits, and what is known of its source.
#[derive(Default)]
struct HitProcess {
    /// The source lines of each object.
    sources: Vec<Option<SourceMap>>,
    paths: ShownPaths,
    functions: FunctionSources,
    /// If stacks are shown.
    stacks: Option<Stacks>,
    /// The location of each site or function that was hit.
    locations: HashMap<LiveAddr, HitLocation>,
}

/// A hit in the process with this pid.
pub(crate) struct ProcessHit {
    pub(crate) pid: i32,
    pub(crate) event: Event,
}

impl Hits {
    /// Formats the hits of one process: all fields but the pid.
    pub(crate) fn new(format: Format, paths: PathForm) -> Hits {
        let fields = Field::VARIANTS.iter().copied();
        Hits {
            format,
            form: paths,
            fields: fields.filter(|field| *field != Field::Pid).collect(),
            are_of_several: false,
            frames: usize::MAX,
            processes: HashMap::new(),
            table: StreamedTable::default(),
        }
    }

    /// The same, of several processes: the pid, too.
    pub(crate) fn of_several(self) -> Hits {
        Hits {
            fields: Field::VARIANTS.to_vec(),
            are_of_several: true,
            ..self
        }
    }

    /// The same, if there are only functions: their names are shown once.
    pub(crate) fn of_functions_only(mut self) -> Hits {
        self.fields.retain(|field| *field != Field::Function);
        self
    }

    /// Adds a process; `sources` are the source lines of its objects.
    pub(crate) fn add_process(
        &mut self,
        target: &Target,
        sources: Vec<Option<SourceMap>>,
        functions: FunctionSources,
    ) {
        let paths = if self.format == Format::Json {
            ShownPaths::default()
        } else {
            ShownPaths::new(self.form, source_files(target, &sources))
        };
        let process = HitProcess {
            sources,
            paths,
            functions,
            stacks: None,
            locations: HashMap::new(),
        };
        self.processes.insert(target.pid(), process);
    }

    /// Also shows the stacks of the hits of a process, `frames` frames of each at most.
    pub(crate) fn add_stacks(&mut self, stacks: Stacks, frames: usize) {
        self.frames = frames;
        let process = self.processes.entry(stacks.pid()).or_default();
        process.stacks = Some(stacks);
    }

    /// The same, with these fields in their order, if any are given.
    pub(crate) fn of_fields(mut self, fields: Option<&[Field]>) -> Hits {
        if let Some(fields) = fields {
            self.fields = fields.to_vec();
        }
        self
    }

    /// The lines of hits; in a table, they continue the earlier ones.
    pub(crate) fn lines(&mut self, hits: &[ProcessHit]) -> Result<String, Failure> {
        let mut lines = String::new();
        let head: Vec<&str> = self.fields.iter().map(|&field| field.into()).collect();
        let mut rows = Vec::new();
        for ProcessHit { pid, event } in hits {
            let process = self.processes.entry(*pid).or_default();
            let located = process.locations.entry(event.address());
            let locate = || match event.site() {
                Some(_) => of_site(&process.sources, &process.paths, event),
                None => of_function(&process.functions, self.form, event),
            };
            let location = located.or_insert_with(locate);
            let stack = process.stacks.as_mut().zip(event.stack.as_ref());
            let stack = stack.map(|(stacks, copied)| stacks.of_hit(copied));
            let stack = stack.map(|stack| FoundStack::of(&stack, self.frames));
            if self.format == Format::Json {
                let pid = self.are_of_several.then_some(*pid);
                lines += &json::hit(pid, event, location, stack.as_ref())?;
                continue;
            }
            let fields = self.fields.iter();
            let row = fields.map(|&field| field_text(field, *pid, event, location));
            if self.format == Format::Table {
                rows.push(row.collect());
            } else {
                let words: Vec<String> = row.filter(|text| !text.is_empty()).collect();
                lines += &(words.join(" ") + "\n");
            }
            if let Some(stack) = stack {
                self.table.append(&head, &mut rows, &mut lines);
                lines += &stack.lines(self.format);
            }
        }
        self.table.append(&head, &mut rows, &mut lines);
        Ok(lines)
    }
}

/// The source files of all sites.
fn source_files(target: &Target, sources: &[Option<SourceMap>]) -> Vec<String> {
    let objects = target.objects();
    let mut files: Vec<String> = objects
        .iter()
        .zip(sources)
        .filter_map(|(object, source)| Some((object, source.as_ref()?)))
        .flat_map(|(object, source)| {
            let sites = object.table().probes().flat_map(|probe| probe.sites());
            sites.filter_map(|site| source.locate(site.address()).file)
        })
        .collect();
    files.sort_unstable();
    files.dedup();
    files
}

fn of_site(sources: &[Option<SourceMap>], paths: &ShownPaths, event: &Event) -> HitLocation {
    let source = event.object_index().and_then(|index| sources.get(index));
    let source = source.and_then(Option::as_ref).zip(event.site());
    let location = source.map(|(source, site)| source.locate(site.address()));
    let SourceLocation {
        function,
        file,
        line,
        ..
    } = location.unwrap_or_default();
    HitLocation {
        source: source_or_unknown(file.as_deref(), line, paths),
        function,
        file,
        line,
        first_call: None,
    }
}

fn of_function(functions: &FunctionSources, paths: PathForm, event: &Event) -> HitLocation {
    let located = functions.locate(event.address()).unwrap_or_default();
    HitLocation {
        source: located.alone(paths),
        function: located.name,
        file: located.file,
        line: located.line,
        first_call: located.first_call,
    }
}

/// A field as text, which is empty only for a hit without arguments.
fn field_text(field: Field, pid: i32, event: &Event, location: &HitLocation) -> String {
    match field {
        Field::Time => time_of_day(event.time),
        Field::Pid => pid.to_string(),
        Field::Thread => thread_text(event),
        Field::Name => Escaped(event.name()).to_string(),
        Field::Address => event.address().to_string(),
        Field::Function => function_or_unknown(location.function.as_deref()),
        Field::Source => location.source.clone(),
        Field::Args => arguments_or_return_text(event),
    }
}

/// The time of day in UTC.
pub(super) fn time_of_day(time: SystemTime) -> String {
    let time = humantime::format_rfc3339_micros(time).to_string();
    let time = time.split_once('T').map_or(&*time, |(_, time)| time);
    time.trim_end_matches('Z').to_owned()
}

pub(super) fn thread_text(event: &Event) -> String {
    or_dash(event.thread)
}

/// The arguments of a hit; or, where a function returns, that it returns, and what.
fn arguments_or_return_text(event: &Event) -> String {
    let arguments = arguments_text(event);
    match event.kind {
        EventKind::Return if arguments.is_empty() => "returns".to_owned(),
        EventKind::Return => format!("returns {arguments}"),
        _ => arguments,
    }
}

/// The arguments of a hit, or the result of a function.
pub(super) fn arguments_text(event: &Event) -> String {
    let mut names = argument_names(event);
    let values = event.arguments.iter().map(|value| match names.next() {
        Some(name) => format!("{}={}", Escaped(name), in_ocaml(value)),
        None => in_ocaml(value),
    });
    let values: Vec<String> = values.collect();
    values.join(" ")
}

/// The names of the arguments of a hit, as far as they are known.
pub(super) fn argument_names(event: &Event) -> impl Iterator<Item = &str> {
    event
        .site()
        .into_iter()
        .flat_map(|site| site.argument_names())
}
