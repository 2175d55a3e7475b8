//! [`ThreadCalls`]: the ptrace calls about threads of a stopped process, and the writes to its memory, by whichever
//! thread is its tracer.

use std::io;
use std::rc::Rc;

use libc::{sock_filter, user_regs_struct};
use nix::errno::Errno;

use crate::address::LiveAddr;
use crate::process::memory::ProcessMemory;
use crate::sys::ptrace::{self, TraceeState};
use crate::trace::lease::Lease;
use crate::trace::lease::message::{Reply, Request};

/// Which thread makes ptrace calls.
#[derive(Clone, Debug)]
pub(crate) enum ThreadCalls {
    /// The calling thread, which is the tracer.
    Own,
    /// The follower of the process, which lends it.
    Leased(Rc<Lease>),
}

impl ThreadCalls {
    /// Returns whether the lease is lost: the process may run, so its threads have to be assumed to be anywhere.
    pub(crate) fn is_lost(&self) -> bool {
        self.loss().is_some()
    }

    /// Returns what calls fail with, if the lease is lost.
    pub(crate) fn loss(&self) -> Option<Errno> {
        match self {
            ThreadCalls::Own => None,
            ThreadCalls::Leased(lease) => lease.loss(),
        }
    }

    /// Writes through /proc/PID/mem. If the process is lent, the follower does: it refuses once the lease is lost.
    pub(crate) fn write(
        &self,
        memory: &ProcessMemory,
        at: LiveAddr,
        bytes: &[u8],
    ) -> io::Result<()> {
        match self {
            ThreadCalls::Own => memory.write(at, bytes),
            ThreadCalls::Leased(lease) => lease.write(at, bytes),
        }
    }

    /// See [`ptrace::peek_state_even_if_consumed`]; [`TraceeState::Gone`] also if the lease is lost.
    pub(crate) fn peek_state(&self, tid: i32) -> TraceeState {
        match self {
            ThreadCalls::Own => ptrace::peek_state_even_if_consumed(tid),
            ThreadCalls::Leased(lease) => {
                let state = lease.answer(&Request::State(tid), |reply| match reply {
                    Reply::State(state) => Some(state),
                    _ => None,
                });
                state.unwrap_or(TraceeState::Gone)
            }
        }
    }

    /// Resumes a stopped thread, traced, without a signal.
    pub(crate) fn resume(&self, tid: i32) {
        match self {
            ThreadCalls::Own => ptrace::resume(tid, 0),
            // It fails if the thread was killed, has something to report to the follower, or the lease is lost. The
            // next call about the thread shows which.
            ThreadCalls::Leased(lease) => drop(lease.call(&Request::ResumeThread(tid))),
        }
    }

    /// Returns the registers of a stopped thread.
    pub(crate) fn registers(&self, tid: i32) -> Result<user_regs_struct, Errno> {
        match self {
            ThreadCalls::Own => ptrace::registers(tid),
            ThreadCalls::Leased(lease) => {
                lease.answer(&Request::Registers(tid), |reply| match reply {
                    Reply::Registers(registers) => Some(*registers),
                    _ => None,
                })
            }
        }
    }

    /// Changes the registers of a stopped thread.
    pub(crate) fn set_registers(&self, tid: i32, registers: user_regs_struct) -> Result<(), Errno> {
        match self {
            ThreadCalls::Own => ptrace::set_registers(tid, registers),
            ThreadCalls::Leased(lease) => {
                lease.call(&Request::SetRegisters(tid, Box::new(registers)))
            }
        }
    }

    /// See [`ptrace::rseq_cs_address`].
    pub(crate) fn rseq_cs_address(&self, tid: i32) -> Option<LiveAddr> {
        match self {
            ThreadCalls::Own => ptrace::rseq_cs_address(tid),
            ThreadCalls::Leased(lease) => {
                let address = lease.answer(&Request::RseqAddress(tid), |reply| match reply {
                    Reply::RseqAddress(address) => Some(address),
                    _ => None,
                });
                address.ok().flatten()
            }
        }
    }

    /// See [`ptrace::seccomp_filter`].
    pub(crate) fn seccomp_filter(
        &self,
        tid: i32,
        index: usize,
    ) -> Result<Option<Vec<sock_filter>>, Errno> {
        match self {
            ThreadCalls::Own => ptrace::seccomp_filter(tid, index),
            ThreadCalls::Leased(lease) => {
                lease.answer(&Request::SeccompFilter(tid, index), |reply| match reply {
                    Reply::SeccompFilter(filter) => Some(filter),
                    _ => None,
                })
            }
        }
    }

    /// See [`ptrace::poke_text`].
    pub(crate) fn poke_text(&self, tid: i32, at: LiveAddr, bytes: &[u8]) -> io::Result<()> {
        match self {
            ThreadCalls::Own => ptrace::poke_text(tid, at, bytes),
            ThreadCalls::Leased(lease) => lease.poke(tid, at, bytes),
        }
    }
}
