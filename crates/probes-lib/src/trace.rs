//! Safe ptrace: stops all threads of a process, keeps sets of tracees, and reads their stacks.

pub(crate) mod memory;
pub(crate) mod run_to;
pub(crate) mod stacks;
pub(crate) mod stop;
pub(crate) mod thread_id;
pub(crate) mod tracee_set;
