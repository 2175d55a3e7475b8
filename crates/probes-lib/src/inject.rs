//! Writes code into a process: system calls that one of its threads is made to execute, and the hook in
//! its dynamic loader. (The trampolines of observations are `observe`'s.)

pub(crate) mod code_cave;
pub(crate) mod injected_call;
pub(crate) mod injector;
pub(crate) mod loader_hook;
mod nesting_handlers;
pub(crate) mod permissions;
pub(crate) mod redirect;
