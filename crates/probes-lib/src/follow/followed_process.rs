//! [`FollowedProcess`]: what is known of a process that is followed.

use std::sync::Arc;
use std::time::Instant;

use nix::fcntl::OFlag;

use super::present::Present;
use crate::error::{Error, Operation, ProcessError, Result};
use crate::inject::loader_hook::LoaderHook;
use crate::observe::shadow;
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
use crate::update::lock::UpdateLock;
use crate::update::options::Options;
use crate::update::patch::Outcome;
use crate::update::prepare::{UpdateContext, UpdateRequest};
use crate::update::report::Report;

/// A process that is followed.
pub(super) struct FollowedProcess {
    pub(super) process: Process,
    /// Its objects whose probes were set, or could not be.
    pub(super) known: Vec<Object>,
    pub(super) hook: Option<LoaderHook>,
    /// The files that were read since it executed its program.
    files: Arc<Files>,
    /// The process that forked it, whose memory it may share until it executes a program (vfork(2));
    /// or 0.
    pub(super) parent: i32,
    /// Whether its loader has not mapped everything that its program is linked with.
    pub(super) is_loading: bool,
    /// Whether it is to be detached from as soon as possible.
    pub(super) leaving: bool,
}

impl FollowedProcess {
    pub(super) fn of(process: Process) -> FollowedProcess {
        FollowedProcess {
            process,
            known: Vec::new(),
            hook: None,
            files: Arc::default(),
            parent: 0,
            is_loading: false,
            leaving: false,
        }
    }

    /// Returns a process that was just forked. It is leaving if `parent` is, or was detached from before
    /// the fork was seen.
    pub(super) fn forked(process: Process, parent: Option<&FollowedProcess>) -> FollowedProcess {
        let mut forked = FollowedProcess::of(process);
        forked.hook = forked.inherited_hook(parent.and_then(|parent| parent.hook.as_ref()));
        match parent {
            Some(parent) => {
                forked.known = parent.known.clone();
                forked.files = parent.files.clone();
                forked.parent = parent.pid();
                forked.is_loading = parent.is_loading;
                forked.leaving = parent.leaving;
            }
            None => forked.leaving = true,
        }
        forked
    }

    pub(super) fn pid(&self) -> i32 {
        self.process.pid()
    }

    pub(super) fn image(&self) -> Result<Image> {
        Image::of(&self.process, self.files.clone())
    }

    pub(super) fn present(&self, actions: &Actions) -> Result<Present> {
        Present::of(&self.process, self.files.clone(), actions)
    }

    /// Returns the hook that was copied with its memory: that of its parent, if it is the same.
    fn inherited_hook(&self, of_parent: Option<&LoaderHook>) -> Option<LoaderHook> {
        let memory = self.memory().ok()?;
        match of_parent.filter(|hook| hook.is_in(&memory)) {
            Some(hook) => Some(hook.clone()),
            None => LoaderHook::left_in(&self.process, &memory),
        }
    }

    pub(super) fn memory(&self) -> Result<ProcessMemory> {
        ProcessMemory::open(&self.process, OFlag::O_RDWR)
            .map_err(|source| denial::denied_or_exited(&self.process, Operation::Attach, source))
    }

    pub(super) fn has_loaded(&self) -> bool {
        let memory = self.memory();
        // If that cannot be read, it must not count as loading for ever.
        memory
            .is_ok_and(|memory| dynamic_loader::has_loaded(&self.process, &memory).unwrap_or(true))
    }

    /// Has it detached from as soon as possible, and closes its hook: no thread enters that any more.
    pub(super) fn leave(&mut self) {
        self.leaving = true;
        if let (Some(hook), Ok(memory)) = (&self.hook, self.memory()) {
            // It fails only if the process has exited.
            let _ = hook.close(&memory);
        }
    }

    /// Sets the probes of `image` as chosen; the process has to have that image.
    pub(super) fn set(
        &self,
        image: &Image,
        choices: &[Choice],
        options: Options,
        stopped: &Stopped<'_>,
    ) -> Result<Report> {
        let _lock = UpdateLock::wait(&self.process, Instant::now() + options.deadline)?;
        let memory = shadow::shadowed_memory(self.memory()?, &read_maps(&self.process)?);
        let context = UpdateContext {
            process: &self.process,
            image,
            memory: &memory,
        };
        let prepared = context.prepare(UpdateRequest::of(choices, options))?;
        if !prepared.is_done() && prepared.carry_out(stopped)? == Outcome::Outdated {
            let pid = self.pid();
            return Err(Error::of_process(pid, ProcessError::KeepsChanging));
        }
        Ok(prepared.report(stopped.stop_time()))
    }
}
