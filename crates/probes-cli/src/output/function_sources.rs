//! [`FunctionSources`]: the source lines of the functions of a process.

use std::sync::Arc;

use probes_lib::{FirstCall, Functions, LiveAddr, SelectedFunction, SourceMap};
use serde::Serialize;

use super::location::source_or_unknown;
use super::paths::{PathForm, ShownPaths};
use crate::text::Escaped;

/// The source lines of the functions of a process, if they are to be shown.
#[derive(Default)]
pub(crate) struct FunctionSources(Option<(Arc<Functions>, SourceMaps)>);

/// The source lines of each object. It is no error if a file has none.
type SourceMaps = Vec<Option<SourceMap>>;

/// The source lines of the object in which `found` is.
fn map_of<'m>(
    functions: &Functions,
    maps: &'m SourceMaps,
    found: &SelectedFunction<'_>,
) -> Option<&'m SourceMap> {
    let mut objects = functions.objects().iter();
    let index = objects.position(|object| std::ptr::eq(object, found.object))?;
    maps[index].as_ref()
}

impl FunctionSources {
    /// Reads those of a process. If it has exited, none are known.
    pub(crate) fn of_process(pid: i32) -> FunctionSources {
        let functions = Functions::of_process(pid).ok();
        functions.map(FunctionSources::of).unwrap_or_default()
    }

    /// Reads those of `functions`: now, because it may take long.
    pub(crate) fn of(functions: impl Into<Arc<Functions>>) -> FunctionSources {
        let functions = functions.into();
        let objects = functions.objects().iter();
        let maps = objects.map(|object| object.source_map().ok()).collect();
        FunctionSources(Some((functions, maps)))
    }

    /// The source line at `address` as text, with the name of the file only.
    pub(crate) fn short(&self, address: LiveAddr) -> String {
        let source = self.locate(address);
        source.map_or(String::new(), |source| source.short())
    }

    /// The source line of the function, or of the instruction, at `address`; `None` if none are to be shown.
    pub(super) fn locate(&self, address: LiveAddr) -> Option<FunctionSource> {
        let (functions, maps) = self.0.as_ref()?;
        let Ok((found, offset)) = functions.at(address) else {
            return Some(FunctionSource::default());
        };
        let unknown = FunctionSource {
            name: found.name().map(|name| name.text),
            ..FunctionSource::default()
        };
        let map = map_of(functions, maps, &found);
        let at = found.object.load_bias().map(|bias| bias.file(address));
        if let (Some(map), Some(at)) = (map, at) {
            let found = match offset {
                0 => map.line_of_entry(at),
                _ => map.line(at),
            };
            if let (Some(file), line) = found {
                return Some(FunctionSource {
                    file: Some(file.to_owned()),
                    line,
                    ..unknown
                });
            }
        }
        let call = found.function.first_call().map(FirstCallView::of);
        Some(FunctionSource {
            first_call: call,
            ..unknown
        })
    }

    /// The code that makes the calls that return to `address`.
    pub(super) fn call_site(&self, address: LiveAddr) -> Option<CallSite> {
        let (functions, maps) = self.0.as_ref()?;
        // `address` is the first byte of the next function if the call is the last instruction of its function.
        let call = LiveAddr(address.0.checked_sub(1)?);
        let (found, offset) = functions.at(call).ok()?;
        let map = map_of(functions, maps, &found);
        let at = found.object.load_bias().map(|bias| bias.file(call));
        let line = map.zip(at).map(|(map, at)| map.line(at));
        let (file, line) = line.unwrap_or_default();
        Some(CallSite {
            function: found.name().map(|name| name.text),
            offset: offset + 1,
            file: file.map(str::to_owned),
            line,
        })
    }
}

/// Code that makes a call.
#[derive(Clone, Debug, Serialize)]
pub(super) struct CallSite {
    /// The name of the function that it is in.
    function: Option<String>,
    /// Where the call returns to, in bytes from the beginning of that function.
    offset: u64,
    file: Option<String>,
    line: Option<u32>,
}

impl CallSite {
    /// The text, with the name of the file only: `Http.serve+0x4f http.ml:42`; `None` if the function has no name.
    pub(super) fn short(&self) -> Option<String> {
        let function = self.function.as_ref()?;
        let place = format!("{}+{:#x}", Escaped(function), self.offset);
        let Some(file) = &self.file else {
            return Some(place);
        };
        let paths = ShownPaths::new(PathForm::Short, [file.clone()]);
        let source = source_or_unknown(Some(file), self.line, &paths);
        Some(format!("{place} {source}"))
    }
}

/// The source line of a function.
#[derive(Clone, Debug, Default, Serialize)]
pub(super) struct FunctionSource {
    /// Its name.
    #[serde(skip)]
    pub(super) name: Option<String>,
    pub(super) file: Option<String>,
    pub(super) line: Option<u32>,
    /// Its first call, where that is all that is known of its source.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) first_call: Option<FirstCallView>,
}

/// The first call that a function makes.
#[derive(Clone, Debug, Serialize)]
pub(super) struct FirstCallView {
    pub(super) file: String,
    pub(super) line: u32,
}

impl FirstCallView {
    pub(super) fn of(call: FirstCall<'_>) -> FirstCallView {
        FirstCallView {
            file: call.file.into_owned(),
            line: call.line,
        }
    }
}

impl FunctionSource {
    /// The text, with the name of the file only.
    fn short(&self) -> String {
        self.alone(PathForm::Short)
    }

    /// The text, with a path that is as short as if it were the only one.
    pub(super) fn alone(&self, paths: PathForm) -> String {
        let path = self.path().into_iter();
        self.show(&ShownPaths::new(paths, path.map(str::to_owned)))
    }

    /// The path of its file, or that of its first call.
    pub(super) fn path(&self) -> Option<&str> {
        let call = self.first_call.as_ref().map(|call| &*call.file);
        self.file.as_deref().or(call)
    }

    /// The text, with a path as it is in `paths`.
    pub(super) fn show(&self, paths: &ShownPaths) -> String {
        match &self.first_call {
            Some(FirstCallView { file, line }) => {
                source_or_unknown(Some(file), Some(*line), paths) + "(call)"
            }
            None => source_or_unknown(self.file.as_deref(), self.line, paths),
        }
    }
}
