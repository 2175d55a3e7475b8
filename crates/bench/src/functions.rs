//! What observing functions costs: a call, the stops, planning, and how much longer a compiler takes if its functions
//! are counted.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use nix::fcntl::OFlag;
use nix::sys::stat::Mode;
use nix::unistd::mkfifo;
use probes_lib::{FunctionSelector, Observation, ObservationReport, Options, Target};
use test_support::{Guard, Scratch, Talker, eventually};

use crate::cost;
use crate::document::{Table, median_max, mib};
use crate::failure::{Failure, Result};
use crate::observe::ns;
use crate::stats::Samples;

/// The program with many functions.
const COMPILER: &str = "ocamlopt.opt";

/// A function of it that is counted alone.
const ONE: &str = "Stdlib.List.map";

/// A program whose threads call a function in a loop.
const CALLS: &str = "fixtures/calls.pie";

/// That function.
const CALLED: &str = "leaf";

/// How many times it is called in a sample, if calls are counted, and if more is recorded of each.
const CALLS_COUNTED: u64 = 200_000_000;
const CALLS_RECORDED: u64 = 20_000_000;

/// Sources of OCaml's standard library that the compiler compiles.
const SOURCES: [&str; 8] = [
    "camlinternalFormat",
    "format",
    "hashtbl",
    "list",
    "map",
    "scanf",
    "set",
    "string",
];

/// How many times it compiles them in one run.
const TIMES: usize = 2;

fn function(glob: &str) -> Result<FunctionSelector> {
    let parsed = glob.parse();
    let parsed = parsed.map_err(|_| Failure::new(format!("not a glob: {glob}")))?;
    Ok(FunctionSelector::Glob(parsed))
}

fn selected(glob: &str) -> Result<Observation> {
    Ok(Observation::new().count_functions(function(glob)?))
}

/// What is recorded of the calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Recorded {
    Counts,
    /// Counts of the calls for which an expression is true.
    CountsWhere(&'static str),
    /// A histogram of an expression, with buckets of one width if there is a range.
    Histogram(&'static str, Option<&'static str>),
    Times,
    SelfTimes,
    TimesByCaller,
    Calls,
}

impl Recorded {
    const ALL: [Recorded; 10] = [
        Recorded::Counts,
        // True for no call, and for all.
        Recorded::CountsWhere("arg0 < 0"),
        Recorded::CountsWhere("arg0 >= 0"),
        // Buckets of one value, mostly of several values, and of the same width.
        Recorded::Histogram("arg0 & 255", None),
        Recorded::Histogram("arg0", None),
        Recorded::Histogram("arg0 & 255", Some("0,250,10")),
        Recorded::Times,
        Recorded::SelfTimes,
        Recorded::TimesByCaller,
        Recorded::Calls,
    ];

    /// Returns the command that does it.
    fn command(self) -> String {
        match self {
            Recorded::Counts => "`count`".to_owned(),
            Recorded::CountsWhere(which) => format!("`count -where '{which}'`"),
            Recorded::Histogram(of, None) => format!("`hist -of '{of}'`"),
            Recorded::Histogram(of, Some(range)) => format!("`hist -of '{of}' -linear {range}`"),
            Recorded::Times => "`latency`".to_owned(),
            Recorded::SelfTimes => "`latency -self`".to_owned(),
            Recorded::TimesByCaller => "`latency -by caller`".to_owned(),
            Recorded::Calls => "`watch`".to_owned(),
        }
    }

    fn observation(self) -> Result<Observation> {
        let counted = selected(CALLED)?;
        let timed = Observation::new().time_functions(function(CALLED)?);
        Ok(match self {
            Recorded::Counts => counted,
            Recorded::CountsWhere(which) => {
                let parsed = which.parse();
                let failure = |_| Failure::new(format!("not an expression: {which}"));
                counted.only_where(parsed.map_err(failure)?)
            }
            Recorded::Histogram(of, range) => {
                let parsed = of.parse();
                let failure = |_| Failure::new(format!("not an expression: {of}"));
                let histogram = counted.histogram_of(parsed.map_err(failure)?);
                let Some(range) = range else {
                    return Ok(histogram);
                };
                let parsed = range.parse();
                let failure = |_| Failure::new(format!("not a range: {range}"));
                histogram.linear(parsed.map_err(failure)?)
            }
            Recorded::Times => timed,
            Recorded::SelfTimes => timed.self_times(),
            Recorded::TimesByCaller => timed.by_caller(),
            Recorded::Calls => Observation::new().watch_functions(function(CALLED)?),
        })
    }

