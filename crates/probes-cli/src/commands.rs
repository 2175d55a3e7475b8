//! The subcommands. Each has its own file, with its flags, what they mean, and what the subcommand
//! does. The other files hold what several subcommands share.

mod attach;
mod changes;
mod closures;
mod completion;
mod count;
mod doctor;
mod doubtful_times;
mod event_loop;
mod event_reading;
mod follow;
mod forked_processes;
mod gaps;
mod gc;
mod hist;
mod holds;
mod info;
mod latency;
mod list;
mod lost_switches;
mod manual;
mod observation_messages;
mod observations;
mod observe;
mod observed_processes;
mod open_target;
mod opened_events;
mod opened_processes;
mod other_keys;
mod process_failures;
mod profile;
mod program_with_events;
mod ps;
mod reading_times;
mod readings;
mod record;
mod redraw;
mod report_file;
mod seen_exec;
mod serve;
mod slow_pairs;
mod stack;
mod started_program;
mod step_failures;
mod top;
mod trace;
mod trace_collector;
mod trace_observe;
mod uncounted;
mod undo;
mod until_exit;
mod untyped;
mod version;
mod wait;
mod watch;

use std::ffi::OsString;
use std::hint::black_box;
use std::process::ExitCode;

use clap::Subcommand;
use probes_lib::SourceMap;
use strum::IntoEnumIterator;

use self::doctor::Need;
use crate::failure::Failure;
use crate::messages::Messages;
use crate::output::WarningKind;
use crate::text::join_first_few;

/// A subcommand with its flags, which are checked as far as possible without the target program.
#[derive(Debug, Subcommand, strum::EnumDiscriminants)]
#[strum_discriminants(
    name(CommandKind),
    vis(pub(crate)),
    derive(strum::EnumIter, strum::IntoStaticStr),
    strum(serialize_all = "kebab-case")
)]
// Builds only the flags of the subcommand that is typed. Structs of flags have plain comments: a doc comment would
// become the help of the subcommand.
#[command(defer = true)]
pub(crate) enum Command {
    /// Start a program with its probes set before any of its code runs
    Trace(Box<trace::Args>),
    /// Change the probes of a running process, all or nothing
    Attach(attach::Args),
    /// Show the state of every probe of a running process, without stopping it
    Info(info::Args),
    /// Show the probes of a file, or the functions or USDT probes of a file or process
    List(list::Args),
    /// Count hits of probes, or calls of functions, of a running process
    Count(count::Args),
    /// Show which values a running process passes to its probes and functions, as histograms
    Hist(hist::Args),
    /// Show how long a running process takes from probe to probe, or for calls of functions
    Latency(latency::Args),
    /// Show the hits of a running process one by one, with their arguments
    Watch(watch::Args),
    /// Show the pauses of the garbage collector of a running process, and what it allocates
    Gc(gc::Args),
    /// Show what all threads of a running process do now: stacks, and what they wait for
    Stack(stack::Args),
    /// Show where the time of a running process goes: on the processor, and waiting
    Profile(profile::Args),
    /// Serve the figures of running processes to Prometheus, until Ctrl-C
    Serve(Box<serve::Args>),
    /// Write a time line of a running process to a file, for Perfetto and other viewers
    Record(record::Args),
    /// Remove instrumentation left behind by a killed observer
    Observe(observe::Args),
    /// Show continuously how often probes are hit or functions called; switch probes by key
    Top(top::Args),
    /// Show the running processes that have OCaml probes
    Ps(ps::Args),
    /// Show what this machine and a process allow, and which commands work
    Doctor(doctor::Args),
    /// Print the script with which a shell completes subcommands, flags, pids and names
    Completion(completion::Args),
    /// Print the manual page of a subcommand, or write those of all
    Man(manual::Args),
    /// Print the version
    Version(version::Args),
}

impl Command {
    /// How messages are written.
    pub(crate) fn messages(&self) -> Messages {
        match self {
            Command::Trace(args) => args.output.messages,
            Command::Attach(args) => args.output.messages,
            Command::Info(args) => args.output.messages,
            Command::List(args) => args.output.messages,
            Command::Count(args) => args.output.messages,
            Command::Hist(args) => args.output.messages,
            Command::Latency(args) => args.output.messages,
            Command::Watch(args) => args.output.messages,
            Command::Gc(args) => args.output.messages,
            Command::Stack(args) => args.output.messages,
            Command::Profile(args) => args.output.messages,
            Command::Serve(args) => args.output.messages,
            Command::Record(args) => args.output.messages,
            Command::Observe(args) => args.output.messages,
            Command::Top(args) => *args.messages,
            Command::Ps(args) => args.output.messages,
            Command::Doctor(args) => args.output.messages,
            Command::Completion(_) | Command::Man(_) => Messages::default(),
            Command::Version(args) => args.output.messages,
        }
    }

