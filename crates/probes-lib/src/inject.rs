//! Makes threads of a process execute code that we put there: system calls of ours, and a hook in its
//! dynamic loader.

pub(crate) mod loader_hook;
pub(crate) mod redirect;
pub(crate) mod remote_call;
