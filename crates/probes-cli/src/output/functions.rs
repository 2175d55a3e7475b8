//! [`FunctionListing`]: the functions of a process or a file, in all formats. The field names are those of the
//! JSON output: new ones may be added, none renamed.
//!
//! Names are demangled when they are written, one by one: those of a hostile file may be longer than what fits into
//! memory.

mod observable;

use std::borrow::Cow;
use std::collections::{HashMap, HashSet};
use std::io::{self, Write};

use observable::{Observable, RefusalView};
use probes_lib::{
    Error, FileAddr, FirstCall, FunctionKind, FunctionObject, Functions, Language, LiveAddr,
    NameSource, SelectedFunction, SourceMap, UnreadableObject,
};
use serde::{Serialize, Serializer};

use super::format::VERSION;
use super::function_sources::FirstCallView;
use super::location::{function_or_unknown, source_or_unknown};
use super::paths::{PathForm, ShownPaths};
use super::table::StreamedTable;
use super::view::{text, text_or_null};
use crate::text::{Escaped, number_of};

/// The most bytes of paths that are shortened. If all paths are longer together, they are shown in full.
const MAX_PATHS: usize = 8 << 20;

/// Functions, in the order of the objects and of their addresses.
#[derive(Serialize)]
#[serde(tag = "type", rename = "functions")]
pub(crate) struct FunctionListing<'f> {
    version: u32,
    pid: Option<i32>,
    program: String,
    functions: Selected<'f>,
    /// The mapped files whose functions are not known.
    unreadable: Vec<UnreadableView>,
    /// The paths in it, as text shows them.
    #[serde(skip)]
    paths: ShownPaths,
}

/// The functions that are shown, and the source lines of their files. A file without source lines is listed as well.
struct Selected<'f> {
    functions: &'f [SelectedFunction<'f>],
    /// Of each function, whether it can be counted and timed.
    observable: Vec<Observable>,
    /// Why that is not known, for each object where it is not.
    unknown: Vec<Error>,
    sources: HashMap<*const FunctionObject, SourceMap>,
}

#[derive(Serialize)]
struct FunctionView<'f> {
    name: Option<String>,
    aliases: Aliases<'f>,
    #[serde(serialize_with = "kind_word")]
    kind: FunctionKind,
    language: Option<&'static str>,
    symbol: Option<String>,
    name_source: Option<&'static str>,
    object: Cow<'f, str>,
    #[serde(serialize_with = "text_or_null")]
    address: Option<LiveAddr>,
    #[serde(serialize_with = "text")]
    file_address: FileAddr,
    size: u64,
    file: Option<&'f str>,
    line: Option<u32>,
    /// Its first call, where that is all that is known of its source.
    #[serde(skip_serializing_if = "Option::is_none")]
    first_call: Option<FirstCallView>,
    can_count: Option<bool>,
    can_time: Option<bool>,
    refusal: Option<RefusalView>,
    /// The three fields above in one word.
    #[serde(skip)]
    observable: &'f Observable,
}

/// The other names of a function.
struct Aliases<'f>(SelectedFunction<'f>);

/// A mapped file that could not be read.
#[derive(Serialize)]
pub(super) struct UnreadableView {
    object: String,
    why: String,
}

impl UnreadableView {
    pub(super) fn of(file: &UnreadableObject) -> UnreadableView {
        UnreadableView {
            object: file.path.to_string_lossy().into_owned(),
            why: file.why.to_string(),
        }
    }
}

impl<'f> FunctionListing<'f> {
    /// The `selected` ones of `functions`, which are those of the process `pid`, or of a file.
    pub(crate) fn of(
        functions: &'f Functions,
        selected: &'f [SelectedFunction<'f>],
        pid: Option<i32>,
        form: PathForm,
    ) -> FunctionListing<'f> {
        let selected = Selected::of(functions, selected);
        FunctionListing {
            version: VERSION,
            pid,
            program: functions.program().to_string_lossy().into_owned(),
            paths: selected.shown_paths(form),
            functions: selected,
            unreadable: functions
                .unreadable()
                .iter()
                .map(UnreadableView::of)
                .collect(),
        }
    }

    /// One line for each function, with its name, which may hold spaces, at the end.
    pub(super) fn plain(&self, to: &mut dyn Write) -> io::Result<()> {
        self.functions.views().try_for_each(|function| {
            let [address, size, object, source, can, name] = self.cells(&function);
            writeln!(to, "{address} {size} {object} {source} {can} {name}")
        })
    }

    pub(super) fn table(&self, to: &mut dyn Write) -> io::Result<()> {
        let head = ["address", "size", "object", "source", "can", "function"];
        let rows = || self.functions.views().map(|it| self.cells(&it).to_vec());
        let mut table = StreamedTable::default();
        rows().for_each(|row| table.widen(&row));
        to.write_all(table.rows(&head, &[]).as_bytes())?;
        rows().try_for_each(|row| to.write_all(table.rows(&head, &[row]).as_bytes()))
    }

    fn cells(&self, function: &FunctionView<'_>) -> [String; 6] {
        let address = match function.address {
            Some(address) => address.to_string(),
            None => function.file_address.to_string(),
        };
        let source = match &function.first_call {
            Some(FirstCallView { file, line }) => {
                source_or_unknown(Some(file), Some(*line), &self.paths) + "(call)"
            }
            None => source_or_unknown(function.file, function.line, &self.paths),
        };
        let mut name = function_or_unknown(function.name.as_deref());
        if let Some(remark) = function.kind.remark() {
            name += &format!(" ({remark})");
        }
        [
            address,
            function.size.to_string(),
            Escaped(self.paths.show(&function.object)).to_string(),
            source,
            function.observable.to_string(),
            name,
        ]
    }

    /// Why it is not known which functions can be counted, for each object where it is not.
    pub(crate) fn unknown(&self) -> &[Error] {
        &self.functions.unknown
    }

    /// `17520 functions in 4 objects, 12 without a name, 3 that cannot be counted, 20 that cannot be timed`.
    pub(crate) fn sum(&self) -> String {
        let functions = self.functions.functions;
        let mut objects: Vec<_> = functions.iter().map(|it| path_of(it.object)).collect();
        objects.dedup();
        let mut sum = number_of(functions.len(), "function");
        if objects.len() > 1 {
            sum += &format!(" in {}", number_of(objects.len(), "object"));
        }
        let is_unnamed = |it: &&SelectedFunction<'_>| it.function.names().len() == 0;
        match functions.iter().filter(is_unnamed).count() {
            0 => {}
            unnamed => sum += &format!(", {unnamed} without a name"),
        }
        let observable = &self.functions.observable;
        let count = |is: fn(&Observable) -> bool| observable.iter().filter(|it| is(it)).count();
        for (what, count) in [
            ("counted", count(|it| it.can_count() == Some(false))),
            ("timed", count(|it| it.can_time() == Some(false))),
        ] {
            if count > 0 {
                sum += &format!(", {count} that cannot be {what}");
            }
        }
        sum
    }
}

