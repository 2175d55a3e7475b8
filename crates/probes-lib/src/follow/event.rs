//! [`FollowEvent`]: what a follower reports.

use std::path::PathBuf;

use crate::error::Error;
use crate::update::report::Report;

/// Something that has happened to a followed process, as [`Follow`](crate::Follow) returns it.
///
/// ```
/// use probes_lib::FollowEvent;
///
/// fn line(event: &FollowEvent) -> String {
///     match event {
///         FollowEvent::Set(report) => format!("{}: {} probes", report.pid, report.changed.len()),
///         FollowEvent::Forked { parent, pid } => format!("{parent} forked {pid}"),
///         FollowEvent::Failed { pid, error } => format!("{pid}: {error}"),
///         other => format!("{other:?}"),
///     }
/// }
/// assert_eq!(line(&FollowEvent::Forked { parent: 1, pid: 2 }), "1 forked 2");
/// ```
#[derive(Debug)]
#[non_exhaustive]
pub enum FollowEvent {
    /// Probes were set: of the process itself, of a program that it has executed, or of objects that
    /// it has loaded.
    Set(Report),
    /// A target lacks something that the actions name, or has no probes at all. It is followed
    /// nevertheless, for what it executes and loads.
    Missing {
        /// The process.
        pid: i32,
        /// What it lacks.
        error: Error,
    },
    /// A process has forked another, which has the same probes, and is followed, too.
    Forked {
        /// The process that has forked.
        parent: i32,
        /// The new process.
        pid: i32,
    },
    /// A process has executed a program.
    Executed {
        /// The process.
        pid: i32,
        /// The program that it runs now.
        program: PathBuf,
    },
    /// A process has executed a program that has no probes, not even in its libraries, and was detached.
    /// Nothing was changed in that program.
    Detached {
        /// The process.
        pid: i32,
    },
    /// A process, or one that it has forked, receives signals faster than it can be resumed, so that it
    /// executes next to nothing but their handlers. It is detached, and runs on. Its probes stay as they are.
    Starved {
        /// The process.
        pid: i32,
    },
    /// The loader of a process cannot be hooked: objects that the process loads later are not seen.
    LoaderNotHooked {
        /// The process.
        pid: i32,
        /// Why.
        reason: &'static str,
    },
    /// Processes cannot be lent to other tools, so these cannot stop them while they are followed.
    NotLent {
        /// Why: another process has taken the address of this follower, or no socket can be made.
        reason: String,
    },
    /// Probes of a process could not be set; [`Error::effect`] says what it is left with.
    Failed {
        /// The process.
        pid: i32,
        /// Why.
        error: Error,
    },
    /// A process has exited.
    Exited {
        /// The process.
        pid: i32,
    },
}
