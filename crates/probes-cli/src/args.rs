//! What was typed: the subcommands and flags, their help, and nothing of what they mean.

use std::ffi::OsString;
use std::io::IsTerminal;

use clap::builder::StyledStr;
use clap::error::{ContextKind, ErrorKind};
use clap::{ArgAction, CommandFactory, FromArgMatches, Parser, Subcommand};

use crate::spelling::spell_out;
use crate::usage::{Stop, UsageError};

const PROGRAM: &str = "ocaml-probes";

const HELP: &str = "\
Examples:
    ocaml-probes list -prog ./server.exe
    ocaml-probes trace -prog ./server.exe -enable-regexp req_ -- --port 8080
    ocaml-probes info -pid 4242
    ocaml-probes attach -pid 4242 -enable req_start,req_end

-pid 7, --pid 7, -pid=7 and --pid=7 are the same. Subcommands and flags may be cut to a unique
prefix, except -enable* and -disable*. The argument after a flag that takes a value is its value,
whatever it looks like. `--` ends the flags.

Exit status: 0 done, 1 it could not be done, 2 the arguments make no sense; with trace -wait, that
of the program.";

/// See and steer the probes of live OCaml programs.
#[derive(Debug, Parser)]
#[command(name = PROGRAM, version, disable_version_flag = true, disable_help_flag = true)]
#[command(override_usage = "ocaml-probes SUBCOMMAND [FLAGS]", after_help = HELP)]
#[command(
    subcommand_value_name = "SUBCOMMAND",
    subcommand_help_heading = "Subcommands"
)]
#[command(next_help_heading = "Flags")]
struct CommandLine {
    #[command(subcommand)]
    subcommand: Typed,
    /// Print this help
    #[arg(short, visible_short_alias = '?', long, action = ArgAction::Help, global = true)]
    #[arg(help_heading = "Flags", display_order = 1000)]
    help: Option<bool>,
    /// Print the version
    #[arg(long, action = ArgAction::Version)]
    version: Option<bool>,
}

/// A subcommand with its flags, as typed.
#[derive(Debug, Subcommand)]
pub(crate) enum Typed {
    /// Start a program with its probes set before any of its code runs
    Trace(TraceArgs),
    /// Change the probes of a running process, all or nothing
    Attach(AttachArgs),
    /// Show the state of every probe of a running process, without stopping it
    Info(InfoArgs),
    /// Show the probes of a file that is not running
    List(ListArgs),
    /// Count how often the probes of a running process are hit
    Count(CountArgs),
    /// Show how long a running process takes from one probe to another
    Latency(LatencyArgs),
    /// Show the hits of a running process one by one, with their arguments
    Watch(WatchArgs),
    /// Put back what an observation has left that was killed
    Observe(ObserveArgs),
    /// Show how often probes are hit, live, and switch them, on a terminal
    Top(TopArgs),
    /// Show the running processes that have OCaml probes
    Ps(PsArgs),
    /// Print the version
    Version,
}

#[derive(Debug, clap::Args)]
#[command(override_usage = "ocaml-probes trace -prog FILE [ACTIONS] [FLAGS] [-- ARGS]")]
#[command(after_help = TRACE_HELP)]
#[command(next_help_heading = "Flags")]
pub(crate) struct TraceArgs {
    /// The program to start; with no slash in it, it is looked up in PATH
    #[arg(long, value_name = "FILE")]
    pub(crate) prog: Option<OsString>,
    /// Stay until the program ends, and exit with its status
    #[arg(long)]
    pub(crate) wait: bool,
    /// Also in what it starts, executes and loads, before it runs
    #[arg(long)]
    pub(crate) follow: bool,
    /// Count the hits of all probes, from the first to the last
    #[arg(long)]
    pub(crate) count: bool,
    /// Time each START to the next STOP in its thread; may be repeated
    #[arg(long, value_name = "START,STOP", action = ArgAction::Append)]
    pub(crate) latency: Vec<String>,
    /// Show each hit of these probes, a comma list; may be repeated
    #[arg(long, value_name = "NAMES", action = ArgAction::Append)]
    pub(crate) watch: Vec<String>,
    #[command(flatten)]
    pub(crate) actions: ActionArgs,
    #[command(flatten)]
    pub(crate) answer: AnswerArgs,
    /// Arguments of the program
    #[arg(
        last = true,
        id = "argument",
        value_name = "ARGS",
        help_heading = "Arguments"
    )]
    pub(crate) arguments: Vec<OsString>,
}

