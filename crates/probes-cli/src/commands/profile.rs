//! `profile`: where the time of a process goes.

use std::collections::HashSet;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use fastrand::Rng;
use probes_lib::{
    Activity, Profile, ProfiledStack, Profiler, RaisedPriority, RunningMethod, Target, WaitMethod,
};

use super::lost_switches::warn_of_lost_switches;
use super::report_file::ReportFile;
use super::started_program::StartedProgram;
use super::step_failures::StepFailures;
use super::step_failures::report_failures;
use crate::descriptors;
use crate::destination::Output;
use crate::failure::Failure;
use crate::flags::{Checked, DurationFlag, GivenTarget, OutputFlags, ProcessOrProgram, positive};
use crate::messages::Messages;
use crate::output::{
    IncompleteBecause, IncompleteStacks, PictureKind, ProfileBy, ProfileOptions, ProfileReport,
    WarningKind,
};
use crate::progress::{LongWork, Progress};
use crate::signals::{RunningProcesses, TerminationSignals, WaitEnd};
use crate::text::number_of;

/// Warn if threads waited for processors for more than 1/`BUSY` of the time that they ran.
const BUSY: u32 = 5;

/// Warn that it is not known where threads ran if that is so for more than 1/`UNREAD` of that time.
const UNREAD: u32 = 20;

/// Shorter times print as 0.0 s.
const MIN_SAID: Duration = Duration::from_millis(50);

/// With so many samples a second, waits are looked at as often as is possible.
const MOST_USEFUL_HZ: u32 = 997;

/// The time of so many samples may be missing by chance.
const FEW_SAMPLES: u32 = 10;

const HELP: &str = "\
Where the kernel permits it (perf_event_open, as root or with kernel.perf_event_paranoid of 1 or
less), it samples threads 99 times in each second that they run, and nothing is stopped. Elsewhere,
in OCaml 5, and with -gc, all threads are looked at 99 times a second, and for those that run the
process is stopped for about 50 us each time. With -live it is not: in OCaml 5, what the kernel has
not copied of a stack is read while the thread runs on. Such a stack is [guessed], or [cut] if it
has changed. Without samples of the kernel, -live does not know where threads run. In a program that
waits or switches often, threads have moved on before they are stopped: [not read]. If that is more
than a twentieth of the time, the kernel's samples are shown where it permits them; else try -live.
Waits are recorded by the kernel where it permits that: each, exactly; its stack is read if it lasts
until the next look, about a millisecond later. If not, it is one of the [unseen waits] of what
the thread was last seen in for about as long. Elsewhere, and with -gc, waits are sampled. When the
duration is over, on Ctrl-C, or when the process exits, it prints in plain format, times in seconds:
    all SECONDS samples N threads N running S runnable S off S stopped S error S
    waits recorded N unseen S lost N excess S parts N, or: waits sampled error S WHY
    waits unrecorded processors N (if any came online meanwhile)
    SELF ERROR TOTAL ERROR FUNCTION
running, runnable (waiting for a processor) and off are those of all threads, as the kernel counts
them; running is exact, and off is if the first `error` is 0. All times are counted from one moment
on, once the kernel records. What ran and is in no sample is [not sampled]: with it, and idle
threads, the times that run add up to `running`. SELF is the time in the function itself, TOTAL also
that in what it calls; the most SELF first. A system call that waits is a function in brackets:
[read]. ERROR is twice the standard deviation of the time before it, as far as that is sampled: 95 %
of such profiles are as near as that; 0 is exact, unless records were lost. With -by stack, each
line is TIME ERROR and the functions from the outermost to the innermost, with ; between them, after
[cut] or [guessed] if the stack is not complete; with `-by thread`, TIME ERROR TID NAME (WHAT IT
IS); with -by syscall, TIME ERROR and the system call.
With -off-cpu, the number of waits and their p50, p90, p99 and longest follow the times; if waits
are sampled, each is -. Without it, they are not counted, as stops wake threads that wait. Of waits
that had begun before, or last at the end, the time counts, but not the length: `parts` is how many
there were beside the others. `excess` is by how much `unseen` may be too long, at most, because of
stops; 0 with -off-cpu. The `error` of sampled waits is that of the time of all waits in the answer.

