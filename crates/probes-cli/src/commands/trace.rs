//! `trace`: starts a program with its probes set.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use probes_lib::{Action, Actions, Launch, Selector, Split};

use super::changes::print_started;
use super::follow;
use super::program_with_events::EventsDirectory;
use super::trace_observe;
use super::wait::Wait;
use crate::destination::Output;
use crate::failure::Failure;
use crate::flags::{
    ActionFlags, Checked, ObserveFlags, OutputFlags, refuse_fields_in_json, with_regexp_help,
};

const HELP: &str = "\
Without actions all probes are enabled. Returns as soon as the program runs; the program runs on in
the background: on the same streams, but it cannot read from a terminal, and Ctrl-C does not reach
it. Standard output has only what the program writes. With -json, an object on a line of standard
error says what was done to its probes, when the program starts; -o FILE keeps such lines apart from
what the program writes there, and has them in every format, as `attach` prints them. -v prints the
pid on standard error.

With -wait the program is in the foreground, and a job of the shell as if it had been started
directly: Ctrl-C and Ctrl-Z, fg and bg work. Signals sent to ocaml-probes are passed on; a signal
that `kill %1` sends to the whole job reaches the program twice, unless it is one that stops or
continues a process. The exit status is the program's, or 128 plus the number of the signal that
ended it.

With -follow a second process of ocaml-probes traces the program, the processes that it starts, and
the programs that these execute, until all have exited or that second process is sent SIGTERM. Names
that another program or a library does not have are skipped there; processes without probes (a
shell) are detached, and what they start is not followed. A name that the program itself does not
have gives a warning. -v reports what happens.

With -count, -hist, -latency, -watch or -gc, ocaml-probes waits as with -wait, observes the program
from its first instruction to its last, and prints what `count`, `hist`, `latency`, `watch` and `gc`
print, on standard error or with -o in a file; without actions no probe is then enabled. Hits in
processes that the program forks are included in the counts, and make the times
unreliable. -count -fn GLOBS counts functions of any native program, and of the libraries that it is
linked with; not of those that it loads later. With -latency -fn GLOBS they are timed: calls in
processes that the program forks are left out, and those of a thread that has no thread-local
storage (yet) are LOST. With -watch -fn GLOBS they are shown, as by `watch -fn`, with -args
and -results. -usdt GLOBS counts or shows USDT probes of other providers. -sample 1/N shows every
Nth hit, as in `watch`. With -gc the program is started with the runtime events of OCaml 5 on, and
what `gc` prints is printed when it has exited, after the rest; -gc WORK chooses functions of the
collector instead, of any OCaml, which -count, -latency, -watch or -hist observe. With -by EXPR,...
hits are counted (-count), or each key has a histogram (-hist), as by `count -by` and `hist -by`.
With -where the hits are chosen; with -latency alone the pairs and calls, as by `latency -where`.

Give one kind of action; only -enable and -disable can be combined. If an action fails, the program
is not started.";

#[derive(Debug, clap::Args)]
#[command(override_usage = "ocaml-probes trace -prog FILE [ACTIONS] [FLAGS] [-- ARGS]")]
#[command(after_help = with_regexp_help(HELP))]
#[command(next_help_heading = "Flags")]
pub(crate) struct Args {
    /// The program to start; with no slash in it, it is looked up in PATH
    #[arg(short, long, value_name = "FILE")]
    prog: PathBuf,
    /// Stay until the program exits, and exit with its status
    #[arg(long)]
    wait: bool,
    /// Follow fork, exec and dlopen
    #[arg(long, conflicts_with_all = ["count", "hist", "latency", "watch", "gc"])]
    follow: bool,
    #[command(flatten)]
    observe: Checked<ObserveFlags>,
    #[command(flatten)]
    actions: Checked<ActionFlags>,
    #[command(flatten)]
    pub(super) output: Checked<OutputFlags>,
    /// Arguments of the program
    #[arg(
        last = true,
        id = "argument",
        value_name = "ARGS",
        help_heading = "Arguments"
    )]
    arguments: Vec<OsString>,
}

impl Args {
    fn actions(&self) -> Actions {
        let default = if self.observe.observes_anything() {
            Actions::new()
        } else {
            Actions::of(Action::Enable, Selector::All)
        };
        self.actions.clone().unwrap_or(default)
    }
}

pub(super) fn run(args: Args) -> Result<ExitCode, Failure> {
    args.output.refuse_to_overwrite_started(&args.prog)?;
    refuse_fields_in_json("trace", args.observe.fields.as_deref(), args.output.format)?;
    let output = &args.output.open_beside_program()?;
    let mut command = Command::new(&args.prog);
    command.args(&args.arguments);
    let reports_collector = args.observe.reports_collector;
    let directory = reports_collector.then(|| EventsDirectory::make(&args.prog, &output.messages));
    let directory = directory.transpose()?;
    if let Some(directory) = &directory {
        command.envs(directory.variables());
    }
    let mut launch = Launch::new(command).actions(args.actions());
    // Called before the program is started, because preparing may fail.
    let prepare = || Wait::prepare().map_err(Failure::of_waiting);
    if args.observe.observes_anything() {
        let (launch, wait) = (launch.attended(), prepare()?);
        let (observed, directory) = (&args.observe, directory.as_ref());
        let status = trace_observe::run(launch, wait, observed, output, &args.prog, directory)?;
        return Ok(ExitCode::from(status));
    }
    let wait = args.wait.then(prepare).transpose()?;
    if args.wait {
        launch = launch.attended();
    }
    if args.follow {
        return start_followed(launch, wait, output, &args.prog);
    }
    let launched = launch.spawn().map_err(Failure::of_program(&args.prog))?;
    let printed = print_started(output, &args.prog, launched.report());
    let Some(wait) = wait else {
        // The program is detached: it runs on when we have exited.
        return printed.map(|()| ExitCode::SUCCESS);
    };
    if let Err(failure) = printed {
        // The program runs, and our exit status has to be its own.
        if !failure.is_closed_pipe() {
            output.messages.failure(&failure);
        }
    }
    let status = wait.until_exit(launched).map_err(Failure::of_waiting)?;
    Ok(ExitCode::from(status))
}

/// `trace -follow`: what both processes do, the one that starts the program and the one that follows it.
fn start_followed(
    launch: Launch,
    wait: Option<Wait>,
    output: &Output,
    program: &Path,
) -> Result<ExitCode, Failure> {
    let starter = match launch.split().map_err(Failure::of_program(program))? {
        Split::Starter(starter) => starter,
        Split::Follower(follower) => {
            return follow::follow_launched(follower, output, program);
        }
    };
    let follower = starter.follower();
    output
        .messages
        .step(format_args!("process {follower} follows the program"));
    let Some(launched) = starter.spawn().map_err(Failure::of_program(program))? else {
        // The other process has said why.
        return Ok(ExitCode::FAILURE);
    };
    match wait {
        Some(wait) => {
            let status = wait.until_exit(launched).map_err(Failure::of_waiting)?;
            Ok(ExitCode::from(status))
        }
        None => Ok(ExitCode::SUCCESS),
    }
}
