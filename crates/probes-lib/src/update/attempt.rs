//! [`Updater`]: attempts an update until an attempt finds the process in the state that it was planned for.

use std::cmp::Reverse;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::error::{Effect, Error, ErrorKind, Operation, ProbeError, ProcessError, Result};
use crate::memory::shadow::Shadowed;
use crate::process::Process;
use crate::process::denial;
use crate::process::maps::{Mapping, read_maps};
use crate::process::memory::ProcessMemory;
use crate::process::opened::OpenedProcess;
use crate::process::program::Program;
use crate::select::{Choice, choose_undo};
use crate::trace::tracee_set::is_follower;
use crate::trace::tracer::with_tracer;
use crate::update::holds::journal::{HoldChange, HoldJournal};
use crate::update::holds::{self, ProcessRecords, ReleasedHold};
use crate::update::lock;
use crate::update::options::Options;
use crate::update::patch::PatchOutcome;
use crate::update::prepare::{PreparedUpdate, StopMode, UpdateContext, UpdateRequest};
use crate::update::report::Report;

/// How many times a process that changes meanwhile is read or updated before the call fails.
pub(crate) const ATTEMPTS: usize = 5;

/// Chooses what to do to which probes of the objects that a process has now.
pub(crate) type Choose<'c> = &'c dyn Fn(&Program) -> Result<Vec<Choice>>;

/// Updates one process.
pub(crate) struct Updater<'u> {
    pub(crate) opened: &'u OpenedProcess,
    pub(crate) options: Options,
    /// Adds the shadow to the memory of a process with these mappings: observed sites are read as if they were not
    /// patched.
    pub(crate) hide: fn(ProcessMemory, &[Mapping]) -> Shadowed<ProcessMemory>,
    /// Where the update is recorded, if it is one of a hold.
    pub(crate) hold: Option<(&'u HoldJournal, HoldChange)>,
}