    /// Returns how many times the function is called in a sample.
    fn calls(self) -> u64 {
        match self {
            Recorded::Counts | Recorded::CountsWhere(_) => CALLS_COUNTED,
            _ => CALLS_RECORDED,
        }
    }

    /// Returns how many calls were recorded, and how many are known to be missing.
    fn reported(self, report: &ObservationReport) -> [u64; 2] {
        match self {
            Recorded::Counts | Recorded::CountsWhere(_) => [report.counts.total(), 0],
            Recorded::Histogram(..) => {
                let histograms = report.histograms.iter();
                histograms.fold([0; 2], |[values, untyped], it| {
                    [values + it.count(), untyped + it.untyped()]
                })
            }
            Recorded::Calls => [report.events.events.len() as u64, report.events.dropped],
            _ => {
                let functions = report.function_latencies.iter();
                functions.fold([0; 2], |[timed, lost], it| {
                    [timed + it.count(), lost + it.lost()]
                })
            }
        }
    }
}

/// Returns the table of what a call costs.
pub(crate) fn calls(targets: &Path, rounds: usize) -> Result<String> {
    let mut table = Table::new(&[
        "threads", "with", "a call", "adds", "calls", "recorded", "lost",
    ]);
    for threads in [1, 4] {
        let mut talker = Talker::start(&targets.join(CALLS));
        let target = Target::open_any(talker.pid())?;
        for recorded in Recorded::ALL {
            let command = recorded.command();
            eprintln!("bench: the calls of {threads} threads with {command}");
            let (mut bare, mut observed) = (Samples::default(), Samples::default());
            let [mut made, mut reported, mut lost] = [0; 3];
            for _ in 0..rounds {
                let calls = recorded.calls();
                bare.push(call_ps(&mut talker, threads, calls)?);
                let mut observer = target.observe(&recorded.observation()?, Options::default())?;
                observed.push(call_ps(&mut talker, threads, calls)?);
                made += calls;
                let [these, missing] = recorded.reported(&observer.remove()?);
                reported += these;
                lost += missing;
            }
            let adds = observed.median() as f64 - bare.median() as f64;
            table.row([
                threads.to_string(),
                command,
                ns(bare.median() as f64),
                ns(adds),
                made.to_string(),
                reported.to_string(),
                lost.to_string(),
            ]);
        }
    }
    Ok(table.finish())
}

/// Makes the threads call; returns the processor time of a call in picoseconds.
fn call_ps(talker: &mut Talker, threads: u64, calls: u64) -> Result<u64> {
    /// The unit of times in /proc/PID/stat, `sysconf(_SC_CLK_TCK)`.
    const TICK_PS: u64 = 10_000_000_000;
    let pid = talker.pid();
    let ticks = || {
        // In its own code, and in the kernel's.
        let times = [14, 15].map(|field| test_support::process::stat(pid, field).parse::<u64>());
        let times = times.into_iter().sum::<std::result::Result<u64, _>>();
        times.map_err(Failure::of("cannot read the processor time"))
    };
    let before = ticks()?;
    // Each round has two calls.
    talker.ask(
        &format!("calls {threads} {}", calls / 2 / threads),
        "called",
    );
    Ok((ticks()? - before) * TICK_PS / calls)
}

/// A compiler that waits for its preprocessor, which waits for its input to end.
struct Compiler {
    guard: Guard,
    input: File,
    /// Its files.
    _scratch: Scratch,
}

impl Compiler {
    /// Starts it; it will compile these files.
    fn start(sources: &[PathBuf]) -> Result<Compiler> {
        let scratch = Scratch::new();
        let fifo = scratch.path().join("input");
        mkfifo(&fifo, Mode::S_IRWXU).map_err(Failure::of("cannot make a fifo"))?;
        let failed = || Failure::of::<std::io::Error>("cannot write a source");
        let first = scratch.path().join("first.ml");
        fs::write(&first, "let first = 1\n").map_err(failed())?;
        let script = scratch.path().join("preprocess.sh");
        let text = "case $1 in */first.ml) cat \"${0%/*}/input\";; esac\nexec cat \"$1\"\n";
        fs::write(&script, text).map_err(failed())?;
        let mut command = Command::new(COMPILER);
        command.args(["-w", "-a", "-c", "-pp"]);
        command.arg(format!("sh '{}'", script.display())).arg(first);
        for (number, source) in sources.iter().enumerate() {
            // Under a name of its own, and without the interface beside it.
            let name = source.file_name().unwrap_or_default().to_string_lossy();
            let copy = scratch.path().join(format!("m{number}_{name}"));
            fs::copy(source, &copy).map_err(Failure::of("cannot copy a source"))?;
            command.arg(copy);
        }
        command.env_remove(cost::SET_BY_CARGO);
        command.stdout(Stdio::null()).stderr(Stdio::null());
        let guard = Guard::spawn(&mut command);
        // This fails until the preprocessor reads.
        let input = eventually("the preprocessor reads", || {
            let mut options = OpenOptions::new();
            let options = options.write(true).custom_flags(OFlag::O_NONBLOCK.bits());
            options.open(&fifo).ok()
        });
        Ok(Compiler {
            guard,
            input,
            _scratch: scratch,
        })
    }

