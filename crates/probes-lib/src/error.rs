//! [`Error`]: what was tried, on which process or file, why it failed, and what became of the
//! target. Lower case, no full stop; what to do next is the caller's to say, from [`ErrorKind`].

mod cause;
mod operation;

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::sys::signal::Signal;

use crate::address::LiveAddr;
use crate::elf::build_id::BuildId;
use crate::elf::note::MalformedNote;
use crate::site::SiteCode;

pub use cause::{Denial, ElfDefect, ProbeDefect};
pub use operation::{MemoryPart, Operation};

/// The result of this crate's functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why something could not be done, and what that leaves behind.
#[derive(Debug)]
pub struct Error {
    kind: Box<ErrorKind>,
    effect: Effect,
}

/// What a failed call has done to the process or program it was about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Nothing: the call does not change anything, or the process has ended.
    None,
    /// Nothing: it failed before the first write.
    NothingChanged,
    /// Bytes were written, and put back: while every thread still stop_time, unless none was stopped.
    Restored,
    /// All probes are as they were, but memory of an observation may stay mapped, which does no harm;
    /// [`Target::clean`](crate::Target::clean) unmaps it.
    StillMapped,
    /// Bytes were written and could not be put back: some probes may be half changed.
    HalfChanged,
    /// A program that was to be started with its probes set was not started, or was ended before
    /// its first instruction.
    NotStarted,
}

impl Error {
    /// What went wrong.
    pub fn kind(&self) -> &ErrorKind {
        &self.kind
    }

    pub(crate) fn into_kind(self) -> ErrorKind {
        *self.kind
    }

    /// What the failed call left behind.
    pub fn effect(&self) -> Effect {
        self.effect
    }

    /// The same error, saying what it leaves behind, whatever it has said.
    pub(crate) fn with_effect(self, effect: Effect) -> Error {
        Error { effect, ..self }
    }

    /// The same error with this effect, unless it has one already or the process has exited: for a
    /// caller whose operation consists of several calls.
    #[must_use]
    pub fn leaving(mut self, effect: Effect) -> Error {
        let gone = matches!(*self.kind, ErrorKind::Exited { .. });
        if self.effect == Effect::None && !gone {
            self.effect = effect;
        }
        self
    }
}

