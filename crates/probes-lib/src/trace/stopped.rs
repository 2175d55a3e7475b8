//! [`Stopped`]: a process all of whose threads are stopped, and traced by this thread or lent by their follower.
//! Dropping it detaches them, or returns them to the follower, so that no early return leaves a thread stopped; threads that stay
//! traced are left to their `TraceeSet`.

use std::cell::OnceCell;
use std::collections::HashMap;
use std::marker::PhantomData;
use std::ops::Range;
use std::rc::Rc;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::address::LiveAddr;
use crate::error::{Error, MemoryPart, Operation, ProcessError, Result};
use crate::memory::{ReadMemory, WriteMemory};
use crate::process::Process;
use crate::process::maps::{Mapping, read_maps};
use crate::process::memory::ProcessMemory;
use crate::sys::ptrace;
use crate::trace::lease::Lease;
use crate::trace::memory::StoppedMemory;
use crate::trace::moves::Moves;
use crate::trace::stacks::StackRanges;
use crate::trace::thread_calls::ThreadCalls;
use crate::trace::tracer::reap_if_exited;

/// The state of a traced thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Tracee {
    Running,
    /// Stopped, and to be given this signal (0 for none) when it resumes.
    Stopped(i32),
    /// Same as `Stopped`, but of another process: a child made by clone(2), which the kernel has
    /// attached to this tracer by itself.
    Foreign(i32),
    Gone,
}

/// A thread that is in code which it is to leave.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ThreadInside {
    /// If it does not execute the code: the thread with whose stack the address was found, which others may use, too.
    pub(crate) tid: i32,
    /// Where in the code.
    pub(crate) at: LiveAddr,
    /// Whether it executes the code; if not, its stack holds the address, and it may return there.
    pub(crate) is_executing: bool,
}

/// A process whose threads are all stopped. The head of this file says what dropping it does.
pub(crate) struct Stopped<'p> {
    process: &'p Process,
    pub(crate) tracees: HashMap<i32, Tracee>,
    since: Instant,
    /// Whether dropping it leaves the threads as they are.
    stays_traced: bool,
    /// Whether dropping it kills the process, which must not run as it is.
    kills_on_drop: bool,
    /// Makes ptrace calls about its threads.
    calls: ThreadCalls,
    /// Its mappings, once they have been read: no thread maps memory meanwhile.
    maps: OnceCell<Vec<Mapping>>,
    /// Where its stacks are, according to its mappings.
    stacks: OnceCell<StackRanges>,
    not_send: PhantomData<*const ()>,
}

impl<'p> Stopped<'p> {
    /// A process of which no thread has been stopped yet.
    pub(crate) fn none_yet(process: &'p Process, stays_traced: bool) -> Stopped<'p> {
        Stopped {
            process,
            tracees: HashMap::new(),
            since: Instant::now(),
            stays_traced,
            kills_on_drop: false,
            calls: ThreadCalls::Own,
            maps: OnceCell::new(),
            stacks: OnceCell::new(),
            not_send: PhantomData,
        }
    }

    /// A process that its follower has stopped for us: these are its threads.
    pub(crate) fn leased(
        process: &'p Process,
        tids: impl IntoIterator<Item = i32>,
        lease: Rc<Lease>,
    ) -> Stopped<'p> {
        let mut stopped = Stopped::none_yet(process, false);
        let tids = tids.into_iter();
        stopped.tracees = tids.map(|tid| (tid, Tracee::Stopped(0))).collect();
        stopped.calls = ThreadCalls::Leased(lease);
        stopped
    }