Threads that only work for the runtime (tick, backup) count as idle; they are left out, except in
the totals. With -gc, `collection running S error S off S error S` says how much of the time some
thread worked for the garbage collector, and stacks begin with [collection] or [no collection].
With -o FILE, what is written depends on the name: a flame graph (.svg), folded stacks (.folded), a
file for speedscope.app (.json) or pprof (.pb.gz); anything else gets the answer.

With -prog FILE it starts the program, and exits with its status, or 128 plus the number of the
signal that ended it. The answer is on standard error then, unless -o names a file. docs/profile.md
says more.";

#[derive(Debug, clap::Args)]
#[command(override_usage = "\
    ocaml-probes profile -pid N [FLAGS]
       ocaml-probes profile -prog FILE [FLAGS] [-- ARGS]")]
#[command(after_help = HELP)]
#[command(next_help_heading = "Flags")]
pub(crate) struct Args {
    #[command(flatten)]
    profiled: ProcessOrProgram,
    #[command(flatten)]
    until: DurationFlag,
    /// Only the time on the processor
    #[arg(long, group = "times")]
    on_cpu: bool,
    /// Only the time off the processor; stops nothing, but with -gc
    #[arg(long, group = "times")]
    off_cpu: bool,
    /// Both; this is the default
    #[arg(long, group = "times")]
    wall: bool,
    /// function, stack, thread or syscall
    #[arg(long, value_name = "KEY", value_parser = ProfileBy::parse, default_value = "function")]
    by: ProfileBy,
    /// How often to sample, in times a second, 1 to 1000
    #[arg(long, value_name = "N", value_parser = frequency, default_value = "99")]
    hz: u32,
    /// Stop nothing
    #[arg(long, conflicts_with = "gc")]
    live: bool,
    /// Distinguish what happens while the garbage collector is at work
    #[arg(long)]
    gc: bool,
    #[command(flatten)]
    pub(super) output: Checked<OutputFlags>,
}

fn frequency(typed: &str) -> Result<u32, String> {
    match positive(typed) {
        Ok(hz @ 1..=1000) => Ok(hz as u32),
        _ => Err(format!("\"{typed}\" is not a number from 1 to 1000")),
    }
}

pub(super) fn run(args: &Args) -> Result<ExitCode, Failure> {
    match args.profiled.given() {
        GivenTarget::Process(pid) => {
            let output = match picture_path(args) {
                Some(_) => args.output.open_stdout(),
                None => args.output.open()?,
            };
            profile(args, pid, None, &output).map(|()| ExitCode::SUCCESS)
        }
        GivenTarget::Program { path, arguments } => of_program(args, path, arguments),
    }
}

/// Starts a program and profiles it; returns its status.
fn of_program(args: &Args, path: &Path, arguments: &[OsString]) -> Result<ExitCode, Failure> {
    args.output.refuse_to_overwrite_started(path)?;
    let output = match picture_path(args) {
        Some(_) => args.output.open_stderr(),
        None => args.output.open_beside_program()?,
    };
    // Before the program is started, because it may fail.
    let picture_file = create_picture(args, &output)?;
    let started = StartedProgram::start(path, arguments, [])?;
    let mut done = profile(args, started.pid(), picture_file, &output);
    if done.as_ref().is_err_and(|it| started.is_of_exit(it)) {
        output.messages.warning(
            WarningKind::UnreadStacks,
            "the program exited before its profile could begin",
            "profile a longer run of it",
        );
        done = Ok(());
    }
    started.wait(report_failures([done], &output.messages))
}

/// The kind and the path of the picture that -o asks for, if it does.
fn picture_path(args: &Args) -> Option<(PictureKind, &Path)> {
    let path = args.output.file()?;
    Some((PictureKind::of(path)?, path))
}

/// The file of a picture, and the kind of the picture.
type PictureFile = (PictureKind, ReportFile);

/// Creates the file of the picture that -o asks for, if it does.
fn create_picture(args: &Args, output: &Output) -> Result<Option<PictureFile>, Failure> {
    let create = |(kind, path)| Ok((kind, ReportFile::create(path, &output.messages)?));
    picture_path(args).map(create).transpose()
}