impl From<ErrorKind> for Error {
    fn from(kind: ErrorKind) -> Error {
        Error {
            kind: Box::new(kind),
            effect: Effect::None,
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = self.kind.to_string();
        let effect = match self.effect {
            Effect::None => return f.write_str(&kind),
            Effect::NothingChanged => "nothing was changed",
            Effect::Restored => "what had been written was put back",
            Effect::StillMapped => {
                "all probes are as they were, but memory may stay mapped, which does no harm"
            }
            Effect::HalfChanged => "some probes may be half changed",
            Effect::NotStarted => "the program was not started",
        };
        let separator = if kind.ends_with('?') { " " } else { "; " };
        write!(f, "{kind}{separator}{effect}")
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        std::error::Error::source(&*self.kind)
    }
}

/// Every way in which this crate can fail.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ErrorKind {
    /// A file could not be opened.
    #[error("cannot open {}: {}", path.display(), reason(source))]
    OpenFile {
        /// The file.
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
    /// A file that is mapped has no name any more by which it could be opened.
    #[error("cannot open {}: {}", path.display(), namelessness(path))]
    Nameless {
        /// The file, as the kernel names it.
        path: PathBuf,
    },
    /// A file could not be read.
    #[error("cannot read {what} of {}: {}", path.display(), reason(source))]
    ReadFile {
        /// The file.
        path: PathBuf,
        /// The part of it that was wanted.
        what: &'static str,
        /// What the kernel said.
        source: io::Error,
    },
    /// A file is not a program this crate can work on.
    #[error("{} {defect}", path.display())]
    Elf {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        defect: ElfDefect,
    },
    /// A probe note cannot be read.
    #[error("in {}: {note}", path.display())]
    MalformedNote {
        /// The file.
        path: PathBuf,
        /// The note.
        #[source]
        note: MalformedNote,
    },
    /// A note can be read, but what it says cannot be true of its file.
    #[error("in {}: probe note {index} at {offset:#x} ({name}) {defect}", path.display())]
    WrongNote {
        /// The file.
        path: PathBuf,
        /// Position of the note in its section, counted from 0.
        index: usize,
        /// Offset of the note in its section, in bytes.
        offset: usize,
        /// The probe's name, escaped.
        name: String,
        /// What is wrong with it.
        defect: ProbeDefect,
    },
    /// The file has no OCaml probes.
    #[error("no OCaml probes in {}{}{}", path.display(), build_id_suffix(.build_id), unless_in(.unreadable))]
    NoProbes {
        /// The file.
        path: PathBuf,
        /// Its build-id, if it has one.
        build_id: Option<BuildId>,
        /// If it runs, other files that are mapped and could not be looked into.
        unreadable: Vec<PathBuf>,
    },
    /// No probe of that name.
    #[error("no probe \"{name}\" in {}{}{}", file_name(program), unless_in(.unreadable), did_you_mean(.near))]
    UnknownProbe {
        /// The name that was asked for.
        name: String,
        /// The program that does not have it.
        program: PathBuf,
        /// Files that are mapped and could not be looked into.
        unreadable: Vec<PathBuf>,
        /// Names that it does have, nearest first.
        near: Vec<String>,
    },
    /// A regular expression or predicate selects no probe.
    #[error("no probe in {} matches {pattern}{}", file_name(program), unless_in(.unreadable))]
    NoMatch {
        /// What was asked for.
        pattern: String,
        /// The program.
        program: PathBuf,
        /// Files that are mapped and could not be looked into.
        unreadable: Vec<PathBuf>,
    },
    /// A regular expression cannot be compiled.
    #[error("\"{pattern}\" is not a regular expression: {}", regex_reason(source))]
    BadRegexp {
        /// What was given.
        pattern: String,
        /// What is wrong with it.
        source: regex::Error,
    },
    /// A probe is selected more than once for the same action.
    #[error("probe \"{name}\" is selected twice")]
    SelectedTwice {
        /// The probe.
        name: String,
    },
    /// A probe is to be enabled and disabled at once.
    #[error("probe \"{name}\" is to be both enabled and disabled")]
    Conflict {
        /// The probe.
        name: String,
    },
    /// A probe named to be disabled is off already.
    #[error("probe \"{name}\" is not enabled")]
    NotEnabled {
        /// The probe.
        name: String,
    },
    /// A probe's counters differ, and one action would leave it partly on.
    #[error(
        "the counters of \"{name}\" differ ({smallest} to {largest}): somebody else, such as SystemTap, counts some of its sites, and disabling it would leave those on"
    )]
    UnequalCounters {
        /// The probe.
        name: String,
        /// The smallest of its counters.
        smallest: u16,
        /// The largest.
        largest: u16,
    },
    /// A probe's counter is at its maximum.
    #[error("probe \"{name}\" is enabled 65535 times already, its counter can hold no more")]
    CounterFull {
        /// The probe.
        name: String,
    },
    /// A probe's counters and sites disagree.
    #[error(
        "{enabled} of {sites} sites of \"{name}\" are enabled and its counter is {counter} (an interrupted run?)"
    )]
    Inconsistent {
        /// The probe.
        name: String,
        /// Sites that call their handler.
        enabled: usize,
        /// All sites of the name.
        sites: usize,
        /// The smallest of its counters.
        counter: u16,
    },
    /// A site in memory is neither enabled nor disabled.
    #[error("site {name} at {address}: {}", site_text(*.found, *.expected))]
    UnexpectedSite {
        /// The probe.
        name: String,
        /// Where the site is in the process.
        address: LiveAddr,
        /// The bytes there.
        found: SiteCode,
        /// The bytes that the file has, or that were written.
        expected: SiteCode,
    },
    /// /proc is of another pid namespace than this process's.
    #[error("/proc shows another pid namespace than the one that this process is in")]
    ForeignProc,
    /// There is no /proc.
    #[error("/proc is not mounted, or does not show this process")]
    NoProc,
    /// A probe that is to be observed has no site, only a counter.
    #[error("no probe of process {pid} that is to be observed has a site")]
    NoSites {
        /// The process.
        pid: i32,
    },
    /// There is no place in the process for what observing it takes.
    #[error("there is no room in the memory of process {pid} for what observing it takes")]
    NoRoom {
        /// The process.
        pid: i32,
    },
    /// ShadowedWrite the code of no object of the process is room for a detour, on which a thread maps memory: as
    /// of a program that is linked statically, and whose last page of code is full.
    #[error(
        "behind the code of no object of process {pid} are {bytes} bytes free in its last page, which observing it takes"
    )]
    NoCodeCave {
        /// The process.
        pid: i32,
        /// How many there have to be.
        bytes: usize,
    },
    /// No thread of the process can be made to map memory.
    #[error(
        "no thread of process {pid} can be made to map memory: all are busy with signals or in restartable sequences"
    )]
    NoThreadToRedirect {
        /// The process.
        pid: i32,
    },
    /// Each thread of the process has a seccomp filter that its parent has not, which may kill it for what
    /// observing takes.
    #[error(
        "process {pid} has a seccomp filter that its parent has not, which may kill it for what observing it takes"
    )]
    SeccompFiltered {
        /// The process.
        pid: i32,
    },
    /// Another observation of the process has begun, and has put this one back.
    #[error("process {pid} is observed by another now, who has put an end to this observation")]
    ObserverReplaced {
        /// The process.
        pid: i32,
    },
    /// The observation is over: it has been removed.
    #[error("process {pid} is not observed any more: the observation was removed")]
    Removed {
        /// The process.
        pid: i32,
    },
    /// No times can be applied on this machine.
    #[error(
        "the time stamp counters of this machine's processors do not go evenly: no times can be applied by them"
    )]
    NoInvariantTsc,
    /// There can be no memory to share with a program.
    #[error("cannot share memory with the program: {source}")]
    NoSharedMemory {
        /// What memfd_create(2) or ftruncate(2) says.
        source: io::Error,
    },
    /// A program is to be followed and observed from its start.
    #[error("cannot both follow {} and observe it from its start", program.display())]
    FollowedAndObserved {
        /// The program, as it was named.
        program: PathBuf,
    },
    /// More pairs than can be timed together.
    #[error("{given} pairs are too many to be timed together: {most} at most")]
    TooManyPairs {
        /// How many there were.
        given: usize,
        /// How many there can be.
        most: usize,
    },
    /// The process may not map memory that it executes.
    #[error(
        "process {pid} cannot map memory for what observing it takes: its kernel or a seccomp filter refuses"
    )]
    MapRefused {
        /// The process.
        pid: i32,
    },
    /// A probe's memory is not mapped where the file and the process's maps put it.
    #[error("{part} of {} at {address} is not mapped in process {pid}", path.display())]
    NotMapped {
        /// The process.
        pid: i32,
        /// What was there.
        part: MemoryPart,
        /// The object that has it.
        path: PathBuf,
        /// The address.
        address: LiveAddr,
    },
    /// The load bias cannot be told.
    #[error("cannot tell where {} is loaded in process {pid}", path.display())]
    NoLoadBias {
        /// The process.
        pid: i32,
        /// The object.
        path: PathBuf,
    },
    /// No such process.
    #[error("no process {pid}")]
    NoSuchProcess {
        /// The pid that was asked for.
        pid: i32,
    },
    /// A thread's id was given where a process's is wanted.
    #[error("{tid} is a thread of process {pid}, not a process")]
    NotAProcess {
        /// The id that was asked for.
        tid: i32,
        /// The process it belongs to.
        pid: i32,
    },
    /// The process ended while it was worked on.
    #[error("process {pid} exited")]
    Exited {
        /// The process.
        pid: i32,
    },
    /// The process has ended and waits to be reaped.
    #[error(
        "process {pid} has exited and is a zombie: its parent {parent} ({parent_name}) has not reaped it"
    )]
    Zombie {
        /// The process.
        pid: i32,
        /// Its parent.
        parent: i32,
        /// The parent's command name.
        parent_name: String,
    },
    /// A thread of the kernel has no program.
    #[error("{pid} ({name}) is a kernel thread and has no program")]
    KernelThread {
        /// The process.
        pid: i32,
        /// Its name.
        name: String,
    },
    /// Stopping ourselves, or a process that waits for us, could never end. A program changes its own
    /// probes with [`Target::current`](crate::Target::current).
    #[error("{pid} is {}, which cannot be stopped from here", if *.own { "this very process" } else { "an ancestor of this process" })]
    SelfOrAncestor {
        /// The process.
        pid: i32,
        /// Whether it is this process, and not an ancestor.
        own: bool,
    },
    /// A [`Target`](crate::Target) for the current process is used in a child of it.
    #[error(
        "process {child} is a child of {pid}, for which this was opened, and would change that one"
    )]
    Forked {
        /// The process it was opened for.
        pid: i32,
        /// This process.
        child: i32,
    },
    /// The kernel does not let us look into or stop the process.
    #[error("{}", denied(*.pid, *.operation, .denial))]
    Denied {
        /// The process.
        pid: i32,
        /// What was tried.
        operation: Operation,
        /// Why not.
        denial: Denial,
    },
    /// A thread did not stop in time.
    #[error(
        "thread {tid} ({name}) is {}; released, safe to retry",
        state_text(*.state, .wchan)
    )]
    Busy {
        /// The process.
        pid: i32,
        /// The thread.
        tid: i32,
        /// The thread's name.
        name: String,
        /// Its state, as in /proc.
        state: char,
        /// The kernel function it waits in, where known.
        wchan: String,
        /// The deadline, in milliseconds.
        deadline_ms: u64,
    },
    /// Threads were started faster than they could be stopped.
    #[error(
        "process {pid} kept starting threads, and could not be stopped within {deadline_ms} ms; released, safe to retry"
    )]
    ThreadsKeepStarting {
        /// The process.
        pid: i32,
        /// The deadline, in milliseconds.
        deadline_ms: u64,
    },
    /// The process executed another program meanwhile.
    #[error("process {pid} executed a new program meanwhile")]
    Executed {
        /// The process.
        pid: i32,
    },
    /// Another process changed the probes or the mappings again and again meanwhile.
    #[error("the probes or mappings of process {pid} kept changing meanwhile")]
    KeepsChanging {
        /// The process.
        pid: i32,
    },
    /// Memory of the process could not be read.
    #[error("cannot read {part} at {address} of process {pid}: {}", reason(source))]
    ReadMemory {
        /// The process.
        pid: i32,
        /// What was there.
        part: MemoryPart,
        /// The address.
        address: LiveAddr,
        /// What the kernel said.
        source: io::Error,
    },
    /// Memory of the process could not be written.
    #[error(
        "cannot write {part} at {address} of process {pid}: {}{}",
        reason(source),
        write_obstacle(*part, source)
    )]
    WriteMemory {
        /// The process.
        pid: i32,
        /// What was there.
        part: MemoryPart,
        /// The address.
        address: LiveAddr,
        /// What the kernel said.
        source: io::Error,
    },
    /// Memory is mapped `MAP_SHARED`: to change it here would be to change it for others, or fail.
    #[error(
        "{part} of process {pid} at {address} is mapped shared, and cannot be changed in one process"
    )]
    SharedMapping {
        /// What was there.
        part: MemoryPart,
        /// The process.
        pid: i32,
        /// An address in the mapping.
        address: LiveAddr,
    },
    /// What was read back is not what was written.
    #[error("{part} at {address} of process {pid} did not keep what was written")]
    NotKept {
        /// The process.
        pid: i32,
        /// What was there.
        part: MemoryPart,
        /// The address.
        address: LiveAddr,
    },
    /// The kernel lets only tracers write to code.
    #[error(
        "this kernel does not let the code of process {pid} be written while it runs (proc_mem.force_override)"
    )]
    LiveRefused {
        /// The process.
        pid: i32,
    },
    /// A probe is to be changed while the process runs, and is in an object that can be unloaded.
    #[error(
        "\"{name}\" is in {} too, which could be unloaded while it is written",
        file_name(object)
    )]
    LiveUnloadable {
        /// The probe.
        name: String,
        /// The object.
        object: PathBuf,
    },
    /// The program's text lies on 1 GiB pages.
    #[error(
        "the text of process {pid} lies on 1 GiB huge pages, and the first write to one copies a gigabyte"
    )]
    GigaText {
        /// The process.
        pid: i32,
    },
    /// A program could not be started.
    #[error("cannot run {}: {}", program.display(), reason(source))]
    Exec {
        /// The program, as given.
        program: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
    /// A program that we started may not be traced.
    #[error("cannot trace {} from its start: {denial}", program.display())]
    CannotTraceChild {
        /// The program, as given.
        program: PathBuf,
        /// Why not.
        denial: Denial,
    },
    /// A program's file can be executed, but not the file that is to load it.
    #[error("cannot run {}: its dynamic linker {} does not exist", program.display(), interpreter.display())]
    NoInterpreter {
        /// The program, as given.
        program: PathBuf,
        /// The dynamic linker that it asks for.
        interpreter: PathBuf,
    },
    /// A program ended before it could be looked at: the kernel kills it where it cannot be loaded.
    #[error("cannot run {}: it {} before its first instruction", program.display(), end_text(*.signal))]
    DiedAtStart {
        /// The program, as given.
        program: PathBuf,
        /// The signal that killed it, if it is known.
        signal: Option<i32>,
    },
    /// A program ended before its own code began.
    #[error("cannot run {}: it ended while its libraries were being loaded", program.display())]
    DiedLoading {
        /// The program, as given.
        program: PathBuf,
    },
    /// We may start no thread, which it takes to trace.
    #[error("cannot start a thread of our own: {}", reason(source))]
    NoThread {
        /// What the kernel said.
        source: io::Error,
    },
    /// The program would run without the privilege that its file gives it.
    #[error("{} is setuid or setgid, and would run without that privilege if it was traced from its start", program.display())]
    Setuid {
        /// The program's file.
        program: PathBuf,
    },
    /// We were told to end while a program was being started.
    #[error("interrupted while {} was being started", program.display())]
    Interrupted {
        /// The program, as given.
        program: PathBuf,
    },
    /// A call of the operating system failed where no failure is expected.
    #[error("cannot {operation} process {pid}: {}", reason(source))]
    System {
        /// The process.
        pid: i32,
        /// What was tried.
        operation: Operation,
        /// What the kernel said.
        source: io::Error,
    },
}

