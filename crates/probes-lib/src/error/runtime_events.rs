//! What can be wrong with the runtime events of a process. The messages continue a sentence that begins with the
//! process or file.

use super::probe::did_you_mean;

/// Why the events of a runtime cannot be read, or switched on.
///
/// ```no_run
/// use probes_lib::{ErrorKind, RuntimeEvents, RuntimeEventsError};
///
/// match RuntimeEvents::of_process(4242) {
///     Ok(events) => println!("OCaml {}", events.version()),
///     Err(error) => match error.kind() {
///         ErrorKind::RuntimeEvents(RuntimeEventsError::NotOn) => println!("they are not on: {error}"),
///         _ => return Err(error),
///     },
/// }
/// # Ok::<(), probes_lib::Error>(())
/// ```
#[derive(Debug, strum::IntoStaticStr, thiserror::Error)]
#[strum(serialize_all = "snake_case")]
#[non_exhaustive]
pub enum RuntimeEventsError {
    /// It has the runtime of OCaml 5, and its events are not switched on.
    #[error("writes no runtime events: they are not switched on")]
    NotOn,
    /// Its events cannot be switched on while it runs.
    #[error("writes no runtime events, and they cannot be switched on while it runs: {why}")]
    CannotSwitchOn {
        /// Why.
        why: String,
    },
    /// Its events were switched on, and the disk that their file is on gets full.
    #[error(
        "has only {free} bytes free on the disk with the file of its runtime events: it would be killed (SIGBUS) once that disk is full"
    )]
    NoRoom {
        /// How many bytes there are.
        free: u64,
    },
    /// Its events were to be switched on, and no domain has got to where that is possible.
    #[error(
        "writes no runtime events: they are switched on when it allocates or collects, which it has not done meanwhile"
    )]
    Idle,
    /// It has the runtime of OCaml 4, which has no such events.
    #[error("has the runtime of OCaml 4, and only that of OCaml 5 writes runtime events")]
    Ocaml4,
    /// No runtime of OCaml is known in it.
    #[error("writes no runtime events, and has no OCaml runtime with symbols")]
    NoRuntime,
    /// Nothing says by which version of OCaml it was compiled, and so which numbers its events have.
    #[error(
        "does not say by which version of OCaml it was compiled, and so how its runtime events are read: Sys.ocaml_version is missing"
    )]
    NoVersion,
    /// It was compiled by a version of OCaml for which the numbers of events are not known.
    #[error(
        "was compiled by OCaml {}, whose runtime events this ocaml-probes does not know: it knows those of OCaml 5.0 to 5.4",
        version.escape_default()
    )]
    UnknownVersion {
        /// What `Sys.ocaml_version` is.
        version: String,
    },
    /// A glob matches no event.
    #[error("has no runtime event that matches {glob}{}", did_you_mean(near))]
    UnknownEvent {
        /// The glob, or name.
        glob: String,
        /// Names that there are, nearest first.
        near: Vec<String>,
    },
    /// The file of the events is not as a runtime writes it.
    #[error("has a damaged file of runtime events: {why}")]
    Malformed {
        /// What is wrong with it.
        why: String,
    },
}
