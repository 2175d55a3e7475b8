//! Redirects a thread of a stopped process to injected code ([`crate::inject::injected_call`]), and lets
//! threads run so that they leave given ranges of code.

use std::ops::Range;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::prctl;

use crate::address::LiveAddr;
use crate::error::{Error, ObserveError, Operation, Result};
use crate::inject::injected_call::{CallRegisters, NO_CALL, PlacedCall};
use crate::inject::permissions::Permissions;
use crate::memory::ReadMemory;
use crate::numbers::u64_at;
use crate::process::Process;
use crate::sys::ptrace::TraceeState;
use crate::trace::stopped::Stopped;
use crate::trace::thread_calls::ThreadCalls;
use crate::trace::tracer::Tracer;

/// About how long injected calls take.
const CALL_TIME: Duration = Duration::from_micros(20);

/// The code segment of 64-bit programs.
const USER_64: u64 = 0x33;

/// How long, at most, it is waited until what injected calls do can be seen, before all threads are stopped again.
const LONGEST_WAIT: Duration = Duration::from_micros(200);

/// Code that a thread is redirected to.
pub(crate) struct RedirectTarget<'t> {
    pub(crate) entry: LiveAddr,
    /// Where the thread lingers at the end, if it does.
    pub(crate) lingers_at: Option<LiveAddr>,
    pub(crate) range: Range<u64>,
    /// Whether the thread has done the work of the code, if that can be seen while it runs.
    pub(crate) is_done: Option<&'t dyn Fn() -> bool>,
}

/// How a thread has left the code that it was redirected to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Left {
    /// By itself.
    AtEnd,
    /// It was moved back from where it lingered; the result of the last system call.
    Lingering(u64),
    /// It was moved back because a signal was sent to it.
    Interrupted,
}

impl Stopped<'_> {
    /// Returns a thread that can be redirected to make these calls, and its registers: one that is in no
    /// system call, if there is one.
    ///
    /// # Errors
    ///
    /// See [`Permissions::check_some_thread_may_call`].
    pub(crate) fn pick_thread(
        &self,
        memory: &impl ReadMemory,
        permissions: &Permissions<'_>,
        calls: &[PlacedCall],
    ) -> Result<Option<(i32, CallRegisters)>> {
        let mut found = None;
        for tid in self.tids() {
            let is_wanted = |it: &CallRegisters| found.is_none() || it.orig_rax == NO_CALL;
            let thread = redirectable(self.calls(), tid, memory).filter(is_wanted);
            let thread = thread.filter(|_| permissions.allow(self.calls(), tid, calls));
            let Some(registers) = thread else {
                continue;
            };
            let is_free = registers.orig_rax == NO_CALL;
            found = Some((tid, registers));
            if is_free {
                break;
            }
        }
        if found.is_none() {
            permissions.check_some_thread_may_call(self, calls)?;
        }
        Ok(found)
    }

    /// Returns the first thread and its registers: the only thread of a process that is stopped
    /// before its first instruction.
    pub(crate) fn first(&self) -> Option<(i32, CallRegisters)> {
        let tid = self.tids().next()?;
        Some((tid, registers(self.calls(), tid).ok()?))
    }
}

/// While this is there, the calling thread does not sleep for 70 µs if it is to sleep for 20 µs. Programs that are started
/// then would have the same timer slack (prctl(2)).
struct ShortSleeps {
    /// What the timer slack was.
    before: Option<i32>,
}

impl ShortSleeps {
    /// Without it, all works as well: so it is no error if the slack cannot be set.
    fn begin() -> ShortSleeps {
        let before = prctl::get_timerslack().ok();
        let set = before.and_then(|_| prctl::set_timerslack(1).ok());
        ShortSleeps {
            before: before.filter(|_| set.is_some()),
        }
    }
}

impl Drop for ShortSleeps {
    fn drop(&mut self) {
        let before = self.before.and_then(|it| u64::try_from(it).ok());
        let _ = before.map(prctl::set_timerslack);
    }
}

/// Until when threads are resumed.
#[derive(Clone, Copy)]
enum Until<'u> {
    /// For this long.
    Over(Duration),
    /// Until this returns true, at most for [`LONGEST_WAIT`].
    Done(&'u dyn Fn() -> bool),
}

