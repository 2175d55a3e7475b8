//! Safe functions for ptrace(2) and waitid(2). Where nix cannot express a call (waits that do not consume, real-time
//! signals, seccomp filters), libc is called.

use std::io;

use nix::errno::Errno;
use nix::sys::ptrace::{self, Options};
use nix::unistd::Pid;

use crate::address::LiveAddr;
use crate::sys::fault_point;

/// `PTRACE_EVENT_STOP` of linux/ptrace.h.
const EVENT_STOP: i32 = 128;

/// `PTRACE_SECCOMP_GET_FILTER` of linux/ptrace.h, since Linux 4.4.
const SECCOMP_GET_FILTER: libc::c_uint = 0x420c;

/// How many instructions a seccomp filter has at most: `BPF_MAXINSNS` of linux/bpf_common.h.
const MAX_FILTER_LEN: usize = 4096;

/// `PTRACE_GET_RSEQ_CONFIGURATION` of linux/ptrace.h, since Linux 5.13.
const GET_RSEQ_CONFIGURATION: libc::c_uint = 0x420f;

/// The state of a tracee, as far as waitid(2) reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TraceeState {
    /// It runs, or has not reported yet.
    Running,
    /// It is in signal-delivery-stop: this signal must be injected when it is resumed.
    Signal(i32),
    /// It is in `PTRACE_EVENT_STOP`: after our `PTRACE_INTERRUPT`, at the start of a new tracee, or because a
    /// group-stop has ended; or in a ptrace-stop that has no variant here.
    EventStopped,
    /// It is in a group-stop, in which the kernel keeps it.
    GroupStopped,
    /// It has started this thread or process, which is traced too.
    Cloned(i32),
    /// Its process has exec'd.
    Executed,
    /// It has exited and waits to be reaped.
    Exited,
    /// There is nothing to wait for: it is not our tracee any more.
    Gone,
}

/// What is traced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TraceScope {
    /// The threads of a process.
    Threads,
    /// Also the processes that it starts.
    Descendants,
}

impl TraceScope {
    fn options(self) -> Options {
        let threads = Options::PTRACE_O_TRACECLONE | Options::PTRACE_O_TRACEEXEC;
        match self {
            TraceScope::Threads => threads,
            TraceScope::Descendants => {
                threads | Options::PTRACE_O_TRACEFORK | Options::PTRACE_O_TRACEVFORK
            }
        }
    }
}

/// Starts to trace a thread, without stopping it. What it starts is traced from its start, as far as `scope` says.
///
/// `PTRACE_SEIZE`, not `PTRACE_ATTACH`: if we die, the kernel resumes it as if it had not been traced.
pub(crate) fn seize(tid: i32, scope: TraceScope) -> Result<(), Errno> {
    let options = scope.options();
    fault_point!(Seize);
    ptrace::seize(Pid::from_raw(tid), options)
}

/// Starts to trace a process that is going to execute a program; its children are not traced. If we
/// die before the program runs, the kernel kills it, so that it never runs without its probes set.
pub(crate) fn seize_for_exec(pid: i32) -> Result<(), Errno> {
    let options = Options::PTRACE_O_TRACEEXEC | Options::PTRACE_O_EXITKILL;
    fault_point!(SeizeForExec);
    ptrace::seize(Pid::from_raw(pid), options)
}

/// Sets which of the threads and processes that a stopped tracee starts are traced.
pub(crate) fn set_scope(tid: i32, scope: TraceScope) -> Result<(), Errno> {
    fault_point!(SetOptions);
    ptrace::setoptions(Pid::from_raw(tid), scope.options())
}

/// Makes a tracee stop: it is stopped once a wait reports that.
pub(crate) fn interrupt(tid: i32) -> Result<(), Errno> {
    fault_point!(Interrupt);
    ptrace::interrupt(Pid::from_raw(tid))
}

/// Resumes a stopped thread, untraced, with `signal` (0 for none).
pub(crate) fn detach(tid: i32, signal: i32) -> Result<(), Errno> {
    fault_point!(Detach);
    request_restart(libc::PTRACE_DETACH, tid, signal)
}

/// Resumes a stopped thread, traced, with `signal` (0 for none).
pub(crate) fn resume(tid: i32, signal: i32) {
    // A failure means that it was killed, which the next wait reports.
    let _ = restart(libc::PTRACE_CONT, tid, signal);
}

