//! A program that a command starts and observes until it has exited: its status is that of the command.

use std::ffi::{OsStr, OsString};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, ExitCode};

use crate::failure::Failure;

/// A program that was started.
pub(super) struct StartedProgram(Child);

impl StartedProgram {
    /// Starts a program, which inherits our environment with `variables` in it.
    pub(super) fn start<'v>(
        program: &Path,
        arguments: &[OsString],
        variables: impl IntoIterator<Item = (&'v str, &'v OsStr)>,
    ) -> Result<StartedProgram, Failure> {
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

    pub(super) fn has_exited(&mut self) -> bool {
        matches!(self.0.try_wait(), Ok(Some(_)))
    }

    /// Waits until it has exited; returns its status as ours, or 128 plus the number of the signal that killed it. If
    /// that is 0, but what the command was to do is not complete, returns 1.
    pub(super) fn wait(mut self, is_complete: bool) -> Result<ExitCode, Failure> {
        let status = self.0.wait();
        let status = status.map_err(|source| Failure::System("wait for the program", source))?;
        let code = status.code().or(status.signal().map(|signal| 128 + signal));
        let status = code.unwrap_or(1) as u8;
        Ok(ExitCode::from(status.max((!is_complete).into())))
    }
}
