//! What can be wrong with the functions that were asked for.

use std::path::{Path, PathBuf};

use super::probe::{did_you_mean, file_name, unreadable_suffix};
use super::refusal::Refusal;
use crate::address::{FileAddr, LiveAddr};

/// Why functions are not found. The subject of the error is the program's file.
///
/// ```no_run
/// use probes_lib::{ErrorKind, FunctionError, FunctionSelector, Functions};
///
/// let functions = Functions::of_process(4242)?;
/// let selector = FunctionSelector::Glob("Htpp.*".parse().unwrap());
/// if let Err(error) = functions.select(&[selector]) {
///     if let ErrorKind::Function(FunctionError::NoMatch { near, .. }) = error.kind() {
///         println!("{error}; similar names: {}", near.join(", "));
///     }
/// }
/// # Ok::<(), probes_lib::Error>(())
/// ```
#[derive(Debug, strum::IntoStaticStr, thiserror::Error)]
#[strum(serialize_all = "snake_case")]
#[non_exhaustive]
pub enum FunctionError {
    /// No function has a name that matches.
    #[error("{}", self.with_subject("it"))]
    NoMatch {
        /// What was asked for.
        glob: String,
        /// Whether the program runs OCaml bytecode, whose functions are no native code.
        runs_bytecode: bool,
        /// Whether the code of probe sites matches, which ppx_probe makes functions of.
        is_probe_site: bool,
        /// How many libraries and plugins of the process were searched, too.
        libraries: usize,
        /// How many functions of the program have no name, because it is stripped.
        unnamed: usize,
        /// A file that should be the program's separate debug file, and cannot be used.
        unusable_debug_file: Option<PathBuf>,
        /// Files that are mapped and could not be read.
        unreadable: Vec<PathBuf>,
        /// Names that there are, nearest first.
        near: Vec<String>,
    },
    /// No function is known to be at this address of the process.
    #[error("{}", self.with_subject("it"))]
    NoneAt {
        /// The address that was asked for.
        address: LiveAddr,
        /// How many libraries and plugins of the process were searched, too.
        libraries: usize,
    },
    /// No USDT probe matches.
    #[error("{}", self.with_subject("it"))]
    NoUsdt {
        /// What was asked for.
        glob: String,
        /// How many libraries and plugins of the process were searched, too.
        libraries: usize,
        /// Whether probes of OCaml match, though only those of other providers were asked for.
        is_ocamls: bool,
        /// Mapped files that could not be read, or whose notes could not.
        unreadable: Vec<PathBuf>,
        /// Names that there are, nearest first.
        near: Vec<String>,
    },
    /// The site of a USDT probe is in no known function.
    #[error("{}", self.with_subject("it"))]
    SiteOutside {
        /// Provider and name of the probe.
        name: String,
        /// The address in the file.
        address: FileAddr,
    },
    /// Neither the program nor a library has a runtime of OCaml whose symbols are there.
    #[error("{}", self.with_subject("it"))]
    NoRuntime {
        /// How many libraries and plugins of the process were searched, too.
        libraries: usize,
    },
    /// The runtime is that of OCaml 4, and only that of OCaml 5 does this work of the garbage collector.
    #[error("the runtime of OCaml 4 does not do {work}, only that of OCaml 5")]
    NeedsOcaml5 {
        /// The work, as `-gc` has it.
        work: &'static str,
    },
    /// The runtime of OCaml has no function for this work of the garbage collector.
    #[error("{}", self.with_subject("it"))]
    NoCollector {
        /// The functions of which it might have one.
        names: &'static [&'static str],
        /// How many libraries and plugins of the process were searched, too.
        libraries: usize,
    },
    /// More functions than can be timed, or watched, together.
    #[error("{given} functions match; at most {most} can be timed or watched at once")]
    TooManyTimed {
        /// How many were asked for.
        given: usize,
        /// How many are possible.
        most: usize,
    },
    /// Neither the program nor a library has source lines in its debugging information.
    #[error("{}", self.with_subject("it"))]
    NoLines {
        /// How many libraries and plugins of the process were searched, too.
        libraries: usize,
    },
    /// No code comes from a source file whose path ends so.
    #[error("{}", self.with_subject("it"))]
    UnknownFile {
        /// What was asked for.
        file: String,
        /// How many libraries and plugins of the process were searched, too.
        libraries: usize,
        /// Names of files that there are, nearest first.
        near: Vec<String>,
    },
    /// There are several source files whose paths end so.
    #[error("{file} may be {}", alternatives(paths))]
    SeveralFiles {
        /// What was asked for.
        file: String,
        /// Their paths.
        paths: Vec<String>,
    },
    /// No code begins at this line of a source file.
    #[error("no code begins at {file}:{line}{}", nearest(near))]
    NoCodeAt {
        /// The file.
        file: String,
        /// The line, from 1.
        line: u32,
        /// The last line before it and the first after it that have code.
        near: Vec<u32>,
    },
    /// None of the functions that were asked for can be observed, or none of those with one of the names.
    #[error("{}", none_possible(refused))]
    NonePossible {
        /// Which, and why.
        refused: Vec<(String, Refusal)>,
        /// Whether all of them are sites of USDT probes.
        is_usdt: bool,
    },
}