const TRACE_HELP: &str = "\
Without actions all probes are enabled. Returns as soon as the program runs; the program goes on by
itself, in the background: on the same streams, but it cannot read from a terminal, and Ctrl-C does
not reach it. So that only the program's own words are on standard output, the answer is printed
with -json alone, as one line, when the program starts; -v says the pid on standard error.

With -wait the program is in the foreground, and a job of the shell as if it had been started
directly: Ctrl-C and Ctrl-Z, fg and bg work. Signals sent to ocaml-probes are passed on; one sent by
kill to all of the job (`kill %1`) reaches the program twice, unless it stops or continues. The exit
status is the program's, or 128 and the number of the signal that ended it.

With -follow a second process of ocaml-probes traces the program, what it starts, and the programs that
these execute, until all have ended or it is sent SIGTERM. Names that another program or a library
lacks are passed over there; processes without probes (a shell) are let go, with what they start.
What the program itself lacks is warned of. -v says what happens.

With -count, -latency or -watch it stays as with -wait, and tells what `count`, `latency` and `watch`
would have told from the first instruction to the last, on standard error, or with -json on standard
output; without actions no probe is enabled then. What the program forks adds to the counts, and
disturbs the times.

RE is an extended regular expression, as in grep -E.

One kind of action a call, but -enable goes with -disable. All is done, or the program is not started.";

#[derive(Debug, clap::Args)]
#[command(override_usage = "ocaml-probes attach -pid N ACTIONS [FLAGS]")]
#[command(after_help = ATTACH_HELP)]
#[command(next_help_heading = "Flags")]
pub(crate) struct AttachArgs {
    #[command(flatten)]
    pub(crate) whom: WhomArgs,
    #[command(flatten)]
    pub(crate) actions: ActionArgs,
    /// Set counters to 1 or 0 and the sites to match, whatever they were
    #[arg(long)]
    pub(crate) force: bool,
    /// Change the process while it runs: no thread is stopped
    #[arg(long)]
    pub(crate) live: bool,
    /// Also in what they start, execute and load later, before it runs
    #[arg(long)]
    pub(crate) follow: bool,
    /// Put everything back after 30s, 5m, 1h30m, or when told to end
    #[arg(long = "for", value_name = "DURATION", allow_hyphen_values = true)]
    pub(crate) duration: Option<String>,
    /// Allow text on 1 GiB huge pages: a first write copies a gigabyte
    #[arg(long)]
    pub(crate) gigatext: bool,
    #[command(flatten)]
    pub(crate) answer: AnswerArgs,
}

const ATTACH_HELP: &str = "\
Prints what was changed, plain as a line for each probe, in the order it was done:
    NAME BEFORE -> AFTER, N sites
with its counter before and after, and how many of its sites were switched. -force repairs probes
that `info` calls inconsistent. Of several processes, all are checked before the first is changed, and
each line begins with the PID.

With -live one byte of code is changed at a time while the process runs, which also works where it
cannot be stopped: under a debugger, or busy in the kernel. With -for it waits, and then takes back
what was added to each counter, or sooner on Ctrl-C, SIGTERM and SIGHUP (unless they were ignored
from the start, as by nohup); what others have done meanwhile stays. It prints that as well.

With -follow it stays, tracing the processes, what they start, and the programs that these execute,
until all have ended, or Ctrl-C or SIGTERM: probes stay as they are then. Names that another program
or a library lacks are passed over there; processes without probes (a shell) are let go, with what
they start. What a process lacks itself is warned of. -v says what happens.

RE is an extended regular expression, as in grep -E.

