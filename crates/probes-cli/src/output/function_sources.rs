//! [`FunctionSources`]: the source lines of the functions of a process.

use probes_lib::{Functions, LiveAddr, SourceMap};
use serde::Serialize;

use super::location::source_or_unknown;
use super::paths::{PathForm, ShownPaths};

/// The source lines of the functions of a process, if they are to be shown.
#[derive(Default)]
pub(crate) struct FunctionSources(Option<(Functions, Vec<Option<SourceMap>>)>);

impl FunctionSources {
    /// Opens the files of `functions`. A program without source lines can be counted as well.
    pub(crate) fn of(functions: Functions) -> FunctionSources {
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
        let unknown = FunctionSource::default();
        let Ok((found, _)) = functions.at(address) else {
            return Some(unknown);
        };
        let mut objects = functions.objects().iter();
        let index = objects.position(|object| std::ptr::eq(object, found.object));
        let map = index.and_then(|index| maps[index].as_ref());
        let at = found.object.load_bias().map(|bias| bias.file(address));
        if let (Some(map), Some(at)) = (map, at) {
            if let (Some(file), line) = map.line(at) {
                return Some(FunctionSource {
                    file: Some(file.to_owned()),
                    line,
                    ..unknown
                });
            }
        }
        let call = found.function.first_call().map(|call| CallView {
            file: call.file.into_owned(),
            line: call.line,
        });
        Some(FunctionSource {
            first_call: call,
            ..unknown
        })
    }
}

/// The source line of a function.
#[derive(Clone, Debug, Default, Serialize)]
pub(super) struct FunctionSource {
    file: Option<String>,
    line: Option<u32>,
    /// Its first call, where that is all that is known of its source.
    #[serde(skip_serializing_if = "Option::is_none")]
    first_call: Option<CallView>,
}

#[derive(Clone, Debug, Serialize)]
struct CallView {
    file: String,
    line: u32,
}

impl FunctionSource {
    /// It as text, with the name of the file only.
    fn short(&self) -> String {
        let path = self.path().into_iter();
        self.show(&ShownPaths::new(PathForm::Short, path.map(str::to_owned)))
    }

    /// The path in it.
    pub(super) fn path(&self) -> Option<&str> {
        let call = self.first_call.as_ref().map(|call| &*call.file);
        self.file.as_deref().or(call)
    }

    /// It as text.
    pub(super) fn show(&self, paths: &ShownPaths) -> String {
        match &self.first_call {
            Some(CallView { file, line }) => {
                source_or_unknown(Some(file), Some(*line), paths) + "(call)"
            }
            None => source_or_unknown(self.file.as_deref(), self.line, paths),
        }
    }
}
