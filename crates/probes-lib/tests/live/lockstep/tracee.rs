//! A process that is traced: made to map memory, to be copied, and to execute one instruction.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::process::Command;

use nix::libc::{
    CLONE_PARENT, MAP_ANONYMOUS, MAP_FIXED_NOREPLACE, MAP_PRIVATE, SIGCHLD, SYS_clone, SYS_mmap,
    c_int, c_long, user_fpregs_struct, user_regs_struct,
};
use nix::sys::ptrace::{self, Options, regset};
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;
use test_support::eventually;

use super::GATE;

/// A process that is traced and stopped.
pub(crate) struct Tracee {
    pub(crate) pid: Pid,
    pub(super) memory: File,
    /// The pages that it was given because it accessed them.
    pub(super) given: BTreeSet<u64>,
}

impl Drop for Tracee {
    fn drop(&mut self) {
        let _ = kill(self.pid, Signal::SIGKILL);
        let _ = waitpid(self.pid, Some(WaitPidFlag::__WALL));
    }
}

impl Tracee {
    pub(crate) fn of(pid: Pid) -> Tracee {
        let mut options = File::options();
        let memory = options.read(true).write(true);
        Tracee {
            pid,
            memory: memory.open(format!("/proc/{pid}/mem")).unwrap(),
            given: BTreeSet::new(),
        }
    }

    /// Begins to trace the process, and stops it.
    pub(crate) fn seize(&self) {
        let options = Options::PTRACE_O_EXITKILL | Options::PTRACE_O_TRACEFORK;
        ptrace::seize(self.pid, options).unwrap();
        ptrace::interrupt(self.pid).unwrap();
        waitpid(self.pid, Some(WaitPidFlag::__WALL)).unwrap();
    }

    pub(crate) fn registers(&self) -> user_regs_struct {
        ptrace::getregs(self.pid).unwrap()
    }

    pub(super) fn vectors(&self) -> user_fpregs_struct {
        ptrace::getregset::<regset::NT_PRFPREG>(self.pid).unwrap()
    }

    pub(super) fn read(&self, address: u64, len: usize) -> Option<Vec<u8>> {
        let mut bytes = vec![0; len];
        self.memory.read_exact_at(&mut bytes, address).ok()?;
        Some(bytes)
    }

    pub(super) fn write(&self, address: u64, bytes: &[u8]) {
        self.memory.write_all_at(bytes, address).unwrap();
    }

    /// Executes one instruction; returns the signal that arrived instead.
    pub(crate) fn step(&self) -> Option<Signal> {
        ptrace::step(self.pid, None).unwrap();
        loop {
            match waitpid(self.pid, Some(WaitPidFlag::__WALL)).unwrap() {
                WaitStatus::Stopped(_, Signal::SIGTRAP) => return None,
                // Not delivered: it has nothing to do with the instruction.
                WaitStatus::Stopped(_, Signal::SIGCHLD) => ptrace::step(self.pid, None).unwrap(),
                WaitStatus::Stopped(_, signal) => return Some(signal),
                WaitStatus::PtraceEvent(..) => return None,
                other => panic!("{other:?}"),
            }
        }
    }

    /// Makes a system call by the instruction at `gate`, and restores the registers.
    pub(super) fn call(&self, gate: u64, number: c_long, arguments: [u64; 6]) -> u64 {
        let before = self.registers();
        let [rdi, rsi, rdx, r10, r8, r9] = arguments;
        let with = user_regs_struct {
            rip: gate,
            rax: number as u64,
            orig_rax: u64::MAX,
            rdi,
            rsi,
            rdx,
            r10,
            r8,
            r9,
            ..before
        };
        ptrace::setregs(self.pid, with).unwrap();
        let mut result = with;
        while result.rip == gate {
            assert_eq!(self.step(), None);
            result = self.registers();
        }
        ptrace::setregs(self.pid, before).unwrap();
        result.rax
    }

    pub(super) fn map(&self, gate: u64, range: Range<u64>, protection: c_int) -> bool {
        let flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE;
        let len = range.end - range.start;
        let arguments = [
            range.start,
            len,
            protection as u64,
            flags as u64,
            u64::MAX,
            0,
        ];
        self.call(gate, SYS_mmap, arguments) == range.start
    }

    /// Returns a copy of the process, whose memory is its own.
    pub(super) fn fork(&self) -> Tracee {
        // A child of this test, which reaps it.
        let flags = (CLONE_PARENT | SIGCHLD) as u64;
        let before = self.registers();
        let with = user_regs_struct {
            rip: GATE.start,
            rax: SYS_clone as u64,
            orig_rax: u64::MAX,
            rdi: flags,
            rsi: 0,
            rdx: 0,
            r10: 0,
            r8: 0,
            ..before
        };
        ptrace::setregs(self.pid, with).unwrap();
        ptrace::step(self.pid, None).unwrap();
        let mut child = None;
        while child.is_none() {
            match waitpid(self.pid, Some(WaitPidFlag::__WALL)).unwrap() {
                WaitStatus::PtraceEvent(..) => {
                    child = Some(Pid::from_raw(ptrace::getevent(self.pid).unwrap() as i32));
                }
                WaitStatus::Stopped(_, Signal::SIGCHLD) => ptrace::step(self.pid, None).unwrap(),
                other => panic!("{other:?}"),
            }
        }
        let child = child.unwrap();
        waitpid(child, Some(WaitPidFlag::__WALL)).unwrap();
        // It is in the system call until its next step.
        assert_eq!(self.step(), None);
        ptrace::setregs(self.pid, before).unwrap();
        let child = Tracee::of(child);
        ptrace::setregs(child.pid, before).unwrap();
        child
    }
}

/// Pins this thread and a process to one processor: its number is in the memory of both (rseq(2)), and only one of them
/// runs at a time.
pub(crate) fn pin(pid: i32) {
    let status = fs::read_to_string("/proc/thread-self/status").unwrap();
    let field = |name: &str| {
        let line = status
            .lines()
            .find_map(|line| line.strip_prefix(name))
            .unwrap();
        line.trim().to_owned()
    };
    let allowed = field("Cpus_allowed_list:");
    let first = allowed.split(['-', ',']).next().unwrap();
    for task in [field("Pid:"), pid.to_string()] {
        let mut taskset = Command::new("taskset");
        let done = taskset
            .args(["--pid", "--cpu-list", first, &task])
            .output()
            .unwrap();
        assert!(done.status.success(), "{done:?}");
    }
}

/// Waits until a process waits for input.
pub(super) fn wait_until_reading(pid: i32) {
    eventually("it waits for input", || {
        let call = fs::read_to_string(format!("/proc/{pid}/syscall")).ok()?;
        call.starts_with("0 ").then_some(())
    });
}
