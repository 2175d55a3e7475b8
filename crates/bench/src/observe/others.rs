//! What the same hit costs when others count it: bpftrace and perf in the kernel, by a breakpoint on the
//! site's nop, and gdb from outside. Each is used if it is installed and allowed.

use std::fmt;
use std::io::Read;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use probes_lib::Target;
use test_support::{Guard, Scratch, eventually};

use crate::cost::NOT_THE_USERS;
use crate::failure::{Failure, Result};
use crate::observe::event::Event;
use crate::observe::work::{Kind, Sample, Work};
use crate::stats::Samples;

/// They take seconds to begin.
const ROUNDS: usize = 3;

/// What they look at.
const KIND: Kind = Kind::Silent;

/// Slower than a hit that gdb does not see.
const BY_GDB_PS: u64 = 10_000_000;

/// A tool that has not ended is told to again after so long.
const AGAIN: Duration = Duration::from_millis(300);

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

/// What a hit costs more with a tool, in picoseconds; or why that is not known.
///
/// A program that gdb has looked at is of no more use.
pub(super) type Adds = std::result::Result<f64, String>;

pub(super) fn adds(tool: Tool, work: &mut Work, target: &Target, file: &Path) -> Result<Adds> {
    work.only(KIND);
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
        None if tool == Tool::Gdb => by_gdb(work.pid(), target, &scratch)?,
        None => by_bpftrace(work.pid(), file),
    };
    let (mut bare, mut traced) = <(Samples, Samples)>::default();
    // Programs that gdb has left may not go on.
    let (times, samples) = match tool {
        Tool::Gdb => (1, ROUNDS * ROUNDS),
        Tool::Bpftrace | Tool::Perf => (ROUNDS, ROUNDS),
    };
    for _ in 0..times {
        bare.push(cost(tool, &work.sample()?));
        let mut running = match Running::start(tool, &mut command, work)? {
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

/// All threads stand while gdb looks at one: that is on no processor's time.
fn cost(tool: Tool, sample: &Sample) -> u64 {
    match tool {
        Tool::Gdb => sample.wall_ps,
        Tool::Bpftrace | Tool::Perf => sample.cpu_ps,
    }
}

fn by_bpftrace(pid: i32, file: &Path) -> Command {
    let program = format!(
        "usdt:{}:*:{} {{ @ = count(); }}",
        file.display(),
        KIND.probe()
    );
    let mut command = Command::new("bpftrace");
    command.args(["-p", &pid.to_string(), "-e", &program]);
    command
}

fn by_gdb(pid: i32, target: &Target, scratch: &Scratch) -> Result<Command> {
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

/// A tool that looks at every hit.
struct Running(Guard);

impl Running {
    /// Returns when it does; or why it does not.
    fn start(
        tool: Tool,
        command: &mut Command,
        work: &mut Work,
    ) -> Result<std::result::Result<Running, String>> {
        command.env_remove(NOT_THE_USERS);
        command.stdin(Stdio::null()).stdout(Stdio::null());
        let Ok(child) = command.stderr(Stdio::piped()).spawn() else {
            return Ok(Err(format!("{tool} is not installed")));
        };
        let mut guard = Guard::from(child);
        let has_begun = eventually(&format!("{tool} looks at hits"), || {
            let looks = match tool {
                Tool::Gdb => work.sample().map(|sample| sample.wall_ps > BY_GDB_PS),
                Tool::Bpftrace | Tool::Perf => Ok(work.is_traced(KIND)),
            };
            match looks {
                Ok(false) if guard.is_running() => None,
                answer => Some(answer),
            }
        })?;
        if has_begun {
            return Ok(Ok(Running(guard)));
        }
        let mut why = String::new();
        if let Some(mut errors) = guard.child().stderr.take() {
            let read = errors.read_to_string(&mut why);
            read.map_err(Failure::of(format!("cannot read what {tool} says")))?;
        }
        let last = why.lines().next_back().unwrap_or("it just ends");
        Ok(Err(format!("{tool}: {last}")))
    }

    /// Tells it again and again: bpftrace may not notice a signal that does not interrupt its waiting.
    fn end(&mut self, tool: Tool) {
        let pid = Pid::from_raw(self.0.pid());
        let mut told: Option<Instant> = None;
        eventually(&format!("{tool} ends"), || {
            if told.is_none_or(|told| told.elapsed() > AGAIN) {
                told = Some(Instant::now());
                // It may just have ended.
                let _ = kill(pid, Signal::SIGTERM);
            }
            (!self.0.is_running()).then_some(())
        });
    }
}
