//! `record`: what happens in a process, on one time line, in a file for a viewer.

mod calls;
mod keyed_starts;
mod lanes;
mod program;
mod recording;
mod sink;
mod starts;
mod timeline;
mod track_writer;
mod waits;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use self::recording::Recording;
use super::open_target::open_to_observe;
use super::opened_events::OpenedEvents;
use crate::failure::Failure;
use crate::flags::{
    Checked, DurationFlag, FORCE_HELP, GivenTarget, OutputFlags, OverrideFlags, ProcessOrProgram,
    RecordedFlags, duration, with_regexp_help,
};
use crate::messages::Messages;
use crate::output::{SUFFIXES, TimelineFile, TimelineFormat};
use crate::usage::UsageError;

const HELP: &str = "\
Writes a time line to FILE while it records, in the format that the name says: .perfetto-trace
(ui.perfetto.dev), .json (Chrome's trace events: ui.perfetto.dev, chrome://tracing, speedscope),
.fxt (Fuchsia: ui.perfetto.dev, magic-trace). All times are of one clock, CLOCK_MONOTONIC.

Calls of the functions of -fn are slices of their thread, from entry to exit, with their arguments
and with -results their results; so are the pairs of -pair. Hits of -probe and -usdt are instants
with their arguments. With -gc, what the collector of OCaml 5 does are slices and counters, by
domain; runtime events that are off are switched on, and off again in the end, as by `gc`.
With -off-cpu, the waits of each thread are slices on a track below it, named by the system call
that they are in, with their stacks; `waits, not looked at` are those that were over before a stack
could be read. Nothing is stopped for them.

A slice whose end was not seen is ended, and says why: the call was unwound by an exception, or was
still running. What came faster than it could be read is lost: an instant says where and how much,
and so do a warning and the summary. If the disk is full, or the tool is killed, what was written
can be read. docs/record.md says more.

With -until NAME it ends when that probe is hit, with -over when a pair or a call that ends has
taken so long. One that does not end, as in a program that hangs, does not end the recording: then
Ctrl-C does, and it is drawn as still running. With -last 10s only the last 10 seconds are kept, in
memory, and written in the end: a flight recorder.

When the duration is over, on Ctrl-C, or when the process exits, it prints in plain format:
    slices N instants N values N unwound N running N without_stop N
        unmatched_exits N unmatched_stops N without_key N lost_starts N too_deep N lost_hits N
        lost_words N lost_switches N bytes N seconds S
on one line. If hits were lost, lines follow for the names, up to three, that most hits had that
were read meanwhile:
    frequent SHARE NAME
They are probably the ones to leave out.

Requests that overlap in one thread, as with Lwt, Async or Eio, or move between threads or domains,
need -key EXPR: a STOP then ends the START with the same EXPR, such as arg0, request, or str(arg1),
in whichever thread that was. It must differ between all requests that are under way at a time. If a
START has that of an earlier one without STOP, the slice of that one ends. WITHOUT_KEY are the hits
of START and STOP for which EXPR has no answer: no slice is drawn for them. LOST_STARTS were
forgotten, because 65,536 others waited. Of each hit, ints, strings and the ints in fields of the
first 6 arguments are recorded, and tid: EXPR can ask for these.

Without -key, the slices of such requests are wrong, and `-over` does not heed them. If that is
noticed, or may be so, a warning, an instant in the file, and a line for each pair, in the words of
`latency`, say it:
    pair START,STOP interleaved N untrusted

With -prog FILE it starts the program, with -gc with its runtime events on, and records it from its
first instruction to its last, its waits from a moment after its start on; it exits with its status,
or 128 plus the number of the signal that ended it. The lines above are on standard error then.
Signals sent to ocaml-probes are passed on to the program if it is observed.";

#[derive(Debug, clap::Args)]
#[command(override_usage = "\
    ocaml-probes record -pid N -o FILE [FLAGS]
       ocaml-probes record -prog FILE -o FILE [FLAGS] [-- ARGS]")]
#[command(after_help = with_regexp_help(HELP))]
#[command(next_help_heading = "Flags", mut_arg("force", |force| force.conflicts_with("prog").help(FORCE_HELP)))]
#[command(mut_arg("pair", |pair| pair.help("Record START to STOP in one thread as a slice; may be repeated")))]
#[command(mut_arg("key", |key| key.help("Record START to the STOP with the same EXPR, in any thread")))]
pub(crate) struct Args {
    #[command(flatten)]
    observed: ProcessOrProgram,
    #[command(flatten)]
    recorded: Checked<RecordedFlags>,
    #[command(flatten)]
    until: DurationFlag,
    /// Keep the last DURATION in memory, and write it in the end
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    last: Option<Duration>,
    #[command(flatten)]
    overrides: OverrideFlags,
    #[command(flatten)]
    pub(super) output: Checked<OutputFlags>,
}

pub(super) fn run(args: &Args) -> Result<ExitCode, Failure> {
    let file = NamedFile::of(args)?;
    if !args.recorded.observes() && !args.recorded.gc {
        let refused = args.overrides.refuse_without_observation("-off-cpu");
        refused.map_err(usage)?;
    }
    match args.observed.given() {
        GivenTarget::Process(pid) => of_process(args, &file, pid).map(|()| ExitCode::SUCCESS),
        GivenTarget::Program { path, arguments } => program::run(args, &file, path, arguments),
    }
}

fn of_process(args: &Args, file: &NamedFile, pid: i32) -> Result<(), Failure> {
    let output = args.output.open_stdout().with_pid(pid);
    let target = open_to_observe(pid, args.recorded.needs_probes(), &output.messages)?;
    let file = file.create(&output.messages)?;
    let mut recording = Recording::new(args, &output, (pid, target.program()), file);
    let failures = if args.recorded.observes() {
        recording.observe(&target)?
    } else {
        recording.read_without_hits(&target, |end, signals| {
            let options = args.overrides.options();
            let open = || OpenedEvents::of_process(&target, options, end, &output, signals);
            args.recorded.gc.then(open).transpose()
        })?
    };
    recording.finish(failures)
}

fn usage(why: String) -> Failure {
    Failure::Usage(UsageError::new(Some("record"), why))
}

/// The file that is to be written, and its format.
struct NamedFile {
    path: PathBuf,
    format: TimelineFormat,
}

impl NamedFile {
    fn of(args: &Args) -> Result<NamedFile, Failure> {
        let Some(path) = args.output.file() else {
            return Err(usage(format!(
                "needs -o FILE, whose name ends with {SUFFIXES}"
            )));
        };
        let format = TimelineFormat::of(path).ok_or_else(|| {
            let path = path.display();
            usage(format!(
                "-o {path}: the name of the file has to end with {SUFFIXES}"
            ))
        })?;
        let path = path.to_owned();
        Ok(NamedFile { path, format })
    }

    fn create(&self, messages: &Messages) -> Result<(TimelineFile, TimelineFormat), Failure> {
        Ok((TimelineFile::create(&self.path, messages)?, self.format))
    }
}
