//! The flags for the output format, for where the answer is written, and for how much to write on standard error.

use std::ffi::OsStr;
use std::fs;
use std::io::{self, IsTerminal, stderr, stdout};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::checked::Flags;
use crate::destination::{Destination, Output, check_standard_output};
use crate::failure::Failure;
use crate::messages::{Level, MessageForm, Messages};
use crate::output::Format;
use crate::search_path::look_up;

// The flags for the output format, for where the answer is written, and for how much to write on standard error.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Flags")]
pub(crate) struct OutputFlags {
    /// Write the output to FILE, which is emptied once the command has begun
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// plain, table or json; by default table on a terminal, else plain
    #[arg(long, value_name = "FORMAT", value_parser = parse_format)]
    format: Option<Format>,
    /// Short for -format json
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    verbosity: VerbosityFlags,
}

// How much to write on standard error.
#[derive(Debug, clap::Args)]
pub(crate) struct VerbosityFlags {
    /// Print each step on standard error
    #[arg(short, long, overrides_with = "verbose")]
    verbose: bool,
    /// Print only errors on standard error
    #[arg(short, long, overrides_with = "quiet", conflicts_with = "verbose")]
    quiet: bool,
}

/// The output format, where the answer is written, and what to write on standard error.
#[derive(Debug)]
pub(crate) struct OutputOptions {
    pub(crate) format: Format,
    /// Whether the format depends on where the answer is written.
    is_default_format: bool,
    file: Option<PathBuf>,
    /// Whether commands that change something print what they have changed.
    reports_changes: bool,
    pub(crate) messages: Messages,
}

impl OutputOptions {
    /// Opens what the answer is written to: standard output, unless there is a file.
    pub(crate) fn open(&self) -> Result<Output, Failure> {
        self.open_or(Destination::Stdout)
    }

    /// The same for a command whose standard output is a traced program's: standard error, unless there is
    /// a file.
    pub(crate) fn open_beside_program(&self) -> Result<Output, Failure> {
        let mut output = self.open_or(Destination::Stderr)?;
        if self.is_default_format && self.file.is_none() {
            output.format = default_format(&stderr());
        }
        Ok(output)
    }

    /// The file that the answer is written to.
    pub(crate) fn file(&self) -> Option<&Path> {
        self.file.as_deref()
    }

    /// Opens standard output even if there is a file.
    pub(crate) fn open_stdout(&self) -> Output {
        self.open_stream(Destination::Stdout, &stdout())
    }

    /// The same for standard error.
    pub(crate) fn open_stderr(&self) -> Output {
        self.open_stream(Destination::Stderr, &stderr())
    }

    fn open_stream(&self, destination: Destination, stream: &impl IsTerminal) -> Output {
        let default = self.is_default_format.then(|| default_format(stream));
        Output {
            format: default.unwrap_or(self.format),
            messages: self.messages,
            destination,
            reports_changes: self.reports_changes,
        }
    }

    /// Fails if the answer would overwrite `path`, the file that `flag` names.
    pub(crate) fn refuse_to_overwrite(&self, flag: &str, path: &Path) -> Result<(), Failure> {
        match &self.file {
            Some(file) if is_same_file(file, path) => {
                let why = io::Error::other(format!("{flag} names the same file"));
                Err(Failure::WriteFile(file.clone(), why))
            }
            _ => Ok(()),
        }
    }

    /// Fails if the answer would overwrite the program of -prog that is started, which may be looked up in PATH.
    pub(crate) fn refuse_to_overwrite_started(&self, program: &Path) -> Result<(), Failure> {
        // If there is no such program, starting it says so.
        look_up(program).map_or(Ok(()), |file| self.refuse_to_overwrite("-prog", &file))
    }

    fn open_or(&self, default: Destination) -> Result<Output, Failure> {
        let open = |path| Destination::file(path, &self.messages);
        let file = self.file.as_deref().map(open).transpose()?;
        if file.is_none() && matches!(default, Destination::Stdout) {
            check_standard_output()?;
        }
        Ok(Output {
            format: self.format,
            messages: self.messages,
            destination: file.unwrap_or(default),
            reports_changes: self.reports_changes,
        })
    }
}

impl Flags for OutputFlags {
    type Value = OutputOptions;

    fn check(self) -> Result<OutputOptions, String> {
        let default = match self.output {
            None => default_format(&stdout()),
            Some(_) => Format::Plain,
        };
        let json = self.json.then_some(Format::Json);
        if json.is_some() && self.format.is_some_and(|format| Some(format) != json) {
            return Err("-json means -format json, and another format is given".to_owned());
        }
        let chosen = json.or(self.format);
        let format = chosen.unwrap_or(default);
        let form = match format {
            Format::Json => MessageForm::Json,
            Format::Plain | Format::Table => MessageForm::Text,
        };
        // With -quiet, changes are reported only if the command line says how or where.
        let is_asked_for = json.is_some() || self.format.is_some() || self.output.is_some();
        Ok(OutputOptions {
            format,
            is_default_format: chosen.is_none(),
            reports_changes: is_asked_for || !self.verbosity.quiet,
            file: self.output,
            messages: Messages::new(self.verbosity.level(), form),
        })
    }
}

impl Flags for VerbosityFlags {
    type Value = Messages;

    fn check(self) -> Result<Messages, String> {
        Ok(Messages::new(self.level(), MessageForm::Text))
    }
}

impl VerbosityFlags {
    fn level(&self) -> Level {
        if self.quiet {
            Level::Errors
        } else if self.verbose {
            Level::Steps
        } else {
            Level::Warnings
        }
    }
}

fn default_format(to: &impl IsTerminal) -> Format {
    if to.is_terminal() {
        Format::Table
    } else {
        Format::Plain
    }
}

/// Whether two paths lead to the same regular file, or would if it existed.
fn is_same_file(one: &Path, other: &Path) -> bool {
    match (fs::metadata(one), fs::metadata(other)) {
        (Ok(one), Ok(other)) => {
            one.is_file() && (one.dev(), one.ino()) == (other.dev(), other.ino())
        }
        _ => match (place(one), place(other)) {
            (Some(one), Some(other)) => one == other,
            _ => one == other,
        },
    }
}

/// Where a file is, or would be: its directory, without symbolic links, and its name.
fn place(path: &Path) -> Option<(PathBuf, &OsStr)> {
    let directory = match path.parent()? {
        here if here.as_os_str().is_empty() => Path::new("."),
        directory => directory,
    };
    Some((fs::canonicalize(directory).ok()?, path.file_name()?))
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
