//! Installs an observation in a program that is started, before any of its own code runs.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::process::Command;
use std::sync::Arc;

use nix::sys::memfd::{MFdFlags, memfd_create};

use crate::error::{ObserveError, Result};
use crate::inject::injector::{Injector, RedirectMode};
use crate::observe::functions::ObservedFunctions;
use crate::observe::install::data_mapping::{DataMapping, SharedData};
use crate::observe::install::map_and_write::Installed;
use crate::observe::install::prepare::Prepared;
use crate::observe::observation::Observation;
use crate::observe::plan::ObservationPlan;
use crate::process::image::Image;
use crate::process::limits;
use crate::process::memory::ProcessMemory;
use crate::sys::spawn;
use crate::trace::at_exec::AtExec;
use crate::trace::stopped::Stopped;
use crate::trace::tracer::Tracer;
use crate::update::code_digest;
use crate::update::options::Options;

/// What is to be observed of a program that is not started yet, and the file for the recorded data.
pub(crate) struct AtLaunch {
    observation: Observation,
    file: File,
}

impl AtLaunch {
    /// Creates the file, and makes the program that `command` starts inherit it without its knowledge.
    ///
    /// # Errors
    ///
    /// If the file cannot be created.
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

    /// Installs the observation in the program, which is stopped at its exec or, if it has libraries, where its loader
    /// has mapped them.
    ///
    /// # Errors
    ///
    /// Same as [`Target::observe`](crate::Target::observe).
    pub(crate) fn install<'s>(
        self,
        tracer: &'s Tracer<'_>,
        at_exec: &'s AtExec,
        stopped: Stopped<'s>,
        memory: &'s ProcessMemory,
        image: &Image,
        options: Options,
    ) -> Result<(Stopped<'s>, Installed)> {
        let process = at_exec.process();
        let mut functions = ObservedFunctions::find(process.pid(), &self.observation)?;
        functions.are_from_start = true;
        let mut plan = ObservationPlan::of(
            &self.observation,
            image.program.clone(),
            Arc::new(functions),
        )?;
        plan.find_values_and_stacks(process, image);
        let sites = plan.points.iter().map(|planned| planned.point.address);
        let digests = code_digest::prepare(process, image, memory, sites);
        let mut prepared = Prepared::of(process, memory, plan)?;
        limits::refuse_tight(process, prepared.needed_memory(false))?;
        let injector = Injector {
            tracer,
            process,
            memory,
            code_cave: prepared.code_cave,
            limit: options.time_limit,
            despite_seccomp: options.despite_seccomp,
            mode: RedirectMode::BeforeStart(at_exec),
        };
        let data = SharedData::of(self.file, prepared.arenas());
        let data = data.map_err(|source| ObserveError::NoSharedMemory { source })?;
        let stopped = prepared.install(&injector, stopped, DataMapping::File(&data))?;
        Ok((stopped, prepared.installed(Some(data), digests.unwritten())))
    }
}
