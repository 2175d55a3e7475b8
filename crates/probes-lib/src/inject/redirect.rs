//! Sends a thread of a process that stands on a detour ([`crate::inject::remote_call`]).

use std::ops::Range;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::ptrace as nix_ptrace;
use nix::unistd::Pid;

use crate::address::LiveAddr;
use crate::error::{ErrorKind, Operation, Result};
use crate::inject::remote_call::{NO_CALL, Registers};
use crate::memory::ReadMemory;
use crate::process::Process;
use crate::sys::ptrace::{self, Wait};
use crate::trace::stop::{Stopped, Tracer};

/// How long a detour takes, about.
const RUNNING: Duration = Duration::from_micros(20);

/// The code segment of 64-bit programs.
const USER_64: u64 = 0x33;

impl Stopped<'_> {
    /// A thread that can be sent on a detour, and its registers: one that is in no system call if
    /// there is one.
    ///
    /// # Errors
    ///
    /// As of [`Stopped::refuse_filtered`].
    pub(crate) fn pick_thread(&self, memory: &impl ReadMemory) -> Result<Option<(i32, Registers)>> {
        let mut found = None;
        for tid in self.tids() {
            // One that is about to get a signal has to get it first.
            if !matches!(ptrace::peek(tid), Wait::Trapped | Wait::Suspended) {
                continue;
            }
            let Ok(registers) = registers(tid) else {
                continue;
            };
            let is_free = registers.orig_rax == NO_CALL;
            let is_wanted = found.is_none() || is_free;
            if !is_wanted || is_in_sequence(tid, registers.rip, memory) {
                continue;
            }
            if self.process().refuse_filtered([tid]).is_err() {
                continue;
            }
            found = Some((tid, registers));
            if is_free {
                break;
            }
        }
        if found.is_none() {
            self.refuse_filtered()?;
        }
        Ok(found)
    }

    /// Makes sure that a thread can be made to map and unmap memory.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::SeccompFiltered`] if each has forbidden itself system calls: the kernel may kill the process
    /// for those.
    pub(crate) fn refuse_filtered(&self) -> Result<()> {
        self.process().refuse_filtered(self.tids())
    }

    /// A thread, and its registers: the only one of a process that has not begun.
    pub(crate) fn first(&self) -> Option<(i32, Registers)> {
        let tid = self.tids().next()?;
        Some((tid, registers(tid).ok()?))
    }
}

