//! What can be wrong with the probes that were asked for: their names, their states, their counters.

use std::path::{Path, PathBuf};

use crate::address::LiveAddr;
use crate::build_id::BuildId;
use crate::error::number_of;
use crate::site::SiteCode;

/// Why probes are not found, or cannot be changed as asked. The subject of the error is the file if
/// no probe is found, otherwise [`Subject::None`](crate::Subject::None).
///
/// ```no_run
/// use probes_lib::{Actions, ErrorKind, Options, ProbeError, Selector, Target};
///
/// let actions = Actions::new().enable(Selector::name("req_strat"));
/// if let Err(error) = Target::open(4242)?.check(&actions, Options::default()) {
///     if let ErrorKind::Probe(ProbeError::Unknown { name, near, .. }) = error.kind() {
///         println!("there is no {name}, but {}", near.join(", "));
///     }
/// }
/// # Ok::<(), probes_lib::Error>(())
/// ```
#[derive(Debug, strum::IntoStaticStr, thiserror::Error)]
#[strum(serialize_all = "snake_case")]
#[non_exhaustive]
pub enum ProbeError {
    /// The file has no OCaml probes.
    #[error("{}", self.with_subject("it").unwrap_or_default())]
    NoProbes {
        /// The file's build-id, if it has one.
        build_id: Option<BuildId>,
        /// Whether the file runs OCaml bytecode, and has no native OCaml code.
        runs_bytecode: bool,
        /// If the file runs in a process: other files that are mapped there and could not be read.
        unreadable: Vec<PathBuf>,
    },
    /// The program has no probe of that name.
    #[error("{}", self.with_subject("it").unwrap_or_default())]
    Unknown {
        /// The name that was asked for.
        name: String,
        /// Files that are mapped and could not be read.
        unreadable: Vec<PathBuf>,
        /// Names that it does have, nearest first.
        near: Vec<String>,
    },
    /// A regular expression or predicate selects no probe of the program.
    #[error("{}", self.with_subject("it").unwrap_or_default())]
    NoMatch {
        /// What was asked for.
        pattern: String,
        /// Files that are mapped and could not be read.
        unreadable: Vec<PathBuf>,
    },
    /// A regular expression cannot be compiled.
    #[error("\"{pattern}\" is not a regular expression: {}", regex_reason(source))]
    BadRegexp {
        /// What was given.
        pattern: String,
        /// What is wrong with it.
        source: regex::Error,
    },
    /// A probe is selected more than once for the same action.
    #[error("probe \"{name}\" is selected twice")]
    SelectedTwice {
        /// The probe.
        name: String,
    },
    /// A probe is to be enabled and disabled at once.
    #[error("probe \"{name}\" is to be both enabled and disabled")]
    Conflict {
        /// The probe.
        name: String,
    },
    /// A probe that was named to be disabled is disabled already.
    #[error("probe \"{name}\" is not enabled")]
    NotEnabled {
        /// The probe.
        name: String,
    },
    /// A probe's counters differ, and disabling it would leave some of its sites enabled.
    #[error(
        "probe \"{name}\" has counters that differ ({smallest} to {largest}): another tool, such as SystemTap, has enabled some of its sites, and disabling it would leave those sites enabled"
    )]
    UnequalCounters {
        /// The probe.
        name: String,
        /// The smallest of its counters.
        smallest: u16,
        /// The largest.
        largest: u16,
    },
    /// A probe's counter is at its maximum.
    #[error("probe \"{name}\" has been enabled 65535 times: its counter can hold no more")]
    CounterFull {
        /// The probe.
        name: String,
    },
    /// A probe's counters and sites disagree.
    #[error(
        "{enabled} of {} of \"{name}\" are enabled and its counter is {counter} (was an update cut off?)",
        number_of_sites(.sites)
    )]
    Inconsistent {
        /// The probe.
        name: String,
        /// Sites that call their handler.
        enabled: usize,
        /// All sites of the name.
        sites: usize,
        /// The smallest of its counters.
        counter: u16,
    },
    /// A site in memory is neither enabled nor disabled.
    #[error("a site of probe \"{name}\" at {address}: {}", site_text(*.found, *.expected))]
    UnexpectedSite {
        /// The probe.
        name: String,
        /// Where the site is in the process.
        address: LiveAddr,
        /// The bytes there.
        found: SiteCode,
        /// The bytes that the file has, or that were written.
        expected: SiteCode,
    },
    /// A probe is to be changed while the process runs, and is in an object that can be unloaded.
    #[error(
        "cannot change probe \"{name}\" without stopping the process: it has sites in {}, which could be unloaded meanwhile",
        file_name(object)
    )]
    LiveUnloadable {
        /// The probe.
        name: String,
        /// The object.
        object: PathBuf,
    },
}