impl<'f> Selected<'f> {
    fn of(all: &Functions, functions: &'f [SelectedFunction<'f>]) -> Selected<'f> {
        let mut sources = HashMap::new();
        let (mut observable, mut unknown) = (Vec::with_capacity(functions.len()), Vec::new());
        let of_objects = functions.chunk_by(|one, other| std::ptr::eq(one.object, other.object));
        for functions in of_objects {
            match Observable::of(all, functions) {
                Ok(of_object) => observable.extend(of_object),
                Err(why) => {
                    observable.extend(functions.iter().map(|_| Observable::Unknown));
                    unknown.push(why);
                }
            }
            let object = functions[0].object;
            sources.extend(
                object
                    .source_map()
                    .ok()
                    .map(|map| (&raw const *object, map)),
            );
        }
        Selected {
            functions,
            observable,
            unknown,
            sources,
        }
    }

    fn views(&self) -> impl Iterator<Item = FunctionView<'_>> {
        let functions = self.functions.iter().zip(&self.observable);
        functions.map(|(it, observable)| FunctionView::of(it, self.location(it), observable))
    }

    fn location(&self, selected: &SelectedFunction<'f>) -> FunctionOrigin<'_> {
        let sources = self.sources.get(&(&raw const *selected.object));
        let (file, line) = match sources {
            Some(sources) => sources.line_of_entry(selected.function.address()),
            None => (None, None),
        };
        let call = selected.function.first_call();
        FunctionOrigin {
            file,
            line,
            first_call: call.filter(|_| file.is_none()),
        }
    }

    /// The form in which the paths of objects and source files are shown.
    fn shown_paths(&self, form: PathForm) -> ShownPaths {
        let mut paths: HashSet<String> = HashSet::new();
        let mut len = 0;
        for selected in self.functions {
            let location = self.location(selected);
            let call = location.first_call.as_ref().map(|call| &*call.file);
            let object = path_of(selected.object);
            for path in [Some(&*object), location.file, call].into_iter().flatten() {
                if !paths.contains(path) {
                    len += path.len();
                    paths.insert(path.to_owned());
                }
            }
            if len > MAX_PATHS {
                return ShownPaths::default();
            }
        }
        ShownPaths::new(form, paths)
    }
}

impl Serialize for Selected<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.views())
    }
}

/// Where the code of a function comes from, if its file says so.
struct FunctionOrigin<'f> {
    file: Option<&'f str>,
    line: Option<u32>,
    /// Its first call, if the file is not known.
    first_call: Option<FirstCall<'f>>,
}

impl<'f> FunctionView<'f> {
    fn of(
        selected: &SelectedFunction<'f>,
        location: FunctionOrigin<'f>,
        observable: &'f Observable,
    ) -> FunctionView<'f> {
        let function = selected.function;
        let name = selected.name();
        let language = name.as_ref().and_then(|name| name.language);
        FunctionView {
            aliases: Aliases(*selected),
            kind: function.kind(),
            language: language.map(|language| match language {
                Language::Ocaml => "ocaml",
                Language::Rust => "rust",
                Language::Cpp => "c++",
            }),
            symbol: name.as_ref().map(|name| name.symbol.clone().into_owned()),
            name_source: name.as_ref().map(|name| match name.source {
                NameSource::Symbol => "symbol",
                NameSource::DynamicSymbol => "dynamic_symbol",
                NameSource::Frametable => "frametable",
            }),
            name: name.map(|name| name.text),
            object: path_of(selected.object),
            address: selected.address(),
            file_address: function.address(),
            size: function.len(),
            file: location.file,
            line: location.line,
            first_call: location.first_call.map(FirstCallView::of),
            can_count: observable.can_count(),
            can_time: observable.can_time(),
            refusal: observable.refusal(),
            observable,
        }
    }
}

impl Serialize for Aliases<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Aliases(selected) = self;
        let names = selected.function.names();
        if names.len() < 2 {
            return serializer.collect_seq([""; 0]);
        }
        let shown = selected.name();
        let others = names.filter(|it| Some(it) != shown.as_ref());
        serializer.collect_seq(others.map(|name| name.text))
    }
}

fn path_of(object: &FunctionObject) -> Cow<'_, str> {
    object.table().path().to_string_lossy()
}

fn kind_word<S: Serializer>(kind: &FunctionKind, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(match kind {
        FunctionKind::Function => "function",
        FunctionKind::Resolver => "resolver",
        FunctionKind::ProbeSite => "probe_site",
    })
}