/// Begins to profile a process. One that we have started may execute programs meanwhile, as scripts do: then it
/// begins again.
fn begin(args: &Args, pid: i32, output: &Output) -> Result<(Target, Profiler), Failure> {
    /// More often than programs execute others, one after the other.
    const MAX_TRIES: usize = 100;
    for _ in 1..MAX_TRIES {
        match try_to_begin(args, pid, output) {
            Err(failure) if is_exec_of_program(args, &failure) => {}
            begun => return begun,
        }
    }
    try_to_begin(args, pid, output)
}

fn is_exec_of_program(args: &Args, failure: &Failure) -> bool {
    !args.profiled.is_process() && matches!(failure, Failure::Target(_, error) if error.is_exec())
}

fn try_to_begin(args: &Args, pid: i32, output: &Output) -> Result<(Target, Profiler), Failure> {
    let of_process = Failure::of_process(pid);
    let target = Target::open_any(pid).map_err(&of_process)?;
    // With -off-cpu, threads that run are of no interest, so nothing is stopped for them; but with -gc they may work for the collector.
    let is_live = args.live || args.off_cpu && !args.gc;
    let reading = LongWork::begin(format!("reading process {pid}"), &output.messages);
    let mut profiler = Profiler::of_process(pid, is_live).map_err(&of_process)?;
    drop(reading);
    if args.gc {
        profiler.distinguish_collections().map_err(&of_process)?;
    } else {
        let hz = (!args.off_cpu).then_some(args.hz);
        profiler.record(hz).map_err(&of_process)?;
    }
    Ok((target, profiler))
}

/// Profiles a process. The file of its picture is created once the process could be opened, unless it is there already.
fn profile(
    args: &Args,
    pid: i32,
    picture_file: Option<PictureFile>,
    output: &Output,
) -> Result<(), Failure> {
    let output = &output.clone().with_pid(pid);
    // For the files of many threads. Not before a program is started, which inherits the limit and the priority.
    descriptors::raise_limit(u64::MAX);
    let _priority = RaisedPriority::of_this_thread();
    let (target, profiler) = begin(args, pid, output)?;
    let picture_file = match picture_file {
        Some(created) => Some(created),
        None => create_picture(args, output)?,
    };
    let started = (!args.profiled.is_process()).then_some(pid);
    let signals = TerminationSignals::block_and_pass_on(started)?;
    output.begin()?;
    let sampled = sample_until_end(args, (target, profiler), &signals, output);
    signals.unblock();
    let (mut profiler, ended) = sampled?;
    let mut failures = print_profile(args, pid, &mut profiler, picture_file, output);
    failures.add(ended);
    failures.finish(&output.messages)
}

/// Samples until the end, also if a program that was started executes another: the profile is then that of the new
/// program. Returns the profile, and why sampling has failed, if it has.
fn sample_until_end(
    args: &Args,
    (mut target, mut profiler): (Target, Profiler),
    signals: &TerminationSignals,
    output: &Output,
) -> Result<(Profiler, Result<(), Failure>), Failure> {
    // A program that was started writes to the terminal itself.
    let mut progress = if args.profiled.is_process() {
        Progress::begin(&output.messages)
    } else {
        None
    };
    let begun = Instant::now();
    loop {
        let left = args.until.duration.unwrap_or(Duration::MAX);
        let left = left.saturating_sub(begun.elapsed());
        match sample(args, left, &target, &mut profiler, signals, &mut progress) {
            Err(failure) if is_exec_of_program(args, &failure) => {}
            ended => {
                if let (Ok(SampleEnd::Exited), Some(asked)) = (&ended, args.until.duration) {
                    note_exit(args, begun.elapsed(), asked, output);
                }
                return Ok((profiler, ended.map(drop)));
            }
        }
        // What the kernel records takes locked memory, of which a user has little.
        drop(profiler);
        (target, profiler) = begin(args, target.pid(), output)?;
        let note = "the program has exec'd a new one: this is the profile of the new program";
        output.messages.note(note);
    }
}

