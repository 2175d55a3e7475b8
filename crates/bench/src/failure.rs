//! [`Failure`]: why a measurement failed, in one line.

use std::fmt;

/// What was tried and why it did not work.
#[derive(Debug)]
pub(crate) struct Failure(String);

pub(crate) type Result<T, E = Failure> = std::result::Result<T, E>;

impl Failure {
    pub(crate) fn new(what: impl Into<String>) -> Failure {
        Failure(what.into())
    }

    /// For `map_err`: what was tried, then the error.
    pub(crate) fn of<E: fmt::Display>(what: impl Into<String>) -> impl FnOnce(E) -> Failure {
        let what = what.into();
        move |why| Failure(format!("{what}: {why}"))
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl From<probes_lib::Error> for Failure {
    fn from(error: probes_lib::Error) -> Failure {
        Failure(error.to_string())
    }
}
