//! What a blocked system call waits for, by its number and arguments.

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;

use syscalls::Sysno;

use super::descriptors;
use crate::address::LiveAddr;
use crate::memory::ReadMemory;
use crate::process::Process;

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
        /// Of a TCP or UDP socket that is connected, or is just being connected, the address of the other end.
        peer: Option<SocketAddr>,
    },
    /// One of several files.
    Files {
        /// How many, if that is known.
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
        /// Its pid, if the call names it, or asks for any child and there is no other.
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
                    Some(peer) => write!(f, ", the other end is {peer}"),
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

/// Returns what a system call waits for, of a thread of `process` whose `directory` is below that of the process; `None`
/// if that is not known.
pub(super) fn waits_for(
    process: &Process,
    memory: &impl ReadMemory,
    directory: &str,
    call: &SystemCall,
) -> Option<WaitsFor> {
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
            file(process, directory, first as i32)
        }
        Sysno::poll | Sysno::ppoll => match descriptors::of_poll(memory, first, second) {
            Some(polled) => files(process, directory, &polled),
            None => WaitsFor::Files {
                count: Some(second),
            },
        },
        Sysno::select | Sysno::pselect6 => {
            let [_, sets @ .., _, _] = call.arguments;
            match descriptors::of_select(memory, first as i32, sets) {
                Some(selected) => files(process, directory, &selected),
                None => WaitsFor::Files { count: None },
            }
        }
        Sysno::epoll_wait | Sysno::epoll_pwait | Sysno::epoll_pwait2 => {
            match descriptors::of_epoll(process, directory, first as i32).as_deref() {
                // One to which a file may be added meanwhile.
                Some([]) => WaitsFor::Files { count: Some(0) },
                Some(watched) => files(process, directory, watched),
                None => WaitsFor::Files { count: None },
            }
        }
        Sysno::futex => WaitsFor::Futex {
            address: futex(call)?,
            owner: None,
        },
        Sysno::nanosleep | Sysno::clock_nanosleep => WaitsFor::Time,
        Sysno::wait4 | Sysno::waitid => WaitsFor::Child { pid: None },
        Sysno::pause | Sysno::rt_sigsuspend | Sysno::rt_sigtimedwait => WaitsFor::Signal,
        _ => return None,
    })
}

/// The file of a descriptor.
fn file(process: &Process, directory: &str, descriptor: i32) -> WaitsFor {
    let link = process.read_link(&format!("{directory}/fd/{descriptor}"));
    WaitsFor::File {
        descriptor,
        path: link.ok(),
        peer: None,
    }
}

/// The files of descriptors; the time if there are none.
fn files(process: &Process, directory: &str, descriptors: &[i32]) -> WaitsFor {
    match descriptors {
        [] => WaitsFor::Time,
        [one] => file(process, directory, *one),
        many => WaitsFor::Files {
            count: Some(many.len() as u64),
        },
    }
}

/// Which child a system call waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum WantedChild {
    Any,
    /// The one with this id in the pid namespace of its parent.
    WithId(i32),
}

/// Returns which child a thread waits for in this system call; `None` if in no such call, or for one of a group or, as
/// tracers do, also for processes that are no children.
fn wanted_child(call: &SystemCall) -> Option<WantedChild> {
    let [first, second, third, fourth, ..] = call.arguments;
    let (wanted, options) = match Sysno::new(call.number as usize)? {
        Sysno::wait4 => match first as i32 {
            -1 => (WantedChild::Any, third),
            id if id > 0 => (WantedChild::WithId(id), third),
            _ => return None,
        },
        Sysno::waitid => match first as libc::idtype_t {
            libc::P_ALL => (WantedChild::Any, fourth),
            libc::P_PID => (WantedChild::WithId(second as i32), fourth),
            _ => return None,
        },
        _ => return None,
    };
    let is_tracer = options as i32 & (libc::__WALL | libc::__WCLONE) != 0;
    (wanted != WantedChild::Any || !is_tracer).then_some(wanted)
}

/// Returns the pid of the child that a system call waits for, if it is a single one. `children` are those of the process, each with
/// its id in the pid namespace of the process and its pid.
pub(super) fn child(call: &SystemCall, children: &[(i32, i32)]) -> Option<i32> {
    match (wanted_child(call)?, children) {
        (WantedChild::Any, [(_, only)]) => Some(*only),
        (WantedChild::Any, _) => None,
        (WantedChild::WithId(id), _) => {
            let mut with_id = children.iter().filter(|(own_id, _)| *own_id == id);
            with_id.next().map(|(_, pid)| *pid)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn children_are_those_that_calls_ask_for() {
        let call = |number: libc::c_long, arguments: [u64; 4]| {
            let [first, second, third, fourth] = arguments;
            SystemCall {
                number: number as u32,
                arguments: [first, second, third, fourth, 0, 0],
            }
        };
        let any = -1_i64 as u64;
        let (one, two) = ([(7, 4007)], [(7, 4007), (8, 4008)]);
        let wait4 = |id: u64, options: i32| call(libc::SYS_wait4, [id, 0, options as u64, 0]);
        assert_eq!(child(&wait4(any, 0), &one), Some(4007));
        assert_eq!(child(&wait4(any, 0), &two), None);
        assert_eq!(child(&wait4(8, 0), &two), Some(4008));
        assert_eq!(child(&wait4(9, 0), &two), None);
        // A tracer waits for its tracees, too; a group is no child.
        assert_eq!(child(&wait4(any, libc::__WALL), &one), None);
        assert_eq!(child(&wait4(8, libc::__WALL), &two), Some(4008));
        assert_eq!(child(&wait4(0, 0), &one), None);
        assert_eq!(child(&wait4(-7_i64 as u64, 0), &one), None);
        let waitid = |kind: u32, id: u64| call(libc::SYS_waitid, [kind.into(), id, 0, 4]);
        assert_eq!(child(&waitid(libc::P_PID, 8), &two), Some(4008));
        assert_eq!(child(&waitid(libc::P_ALL, 0), &one), Some(4007));
        assert_eq!(child(&waitid(libc::P_PGID, 7), &one), None);
        assert_eq!(child(&call(libc::SYS_read, [7, 0, 0, 0]), &one), None);
    }

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
