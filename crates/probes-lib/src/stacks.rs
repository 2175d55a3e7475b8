//! [`Stacks`]: what all threads of a process do now: their stacks, and what they wait for.
//!
//! ```text
//! thread       /proc/PID/task/TID: system call, stack pointer and program counter of a blocked thread; no stop
//! wait         system call + arguments → what it waits for
//! descriptors  those that poll(2), select(2) and epoll_wait(2) wait for
//! known        stacks that were found before → the same ones again, without unwinding                pure
//! trampolines  those that observers have mapped into the process
//! mutex        the thread that has the mutex which another one waits for; no stop
//! domain       thread pointer → the domain of OCaml 5 that it belongs to; no stop
//! name         addresses → functions and source lines
//! ```
//!
//! A blocked thread is read while the process runs. If the kernel's count of its time slices has changed meanwhile, the
//! thread has run: what was read is of several moments, and is read again.

mod descriptors;
pub(crate) mod domain;
mod known;
mod memory;
mod mutex;
mod name;
mod report;
#[cfg(test)]
mod tests;
mod thread;
mod trampolines;
mod wait;

use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::fcntl::OFlag;

use crate::address::{LiveAddr, PAGE};
use crate::error::{Error, FREEZERS, Operation, ProcessError, Result};
use crate::functions::Functions;
use crate::memory::ReadMemory;
use crate::observe::frame_id::has_runtime_5;
use crate::observe::read::copied_stack::CopiedStack;
use crate::process::children::children_by_own_id;
use crate::process::maps::read_maps;
use crate::process::memory::{ProcessMemory, read_pages};
use crate::process::{self, Process, denial, sockets};
use crate::select::function::{CollectorWork, FunctionSelector};
use crate::trace::tracer::with_tracer;
use crate::unwind::memory::CachedPages;
use crate::unwind::registers::FrameRegisters;
use crate::unwind::{RawFrame, RawStack, StackEnd, Unwinder};
use domain::Domains;
use known::{KnownStacks, RecordedReads};
use memory::{LimitedMemory, OnlyCode};
use mutex::MutexOwner;
use name::FrameNames;
pub use name::{StackFrame, ThreadRole};
pub use report::{HitStack, StackReport, ThreadStack, ThreadState};
use thread::{KernelEntry, Moment};
pub(crate) use thread::{Slices, SwitchCounts, ThreadFiles, monotonic_now};
pub use wait::{SystemCall, WaitsFor};

/// How many times a blocked thread is read, if it runs during each reading, before it counts as running.
const ATTEMPTS: usize = 5;

/// How often, at most, the files of a process are read again because a stack has code of none of them.
const RELOAD_INTERVAL: Duration = Duration::from_secs(1);

/// How often, at most, it is checked whether files were loaded. If a library is loaded where another one was unloaded, its
/// frames have the names of the earlier one until the next check.
const CHECK_INTERVAL: Duration = Duration::from_millis(50);

/// Returns how long to wait until files are checked again, if a check took `check`: the checks take no more than 2 % of a
/// processor.
pub(crate) fn files_pause(check: Duration) -> Duration {
    CHECK_INTERVAL.max(check.saturating_mul(50))
}

/// The number that the kernel stores for a thread that is in no system call.
const NO_SYSTEM_CALL: u64 = u64::MAX;

/// How many words of the outermost copied frames have to be unchanged when the rest is read.
const MAX_CHECKED: usize = 2;

/// Of how many threads it is known, at most, which pages their stacks were on.
const MAX_KNOWN_THREADS: usize = 1 << 12;

/// How long stopping the threads may take.
const STOP_LIMIT: Duration = Duration::from_millis(500);

/// How long stacks are read once all threads are stopped, plus the time for one stack: the next is read in another stop.
pub(crate) const LONGEST_STOP: Duration = Duration::from_millis(100);