/// Prints a profile, and draws its picture.
fn print_profile(
    args: &Args,
    pid: i32,
    profiler: &mut Profiler,
    picture_file: Option<PictureFile>,
    output: &Output,
) -> StepFailures {
    let mut failures = StepFailures::default();
    let (profile, program) = (profiler.profile(), profiler.program());
    let is_wanted = |activity| match activity {
        Activity::Running => !args.off_cpu,
        _ => !args.on_cpu,
    };
    let how = ProfileOptions {
        by: args.by,
        tells_collections: args.gc,
        is_off_cpu: args.off_cpu,
        is_on_cpu: args.on_cpu,
    };
    let report = ProfileReport::new(pid, program, &profile, how, is_wanted);
    let mut drawn = Ok(());
    if let Some((kind, file)) = picture_file {
        let picture = report.picture(kind, &title(args, pid, program));
        drawn = picture.and_then(|picture| file.write(picture));
        // The picture has no place for the excess.
        if let Some(excess) = report.excess() {
            output.messages.note(&excess);
        }
    }
    // Even if the disk is full: this is all that is left of the profile.
    let is_terminal = output.destination.is_terminal_on_stdout();
    let printed = report.text(output.format, is_terminal);
    failures.add(printed.and_then(|text| output.print_result(&text)));
    failures.add(drawn);
    warn(args, &profile, &output.messages);
    if let Some(found) = report.incomplete_stacks() {
        let unreadable = profiler.unreadable();
        warn_of_incomplete_stacks(found, args.live, &unreadable, &output.messages);
    }
    if args.on_cpu {
        note_on_cpu(&profile, &output.messages);
    }
    note_stops(&profile, &output.messages);
    failures
}

fn title(args: &Args, pid: i32, program: &Path) -> String {
    let name = program.file_name().unwrap_or_default().to_string_lossy();
    let what = if args.on_cpu {
        "on the processor"
    } else if args.off_cpu {
        "off the processor"
    } else {
        "all threads, on and off the processor"
    };
    format!("{name}, process {pid}: {what}")
}

/// Says that a process that is not our own has exited before the time that was `asked` for is over.
fn note_exit(args: &Args, lasted: Duration, asked: Duration, output: &Output) {
    if args.profiled.is_process() {
        let (lasted, asked) = (lasted.as_secs_f64(), asked.as_secs_f64());
        output.messages.note(&format!(
            "the process has exited: the profile is of {lasted:.1} of {asked} s"
        ));
    }
}

/// Why the sampling has ended.
enum SampleEnd {
    Exited,
    /// The time is over, or a signal came.
    Asked,
}

/// Samples until the time is over (`end`), a signal comes, or the process has exited.
///
/// # Errors
///
/// If the process cannot be sampled any more for another reason.
fn sample(
    args: &Args,
    end: Duration,
    target: &Target,
    profiler: &mut Profiler,
    signals: &TerminationSignals,
    progress: &mut Option<Progress>,
) -> Result<SampleEnd, Failure> {
    let begun = Instant::now();
    let period = Duration::from_secs(1) / args.hz;
    let mut next = period;
    let mut random = Rng::new();
    let mut looked = Duration::ZERO;
    let mut running = RunningProcesses::of(std::iter::once(target))?;
    loop {
        let at = begun.elapsed();
        let next_look = profiler.wait_pause().map(|pause| looked + pause);
        let first = next.min(end).min(next_look.unwrap_or(Duration::MAX));
        let wait = first.saturating_sub(at);
        let samples: Vec<_> = profiler.sample_fds().collect();
        let waited = signals.wait_for(&mut running, &samples, wait);
        let is_over = begun.elapsed() >= end || !matches!(waited, Ok(WaitEnd::Timeout));
        if let Ok(WaitEnd::Exited) = waited {
            return Ok(SampleEnd::Exited);
        }
        let now = begun.elapsed();
        let is_look = !is_over && now < next;
        let sampled = if is_look {
            profiler.look_at_waits()
        } else {
            let due = if is_over {
                Instant::now()
            } else {
                begun + next
            };
            profiler.sample(due)
        };
        looked = now;
        match sampled {
            Err(error) if error.is_gone() => return Ok(SampleEnd::Exited),
            sampled => sampled.map_err(Failure::of_process(target.pid()))?,
        }
        if is_over {
            return waited.map(|_| SampleEnd::Asked);
        }
        if is_look {
            continue;
        }
        if let Some(progress) = progress {
            progress.update(&line(now, args.until.duration, profiler.samples()));
        }
        // At random intervals, so that samples are not in step with what the process does periodically. A sample that
        // took longer than the period is followed by one, not by several.
        let pause = profiler.min_pause().mul_f64(1.0 + random.f64());
        next = (next + period.mul_f64(0.5 + random.f64())).max(begun.elapsed() + pause);
    }
}