One kind of action a call, but -enable goes with -disable. Enabling adds one to a probe's counter
and disabling takes one away; its sites change when the counter leaves or reaches 0. Disabling a
named probe that is off is an error and changes nothing; the other kinds pass over such probes and
say so.";

#[derive(Debug, clap::Args)]
#[command(override_usage = "ocaml-probes info -pid N [FLAGS]", after_help = INFO_HELP)]
#[command(next_help_heading = "Flags")]
pub(crate) struct InfoArgs {
    #[command(flatten)]
    pub(crate) whom: WhomArgs,
    /// Also show each site and semaphore
    #[arg(long)]
    pub(crate) sites: bool,
    #[command(flatten)]
    pub(crate) answer: AnswerArgs,
}

const INFO_HELP: &str = "\
Plain, it is a line for each probe, sorted by name: NAME enabled, NAME disabled, or, where counters
and sites disagree, NAME inconsistent. With -sites, below each
    site ADDRESS enabled|disabled|foreign FUNCTION FILE:LINE ARGUMENTS
    semaphore ADDRESS VALUE
with addresses in the process, - for what the file does not tell, and, behind the state of a site
that does not hold what the file has, its bytes: foreign(90cc00000000). What is not of the executable
but of a library or plugin comes after a line
    in OBJECT

Of several processes, each line begins with the PID, and -json is a line for each. One that cannot
be looked into is an error, and the others are shown.

RE is an extended regular expression, as in grep -E.";

#[derive(Debug, clap::Args)]
#[command(override_usage = "ocaml-probes list -prog FILE [FLAGS]", after_help = LIST_HELP)]
#[command(next_help_heading = "Flags")]
pub(crate) struct ListArgs {
    /// The file, as a path: it is not looked up in PATH
    #[arg(long, value_name = "FILE")]
    pub(crate) prog: Option<OsString>,
    /// Also show each site and semaphore
    #[arg(long)]
    pub(crate) sites: bool,
    #[command(flatten)]
    pub(crate) answer: AnswerArgs,
}

const LIST_HELP: &str = "\
Plain, it is a name a line, sorted. With -sites, below each
    site ADDRESS FUNCTION FILE:LINE ARGUMENTS
    semaphore ADDRESS
with addresses in the file, and - for what the file does not tell.";

#[derive(Debug, clap::Args)]
#[command(override_usage = "ocaml-probes ps [FLAGS]", after_help = PS_HELP)]
#[command(next_help_heading = "Flags")]
pub(crate) struct PsArgs {
    #[command(flatten)]
    pub(crate) answer: AnswerArgs,
}

#[derive(Debug, clap::Args)]
#[command(override_usage = "ocaml-probes count -pid N [FLAGS]", after_help = COUNT_HELP)]
#[command(next_help_heading = "Flags")]
pub(crate) struct CountArgs {
    /// The process
    #[arg(long, value_name = "N", allow_hyphen_values = true)]
    pub(crate) pid: Option<String>,
    /// Only these probes, a comma list; may be repeated
    #[arg(long, value_name = "NAMES", action = ArgAction::Append)]
    pub(crate) probe: Vec<String>,
    /// Only the probes whose name RE matches from its start
    #[arg(long, value_name = "RE")]
    pub(crate) regexp: Option<String>,
    /// Count each site by itself
    #[arg(long)]
    pub(crate) sites: bool,
    /// Stop after 10s, 5m, 1h30m; otherwise on Ctrl-C
    #[arg(long = "for", value_name = "DURATION", allow_hyphen_values = true)]
    pub(crate) duration: Option<String>,
    /// Show what was counted so far every 1s; on a terminal, always
    #[arg(long, value_name = "DURATION", allow_hyphen_values = true)]
    pub(crate) interval: Option<String>,
    #[command(flatten)]
    pub(crate) answer: AnswerArgs,
}

const COUNT_HELP: &str = "\
Counts inside the process, at a few nanoseconds a hit, whether a probe is enabled or not. In the end
(the time is over, Ctrl-C, or the process has ended) it puts everything back and prints, plain as
    HITS RATE NAME
