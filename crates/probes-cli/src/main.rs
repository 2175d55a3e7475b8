//! `ocaml-probes`: see and steer the probes of live OCaml programs.
//!
//! A thin binary over `probes-lib`, in two steps: what was typed ([`args`]), then what is usable
//! ([`request`]), checked before anything runs. Then a command does it, and its answer is written.

mod args;
mod commands;
mod hint;
mod messages;
mod output;
mod request;
mod spelling;
mod usage;

use std::io::ErrorKind;
use std::process::ExitCode;

use commands::Failure;
use messages::Messages;
use request::Request;
use usage::Stop;

fn main() -> ExitCode {
    let request = match args::parse(std::env::args_os()).and_then(Request::of) {
        Ok(request) => request,
        Err(Stop::Asked(text)) => {
            let printed = output::print(&text).map(|()| ExitCode::SUCCESS);
            return status(printed, &Messages::default());
        }
        Err(Stop::Usage(error)) => {
            Messages::default().error(&error.to_string(), Some(error.hint()));
            return ExitCode::from(2);
        }
    };
    let messages = request.messages();
    status(commands::run(request), &messages)
}

/// 0: done, or nobody wants the rest of the answer; 1: it could not be done; or that of a program.
fn status(outcome: Result<ExitCode, Failure>, messages: &Messages) -> ExitCode {
    match outcome {
        Ok(status) => status,
        Err(Failure::Output(error)) if error.kind() == ErrorKind::BrokenPipe => ExitCode::SUCCESS,
        Err(failure) => {
            messages.error(&failure.to_string(), failure.hint());
            ExitCode::FAILURE
        }
    }
}
