//! Safe ptrace: stops all threads of a process, writes its memory, keeps sets of tracees, and reads
//! their stacks.

pub(crate) mod at_exec;
pub(crate) mod lease;
pub(crate) mod lender;
pub(crate) mod memory;
pub(crate) mod moves;
pub(crate) mod run_to;
pub(crate) mod stacks;
pub(crate) mod starvation;
pub(crate) mod stop;
pub(crate) mod stopped;
pub(crate) mod thread_calls;
pub(crate) mod thread_id;
pub(crate) mod time_budget;
pub(crate) mod tracee_set;
pub(crate) mod tracer;
