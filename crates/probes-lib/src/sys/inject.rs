//! Sends a thread of a process that stands on a detour ([`crate::observe::detour`]).

use std::ops::Range;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::ptrace as nix_ptrace;
use nix::unistd::Pid;

use crate::error::{ErrorKind, Result};
use crate::observe::detour::Registers;
use crate::process::Process;
use crate::sys::ptrace::{self, Wait};
use crate::sys::threads::{Stopped, Tracer};

/// How long a detour takes, about.
const RUNNING: Duration = Duration::from_micros(20);

/// The code segment of 64-bit programs.
const USER_64: u64 = 0x33;

impl Stopped<'_> {
    /// A thread that can be sent on a detour, and its registers: one that is in no system call if
    /// there is one.
    pub(crate) fn traveller(&self) -> Option<(i32, Registers)> {
        let mut found = None;
        for tid in self.tids() {
            // One that is about to get a signal has to get it first.
            if !matches!(ptrace::peek(tid), Wait::Trapped | Wait::Suspended) {
                continue;
            }
            let Ok(registers) = registers(tid) else {
                continue;
            };
            let is_free = registers.orig_rax as i64 == -1;
            if found.is_none() || is_free {
                found = Some((tid, registers));
            }
            if is_free {
                break;
            }
        }
        found
    }

    /// A thread, and its registers: the only one of a process that has not begun.
    pub(crate) fn first(&self) -> Option<(i32, Registers)> {
        let tid = self.tids().next()?;
        Some((tid, registers(tid).ok()?))
    }

    /// Whether a thread is in code that it is not to be in.
    pub(crate) fn is_within(&self, code: &Range<u64>) -> bool {
        let mut at = self.tids().map(ptrace::program_counter);
        at.any(|at| at.is_ok_and(|at| code.contains(&at)))
    }
}

impl Tracer<'_> {
    /// Sends a thread to `entry`, and stops all threads again once it is out of `detour`.
    ///
    /// # Errors
    ///
    /// As of [`Tracer::stop`]. The thread comes back by itself.
    pub(crate) fn send<'p>(
        &self,
        process: &'p Process,
        stopped: Stopped<'p>,
        tid: i32,
        entry: u64,
        detour: &Range<u64>,
        limit: Duration,
    ) -> Result<Stopped<'p>> {
        depart(tid, entry).map_err(|errno| ErrorKind::System {
            pid: process.pid(),
            operation: "change the registers",
            source: errno.into(),
        })?;
        self.go_on_out_of(process, stopped, tid, detour, limit)
    }

    /// Lets a thread run until it is out of `code`; all others stand, and then it, too.
    pub(crate) fn go_on_out_of<'p>(
        &self,
        process: &'p Process,
        stopped: Stopped<'p>,
        tid: i32,
        code: &Range<u64>,
        limit: Duration,
    ) -> Result<Stopped<'p>> {
        let mut stopped = stopped;
        let begun = Instant::now();
        let mut pause = RUNNING;
        loop {
            stopped.leave();
            ptrace::go_on(tid, 0);
            // Interrupted at once, it would stop before its first instruction.
            std::thread::sleep(pause);
            pause *= 2;
            stopped = self.stop(process, limit)?;
            let is_out = ptrace::program_counter(tid).map_or(true, |at| !code.contains(&at));
            if is_out {
                return Ok(stopped);
            }
            if begun.elapsed() > limit {
                let pid = process.pid();
                return Err(ErrorKind::KeepsChanging { pid }.into());
            }
        }
    }
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

/// From now on, the kernel sees no system call to begin anew: the detour does that.
fn depart(tid: i32, entry: u64) -> Result<(), Errno> {
    let tid = Pid::from_raw(tid);
    let mut registers = nix_ptrace::getregs(tid)?;
    registers.rip = entry;
    registers.orig_rax = u64::MAX;
    nix_ptrace::setregs(tid, registers)
}