impl Updater<'_> {
    /// Carries out what is chosen. Waits for other updates of the process: for those of our own threads at `queue`,
    /// which is fairer than the update lock.
    ///
    /// # Errors
    ///
    /// See [`Target::update_with`](crate::Target::update_with).
    pub(crate) fn update(&self, choose: Choose<'_>, queue: &Mutex<()>) -> Result<Report> {
        let process = self.opened.process();
        // Wrong names are reported without waiting for the lock.
        let image = self.opened.current_image()?;
        choose(&image.program)?;
        image.refuse_translated(process)?;
        if self.stop_mode() == StopMode::Stopped {
            process.refuse_self_and_ancestors()?;
        }
        let _queue_guard = queue.lock().unwrap_or_else(PoisonError::into_inner);
        let deadline = self.options.deadline();
        let _lock = holds::settled_lock(process, deadline)?;
        let done = self.update_locked(choose, deadline);
        if let Some((hold, change)) = self.hold {
            hold.record_outcome(process, change, done.as_ref());
        }
        done
    }

    /// Undoes what dead holders hold. Waits as [`Updater::update`] does.
    ///
    /// # Errors
    ///
    /// See [`Target::release_dead`](crate::Target::release_dead).
    pub(crate) fn release_dead(&self, queue: &Mutex<()>) -> Result<Vec<ReleasedHold>> {
        let process = self.opened.process();
        if self.stop_mode() == StopMode::Stopped {
            process.refuse_self_and_ancestors()?;
        }
        let _queue_guard = queue.lock().unwrap_or_else(PoisonError::into_inner);
        let _lock = holds::settled_lock(process, self.options.deadline())?;
        let Some(records) = holds::of_process(process)? else {
            return Ok(Vec::new());
        };
        let mut released = Vec::new();
        let all = records.read();
        let (mut all, _) = all.map_err(|source| holds::unreadable(process, source))?;
        // The latest first, because no counter goes below zero: if an earlier enabling were undone before a later
        // disabling, it would subtract nothing, and the disabling would then add one that stays.
        all.sort_by_key(|found| Reverse(found.record.holder.begun));
        let held_by_keepers = ProcessRecords::held_by_keepers(&all);
        for found in all {
            let holder = found.holder();
            let Some((file, record)) = records.lock(found) else {
                continue;
            };
            let hold = HoldJournal::of_dead(file, record, held_by_keepers.clone());
            let updater = Updater {
                hold: Some((&hold, HoldChange::Undo)),
                ..*self
            };
            let choose = |program: &Program| choose_undo(program, &hold.applied(program));
            let done = updater.update_locked(&choose, self.options.deadline());
            hold.record_outcome(process, HoldChange::Undo, done.as_ref());
            let left = hold.names();
            released.push(ReleasedHold {
                holder,
                report: done.map(|report| report.with_held(&left)).map_err(|error| {
                    let error = self.opened.executed_or(error);
                    error.with_effect_if_none(Effect::NothingChanged)
                }),
            });
        }
        Ok(released)
    }

    /// Carries out what is chosen, with the update lock held.
    fn update_locked(&self, choose: Choose<'_>, deadline: Instant) -> Result<Report> {
        let stop_time = self.opened.process().stop_time();
        let before = stop_time.total();
        let done = lock::while_being_changed(deadline, || {
            let done = self.try_repeatedly(choose);
            if done.as_ref().is_err_and(Error::is_being_updated) {
                self.record_not_carried_out();
            }
            done
        });
        done.map(|report| Report {
            stopped: stop_time.since(before),
            ..report
        })
    }

    /// Checks whether [`Updater::update`] would succeed, as far as that is known while the process runs.
    ///
    /// # Errors
    ///
    /// See [`Target::check`](crate::Target::check).
    pub(crate) fn check(&self, choose: Choose<'_>) -> Result<()> {
        let deadline = self.options.deadline();
        loop {
            match self.check_once(choose) {
                Err(error) if self.opened.is_unloaded(&error) && Instant::now() < deadline => {
                    lock::pause();
                }
                done => return done,
            }
        }
    }

    fn check_once(&self, choose: Choose<'_>) -> Result<()> {
        if self.stop_mode() == StopMode::Stopped {
            self.opened.process().refuse_self_and_ancestors()?;
            refuse_traced(self.opened.process(), is_follower)?;
        }
        let image = self.opened.current_image()?;
        let choices = choose(&image.program)?;
        image.refuse_translated(self.opened.process())?;
        let memory = self.memory()?;
        let context = UpdateContext {
            process: self.opened.process(),
            image: &image,
            memory: &memory,
        };
        context.prepare(self.request(&choices)).map(drop)
    }

    fn stop_mode(&self) -> StopMode {
        if self.opened.is_own() {
            StopMode::Own
        } else {
            StopMode::of(self.options)
        }
    }

    fn request<'c>(&self, choices: &'c [Choice]) -> UpdateRequest<'c> {
        UpdateRequest {
            stop_mode: self.stop_mode(),
            ..UpdateRequest::of(choices, self.options)
        }
    }

    /// Opens the memory to write it, with observed sites hidden.
    fn memory(&self) -> Result<Shadowed<ProcessMemory>> {
        let maps = read_maps(self.opened.process())?;
        Ok((self.hide)(self.opened.unshadowed_memory()?, &maps))
    }

    fn try_repeatedly(&self, choose: Choose<'_>) -> Result<Report> {
        let opened = self.opened;
        let memory = self.memory()?;
        for _ in 0..ATTEMPTS {
            match opened.while_nothing_unloads(|| self.try_once(choose, &memory)) {
                Ok(Some(report)) => return Ok(report),
                Ok(None) => self.record_not_carried_out(),
                // An object has just been unloaded.
                Err(error) if opened.is_unloaded(&error) => {
                    if let Some((hold, change)) = self.hold {
                        hold.record_outcome(opened.process(), change, Err(&error));
                    }
                }
                Err(error) => return Err(error),
            }
        }
        let pid = opened.pid();
        Err(Error::of_process(pid, ProcessError::KeepsChanging))
    }

    /// Returns `None` if the process has changed since it was read.
    fn try_once(
        &self,
        choose: Choose<'_>,
        memory: &Shadowed<ProcessMemory>,
    ) -> Result<Option<Report>> {
        let image = self.opened.current_image()?;
        let choices = choose(&image.program)?;
        let context = UpdateContext {
            process: self.opened.process(),
            image: &image,
            memory,
        };
        let request = self.request(&choices);
        match request.stop_mode {
            StopMode::Stopped => self.update_stopped(context, request),
            StopMode::Live => self.update_running(context, request, PreparedUpdate::carry_out_live),
            StopMode::Own => self.update_running(context, request, PreparedUpdate::carry_out_own),
        }
    }

    /// Records that the intended change was not carried out, because the process had changed: nothing was written.
    fn record_not_carried_out(&self) {
        if let Some((hold, change)) = self.hold {
            hold.record_not_carried_out(change);
        }
    }

    /// Records what is about to be written, if it is part of a hold.
    fn record_intent(&self, prepared: &PreparedUpdate<'_>) -> Result<()> {
        match self.hold {
            Some((hold, change)) => prepared.record_intent(hold, change),
            None => Ok(()),
        }
    }

    /// Records what stays held after an update that has nothing to write, if it undoes a hold.
    fn record_intent_without_writes(&self, prepared: &PreparedUpdate<'_>) -> Result<()> {
        match self.hold {
            Some((hold, change)) => prepared.record_intent_without_writes(hold, change),
            None => Ok(()),
        }
    }

    /// Stops the process and updates it; returns `None` if its objects have changed since it was read.
    fn update_stopped(
        &self,
        context: UpdateContext<'_>,
        request: UpdateRequest<'_>,
    ) -> Result<Option<Report>> {
        let limit = self.options.time_limit;
        let process = context.process;
        // These errors also occur while another process writes, or while an object is being loaded.
        let is_transient = |kind: &ErrorKind| match kind {
            ErrorKind::Probe(ProbeError::Inconsistent { .. }) => true,
            ErrorKind::Probe(ProbeError::UnexpectedSite { address, .. }) => {
                context.image.can_be_unloaded(*address)
            }
            _ => false,
        };
        let prepared = match context.prepare(request) {
            // Prepared again once the process is stopped; if that fails, too, it is an error.
            Err(error) if is_transient(error.kind()) => None,
            prepared => Some(prepared?),
        };
        match prepared {
            Some(prepared) if prepared.has_nothing_to_do() => {
                self.record_intent_without_writes(&prepared)?;
                prepared.forget_overruled();
                return Ok(Some(prepared.report(Duration::ZERO)));
            }
            Some(ref prepared) => {
                prepared.break_copy_on_write();
                self.record_intent(prepared)?;
            }
            None => {}
        }
        let digests = context.digests(request.choices);
        let done = with_tracer(&[process], |tracer| {
            tracer.holds_update_lock.set(true);
            let stopped = digests.stop(tracer, process, context.memory.bare(), limit)?;
            let digest = digests.write(&stopped, context.memory.bare());
            if let Some(prepared) = prepared {
                if prepared.carry_out(&stopped)? == PatchOutcome::Done {
                    return Ok(Some((prepared, digest)));
                }
            }
            // An object has been unloaded, or is loaded in part.
            if !context.image.still_matches(&read_maps(process)?) {
                return Ok(None);
            }
            self.record_not_carried_out();
            // The states have changed since they were read; now that the process is stopped, they cannot.
            let prepared = context.prepare(request)?;
            self.record_intent(&prepared)?;
            let done = prepared.carry_out(&stopped)? == PatchOutcome::Done;
            Ok(done.then_some((prepared, digest)))
        })?;
        Ok(done.map(|(prepared, digest)| Report {
            code_digest: digest,
            ..prepared.report(Duration::ZERO)
        }))
    }

    /// Updates the process while it runs; returns `None` if it has changed since it was read.
    fn update_running<'a>(
        &self,
        context: UpdateContext<'a>,
        request: UpdateRequest<'_>,
        carry_out: impl FnOnce(&PreparedUpdate<'a>) -> Result<PatchOutcome>,
    ) -> Result<Option<Report>> {
        let prepared = context.prepare(request)?;
        if prepared.has_nothing_to_do() {
            self.record_intent_without_writes(&prepared)?;
            prepared.forget_overruled();
            return Ok(Some(prepared.report(Duration::ZERO)));
        }
        self.record_intent(&prepared)?;
        // Digests are written only into a stopped process: a running thread may be computing one.
        let digest = context.digests(request.choices).unwritten();
        let done = carry_out(&prepared)? == PatchOutcome::Done;
        Ok(done.then(|| Report {
            code_digest: digest,
            ..prepared.report(Duration::ZERO)
        }))
    }
}

/// Refuses a process that is traced, unless by another update, which will be over soon, or by a thread for
/// which `lends` is true.
pub(crate) fn refuse_traced(process: &Process, lends: impl Fn(i32) -> bool) -> Result<()> {
    let status = process.status();
    let tracer = status.map_err(|source| process.exited_or(source))?.tracer;
    if tracer == 0 || lends(tracer) {
        return Ok(());
    }
    let error = denial::traced(process, Operation::Attach, tracer);
    if error.is_being_updated() {
        Ok(())
    } else {
        Err(error)
    }
}
