//! Whether the threads of a process may read the time stamp counter, as trampolines that time hits
//! do.
//! After `prctl(PR_SET_TSC, PR_TSC_SIGSEGV)`, and in strict seccomp mode, reading it is a segmentation
//! fault. New threads and programs inherit this.

use crate::address::LiveAddr;
use crate::error::{Error, MemoryPart, ObserveError, Result, TscDenial};
use crate::inject::injected_call::InjectedCall;
use crate::inject::injector::Injector;
use crate::inject::permissions;
use crate::memory::{ReadMemory, WriteMemory};
use crate::process::Process;
use crate::trace::stopped::Stopped;

/// How many threads are checked. Each adds about 0.1 ms to the stop time, and nearly always all
/// threads have the same setting.
const MAX_CHECKED: usize = 4;

/// The length of the C `int` that prctl(2) writes.
const MODE_LEN: usize = 4;

/// Checks that no thread is in strict seccomp mode.
///
/// # Errors
///
/// [`ObserveError::TscDenied`] if one is; if the process has exited.
pub(crate) fn refuse_strict(process: &Process) -> Result<()> {
    let exited_or = |source| process.exited_or(source);
    let tids = process.threads().and_then(|mut list| list.read());
    for tid in tids.map_err(exited_or)? {
        // A thread that has exited reads nothing.
        let status = process.thread_status(tid);
        if status.is_ok_and(|status| status.seccomp == permissions::STRICT) {
            return Err(denied(process, tid, TscDenial::StrictSeccomp));
        }
    }
    Ok(())
}

/// Checks some threads of a stopped process, the main thread first, by prctl(PR_GET_TSC) calls that
/// they are made to execute. The results are written to `at`, memory of ours that is 0 afterwards.
/// A thread is not checked if its seccomp filters refuse the call, or if it cannot be redirected.
///
/// # Errors
///
/// [`ObserveError::TscDenied`] if a thread may not read the counter; and see [`Injector::run_in`].
pub(crate) fn refuse_denied<'s>(
    injector: &Injector<'s>,
    mut stopped: Stopped<'s>,
    at: LiveAddr,
) -> Result<Stopped<'s>> {
    let mut tids: Vec<i32> = stopped.tids().collect();
    let leader = injector.process.pid();
    tids.sort_unstable_by_key(|&tid| (tid != leader, tid));
    for tid in tids.into_iter().take(MAX_CHECKED) {
        let was_checked;
        (stopped, was_checked) = injector.run_in(stopped, tid, InjectedCall::tsc_mode(at))?;
        if was_checked && take_result(injector, at)? == libc::PR_TSC_SIGSEGV {
            return Err(denied(injector.process, tid, TscDenial::Prctl));
        }
    }
    Ok(stopped)
}

fn denied(process: &Process, tid: i32, denial: TscDenial) -> Error {
    Error::of_process(process.pid(), ObserveError::TscDenied { tid, denial })
}

/// Reads an answer and clears it.
fn take_result(injector: &Injector<'_>, at: LiveAddr) -> Result<i32> {
    let pid = injector.process.pid();
    let mut answer = [0; MODE_LEN];
    let (memory, part) = (injector.memory, MemoryPart::ObservationData);
    let read = memory.read(at, &mut answer);
    read.map_err(|source| Error::of_read(pid, part, at, source))?;
    let cleared = memory.while_it_runs().write_code(at, &[0; MODE_LEN]);
    cleared.map_err(|source| Error::of_write(pid, part, at, source))?;
    Ok(i32::from_le_bytes(answer))
}
