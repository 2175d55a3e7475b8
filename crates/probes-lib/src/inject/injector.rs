//! [`Injector`]: makes a thread of a stopped process run system calls, and checks what they did.

use std::ops::Range;
use std::time::Duration;

use crate::address::LiveAddr;
use crate::error::{Error, MemoryPart, ObserveError, Operation, ProcessError, Result};
use crate::inject::code_cave::CodeCave;
use crate::inject::injected_call::{self, CallRegisters, InjectedCall, PlacedCall};
use crate::inject::nesting_handlers::NestingHandlers;
use crate::inject::permissions::Permissions;
use crate::inject::redirect::{self, Left, RedirectTarget};
use crate::memory::{ReadMemory, WriteMemory};
use crate::process::Process;
use crate::process::maps::Mapping;
use crate::process::memory::ProcessMemory;
use crate::trace::at_exec::AtExec;
use crate::trace::stopped::{Stopped, ThreadInside};
use crate::trace::time_budget::TimeBudget;
use crate::trace::tracer::Tracer;

/// How long threads run, the first time, until it is checked whether they have left some code. It grows: if a thread
/// were stopped again at once each time, it might never get a processor, and stay where it is.
const PAUSE: Duration = Duration::from_micros(100);

/// Injects system calls into a process.
#[derive(Clone, Copy)]
pub(crate) struct Injector<'i> {
    pub(crate) tracer: &'i Tracer<'i>,
    pub(crate) process: &'i Process,
    pub(crate) memory: &'i ProcessMemory,
    /// Where the code that makes the calls is written.
    pub(crate) code_cave: CodeCave,
    /// How long each stop may take, each run of calls, and the search for a thread that can make them.
    pub(crate) limit: Duration,
    /// Whether seccomp filters that cannot be read are taken to allow everything.
    pub(crate) despite_seccomp: bool,
    pub(crate) mode: RedirectMode<'i>,
}

/// Why calls have not done what they were to do.
enum InjectionFailure {
    /// Something else is mapped where memory was to be mapped.
    Occupied,
    /// The kernel has refused this one.
    Refused(InjectedCall),
}

/// How a thread is redirected to the code.
#[derive(Clone, Copy)]
pub(crate) enum RedirectMode<'i> {
    /// A thread of a running process: after the calls it may execute a little of its own code.
    RunningProcess,
    /// The only thread of a program that has not begun: it stops exactly where it was.
    BeforeStart(&'i AtExec),
}