/// Reads the stacks of a process.
///
/// ```no_run
/// use probes_lib::Stacks;
///
/// let mut stacks = Stacks::of_process(4242)?;
/// for thread in stacks.read(true)?.threads {
///     println!("{} {} is {}", thread.tid, thread.name, thread.state);
///     for frame in &thread.frames {
///         println!("    {}", frame.function.as_deref().unwrap_or("?"));
///     }
/// }
/// # Ok::<(), probes_lib::Error>(())
/// ```
pub struct Stacks {
    process: Arc<Process>,
    memory: ProcessMemory,
    functions: Functions,
    unwinder: Unwinder,
    known: KnownStacks,
    names: FrameNames,
    /// `None` if nothing tells the domains of threads.
    domains: Option<Domains>,
    /// When the files were read, or it was last checked whether there are more because code was not known.
    loaded: Instant,
    /// When it is checked next whether there are more although all code is known: it may be that of a file that was unloaded.
    next_check: Instant,
    /// The thread whose stack was read last while the process was stopped.
    last_read: i32,
    /// Of each thread whose stack was read while the process was stopped: the pages that were read for it the last time. To
    /// read them by one system call the next time takes less time than one by one.
    used_pages: HashMap<i32, Vec<u64>>,
}

/// A thread that was read, before its frames are named.
struct ThreadReading {
    tid: i32,
    name: String,
    domain: Option<u32>,
    state: ThreadState,
    kernel_function: Option<String>,
    stack: Option<Arc<RawStack>>,
}

/// What a thread does now, as [`Stacks::look`] finds it.
pub(crate) enum Look {
    Exited,
    Running,
    Blocked(Blocked),
}

/// A thread that does not run, and its stack.
pub(crate) struct Blocked {
    pub(crate) state: ThreadState,
    kernel_function: Option<String>,
    pub(crate) stack: Arc<RawStack>,
    /// As long as they stay the same, it does not run.
    pub(crate) slices: Slices,
    /// When it did not run, by `CLOCK_MONOTONIC`.
    pub(crate) at: Duration,
}

/// The stacks of threads that were stopped for it.
pub(crate) struct StoppedStacks {
    pub(crate) stacks: HashMap<i32, RawStack>,
    /// The system calls that threads were in, by their numbers.
    pub(crate) system_calls: HashMap<i32, u64>,
    /// How often threads had been switched until the stop, with the stop itself, if that was to be read.
    pub(crate) switches: HashMap<i32, SwitchCounts>,
    /// From the beginning of the stop until they ran again, by `CLOCK_MONOTONIC`.
    pub(crate) stop: Range<Duration>,
    /// Those for which there was no time.
    left: HashSet<i32>,
}

/// Returns the pages that a stack is probably on, with this stack pointer: its first two, and those that were `used` the
/// last time.
fn stack_pages(stack_pointer: u64, used: &[u64]) -> Vec<u64> {
    let first = stack_pointer - stack_pointer % PAGE;
    let mut pages = vec![first];
    let others = first.checked_add(PAGE).into_iter();
    for page in used.iter().copied().chain(others) {
        if !pages.contains(&page) {
            pages.push(page);
        }
    }
    pages
}

impl StoppedStacks {
    pub(crate) fn time(&self) -> Duration {
        self.stop.end.saturating_sub(self.stop.start)
    }
}

impl ThreadReading {
    /// Corrects what was found before its stack was read, while it was in this system call: it may have woken up in between.
    fn update_state(&mut self, system_call: Option<u64>) {
        if let ThreadState::Blocked { call, .. } = &self.state {
            if !system_call.is_some_and(|number| call.is_resumed_by(number)) {
                self.state = ThreadState::Running;
                self.kernel_function = None;
            }
        }
    }

    /// Whether its registers are needed to know more.
    fn lacks_registers(&self) -> bool {
        match &self.stack {
            None => true,
            Some(stack) => stack.end != StackEnd::Outermost || stack.is_guessed,
        }
    }
}

