//! What a blocked system call waits for, by its number and arguments.

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;

use syscalls::Sysno;

use crate::address::LiveAddr;
use crate::process::Process;
use crate::process::children::{child_with_own_id, children};

/// A system call that a thread is in.
///
/// [`ThreadState`](crate::ThreadState) has an example.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SystemCall {
    /// Its number on x86-64.
    pub number: u32,
    /// Its arguments; it need not have six.
    pub arguments: [u64; 6],
}

/// What a system call waits for.
///
/// [`ThreadState`](crate::ThreadState) has an example.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum WaitsFor {
    /// A file, pipe, terminal or socket.
    File {
        /// The descriptor in the process.
        descriptor: i32,
        /// What it is, as /proc names it: a path, or `socket:[1234]`; `None` if that cannot be read.
        path: Option<PathBuf>,
        /// Of a connected TCP or UDP socket, the address of the other end.
        peer: Option<SocketAddr>,
    },
    /// One of several files.
    Files {
        /// How many, if the system call says.
        count: Option<u64>,
    },
    /// Another thread to wake it, at a lock or a condition variable (futex(2)).
    Futex {
        /// The address of the futex.
        address: LiveAddr,
        /// The thread that holds the lock, if it is a mutex of the C library (`pthread_mutex_lock`), and that is known.
        owner: Option<i32>,
    },
    /// The time.
    Time,
    /// A child process.
    Child {
        /// Its pid, if it waits for that one, or has no other.
        pid: Option<i32>,
    },
    /// A signal.
    Signal,
}

/// How many bytes of code, up to the end of a `syscall` instruction, [`restarted`] searches for the number of the call.
pub(super) const BEFORE_SYSCALL: usize = 32;

/// Returns the number of the system call that restart_syscall(2) resumes after a stop. `code` ends with the `syscall`
/// instruction; the number is that of the last `mov $N,%eax` before it whose call can be restarted so; `None` if there
/// is none. The registers still hold the arguments of that call.
pub(super) fn restarted(code: &[u8]) -> Option<u32> {
    const RESTARTED: [libc::c_long; 4] = [
        libc::SYS_nanosleep,
        libc::SYS_clock_nanosleep,
        libc::SYS_poll,
        libc::SYS_futex,
    ];
    let code = code.strip_suffix(&[0x0f, 0x05])?;
    let loads = code.windows(5).rev().filter(|it| it[0] == 0xb8);
    let mut numbers = loads.filter_map(|it| it[1..].try_into().ok().map(u32::from_le_bytes));
    numbers.find(|number| RESTARTED.contains(&libc::c_long::from(*number)))
}

/// Returns the number of the system call that restart_syscall(2) resumes, by the function of the kernel that waits: C libraries may have
/// one `syscall` instruction for many calls. They sleep by clock_nanosleep(2).
pub(super) fn restarted_in(kernel_function: &str) -> Option<u32> {
    const RESTARTED: [(&str, libc::c_long); 4] = [
        ("nanosleep", libc::SYS_clock_nanosleep),
        // Only a sleep is resumed without a function that the kernel names.
        ("do_syscall_64", libc::SYS_clock_nanosleep),
        ("poll", libc::SYS_poll),
        ("futex", libc::SYS_futex),
    ];
    let mut restarted = RESTARTED.into_iter();
    let (_, number) = restarted.find(|(part, _)| kernel_function.contains(part))?;
    u32::try_from(number).ok()
}

impl SystemCall {
    /// Whether it is restart_syscall(2), which resumes the call that the thread was in when it was stopped.
    pub(super) fn is_restart(&self) -> bool {
        i64::from(self.number) == libc::SYS_restart_syscall
    }

    /// Whether a thread that waited in it, and is in the system call `number` now, still waits in it.
    pub(super) fn is_resumed_by(&self, number: u64) -> bool {
        number == u64::from(self.number) || number == libc::SYS_restart_syscall as u64
    }

    /// Its name; `None` if it is newer than those that are known here.
    pub fn name(&self) -> Option<&'static str> {
        let number = usize::try_from(self.number).ok()?;
        Some(Sysno::new(number)?.name())
    }
}

impl fmt::Display for SystemCall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name() {
            Some(name) => f.write_str(name),
            None => write!(f, "system call {}", self.number),
        }
    }
}

impl fmt::Display for WaitsFor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            WaitsFor::File {
                descriptor,
                path,
                peer,
            } => {
                write!(f, "file descriptor {descriptor}")?;
                if let Some(path) = path {
                    write!(f, " ({})", path.display())?;
                }
                match peer {
                    Some(peer) => write!(f, ", connected to {peer}"),
                    None => Ok(()),
                }
            }
            WaitsFor::Files { count: Some(1) } => f.write_str("1 file descriptor"),
            WaitsFor::Files { count: Some(count) } => write!(f, "{count} file descriptors"),
            WaitsFor::Files { count: None } => f.write_str("file descriptors"),
            WaitsFor::Futex { address, owner } => {
                write!(f, "the futex at {address}")?;
                match owner {
                    Some(owner) => write!(f, ", a mutex held by thread {owner}"),
                    None => Ok(()),
                }
            }
            WaitsFor::Time => f.write_str("the time"),
            WaitsFor::Child { pid: Some(pid) } => write!(f, "its child process {pid}"),
            WaitsFor::Child { pid: None } => f.write_str("a child process"),
            WaitsFor::Signal => f.write_str("a signal"),
        }
    }
}