impl<'i> Injector<'i> {
    /// Returns an injector that writes its code to another place.
    pub(crate) fn at(&self, code_cave: CodeCave) -> Injector<'i> {
        Injector { code_cave, ..*self }
    }

    /// Makes a thread run system calls, no more than fit in the code cave.
    ///
    /// # Errors
    ///
    /// [`ProcessError::KeepsChanging`] if the process has mapped something else where memory was to be mapped;
    /// [`ObserveError::MapRefused`] if a call has not changed the mappings as it was to;
    /// [`ObserveError::NoThreadToRedirect`] if no thread can be redirected in time, or signals interrupt the calls
    /// again and again; and see [`Permissions::check_some_thread_may_call`] and [`Tracer::run_at`].
    pub(crate) fn run(&self, stopped: Stopped<'i>, calls: &[InjectedCall]) -> Result<Stopped<'i>> {
        let mut stopped = stopped;
        let mut calls = calls.to_vec();
        let (mut budget, mut handlers) = (TimeBudget::new(self.limit), NestingHandlers::default());
        let before = if calls.iter().any(InjectedCall::unmaps) {
            stopped.maps()?.to_vec()
        } else {
            Vec::new()
        };
        loop {
            let left;
            (stopped, left) =
                self.try_to_run(stopped, &calls, false, &mut budget, &mut handlers)?;
            let maps = stopped.maps()?;
            let Some(failed) = Injector::check(maps, &calls, &before) else {
                return Ok(stopped);
            };
            calls = not_done(&calls, maps, &before);
            // If a signal has interrupted the thread, which had to receive it first, try again.
            let is_interrupted = left == Left::Interrupted;
            match failed {
                InjectionFailure::Occupied => {
                    let pid = self.process.pid();
                    return Err(Error::of_process(pid, ProcessError::KeepsChanging));
                }
                InjectionFailure::Refused(call) if !is_interrupted => {
                    return Err(self.refused(stopped, &calls, call));
                }
                InjectionFailure::Refused(_) if budget.is_spent() => {
                    let pid = self.process.pid();
                    return Err(Error::of_process(pid, ObserveError::NoThreadToRedirect));
                }
                InjectionFailure::Refused(_) => {
                    let pause = handlers.pause(&stopped);
                    if !pause.is_zero() {
                        stopped = self.stop_again(stopped, pause)?;
                    }
                }
            }
        }
    }

    /// Returns the error for one of `calls`, which has not done what it was to do. To learn why, a thread
    /// makes the calls again.
    fn refused(&self, stopped: Stopped<'i>, calls: &[InjectedCall], call: InjectedCall) -> Error {
        let result = self.result_of(stopped, calls, call).ok().flatten();
        // The kernel returns errors as -4095 to -1.
        let errno = result.and_then(|result| i32::try_from((result as i64).wrapping_neg()).ok());
        let errno = errno.filter(|errno| (1..4096).contains(errno));
        let lens = calls.iter().filter(|call| call.maps());
        let kind = ObserveError::MapRefused {
            call: call.name(),
            errno,
            needed: lens.map(|call| call.arguments[1]).sum(),
        };
        Error::of_process(self.process.pid(), kind)
    }

    /// Makes a thread run `calls` again, `call` as the last of them, and returns its result; `None` if it could not be
    /// read. The code has all of them, not only `call`: if we are killed, it is from the code that another tool learns
    /// what is mapped.
    fn result_of(
        &self,
        mut stopped: Stopped<'i>,
        calls: &[InjectedCall],
        call: InjectedCall,
    ) -> Result<Option<u64>> {
        /// A thread lingers for a limited time, in which we may get no processor.
        const TRIES: usize = 5;
        let others = calls.iter().filter(|other| **other != call);
        let calls: Vec<_> = others.copied().chain([call]).collect();
        let mut handlers = NestingHandlers::default();
        for _ in 0..TRIES {
            let left;
            let mut budget = TimeBudget::new(self.limit);
            (stopped, left) = self.try_to_run(stopped, &calls, true, &mut budget, &mut handlers)?;
            if let Left::Lingering(result) = left {
                return Ok(Some(result));
            }
        }
        Ok(None)
    }

    /// Checks that some thread may make all these calls.
    ///
    /// # Errors
    ///
    /// See [`Permissions::check_some_thread_may_call`].
    pub(crate) fn refuse_forbidden(
        &self,
        stopped: &Stopped<'_>,
        calls: &[PlacedCall],
    ) -> Result<()> {
        let permissions = Permissions::of(self.process, self.despite_seccomp);
        permissions.check_some_thread_may_call(stopped, calls)
    }

    /// Waits until a thread can run system calls, and makes it run them once; if it `lingers`, it stays in their code
    /// afterwards. Returns how it has left the code.
    fn try_to_run(
        &self,
        stopped: Stopped<'i>,
        calls: &[InjectedCall],
        lingers: bool,
        budget: &mut TimeBudget,
        handlers: &mut NestingHandlers,
    ) -> Result<(Stopped<'i>, Left)> {
        let pid = self.process.pid();
        let range = self.code_cave.range();
        let mut stopped = stopped;
        let permissions = Permissions::of(self.process, self.despite_seccomp);
        let placed: Vec<PlacedCall> = injected_call::placed(calls, self.code_cave.at).collect();
        let mut pause = PAUSE;
        let thread = loop {
            if let RedirectMode::BeforeStart(_) = self.mode {
                break stopped
                    .first()
                    .ok_or(Error::of_process(pid, ProcessError::Exited))?;
            }
            let thread = stopped.pick_thread(self.memory, &permissions, &placed)?;
            let is_inside = self.may_be_inside(&stopped);
            match thread {
                Some(found) if !is_inside => break found,
                _ if budget.is_spent() => {
                    stopped.refuse_lost()?;
                    return Err(Error::of_process(pid, ObserveError::NoThreadToRedirect));
                }
                // Perhaps each thread had a pending signal: stopped again, one may have none.
                None if !is_inside => {
                    let pause = handlers.pause(&stopped);
                    stopped = self.stop_again(stopped, pause)?;
                }
                // Wait while a thread still runs the calls of a tool that was killed.
                _ => {
                    let (ranges, limit) = (std::slice::from_ref(&range), self.limit);
                    stopped = self.tracer.run_threads_within(
                        self.process,
                        stopped,
                        ranges,
                        pause,
                        limit,
                    )?;
                    pause = (pause * 2).min(limit / 8);
                }
            }
        };
        self.redirect(stopped, thread, calls, lingers)
    }

    /// Lets all threads run for `pause`, at least, and stops them again.
    fn stop_again(&self, stopped: Stopped<'i>, pause: Duration) -> Result<Stopped<'i>> {
        stopped.release();
        if !pause.is_zero() {
            std::thread::sleep(pause);
        }
        self.tracer.stop(self.process, self.limit)
    }

    /// Makes this thread run a system call, if it can do so now and its seccomp filters allow the call;
    /// returns whether it has.
    ///
    /// # Errors
    ///
    /// If the process cannot be stopped again, or the code cannot be written.
    pub(crate) fn run_in(
        &self,
        mut stopped: Stopped<'i>,
        tid: i32,
        call: InjectedCall,
    ) -> Result<(Stopped<'i>, bool)> {
        /// A second one, because the thread may have to receive a signal first.
        const TRIES: usize = 2;
        let permissions = Permissions::of(self.process, self.despite_seccomp);
        let placed: Vec<PlacedCall> = injected_call::placed(&[call], self.code_cave.at).collect();
        let mut tries = 0;
        loop {
            tries += 1;
            let is_free = !self.may_be_inside(&stopped);
            let thread_calls = stopped.calls();
            let before = redirect::redirectable(thread_calls, tid, self.memory)
                .filter(|_| is_free && permissions.allow(thread_calls, tid, &placed));
            if let Some(before) = before {
                let left;
                (stopped, left) = self.redirect(stopped, (tid, before), &[call], false)?;
                // So that the next call need not look for threads that execute this one.
                self.clear(&stopped)?;
                if left != Left::Interrupted {
                    return Ok((stopped, true));
                }
            }
            if tries == TRIES {
                return Ok((stopped, false));
            }
            stopped = self.stop_again(stopped, Duration::ZERO)?;
        }
    }

    /// Makes this thread, which has these registers, run system calls once, as [`Injector::try_to_run`] does.
    fn redirect(
        &self,
        stopped: Stopped<'i>,
        (tid, before): (i32, CallRegisters),
        calls: &[InjectedCall],
        lingers: bool,
    ) -> Result<(Stopped<'i>, Left)> {
        let pid = self.process.pid();
        let code = injected_call::code(calls, &before, lingers);
        let lingers_at = lingers.then(|| injected_call::lingers_at(calls, self.code_cave.at));
        let (mark, code) = code.split_at(injected_call::MARK_LEN);
        let entry = injected_call::entry(self.code_cave.at);
        self.write(&stopped, self.code_cave.at, mark)?;
        self.write(&stopped, entry, code)?;
        match self.mode {
            RedirectMode::RunningProcess => {
                let is_done = || calls.iter().all(|call| may_be_done(call, self.memory));
                let can_be_seen = calls.iter().any(|call| call.maps() || call.unmaps());
                let to = RedirectTarget {
                    entry,
                    lingers_at,
                    range: self.code_cave.range(),
                    is_done: can_be_seen.then_some(&is_done),
                };
                let thread = (tid, before);
                self.tracer
                    .run_at(self.process, stopped, thread, &to, self.limit)
            }
            RedirectMode::BeforeStart(at_exec) => {
                let back = lingers_at.unwrap_or(LiveAddr(before.rip));
                let stopped =
                    at_exec.run_round_trip(self.tracer, stopped, self.memory, entry, back);
                let stopped = stopped.map_err(|reason| reason.error(pid, Operation::InjectCall))?;
                let result = lingers_at.and_then(|_| redirect::result(stopped.calls(), tid));
                Ok((stopped, result.map_or(Left::AtEnd, Left::Lingering)))
            }
        }
    }

    /// Lets threads run until none executes one of these ranges of code, or may return there. Returns the thread that
    /// still does once they have run for `longest`.
    ///
    /// # Errors
    ///
    /// See [`Tracer::stop`].
    pub(crate) fn wait_until_left(
        &self,
        mut stopped: Stopped<'i>,
        code: &[Range<u64>],
        longest: Duration,
    ) -> Result<std::result::Result<Stopped<'i>, ThreadInside>> {
        // How long threads have been let run, at least.
        let mut ran = Duration::ZERO;
        let mut pause = PAUSE;
        loop {
            let inside = stopped.thread_inside(self.memory, code);
            stopped.refuse_lost()?;
            match inside {
                None => return Ok(Ok(stopped)),
                Some(inside) if ran > longest => return Ok(Err(inside)),
                Some(_) => {}
            }
            let (tracer, limit) = (self.tracer, self.limit);
            stopped = tracer.run_threads_within(self.process, stopped, code, pause, limit)?;
            ran += pause;
            pause = (pause * 2).min(longest / 8);
        }
    }

    /// Returns whether a thread that a killed tool has redirected may still execute the code in the code cave. None
    /// does if there is no code: code is cleared only once no thread executes it.
    fn may_be_inside(&self, stopped: &Stopped<'_>) -> bool {
        let mut code = vec![0; self.code_cave.len as usize];
        let read = self.memory.read(self.code_cave.at, &mut code);
        let is_empty = read.is_ok() && code.iter().all(|&byte| byte == 0);
        !is_empty && stopped.leads_into(self.memory, &[self.code_cave.range()])
    }

    /// Clears the code cave. To be called once calls have been made from there, or no thread is there according to
    /// [`Injector::wait_until_left`].
    pub(crate) fn clear(&self, stopped: &Stopped<'_>) -> Result<()> {
        let entry = injected_call::entry(self.code_cave.at);
        let code = vec![0; self.code_cave.len as usize - injected_call::MARK_LEN];
        self.write(stopped, entry, &code)?;
        self.write(stopped, self.code_cave.at, &[0; injected_call::MARK_LEN])
    }

    /// Returns why calls have failed, according to the mappings after them; `None` if they have not. All threads may
    /// have run meanwhile: what is mapped there now may be neither what the calls have mapped nor what they were to
    /// unmap.
    fn check(
        maps: &[Mapping],
        calls: &[InjectedCall],
        before: &[Mapping],
    ) -> Option<InjectionFailure> {
        for call in calls {
            let range = call.range();
            let overlaps = |it: &Mapping| it.start.0 < range.end && it.end.0 > range.start;
            let is_split_off = |it: &Mapping| (it.start.0..it.end.0) == range;
            let is_missing = call.maps() && !maps.iter().any(|it| call.matches(it));
            if is_missing && maps.iter().any(overlaps) {
                return Some(InjectionFailure::Occupied);
            }
            let is_unsplit = call.splits() && !maps.iter().any(is_split_off);
            let is_left = call.unmaps() && is_left(call, maps, before);
            if is_missing || is_unsplit || is_left {
                return Some(InjectionFailure::Refused(*call));
            }
        }
        None
    }

    fn write(&self, stopped: &Stopped<'_>, at: LiveAddr, bytes: &[u8]) -> Result<()> {
        let mut memory = stopped.memory(self.memory)?;
        memory.write_code(at, bytes).map_err(|source| {
            Error::of_write(self.process.pid(), MemoryPart::InjectedCall, at, source)
        })
    }
}