impl Stacks {
    /// Reads the functions and unwind tables of a process and its libraries. Does not stop it.
    ///
    /// # Errors
    ///
    /// If there is no such process, or it, or its executable, may not be read.
    pub fn of_process(pid: i32) -> Result<Stacks> {
        let process = Process::open(pid)?;
        process.refuse_without_program()?;
        let memory = ProcessMemory::open(&process, OFlag::O_RDONLY);
        let memory =
            memory.map_err(|source| denial::denied_or_exited(&process, Operation::Read, source))?;
        let functions = Functions::of_process(pid)?;
        let objects = functions.objects().iter();
        let files = objects.filter_map(|object| Some((object.elf(), object.load_bias()?)));
        let mut unwinder = Unwinder::of(files);
        unwinder.set_trampolines(trampolines::mapped_into(&process, &memory));
        let domains = Domains::of_process(&functions);
        Ok(Stacks {
            process: Arc::new(process),
            memory,
            functions,
            unwinder,
            known: KnownStacks::default(),
            names: FrameNames::default(),
            domains,
            loaded: Instant::now(),
            next_check: Instant::now() + CHECK_INTERVAL,
            last_read: 0,
            used_pages: HashMap::new(),
        })
    }

    /// Its pid.
    pub fn pid(&self) -> i32 {
        self.process.pid()
    }

    /// The path of its program, as the kernel names it.
    pub fn program(&self) -> &Path {
        self.functions.program()
    }

    /// The files that are mapped with code in them, and could not be read: stacks end at their code.
    pub fn unreadable(&self) -> impl Iterator<Item = PathBuf> {
        self.functions.unreadable().iter().map(|it| it.path.clone())
    }

    /// Reads the stacks of all threads. Those of blocked threads are read while they are blocked. For the others, and
    /// blocked ones whose frames cannot all be found without their registers, the process is stopped, unless
    /// `is_live`, for as long as it takes to find their frames (about 50 µs for a usual stack); several times, if that is longer
    /// than a tenth of a second.
    ///
    /// # Errors
    ///
    /// If the process has exited, or executed a new program, or may not be read.
    pub fn read(&mut self, is_live: bool) -> Result<StackReport> {
        let mut readings = self.read_threads()?;
        let mut owners = self.owners(&readings);
        self.read_again_owners(&mut readings, &mut owners)?;
        let (mut stopped, mut not_stopped) = (None, None);
        if !is_live {
            let read = self.read_lacking(&mut readings, &mut owners, LONGEST_STOP, &mut stopped);
            match read {
                Ok(()) => {}
                Err(error) if self.process.has_exited() => return Err(error),
                Err(error) => not_stopped = Some(error),
            }
        }
        if self.has_executed() {
            return Err(Error::of_process(self.pid(), ProcessError::Executed));
        }
        // Only those that still hold them, before the frames are named, which takes longer.
        let waits = readings.iter();
        let waits = waits.filter_map(|it| Some((it.tid, it.state.futex()?)));
        let waits: HashSet<(i32, LiveAddr)> = waits.collect();
        owners.retain(|futex, owner| {
            owner.held_it_then
                && owner.holds_as(owner.tid, &self.memory, *futex)
                && !waits.contains(&(owner.tid, *futex))
        });
        let threads = readings.into_iter().map(|reading| self.named(reading));
        let mut threads: Vec<ThreadStack> = threads.collect();
        let children = if threads.iter().any(ThreadStack::waits_for_child) {
            children_by_own_id(&self.process)
        } else {
            Vec::new()
        };
        let waited_for = threads.iter().filter_map(ThreadStack::socket);
        let peers = sockets::peers(&self.process, waited_for.collect());
        for thread in &mut threads {
            thread.set_owner(&owners);
            thread.set_peer(&peers);
            thread.set_child(&children);
        }
        Ok(StackReport {
            threads,
            stopped,
            not_stopped,
        })
    }

    /// Stops the process to read the threads whose frames were not all found, for `longest` and the time for one stack, and
    /// again until all are read; between two stops, it runs as long as it was stopped. Notes which `owners` hold their mutexes
    /// then, and adds up how long the process was `stopped`.
    fn read_lacking(
        &mut self,
        readings: &mut [ThreadReading],
        owners: &mut HashMap<LiveAddr, MutexOwner>,
        longest: Duration,
        stopped: &mut Option<Duration>,
    ) -> Result<()> {
        let lacking = readings.iter().filter(|it| it.lacks_registers());
        let mut lacking: HashSet<i32> = lacking.map(|it| it.tid).collect();
        while !lacking.is_empty() {
            let mut read = self.read_stopped_owners(&lacking, false, longest, owners)?;
            *stopped.get_or_insert(Duration::ZERO) += read.time();
            for reading in readings.iter_mut() {
                if let Some(found) = read.stacks.remove(&reading.tid) {
                    reading.stack = Some(Arc::new(found));
                    let system_call = read.system_calls.get(&reading.tid).copied();
                    reading.update_state(system_call);
                }
            }
            lacking = read.left;
            if !lacking.is_empty() {
                std::thread::sleep(read.stop.end.saturating_sub(read.stop.start));
            }
        }
        Ok(())
    }

