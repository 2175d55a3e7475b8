//! How long a program is stopped while gdb makes the same change from a batch script.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use probes_lib::{Action, Options, State, Target};

use crate::cost::SET_BY_CARGO;
use crate::document::{Table, median_p99};
use crate::failure::{Failure, Result};
use crate::prepare::{self, Program};
use crate::spin::{Spin, Threads};
use crate::stats::Samples;
use crate::stop_time;

/// Few, because gdb is slow, and because in no case are the figures of gdb and ours close.
const ROUNDS: usize = 5;

/// The numbers of threads and of sites. All threads but one wait.
const CASES: [(u64, u64); 5] = [(1, 10), (1, 1_000), (1, 10_000), (16, 10), (256, 10)];

/// The opcode of an enabled site.
const CALL: u8 = 0xe8;

pub(crate) fn table(programs: &[Program]) -> Result<String> {
    if Command::new("gdb").arg("--version").output().is_err() {
        return Ok("Not measured: gdb is not installed.\n".to_owned());
    }
    let mut table = Table::new(&["threads", "sites", "gdb", "ours", "gdb / ours"]);
    for (threads, sites) in CASES {
        let program = prepare::with_sites(programs, sites)?;
        let (gdb, ours) = compare(program, threads)?;
        table.row([
            threads.to_string(),
            sites.to_string(),
            median_p99(&gdb),
            median_p99(&ours),
            format!("{:.0}", gdb.median() as f64 / ours.median() as f64),
        ]);
    }
    Ok(table.finish())
}

/// Returns the gaps that one program measures while gdb enables all probes, and while we do.
/// Rounds of both alternate.
fn compare(program: &Program, count: u64) -> Result<(Samples, Samples)> {
    eprintln!("bench: {} with {count} threads: gdb", program.name);
    let threads = Threads {
        spinning: 1,
        waiting: count - 1,
    };
    let mut spin = Spin::start_with(&program.path, threads)?;
    let target = Target::open(spin.pid())?;
    let script = Script::enable_all(&target)?;
    let (mut gdb, mut ours) = (Samples::default(), Samples::default());
    for _ in 0..ROUNDS {
        gdb.push_time(run(&mut spin, &script)?);
        let states = target.states()?;
        if !states.probes().all(|probe| probe.state() == State::Enabled) {
            return Err(Failure::new("gdb has not enabled all probes"));
        }
        let mut switch = |action| {
            let options = Options::default();
            stop_time::switch(&mut spin, &target, action, program.sites, options)
        };
        switch(Action::Disable)?;
        ours.push_time(switch(Action::Enable)?.1);
        switch(Action::Disable)?;
    }
    Ok((gdb, ours))
}

fn run(spin: &mut Spin, script: &Script) -> Result<Duration> {
    let mut gdb = Command::new("gdb");
    gdb.env_remove(SET_BY_CARGO);
    gdb.args(["-nx", "-batch", "-p", &spin.pid().to_string(), "-x"]);
    gdb.arg(&script.0);
    let (output, gap) = spin.longest_gap_during(|| Ok(test_support::output(&mut gdb)))?;
    if output.status.success() {
        Ok(gap)
    } else {
        let why = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        Err(Failure::new(format!("gdb: {why}")))
    }
}

/// A file of commands for gdb; removed when dropped.
struct Script(PathBuf);

impl Script {
    /// Returns a script that makes the writes that our update makes: sites first, then counters.
    fn enable_all(target: &Target) -> Result<Script> {
        let states = target.states()?;
        let mut commands = String::new();
        for site in states.probes().flat_map(|probe| probe.sites()) {
            let opcode = site.address.0 + 1;
            let _ = writeln!(commands, "set {{unsigned char}}{opcode:#x} = {CALL:#x}");
        }
        for semaphore in states.probes().flat_map(|probe| probe.semaphores()) {
            let (at, value) = (semaphore.address, semaphore.value + 1);
            let _ = writeln!(commands, "set {{unsigned short}}{at} = {value}");
        }
        let path = format!("probes-bench.{}.gdb", std::process::id());
        let path = std::env::temp_dir().join(path);
        write(&path, &commands)?;
        Ok(Script(path))
    }
}

fn write(path: &Path, text: &str) -> Result<()> {
    std::fs::write(path, text).map_err(Failure::of("cannot write a script for gdb"))
}

impl Drop for Script {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}
