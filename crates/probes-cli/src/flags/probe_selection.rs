//! Probe names and regular expressions as arguments, and the flags that select what to observe.

use probes_lib::Selector;

use super::checked::{EMPTY_NAME, Flags, each_once};

/// What a regular expression is, for the end of the help of each command that reads one.
const REGEXP_HELP: &str = "\
RE is a regular expression in the syntax of Rust's regex crate (https://docs.rs/regex). It is
anchored at the start of the name, and not at its end: `req` matches req_start, `_start` does not,
`.*_start` does.";

/// The help of a command, with what a regular expression is.
pub(crate) fn with_regexp_help(help: &str) -> String {
    format!("{help}\n\n{REGEXP_HELP}")
}

// Some probes, or all.
#[derive(Debug, clap::Args)]
#[group(multiple = false)]
pub(crate) struct ProbeFlags {
    /// Only these probes, a comma list; may be repeated
    #[arg(id = "probe", long, value_name = "NAMES", value_delimiter = ',', value_parser = probe_name)]
    names: Vec<String>,
    /// Only the probes whose name RE matches at its start
    #[arg(long, value_name = "RE", value_parser = regexp)]
    regexp: Option<Selector>,
}

impl ProbeFlags {
    /// The probes that are given: none if there are none.
    pub(super) fn given(self) -> Result<Vec<Selector>, String> {
        self.given_or_all(true)
    }

    /// The probes that are given. If there are none: all, unless other things are selected instead.
    pub(super) fn given_or_all(self, has_others: bool) -> Result<Vec<Selector>, String> {
        let is_given = !self.names.is_empty() || self.regexp.is_some();
        if has_others && !is_given {
            return Ok(Vec::new());
        }
        self.check()
    }
}

impl Flags for ProbeFlags {
    type Value = Vec<Selector>;

    fn check(self) -> Result<Vec<Selector>, String> {
        if let Some(regexp) = self.regexp {
            return Ok(vec![regexp]);
        }
        if self.names.is_empty() {
            return Ok(vec![Selector::All]);
        }
        by_name("-probe", &self.names)
    }
}

/// Selects probes by their names, each once.
pub(crate) fn by_name(flag: &str, names: &[String]) -> Result<Vec<Selector>, String> {
    each_once(flag, names)?;
    Ok(names.iter().map(Selector::name).collect())
}

/// Reads the name of a probe; in a comma list, there may be spaces around it.
pub(crate) fn probe_name(typed: &str) -> Result<String, String> {
    let typed = typed.trim();
    if typed.is_empty() {
        return Err(EMPTY_NAME.to_owned());
    }
    if typed.starts_with('-') {
        return Err(format!("\"{typed}\" is not the name of a probe"));
    }
    Ok(typed.to_owned())
}

/// Reads a regular expression for the names of probes.
pub(super) fn regexp(typed: &str) -> Result<Selector, String> {
    Selector::regexp(typed).map_err(|error| error.to_string())
}
