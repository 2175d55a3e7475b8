//! The fence: the only modules with `unsafe` code or raw system calls.

#![allow(unsafe_code)]

pub(crate) mod mem;
pub(crate) mod pidfd;
pub(crate) mod ptrace;
mod signals;
pub(crate) mod spawn;
pub(crate) mod threads;
