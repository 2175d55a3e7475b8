//! [`ResolvedActions`]: what actions choose in a process that may not have everything they name.

use std::sync::Arc;

use crate::error::{Error, ErrorKind, ProcessError, Result};
use crate::process::Process;
use crate::process::image::Image;

use crate::process::objects::Files;
use crate::select::{Actions, Choice, choose, choose_present};

/// What actions choose among the probes that a process has. `missing` is the error about what they name that it does
/// not have, or about probes that have no effect.
pub(crate) struct ResolvedActions {
    pub(crate) image: Image,
    pub(crate) choices: Vec<Choice>,
    pub(crate) missing: Option<Error>,
}

impl ResolvedActions {
    /// Reads the image of `process`, and chooses what is there.
    ///
    /// # Errors
    ///
    /// If the process cannot be read, or the actions contradict each other.
    pub(crate) fn of(
        process: &Process,
        files: Arc<Files>,
        actions: &Actions,
    ) -> Result<ResolvedActions> {
        let image = match Image::of(process, files.clone()) {
            Err(error) if error.is_missing_name() || has_no_effect(&error) => {
                return Ok(ResolvedActions {
                    image: Image::even_without_probes(process, files)?,
                    choices: Vec::new(),
                    missing: Some(error),
                });
            }
            image => image?,
        };
        let (choices, missing) = match choose(&image.program, actions) {
            Err(error) if error.is_missing_name() => {
                (choose_present(&image.program, actions)?, Some(error))
            }
            choices => (choices?, None),
        };
        Ok(ResolvedActions {
            image,
            choices,
            missing,
        })
    }
}

/// Returns whether the error says that probes of the program have no effect: it is treated like one without probes.
fn has_no_effect(error: &Error) -> bool {
    matches!(
        error.kind(),
        ErrorKind::Process(ProcessError::Translated { .. } | ProcessError::Bytecode)
    )
}
