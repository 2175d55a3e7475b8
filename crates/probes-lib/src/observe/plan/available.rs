//! [`AvailableObservation`]: the part of an observation that a process can record, and what is missing.

use crate::error::{Error, ErrorKind, ObserveError, Result};
use crate::functions::Functions;
use crate::observe::observation::Observation;
use crate::observe::plan::check_sites;
use crate::process::program::Program;
use crate::select::function::FunctionSelector;

/// The part of an [`Observation`] that can be recorded in a process.
///
/// [`Target::available`](crate::Target::available) has an example.
#[derive(Debug, Default)]
pub struct AvailableObservation {
    /// This part; `None` if nothing can be recorded.
    pub observation: Option<Observation>,
    /// Why each of the other selections is left out: probes, pairs and functions that the process does not have, and
    /// pairs whose key cannot be evaluated in it.
    pub missing: Vec<Error>,
}

impl Observation {
    /// Returns whether it selects sites.
    pub(crate) fn selects_sites(&self) -> bool {
        !self.counted.is_empty() || !self.pairs.is_empty() || !self.watched.is_empty()
    }

    /// Returns a copy that selects no sites.
    pub(crate) fn without_sites(&self) -> Observation {
        Observation {
            counted: Vec::new(),
            pairs: Vec::new(),
            watched: Vec::new(),
            ..self.clone()
        }
    }

    /// Returns a copy without the selected sites that a program does not have, and why each is left out.
    ///
    /// # Errors
    ///
    /// If something else is wrong with a selection.
    pub(crate) fn with_sites_of(&self, program: &Program) -> Result<(Observation, Vec<Error>)> {
        let (mut kept, mut missing) = (self.without_sites(), Vec::new());
        let none = self.without_sites();
        for selector in &self.counted {
            let one = none.clone().count(selector.clone());
            if is_available(check_sites(&one, program), &mut missing)? {
                kept = kept.count(selector.clone());
            }
        }
        for (start, stop) in &self.pairs {
            let one = none.clone().time(start, stop);
            if is_available(check_sites(&one, program), &mut missing)? {
                kept = kept.time(start, stop);
            }
        }
        for selector in &self.watched {
            let one = none.clone().watch(selector.clone());
            if is_available(check_sites(&one, program), &mut missing)? {
                kept = kept.watch(selector.clone());
            }
        }
        Ok((kept, missing))
    }

    /// Returns a copy without the selected functions that a process does not have, and why each is left out.
    ///
    /// # Errors
    ///
    /// If something else is wrong with a selection.
    pub(crate) fn with_functions_of(&self, all: &Functions) -> Result<(Observation, Vec<Error>)> {
        let (mut kept, mut missing) = (self.clone(), Vec::new());
        for selectors in [
            &mut kept.counted_functions,
            &mut kept.timed_functions,
            &mut kept.watched_functions,
        ] {
            let mut available = Vec::new();
            for selector in selectors.drain(..) {
                let found = all.places(std::slice::from_ref(&selector));
                if is_available(found, &mut missing)? {
                    available.push(selector);
                }
            }
            *selectors = available;
        }
        for (start, stop) in std::mem::take(&mut kept.usdt_pairs) {
            let [first, last] = [&start, &stop].map(|end| FunctionSelector::Usdt(end.clone()));
            let found = all.places(&[first]).and_then(|_| all.places(&[last]));
            if is_available(found, &mut missing)? {
                kept.usdt_pairs.push((start, stop));
            }
        }
        Ok((kept, missing))
    }
}

/// Returns whether a selection was found; adds the error to `missing` if it is not there.
fn is_available<T>(found: Result<T>, missing: &mut Vec<Error>) -> Result<bool> {
    match found {
        Ok(_) => Ok(true),
        Err(error) if is_missing(&error) => {
            missing.push(error);
            Ok(false)
        }
        Err(error) => Err(error),
    }
}

/// Returns whether the process does not have what was selected, or an expression does not fit it.
fn is_missing(error: &Error) -> bool {
    error.is_missing_name()
        || error.is_missing_function()
        || matches!(
            error.kind(),
            ErrorKind::Observe(ObserveError::Expression(_))
        )
}