most hits first, with hits a second; with -sites, as
    HITS RATE NAME ADDRESS FUNCTION FILE:LINE
With -interval it prints the hits since the last time as well, each line after the seconds so far;
on a terminal, a table that is renewed. With -json each time is one line.

If it is killed, the process counts on, which does no harm: `info` says so, and the next count puts
everything back.";

#[derive(Debug, clap::Args)]
#[command(override_usage = "ocaml-probes latency -pid N -pair START,STOP [FLAGS]")]
#[command(after_help = LATENCY_HELP, next_help_heading = "Flags")]
pub(crate) struct LatencyArgs {
    /// The process
    #[arg(long, value_name = "N", allow_hyphen_values = true)]
    pub(crate) pid: Option<String>,
    /// From each START to the next STOP in its thread; may be repeated
    #[arg(long, value_name = "START,STOP", action = ArgAction::Append)]
    pub(crate) pair: Vec<String>,
    /// Stop after 10s, 5m, 1h30m; otherwise on Ctrl-C
    #[arg(long = "for", value_name = "DURATION", allow_hyphen_values = true)]
    pub(crate) duration: Option<String>,
    /// Show all times so far every 1s; on a terminal, always
    #[arg(long, value_name = "DURATION", allow_hyphen_values = true)]
    pub(crate) interval: Option<String>,
    /// Draw the times into FILE, as SVG
    #[arg(long, value_name = "FILE")]
    pub(crate) svg: Option<OsString>,
    #[command(flatten)]
    pub(crate) answer: AnswerArgs,
}

const LATENCY_HELP: &str = "\
Takes the times inside the process, whether the probes are enabled or not: a STOP ends the last START
of its thread that has not ended yet, so that pairs may be nested. In the end (the time is over,
Ctrl-C, or the process has ended) it puts everything back and prints, plain as
    COUNT MEAN P50 P90 P99 P99.9 MAX STARTS STOPS LOST START,STOP
in nanoseconds; STARTS and STOPS had no other end, and LOST could not be timed: they were nested
deeper than 120, or of more than a thousand threads. As a table, with a chart of the times in powers
of two. With -interval each line begins with the seconds so far.

START and STOP may be the same: then it is from each hit to the next.";

#[derive(Debug, clap::Args)]
#[command(override_usage = "ocaml-probes watch -pid N -probe NAMES [FLAGS]")]
#[command(after_help = WATCH_HELP, next_help_heading = "Flags")]
pub(crate) struct WatchArgs {
    /// The process
    #[arg(long, value_name = "N", allow_hyphen_values = true)]
    pub(crate) pid: Option<String>,
    /// These probes, a comma list; may be repeated
    #[arg(long, value_name = "NAMES", action = ArgAction::Append)]
    pub(crate) probe: Vec<String>,
    /// The probes whose name RE matches from its start
    #[arg(long, value_name = "RE")]
    pub(crate) regexp: Option<String>,
    /// Stop when K hits were shown
    #[arg(long, value_name = "K", allow_hyphen_values = true)]
    pub(crate) limit: Option<String>,
    /// Show no more than R hits a second, and say how many were skipped
    #[arg(long, value_name = "R", allow_hyphen_values = true)]
    pub(crate) rate: Option<String>,
    /// Stop after 10s, 5m, 1h30m; otherwise on Ctrl-C
    #[arg(long = "for", value_name = "DURATION", allow_hyphen_values = true)]
    pub(crate) duration: Option<String>,
    #[command(flatten)]
    pub(crate) answer: AnswerArgs,
}

const WATCH_HELP: &str = "\
Prints a line for each hit, whether its probe is enabled or not:
    TIME THREAD NAME ADDRESS FUNCTION FILE:LINE ARGUMENTS
with the time of day in UTC. The arguments are those that the note of the site tells of, six at most:
ints, strings (their first 64 bytes, and ... if there are more), floats, boxed integers (7l 7L 7n);
of other blocks the tag and how many words, <0:3>. What may not be read there is shown as an address,
and what is not looked for as ?. With -json each hit is an object on a line.