fn number_of_sites(sites: &usize) -> String {
    number_of(*sites, "site")
}

impl ProbeError {
    /// Returns the message if it has the subject (the file) in its middle; `None` for all other
    /// errors, whose messages do not name it.
    pub(super) fn with_subject(&self, subject: &str) -> Option<String> {
        let name_of_file = file_name(Path::new(subject));
        match self {
            ProbeError::NoProbes {
                build_id,
                runs_bytecode,
                unreadable,
            } => Some(format!(
                "no OCaml probes in {subject}{}{}{}",
                build_id_suffix(build_id),
                if *runs_bytecode {
                    ", which runs OCaml bytecode"
                } else {
                    ""
                },
                unreadable_suffix(unreadable)
            )),
            ProbeError::Unknown {
                name,
                unreadable,
                near,
            } => Some(format!(
                "no probe \"{name}\" in {name_of_file}{}{}",
                unreadable_suffix(unreadable),
                did_you_mean(near)
            )),
            ProbeError::NoMatch {
                pattern,
                unreadable,
            } => Some(format!(
                "no probe in {name_of_file} matches {pattern}{}",
                unreadable_suffix(unreadable)
            )),
            _ => None,
        }
    }
}

pub(super) fn file_name(path: &Path) -> std::path::Display<'_> {
    path.file_name().map_or(path, Path::new).display()
}

/// Returns the end of a message, which names the unreadable files that may have the probe.
pub(super) fn unreadable_suffix(unreadable: &[PathBuf]) -> String {
    const FEW: usize = 3;
    let names = unreadable.iter().take(FEW);
    let names: Vec<String> = names.map(|path| file_name(path).to_string()).collect();
    let names = names.join(", ");
    match unreadable.len().saturating_sub(FEW) {
        _ if names.is_empty() => String::new(),
        0 => format!(", and {names} could not be read"),
        more => format!(", and {names} and {more} more could not be read"),
    }
}

fn build_id_suffix(build_id: &Option<BuildId>) -> String {
    match build_id {
        Some(id) => format!(" (build-id {id})"),
        None => String::new(),
    }
}

pub(super) fn did_you_mean(near: &[String]) -> String {
    let quoted: Vec<_> = near.iter().map(|name| format!("\"{name}\"")).collect();
    match quoted.as_slice() {
        [] => String::new(),
        [one] => format!("; did you mean {one}?"),
        [first @ .., last] => format!("; did you mean {} or {last}?", first.join(", ")),
    }
}

/// The last line of the regex crate's multi-line message, which says what is wrong.
fn regex_reason(error: &regex::Error) -> String {
    let text = error.to_string();
    let last = text.lines().last().unwrap_or_default();
    last.trim_start_matches("error: ").to_owned()
}

fn site_text(found: SiteCode, expected: SiteCode) -> String {
    let reason = if found.has_breakpoint() {
        "a breakpoint or uprobe (gdb, perf, bpftrace) is there"
    } else {
        "the process does not have the bytes of the file"
    };
    // At offset 1, either opcode is expected: that of an enabled or that of a disabled site.
    let is_wrong =
        |&at: &usize| found.0[at] != expected.0[at] && !(at == 1 && found.enabled().is_some());
    let differing: Vec<usize> = (0..found.0.len()).filter(is_wrong).collect();
    match differing.as_slice() {
        [1] => format!("found {:02x}, expected 3d or e8: {reason}", found.0[1]),
        [0] => format!("found {:02x}, expected 90: {reason}", found.0[0]),
        _ => format!("found {found}, expected {expected}: {reason}"),
    }
}
