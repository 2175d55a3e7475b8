//! [`FunctionListing`]: the functions of a process or a file, in all formats. The field names are those of the
//! JSON output: new ones may be added, none renamed.

use std::borrow::Cow;
use std::collections::HashMap;
use std::fmt::Write;

use probes_lib::{
    FileAddr, FunctionKind, FunctionObject, Functions, Language, LiveAddr, NameSource,
    SelectedFunction, SourceMap, UnreadableObject,
};
use serde::Serialize;

use super::format::VERSION;
use super::paths::{PathForm, ShownPaths};
use super::plain::{function_or_unknown, source_or_unknown};
use super::table::table;
use super::view::{text, text_or_null};
use crate::text::{Escaped, number_of};

/// Functions, in the order of the objects and of their addresses.
#[derive(Debug, Serialize)]
#[serde(tag = "type", rename = "functions")]
pub(crate) struct FunctionListing<'f> {
    version: u32,
    pid: Option<i32>,
    program: String,
    functions: Vec<FunctionView<'f>>,
    /// The mapped files whose functions are not known.
    unreadable: Vec<UnreadableView>,
    /// The paths in it, as text shows them.
    #[serde(skip)]
    paths: ShownPaths,
}

#[derive(Debug, Serialize)]
struct FunctionView<'f> {
    name: Option<String>,
    /// Its other names.
    aliases: Vec<String>,
    kind: &'static str,
    language: Option<&'static str>,
    symbol: Option<String>,
    name_source: Option<&'static str>,
    object: Cow<'f, str>,
    #[serde(serialize_with = "text_or_null")]
    address: Option<LiveAddr>,
    #[serde(serialize_with = "text")]
    file_address: FileAddr,
    size: u64,
    file: Option<String>,
    line: Option<u32>,
    /// Its first call, where that is all that is known of its source.
    #[serde(skip_serializing_if = "Option::is_none")]
    first_call: Option<CallView>,
}

#[derive(Debug, Serialize)]
struct CallView {
    file: String,
    line: u32,
}

#[derive(Debug, Serialize)]
struct UnreadableView {
    object: String,
    why: String,
}

impl<'f> FunctionListing<'f> {
    /// The `selected` ones of `functions`, which are those of the process `pid`, or of a file.
    pub(crate) fn of(
        functions: &'f Functions,
        selected: &[SelectedFunction<'f>],
        pid: Option<i32>,
        form: PathForm,
    ) -> FunctionListing<'f> {
        let mut source_maps = SourceMaps::default();
        let view = |selected: &SelectedFunction<'f>| {
            FunctionView::of(selected, source_maps.of(selected.object))
        };
        let views: Vec<_> = selected.iter().map(view).collect();
        let unreadable = |one: &UnreadableObject| UnreadableView {
            object: one.path.to_string_lossy().into_owned(),
            why: one.why.to_string(),
        };
        let mut paths: Vec<&str> = Vec::new();
        for view in &views {
            paths.push(&view.object);
            paths.extend(view.file.as_deref());
            paths.extend(view.first_call.as_ref().map(|call| &*call.file));
        }
        paths.sort_unstable();
        paths.dedup();
        FunctionListing {
            version: VERSION,
            pid,
            program: functions.program().to_string_lossy().into_owned(),
            paths: ShownPaths::new(form, paths),
            functions: views,
            unreadable: functions.unreadable().iter().map(unreadable).collect(),
        }
    }

    /// One line for each function, with its name, which may hold spaces, at the end.
    pub(super) fn plain(&self) -> String {
        let mut text = String::new();
        for function in &self.functions {
            let [address, size, object, source, name] = self.cells(function);
            // Writing to a string does not fail.
            let _ = writeln!(text, "{address} {size} {object} {source} {name}");
        }
        text
    }

    pub(super) fn table(&self) -> String {
        let rows = self.functions.iter().map(|it| self.cells(it).to_vec());
        table(&["address", "size", "object", "source", "function"], rows)
    }

    fn cells(&self, function: &FunctionView<'_>) -> [String; 5] {
        let address = match function.address {
            Some(address) => address.to_string(),
            None => function.file_address.to_string(),
        };
        let source = match &function.first_call {
            Some(CallView { file, line }) => {
                source_or_unknown(Some(file), Some(*line), &self.paths) + "(call)"
            }
            None => source_or_unknown(function.file.as_deref(), function.line, &self.paths),
        };
        let mut name = function_or_unknown(function.name.as_deref());
        if function.kind == RESOLVER {
            name += " (resolver)";
        }
        [
            address,
            function.size.to_string(),
            Escaped(self.paths.show(&function.object)).to_string(),
            source,
            name,
        ]
    }

    /// `17520 functions in 4 objects, 12 without a name`.
    pub(crate) fn sum(&self) -> String {
        let mut objects: Vec<&str> = self.functions.iter().map(|it| &*it.object).collect();
        objects.dedup();
        let mut sum = number_of(self.functions.len(), "function");
        if objects.len() > 1 {
            sum += &format!(" in {}", number_of(objects.len(), "object"));
        }
        match self.functions.iter().filter(|it| it.name.is_none()).count() {
            0 => {}
            unnamed => sum += &format!(", {unnamed} without a name"),
        }
        sum
    }
}

impl<'f> FunctionView<'f> {
    fn of(selected: &SelectedFunction<'f>, sources: Option<&SourceMap>) -> FunctionView<'f> {
        let SelectedFunction {
            object,
            function,
            name,
        } = selected;
        let (file, line) = match sources {
            Some(sources) => sources.line(function.address()),
            None => (None, None),
        };
        let first_call = function.first_call().filter(|_| file.is_none());
        let others = function.names().filter(|it| Some(it) != name.as_ref());
        let language = name.as_ref().and_then(|name| name.language);
        FunctionView {
            aliases: others.map(|name| name.text).collect(),
            kind: match function.kind() {
                FunctionKind::Function => "function",
                FunctionKind::Resolver => RESOLVER,
            },
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
            name: name.as_ref().map(|name| name.text.clone()),
            object: object.table().path().to_string_lossy(),
            address: selected.address(),
            file_address: function.address(),
            size: function.len(),
            file: file.map(str::to_owned),
            line,
            first_call: first_call.map(|call| CallView {
                file: call.file.into_owned(),
                line: call.line,
            }),
        }
    }
}

const RESOLVER: &str = "resolver";

/// The source lines of the files that functions are shown of. A program without them is listed as well.
#[derive(Default)]
struct SourceMaps(HashMap<*const FunctionObject, Option<SourceMap>>);

impl SourceMaps {
    fn of(&mut self, object: &FunctionObject) -> Option<&SourceMap> {
        let map = self.0.entry(object);
        map.or_insert_with(|| object.source_map().ok()).as_ref()
    }
}
