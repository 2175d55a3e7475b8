//! ptrace(2) and waitid(2), one call each, for what nix cannot express: waits that do not consume,
//! and real-time signals.

use std::io;

use nix::errno::Errno;
use nix::sys::ptrace::{self, Options};
use nix::unistd::Pid;

use crate::address::LiveAddr;
use crate::sys::can_fail;

/// `PTRACE_EVENT_STOP` of linux/ptrace.h.
const EVENT_STOP: i32 = 128;

/// `PTRACE_GET_RSEQ_CONFIGURATION` of linux/ptrace.h, since Linux 5.13.
const GET_RSEQ_CONFIGURATION: libc::c_uint = 0x420f;

/// What became of a tracee, as far as a wait can tell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wait {
    /// It runs, or has not reported yet.
    Running,
    /// It is about to receive this signal, which it has to be given when it is let go.
    Signal(i32),
    /// It stands for our `PTRACE_INTERRUPT`, or because a group-stop has ended.
    Trapped,
    /// It stands in a group-stop, which survives by itself.
    Suspended,
    /// It has started this thread or process, which is traced too.
    Cloned(i32),
    /// Its process has executed another program.
    Executed,
    /// It has ended and waits to be reaped.
    Ended,
    /// There is nothing to wait for: it is not our tracee any more.
    Gone,
}

/// Who is traced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scope {
    /// The threads of a process.
    Threads,
    /// Also the processes that it starts.
    Descendants,
}

impl Scope {
    fn options(self) -> Options {
        let threads = Options::PTRACE_O_TRACECLONE | Options::PTRACE_O_TRACEEXEC;
        match self {
            Scope::Threads => threads,
            Scope::Descendants => {
                threads | Options::PTRACE_O_TRACEFORK | Options::PTRACE_O_TRACEVFORK
            }
        }
    }
}

/// Starts to trace a thread, without stopping it. New threads will be traced from their start.
///
/// Seized, not attached: if we die, the kernel lets it run on as if nothing had been.
pub(crate) fn seize(tid: i32, scope: Scope) -> Result<(), Errno> {
    let options = scope.options();
    can_fail!(Seize);
    ptrace::seize(Pid::from_raw(tid), options)
}

/// Starts to trace a process that is going to execute a program; its children are not traced. If we
/// die before the program runs, it does not run: not without its probes set.
pub(crate) fn seize_for_exec(pid: i32) -> Result<(), Errno> {
    let options = Options::PTRACE_O_TRACEEXEC | Options::PTRACE_O_EXITKILL;
    can_fail!(SeizeForExec);
    ptrace::seize(Pid::from_raw(pid), options)
}

/// Traces as `seize` would have done; the thread has to stand.
pub(crate) fn set_scope(tid: i32, scope: Scope) -> Result<(), Errno> {
    can_fail!(SeizeForExec);
    ptrace::setoptions(Pid::from_raw(tid), scope.options())
}

pub(crate) fn interrupt(tid: i32) -> Result<(), Errno> {
    can_fail!(Interrupt);
    ptrace::interrupt(Pid::from_raw(tid))
}

/// Lets a stopped thread go, giving it `signal` (0 for none).
pub(crate) fn detach(tid: i32, signal: i32) -> Result<(), Errno> {
    restart(libc::PTRACE_DETACH, tid, signal)
}

/// Lets a stopped thread run on, traced, giving it `signal` (0 for none).
pub(crate) fn resume(tid: i32, signal: i32) {
    // A failure means that it was killed, which the next wait tells.
    let _ = restart(libc::PTRACE_CONT, tid, signal);
}

/// Leaves a thread in its group-stop until it is resumed.
pub(crate) fn listen(tid: i32) {
    // A failure means that it was killed or resumed, which the next wait tells.
    let _ = restart(libc::PTRACE_LISTEN, tid, 0);
}

