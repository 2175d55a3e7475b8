//! What the same hit costs with other tools: bpftrace and perf, whose uprobes the kernel handles, and gdb
//! with a breakpoint. Each is used if it is installed and permitted.

use std::fmt;
use std::io::Read;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use probes_lib::Target;
use test_support::{Guard, Scratch, eventually};

use crate::cost::SET_BY_CARGO;
use crate::failure::{Failure, Result};
use crate::observe::event::Event;
use crate::observe::workload::{Kind, Sample, Workload};
use crate::stats::Samples;

/// Few, because the tools take seconds to start.
const ROUNDS: usize = 3;

/// The kind of the sites that the tools observe.
const KIND: Kind = Kind::Silent;

/// A hit that takes longer than this, in picoseconds, was stopped by gdb.
const MIN_GDB_HIT_PS: u64 = 10_000_000;

/// A tool that has not exited is sent SIGTERM again after this time.
const RESEND: Duration = Duration::from_millis(300);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Tool {
    Bpftrace,
    Perf,
    Gdb,
}

impl fmt::Display for Tool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Tool::Bpftrace => "bpftrace",
            Tool::Perf => "perf",
            Tool::Gdb => "gdb",
        })
    }
}

/// What a tool adds to a hit, in picoseconds, or why it could not be measured.
pub(super) type AddedTime = std::result::Result<f64, String>;

/// Measures what a tool adds to a hit. After gdb was used, the program must not be used any more.
pub(super) fn added_time(
    tool: Tool,
    work: &mut Workload,
    target: &Target,
    file: &Path,
) -> Result<AddedTime> {
    work.run_only(KIND);
    let scratch = Scratch::new();
    let event = match tool {
        Tool::Perf => match Event::add(file, KIND.probe(), scratch.path())? {
            Ok(event) => Some(event),
            Err(why) => return Ok(Err(why)),
        },
        Tool::Bpftrace | Tool::Gdb => None,
    };
    let mut command = match &event {
        Some(event) => event.count(work.pid()),
        None if tool == Tool::Gdb => gdb_command(work.pid(), target, &scratch)?,
        None => bpftrace_command(work.pid(), file),
    };
    let (mut bare, mut traced) = <(Samples, Samples)>::default();
    // The program might not run on after gdb has detached: so gdb is started only once, for all samples.
    let (starts, samples) = match tool {
        Tool::Gdb => (1, ROUNDS * ROUNDS),
        Tool::Bpftrace | Tool::Perf => (ROUNDS, ROUNDS),
    };
    for _ in 0..starts {
        bare.push(cost(tool, &work.sample()?));
        let mut running = match RunningTool::start(tool, &mut command, work, KIND)? {
            Ok(running) => running,
            Err(why) => return Ok(Err(why)),
        };
        for _ in 0..samples {
            traced.push(cost(tool, &work.sample()?));
        }
        if tool != Tool::Gdb {
            running.end(tool);
        }
    }
    Ok(Ok(traced.median() as f64 - bare.median() as f64))
}

/// Measures what a script of bpftrace adds to a hit of this kind.
pub(super) fn added_by_script(work: &mut Workload, kind: Kind, script: &str) -> Result<AddedTime> {
    let tool = Tool::Bpftrace;
    work.run_only(kind);
    let mut command = Command::new("bpftrace");
    command.args(["-p", &work.pid().to_string(), "-e", script]);
    let (mut bare, mut traced) = <(Samples, Samples)>::default();
    for _ in 0..ROUNDS {
        bare.push(cost(tool, &work.sample()?));
        let mut running = match RunningTool::start(tool, &mut command, work, kind)? {
            Ok(running) => running,
            Err(why) => return Ok(Err(why)),
        };
        for _ in 0..ROUNDS {
            traced.push(cost(tool, &work.sample()?));
        }
        running.end(tool);
    }
    Ok(Ok(traced.median() as f64 - bare.median() as f64))
}

/// Returns the cost of a hit: its processor time; with gdb, which stops all threads at a breakpoint and
/// so uses none of their processor time, its elapsed time.
fn cost(tool: Tool, sample: &Sample) -> u64 {
    match tool {
        Tool::Gdb => sample.wall_ps,
        Tool::Bpftrace | Tool::Perf => sample.cpu_ps,
    }
}

fn bpftrace_command(pid: i32, file: &Path) -> Command {
    let program = format!(
        "usdt:{}:*:{} {{ @ = count(); }}",
        file.display(),
        KIND.probe()
    );
    let mut command = Command::new("bpftrace");
    command.args(["-p", &pid.to_string(), "-e", &program]);
    command
}

fn gdb_command(pid: i32, target: &Target, scratch: &Scratch) -> Result<Command> {
    let states = target.states()?;
    let site = states.probe(KIND.probe()).and_then(|it| it.sites().next());
    let site = site.ok_or_else(|| Failure::new("the target has no such probe"))?;
    let (at, script) = (site.address.0, scratch.file("count"));
    let lines = format!("break *{at:#x}\ncommands\nsilent\ncontinue\nend\ncontinue\n");
    std::fs::write(&script, lines).map_err(Failure::of("cannot write a script for gdb"))?;
    let mut command = Command::new("gdb");
    command.args(["-nx", "-batch", "-p", &pid.to_string(), "-x"]);
    command.arg(script);
    Ok(command)
}

/// A tool that observes every hit.
struct RunningTool(Guard);

impl RunningTool {
    /// Starts a tool and waits until it observes hits; the inner error says why it does not.
    fn start(
        tool: Tool,
        command: &mut Command,
        work: &mut Workload,
        kind: Kind,
    ) -> Result<std::result::Result<RunningTool, String>> {
        command.env_remove(SET_BY_CARGO);
        command.stdin(Stdio::null()).stdout(Stdio::null());
        let Ok(child) = command.stderr(Stdio::piped()).spawn() else {
            return Ok(Err(format!("{tool} is not installed")));
        };
        let mut guard = Guard::from(child);
        let has_started = eventually(&format!("{tool} observes hits"), || {
            let observes = match tool {
                Tool::Gdb => work.sample().map(|sample| sample.wall_ps > MIN_GDB_HIT_PS),
                Tool::Bpftrace | Tool::Perf => Ok(work.is_traced(kind)),
            };
            match observes {
                Ok(false) if guard.is_running() => None,
                answer => Some(answer),
            }
        })?;
        if has_started {
            return Ok(Ok(RunningTool(guard)));
        }
        let mut why = String::new();
        if let Some(mut errors) = guard.child().stderr.take() {
            let read = errors.read_to_string(&mut why);
            read.map_err(Failure::of(format!("cannot read the errors of {tool}")))?;
        }
        let last = why.lines().next_back().unwrap_or("it exited");
        Ok(Err(format!("{tool}: {last}")))
    }

    /// Sends SIGTERM until the tool exits: bpftrace may miss a signal that does not interrupt its wait.
    fn end(&mut self, tool: Tool) {
        let pid = Pid::from_raw(self.0.pid());
        let mut sent: Option<Instant> = None;
        eventually(&format!("{tool} exits"), || {
            if sent.is_none_or(|sent| sent.elapsed() > RESEND) {
                sent = Some(Instant::now());
                // It may have exited just now.
                let _ = kill(pid, Signal::SIGTERM);
            }
            (!self.0.is_running()).then_some(())
        });
    }
}