impl ErrorKind {
    /// What it means that memory could not be read.
    pub(crate) fn reading(
        pid: i32,
        part: MemoryPart,
        address: LiveAddr,
        source: io::Error,
    ) -> ErrorKind {
        match source.kind() {
            io::ErrorKind::UnexpectedEof => ErrorKind::Exited { pid },
            _ => ErrorKind::ReadMemory {
                pid,
                part,
                address,
                source,
            },
        }
    }

    /// What it means that memory could not be written.
    pub(crate) fn writing(
        pid: i32,
        part: MemoryPart,
        address: LiveAddr,
        source: io::Error,
    ) -> ErrorKind {
        match source.kind() {
            io::ErrorKind::UnexpectedEof => ErrorKind::Exited { pid },
            // The thread through which it was written was killed while it was stopped.
            _ if source.raw_os_error() == Some(libc::ESRCH) => ErrorKind::Exited { pid },
            _ => ErrorKind::WriteMemory {
                pid,
                part,
                address,
                source,
            },
        }
    }

    pub(crate) fn elf(path: &Path, defect: ElfDefect) -> ErrorKind {
        ErrorKind::Elf {
            path: path.to_owned(),
            defect,
        }
    }

    /// A failed system call on a process: the one place that turns ESRCH into "exited".
    pub(crate) fn system(pid: i32, operation: Operation, source: io::Error) -> ErrorKind {
        match source.raw_os_error().map(Errno::from_raw) {
            Some(Errno::ESRCH) => ErrorKind::Exited { pid },
            _ => ErrorKind::System {
                pid,
                operation,
                source,
            },
        }
    }
}

