//! What whole commands of `ocaml-probes` cost. Each round runs them on a new process, which was never patched.

use std::path::Path;

use crate::cost::{self, RunCost};
use crate::document::{Table, median_p99, mib, ms};
use crate::failure::{Failure, Result};
use crate::prepare::Program;
use crate::spin::Spin;
use crate::stats::Samples;

/// One command on one program.
pub(crate) struct Command {
    pub(crate) program: &'static str,
    pub(crate) command: &'static str,
    pub(crate) cpu_ns: Samples,
    pub(crate) peak_kib: Samples,
    /// The longest gap that the program measured meanwhile, in ns.
    pub(crate) longest_gap: Samples,
}

pub(crate) const INFO: &str = "info";
pub(crate) const ENABLE_ALL: &str = "attach -enable-all";
pub(crate) const DISABLE_ALL: &str = "attach -disable-all";
/// A command that does nothing: what starting a process costs.
const NOTHING: &str = "true";

/// Run in this order in each round.
const COMMANDS: [&str; 3] = [INFO, ENABLE_ALL, DISABLE_ALL];

pub(crate) fn measure(programs: &[Program], tool: &Path, rounds: usize) -> Result<Vec<Command>> {
    let mut all = vec![nothing(rounds)?];
    for program in programs {
        all.extend(measure_one(program, tool, rounds)?);
    }
    Ok(all)
}

fn nothing(rounds: usize) -> Result<Command> {
    let mut nothing = Command::new("", NOTHING);
    for _ in 0..rounds {
        nothing.push(cost::of(Path::new(NOTHING), &[] as &[&str])?);
    }
    Ok(nothing)
}

fn measure_one(program: &Program, tool: &Path, rounds: usize) -> Result<[Command; 3]> {
    eprintln!("bench: {}: what commands cost", program.name);
    let mut commands = COMMANDS.map(|command| Command::new(program.name, command));
    for _ in 0..rounds {
        let mut spin = Spin::start(&program.path)?;
        for command in &mut commands {
            let args = arguments(command.command, spin.pid());
            let (cost, longest_gap) = spin.longest_gap_during(|| cost::of(tool, &args))?;
            command.push(cost);
            command.longest_gap.push_time(longest_gap);
            if (command.command == ENABLE_ALL) != spin.runs_handlers()? {
                let is_on = command.command != ENABLE_ALL;
                let handlers = if is_on { "run" } else { "do not run" };
                let text = format!("after {}, the handlers {handlers}", command.command);
                return Err(Failure::new(text));
            }
        }
    }
    Ok(commands)
}

/// Returns the arguments of a command (`attach -enable-all`) for a process.
pub(crate) fn arguments(command: &str, pid: i32) -> Vec<String> {
    let mut words: Vec<String> = command.split(' ').map(str::to_owned).collect();
    words.insert(1, "-pid".to_owned());
    words.insert(2, pid.to_string());
    words
}

impl Command {
    fn new(program: &'static str, command: &'static str) -> Command {
        Command {
            program,
            command,
            cpu_ns: Samples::default(),
            peak_kib: Samples::default(),
            longest_gap: Samples::default(),
        }
    }

    fn push(&mut self, cost: RunCost) {
        self.cpu_ns.push(cost.cpu_ns);
        self.peak_kib.push(cost.peak_kib);
    }
}

pub(crate) fn table(all: &[Command]) -> String {
    let mut table = Table::new(&[
        "program",
        "command",
        "CPU, median",
        "CPU, largest",
        "memory, median",
        "memory, largest",
        "longest gap, median / p99",
    ]);
    for one in all {
        let (program, longest_gap) = match one.program {
            "" => (String::new(), String::new()),
            name => (format!("`{name}`"), median_p99(&one.longest_gap)),
        };
        table.row([
            program,
            format!("`{}`", one.command),
            ms(one.cpu_ns.median()),
            ms(one.cpu_ns.max()),
            mib(one.peak_kib.median()),
            mib(one.peak_kib.max()),
            longest_gap,
        ]);
    }
    table.finish()
}
