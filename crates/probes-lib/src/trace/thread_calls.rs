//! [`ThreadCalls`]: the ptrace calls about threads of a stopped process, by whichever thread is its tracer.

use std::io;
use std::rc::Rc;

use libc::sock_filter;
use nix::errno::Errno;

use crate::address::LiveAddr;
use crate::sys::ptrace::{self, Wait};
use crate::trace::lease::Lease;
use crate::trace::lease::message::{Registers, Reply, Request};

/// Who makes ptrace calls.
#[derive(Clone, Debug)]
pub(crate) enum ThreadCalls {
    /// The calling thread, which is the tracer.
    Own,
    /// The follower of the process, which lends it.
    Leased(Rc<Lease>),
}

impl ThreadCalls {
    /// See [`ptrace::peek_wait`].
    pub(crate) fn peek_wait(&self, tid: i32) -> Wait {
        match self {
            ThreadCalls::Own => ptrace::peek_wait(tid),
            ThreadCalls::Leased(lease) => match lease.reply(&Request::Wait(tid)) {
                Ok(Reply::Wait(wait)) => wait,
                _ => Wait::Gone,
            },
        }
    }

    /// Resumes a stopped thread, traced, without a signal.
    pub(crate) fn resume(&self, tid: i32) {
        match self {
            ThreadCalls::Own => ptrace::resume(tid, 0),
            // A failure means that it was killed, which the next wait reports.
            ThreadCalls::Leased(lease) => drop(lease.call(&Request::Resume(tid))),
        }
    }

    /// Returns the registers of a stopped thread.
    pub(crate) fn registers(&self, tid: i32) -> Result<Registers, Errno> {
        match self {
            ThreadCalls::Own => ptrace::registers(tid),
            ThreadCalls::Leased(lease) => match lease.reply(&Request::Registers(tid))? {
                Reply::Registers(registers) => Ok(*registers),
                _ => Err(Errno::EPROTO),
            },
        }
    }

    /// Changes the registers of a stopped thread.
    pub(crate) fn set_registers(&self, tid: i32, registers: Registers) -> Result<(), Errno> {
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
            ThreadCalls::Leased(lease) => match lease.reply(&Request::RseqAddress(tid)) {
                Ok(Reply::RseqAddress(address)) => address,
                _ => None,
            },
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
            ThreadCalls::Leased(lease) => match lease.reply(&Request::SeccompFilter(tid, index))? {
                Reply::SeccompFilter(filter) => Ok(filter),
                _ => Err(Errno::EPROTO),
            },
        }
    }

    /// See [`ptrace::poke_text`].
    pub(crate) fn poke_text(&self, tid: i32, at: LiveAddr, bytes: &[u8]) -> io::Result<()> {
        match self {
            ThreadCalls::Own => ptrace::poke_text(tid, at, bytes),
            ThreadCalls::Leased(lease) => {
                Ok(lease.call(&Request::Poke(tid, at, bytes.to_vec()))?)
            }
        }
    }
}