/// The kernel's reason without Rust's "(os error 2)".
fn reason(error: &io::Error) -> String {
    match error.raw_os_error() {
        // "Try again", says nix, which sounds like advice.
        Some(libc::EAGAIN) => "Resource temporarily unavailable".to_owned(),
        Some(errno) => Errno::from_raw(errno).desc().to_owned(),
        None => error.to_string(),
    }
}

/// The last line of the regex crate's multi-line drawing, which says what is wrong.
fn regex_reason(error: &regex::Error) -> String {
    let text = error.to_string();
    let last = text.lines().last().unwrap_or_default();
    last.trim_start_matches("error: ").to_owned()
}

fn file_name(path: &Path) -> std::path::Display<'_> {
    path.file_name().map_or(path, Path::new).display()
}

/// Files of memfd_create(2) are called so in the maps.
fn namelessness(path: &Path) -> &'static str {
    match path.as_os_str().as_encoded_bytes().starts_with(b"/memfd:") {
        true => "it is in memory alone (memfd), and its descriptor is closed",
        false => "it was deleted or replaced since it was loaded",
    }
}

/// Where else it may be.
fn unless_in(unreadable: &[PathBuf]) -> String {
    const FEW: usize = 3;
    let names = unreadable.iter().take(FEW);
    let names: Vec<String> = names.map(|path| file_name(path).to_string()).collect();
    let names = names.join(", ");
    match unreadable.len().saturating_sub(FEW) {
        _ if names.is_empty() => String::new(),
        0 => format!(", and {names} could not be looked into"),
        more => format!(", and {names} and {more} more could not be looked into"),
    }
}