/// Returns how a sentence goes on if there is a separate debug file that is not used.
pub(crate) fn and_unusable(debug_file: Option<&Path>) -> String {
    debug_file.map_or(String::new(), |path| {
        let path = path.display();
        format!(", and {path} cannot be used: it is of another build, damaged, or not readable")
    })
}

impl FunctionError {
    /// Returns the message about the file `subject`.
    pub(super) fn with_subject(&self, subject: &str) -> String {
        let file = file_name(subject.as_ref());
        match self {
            FunctionError::NoMatch {
                glob,
                runs_bytecode,
                is_probe_site,
                libraries,
                unnamed,
                unusable_debug_file,
                unreadable,
                near,
            } => format!(
                "no function in {file}{}{} matches {glob}{}{}{}{}{}",
                if *runs_bytecode {
                    ", which runs OCaml bytecode,"
                } else {
                    ""
                },
                or_libraries(*libraries),
                if *is_probe_site {
                    ", except the code of probe sites"
                } else {
                    ""
                },
                match unnamed {
                    0 => String::new(),
                    1 => format!("; 1 function of {file} has no name: it is stripped"),
                    _ => format!("; {unnamed} functions of {file} have no name: it is stripped"),
                },
                and_unusable(unusable_debug_file.as_deref()),
                unreadable_suffix(unreadable),
                did_you_mean(near)
            ),
            FunctionError::NoUsdt {
                glob,
                libraries,
                is_ocamls,
                unreadable,
                near,
            } => format!(
                "no USDT probe in {file}{} matches {glob}{}{}{}",
                or_libraries(*libraries),
                if *is_ocamls { ", except OCaml's" } else { "" },
                unreadable_suffix(unreadable),
                did_you_mean(near)
            ),
            FunctionError::SiteOutside { name, address } => {
                format!("the site of {name} in {file} at {address} is in no known function")
            }
            FunctionError::NoneAt { address, libraries } => format!(
                "no function in {file}{} is known at {address}",
                or_libraries(*libraries)
            ),
            FunctionError::NoRuntime { libraries } => format!(
                "no OCaml runtime with symbols in {file}{}",
                or_libraries(*libraries)
            ),
            FunctionError::NoCollector { names, libraries } => format!(
                "no function in {file}{} is called {}",
                or_libraries(*libraries),
                names.join(" or ")
            ),
            FunctionError::NoLines { libraries } => {
                format!("no source lines in {file}{}", or_libraries(*libraries))
            }
            FunctionError::UnknownFile {
                file: source,
                libraries,
                near,
            } => format!(
                "no code in {file}{} is from {source}{}",
                or_libraries(*libraries),
                did_you_mean(near)
            ),
            FunctionError::SeveralFiles { .. }
            | FunctionError::NoCodeAt { .. }
            | FunctionError::NonePossible { .. }
            | FunctionError::NeedsOcaml5 { .. }
            | FunctionError::TooManyTimed { .. } => format!("{file}: {self}"),
        }
    }
}

/// Says what was searched besides the program.
fn or_libraries(libraries: usize) -> String {
    match libraries {
        0 => String::new(),
        1 => " or its library".to_owned(),
        many => format!(" or its {many} libraries"),
    }
}

/// The first few paths, and how many more there are.
fn alternatives(paths: &[String]) -> String {
    const FEW: usize = 3;
    match paths {
        [] => String::new(),
        [one] => one.clone(),
        [first @ .., last] if paths.len() <= FEW => format!("{} or {last}", first.join(", ")),
        more => format!("{} or {} more", more[..FEW].join(", "), more.len() - FEW),
    }
}

/// Names the nearest lines that have code.
fn nearest(lines: &[u32]) -> String {
    match lines {
        [] => String::new(),
        [one] => format!("; the nearest line with code is {one}"),
        [before, after, ..] => format!("; the nearest lines with code are {before} and {after}"),
    }
}

/// Says why functions cannot be observed: the first of them, and how many more there are.
fn none_possible(refused: &[(String, Refusal)]) -> String {
    let Some((name, why)) = refused.first() else {
        return "no function can be observed".to_owned();
    };
    match refused.len() - 1 {
        0 => format!("{name} {why}"),
        others => format!("{name} {why}, and {others} more cannot be observed either"),
    }
}
