//! [`Checked`]: a group of flags that is checked, and replaced by what the flags mean, while the
//! command line is parsed.

use std::fmt::Display;
use std::ops::Deref;

use clap::error::ErrorKind;
use clap::{ArgMatches, Args, Command, Error, FromArgMatches, Id};

/// What is wrong with `a,,b`, `a,` and an empty word.
pub(super) const EMPTY_NAME: &str = "a name in the comma list is empty";

/// A group of flags as clap reads it.
pub(crate) trait Flags: Args {
    /// What the flags mean together.
    type Value;

    /// What they mean, or what is wrong with them.
    fn check(self) -> Result<Self::Value, String>;

    /// What is wrong with other flags of the command beside them.
    fn check_others(_: &ArgMatches) -> Result<(), String> {
        Ok(())
    }
}

/// What a group of flags means. If they contradict each other, parsing the command line fails.
#[derive(Debug)]
pub(crate) struct Checked<F: Flags>(F::Value);

impl<F: Flags> Deref for Checked<F> {
    type Target = F::Value;

    fn deref(&self) -> &F::Value {
        &self.0
    }
}

impl<F: Flags> FromArgMatches for Checked<F> {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, Error> {
        let flags = F::from_arg_matches(matches)?;
        let checked = F::check_others(matches).and_then(|()| flags.check().map(Checked));
        checked.map_err(|message| Error::raw(ErrorKind::ValueValidation, message))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), Error> {
        *self = Checked::from_arg_matches(matches)?;
        Ok(())
    }
}

impl<F: Flags> Args for Checked<F> {
    fn group_id() -> Option<Id> {
        F::group_id()
    }

    fn augment_args(command: Command) -> Command {
        F::augment_args(command)
    }

    fn augment_args_for_update(command: Command) -> Command {
        F::augment_args_for_update(command)
    }
}

/// Refuses a value that is given twice.
pub(crate) fn each_once<T: PartialEq + Display>(flag: &str, values: &[T]) -> Result<(), String> {
    let mut indexed = values.iter().enumerate();
    let twice = indexed.find(|&(index, value)| values[..index].contains(value));
    match twice {
        Some((_, value)) => Err(format!("{flag}: \"{value}\" is given twice")),
        None => Ok(()),
    }
}