/// Leaves a thread in its group-stop until its process receives SIGCONT.
pub(crate) fn listen(tid: i32) {
    // A failure means that it was killed or resumed, which the next wait reports.
    let _ = restart(libc::PTRACE_LISTEN, tid, 0);
}

fn restart(request: libc::c_uint, tid: i32, signal: i32) -> Result<(), Errno> {
    fault_point!(Restart);
    request_restart(request, tid, signal)
}

fn request_restart(request: libc::c_uint, tid: i32, signal: i32) -> Result<(), Errno> {
    // SAFETY: none of the requests takes a pointer; the address is ignored, the data is a number.
    let result = unsafe {
        libc::ptrace(
            request,
            tid,
            std::ptr::null_mut::<libc::c_void>(),
            signal as libc::c_long,
        )
    };
    Errno::result(result).map(drop)
}

/// Returns whether the ptrace-stop of a thread is that of an exec.
pub(crate) fn is_at_exec(tid: i32) -> bool {
    signal_info(tid).is_ok_and(|info| info.si_code >> 8 == libc::PTRACE_EVENT_EXEC)
}

/// Returns the registers of a stopped thread.
pub(crate) fn registers(tid: i32) -> Result<libc::user_regs_struct, Errno> {
    ptrace::getregs(Pid::from_raw(tid))
}

/// Returns whether `signal` is pending for a stopped thread or its process. Only the first signals of each queue are
/// looked at.
pub(crate) fn is_pending(tid: i32, signal: i32) -> bool {
    [0, libc::PTRACE_PEEKSIGINFO_SHARED]
        .into_iter()
        .any(|flags| {
            pending_signals(tid, flags)
                .is_ok_and(|pending| pending.iter().any(|info| info.si_signo == signal))
        })
}

/// Returns the first pending signals of a queue of a stopped thread.
fn pending_signals(tid: i32, flags: u32) -> Result<Vec<libc::siginfo_t>, Errno> {
    const MAX: usize = 16;
    let asked = libc::ptrace_peeksiginfo_args {
        off: 0,
        flags,
        nr: MAX as i32,
    };
    let mut found = Vec::<libc::siginfo_t>::with_capacity(MAX);
    // SAFETY: ptrace reads `asked` and writes at most MAX infos to `found`, which has room for them.
    let count = unsafe { libc::ptrace(libc::PTRACE_PEEKSIGINFO, tid, &asked, found.as_mut_ptr()) };
    let count = Errno::result(count)?;
    // SAFETY: the kernel has written `count` elements.
    unsafe { found.set_len(count as usize) };
    Ok(found)
}

/// Changes the registers of a stopped thread.
pub(crate) fn set_registers(tid: i32, registers: libc::user_regs_struct) -> Result<(), Errno> {
    ptrace::setregs(Pid::from_raw(tid), registers)
}

/// Returns the program counter of a stopped thread.
pub(crate) fn program_counter(tid: i32) -> Result<u64, Errno> {
    Ok(registers(tid)?.rip)
}

/// Returns the stack pointer of a stopped thread.
pub(crate) fn stack_pointer(tid: i32) -> Result<u64, Errno> {
    Ok(registers(tid)?.rsp)
}

/// Makes a stopped thread resume at `address`.
pub(crate) fn set_program_counter(tid: i32, address: LiveAddr) -> Result<(), Errno> {
    let mut changed = registers(tid)?;
    changed.rip = address.0;
    set_registers(tid, changed)
}

/// Returns where a stopped thread stores which restartable sequence it is in: the address of `rseq_cs`
/// in its struct rseq (rseq(2)). `None` if it has no struct rseq, or the kernel does not report it.
pub(crate) fn rseq_cs_address(tid: i32) -> Option<LiveAddr> {
    /// Offset of `rseq_cs` in struct rseq.
    const RSEQ_CS: u64 = 8;
    // struct ptrace_rseq_configuration: its first field is the address of the struct rseq.
    let mut configuration = [0_u64; 3];
    // SAFETY: ptrace(2): the kernel writes no more than the given length.
    let written = unsafe {
        libc::ptrace(
            GET_RSEQ_CONFIGURATION,
            tid,
            size_of_val(&configuration),
            configuration.as_mut_ptr(),
        )
    };
    let [area, ..] = configuration;
    (written > 0 && area != 0).then(|| LiveAddr(area.wrapping_add(RSEQ_CS)))
}