fn restart(request: libc::c_uint, tid: i32, signal: i32) -> Result<(), Errno> {
    can_fail!(Restart);
    // SAFETY: both requests take no pointers; the address is ignored, the data is a number.
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

/// Whether the ptrace-stop a thread is in is that of an exec.
pub(crate) fn is_at_exec(tid: i32) -> bool {
    signal_info(tid).is_ok_and(|info| info.si_code >> 8 == libc::PTRACE_EVENT_EXEC)
}

/// Where a standing thread goes on.
pub(crate) fn program_counter(tid: i32) -> Result<u64, Errno> {
    Ok(place(tid)?.0)
}

/// Where a standing thread goes on, and where its stack ends.
pub(crate) fn place(tid: i32) -> Result<(u64, LiveAddr), Errno> {
    let registers = ptrace::getregs(Pid::from_raw(tid))?;
    Ok((registers.rip, LiveAddr(registers.rsp)))
}

/// Where the stack of a standing thread ends.
pub(crate) fn stack_pointer(tid: i32) -> Result<u64, Errno> {
    Ok(ptrace::getregs(Pid::from_raw(tid))?.rsp)
}

/// Where the control block of a standing thread is.
pub(crate) fn thread_pointer(tid: i32) -> Result<u64, Errno> {
    Ok(ptrace::getregs(Pid::from_raw(tid))?.fs_base)
}

/// Makes a standing thread go on at `address`.
pub(crate) fn set_program_counter(tid: i32, address: LiveAddr) -> Result<(), Errno> {
    let tid = Pid::from_raw(tid);
    let mut registers = ptrace::getregs(tid)?;
    registers.rip = address.0;
    ptrace::setregs(tid, registers)
}

/// Where a standing thread tells the kernel which restartable sequence it is in (rseq(2)); `None` if it
/// has no such place, or the kernel does not say.
pub(crate) fn sequence_place(tid: i32) -> Option<LiveAddr> {
    /// `rseq_cs` of struct rseq.
    const SEQUENCE: u64 = 8;
    // struct ptrace_rseq_configuration: where the struct rseq is comes first.
    let mut configuration = [0_u64; 3];
    // SAFETY: ptrace(2): the kernel writes no more than it is told that there is room for.
    let written = unsafe {
        libc::ptrace(
            GET_RSEQ_CONFIGURATION,
            tid,
            size_of_val(&configuration),
            configuration.as_mut_ptr(),
        )
    };
    let [area, ..] = configuration;
    (written > 0 && area != 0).then(|| LiveAddr(area.wrapping_add(SEQUENCE)))
}

fn signal_info(tid: i32) -> Result<libc::siginfo_t, Errno> {
    can_fail!(SignalInfo);
    ptrace::getsiginfo(Pid::from_raw(tid))
}

fn event_message(tid: i32) -> Result<libc::c_long, Errno> {
    can_fail!(EventMessage);
    ptrace::getevent(Pid::from_raw(tid))
}

/// Whether ptrace is filtered, as seccomp does in many containers: where the kernel itself looks
/// at the request first, a pid that cannot exist is ESRCH.
pub(crate) fn is_filtered() -> bool {
    ptrace::seize(Pid::from_raw(i32::MAX), Options::empty()) == Err(Errno::EPERM)
}

/// Looks what a tracee does, and leaves everything as it is.
///
/// WNOWAIT matters: a wait that consumes a signal-delivery-stop takes the signal off the tracee,
/// and if we die before we hand it back, it is lost.
pub(crate) fn peek(tid: i32) -> Wait {
    match wait(tid, libc::WSTOPPED | libc::WEXITED | libc::WNOWAIT) {
        Ok(Some(info)) => decode(tid, &info),
        Ok(None) => Wait::Running,
        Err(Errno::ECHILD) => Wait::Gone,
        Err(_) => Wait::Running,
    }
}

/// A thread, of all that this thread traces, that `peek` has something to say of; the same one as
/// long as nothing is done about it.
pub(crate) fn next_stopped() -> Option<i32> {
    // Not children of other threads, which are for them to wait for.
    let options = libc::WSTOPPED | libc::WEXITED | libc::WNOWAIT | libc::__WNOTHREAD;
    let info = wait_for(libc::P_ALL, 0, options).ok()??;
    // SAFETY: waitid fills the fields of a SIGCHLD siginfo.
    Some(unsafe { info.si_pid() })
}

/// Takes note of an exec that `peek` told of, which brings no signal that could be lost. Until then,
/// the kernel refuses all requests if it was not the first thread that has executed the program:
/// they may have been meant for the first, which is gone (`looks_like_a_spurious_pid`).
pub(crate) fn take_exec(tid: i32) {
    // If it has been killed meanwhile, that is told of next.
    let _ = wait(tid, libc::WSTOPPED);
}

/// Reaps a thread that `peek` said has ended.
pub(crate) fn reap(tid: i32) {
    // Nothing is left to do where there is nothing to reap.
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
    can_fail!(Wait);
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

fn decode(tid: i32, info: &libc::siginfo_t) -> Wait {
    if !matches!(info.si_code, libc::CLD_TRAPPED | libc::CLD_STOPPED) {
        return Wait::Ended;
    }
    // SAFETY: waitid fills the fields of a SIGCHLD siginfo.
    let status = unsafe { info.si_status() };
    match status >> 8 {
        0 => Wait::Signal(status & 0x7f),
        // ptrace(2): group-stops are told by the signal, which is one that stops.
        EVENT_STOP if status & 0xff != libc::SIGTRAP => Wait::Suspended,
        EVENT_STOP => Wait::Trapped,
        libc::PTRACE_EVENT_EXEC => Wait::Executed,
        libc::PTRACE_EVENT_CLONE | libc::PTRACE_EVENT_FORK | libc::PTRACE_EVENT_VFORK => {
            match event_message(tid) {
                Ok(child) => Wait::Cloned(child as i32),
                Err(_) => Wait::Trapped,
            }
        }
        _ => Wait::Trapped,
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
        can_fail!(PeekText);
        let mut word = ptrace::read(tid, word_at as ptrace::AddressType)?.to_le_bytes();
        let count = rest.len().min(word.len() - skip);
        word[skip..skip + count].copy_from_slice(&rest[..count]);
        let value = libc::c_long::from_le_bytes(word);
        can_fail!(PokeText);
        ptrace::write(tid, word_at as ptrace::AddressType, value)?;
        rest = &rest[count..];
        at += count as u64;
    }
    Ok(())
}
