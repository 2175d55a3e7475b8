//! The functions of a count: those that are shown, where they are, and those that cannot be counted.

use std::borrow::Cow;
use std::cmp::Reverse;

use probes_lib::{Counts, LiveAddr};
use serde::Serialize;

use super::CountRow;
use crate::output::function_sources::{FunctionSource, FunctionSources};
use crate::output::paths::ShownPaths;
use crate::output::refused::RefusedView;
use crate::output::view::text;
use crate::text::{Escaped, TERMINAL_LINES};

/// The functions that are counted.
#[derive(Serialize)]
pub(super) struct CountedFunctions<'c> {
    /// Most hits first. Of many, those without hits are left out.
    #[serde(rename = "functions")]
    pub(super) rows: Vec<CountRow<'c>>,
    /// How many there are.
    functions_counted: usize,
    /// Those that cannot be counted.
    #[serde(skip_serializing_if = "Option::is_none")]
    refused: Option<Vec<RefusedView<'c>>>,
}

/// Where a function is.
#[derive(Clone, Debug, Serialize)]
pub(super) struct FunctionRow<'c> {
    object: Cow<'c, str>,
    #[serde(serialize_with = "text")]
    address: LiveAddr,
    /// `None` if it is not to be shown.
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    source: Option<FunctionSource>,
}

impl<'c> CountedFunctions<'c> {
    /// The functions of these counts; `None` if there are none.
    pub(super) fn of(counts: &'c Counts) -> Option<CountedFunctions<'c>> {
        let (functions, refused) = (counts.functions(), counts.refused());
        let functions_counted = functions.len();
        if functions_counted == 0 && refused.is_empty() {
            return None;
        }
        let row = |function: probes_lib::FunctionHits<'c>| CountRow {
            name: function.name,
            hits: function.hits,
            rate: 0.0,
            untyped: function.untyped,
            site: None,
            function: Some(FunctionRow {
                object: function.object.to_string_lossy(),
                address: function.address,
                source: None,
            }),
        };
        Some(CountedFunctions {
            rows: functions.map(row).collect(),
            functions_counted,
            refused: Some(refused.iter().map(RefusedView::of).collect()),
        })
    }

    /// Selects those that are shown, and finds their source lines.
    pub(super) fn select(&mut self, sources: &FunctionSources) {
        if self.rows.len() > TERMINAL_LINES {
            self.rows
                .retain(|row| row.hits > 0 || row.untyped > Some(0));
        }
        self.rows.sort_by_key(|row| Reverse(row.hits));
        let functions = self.rows.iter_mut().filter_map(|row| row.function.as_mut());
        for function in functions {
            function.source = sources.locate(function.address);
        }
    }

    pub(super) fn leave_out_refused(&mut self) {
        self.refused = None;
    }

    /// The paths of objects and source files that are shown.
    pub(super) fn paths(&self) -> impl Iterator<Item = &str> {
        let functions = self.rows.iter().filter_map(|row| row.function.as_ref());
        functions.flat_map(|function| {
            let source = function.source.as_ref();
            let object = source.map(|_| &*function.object);
            object
                .into_iter()
                .chain(source.and_then(FunctionSource::path))
        })
    }
}

impl FunctionRow<'_> {
    /// Its address, object and source, if they are to be shown.
    pub(super) fn place(&self, paths: &ShownPaths) -> Option<[String; 3]> {
        let source = self.source.as_ref()?.show(paths);
        let object = Escaped(paths.show(&self.object)).to_string();
        Some([self.address.to_string(), object, source])
    }
}
