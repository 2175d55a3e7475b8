//! `bench`: measures, on live programs that never pause of themselves, how long they stand still
//! while their probes are switched and what whole commands cost, and writes the tables of
//! `docs/benchmarks.md`.
//!
//! ```text
//! cargo run --release -p bench            builds everything, measures everything
//! cargo run --release -p bench -- --tool FILE [--rounds N]
//!                                         another build of the tool; to standard output only
//! bench cost PROGRAM ARGUMENTS…           what one command costs (see `cost`); used by itself
//! ```

use std::path::PathBuf;
use std::process::ExitCode;

mod commands;
mod cost;
mod document;
mod failure;
mod machine;
mod parsing;
mod prepare;
mod spin;
mod stats;
mod stillness;
mod syscalls;

use failure::{Failure, Result};

/// How many rounds, fresh programs and runs of a command there are, unless told otherwise.
const ROUNDS: usize = 30;

/// What was typed.
struct Request {
    /// A build of the tool that is not the workspace's own.
    tool: Option<PathBuf>,
    rounds: usize,
}

fn main() -> ExitCode {
    let mut args = std::env::args_os().skip(1).peekable();
    let done = if args.next_if(|first| first == "cost").is_some() {
        cost::report(args)
    } else {
        parse(args).and_then(measure)
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("bench: {failure}");
            ExitCode::FAILURE
        }
    }
}

fn parse(mut args: impl Iterator<Item = std::ffi::OsString>) -> Result<Request> {
    let usage = || Failure::new("usage: bench [--tool FILE] [--rounds N]");
    let mut request = Request {
        tool: None,
        rounds: ROUNDS,
    };
    while let Some(flag) = args.next() {
        let value = args.next().ok_or_else(usage)?;
        match flag.to_str() {
            Some("--tool") => request.tool = Some(value.into()),
            Some("--rounds") => {
                let number = value.to_str().and_then(|text| text.parse().ok());
                request.rounds = number.filter(|&n| n > 0).ok_or_else(usage)?;
            }
            _ => return Err(usage()),
        }
    }
    Ok(request)
}

fn measure(request: Request) -> Result<()> {
    let ready = prepare::build(request.tool.is_none())?;
    let machine = machine::describe()?;
    let own = request.tool.is_none() && request.rounds == ROUNDS;
    let tool = request.tool.unwrap_or(ready.tool);

    let mut document = document::Tables::default();
    document.add("machine", machine);
    let stillness = stillness::measure(&ready.programs, request.rounds)?;
    document.add("stillness", stillness::table(&stillness));
    let commands = commands::measure(&ready.programs, &tool, request.rounds)?;
    document.add("commands", commands::table(&commands));
    document.add("syscalls", syscalls::table(&ready.programs, &tool)?);
    document.add("goals", document::goals(&stillness, &commands)?);
    if own {
        parsing::run(&ready.root, &ready.targets)?;
        document.add("parsing", parsing::table()?);
        document.write(&ready.root.join("docs/benchmarks.md"))
    } else {
        document.print();
        Ok(())
    }
}
