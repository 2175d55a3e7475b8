//! The flags for the output format, and for how much to write on standard error.

use std::io::{IsTerminal, stdout};

use super::checked::Flags;
use crate::output::Format;
use crate::say::{Level, Messages};

// The flags for the output format, and for how much to write on standard error.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Flags")]
pub(crate) struct OutputFlags {
    /// plain, table or json; by default table on a terminal, else plain
    #[arg(long, value_name = "FORMAT", value_parser = parse_format)]
    format: Option<Format>,
    /// Short for -format json
    #[arg(long, conflicts_with = "format")]
    json: bool,
    #[command(flatten)]
    verbosity: VerbosityFlags,
}

// How much to say on standard error.
#[derive(Debug, clap::Args)]
pub(crate) struct VerbosityFlags {
    /// Print each step on standard error
    #[arg(short, long, overrides_with = "verbose")]
    verbose: bool,
    /// Print only errors on standard error
    #[arg(short, long, overrides_with = "quiet", conflicts_with = "verbose")]
    quiet: bool,
}

/// The output format, and what to write on standard error.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OutputOptions {
    pub(crate) format: Format,
    pub(crate) messages: Messages,
}

impl Flags for OutputFlags {
    type Value = OutputOptions;

    fn check(self) -> Result<OutputOptions, String> {
        let default = if stdout().is_terminal() {
            Format::Table
        } else {
            Format::Plain
        };
        let json = self.json.then_some(Format::Json);
        Ok(OutputOptions {
            format: json.or(self.format).unwrap_or(default),
            messages: self.verbosity.check()?,
        })
    }
}

impl Flags for VerbosityFlags {
    type Value = Messages;

    fn check(self) -> Result<Messages, String> {
        Ok(Messages::new(if self.quiet {
            Level::Errors
        } else if self.verbose {
            Level::Steps
        } else {
            Level::Warnings
        }))
    }
}

fn parse_format(typed: &str) -> Result<Format, String> {
    match typed {
        "plain" => Ok(Format::Plain),
        "table" => Ok(Format::Table),
        "json" => Ok(Format::Json),
        _ => Err(format!(
            "\"{typed}\" is not a format: there are plain, table and json"
        )),
    }
}