impl Tracer<'_> {
    /// Resumes a thread at the entry of the code, and stops all threads again once it has left the code or a signal
    /// was sent to it there, or it is found lingering; returns which. Afterwards the thread is where it
    /// was before, with the registers it had; if a signal was sent, its handler therefore interrupts
    /// the system call that the thread was in.
    ///
    /// # Errors
    ///
    /// See [`Tracer::stop`]; [`ObserveError::CallUnfinished`] if the thread is still in the code after `limit`. Then it
    /// returns from there by itself. [`ObserveError::NotRunning`] if it has executed nothing; then it is where it was.
    pub(crate) fn run_at<'p>(
        &self,
        process: &'p Process,
        stopped: Stopped<'p>,
        (tid, before): (i32, CallRegisters),
        to: &RedirectTarget<'_>,
        limit: Duration,
    ) -> Result<(Stopped<'p>, Left)> {
        let (entry, code) = (to.entry, &to.range);
        let failed =
            |errno: Errno| Error::of_call(process.pid(), Operation::InjectCall, errno.into());
        set_registers(stopped.calls(), tid, &before.redirected_to(entry)).map_err(failed)?;
        let mut stopped = stopped;
        // How long the thread has been let run, at least.
        let mut ran = Duration::ZERO;
        let mut pause = CALL_TIME;
        let mut is_done = to.is_done;
        loop {
            let range = std::slice::from_ref(code);
            let until = match is_done.take() {
                Some(is_done) => Until::Done(is_done),
                None => Until::Over(pause),
            };
            stopped = self.run_within(process, stopped, vec![tid], range, until, limit)?;
            ran += pause;
            let calls = stopped.calls();
            let Ok(now) = registers(calls, tid) else {
                stopped.refuse_lost()?;
                // A thread that is not stopped has exited, perhaps before it ran the code.
                return Ok((stopped, Left::Interrupted));
            };
            let is_there = code.contains(&now.rip);
            let is_interrupted =
                is_there && matches!(calls.peek_state(tid), TraceeState::Signal(_));
            let lingers = to.lingers_at == Some(LiveAddr(now.rip));
            if is_interrupted || lingers || now.has_returned(&before) {
                // A thread that has been killed needs no registers.
                let _ = set_registers(calls, tid, &before);
            }
            if lingers {
                return Ok((stopped, Left::Lingering(now.rax)));
            } else if is_interrupted {
                return Ok((stopped, Left::Interrupted));
            } else if !is_there {
                return Ok((stopped, Left::AtEnd));
            }
            if ran > limit {
                let pid = process.pid();
                if now.rip == entry.0 {
                    let _ = set_registers(calls, tid, &before);
                    return Err(Error::of_process(pid, ObserveError::NotRunning));
                }
                return Err(Error::of_process(pid, ObserveError::CallUnfinished));
            }
            // The pause grows: if the thread were stopped too early each time, it might never
            // execute an instruction.
            pause *= 2;
        }
    }

    /// Resumes the threads that are in `code`, and stops all threads again after `pause`. The
    /// others stay stopped meanwhile. But all threads are resumed if no thread is in `code` itself
    /// (one may be in a signal handler that returns there), or if one in `code` is about to receive
    /// a signal.
    ///
    /// # Errors
    ///
    /// See [`Tracer::stop`].
    pub(crate) fn run_threads_within<'p>(
        &self,
        process: &'p Process,
        stopped: Stopped<'p>,
        code: &[Range<u64>],
        pause: Duration,
        limit: Duration,
    ) -> Result<Stopped<'p>> {
        let calls = stopped.calls();
        let tids = stopped.tids().filter(|tid| is_within(calls, *tid, code));
        let tids = tids.collect();
        self.run_within(process, stopped, tids, code, Until::Over(pause), limit)
    }

    /// Resumes these threads `until` some time, and stops all threads again. If there are none, or one of
    /// them is not in `code` or is about to receive a signal, all threads are resumed, as a signal
    /// handler may wait for other threads.
    fn run_within<'p>(
        &self,
        process: &'p Process,
        stopped: Stopped<'p>,
        mut tids: Vec<i32>,
        code: &[Range<u64>],
        until: Until<'_>,
        limit: Duration,
    ) -> Result<Stopped<'p>> {
        let calls = stopped.calls().clone();
        let can_run_alone = |tid: &i32| {
            is_within(&calls, *tid, code)
                && !matches!(calls.peek_state(*tid), TraceeState::Signal(_))
        };
        let others_too = tids.is_empty() || !tids.iter().all(can_run_alone);
        let kept = Instant::now();
        if others_too {
            stopped.release();
        } else {
            *self.kept.borrow_mut() = stopped.keep_threads().into_iter().collect();
        }
        tids.retain(|_| !others_too);
        for tid in &tids {
            calls.resume(*tid);
        }
        let (pause, is_done) = match until {
            Until::Over(pause) => (pause, None),
            Until::Done(is_done) => (LONGEST_WAIT, Some(is_done)),
        };
        let _short = ShortSleeps::begin();
        let begun = Instant::now();
        while begun.elapsed() < pause && !is_done.is_some_and(|is_done| is_done()) {
            std::thread::sleep(if others_too { pause } else { CALL_TIME });
            // A group stop that begins or ends is reported before the next instruction, perhaps
            // repeatedly.
            for tid in &tids {
                let is_reported = matches!(
                    calls.peek_state(*tid),
                    TraceeState::EventStopped | TraceeState::GroupStopped
                );
                if is_reported && is_within(&calls, *tid, code) {
                    calls.resume(*tid);
                }
            }
        }
        if let (false, ThreadCalls::Own) = (others_too, &calls) {
            process.stop_time().add(kept.elapsed());
        }
        self.stop(process, limit)
    }
}