    /// Whether it stops processes.
    fn stops_processes(&self) -> bool {
        match self {
            Command::Trace(_)
            | Command::Attach(_)
            | Command::Count(_)
            | Command::Hist(_)
            | Command::Latency(_)
            | Command::Watch(_)
            | Command::Gc(_)
            | Command::Stack(_)
            | Command::Profile(_)
            | Command::Serve(_)
            | Command::Record(_)
            | Command::Observe(_)
            | Command::Top(_) => true,
            Command::Info(_)
            | Command::List(_)
            | Command::Ps(_)
            | Command::Doctor(_)
            | Command::Completion(_)
            | Command::Man(_)
            | Command::Version(_) => false,
        }
    }

    /// Runs the command; returns the status to exit with. `definition` takes the words of a command line, and returns
    /// a definition with at least the flags of their subcommand.
    pub(crate) fn run(
        self,
        definition: fn(&[OsString]) -> clap::Command,
    ) -> Result<ExitCode, Failure> {
        if self.stops_processes() {
            refuse_without_memory()?;
        }
        match self {
            Command::Trace(args) => return trace::run(*args),
            Command::Attach(args) => attach::run(&args),
            Command::Info(args) => info::run(&args),
            Command::List(args) => list::run(&args),
            Command::Count(args) => count::run(&args),
            Command::Hist(args) => hist::run(&args),
            Command::Latency(args) => latency::run(&args),
            Command::Watch(args) => watch::run(&args),
            Command::Gc(args) => return gc::run(&args),
            Command::Stack(args) => stack::run(&args),
            Command::Profile(args) => return profile::run(&args),
            Command::Serve(args) => serve::run(&args),
            Command::Record(args) => return record::run(&args),
            Command::Observe(args) => observe::run(&args),
            Command::Top(args) => top::run(&args),
            Command::Ps(args) => ps::run(&args),
            Command::Doctor(args) => {
                let commands = CommandKind::iter().map(|kind| (kind.into(), kind.needs()));
                return doctor::run(&args, commands);
            }
            Command::Completion(args) => completion::run(&args, definition),
            Command::Man(args) => manual::run(&args, &definition(&[])),
            Command::Version(args) => version::run(&args),
        }
        .map(|()| ExitCode::SUCCESS)
    }
}

impl CommandKind {
    /// What it needs of the machine and the process, for `doctor`.
    fn needs(self) -> &'static [Need] {
        use Need::{
            Events, Files, ListedFiles, Memory, Observe, Points, Probes, Processes, Samples,
            Stacks, Start, Stop, StopOrReadLive, StopOrWriteLive, Times, Waits, WaitsAlso,
        };
        match self {
            CommandKind::Trace => &[Start],
            CommandKind::Attach => &[Files, Memory, Probes, StopOrWriteLive],
            CommandKind::Info => &[Files, Memory, Probes],
            CommandKind::List => &[ListedFiles],
            CommandKind::Count | CommandKind::Hist | CommandKind::Top | CommandKind::Serve => {
                &[Files, Memory, Stop, Observe, Points]
            }
            CommandKind::Latency | CommandKind::Watch => {
                &[Files, Memory, Stop, Observe, Points, Times]
            }
            CommandKind::Gc => &[Files, Events],
            CommandKind::Stack => &[Files, Memory, Stacks, StopOrReadLive],
            CommandKind::Profile => &[Files, Memory, Stacks, StopOrReadLive, Waits, Samples],
            CommandKind::Observe => &[Files, Memory, Stop],
            CommandKind::Record => &[Files, Memory, Stop, Observe, Points, Times, WaitsAlso],
            CommandKind::Ps => &[Processes],
            CommandKind::Doctor
            | CommandKind::Completion
            | CommandKind::Man
            | CommandKind::Version => &[],
        }
    }
}

/// Warns if source lines are missing in the answer because there is too much debugging information.
pub(crate) fn warn_of_left_out_lines(messages: &Messages) {
    let paths = SourceMap::left_out();
    let paths: Vec<String> = paths
        .iter()
        .map(|path| path.display().to_string())
        .collect();
    if let Some(names) = join_first_few(&paths) {
        messages.warning(
            WarningKind::UnreadableFile,
            &format!(
                "source lines are missing: the debugging information of {names} was not read, because that of all files \
                 together would have been more than 1 GiB"
            ),
            "everything else is shown; with fewer files at a time, there may be room",
        );
    }
}

/// How much memory has to be free for a command that stops processes: the stacks of two threads, and what it usually
/// allocates. Where nothing is left for a small allocation, Rust aborts.
const RESERVE: usize = 8 << 20;

/// Fails if little memory is free, before anything is done.
fn refuse_without_memory() -> Result<(), Failure> {
    let mut reserve: Vec<u8> = Vec::new();
    let reserved = reserve.try_reserve_exact(RESERVE);
    // Otherwise the allocation, which nothing uses, is optimized away.
    black_box(&reserve);
    reserved.map_err(|_| Failure::NoMemory { needed: RESERVE })
}