    /// Reads all threads without stopping them. If they start each other and exit, all that a list of them names may be gone
    /// when they are read: then reads another one.
    fn read_threads(&mut self) -> Result<Vec<ThreadReading>> {
        for _ in 0..process::ATTEMPTS {
            let tids = self.process.threads().and_then(|mut list| list.read());
            let mut tids = tids.map_err(|source| self.process.exited_or(source))?;
            tids.sort_unstable_by_key(|&tid| (tid != self.process.pid(), tid));
            let mut readings = Vec::new();
            for tid in tids {
                readings.extend(self.read_thread(tid)?);
            }
            if !readings.is_empty() {
                return Ok(readings);
            }
            if self.process.has_exited() {
                break;
            }
        }
        Err(self.process.exited_or(nix::errno::Errno::ESRCH.into()))
    }

    /// Reads a thread without stopping it; `None` if it has exited.
    fn read_thread(&mut self, tid: i32) -> Result<Option<ThreadReading>> {
        let Some(files) = ThreadFiles::open(&self.process, tid)? else {
            return Ok(None);
        };
        let mut reading = ThreadReading {
            tid,
            name: files.name(),
            domain: self.domain(tid),
            state: ThreadState::Running,
            kernel_function: None,
            stack: None,
        };
        let Some(slices) = files.slices()? else {
            return Ok(None);
        };
        match self.look(&files, slices, true)? {
            Look::Exited => return Ok(None),
            Look::Running => {}
            Look::Blocked(blocked) => {
                reading.state = blocked.state;
                reading.kernel_function = blocked.kernel_function;
                reading.stack = Some(blocked.stack);
            }
        }
        Ok(Some(reading))
    }

    /// Returns the frames of a hit of this process, as they were then. Only the copied stack and code are read: a stack
    /// that needs other memory is cut there.
    ///
    /// ```no_run
    /// use probes_lib::{Observation, Options, Selector, Stacks, Target};
    ///
    /// let mut stacks = Stacks::of_process(4242)?;
    /// let observation = Observation::new().watch(Selector::name("cache_miss")).with_stacks();
    /// let mut observer = Target::open(4242)?.observe(&observation, Options::default())?;
    /// for event in observer.events()?.events {
    ///     let copied = event.stack.as_ref();
    ///     for frame in copied.map_or(Vec::new(), |copied| stacks.of_hit(copied).frames) {
    ///         println!("    {}", frame.function.as_deref().unwrap_or("?"));
    ///     }
    /// }
    /// # Ok::<(), probes_lib::Error>(())
    /// ```
    pub fn of_hit(&mut self, copied: &CopiedStack) -> HitStack {
        self.check_files();
        let mut raw = self.of_copied(copied);
        if matches!(raw.end, StackEnd::UnknownCode(_)) && self.reload() {
            raw = self.of_copied(copied);
        }
        let frames = raw.frames.into_iter();
        HitStack {
            frames: frames.map(|frame| self.name(frame)).collect(),
            end: raw.end,
            is_guessed: raw.is_guessed,
        }
    }

    /// Returns the frames of a stack of this process that was copied; one that needs other memory is cut there.
    pub(crate) fn of_copied(&mut self, copied: &CopiedStack) -> RawStack {
        let code = OnlyCode::of(&self.unwinder, &self.memory);
        let mut raw = self
            .unwinder
            .unwind(copied.registers(), &mut copied.over(code));
        if let StackEnd::Unreadable(at) = raw.end {
            raw.end = StackEnd::NotCopied;
            if raw.frames.len() == 1 && copied.is_popped(at) {
                let word = self.memory.read_word(at).ok();
                let copied = word.map(|word| copied.with_popped(word));
                let guessed = copied.and_then(|copied| self.of_popped(&copied));
                return guessed.unwrap_or(raw);
            }
        }
        raw
    }

