//! An observation that begins before a program does.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::process::Command;
use std::time::Duration;

use nix::sys::memfd::{MFdFlags, memfd_create};

use crate::error::{ObserveError, Result};
use crate::inject::injector::{Injector, RedirectMode};
use crate::observe::install::context::InstallContext;
use crate::observe::install::prepare::Prepared;
use crate::observe::read::data_source::SharedData;
use crate::observe::{Installed, Observation};
use crate::process::memory::ProcessMemory;
use crate::process::program::Program;
use crate::sys::spawn;
use crate::trace::at_exec::AtExec;
use crate::trace::stopped::Stopped;
use crate::trace::tracer::Tracer;
use crate::update::options::Options;

/// What is to be observed of a program that is not there yet, and the file in which it will be.
pub(crate) struct AtLaunch {
    observation: Observation,
    file: File,
}

impl AtLaunch {
    /// Has the program that `command` starts inherit a file, of which it will not know.
    ///
    /// # Errors
    ///
    /// If there can be no such file.
    pub(crate) fn of(observation: Observation, command: &mut Command) -> Result<AtLaunch> {
        let file = memfd_create(c"ocaml-probes", MFdFlags::MFD_CLOEXEC).map_err(|errno| {
            ObserveError::NoSharedMemory {
                source: errno.into(),
            }
        })?;
        spawn::inherit(command, file.as_raw_fd());
        Ok(AtLaunch {
            observation,
            file: file.into(),
        })
    }

    /// Begins to observe a program that stands before any of its code.
    ///
    /// # Errors
    ///
    /// As of [`Target::observe`](crate::Target::observe).
    pub(crate) fn install<'s>(
        self,
        tracer: &'s Tracer<'_>,
        at_exec: &'s AtExec,
        stopped: Stopped<'s>,
        memory: &'s ProcessMemory,
        program: std::sync::Arc<Program>,
        options: Options,
    ) -> Result<(Stopped<'s>, Installed)> {
        let process = at_exec.process();
        let mut prepared = Prepared::of(process, program, memory, &self.observation)?;
        let work = InstallContext::of(Injector {
            tracer,
            process,
            memory,
            code_cave: prepared.code_cave,
            limit: options.deadline,
            mode: RedirectMode::BeforeStart(at_exec),
        });
        let shared = SharedData::of(self.file, prepared.arenas());
        let shared = shared.map_err(|source| ObserveError::NoSharedMemory { source })?;
        let (stopped, has_tids) = prepared.install(&work, stopped, Some(&shared))?;
        let never = Duration::ZERO;
        let installed = prepared.into_installed(has_tids, Some(shared), never, options);
        Ok((stopped, installed))
    }
}
