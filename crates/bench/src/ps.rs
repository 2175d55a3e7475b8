//! What `ocaml-probes ps` costs on a machine with many processes that have probes.

use std::io::{BufRead, BufReader};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

use nix::unistd::pipe;
use test_support::Guard;

use crate::cost;
use crate::document::{Table, mib, ms};
use crate::failure::{Failure, Result};
use crate::programs::WAITING;
use crate::stats::Samples;

/// How many processes with probes there are: a row of the table for each number.
const NUMBERS: [usize; 3] = [0, 500, 2_000];

/// Processes that wait for a line until this is dropped.
pub(crate) struct Processes {
    processes: Vec<Guard>,
    _input: OwnedFd,
}

impl Processes {
    /// Starts so many processes of these programs.
    pub(crate) fn start(targets: &Path, programs: &[&str], number: usize) -> Result<Processes> {
        let failed = || Failure::of("cannot make a pipe");
        let (input, input_writer) = pipe().map_err(failed())?;
        let (output, output_writer) = pipe().map_err(failed())?;
        let copy = |end: &OwnedFd| end.try_clone().map_err(Failure::of("cannot copy a pipe"));
        let mut processes = Vec::with_capacity(number);
        for file in programs.iter().cycle().take(number) {
            let mut command = Command::new(targets.join(file));
            command.stdin(Stdio::from(copy(&input)?));
            command.stdout(Stdio::from(copy(&output_writer)?));
            processes.push(Guard::spawn(&mut command));
        }
        drop(output_writer);
        let lines = BufReader::new(std::fs::File::from(output)).lines();
        if lines.take(number).filter_map(|line| line.ok()).count() < number {
            return Err(Failure::new("a program exited before it was ready"));
        }
        Ok(Processes {
            processes,
            _input: input_writer,
        })
    }

    pub(crate) fn pids(&self) -> impl Iterator<Item = i32> {
        self.processes.iter().map(Guard::pid)
    }
}

pub(crate) fn table(targets: &Path, tool: &Path, rounds: usize) -> Result<String> {
    let mut table = Table::new(&[
        "processes with probes",
        "took, median",
        "took, largest",
        "CPU, median",
        "memory, median",
    ]);
    for number in NUMBERS {
        eprintln!("bench: ps among {number} processes");
        let _processes = Processes::start(targets, &WAITING, number)?;
        let (mut took, mut cpu, mut memory) = <(Samples, Samples, Samples)>::default();
        for _ in 0..rounds {
            let begun = Instant::now();
            let found = found(tool)?;
            took.push_time(begun.elapsed());
            if found < number {
                return Err(Failure::new(format!("ps found {found} of {number}")));
            }
            let cost = cost::of(tool, &["ps"])?;
            cpu.push(cost.cpu_ns);
            memory.push(cost.peak_kib);
        }
        table.row([
            number.to_string(),
            ms(took.median()),
            ms(took.max()),
            ms(cpu.median()),
            mib(memory.median()),
        ]);
    }
    Ok(table.finish())
}

/// Returns the number of processes that `ps` lists.
fn found(tool: &Path) -> Result<usize> {
    let mut command = Command::new(tool);
    let output = test_support::output(command.arg("ps").env_remove(cost::SET_BY_CARGO));
    if output.status.success() {
        // A process a line; after the last newline, there is nothing.
        Ok(output.stdout.split(|&byte| byte == b'\n').count() - 1)
    } else {
        Err(Failure::new(String::from_utf8_lossy(&output.stderr)))
    }
}
