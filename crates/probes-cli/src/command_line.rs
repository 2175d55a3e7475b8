//! Parses the command line into a [`Command`].

use std::error::Error;
use std::ffi::OsString;
use std::io::IsTerminal;

use clap::builder::StyledStr;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{ArgAction, CommandFactory, FromArgMatches, Parser};
use probes_lib::BadExpression;

use crate::commands::Command;
use crate::flags::Misplaced;
use crate::messages::MessageForm;
use crate::spelling::{asks_for_json, spell_out, there_are};
use crate::usage::UsageError;

const HELP: &str = "\
Examples:
    ocaml-probes list -prog ./server.exe
    ocaml-probes trace -prog ./server.exe -enable-regexp req_ -- --port 8080
    ocaml-probes info -pid 4242
    ocaml-probes attach -pid 4242 -enable req_start,req_end
    ocaml-probes latency -pid 4242 -fn 'Http.*' -for 10s

-pid 7, --pid 7, -pid=7 and --pid=7 are the same. Subcommands and flags may be cut to a unique
prefix, except -enable* and -disable*. The argument after a flag that takes a value is its value; a
FILE or RE may begin with a dash, too. `--` ends the flags.

The answer is on standard output or, with -o, in a file; if the command starts a program, on
standard error. Errors, warnings and notes are on standard error; with -json, each is an object on a
line of its own.

Exit status: 0 success, 1 failure, 2 usage error. Commands that start a program and wait for it
(trace -wait, -count, -hist, -latency, -watch or -gc; gc, profile and record with -prog) exit with
the status of the program; if that is 0, with 1 if the observation failed, ended before the program
did, or could not be written.";

/// Count and time functions of native programs; list, enable, disable and observe OCaml probes.
#[derive(Debug, Parser)]
#[command(
    name = "ocaml-probes",
    disable_version_flag = true,
    disable_help_flag = true
)]
#[command(override_usage = "ocaml-probes SUBCOMMAND [FLAGS]", after_help = HELP)]
#[command(
    subcommand_value_name = "SUBCOMMAND",
    subcommand_help_heading = "Subcommands"
)]
#[command(next_help_heading = "Flags")]
struct CommandLine {
    #[command(subcommand)]
    command: Command,
    /// Print this help
    #[arg(short, visible_short_alias = '?', long, action = ArgAction::Help, global = true)]
    #[arg(help_heading = "Flags", display_order = 1000)]
    help: Option<bool>,
    /// Print the version, as the subcommand `version` does
    #[arg(long)]
    version: bool,
}

/// Why there is no command to run.
#[derive(Debug)]
pub(crate) enum NoCommand {
    /// The user asked for help: its text.
    Print(String),
    /// A usage error, and the form in which it is printed.
    Usage(UsageError, MessageForm),
}

/// Reads the command line, whose first argument is the name of the program.
pub(crate) fn parse(argv: impl IntoIterator<Item = OsString>) -> Result<Command, NoCommand> {
    let typed: Vec<OsString> = argv.into_iter().collect();
    let mut definition = definition_for(&typed);
    let form = if asks_for_json(&definition, &typed) {
        MessageForm::Json
    } else {
        MessageForm::Text
    };
    let usage = |error| NoCommand::Usage(error, form);
    let argv = spell_out(&definition, typed).map_err(usage)?;
    let subcommand = argv.get(1).map(|word| word.to_string_lossy().into_owned());
    let matches = definition.try_get_matches_from_mut(argv);
    let parsed = matches.and_then(|matches| CommandLine::from_arg_matches(&matches));
    match parsed {
        Ok(line) => Ok(line.command),
        Err(error) => match text_to_print(&error) {
            Some(text) => Err(NoCommand::Print(text)),
            None => Err(usage(usage_error(&error, subcommand.as_deref()))),
        },
    }
}

/// The definition of the subcommands and flags for clap.
fn definition() -> clap::Command {
    let mut definition = CommandLine::command();
    definition.build();
    definition
}