Hits that come faster than they can be read are lost, and said to be, on standard error (with -json,
on a line of their own); so are those that -rate skips. In the end everything is put back.";

#[derive(Debug, clap::Args)]
#[command(override_usage = "ocaml-probes observe -clean -pid N [FLAGS]")]
#[command(after_help = OBSERVE_HELP, next_help_heading = "Flags")]
pub(crate) struct ObserveArgs {
    /// The process
    #[arg(long, value_name = "N", allow_hyphen_values = true)]
    pub(crate) pid: Option<String>,
    /// Give its sites their own code back
    #[arg(long)]
    pub(crate) clean: bool,
    #[command(flatten)]
    pub(crate) answer: AnswerArgs,
}

const OBSERVE_HELP: &str = "\
A process that is observed when its observer is killed goes on as it is, which does no harm. `info`
says so, and this puts everything back; so does the next count, latency or watch. Plain, it prints
how many sites that were:
    PID SITES";

#[derive(Debug, clap::Args)]
#[command(override_usage = "ocaml-probes top -pid N [FLAGS]", after_help = TOP_HELP)]
#[command(next_help_heading = "Flags")]
pub(crate) struct TopArgs {
    /// The process
    #[arg(long, value_name = "N", allow_hyphen_values = true)]
    pub(crate) pid: Option<String>,
    /// Only these probes, a comma list; may be repeated
    #[arg(long, value_name = "NAMES", action = ArgAction::Append)]
    pub(crate) probe: Vec<String>,
    /// Only the probes whose name RE matches from its start
    #[arg(long, value_name = "RE")]
    pub(crate) regexp: Option<String>,
    /// Also show the times from START to STOP in a thread; may be repeated
    #[arg(long, value_name = "START,STOP", action = ArgAction::Append)]
    pub(crate) pair: Vec<String>,
    /// How often the screen is renewed; 1s by default
    #[arg(long, value_name = "DURATION", allow_hyphen_values = true)]
    pub(crate) interval: Option<String>,
    /// Say what is done, on standard error, before and after the screen
    #[arg(short, long, overrides_with = "verbose")]
    pub(crate) verbose: bool,
    /// Say nothing but errors on standard error
    #[arg(short, long, overrides_with = "quiet")]
    pub(crate) quiet: bool,
}

const TOP_HELP: &str = "\
Counts as `count` does, and shows of each probe whether it is on, its hits, hits a second, its share of
them, and how that was lately; below, of each pair how many times were taken, their mean, median, 99th
percentile, and the longest. Keys:
    arrows j k PgUp PgDn Home End   select a probe
    e Enter space                   enable the selected probe, or disable it
    s, r                            sort by rate, hits or name; the other way round
    /                               filter by a part of the name: Enter keeps it, Esc gives it up
    p                               pause: what is shown stands still, counting goes on
    ?                               show the keys
    Ctrl-Z, Ctrl-L                  suspend, draw anew
    q Esc Ctrl-C                    quit

When it ends (by a key, SIGINT, SIGTERM, SIGHUP, or with its terminal), the process is put back as it was
found: it counts no more, and what was added to a probe's counter or taken from it is taken back, which
is said. If it is killed by SIGKILL, the process counts on, which does no harm, and probes stay as they
are; the next count or top puts back what counts.";

const PS_HELP: &str = "\
Plain, it is a line for each process, sorted by pid:
    PID USER PROVIDERS PROBES ENABLED PROGRAM
with the providers of its notes, which tell the compiler; ENABLED of its PROBES are on. Processes that
may not be looked into are left out; -v says how many.";

/// Which processes.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Flags")]
pub(crate) struct WhomArgs {
    /// The process; may be repeated
    #[arg(long, value_name = "N", allow_hyphen_values = true, action = ArgAction::Append)]
    pub(crate) pid: Vec<String>,
    /// The processes whose program's name RE matches from its start
    #[arg(long, value_name = "RE")]
    pub(crate) name: Option<String>,
}