/// Returns one of the seccomp filters of a stopped thread; `None` if it has fewer.
///
/// # Errors
///
/// EACCES without `CAP_SYS_ADMIN` in the initial user namespace, and if we are under seccomp ourselves;
/// EINVAL if it has no filter at all; EINVAL or EIO if the kernel was built without `CONFIG_CHECKPOINT_RESTORE`;
/// EMEDIUMTYPE if the filter is not a classic BPF program.
pub(crate) fn seccomp_filter(
    tid: i32,
    index: usize,
) -> Result<Option<Vec<libc::sock_filter>>, Errno> {
    let none = libc::sock_filter {
        code: 0,
        jt: 0,
        jf: 0,
        k: 0,
    };
    let mut filter = vec![none; MAX_FILTER_LEN];
    // SAFETY: ptrace(2): the kernel writes the instructions of one filter, at most MAX_FILTER_LEN; the index is a
    // number.
    let len = unsafe { libc::ptrace(SECCOMP_GET_FILTER, tid, index, filter.as_mut_ptr()) };
    match Errno::result(len) {
        Ok(len) => {
            filter.truncate(usize::try_from(len).unwrap_or_default());
            Ok(Some(filter))
        }
        Err(Errno::ENOENT) => Ok(None),
        Err(errno) => Err(errno),
    }
}

fn signal_info(tid: i32) -> Result<libc::siginfo_t, Errno> {
    fault_point!(SignalInfo);
    ptrace::getsiginfo(Pid::from_raw(tid))
}

fn event_message(tid: i32) -> Result<libc::c_long, Errno> {
    fault_point!(EventMessage);
    ptrace::getevent(Pid::from_raw(tid))
}

/// Returns whether a seccomp filter of ours forbids ptrace, as in many containers: if the request reaches the kernel's
/// own checks, it fails with ESRCH for a pid that cannot exist. A filter may return any other error.
pub(crate) fn is_filtered() -> bool {
    ptrace::seize(Pid::from_raw(i32::MAX), Options::empty()) != Err(Errno::ESRCH)
}

/// Returns the state of a tracee, and changes nothing.
///
/// WNOWAIT matters: a wait that consumes a signal-delivery-stop takes the signal off the tracee,
/// and if we die before we inject it, it is lost.
pub(crate) fn peek_state(tid: i32) -> TraceeState {
    match wait(tid, libc::WSTOPPED | libc::WEXITED | libc::WNOWAIT) {
        Ok(Some(info)) => decode(tid, &info),
        Ok(None) => TraceeState::Running,
        Err(Errno::ECHILD) => TraceeState::Gone,
        Err(_) => TraceeState::Running,
    }
}

/// Same as `peek_state`, but also finds a stop that another thread of this process has consumed, which waitid(2) reports
/// no more: a thread that waits for its child, even if only for its exit, consumes the ptrace-stops of the child as
/// well if another thread of the same process traces it. To be called by the thread that traces it.
pub(crate) fn peek_state_even_if_consumed(tid: i32) -> TraceeState {
    match peek_state(tid) {
        // ptrace(2): this fails while it runs.
        TraceeState::Running => {
            signal_info(tid).map_or(TraceeState::Running, |info| match peek_state(tid) {
                // It is stopped by now, and waitid(2) does not report it.
                TraceeState::Running => of_signal_info(tid, &info),
                state => state,
            })
        }
        state => state,
    }
}

/// Returns why a tracee is stopped, from what `PTRACE_GETSIGINFO` returns: for a signal-delivery-stop, the signal; for
/// any other stop, `si_code` holds its status, a value that no signal has there.
fn of_signal_info(tid: i32, info: &libc::siginfo_t) -> TraceeState {
    match info.si_code {
        status if status > 0xff && status & 0x7f == info.si_signo => of_status(tid, status),
        _ => TraceeState::Signal(info.si_signo),
    }
}

/// Returns one of the tracees of this thread that do not run (see `peek_state`); the same one until it is
/// resumed or reaped.
pub(crate) fn next_stopped() -> Option<i32> {
    // Not children of other threads of ours.
    let options = libc::WSTOPPED | libc::WEXITED | libc::WNOWAIT | libc::__WNOTHREAD;
    let info = wait_for(libc::P_ALL, 0, options).ok()??;
    // SAFETY: waitid fills the fields of a SIGCHLD siginfo.
    Some(unsafe { info.si_pid() })
}