    /// Returns the frames of an incomplete stack that was copied a moment ago. What was not copied is read as it is
    /// now: the frames of a deep stack, and those of other stacks of the thread. `None` if the copy is complete, or if
    /// what is there now does not lead to the end of the stack through calls alone.
    ///
    /// The thread may have gone on: outer frames stay as they are until it returns to them.
    pub(crate) fn completed(&mut self, copied: &CopiedStack) -> Option<RawStack> {
        if self.of_copied(copied).end != StackEnd::NotCopied {
            return None;
        }
        let now = LimitedMemory::of(CachedPages::new(&self.memory));
        let mut memory = copied.over(now);
        let mut raw = self.unwinder.unwind(copied.registers(), &mut memory);
        raw.is_guessed = true;
        let are_called = self.unwinder.are_called(&raw.frames, &mut memory);
        let is_whole = raw.end == StackEnd::Outermost && are_called;
        let is_as_copied = |&(at, word)| self.memory.read_word(LiveAddr(at)).ok() == Some(word);
        let last = memory.words().rchunks(MAX_CHECKED).next();
        (is_whole && last.unwrap_or_default().iter().all(is_as_copied)).then_some(raw)
    }

    /// Returns the frames of a stack to which the return address of the innermost function was added. `caml_c_call` of
    /// OCaml 4 pops it, and a copy begins at the stack pointer. What the stack has there now is of this call, or of a
    /// later one. `None` unless it is after a call of this function, and leads to the end of the stack.
    fn of_popped(&mut self, copied: &CopiedStack) -> Option<RawStack> {
        let mut code = copied.over(OnlyCode::of(&self.unwinder, &self.memory));
        let mut raw = self.unwinder.unwind(copied.registers(), &mut code);
        let [innermost, caller, ..] = raw.frames[..] else {
            return None;
        };
        let is_called = self.unwinder.is_call_of(innermost, caller, &mut code);
        raw.is_guessed = true;
        (is_called && raw.end == StackEnd::Outermost).then_some(raw)
    }

    /// Reads the files again if the process has loaded more since, if it is time to: such a file may be where another one was.
    fn check_files(&mut self) {
        let begun = Instant::now();
        if self.next_check <= begun {
            self.read_again();
            self.next_check = Instant::now() + files_pause(begun.elapsed());
        }
    }

    /// Reads the files again if the process has loaded more since, and looks for what observers have mapped, at most once
    /// each [`RELOAD_INTERVAL`]; returns whether anything is new.
    fn reload(&mut self) -> bool {
        if self.loaded.elapsed() < RELOAD_INTERVAL {
            return false;
        }
        self.loaded = Instant::now();
        self.read_again()
    }

    fn read_again(&mut self) -> bool {
        if self.has_executed() {
            return false;
        }
        if !self.has_loaded_more() {
            return self.find_trampolines();
        }
        let Ok(again) = Stacks::of_process(self.process.pid()) else {
            return false;
        };
        // It may have executed another program meanwhile, or the pid may be another process.
        if self.has_executed() || self.process.has_exited() {
            return false;
        }
        *self = again;
        true
    }

    /// Returns what a thread does, without stopping it; `slices` were just read. Finds out what it waits for only if
    /// `tells_reason`.
    pub(crate) fn look(
        &mut self,
        files: &ThreadFiles,
        slices: Slices,
        tells_reason: bool,
    ) -> Result<Look> {
        let mut before = Some(slices);
        for _ in 0..ATTEMPTS {
            let slices = match before.take() {
                None => files.slices()?,
                slices => slices,
            };
            let moment = slices.map(|slices| files.moment_since(slices));
            let Some(moment) = moment.transpose()?.flatten() else {
                return Ok(Look::Exited);
            };
            let Some(entry) = moment.entry() else {
                break;
            };
            // The first thread of a process is kept until all have exited.
            if entry.stack_pointer == 0 && files.is_exiting() {
                return Ok(Look::Exited);
            }
            // If it has not run since that moment, it was blocked then.
            let at = monotonic_now();
            let kernel_function = files.kernel_function();
            let (state, stack) = if tells_reason {
                self.find_stack(files, &moment, &entry, kernel_function.as_deref(), true)?
            } else {
                self.find_known(files, &moment, &entry, kernel_function.as_deref())?
            };
            if !files.has_run_since(&moment)? {
                return Ok(Look::Blocked(Blocked {
                    state,
                    kernel_function,
                    stack,
                    slices: moment.slices,
                    at,
                }));
            }
        }
        Ok(Look::Running)
    }