/// What to do with which probes.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Actions")]
pub(crate) struct ActionArgs {
    /// Enable these probes, a comma list; may be repeated
    #[arg(long, value_name = "NAMES", action = ArgAction::Append)]
    pub(crate) enable: Vec<String>,
    /// Disable these probes, a comma list; may be repeated
    #[arg(long, value_name = "NAMES", action = ArgAction::Append)]
    pub(crate) disable: Vec<String>,
    /// Enable all probes
    #[arg(long)]
    pub(crate) enable_all: bool,
    /// Disable all probes
    #[arg(long)]
    pub(crate) disable_all: bool,
    /// Enable the probes whose name RE matches from its start
    #[arg(long, value_name = "RE")]
    pub(crate) enable_regexp: Option<String>,
    /// Disable the probes whose name RE matches from its start
    #[arg(long, value_name = "RE")]
    pub(crate) disable_regexp: Option<String>,
    /// Enable the probes that open and close an event, STOP first
    #[arg(long, value_name = "START,STOP")]
    pub(crate) enable_pair: Option<String>,
    /// Disable the probes that open and close an event, START first
    #[arg(long, value_name = "START,STOP")]
    pub(crate) disable_pair: Option<String>,
}

/// How to answer.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Flags")]
pub(crate) struct AnswerArgs {
    /// plain, table or json; by default table on a terminal, else plain
    #[arg(long, value_name = "FORMAT")]
    pub(crate) format: Option<String>,
    /// Short for -format json
    #[arg(long)]
    pub(crate) json: bool,
    /// Say what is done, on standard error
    #[arg(short, long, overrides_with = "verbose")]
    pub(crate) verbose: bool,
    /// Say nothing but errors on standard error
    #[arg(short, long, overrides_with = "quiet")]
    pub(crate) quiet: bool,
}

/// Reads the command line, its first word being the program.
pub(crate) fn parse(argv: impl IntoIterator<Item = OsString>) -> Result<Typed, Stop> {
    let mut definition = definition();
    let argv = spell_out(&definition, argv)?;
    let subcommand = argv.get(1).map(|word| word.to_string_lossy().into_owned());
    let matches = definition.try_get_matches_from_mut(argv);
    let parsed = matches.and_then(|matches| CommandLine::from_arg_matches(&matches));
    match parsed {
        Ok(line) => Ok(line.subcommand),
        Err(error) => Err(stop(&error, subcommand.as_deref())),
    }
}

/// The subcommands and flags, as clap knows them.
pub(crate) fn definition() -> clap::Command {
    let mut definition = CommandLine::command();
    definition.build();
    definition
}

fn stop(error: &clap::Error, subcommand: Option<&str>) -> Stop {
    match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => {
            Stop::Asked(coloured(&error.render()))
        }
        ErrorKind::MissingSubcommand | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            let names: Vec<_> = definition()
                .get_subcommands()
                .map(|subcommand| subcommand.get_name().to_owned())
                .collect();
            let message = format!("no subcommand; there are {}", names.join(", "));
            UsageError::new(None, message).into()
        }
        // The other conflicts are found where what was typed is checked.
        ErrorKind::ArgumentConflict => {
            let arg = error.get(ContextKind::InvalidArg).map(ToString::to_string);
            // With its value's name behind it: `--pid <N>`.
            let flag = arg.unwrap_or_default().replacen("--", "-", 1);
            let flag = flag.split(' ').next().unwrap_or_default();
            let message = format!("{flag} is given more than once");
            UsageError::new(subcommand, message).into()
        }
        _ => {
            let text = error.render().to_string();
            let first = text.lines().next().unwrap_or_default();
            let message = first.strip_prefix("error: ").unwrap_or(first);
            UsageError::new(subcommand, message).into()
        }
    }
}

/// With colours on a terminal, unless <https://no-color.org> is asked for.
fn coloured(text: &StyledStr) -> String {
    let refused = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    if std::io::stdout().is_terminal() && !refused {
        text.ansi().to_string()
    } else {
        text.to_string()
    }
}