/// Returns the registers of a stopped thread if it can be redirected now.
pub(crate) fn redirectable(
    calls: &ThreadCalls,
    tid: i32,
    memory: &impl ReadMemory,
) -> Option<CallRegisters> {
    // A thread with a pending signal has to receive it first.
    if !matches!(
        calls.peek_state(tid),
        TraceeState::EventStopped | TraceeState::GroupStopped
    ) {
        return None;
    }
    let registers = registers(calls, tid).ok()?;
    (!is_in_sequence(calls, tid, registers.rip, memory)).then_some(registers)
}

/// Whether a stopped thread is in `code`; true, too, if the lease is lost, because the thread may run then.
fn is_within(calls: &ThreadCalls, tid: i32, code: &[Range<u64>]) -> bool {
    let registers = calls.registers(tid);
    let is_inside = |at: u64| code.iter().any(|code| code.contains(&at));
    registers.is_ok_and(|registers| is_inside(registers.rip)) || calls.is_lost()
}

/// Whether a thread that is stopped at `at` is in a restartable sequence (rseq(2)). When it is resumed,
/// it has to restart the sequence; the kernel would not make it do so after injected code.
fn is_in_sequence(calls: &ThreadCalls, tid: i32, at: u64, memory: &impl ReadMemory) -> bool {
    // struct rseq_cs: version and flags, start, length.
    let sequence = || {
        let pointer = calls.rseq_cs_address(tid)?;
        let sequence = memory.read_word(pointer).ok().filter(|place| *place != 0)?;
        let mut bytes = [0; 24];
        memory.read(LiveAddr(sequence), &mut bytes).ok()?;
        Some((u64_at(&bytes, 8)?, u64_at(&bytes, 16)?))
    };
    sequence().is_some_and(|(start, len)| at.wrapping_sub(start) < len)
}

/// Returns what the last system call of a stopped thread has returned.
pub(crate) fn result(calls: &ThreadCalls, tid: i32) -> Option<u64> {
    registers(calls, tid).ok().map(|registers| registers.rax)
}

fn registers(calls: &ThreadCalls, tid: i32) -> Result<CallRegisters, Errno> {
    let all = calls.registers(tid)?;
    if all.cs != USER_64 {
        return Err(Errno::ENOTSUP);
    }
    Ok(CallRegisters {
        rax: all.rax,
        rcx: all.rcx,
        rdx: all.rdx,
        rsi: all.rsi,
        rdi: all.rdi,
        r8: all.r8,
        r9: all.r9,
        r10: all.r10,
        r11: all.r11,
        rip: all.rip,
        orig_rax: all.orig_rax,
    })
}

fn set_registers(calls: &ThreadCalls, tid: i32, registers: &CallRegisters) -> Result<(), Errno> {
    let mut all = calls.registers(tid)?;
    all.rax = registers.rax;
    all.rcx = registers.rcx;
    all.rdx = registers.rdx;
    all.rsi = registers.rsi;
    all.rdi = registers.rdi;
    all.r8 = registers.r8;
    all.r9 = registers.r9;
    all.r10 = registers.r10;
    all.r11 = registers.r11;
    all.rip = registers.rip;
    all.orig_rax = registers.orig_rax;
    calls.set_registers(tid, all)
}
