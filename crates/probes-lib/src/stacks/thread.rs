//! What /proc says of one thread: where it is blocked, and whether it has run since.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::Duration;

use nix::fcntl::OFlag;
use nix::time::{ClockId, clock_gettime};

use super::wait::SystemCall;
use crate::error::{Operation, Result};
use crate::process::status::Status;
use crate::process::{Process, denial, is_task_gone};
use crate::unwind::registers::{FrameRegisters, R8, R9, R10, RDI, RDX, RSI};

/// The open files of a thread.
#[derive(Debug)]
pub(crate) struct ThreadFiles {
    process: Arc<Process>,
    directory: String,
    syscall: File,
    /// `None` if the kernel does not count time slices: then its counts of switches are used.
    schedstat: Option<File>,
    wchan: Option<File>,
}

/// A thread at one moment. If it is blocked, and is equal to an earlier one, the thread has not run in between.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Moment {
    /// The line of `/proc/PID/task/TID/syscall`: proc_pid_syscall(5).
    syscall: Vec<u8>,
    /// How often it has been switched to, and how long it has run.
    pub(crate) slices: Slices,
}

/// How often a thread has been switched to, and how long it has run, as the kernel writes it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Slices(Vec<u8>);

impl Slices {
    /// Returns how long the thread has run, and how long it has waited for a processor; `None` if the kernel does not count that.
    pub(crate) fn times(&self) -> Option<(Duration, Duration)> {
        let time = |index| self.number(index).map(Duration::from_nanos);
        Some((time(0)?, time(1)?))
    }

    /// Returns how often it has got a processor; `None` if the kernel does not count that.
    fn arrivals(&self) -> Option<u64> {
        self.number(2)
    }

    fn number(&self, index: usize) -> Option<u64> {
        let text = std::str::from_utf8(&self.0).ok()?;
        text.split_ascii_whitespace().nth(index)?.parse().ok()
    }
}

/// How often a thread has been switched to, and away from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SwitchCounts {
    /// How often it has got a processor; zero if that is not counted.
    pub(crate) arrivals: u64,
    /// How often it has left one to wait, or because it was stopped.
    pub(crate) voluntary: u64,
    /// How often it was made to leave one.
    pub(crate) involuntary: u64,
}

/// Where a thread has entered the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct KernelEntry {
    /// `None` if not by a system call.
    pub(super) call: Option<SystemCall>,
    pub(super) stack_pointer: u64,
    pub(super) program_counter: u64,
}

/// Returns the time by `CLOCK_MONOTONIC`.
pub(crate) fn monotonic_now() -> Duration {
    clock_gettime(ClockId::CLOCK_MONOTONIC).map_or(Duration::ZERO, Duration::from)
}

/// More bytes than `syscall`, `schedstat` and `wchan` have.
const MAX_BYTES: usize = 256;

impl ThreadFiles {
    /// Returns the directory of the thread, below that of the process.
    pub(super) fn directory(&self) -> &str {
        &self.directory
    }

    /// Opens the files of a thread; `None` if it has exited.
    ///
    /// # Errors
    ///
    /// If they may not be read.
    pub(crate) fn open(process: &Arc<Process>, tid: i32) -> Result<Option<ThreadFiles>> {
        let directory = format!("task/{tid}");
        let open = |name: &str| process.open_file(&format!("{directory}/{name}"), OFlag::O_RDONLY);
        let Some(syscall) = unless_gone(process, &directory, open("syscall"))? else {
            return Ok(None);
        };
        let schedstat = open("schedstat").ok();
        // The kernel writes zeros there if it does not count them.
        let schedstat = schedstat.filter(counts_slices);
        Ok(Some(ThreadFiles {
            process: process.clone(),
            syscall,
            schedstat,
            wchan: open("wchan").ok(),
            directory,
        }))
    }

    /// Returns what it does now; `None` if it has exited. `slices` are its counts of switches, if these were just read.
    ///
    /// # Errors
    ///
    /// If that may not be read.
    pub(crate) fn moment_since(&self, slices: Slices) -> Result<Option<Moment>> {
        // In this order: if the thread runs between these two reads, the slices of the next moment differ.
        let syscall = unless_gone(&self.process, &self.directory, read(&self.syscall))?;
        Ok(syscall.map(|syscall| Moment { syscall, slices }))
    }