    /// Returns what a thread in the kernel does, and its stack. If the thread waited in the same place before, these
    /// are those of that time.
    fn find_known(
        &mut self,
        files: &ThreadFiles,
        moment: &Moment,
        entry: &KernelEntry,
        kernel_function: Option<&str>,
    ) -> Result<(ThreadState, Arc<RawStack>)> {
        let mut memory = CachedPages::new(&self.memory);
        let mut entry = *entry;
        if entry.call.is_some_and(|call| call.is_restart()) {
            let restarted = self.known.restarted(&entry, &mut memory);
            if let (Some(call), Some(number)) = (&mut entry.call, restarted) {
                call.number = number;
            }
        }
        // The function of the kernel is another one in a thread that is stopped or frozen.
        if kernel_function.is_some() || !files.is_stopped() {
            if let Some(known) = self.known.find(&entry, kernel_function, &mut memory) {
                return Ok(known);
            }
        }
        self.find_stack(files, moment, &entry, kernel_function, false)
    }

    fn find_stack(
        &mut self,
        files: &ThreadFiles,
        moment: &Moment,
        entry: &KernelEntry,
        kernel_function: Option<&str>,
        tells_reason: bool,
    ) -> Result<(ThreadState, Arc<RawStack>)> {
        let state = self.state_at(files, entry, kernel_function, tells_reason);
        let mut memory = CachedPages::new(&self.memory);
        let mut memory = RecordedReads::of(&mut memory, &self.unwinder);
        let stack = self.unwinder.unwind(entry.registers(), &mut memory);
        let (stack, reads) = (Arc::new(stack), memory.reads());
        if !tells_reason && !files.has_run_since(moment)? {
            let found = (&state, &stack);
            let unwinder = &mut self.unwinder;
            self.known
                .add(entry, kernel_function, found, reads, unwinder);
        }
        Ok((state, stack))
    }

    fn state_at(
        &self,
        files: &ThreadFiles,
        entry: &KernelEntry,
        kernel_function: Option<&str>,
        tells_reason: bool,
    ) -> ThreadState {
        if files.is_stopped() {
            return ThreadState::Stopped;
        }
        if kernel_function.is_some_and(|name| FREEZERS.contains(&name)) {
            return ThreadState::Frozen;
        }
        match entry.call {
            Some(mut call) => {
                if call.is_restart() {
                    let mut before = [0; wait::BEFORE_SYSCALL];
                    let at = entry.program_counter.wrapping_sub(before.len() as u64);
                    let read = self.memory.read(LiveAddr(at), &mut before);
                    let restarted = read.ok().and_then(|()| wait::restarted(&before));
                    let restarted = restarted.or_else(|| wait::restarted_in(kernel_function?));
                    call.number = restarted.unwrap_or(call.number);
                }
                let find = || {
                    let directory = files.directory();
                    wait::waits_for(&self.process, &self.memory, directory, &call)
                };
                let waits_for = tells_reason.then(find);
                ThreadState::Blocked {
                    waits_for: waits_for.flatten(),
                    call,
                }
            }
            None => ThreadState::Waiting,
        }
    }

    /// Stops the process and reads these threads, at least one and then as many as there is time for until all have been
    /// stopped for `longest`; and how often they have been switched if it `counts_switches`.
    pub(crate) fn read_stopped(
        &mut self,
        tids: &HashSet<i32>,
        counts_switches: bool,
        longest: Duration,
    ) -> Result<StoppedStacks> {
        self.read_stopped_owners(tids, counts_switches, longest, &mut HashMap::new())
    }

