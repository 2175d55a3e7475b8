//! `ocaml-probes`: lists, enables, disables and observes the probes of live OCaml programs.
//!
//! A thin binary over `probes-lib`, in two steps: before anything runs, the arguments are parsed
//! and checked, which gives a command ([`command_line`], [`flags`]); then the command runs, and
//! writes its answer ([`commands`], [`output`], [`messages`]).

mod clock;
mod command_line;
mod commands;
mod descriptors;
mod destination;
mod failure;
mod flags;
mod hint;
mod interruptible_output;
mod messages;
mod output;
mod output_file;
mod poll;
mod progress;
mod question;
mod replacement;
mod search_path;
mod signals;
mod spelling;
mod standard_error;
mod status_line;
mod text;
mod usage;

use std::process::ExitCode;

use command_line::NoCommand;
use failure::Failure;
use messages::{Level, Messages};

fn main() -> ExitCode {
    probes_lib::keep_one_heap();
    probes_lib::survive_file_limit();
    let (messages, outcome) = match command_line::parse(std::env::args_os()) {
        Ok(command) => (
            command.messages(),
            command.run(command_line::definition_for),
        ),
        Err(NoCommand::Print(text)) => {
            let printed = destination::print(&text).map(|()| ExitCode::SUCCESS);
            (Messages::default(), printed)
        }
        Err(NoCommand::Usage(error, form)) => {
            let messages = Messages::new(Level::default(), form);
            (messages, Err(Failure::Usage(error)))
        }
    };
    if outcome.is_ok() {
        commands::warn_of_left_out_lines(&messages);
    }
    let status = outcome.unwrap_or_else(|failure| {
        if failure.is_closed_pipe() {
            return ExitCode::SUCCESS;
        }
        messages.failure(&failure);
        failure.exit_status()
    });
    messages.say_dropped();
    status
}