/// How far a profile is; `all` is how long it lasts, if that is limited.
fn line(elapsed: Duration, all: Option<Duration>, samples: u64) -> String {
    let seconds = elapsed.as_secs_f64();
    match all {
        Some(all) => {
            let all = all.as_secs_f64();
            format!(
                "profiling {seconds:.1} of {all} s, {}",
                number_of(samples, "sample")
            )
        }
        None => format!(
            "profiling {seconds:.1} s, {}; Ctrl-C ends it",
            number_of(samples, "sample")
        ),
    }
}

/// Says what may mislead.
fn warn(args: &Args, profile: &Profile, messages: &Messages) {
    if let Some(why) = &profile.not_stopped {
        let text = format!(
            "the process could not be stopped for at least one sample, so that it is not known where it ran then: {why}"
        );
        messages.warning(
            WarningKind::UnreadStacks,
            &text,
            "end what traces it, or use -off-cpu",
        );
    } else if !args.off_cpu {
        warn_of_unknown_places(args, profile, messages);
    }
    if !args.off_cpu {
        warn_of_busy_processors(profile, messages);
    }
    if let WaitMethod::Recorded {
        lost,
        unrecorded_processors,
    } = profile.waits
    {
        warn_of_lost_switches(lost, unrecorded_processors, messages);
        if !args.on_cpu {
            warn_of_unseen_waits(profile, args.hz, messages);
        }
    }
}

/// Warns if it is not known what threads waited in for too much of the time that they waited.
fn warn_of_unseen_waits(profile: &Profile, hz: u32, messages: &Messages) {
    let is_unseen = |it: &ProfiledStack| it.activity == Activity::Unseen;
    let unseen_of = profile.stacks.iter().filter(|it| is_unseen(it));
    let threads: HashSet<i32> = unseen_of.map(|it| it.tid).collect();
    let unseen = time_of(profile, is_unseen);
    let waited = time_of(profile, |it| {
        it.activity != Activity::Running && threads.contains(&it.tid)
    });
    if unseen * UNREAD > waited && unseen > MIN_SAID {
        let time = unseen.as_secs_f64();
        let text = format!(
            "what threads waited in for {time:.1} s is not known: these waits ended before they were looked at, and \
             the functions shown with them are those of other waits of their thread that were about as long"
        );
        let hint = if hz < MOST_USEFUL_HZ {
            "-hz 997 looks more often"
        } else {
            "-by thread adds up all waits of a thread, seen or not"
        };
        messages.warning(WarningKind::UnreadStacks, &text, hint);
    }
}

/// Says, where waits are not shown, why the kernel has recorded nothing, if it has not; and that the answer is empty
/// because no thread ran.
fn note_on_cpu(profile: &Profile, messages: &Messages) {
    if let WaitMethod::Sampled { because: Some(why) } = &profile.waits {
        messages.note(&format!("the kernel records nothing: {why}"));
    }
    let is_running = |it: &ProfiledStack| it.activity == Activity::Running;
    if time_of(profile, is_running).is_zero() && profile.not_sampled.is_zero() {
        messages.note("no thread was on a processor meanwhile; -off-cpu shows where they were");
    }
}

/// Says how often and for how long the process was stopped, if it was.
fn note_stops(profile: &Profile, messages: &Messages) {
    if profile.stops > 0 {
        let mean = profile.stopped.as_micros() / u128::from(profile.stops);
        messages.note(&format!(
            "stopped {}, {mean} us each",
            number_of(profile.stops, "time")
        ));
    }
}

/// The time of all stacks that `is_meant` selects.
fn time_of(profile: &Profile, is_meant: impl Fn(&ProfiledStack) -> bool) -> Duration {
    let stacks = profile.stacks.iter();
    stacks.filter(|it| is_meant(it)).map(|it| it.time).sum()
}