    /// The same; notes of the `owners` among them whether they hold their mutexes.
    fn read_stopped_owners(
        &mut self,
        tids: &HashSet<i32>,
        counts_switches: bool,
        longest: Duration,
        owners: &mut HashMap<LiveAddr, MutexOwner>,
    ) -> Result<StoppedStacks> {
        let (process, memory, unwinder) = (&*self.process, &self.memory, &mut self.unwinder);
        let (last_read, used_pages) = (&mut self.last_read, &mut self.used_pages);
        if used_pages.len() > MAX_KNOWN_THREADS {
            used_pages.clear();
        }
        process.refuse_self_and_ancestors()?;
        with_tracer(&[process], |tracer| {
            let begun = monotonic_now();
            let stopped = tracer.stop(process, STOP_LIMIT)?;
            // To stop thousands of threads takes as long, and is no reason to do it once for each.
            let since = Instant::now();
            let mut pages = CachedPages::new(memory);
            let (mut stacks, mut system_calls) = (HashMap::new(), HashMap::new());
            let (mut switches, mut left) = (HashMap::new(), HashSet::new());
            // First those after the last one that there was time for: no thread is always without a stack.
            let mut wanted: Vec<i32> = stopped.tids().filter(|tid| tids.contains(tid)).collect();
            wanted.sort_unstable_by_key(|&tid| (tid <= *last_read, tid));
            for tid in wanted {
                if counts_switches {
                    let count = SwitchCounts::of_thread(process, tid);
                    switches.extend(count.map(|count| (tid, count)));
                }
                if !stacks.is_empty() && since.elapsed() >= longest {
                    left.insert(tid);
                    continue;
                }
                *last_read = tid;
                if let Ok(registers) = stopped.calls().registers(tid) {
                    let used = used_pages.entry(tid).or_default();
                    let wanted = stack_pages(registers.rsp, used);
                    let read = read_pages(process, &wanted);
                    pages.add(wanted.into_iter().zip(read));
                    let stack = unwinder.unwind(FrameRegisters::of_thread(&registers), &mut pages);
                    *used = pages.take_used();
                    for (futex, owner) in owners.iter_mut().filter(|(_, it)| it.tid == tid) {
                        owner.held_it_then = owner.holds_as(tid, memory, *futex);
                    }
                    stacks.insert(tid, stack);
                    if registers.orig_rax != NO_SYSTEM_CALL {
                        system_calls.insert(tid, registers.orig_rax);
                    }
                }
            }
            stopped.refuse_lost()?;
            drop(stopped);
            let stop = begun..monotonic_now();
            Ok(StoppedStacks {
                stacks,
                system_calls,
                switches,
                stop,
                left,
            })
        })
    }

    fn named(&mut self, reading: ThreadReading) -> ThreadStack {
        let (frames, end, is_guessed) = match reading.stack {
            Some(stack) => (stack.frames.clone(), Some(stack.end), stack.is_guessed),
            None => (Vec::new(), None, false),
        };
        let frames: Vec<Arc<StackFrame>> = frames
            .into_iter()
            .map(|frame| self.names.of(&self.functions, frame))
            .collect();
        ThreadStack {
            role: ThreadRole::of(&frames, reading.tid == self.process.pid()),
            tid: reading.tid,
            name: reading.name,
            domain: reading.domain,
            state: reading.state,
            kernel_function: reading.kernel_function,
            frames,
            end,
            is_guessed,
        }
    }

    /// Returns which threads hold the mutexes that others wait for, by the addresses of their futexes. Some may be no mutexes.
    fn owners(&self, readings: &[ThreadReading]) -> HashMap<LiveAddr, MutexOwner> {
        let futexes = readings.iter().filter_map(|it| it.state.futex());
        let owned = futexes.filter_map(|it| Some((it, mutex::owner(&self.memory, it)?)));
        let owned: HashMap<LiveAddr, i32> = owned.collect();
        if owned.is_empty() {
            return HashMap::new();
        }
        // A mutex has the id of its owner in the innermost of the pid namespaces.
        let by_own_id = readings.iter().filter_map(|reading| {
            let status = self.process.thread_status(reading.tid).ok()?;
            Some((status.innermost, reading.tid))
        });
        let by_own_id: HashMap<i32, i32> = by_own_id.collect();
        let owners = owned.into_iter().filter_map(|(futex, own_id)| {
            let tid = *by_own_id.get(&own_id)?;
            let held_it_then = false;
            let owner = MutexOwner {
                own_id,
                tid,
                held_it_then,
            };
            Some((futex, owner))
        });
        owners.collect()
    }

