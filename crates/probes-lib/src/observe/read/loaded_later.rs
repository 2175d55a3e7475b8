//! [`LoadedLater`]: files with functions that were asked for and are not observed, because the process has loaded the
//! files since the observation began.

use std::path::PathBuf;

use crate::functions::Functions;
use crate::observe::functions::ObservedFunctions;
use crate::process::Process;
use crate::process::code_files::MappedCode;
use crate::process::maps::Mapping;
use crate::process::objects::{code_file, unreadable};
use crate::select::function::FunctionSelector;

/// Collects these files while an observation lasts.
#[derive(Debug)]
pub(crate) struct LoadedLater {
    known: MappedCode,
    selectors: Vec<FunctionSelector>,
    found: Vec<PathBuf>,
}

impl LoadedLater {
    pub(crate) fn new(functions: &ObservedFunctions) -> LoadedLater {
        LoadedLater {
            known: functions.mapped.clone(),
            selectors: functions.selectors.clone(),
            found: Vec::new(),
        }
    }

    /// Returns whether there can be such files: not if all functions were selected by their addresses, which select
    /// none in other files.
    pub(crate) fn is_possible(&self) -> bool {
        !self.selectors.is_empty()
    }

    /// Looks for such files among the mappings of the process. Each file is read once.
    pub(crate) fn look(&mut self, process: &Process, maps: &[Mapping]) {
        for mapping in maps {
            if !self.known.insert(mapping) {
                continue;
            }
            let path = match code_file(process, maps, mapping) {
                Ok(None) => continue,
                Ok(Some(elf)) => {
                    let path = elf.path().to_owned();
                    let functions = Functions::to_select_of_file(elf);
                    // If it cannot be read, it may have such functions.
                    let may_have = functions
                        .map_or(true, |all| self.selectors.iter().any(|it| all.may_have(it)));
                    if !may_have {
                        continue;
                    }
                    path
                }
                Err(why) => unreadable(mapping, why).path,
            };
            if !self.found.contains(&path) {
                self.found.push(path);
            }
        }
    }

    pub(crate) fn found(&self) -> Vec<PathBuf> {
        self.found.clone()
    }
}