/// Returns whether a child has exited and is not reaped yet. Changes nothing.
pub(crate) fn has_child_exited(pid: i32) -> Result<bool, Errno> {
    let info = wait(pid, libc::WEXITED | libc::WNOWAIT)?;
    // The stops of a tracee of this process are reported, too, whatever the options are.
    let is_stop =
        |info: &libc::siginfo_t| matches!(info.si_code, libc::CLD_TRAPPED | libc::CLD_STOPPED);
    Ok(info.is_some_and(|info| !is_stop(&info)))
}

/// Consumes an exec stop that `peek_state` has reported, which carries no signal that could be lost.
/// Until then, the kernel refuses all requests if another thread than the leader has exec'd: they may
/// have been meant for the former leader, which is gone (see `looks_like_a_spurious_pid` in the kernel).
pub(crate) fn consume_exec(tid: i32) {
    // If it has been killed meanwhile, that is reported next.
    let _ = wait(tid, libc::WSTOPPED);
}

/// Reaps a thread that `peek_state` has reported as exited.
pub(crate) fn reap(tid: i32) {
    // It fails if there is nothing to reap any more.
    let _ = wait(tid, libc::WEXITED);
}

fn wait(tid: i32, options: i32) -> Result<Option<libc::siginfo_t>, Errno> {
    wait_for(libc::P_PID, tid as libc::id_t, options)
}

fn wait_for(
    kind: libc::idtype_t,
    id: libc::id_t,
    options: i32,
) -> Result<Option<libc::siginfo_t>, Errno> {
    fault_point!(Wait);
    // SAFETY: siginfo_t is plain data, for which all zeroes is a valid value.
    let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
    // SAFETY: `info` outlives the call, which writes nothing else.
    let result = unsafe {
        libc::waitid(
            kind,
            id,
            &raw mut info,
            options | libc::__WALL | libc::WNOHANG,
        )
    };
    Errno::result(result)?;
    // waitid(2): with WNOHANG and nothing to report, si_pid is left 0.
    // SAFETY: waitid fills the fields of a SIGCHLD siginfo, or leaves them 0.
    Ok((unsafe { info.si_pid() } != 0).then_some(info))
}

fn decode(tid: i32, info: &libc::siginfo_t) -> TraceeState {
    if !matches!(info.si_code, libc::CLD_TRAPPED | libc::CLD_STOPPED) {
        return TraceeState::Exited;
    }
    // SAFETY: waitid fills the fields of a SIGCHLD siginfo.
    of_status(tid, unsafe { info.si_status() })
}

/// Returns what the status of a stopped tracee means, as ptrace(2) has it.
fn of_status(tid: i32, status: i32) -> TraceeState {
    match status >> 8 {
        0 => TraceeState::Signal(status & 0x7f),
        // ptrace(2): a group-stop has a stopping signal in the low byte.
        EVENT_STOP if status & 0xff != libc::SIGTRAP => TraceeState::GroupStopped,
        EVENT_STOP => TraceeState::EventStopped,
        libc::PTRACE_EVENT_EXEC => TraceeState::Executed,
        libc::PTRACE_EVENT_CLONE | libc::PTRACE_EVENT_FORK | libc::PTRACE_EVENT_VFORK => {
            match event_message(tid) {
                Ok(child) => TraceeState::Cloned(child as i32),
                Err(_) => TraceeState::EventStopped,
            }
        }
        _ => TraceeState::EventStopped,
    }
}

/// Writes code through ptrace, word by word, keeping the bytes around it.
pub(crate) fn poke_text(tid: i32, at: LiveAddr, bytes: &[u8]) -> io::Result<()> {
    let tid = Pid::from_raw(tid);
    let word_len = size_of::<libc::c_long>() as u64;
    let mut rest = bytes;
    let mut at = at.0;
    while !rest.is_empty() {
        let word_at = at & !(word_len - 1);
        let skip = (at - word_at) as usize;
        fault_point!(PeekText);
        let mut word = ptrace::read(tid, word_at as ptrace::AddressType)?.to_le_bytes();
        let count = rest.len().min(word.len() - skip);
        word[skip..skip + count].copy_from_slice(&rest[..count]);
        let value = libc::c_long::from_le_bytes(word);
        fault_point!(PokeText);
        ptrace::write(tid, word_at as ptrace::AddressType, value)?;
        rest = &rest[count..];
        at += count as u64;
    }
    Ok(())
}
