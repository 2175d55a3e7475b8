//! `bench`: measures how long a program is stopped while its probes are enabled and disabled, what
//! observing costs it, and what whole commands cost; writes the tables of `docs/benchmarks.md`. The
//! programs that are measured never pause by themselves.
//!
//! ```text
//! cargo run --release -p bench            builds everything, measures everything
//! cargo run --release -p bench -- [--tool FILE] [--rounds N] [--only TABLE]
//!                                         another build of the tool, fewer rounds, one table; to
//!                                         standard output only
//! cargo run --release -p bench -- [--only TABLE] --into FILE
//!                                         writes the tables into their places in a file
//! bench cost PROGRAM ARGUMENTS…           what one command costs (see `cost`); `bench` starts this itself
//! ```

use std::path::PathBuf;
use std::process::ExitCode;

mod commands;
mod cost;
mod document;
mod failure;
mod functions;
mod gdb;
mod goals;
mod lasting;
mod machine;
mod observe;
mod parsing;
mod prepare;
mod programs;
mod ps;
mod spin;
mod stats;
mod stop_time;
mod syscalls;
mod threads;

use failure::{Failure, Result};

/// The default of `--rounds`: how often each thing is measured (rounds, newly started programs, runs of a command).
const ROUNDS: usize = 30;

/// The command line.
struct Request {
    /// The file of the tool, instead of the one that this workspace builds.
    tool: Option<PathBuf>,
    rounds: usize,
    /// The only table to measure.
    only: Option<String>,
    /// The file that tables are written into, instead of `docs/benchmarks.md` or standard output.
    into: Option<PathBuf>,
}

impl Request {
    fn wants(&self, table: &str) -> bool {
        self.only.as_ref().is_none_or(|only| only == table)
    }

    /// Whether it measures all as usual: then the tables go into `docs/benchmarks.md` if `--into` names no other file.
    fn is_complete(&self) -> bool {
        self.tool.is_none() && self.rounds == ROUNDS && self.only.is_none()
    }
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
    let usage =
        || Failure::new("usage: bench [--tool FILE] [--rounds N] [--only TABLE] [--into FILE]");
    let mut request = Request {
        tool: None,
        rounds: ROUNDS,
        only: None,
        into: None,
    };
    while let Some(flag) = args.next() {
        let value = args.next().ok_or_else(usage)?;
        match flag.to_str() {
            Some("--tool") => request.tool = Some(value.into()),
            Some("--into") => request.into = Some(value.into()),
            Some("--rounds") => {
                let number = value.to_str().and_then(|text| text.parse().ok());
                request.rounds = number.filter(|&n| n > 0).ok_or_else(usage)?;
            }
            Some("--only") => {
                let table = value.to_str().filter(|table| TABLES.contains(table));
                request.only = Some(table.ok_or_else(usage)?.to_owned());
            }
            _ => return Err(usage()),
        }
    }
    Ok(request)
}

/// The names of the tables, as in the lines `<!-- bench NAME -->` of `docs/benchmarks.md`.
const TABLES: [&str; 20] = [
    "machine",
    "goals",
    "stop-time",
    "threads",
    "gdb",
    "commands",
    "ps",
    "observe",
    "observe-exact",
    "observe-stops",
    "observe-goals",
    "observe-questions",
    "functions-calls",
    "functions-stops",
    "functions-compiler",
    "record",
    "serve",
    "completion",
    "syscalls",
    "parsing",
];

fn measure(request: Request) -> Result<()> {
    let ready = prepare::build(request.tool.is_none())?;
    let machine = machine::describe()?;
    let is_complete = request.is_complete();
    let wants = |table| request.wants(table);
    let tool = request.tool.as_ref().unwrap_or(&ready.tool);
    let programs = &ready.programs;

    let mut document = document::Tables::default();
    // The table `machine` is about all tables of a document, so it is left as it is when only one of
    // them is written into a file.
    if request.into.is_none() || request.only.is_none() {
        document.add("machine", machine);
    }
    let stop_times = if wants("stop-time") || wants("goals") {
        stop_time::measure(programs, request.rounds)?
    } else {
        Vec::new()
    };
    if wants("stop-time") {
        document.add("stop-time", stop_time::table(&stop_times));
    }
    if wants("threads") {
        document.add("threads", threads::table(programs, request.rounds)?);
    }
    if wants("gdb") {
        document.add("gdb", gdb::table(programs)?);
    }
    let commands = if wants("commands") || wants("goals") {
        commands::measure(programs, tool, request.rounds)?
    } else {
        Vec::new()
    };
    if wants("commands") {
        document.add("commands", commands::table(&commands));
    }
    if wants("ps") {
        document.add("ps", ps::table(&ready.targets, tool, request.rounds)?);
    }
    add_observe_tables(&request, &ready, &mut document)?;
    if wants("functions-calls") {
        let table = functions::calls(&ready.targets, request.rounds)?;
        document.add("functions-calls", table);
    }
    if wants("functions-stops") {
        let table = functions::stops(tool, request.rounds)?;
        document.add("functions-stops", table);
    }
    if wants("functions-compiler") {
        document.add("functions-compiler", functions::compiler(request.rounds)?);
    }
    if wants("record") {
        document.add("record", lasting::record(&ready.targets, tool)?);
    }
    if wants("serve") {
        document.add("serve", lasting::serve(&ready.targets, tool)?);
    }
    if wants("completion") {
        let table = lasting::completion(&ready.targets, tool, request.rounds)?;
        document.add("completion", table);
    }
    if wants("syscalls") {
        document.add("syscalls", syscalls::table(programs, tool)?);
    }
    if wants("goals") {
        document.add("goals", goals::table(&stop_times, &commands)?);
    }
    if wants("parsing") {
        parsing::run(&ready.root, &ready.targets)?;
        document.add("parsing", parsing::table()?);
    }
    match request.into {
        Some(file) => document.write(&file),
        None if is_complete => document.write(&ready.root.join("docs/benchmarks.md")),
        None => {
            document.print();
            Ok(())
        }
    }
}

/// Measures the cost of observing hits. The table `observe-goals` needs the measurements of `observe`, `observe-exact`
/// and `observe-stops`, so it implies these tables.
fn add_observe_tables(
    request: &Request,
    ready: &prepare::BuildOutput,
    document: &mut document::Tables,
) -> Result<()> {
    let has_goals = request.wants("observe-goals");
    let wants = |table| has_goals || request.wants(table);
    let rounds = request.rounds;
    let (mut costs, mut exact, mut stops) = <(Vec<_>, Vec<_>, Vec<_>)>::default();
    if wants("observe") {
        costs = observe::measure(&ready.targets, rounds)?;
        document.add("observe", observe::table(&costs));
    }
    if request.wants("observe-questions") {
        let file = ready.targets.join(programs::KINDS_SPIN);
        let answers = observe::questions::measure(&file, rounds)?;
        document.add("observe-questions", observe::questions::table(&answers));
    }
    if wants("observe-exact") {
        exact = observe::exact::measure(&ready.targets.join(programs::PAIRS), rounds)?;
        document.add("observe-exact", observe::exact::table(&exact));
    }
    if wants("observe-stops") {
        stops = observe::stops::measure(&ready.programs, rounds)?;
        document.add("observe-stops", observe::stops::table(&stops));
    }
    if has_goals {
        let goals = observe::goals::table(&costs, &exact, &stops)?;
        document.add("observe-goals", goals);
    }
    Ok(())
}