    /// Returns whether it has run since it was blocked at this moment, or has exited.
    ///
    /// # Errors
    ///
    /// If that may not be read.
    pub(crate) fn has_run_since(&self, moment: &Moment) -> Result<bool> {
        let slices = self.slices()?;
        if self.schedstat.is_some() {
            // They change when it is switched to, before it runs.
            return Ok(slices.as_ref() != Some(&moment.slices));
        }
        // The counts of switches change when it is switched from.
        let now = slices.map(|slices| self.moment_since(slices));
        Ok(now.transpose()?.flatten().as_ref() != Some(moment))
    }

    /// Returns what tells whether it has run between two calls; `None` if it has exited.
    ///
    /// # Errors
    ///
    /// If that may not be read.
    pub(crate) fn slices(&self) -> Result<Option<Slices>> {
        let slices = match &self.schedstat {
            Some(file) => read(file),
            None => self.switches(),
        };
        Ok(unless_gone(&self.process, &self.directory, slices)?.map(Slices))
    }

    fn switches(&self) -> io::Result<Vec<u8>> {
        let status = self.process.read(&format!("{}/status", self.directory))?;
        let lines = status.split(|&byte| byte == b'\n');
        let switches = lines.filter(|line| memchr::memmem::find(line, b"ctxt_switches").is_some());
        Ok(switches.collect::<Vec<_>>().join(&b' '))
    }

    /// Its name; empty if it has exited.
    pub(crate) fn name(&self) -> String {
        let name = self.process.read(&format!("{}/comm", self.directory));
        let name = name.unwrap_or_default();
        String::from_utf8_lossy(name.strip_suffix(b"\n").unwrap_or(&name)).into_owned()
    }

    /// The function of the kernel that it waits in.
    pub(super) fn kernel_function(&self) -> Option<String> {
        let name = String::from_utf8(read(self.wchan.as_ref()?).ok()?).ok()?;
        (!name.is_empty() && name != "0").then_some(name)
    }

    /// Returns whether it has at least begun to exit.
    pub(super) fn is_exiting(&self) -> bool {
        self.process.is_exiting_in(&self.directory)
    }

    /// Returns whether it is stopped by a signal or a debugger.
    pub(super) fn is_stopped(&self) -> bool {
        let status = self.process.read(&format!("{}/status", self.directory));
        let status = status.map(|bytes| Status::parse(&bytes));
        status.is_ok_and(|status| matches!(status.state, 'T' | 't'))
    }
}

impl SwitchCounts {
    /// Those of a thread now; `None` if it has exited.
    pub(crate) fn of_thread(process: &Process, tid: i32) -> Option<SwitchCounts> {
        let read = |name: &str| process.read(&format!("task/{tid}/{name}"));
        let slices = Slices(read("schedstat").unwrap_or_default());
        SwitchCounts::of(&slices, &read("status").ok()?)
    }

    /// From the contents of `schedstat` and `status`.
    fn of(slices: &Slices, status: &[u8]) -> Option<SwitchCounts> {
        let number = |bytes: &[u8]| std::str::from_utf8(bytes.trim_ascii()).ok()?.parse().ok();
        let mut lines = status.split(|&byte| byte == b'\n');
        let mut line = |name: &[u8]| lines.find_map(|line| line.strip_prefix(name));
        let voluntary = line(b"voluntary_ctxt_switches:")?;
        let involuntary = line(b"nonvoluntary_ctxt_switches:").and_then(number);
        Some(SwitchCounts {
            arrivals: slices.arrivals().unwrap_or(0),
            voluntary: number(voluntary)?,
            involuntary: involuntary.unwrap_or(0),
        })
    }
}

/// Returns `None` instead of an error if the thread has exited.
fn unless_gone<T>(process: &Process, directory: &str, found: io::Result<T>) -> Result<Option<T>> {
    match found {
        Ok(found) => Ok(Some(found)),
        Err(error) if is_task_gone(&error) || process.is_exiting_in(directory) => Ok(None),
        Err(error) => Err(denial::denied_or_exited(process, Operation::Read, error)),
    }
}

fn read(file: &File) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; MAX_BYTES];
    let len = file.read_at(&mut bytes, 0)?;
    bytes.truncate(len);
    Ok(bytes)
}

/// proc_pid_schedstat(5): its third number counts the time slices.
fn counts_slices(file: &File) -> bool {
    let bytes = read(file).unwrap_or_default();
    let mut numbers = bytes.split(|&byte| byte == b' ');
    numbers
        .nth(2)
        .is_some_and(|slices| slices.trim_ascii() != b"0")
}

