//! [`Observable`]: whether a function can be counted and timed.

use std::fmt;

use probes_lib::{Error, Functions, ObservableFunctions, Refusal, SelectedFunction};
use serde::Serialize;

/// Whether a function can be counted, which patches its entry, and timed, which patches its exits, too.
pub(super) enum Observable {
    Timed,
    /// Counted, but not timed.
    Counted(Refusal),
    Refused(Refusal),
    /// The code of its file could not be read.
    Unknown,
}

/// Why a function cannot be timed or counted.
#[derive(Serialize)]
pub(super) struct RefusalView {
    reason: &'static str,
    text: String,
}

impl Observable {
    /// Returns for each of the `selected` ones of `functions`, all of one object, whether it can be counted and timed.
    pub(super) fn of(
        functions: &Functions,
        selected: &[SelectedFunction<'_>],
    ) -> Result<Vec<Observable>, Error> {
        let Some(first) = selected.first() else {
            return Ok(Vec::new());
        };
        let observable = ObservableFunctions::of(functions, first.object)?;
        let of_function = |it| Observable::of_function(&observable, it);
        Ok(selected.iter().map(of_function).collect())
    }

    fn of_function(
        observable: &ObservableFunctions<'_>,
        selected: &SelectedFunction<'_>,
    ) -> Observable {
        let (counted, timed) = (
            observable.can_count(selected),
            observable.can_time(selected),
        );
        match (counted, timed) {
            (Err(refusal), _) => Observable::Refused(refusal),
            (_, Err(refusal)) => Observable::Counted(refusal),
            (Ok(()), Ok(())) => Observable::Timed,
        }
    }

    pub(super) fn can_count(&self) -> Option<bool> {
        match self {
            Observable::Timed | Observable::Counted(_) => Some(true),
            Observable::Refused(_) => Some(false),
            Observable::Unknown => None,
        }
    }

    pub(super) fn can_time(&self) -> Option<bool> {
        match self {
            Observable::Timed => Some(true),
            Observable::Counted(_) | Observable::Refused(_) => Some(false),
            Observable::Unknown => None,
        }
    }

    pub(super) fn refusal(&self) -> Option<RefusalView> {
        match self {
            Observable::Counted(refusal) | Observable::Refused(refusal) => Some(RefusalView {
                reason: refusal.name(),
                text: refusal.to_string(),
            }),
            Observable::Timed | Observable::Unknown => None,
        }
    }
}

/// One word, as text shows it.
impl fmt::Display for Observable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Observable::Timed => f.write_str("count,time"),
            Observable::Counted(refusal) => write!(f, "count({})", refusal.name()),
            Observable::Refused(refusal) => write!(f, "no({})", refusal.name()),
            Observable::Unknown => f.write_str("-"),
        }
    }
}