    fn pid(&mut self) -> i32 {
        self.guard.child().id() as i32
    }

    /// Lets it compile; returns how long that took.
    fn compile(mut self) -> Result<Duration> {
        let begun = Instant::now();
        drop(self.input);
        let status = self.guard.wait();
        if !status.success() {
            return Err(Failure::new(format!("{COMPILER} failed with {status}")));
        }
        Ok(begun.elapsed())
    }
}

/// Returns the table of stops and of planning. Each round begins with a process whose code was never patched.
pub(crate) fn stops(tool: &Path, rounds: usize) -> Result<String> {
    let mut table = Table::new(&[
        "functions",
        "stop to install",
        "stop to remove",
        "planning",
        "CPU of `count -for 10ms`",
        "address space in the process",
    ]);
    for glob in ["*", ONE] {
        eprintln!("bench: counting {glob} of {COMPILER}");
        let [mut install, mut remove, mut plan, mut cpu] = <[Samples; 4]>::default();
        let mut taken = Samples::default();
        let mut functions = 0;
        for _ in 0..rounds {
            let mut compiler = Compiler::start(&[])?;
            let target = Target::open_any(compiler.pid())?;
            let before = address_space_kib(compiler.pid())?;
            let begun = Instant::now();
            let mut observer = target.observe(&selected(glob)?, Options::default())?;
            let took = begun.elapsed();
            taken.push(address_space_kib(compiler.pid())?.saturating_sub(before));
            plan.push_time(took.saturating_sub(observer.stopped()));
            install.push_time(observer.stopped());
            let removed = observer.remove()?;
            remove.push_time(removed.stopped);
            functions = removed.counts.functions().len();
            let pid = compiler.pid().to_string();
            let args = ["count", "-pid", &pid, "-fn", glob, "-for", "10ms"];
            cpu.push(cost::of(tool, &args)?.cpu_ns);
        }
        let all = [&install, &remove, &plan, &cpu].map(median_max);
        let [install, remove, plan, cpu] = all;
        let taken = mib(taken.median());
        table.row([functions.to_string(), install, remove, plan, cpu, taken]);
    }
    Ok(table.finish())
}

/// How much memory a process has mapped, used or not.
fn address_space_kib(pid: i32) -> Result<u64> {
    let size = test_support::process::status(pid, "VmSize");
    let kib = size.split_whitespace().next().unwrap_or_default();
    kib.parse()
        .map_err(Failure::of("cannot read the size of a process"))
}

/// Returns the table of how long the compiler takes alone, and with all its functions counted; the runs alternate.
pub(crate) fn compiler(rounds: usize) -> Result<String> {
    let library = test_support::output(Command::new(COMPILER).arg("-where"));
    let library = PathBuf::from(String::from_utf8_lossy(&library.stdout).trim());
    let file = |name: &&str| library.join(format!("{name}.ml"));
    let sources: Vec<PathBuf> = SOURCES.repeat(TIMES).iter().map(file).collect();
    eprintln!("bench: how long {COMPILER} takes while its functions are counted");
    let [mut alone, mut counted] = <[Samples; 2]>::default();
    for _ in 0..rounds {
        alone.push_time(Compiler::start(&sources)?.compile()?);
        let mut compiler = Compiler::start(&sources)?;
        let target = Target::open_any(compiler.pid())?;
        let observer = target.observe(&selected("*")?, Options::default())?;
        counted.push_time(compiler.compile()?);
        // What it counted last is lost with the process.
        drop(observer);
    }
    let times = counted.median() as f64 / alone.median() as f64;
    let mut table = Table::new(&["compiling, alone", "all functions counted", "times as long"]);
    table.row([
        median_max(&alone),
        median_max(&counted),
        format!("{times:.2}"),
    ]);
    Ok(table.finish())
}