impl Moment {
    /// Where it is blocked; `None` if it was running.
    pub(super) fn entry(&self) -> Option<KernelEntry> {
        KernelEntry::parse(&self.syscall)
    }
}

impl KernelEntry {
    /// The registers that are known: those that a system call is made with, too (System V ABI, AMD64 supplement, A.2.1).
    pub(super) fn registers(&self) -> FrameRegisters {
        const OF_ARGUMENTS: [usize; 6] = [RDI, RSI, RDX, R10, R8, R9];
        let mut registers = FrameRegisters::new(self.program_counter, self.stack_pointer);
        if let Some(call) = &self.call {
            for (register, value) in OF_ARGUMENTS.into_iter().zip(call.arguments) {
                registers.set(register, Some(value));
            }
        }
        registers
    }

    /// Parses the line of `/proc/PID/task/TID/syscall`: the number of the system call and its six arguments, or -1; then the
    /// stack pointer and the program counter. `None` if it says `running`, or something else.
    fn parse(line: &[u8]) -> Option<KernelEntry> {
        let line = std::str::from_utf8(line).ok()?;
        let mut words = line.split_ascii_whitespace();
        let number: i64 = words.next()?.parse().ok()?;
        let hex = |word: &str| u64::from_str_radix(word.strip_prefix("0x")?, 16).ok();
        let values: Vec<u64> = words.map(hex).collect::<Option<_>>()?;
        let (arguments, place) = values.split_at_checked(values.len().checked_sub(2)?)?;
        let [stack_pointer, program_counter] = *place else {
            return None;
        };
        let call = match u32::try_from(number) {
            Ok(number) => Some(SystemCall {
                number,
                arguments: arguments.try_into().ok()?,
            }),
            Err(_) => None,
        };
        Some(KernelEntry {
            call,
            stack_pointer,
            program_counter,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::unwind::registers::{RAX, RSP};

    #[test]
    fn switches_are_counted_by_the_kernel() {
        let status =
            b"Name:\tserver\nvoluntary_ctxt_switches:\t1017\nnonvoluntary_ctxt_switches:\t3\n";
        let counts = |arrivals| {
            Some(SwitchCounts {
                arrivals,
                voluntary: 1017,
                involuntary: 3,
            })
        };
        let parse = |slices: &[u8], status| SwitchCounts::of(&Slices(slices.to_vec()), status);
        assert_eq!(parse(b"29 12 1021\n", status), counts(1021));
        assert_eq!(parse(b"", status), counts(0));
        assert_eq!(parse(b"29 12 1021\n", b"Name:\tserver\n"), None);
    }

    #[test]
    fn lines_of_the_kernel_are_parsed() {
        let place = |line: &str| KernelEntry::parse(line.as_bytes());
        assert_eq!(
            place("230 0x0 0x1 0x7ffe 0x0 0x0 0x8 0x7ffc1000 0x7f01\n"),
            Some(KernelEntry {
                call: Some(SystemCall {
                    number: 230,
                    arguments: [0, 1, 0x7ffe, 0, 0, 8]
                }),
                stack_pointer: 0x7ffc_1000,
                program_counter: 0x7f01,
            })
        );
        let vfork = place("58 0x40 0x1 0x2 0xa 0x8 0x9 0x7ffc1000 0x7f01\n").unwrap();
        let registers = vfork.registers();
        let known = [RDI, RSI, RDX, R10, R8, R9, RSP, RAX].map(|it| registers.get(it));
        let expected = [0x40, 1, 2, 10, 8, 9, 0x7ffc_1000].map(Some);
        assert_eq!((&known[..7], known[7]), (&expected[..], None));
        let faulting = place("-1 0x7ffc1000 0x7f01\n").unwrap();
        assert_eq!((faulting.call, faulting.stack_pointer), (None, 0x7ffc_1000));
        for other in [
            "running\n",
            "",
            "230\n",
            "230 0x1\n",
            "230 0x1 0x2 0x3\n",
            "x 0x1 0x2\n",
            "-1 1 2\n",
            "-1 0x1 0xg\n",
        ] {
            assert_eq!(place(other), None, "{other}");
        }
        assert_eq!(KernelEntry::parse(b"\xff\n"), None);
    }
}
