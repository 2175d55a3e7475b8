//! A program that a command starts and observes until it has exited: its status is that of the command.

use std::ffi::{OsStr, OsString};
use std::iter;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, ExitCode};
use std::time::Duration;

use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid};
use nix::unistd::Pid;
use probes_lib::{Effect, Target, check_proc};

use crate::failure::Failure;
use crate::signals::{RunningProcesses, TerminationSignals, WaitEnd};

/// A program that was started.
pub(super) struct StartedProgram(Child);

impl StartedProgram {
    /// Starts a program, which inherits our environment with `variables` in it.
    pub(super) fn start<'v>(
        program: &Path,
        arguments: &[OsString],
        variables: impl IntoIterator<Item = (&'v str, &'v OsStr)>,
    ) -> Result<StartedProgram, Failure> {
        // Without /proc, nothing could be read of the program.
        let checked = check_proc().map_err(|error| error.with_effect_if_none(Effect::NotStarted));
        checked.map_err(Failure::of_program(program))?;
        let mut command = Command::new(program);
        command.args(arguments).envs(variables);
        let child = command.spawn();
        let child = child.map_err(|source| Failure::StartProgram(program.to_owned(), source))?;
        Ok(StartedProgram(child))
    }

    /// One that was started by other means.
    pub(super) fn of(child: Child) -> StartedProgram {
        StartedProgram(child)
    }

    pub(super) fn pid(&self) -> i32 {
        self.0.id() as i32
    }

    /// Whether a command failed because the program has exited. Does not reap the program: its pid is not used again.
    pub(super) fn is_of_exit(&self, failure: &Failure) -> bool {
        // If all its threads are exiting, it may not yet be known to have exited.
        matches!(failure, Failure::Target(_, error) if error.is_gone() || self.has_exited())
    }

    fn has_exited(&self) -> bool {
        let flags = WaitPidFlag::WEXITED | WaitPidFlag::WNOHANG | WaitPidFlag::WNOWAIT;
        let found = waitid(Id::Pid(Pid::from_raw(self.pid())), flags);
        !matches!(found, Ok(WaitStatus::StillAlive))
    }

    /// Waits until the program has exited, and passes termination signals on to it meanwhile. Returns its status as
    /// ours, or 128 plus the number of the signal that killed it. If that is 0, but what the command was to do is not
    /// complete, returns 1.
    pub(super) fn wait(mut self, is_complete: bool) -> Result<ExitCode, Failure> {
        self.pass_signals_on_until_exit();
        let status = self.0.wait();
        let status = status.map_err(Failure::of_waiting)?;
        let code = status.code().or(status.signal().map(|signal| 128 + signal));
        let status = code.unwrap_or(1) as u8;
        Ok(ExitCode::from(status.max((!is_complete).into())))
    }

    fn pass_signals_on_until_exit(&self) {
        if let Ok(signals) = TerminationSignals::block_and_pass_on(Some(self.pid())) {
            // Fails mostly because the program has exited.
            let _ = self.wait_without_reaping(&signals);
            signals.unblock();
        }
    }

    fn wait_without_reaping(&self, signals: &TerminationSignals) -> Result<(), Failure> {
        let target = Target::open_any(self.pid()).map_err(Failure::of_process(self.pid()))?;
        let mut running = RunningProcesses::of(iter::once(&target))?;
        while !matches!(
            signals.wait_for(&mut running, &[], Duration::MAX)?,
            WaitEnd::Exited
        ) {}
        Ok(())
    }
}