    /// Reads again the threads that hold mutexes: before, they may not have held them yet. Notes whether they hold them.
    fn read_again_owners(
        &mut self,
        readings: &mut [ThreadReading],
        owners: &mut HashMap<LiveAddr, MutexOwner>,
    ) -> Result<()> {
        let tids: HashSet<i32> = owners.values().map(|owner| owner.tid).collect();
        for reading in readings.iter_mut().filter(|it| tids.contains(&it.tid)) {
            let tid = reading.tid;
            let Some(files) = ThreadFiles::open(&self.process, tid)? else {
                continue;
            };
            let before = files.slices()?;
            for (futex, owner) in owners.iter_mut().filter(|(_, it)| it.tid == tid) {
                owner.held_it_then = owner.holds_as(tid, &self.memory, *futex);
            }
            if let Some(again) = self.read_thread(tid)? {
                *reading = again;
            }
            // If it has run meanwhile, its stack may be of a moment when it did not hold them.
            if reading.stack.is_some() && files.slices()? != before {
                let its = owners.values_mut().filter(|it| it.tid == tid);
                its.for_each(|it| it.held_it_then = false);
            }
        }
        Ok(())
    }

    /// Returns where the functions are that do the work of the collector.
    pub(crate) fn code_of_collector(&self) -> Result<Vec<Range<u64>>> {
        let mut code = Vec::new();
        let mut missing = None;
        for work in CollectorWork::ALL {
            match self.functions.select(&[FunctionSelector::Collector(work)]) {
                Ok(found) => code.extend(found.iter().filter_map(|it| {
                    let start = it.address()?.0;
                    Some(start..start.saturating_add(it.function.len()))
                })),
                Err(error) => missing = missing.or(Some(error)),
            }
        }
        match missing {
            Some(error) if code.is_empty() => Err(error),
            _ => Ok(code),
        }
    }

    /// Returns the function and the source line of a frame.
    pub(crate) fn name(&mut self, frame: RawFrame) -> Arc<StackFrame> {
        self.names.of(&self.functions, frame)
    }

    /// Returns whether something may tell the domains of threads.
    pub(crate) fn knows_domains(&self) -> bool {
        self.domains.is_some()
    }

    /// Returns the domain that a thread belongs to now, if that can be determined. Does not stop it.
    pub(crate) fn domain(&self, tid: i32) -> Option<u32> {
        self.domains.as_ref()?.of_thread(tid, &self.memory)
    }

    /// Returns whether OCaml code is on stacks of its own, those of fibers.
    pub(crate) fn has_fibers(&self) -> bool {
        let mut objects = self.functions.objects().iter();
        objects.any(|object| has_runtime_5(object.elf()))
    }

    pub(crate) fn process(&self) -> &Arc<Process> {
        &self.process
    }

    /// Returns whether the process has executed a new program.
    pub(crate) fn has_executed(&self) -> bool {
        matches!(self.memory.random_bytes(&self.process), Ok(None)) && !self.process.has_exited()
    }

    /// Returns whether code of a file that was mapped when the files were read was not mapped any more when they were read
    /// `again`.
    pub(crate) fn has_unloaded(&self, again: &Stacks) -> bool {
        let (before, now) = (self.functions.mapped(), again.functions.mapped());
        !before.is_within(now)
    }

    /// Looks for the trampolines that observers have mapped; returns whether they are others than before.
    pub(crate) fn find_trampolines(&mut self) -> bool {
        let mapped = trampolines::mapped_into(&self.process, &self.memory);
        let are_others = mapped != self.unwinder.trampolines();
        if are_others {
            self.unwinder.set_trampolines(mapped);
        }
        are_others
    }

    /// Returns whether code of a file is mapped that was not when the files were read.
    pub(crate) fn has_loaded_more(&self) -> bool {
        let mut mapped = self.functions.mapped().clone();
        let maps = read_maps(&self.process).unwrap_or_default();
        maps.iter().any(|mapping| mapped.insert(mapping))
    }
}
