//! What a whole command costs: its CPU time, user and system, of all its threads, and its peak
//! memory.
//!
//! getrusage(2) gives them only for all children that were waited for: the sum of their CPU times,
//! and the peak of the largest. And the peak of a child includes the memory of the program that
//! forked it. So each command is run by a new process of this program, which is small and runs
//! nothing else:
//! `bench cost PROGRAM ARGUMENTS…` prints `CPU-MICROSECONDS PEAK-KIB`.

use std::ffi::{OsStr, OsString};
use std::path::Path;
use std::process::{Command, Stdio};

use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::time::TimeValLike;
use test_support::Guard;

use crate::failure::{Failure, Result};

/// The cost of one run of a command.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RunCost {
    pub(crate) cpu_ns: u64,
    pub(crate) peak_kib: u64,
}

/// Runs a command in a process of its own and returns its cost; its output is discarded.
pub(crate) fn of(program: &Path, args: &[impl AsRef<OsStr>]) -> Result<RunCost> {
    let own = std::env::current_exe().map_err(Failure::of("cannot find this program"))?;
    let mut command = Command::new(own);
    command.arg("cost").arg(program).args(args);
    let output = test_support::output(&mut command);
    let text = String::from_utf8_lossy(&output.stdout);
    let mut numbers = text.split_whitespace().map(str::parse::<u64>);
    match (output.status.success(), numbers.next(), numbers.next()) {
        (true, Some(Ok(cpu_us)), Some(Ok(peak_kib))) => Ok(RunCost {
            cpu_ns: cpu_us * 1000,
            peak_kib,
        }),
        _ => {
            let why = String::from_utf8_lossy(&output.stderr).trim().to_owned();
            Err(Failure::new(why))
        }
    }
}

/// An environment variable that `cargo run` sets, and that makes the dynamic loader search Rust's
/// directories for the C library. Commands are run without it, as by a user.
pub(crate) const SET_BY_CARGO: &str = "LD_LIBRARY_PATH";

/// `bench cost`: runs the command and prints what it cost.
pub(crate) fn report(mut args: impl Iterator<Item = OsString>) -> Result<()> {
    let program = args
        .next()
        .ok_or_else(|| Failure::new("usage: bench cost PROGRAM ARGUMENTS…"))?;
    let mut command = Command::new(&program);
    command
        .args(args)
        .env_remove(SET_BY_CARGO)
        .stdin(Stdio::null())
        .stdout(Stdio::null());
    let status = Guard::spawn(&mut command).wait();
    if !status.success() {
        return Err(Failure::new(format!("{command:?} failed with {status}")));
    }
    let usage = getrusage(UsageWho::RUSAGE_CHILDREN)
        .map_err(Failure::of("cannot read what the command cost"))?;
    let cpu = usage.user_time() + usage.system_time();
    println!("{} {}", cpu.num_microseconds(), usage.max_rss());
    Ok(())
}