fn build_id_suffix(build_id: &Option<BuildId>) -> String {
    match build_id {
        Some(id) => format!(" (build-id {id})"),
        None => String::new(),
    }
}

/// EIO is what /proc/PID/mem says where it must not write; we have tried ptrace then, too.
fn write_obstacle(part: MemoryPart, error: &io::Error) -> &'static str {
    let is_code = matches!(part, MemoryPart::Site | MemoryPart::Trampoline);
    if is_code && error.raw_os_error() == Some(libc::EIO) {
        ": proc_mem.force_override=never and POKETEXT failed"
    } else {
        ""
    }
}

fn did_you_mean(near: &[String]) -> String {
    let quoted: Vec<_> = near.iter().map(|name| format!("\"{name}\"")).collect();
    match quoted.as_slice() {
        [] => String::new(),
        [one] => format!("; did you mean {one}?"),
        [first @ .., last] => format!("; did you mean {} or {last}?", first.join(", ")),
    }
}

fn site_text(found: SiteCode, expected: SiteCode) -> String {
    let reason = if found.has_breakpoint() {
        "a breakpoint or uprobe (gdb, perf, bpftrace) is there"
    } else {
        "file and process differ"
    };
    // Either opcode would do.
    let is_wrong =
        |&at: &usize| found.0[at] != expected.0[at] && !(at == 1 && found.enabled().is_some());
    let differing: Vec<usize> = (0..found.0.len()).filter(is_wrong).collect();
    match differing.as_slice() {
        [1] => format!("found {:02x}, expected 3d or e8: {reason}", found.0[1]),
        [0] => format!("found {:02x}, expected 90: {reason}", found.0[0]),
        _ => format!("found {found}, expected {expected}: {reason}"),
    }
}

fn end_text(signal: Option<i32>) -> String {
    match signal.map(|number| (number, Signal::try_from(number))) {
        Some((_, Ok(signal))) => format!("was killed by {signal}"),
        Some((number, Err(_))) => format!("was killed by signal {number}"),
        None => "ended".to_owned(),
    }
}

/// Some reasons are about the process, others about the attempt.
fn denied(pid: i32, operation: Operation, denial: &Denial) -> String {
    match denial {
        Denial::Yama { .. } | Denial::Seccomp | Denial::Policy | Denial::Unexplained => {
            format!("cannot {operation} {pid}: {denial}")
        }
        Denial::Incapable(of) if matches!(**of, Denial::Yama { .. }) => {
            format!("cannot {operation} {pid}: {denial}")
        }
        _ => format!("{pid} {denial}"),
    }
}

fn state_text(state: char, wchan: &str) -> String {
    let wchan = match wchan {
        "" | "0" => String::new(),
        function => format!(", wchan {function}"),
    };
    match state {
        'D' => format!("in uninterruptible sleep (D{wchan})"),
        'R' => "still running: there is more to run than processors (R)".to_owned(),
        state => format!("busy in the kernel ({state}{wchan})"),
    }
}
