//! [`Present`]: what actions choose in a process that may not have everything they name.

use std::sync::Arc;

use crate::error::{Error, Result};
use crate::process::Process;
use crate::process::image::Image;

use crate::process::objects::Files;
use crate::select::{Actions, Choice, choose, choose_present};

/// What actions choose among the probes that a process has, and what they name that is missing.
pub(crate) struct Present {
    pub(crate) image: Image,
    pub(crate) choices: Vec<Choice>,
    pub(crate) missing: Option<Error>,
}

impl Present {
    /// Reads the image of `process`, and chooses what is there.
    ///
    /// # Errors
    ///
    /// If the process cannot be read, or the actions contradict each other.
    pub(crate) fn of(process: &Process, files: Arc<Files>, actions: &Actions) -> Result<Present> {
        let image = match Image::of(process, files.clone()) {
            Err(error) if error.is_missing_name() => {
                return Ok(Present {
                    image: Image::even_without(process, files)?,
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
        Ok(Present {
            image,
            choices,
            missing,
        })
    }
}