/// Returns the futex that a thread waits for in this system call, if it does.
fn futex(call: &SystemCall) -> Option<LiveAddr> {
    let is_futex = i64::from(call.number) == libc::SYS_futex;
    is_futex.then_some(LiveAddr(call.arguments[0]))
}

/// Returns what a system call of a thread of `process` waits for; `None` if that is not known.
pub(super) fn waits_for(process: &Process, call: &SystemCall) -> Option<WaitsFor> {
    let [first, second, ..] = call.arguments;
    Some(match Sysno::new(call.number as usize)? {
        Sysno::read
        | Sysno::write
        | Sysno::readv
        | Sysno::writev
        | Sysno::pread64
        | Sysno::pwrite64
        | Sysno::recvfrom
        | Sysno::recvmsg
        | Sysno::recvmmsg
        | Sysno::sendto
        | Sysno::sendmsg
        | Sysno::sendmmsg
        | Sysno::accept
        | Sysno::accept4
        | Sysno::connect
        | Sysno::flock
        | Sysno::fcntl
        | Sysno::fsync
        | Sysno::fdatasync
        | Sysno::ioctl
        | Sysno::sendfile
        | Sysno::splice => {
            // A descriptor is an int: the upper half of the register may hold anything.
            let descriptor = first as i32;
            WaitsFor::File {
                descriptor,
                path: process.read_link(&format!("fd/{descriptor}")).ok(),
                peer: None,
            }
        }
        Sysno::poll | Sysno::ppoll => match second {
            0 => WaitsFor::Time,
            count => WaitsFor::Files { count: Some(count) },
        },
        Sysno::select | Sysno::pselect6 => match first {
            0 => WaitsFor::Time,
            _ => WaitsFor::Files { count: None },
        },
        Sysno::epoll_wait | Sysno::epoll_pwait | Sysno::epoll_pwait2 => {
            WaitsFor::Files { count: None }
        }
        Sysno::futex => WaitsFor::Futex {
            address: futex(call)?,
            owner: None,
        },
        Sysno::nanosleep | Sysno::clock_nanosleep => WaitsFor::Time,
        Sysno::wait4 => WaitsFor::Child {
            pid: child(process, first),
        },
        Sysno::waitid => WaitsFor::Child {
            pid: match first as libc::idtype_t {
                libc::P_PID => child(process, second),
                libc::P_ALL => child(process, ANY_CHILD),
                _ => None,
            },
        },
        Sysno::pause | Sysno::rt_sigsuspend | Sysno::rt_sigtimedwait => WaitsFor::Signal,
        _ => return None,
    })
}

/// Says to wait4(2) that any child is meant.
const ANY_CHILD: u64 = -1_i64 as u64;

/// Returns the pid of the child that a process waits for with this argument of wait4(2), if it is a single one.
fn child(process: &Process, wanted: u64) -> Option<i32> {
    match wanted as i32 {
        -1 => match children(process)[..] {
            [only] => Some(only),
            _ => None,
        },
        own_id => child_with_own_id(process, own_id),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn restarted_call_is_that_of_the_code() {
        // mov $0xe6,%eax; xor %r8d,%r8d; syscall
        let sleep = [0x90, 0xb8, 0xe6, 0, 0, 0, 0x45, 0x31, 0xc0, 0x0f, 0x05];
        assert_eq!(restarted(&sleep), Some(libc::SYS_clock_nanosleep as u32));
        // The one that is loaded last counts, and no call that returns EINTR instead.
        let both = [0xb8, 0xe6, 0, 0, 0, 0xb8, 7, 0, 0, 0, 0x0f, 0x05];
        assert_eq!(restarted(&both), Some(libc::SYS_poll as u32));
        let read = [0xb8, 0, 0, 0, 0, 0x0f, 0x05];
        for code in [&read[..], &sleep[..9], &[0x0f, 0x05], &[]] {
            assert_eq!(restarted(code), None, "{code:x?}");
        }
    }

    #[test]
    fn restarted_call_is_that_of_the_kernel() {
        // As Linux 6.18 names them.
        for (function, number) in [
            ("hrtimer_nanosleep", libc::SYS_clock_nanosleep),
            ("do_syscall_64", libc::SYS_clock_nanosleep),
            ("do_poll.constprop.0", libc::SYS_poll),
            ("futex_do_wait", libc::SYS_futex),
        ] {
            assert_eq!(restarted_in(function), Some(number as u32), "{function}");
        }
        assert_eq!(restarted_in("pipe_read"), None);
    }
}
