//! [`FollowedProcess`]: what is known of a process that is followed.

use std::sync::Arc;

use nix::fcntl::OFlag;

use super::resolved_actions::ResolvedActions;
use crate::error::{Error, Operation, ProcessError, Result};
use crate::inject::loader_hook::LoaderHook;
use crate::observe::install::shadow;
use crate::process::Process;
use crate::process::denial;
use crate::process::dynamic_loader;
use crate::process::image::Image;
use crate::process::maps::read_maps;
use crate::process::memory::ProcessMemory;
use crate::process::object::Object;
use crate::process::objects::Files;
use crate::select::{Actions, Choice};
use crate::trace::stopped::Stopped;
use crate::update::options::Options;
use crate::update::patch::PatchOutcome;
use crate::update::prepare::{UpdateContext, UpdateRequest};
use crate::update::report::Report;

/// A process that is followed.
pub(super) struct FollowedProcess {
    pub(super) process: Process,
    /// The objects whose probes were set, or could not be set.
    pub(super) known: Vec<Object>,
    pub(super) hook: Option<LoaderHook>,
    /// The files that were read since it executed its program.
    files: Arc<Files>,
    /// The process that forked it, whose memory it may share until it executes a program (vfork(2));
    /// or 0.
    pub(super) parent: i32,
    /// Whether its loader has yet to map some of what its program is linked with.
    pub(super) is_starting: bool,
    /// Whether it is to be detached from as soon as possible.
    pub(super) is_to_be_detached: bool,
}

impl FollowedProcess {
    pub(super) fn of(process: Process) -> FollowedProcess {
        FollowedProcess {
            process,
            known: Vec::new(),
            hook: None,
            files: Arc::default(),
            parent: 0,
            is_starting: false,
            is_to_be_detached: false,
        }
    }

    /// Returns a process that was just forked. It is to be detached from if `parent` is, or if `parent`
    /// is `None` because it was detached from before the fork was seen.
    ///
    /// # Errors
    ///
    /// See [`FollowedProcess::with_inherited_hook`].
    pub(super) fn forked(
        process: Process,
        parent: Option<&FollowedProcess>,
        hooks: &[LoaderHook],
    ) -> Result<FollowedProcess> {
        let mut forked = FollowedProcess::with_inherited_hook(process, hooks)?;
        match parent {
            Some(parent) => {
                forked.known = parent.known.clone();
                forked.files = parent.files.clone();
                forked.parent = parent.pid();
                forked.is_starting = parent.is_starting;
                forked.is_to_be_detached = parent.is_to_be_detached;
            }
            None => forked.is_to_be_detached = true,
        }
        Ok(forked)
    }

    /// Returns a process that was forked. Its hook is the one that the fork has copied with the memory: the first of `hooks`
    /// that the memory contains, else the one that is found there, if any.
    ///
    /// # Errors
    ///
    /// If its memory cannot be opened, although we may open it.
    pub(super) fn with_inherited_hook(
        process: Process,
        hooks: &[LoaderHook],
    ) -> Result<FollowedProcess> {
        let mut forked = FollowedProcess::of(process);
        let memory = match forked.memory() {
            // It may be opened again once it has executed a program.
            Err(error) if error.denial().is_some() => return Ok(forked),
            memory => memory?,
        };
        forked.hook = match hooks.iter().find(|hook| hook.is_in(&memory)) {
            Some(hook) => Some(hook.clone()),
            None => LoaderHook::find_stale(&forked.process, &memory),
        };
        Ok(forked)
    }

    pub(super) fn pid(&self) -> i32 {
        self.process.pid()
    }

    pub(super) fn image(&self) -> Result<Image> {
        Image::of(&self.process, self.files.clone())
    }

    pub(super) fn resolve(&self, actions: &Actions) -> Result<ResolvedActions> {
        ResolvedActions::of(&self.process, self.files.clone(), actions)
    }

    pub(super) fn memory(&self) -> Result<ProcessMemory> {
        ProcessMemory::open(&self.process, OFlag::O_RDWR)
            .map_err(|source| denial::denied_or_exited(&self.process, Operation::Attach, source))
    }

    pub(super) fn has_loaded(&self) -> bool {
        let memory = self.memory();
        // If the loader's state cannot be read, the process must not count as loading for ever.
        memory
            .is_ok_and(|memory| dynamic_loader::has_loaded(&self.process, &memory).unwrap_or(true))
    }

    /// Marks the process to be detached from as soon as possible, and restores the function that its hook is in, so
    /// that no thread enters the hook any more.
    pub(super) fn prepare_to_detach(&mut self) {
        self.is_to_be_detached = true;
        if let (Some(hook), Ok(memory)) = (&self.hook, self.memory()) {
            // It fails only if the process has exited.
            let _ = hook.restore_function(&memory);
        }
    }

    /// Sets the probes of `image` as `choices` say; `image` has to be the current image of the
    /// process, and no other tool may change it meanwhile.
    pub(super) fn set(
        &self,
        image: &Image,
        choices: &[Choice],
        options: Options,
        stopped: &Stopped<'_>,
    ) -> Result<Report> {
        let memory = shadow::shadowed_memory(self.memory()?, &read_maps(&self.process)?);
        let context = UpdateContext {
            process: &self.process,
            image,
            memory: &memory,
        };
        let prepared = context.prepare(UpdateRequest::of(choices, options))?;
        if prepared.has_nothing_to_do() {
            prepared.forget_overruled();
            return Ok(prepared.report(stopped.stop_time()));
        }
        let digests = context.digests(choices);
        let digest = digests.write(stopped, memory.bare());
        if prepared.carry_out(stopped)? == PatchOutcome::Outdated {
            let pid = self.pid();
            return Err(Error::of_process(pid, ProcessError::KeepsChanging));
        }
        Ok(Report {
            code_digest: digest,
            ..prepared.report(stopped.stop_time())
        })
    }
}