    /// A process whose only thread is traced by this thread, and stopped.
    pub(crate) fn adopt(process: &'p Process) -> Stopped<'p> {
        Stopped::adopt_with(process, false)
    }

    /// The same for a process that stays traced.
    pub(crate) fn adopt_traced(process: &'p Process) -> Stopped<'p> {
        Stopped::adopt_with(process, true)
    }

    fn adopt_with(process: &'p Process, stays_traced: bool) -> Stopped<'p> {
        let mut stopped = Stopped::none_yet(process, stays_traced);
        stopped.tracees.insert(process.pid(), Tracee::Stopped(0));
        stopped
    }

    /// Makes dropping it kill the process, unless it is released first. It is not detached: a process that this
    /// thread has traced since before its exec is killed when this thread ends, if not before.
    pub(crate) fn killed_on_drop(mut self) -> Stopped<'p> {
        self.kills_on_drop = true;
        self
    }

    pub(crate) fn process(&self) -> &'p Process {
        self.process
    }

    /// The threads that are stopped.
    pub(crate) fn tids(&self) -> impl Iterator<Item = i32> {
        let stopped =
            |(&tid, tracee): (&i32, &Tracee)| matches!(tracee, Tracee::Stopped(_)).then_some(tid);
        self.tracees.iter().filter_map(stopped)
    }

    /// Makes ptrace calls about its threads.
    pub(crate) fn calls(&self) -> &ThreadCalls {
        &self.calls
    }

    /// Checks that the lease is not lost, if the process is lent: once it is, the process may run, and nothing is known
    /// about its threads.
    ///
    /// # Errors
    ///
    /// [`ProcessError::FollowerLost`], [`ProcessError::FollowerSilent`].
    pub(crate) fn refuse_lost(&self) -> Result<()> {
        let lost = |errno: Errno| {
            Error::of_call(self.process.pid(), Operation::StopByFollower, errno.into())
        };
        self.calls.loss().map_or(Ok(()), |errno| Err(lost(errno)))
    }

    /// Returns its mappings, which are read once.
    ///
    /// # Errors
    ///
    /// If it has exited, or they may not be read.
    pub(crate) fn maps(&self) -> Result<&[Mapping]> {
        if let Some(maps) = self.maps.get() {
            return Ok(maps);
        }
        let maps = read_maps(self.process)?;
        Ok(self.maps.get_or_init(|| maps))
    }

    fn stacks(&self, memory: &impl ReadMemory) -> &StackRanges {
        let stacks = || {
            let stacks = self
                .maps()
                .map_or_else(|_| StackRanges::anywhere(), StackRanges::among);
            stacks.up_to_blocks(self.control_blocks(memory))
        };
        self.stacks.get_or_init(stacks)
    }

    fn control_blocks(&self, memory: &impl ReadMemory) -> impl Iterator<Item = LiveAddr> {
        let blocks = self.tids().map(|tid| self.control_block(tid, memory));
        blocks.filter_map(|block| block.ok()?)
    }

    /// Returns the control block of a thread, if it has one: the base of `fs` is its address, with which it begins.
    ///
    /// # Errors
    ///
    /// If the registers of the thread cannot be read.
    pub(crate) fn control_block(
        &self,
        tid: i32,
        memory: &impl ReadMemory,
    ) -> std::result::Result<Option<LiveAddr>, Errno> {
        let base = self.calls.registers(tid)?.fs_base;
        let first = memory.read_word(LiveAddr(base)).ok();
        Ok((first == Some(base)).then_some(LiveAddr(base)))
    }

    /// Returns whether a thread executes one of these ranges of code, or may return there: from a signal handler, for one. True if
    /// the process may run.
    pub(crate) fn leads_into(&self, memory: &impl ReadMemory, code: &[Range<u64>]) -> bool {
        let inside = self.thread_inside(memory, code);
        inside.is_some() || self.calls.is_lost()
    }

    /// Returns a stopped thread that executes one of these ranges of code, or may return there.
    pub(crate) fn thread_inside(
        &self,
        memory: &impl ReadMemory,
        code: &[Range<u64>],
    ) -> Option<ThreadInside> {
        let mut search = self.stacks(memory).search(memory);
        self.tids().find_map(|tid| {
            let registers = self.calls.registers(tid).ok()?;
            let is_executing = code.iter().any(|code| code.contains(&registers.rip));
            let at = if is_executing {
                LiveAddr(registers.rip)
            } else {
                search.lead_into(LiveAddr(registers.rsp), code)?
            };
            Some(ThreadInside {
                tid,
                at,
                is_executing,
            })
        })
    }

    /// Moves threads that are stopped at an instruction of `moves`, or return to one from a signal handler, to where
    /// they are to continue.
    ///
    /// # Errors
    ///
    /// If the registers of a thread, or its stack, cannot be written. Other threads may have been moved then, which
    /// does no harm.
    pub(crate) fn move_threads(&self, memory: &ProcessMemory, moves: &Moves) -> Result<()> {
        if moves.is_empty() {
            return Ok(());
        }
        let pid = self.process.pid();
        let failed = |errno: Errno| Error::of_call(pid, Operation::Attach, errno.into());
        let mut stack_memory = self.memory(memory)?;
        let mut search = self.stacks(memory).search(memory);
        for tid in self.tids() {
            let mut registers = match self.calls.registers(tid) {
                // It was killed meanwhile.
                Err(Errno::ESRCH) => continue,
                registers => registers.map_err(failed)?,
            };
            for (at, counter) in search.contexts(LiveAddr(registers.rsp)) {
                if let Some(to) = moves.of_address(counter) {
                    let written = stack_memory.write_code(at, &to.to_le_bytes());
                    written
                        .map_err(|source| Error::of_write(pid, MemoryPart::Stack, at, source))?;
                }
            }
            if let Some(to) = moves.of_address(registers.rip) {
                registers.rip = to;
                self.calls.set_registers(tid, registers).map_err(failed)?;
            }
        }
        self.refuse_lost()
    }

    /// Returns the memory of the process, which no thread of it changes now.
    ///
    /// # Errors
    ///
    /// If all its threads have been killed meanwhile; if it is lent, and `memory` is that of a program which it ran
    /// before.
    pub(crate) fn memory<'m>(&self, memory: &'m ProcessMemory) -> Result<StoppedMemory<'m>> {
        if let ThreadCalls::Leased(lease) = &self.calls {
            // Its follower does not write through `memory`.
            lease.refuse_outdated(self.process, memory)?;
        }
        match self.tids().next() {
            Some(tid) => Ok(StoppedMemory::new(memory, tid, self.calls.clone())),
            None => Err(Error::of_process(self.process.pid(), ProcessError::Exited)),
        }
    }

    /// How long the process has been stopped, at most.
    pub(crate) fn stop_time(&self) -> Duration {
        self.since.elapsed()
    }

    /// Leaves the threads as they are, traced and stopped; returns which they are.
    pub(crate) fn keep_stopped(mut self) -> Vec<i32> {
        self.count_stop_time();
        let stopped = |(tid, tracee)| {
            matches!(tracee, Tracee::Stopped(_) | Tracee::Foreign(_)).then_some(tid)
        };
        self.tracees.drain().filter_map(stopped).collect()
    }

    /// Leaves its threads as they are, traced and stopped; returns which they are. Processes that it has started are resumed and
    /// detached.
    pub(crate) fn keep_threads(mut self) -> Vec<i32> {
        let is_foreign = |tracee: &Tracee| matches!(tracee, Tracee::Foreign(_));
        let (foreign, threads) = self
            .tracees
            .drain()
            .partition(|(_, tracee)| is_foreign(tracee));
        self.tracees = threads;
        self.detach_each(foreign);
        self.keep_stopped()
    }

    /// Leaves one thread as it is, traced and stopped; resumes and detaches all others, as [`Stopped::release`] does.
    pub(crate) fn keep_only(mut self, tid: i32) {
        self.tracees.remove(&tid);
        if self.tracees.is_empty() {
            self.count_stop_time();
        }
        self.detach();
    }

    /// Resumes and detaches every thread, and delivers the signal that each was stopped with.
    pub(crate) fn release(mut self) {
        self.detach();
    }

    /// Adds the time since it was stopped to that of the process; a lease does that itself.
    fn count_stop_time(&self) {
        if let ThreadCalls::Own = self.calls {
            self.process.stop_time().add(self.since.elapsed());
        }
    }

    fn detach(&mut self) {
        if self.tracees.is_empty() {
            return;
        }
        if let ThreadCalls::Leased(lease) = &self.calls {
            self.tracees.clear();
            lease.resume_all();
            return;
        }
        let tracees = std::mem::take(&mut self.tracees);
        self.detach_each(tracees);
        self.count_stop_time();
    }

    fn detach_each(&self, tracees: HashMap<i32, Tracee>) {
        for (tid, tracee) in tracees {
            let (Tracee::Stopped(signal) | Tracee::Foreign(signal)) = tracee else {
                continue;
            };
            if ptrace::detach(tid, signal) == Err(Errno::ESRCH) {
                // Killed while it was stopped.
                reap_if_exited(self.process, tid);
            }
        }
    }
}

impl Drop for Stopped<'_> {
    fn drop(&mut self) {
        if self.stays_traced {
            return;
        }
        if self.kills_on_drop && !self.tracees.is_empty() {
            // Not detached, so that it does not run if this fails: the kernel kills it when this thread ends.
            let _ = kill(Pid::from_raw(self.process.pid()), Signal::SIGKILL);
        } else {
            // A thread that has not stopped cannot be detached; the kernel does it when this thread ends.
            self.detach();
        }
    }
}