/// Returns whether the memory that a call maps can be read, or what it unmaps cannot; true for other calls.
fn may_be_done(call: &InjectedCall, memory: &ProcessMemory) -> bool {
    let can_be_read = || memory.read(LiveAddr(call.range().start), &mut [0]).is_ok();
    !(call.maps() || call.unmaps()) || call.maps() == can_be_read()
}

/// Returns whether what a call unmaps is still mapped, as it was `before` the first call.
fn is_left(call: &InjectedCall, maps: &[Mapping], before: &[Mapping]) -> bool {
    let start = call.range().start;
    let was_there = |it: &Mapping| it.start.0 == start && before.contains(it);
    maps.iter().any(was_there)
}

/// Returns those of the calls that are to be made again, because they were interrupted. What one of them has unmapped is
/// not unmapped again: meanwhile, the process may map something there, even the same. Other calls are made again, which
/// does no harm: those that map fail if they have mapped, or map the same anew.
fn not_done(calls: &[InjectedCall], maps: &[Mapping], before: &[Mapping]) -> Vec<InjectedCall> {
    let calls = calls.iter().copied();
    calls
        .filter(|call| !call.unmaps() || is_left(call, maps, before))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::maps;

    #[test]
    fn interrupted_calls_unmap_nothing_twice() {
        let one = "1000-3000 rw-p 00000000 00:00 0 \n";
        let other = "5000-7000 r-xp 00000000 00:00 0 \n";
        let before = maps::parse(format!("{one}{other}").as_bytes());
        let unmaps_one = InjectedCall::unmap(&(0x1000..0x3000), libc::PROT_READ | libc::PROT_WRITE);
        let unmaps_other =
            InjectedCall::unmap(&(0x5000..0x7000), libc::PROT_READ | libc::PROT_EXEC);
        let map = InjectedCall::map(LiveAddr(0x9000), 0x1000, libc::PROT_READ);
        let calls = [unmaps_one, unmaps_other, map];
        assert_eq!(not_done(&calls, &before, &before), calls);
        // After the first call: also if the process maps the same there before the second attempt.
        let after_one = maps::parse(other.as_bytes());
        let left = not_done(&calls, &after_one, &before);
        assert_eq!(left, [unmaps_other, map]);
        assert_eq!(not_done(&left, &before, &before), left);
        assert_eq!(not_done(&calls, &[], &before), [map]);
    }
}