impl Tracer<'_> {
    /// Sends a thread to `entry`, and stops all threads again once it is out of `detour`; says whether a
    /// signal has come to it there. Then it stands where it was before, as if it had never left: the
    /// handler of a signal is to interrupt the system call that it was in.
    ///
    /// # Errors
    ///
    /// As of [`Tracer::stop`]. The thread comes back by itself.
    pub(crate) fn send<'p>(
        &self,
        process: &'p Process,
        stopped: Stopped<'p>,
        (tid, before): (i32, Registers),
        entry: LiveAddr,
        detour: &Range<u64>,
        limit: Duration,
    ) -> Result<(Stopped<'p>, bool)> {
        let failed =
            |errno: Errno| ErrorKind::system(process.pid(), Operation::InjectCall, errno.into());
        set_registers(tid, &before.redirected_to(entry)).map_err(failed)?;
        let mut stopped = stopped;
        let begun = Instant::now();
        let mut pause = RUNNING;
        loop {
            let code = std::slice::from_ref(detour);
            stopped = self.run_within(process, stopped, vec![tid], code, pause, limit)?;
            // One that does not stand is gone, and may not have been there.
            let Ok(now) = registers(tid) else {
                return Ok((stopped, true));
            };
            let is_there = detour.contains(&now.rip);
            let is_interrupted = is_there && matches!(ptrace::peek(tid), Wait::Signal(_));
            if is_interrupted || now.has_returned(&before) {
                // If it has been killed, it needs none.
                let _ = set_registers(tid, &before);
            }
            if is_interrupted || !is_there {
                return Ok((stopped, is_interrupted));
            }
            if begun.elapsed() > limit {
                let pid = process.pid();
                return Err(ErrorKind::KeepsChanging { pid }.into());
            }
            // Interrupted at once, it would stop before its first instruction.
            pause *= 2;
        }
    }

    /// Lets threads that are in `code` run for `pause`, and stops all again. All others stand meanwhile:
    /// unless nobody is there, but in the handler of a signal, or about to receive one.
    ///
    /// # Errors
    ///
    /// As of [`Tracer::stop`].
    pub(crate) fn run_until_out<'p>(
        &self,
        process: &'p Process,
        stopped: Stopped<'p>,
        code: &[Range<u64>],
        pause: Duration,
        limit: Duration,
    ) -> Result<Stopped<'p>> {
        let tids = stopped.tids().filter(|tid| is_within(*tid, code)).collect();
        self.run_within(process, stopped, tids, code, pause, limit)
    }

    /// Lets these threads run for a while, which are in `code`, and stops all again. If there is none,
    /// or one that is not, or is about to receive a signal, all go on, as the handlers of signals may
    /// wait for others.
    fn run_within<'p>(
        &self,
        process: &'p Process,
        stopped: Stopped<'p>,
        mut tids: Vec<i32>,
        code: &[Range<u64>],
        pause: Duration,
        limit: Duration,
    ) -> Result<Stopped<'p>> {
        let is_free =
            |tid: &i32| is_within(*tid, code) && !matches!(ptrace::peek(*tid), Wait::Signal(_));
        let others_too = tids.is_empty() || !tids.iter().all(is_free);
        match others_too {
            true => drop(stopped.release()),
            false => drop(stopped.leave()),
        }
        tids.retain(|_| !others_too);
        for tid in &tids {
            ptrace::resume(*tid, 0);
        }
        let begun = Instant::now();
        while begun.elapsed() < pause {
            std::thread::sleep(if others_too { pause } else { RUNNING });
            // A stop that begins or ends is told before the next instruction, and may be again and
            // again.
            for tid in &tids {
                let is_told = matches!(ptrace::peek(*tid), Wait::Trapped | Wait::Suspended);
                if is_told && is_within(*tid, code) {
                    ptrace::resume(*tid, 0);
                }
            }
        }
        self.stop(process, limit)
    }
}

/// Whether a thread that stands is in `code`.
fn is_within(tid: i32, code: &[Range<u64>]) -> bool {
    let at = ptrace::program_counter(tid);
    at.is_ok_and(|at| code.iter().any(|code| code.contains(&at)))
}

/// Whether a thread that stands at `at` is in a restartable sequence (rseq(2)): it has to begin that anew
/// when it goes on, which the kernel would not see to if it had been elsewhere.
fn is_in_sequence(tid: i32, at: u64, memory: &impl ReadMemory) -> bool {
    // struct rseq_cs: version and flags, where it begins, and how long it is.
    let mut sequence = [0; 24];
    let mut place = [0; 8];
    let is_read = ptrace::sequence_place(tid).is_some_and(|told| {
        let told = memory.read(told, &mut place);
        let is_any = told.is_ok() && place != [0; 8];
        is_any
            && memory
                .read(LiveAddr(u64::from_le_bytes(place)), &mut sequence)
                .is_ok()
    });
    let number = |at: usize| sequence[at..][..8].try_into().map_or(0, u64::from_le_bytes);
    is_read && at.wrapping_sub(number(8)) < number(16)
}

fn registers(tid: i32) -> Result<Registers, Errno> {
    let all = nix_ptrace::getregs(Pid::from_raw(tid))?;
    if all.cs != USER_64 {
        return Err(Errno::ENOTSUP);
    }
    Ok(Registers {
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

fn set_registers(tid: i32, registers: &Registers) -> Result<(), Errno> {
    let tid = Pid::from_raw(tid);
    let mut all = nix_ptrace::getregs(tid)?;
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
    nix_ptrace::setregs(tid, all)
}