/// Warns if it is not known where threads ran, for too much of the time.
fn warn_of_unknown_places(args: &Args, profile: &Profile, messages: &Messages) {
    let times = profile.times.unwrap_or_default();
    let is_running = |it: &ProfiledStack| it.activity == Activity::Running;
    let unread = time_of(profile, |it| is_running(it) && it.end.is_none());
    let sampled = time_of(profile, is_running);
    let unsampled = profile.not_sampled;
    let unknown = unread + unsampled;
    let of_few_samples = Duration::from_secs(1) * FEW_SAMPLES / args.hz;
    let is_empty = args.on_cpu && sampled.is_zero() && !unsampled.is_zero();
    let is_missing = unsampled * UNREAD > times.running && unsampled > of_few_samples || is_empty;
    let (time, why, hint) = match profile.running {
        RunningMethod::NotRead if !unread.is_zero() => (
            unread,
            "-live stops nothing",
            "without -live, they are stopped for about 50 us each",
        ),
        RunningMethod::ByKernel { in_kernel: true } if is_missing => (
            unsampled,
            "threads ran too briefly to be sampled, or samples were lost",
            "-hz 997 takes more samples",
        ),
        RunningMethod::ByKernel { in_kernel: false } if is_missing => (
            unsampled,
            "they were in the kernel, of which this user may have no samples, or ran too briefly for one",
            "as root, or with kernel.perf_event_paranoid of 1 or less, the kernel is sampled, too",
        ),
        RunningMethod::Stopped if unknown * UNREAD > times.running && unknown > of_few_samples => (
            unknown,
            "the threads waited again before they could be stopped, or ran too briefly for a sample",
            if args.gc {
                "-live without -gc shows where they ran in their own code, where the kernel permits samples"
            } else {
                "-live shows where they ran in their own code, where the kernel permits samples"
            },
        ),
        _ => return,
    };
    let time = if time < MIN_SAID {
        format!("{:.3} ms", time.as_secs_f64() * 1000.0)
    } else {
        format!("{:.1} s", time.as_secs_f64())
    };
    let text = format!("where threads ran for {time} is not known: {why}");
    messages.warning(WarningKind::UnreadStacks, &text, hint);
}

/// Warns if threads waited for a processor so long that this distorts the samples of those that ran.
fn warn_of_busy_processors(profile: &Profile, messages: &Messages) {
    let times = profile.times.unwrap_or_default();
    let is_sampled = matches!(profile.waits, WaitMethod::Sampled { .. });
    if is_sampled && times.runnable >= MIN_SAID && times.runnable * BUSY > times.running {
        let (runnable, running) = (times.runnable.as_secs_f64(), times.running.as_secs_f64());
        messages.warning(
            WarningKind::ProcessorsBusy,
            &format!(
                "threads waited {runnable:.1} s for a processor, and ran {running:.1} s: stacks of both are among \
                 those that run, so that what wakes up, such as a sleep, seems to take the processor's time"
            ),
            "profile while less else runs, or compare the functions of OCaml with each other alone",
        );
    }
}

/// Warns of stacks that are cut or guessed, and of the files that could not be read.
fn warn_of_incomplete_stacks(
    found: IncompleteStacks,
    is_live: bool,
    unreadable: &[PathBuf],
    messages: &Messages,
) {
    let files = match unreadable {
        [] => String::new(),
        paths => {
            let paths: Vec<String> = paths.iter().map(|it| it.display().to_string()).collect();
            format!(
                "; {} could not be read: {}",
                number_of(paths.len(), "file"),
                paths.join(", ")
            )
        }
    };
    let hint = match found.because {
        IncompleteBecause::NotCopied if is_live => {
            "a sample of the kernel has 32 KiB of one stack; other stacks (OCaml 5 has several) are read a moment \
             later, if the thread is still there. Without -live, threads are stopped and read as a whole"
        }
        IncompleteBecause::NotCopied => {
            "a sample of the kernel has 32 KiB of a stack, and the rest is read a moment later; `ocaml-probes stack`, \
             while it runs, shows all of it"
        }
        IncompleteBecause::NoRegisters => {
            "threads that wait are not stopped for their registers; `ocaml-probes stack`, while it runs, stops them"
        }
        IncompleteBecause::Program => "`ocaml-probes stack`, while it runs, shows why",
    };
    messages.warning(WarningKind::CutStacks, &format!("{found}{files}"), hint);
}