/// Same as `definition`, but if the first argument is the whole name of a subcommand, without the flags of the other
/// subcommands: defining those takes longer than everything else that `ocaml-probes version` does.
pub(crate) fn definition_for(argv: &[OsString]) -> clap::Command {
    let definition = CommandLine::command();
    let is_typed = |it: &clap::Command| argv.get(1).is_some_and(|word| word == it.get_name());
    if !definition.get_subcommands().any(is_typed) {
        return self::definition();
    }
    let without_flags = |it: clap::Command| {
        if is_typed(&it) {
            it
        } else {
            // clap adds the flags of a subcommand in its deferred function: this one adds none.
            it.defer(|command| command)
        }
    };
    let mut definition = definition.mut_subcommands(without_flags);
    definition.build();
    definition
}

/// The text of the help, if the user asked for it.
fn text_to_print(error: &clap::Error) -> Option<String> {
    let is_asked_for = error.kind() == ErrorKind::DisplayHelp;
    is_asked_for.then(|| coloured(&error.render()))
}

fn usage_error(error: &clap::Error, subcommand: Option<&str>) -> UsageError {
    let (subcommand, message) = match error.kind() {
        ErrorKind::MissingSubcommand | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            (None, missing_subcommand())
        }
        _ => (subcommand, explain(error)),
    };
    let marked = error.source().and_then(|it| {
        let bad = it.downcast_ref::<BadExpression>();
        let misplaced = it.downcast_ref::<Misplaced>();
        bad.map(BadExpression::marked)
            .or(misplaced.map(Misplaced::marked))
    });
    UsageError::new(subcommand, message).with_marked(marked)
}

fn missing_subcommand() -> String {
    format!("no subcommand; {}", there_are(&definition()))
}

/// What is wrong with the command line, with flags spelled as in our help.
fn explain(error: &clap::Error) -> String {
    let flags = |kind| match error.get(kind) {
        Some(ContextValue::Strings(flags)) => flags.join(" and "),
        Some(flag) => flag.to_string(),
        None => String::new(),
    };
    match (error.kind(), error.source()) {
        (ErrorKind::ArgumentConflict, _) => {
            let flag = without_value(&flags(ContextKind::InvalidArg));
            let other = without_value(&flags(ContextKind::PriorArg));
            if other.is_empty() || other == flag {
                let instead = match &*flag {
                    "-name" => "; -name 'ONE|OTHER' selects the programs of both names",
                    _ => "",
                };
                format!("{flag} is given more than once{instead}")
            } else {
                format!("{flag} and {other} cannot be combined")
            }
        }
        (ErrorKind::MissingRequiredArgument, _) => {
            // A group of flags, one of which is needed: `<--pid <N>|--name <RE>>`.
            let flags = flags(ContextKind::InvalidArg).replace('|', " or ");
            let flags = flags.replace("--", "-").replace(['<', '>'], "");
            format!("needs {flags}")
        }
        (ErrorKind::InvalidValue, _) => {
            let flag = without_value(&flags(ContextKind::InvalidArg));
            format!("{flag} is empty")
        }
        (ErrorKind::ValueValidation, Some(source)) => {
            // The flag may be an operand: `[GLOB]...`.
            let flag = flags(ContextKind::InvalidArg);
            let flag = without_value(flag.trim_matches(['[', ']', '.']));
            format!("{flag}: {source}")
        }
        _ => {
            let text = error.render().to_string();
            let first = text.lines().next().unwrap_or_default();
            first.strip_prefix("error: ").unwrap_or(first).to_owned()
        }
    }
}

/// Returns `-pid` for `--pid <N>`.
fn without_value(flag: &str) -> String {
    let flag = flag.split(' ').next().unwrap_or_default();
    flag.replacen("--", "-", 1)
}

/// With colours on a terminal, unless NO_COLOR is set (<https://no-color.org>).
fn coloured(text: &StyledStr) -> String {
    let has_no_color = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    if std::io::stdout().is_terminal() && !has_no_color {
        text.ansi().to_string()
    } else {
        text.to_string()
    }
}

#[cfg(test)]
mod tests;
