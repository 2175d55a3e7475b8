//! [`EventsSwitch`]: how runtime events are switched on in a running process while it is observed, and off again.
//!
//! ```text
//! never on before   trampoline at caml_handle_gc_interrupt ─▶ caml_runtime_events_start(), once ─▶ file is unlinked
//! on before         the flag `runtime_events_enabled` is set
//! paused            the flag `runtime_events_paused` is cleared
//! at the end        the flags are restored as they were found: by this tool or, if it is killed, by the next one
//! ```
//!
//! `caml_runtime_events_start` makes a stop-the-world request. If another domain makes one first, the caller has to
//! join that one, which may be a minor collection: so it can be called only where a minor collection is safe. The entry
//! of `caml_handle_gc_interrupt` is such a place, because that function itself begins by joining requests. The entry of
//! `caml_garbage_collection` is not: the allocation that has failed is not undone there yet, so that after a collection
//! the program would write beyond its minor heap (runtime/minor_gc.c, `caml_alloc_small_dispatch`).

use std::io;
use std::path::PathBuf;
use std::sync::{Mutex, OnceLock, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crate::address::{LiveAddr, LoadBias};
use crate::elf::ElfFile;
use crate::elf::symbols::SymbolTable;
use crate::error::{Effect, Error, MemoryPart, Operation, Result, RuntimeEventsError};
use crate::functions::Functions;
use crate::memory::{ReadMemory, WriteMemory};
use crate::observe::layout::semaphores::{ChangedWord, WordChange};
use crate::observe::observation::{CallOnce, Observation};
use crate::observe::read::counts::Counts;
use crate::process::maps::Mapping;
use crate::process::memory::ProcessMemory;
use crate::process::seccomp::OwnFilters;
use crate::runtime_events::ring_file::RingFile;
use crate::runtime_events::{OCAML_SYMBOL, known_names_of_process, ring_mapping};
use crate::select::function::FunctionSelector;
use crate::select::function::OCAML_5_SYMBOL;
use crate::site::RET;
use crate::stacks::domain::{Domains, INTERRUPTED};
use crate::target::Target;
use crate::ticks;

/// The function that gets the trampoline: its first call switches events on.
const POLL: &str = "caml_handle_gc_interrupt";

/// The symbols that a switch needs: [`POLL`], and functions and variables of runtime/runtime_events.c.
const NAMES: [&str; 7] = [
    POLL,
    "caml_runtime_events_start",
    "runtime_events_enabled",
    "runtime_events_paused",
    "current_metadata",
    "runtime_events_path",
    "ring_size_words",
];

/// The longest path that is read, in bytes.
const MAX_PATH: usize = 4096;

/// How many bytes of `caml_runtime_events_start` are searched for its return.
const MAX_START: u64 = 4096;

/// How long the call may take to return once it has set the flag: then it only lets the other domains run on.
const SETTLED: Duration = Duration::from_millis(200);

/// How often it is checked whether a process can still create the file.
const CHECK_INTERVAL: Duration = Duration::from_millis(20);

/// How long the call that switches events on may take.
const CALL_TIMEOUT: Duration = Duration::from_secs(2);

/// How events can be switched on.
pub(crate) struct EventsSwitch {
    once: CallOnce,
    /// The address of the flag `runtime_events_enabled`.
    enabled: LiveAddr,
    paused: LiveAddr,
    domains: Option<Domains>,
    /// The file that the process will create, or that an earlier tool has made it create; `None` if its events are only paused.
    file: Option<RingFile>,
    /// Whether the name of the file is still to be removed.
    is_named: bool,
    /// Whether the flag that says that events are paused was not set.
    was_not_paused: bool,
    /// When it was last checked whether the process can create the file.
    checked: Mutex<Instant>,
    /// The events were off at least until this time, by CLOCK_MONOTONIC.
    pub(crate) off_until: u64,
    /// When the events were first seen to be on.
    on_since: OnceLock<Instant>,
}

/// Where the runtime of a process has the functions and variables that a switch needs: [`NAMES`].
struct RuntimeSymbols {
    poll: LiveAddr,
    start: LiveAddr,
    /// A `ret` of `start`, if one was found among its first [`MAX_START`] bytes.
    ret: Option<LiveAddr>,
    enabled: LiveAddr,
    paused: LiveAddr,
    metadata: LiveAddr,
    path: LiveAddr,
    ring_size: LiveAddr,
}

/// Whether a process writes runtime events, by its flags and its file.
enum EventsState {
    On,
    Paused,
    /// Off, but their file is there: only a tool leaves them so.
    Left {
        is_paused: bool,
    },
    NeverOn,
    Unknown,
}

impl EventsSwitch {
    /// Returns how the events of a process can be switched on; `None` if they are on already.
    ///
    /// # Errors
    ///
    /// See `Target::switch_on_events`.
    pub(crate) fn of(target: &Target) -> Result<Option<EventsSwitch>> {
        let process = target.opened.process();
        let pid = target.pid();
        let mapping = ring_mapping(process)?;
        let functions = Functions::to_select_of(pid)?;
        let Some(symbols) = RuntimeSymbols::of_process(&functions) else {
            return match mapping {
                Some(_) => Ok(None),
                None => Err(without_symbols(pid, &functions)),
            };
        };
        // For other versions, it is not known whether a minor collection is safe at the entry of `POLL`.
        known_names_of_process(process, &target.opened.maps()?)?;
        let memory = target.opened.unshadowed_memory_to_read()?;
        let Some((word, file)) = symbols.change(target, &memory, mapping.as_ref())? else {
            return Ok(None);
        };
        let Some(ret) = symbols.ret else {
            let why = "the code of its runtime is none that is known";
            return Err(cannot_switch_on(pid, why));
        };
        let status = process.status();
        let status = status.map_err(|source| process.exited_or(source))?;
        Ok(Some(EventsSwitch {
            once: CallOnce {
                before: symbols.poll,
                callee: symbols.start,
                ret,
                pid: status.innermost,
                word,
            },
            enabled: symbols.enabled,
            paused: symbols.paused,
            domains: Domains::of_process(&functions),
            is_named: file.is_some() && mapping.as_ref().is_none_or(|it| !it.is_deleted()),
            file,
            was_not_paused: read_word(pid, &memory, symbols.paused)? == 0,
            checked: Mutex::new(Instant::now()),
            off_until: ticks::monotonic(),
            on_since: OnceLock::new(),
        }))
    }

    /// Returns an observation that also switches the events on.
    pub(crate) fn added_to(&self, observation: &Observation) -> Observation {
        // By address, not by name: functions of that name in objects that are loaded later are not wanted.
        let poll = FunctionSelector::Address(self.once.before);
        let mut observation = observation.clone().count_functions(poll);
        observation.calls_once = Some(self.once);
        observation
    }

    /// Makes each domain poll at its next allocation, if events are not on. Otherwise a domain polls only when its
    /// minor heap is full. Does nothing if it is not known where the domains are: then the caller has to wait for
    /// that.
    pub(crate) fn interrupt_domains(&self, target: &Target) -> Result<()> {
        if self.is_enabled(target)? {
            return Ok(());
        }
        let Some(domains) = &self.domains else {
            return Ok(());
        };
        let process = target.opened.process();
        let threads = process.threads().and_then(|mut it| it.read());
        let threads = threads.map_err(|source| process.exited_or(source))?;
        let memory = target.opened.unshadowed_memory()?;
        for tid in threads {
            if let Some(word) = domains.interrupt_word(tid, &memory) {
                write_word(target, word, INTERRUPTED)?;
            }
        }
        Ok(())
    }

    /// Returns whether they are on by now.
    pub(crate) fn is_enabled(&self, target: &Target) -> Result<bool> {
        let memory = target.opened.unshadowed_memory_to_read()?;
        let is_on = read_word(target.pid(), &memory, self.enabled)? == 1;
        if is_on {
            self.on_since.get_or_init(Instant::now);
        }
        Ok(is_on)
    }

    /// Checks that nothing prevents the events: before they are on, that the process can still create their file;
    /// afterwards, that the disk does not get full. `counts` reads the counts of the observation.
    ///
    /// # Errors
    ///
    /// [`RuntimeEventsError::CannotSwitchOn`], [`RuntimeEventsError::NoRoom`]; or if `counts` fails.
    pub(crate) fn refuse_hindered(
        &self,
        target: &Target,
        is_on: bool,
        counts: impl Fn() -> Result<Counts>,
    ) -> Result<()> {
        let Some(file) = &self.file else {
            return Ok(());
        };
        let pid = target.pid();
        if is_on {
            let full = |free| Error::of_process(pid, RuntimeEventsError::NoRoom { free });
            return file.refuse_full().map_err(full);
        }
        let mut checked = self.checked.lock().unwrap_or_else(PoisonError::into_inner);
        let creates = self.once.word.change == WordChange::ClearAtEnd;
        if !creates || checked.elapsed() < CHECK_INTERVAL {
            return Ok(());
        }
        *checked = Instant::now();
        let Err(why) = file.refuse_again(target.opened.process()) else {
            return Ok(());
        };
        // If the call has begun, it is too late to refuse it, and what was found may be the file that it has just created.
        if self.has_begun(&counts()?) {
            return Ok(());
        }
        Err(cannot_switch_on(pid, why))
    }

    /// Removes the name of the file that the process has created; does nothing if there is no file yet. The process
    /// still writes to the file, and readers that have opened it still read it. If the name cannot be removed, returns
    /// the path and the reason.
    ///
    /// # Errors
    ///
    /// If the process has exited.
    pub(crate) fn remove_file(&mut self, target: &Target) -> Result<Option<(PathBuf, io::Error)>> {
        let Some(mapping) = ring_mapping(target.opened.process())? else {
            return Ok(None);
        };
        let process = target.opened.process();
        let named = self.file.as_ref().filter(|_| self.is_named);
        let left = named.and_then(|file| {
            let error = file.remove(process, &mapping).err()?;
            Some((file.path(), error))
        });
        self.is_named = false;
        Ok(left)
    }

    /// If the call that switches events on has begun, waits until it has set the flag, and has probably returned, so that
    /// the flag can be cleared for good; at most [`CALL_TIMEOUT`]. `counts` reads the counts of the observation.
    ///
    /// # Errors
    ///
    /// If the process has exited, or `counts` fails.
    pub(crate) fn wait_for_begun_call(
        &mut self,
        target: &Target,
        counts: impl Fn() -> Result<Counts>,
    ) -> Result<()> {
        let begun = Instant::now();
        // If we cleared the flag before a call that has begun sets it, it would stay set.
        while self.has_begun(&counts()?) && !self.is_enabled(target)? {
            if begun.elapsed() > CALL_TIMEOUT {
                break;
            }
            thread::sleep(Duration::from_millis(1));
        }
        if self.is_enabled(target)? {
            self.settle();
            // The file may have been created after the last attempt to remove its name.
            let _ = self.remove_file(target)?;
        }
        Ok(())
    }

    /// Undoes a call that began after [`EventsSwitch::wait_for_begun_call`] looked: waits for it in the same way, and
    /// clears the flag. To be called once the observation is removed; `counts` are its last ones.
    ///
    /// # Errors
    ///
    /// If the process has exited, or cannot be written to.
    pub(crate) fn undo_late_call(&mut self, target: &Target, counts: &Counts) -> Result<()> {
        if self.on_since.get().is_some() || !self.has_begun(counts) {
            return Ok(());
        }
        let begun = Instant::now();
        while !self.is_enabled(target)? {
            // The call maps the file before it sets the flag: it may also have done both before the removal.
            let is_mapped = ring_mapping(target.opened.process())?.is_some();
            if begun.elapsed() > if is_mapped { SETTLED } else { CALL_TIMEOUT } {
                break;
            }
            thread::sleep(Duration::from_millis(1));
        }
        self.settle();
        let _ = self.remove_file(target)?;
        if !self.is_enabled(target)? {
            return Ok(());
        }
        clear(target, self.enabled)
    }

    /// Clears the flag that says that events are paused, if the program has set it since we switched the events on.
    /// While events are off, the flag has no effect, and nothing else would clear it.
    ///
    /// # Errors
    ///
    /// If the process has exited, or cannot be written to.
    pub(crate) fn undo_pause(&self, target: &Target) -> Result<()> {
        let memory = target.opened.unshadowed_memory_to_read()?;
        let is_paused = read_word(target.pid(), &memory, self.paused)? == 1;
        if is_paused && self.was_not_paused && !self.is_enabled(target)? {
            return clear(target, self.paused);
        }
        Ok(())
    }

    /// Returns whether the call that switches events on has begun.
    fn has_begun(&self, counts: &Counts) -> bool {
        let mut polls = counts.functions();
        polls.any(|it| it.address == self.once.before && it.hits > 0)
    }

    /// Waits until the call that has set the flag has probably returned: `caml_runtime_events_start` looks at the flag again once
    /// all domains run, and if it is not set, creates another file and sets it again.
    fn settle(&self) {
        let since = self.on_since.get().map_or(SETTLED, Instant::elapsed);
        thread::sleep(SETTLED.saturating_sub(since));
    }
}

impl RuntimeSymbols {
    fn of(elf: &ElfFile, bias: LoadBias) -> Option<RuntimeSymbols> {
        let table = elf.symbols(SymbolTable::Static).ok()??;
        let found = table.find(NAMES).ok()?;
        let mut addresses = [LiveAddr(0); NAMES.len()];
        for (address, found) in addresses.iter_mut().zip(&found) {
            let [only] = found.as_slice() else {
                return None;
            };
            *address = bias.live(only.address);
        }
        let [poll, start, enabled, paused, metadata, path, ring_size] = addresses;
        // As the file has it: in the process, other jumps may be there.
        let in_file = found[1].first()?;
        let mut code = vec![0; in_file.len.min(MAX_START) as usize];
        elf.read_address(in_file.address, &mut code)?;
        let offset = code.iter().position(|&byte| byte == RET);
        Some(RuntimeSymbols {
            poll,
            start,
            ret: offset.map(|offset| start.plus(offset as u64)),
            enabled,
            paused,
            metadata,
            path,
            ring_size,
        })
    }

    /// Returns how the flags have to be changed, and the file that the process will create, if it will; `None` if events are on.
    fn change(
        &self,
        target: &Target,
        memory: &ProcessMemory,
        mapping: Option<&Mapping>,
    ) -> Result<Option<(ChangedWord, Option<RingFile>)>> {
        let pid = target.pid();
        let change = |at, change| ChangedWord { at, change };
        Ok(match self.state(pid, memory, mapping)? {
            EventsState::On => None,
            EventsState::Paused => Some((change(self.paused, WordChange::Clear), None)),
            EventsState::Left { is_paused: false } => {
                // A tool that was killed may also leave the name of the file.
                let file = self.file(target, memory).ok();
                if let Some(Err(free)) = file.as_ref().map(RingFile::refuse_full) {
                    let why = format!("only {free} bytes are free on the disk of their file");
                    return Err(cannot_switch_on(pid, why));
                }
                Some((change(self.enabled, WordChange::Set), file))
            }
            EventsState::NeverOn => {
                let file = self.file_to_create(target, memory)?;
                Some((change(self.enabled, WordChange::ClearAtEnd), Some(file)))
            }
            EventsState::Left { is_paused: true } | EventsState::Unknown => {
                let why = "their state is none that is known";
                return Err(cannot_switch_on(pid, why));
            }
        })
    }

    /// Returns the state of the events of a process, whose file is mapped at `mapping`.
    fn state(
        &self,
        pid: i32,
        memory: &ProcessMemory,
        mapping: Option<&Mapping>,
    ) -> Result<EventsState> {
        let word = |at| read_word(pid, memory, at);
        let metadata = word(self.metadata)?;
        let is_mapped = mapping.is_some_and(|it| it.start.0 == metadata);
        Ok(match (word(self.enabled)?, word(self.paused)?) {
            (1, 0) => EventsState::On,
            (1, 1) => EventsState::Paused,
            (0, paused @ (0 | 1)) if is_mapped => EventsState::Left {
                is_paused: paused == 1,
            },
            (0, 0) => EventsState::NeverOn,
            _ => EventsState::Unknown,
        })
    }

    /// Returns where the file of the process is, or will be.
    fn file(&self, target: &Target, memory: &ProcessMemory) -> Result<RingFile> {
        let (process, pid) = (target.opened.process(), target.pid());
        let path = read_path(pid, memory, read_word(pid, memory, self.path)?)?;
        // An `int`.
        let words = read_word(pid, memory, self.ring_size)? & u64::from(u32::MAX);
        let file = RingFile::of(process, path.as_deref(), words);
        file.map_err(|why| cannot_switch_on(pid, why))
    }

    /// Returns the file that the process will create, if it can.
    fn file_to_create(&self, target: &Target, memory: &ProcessMemory) -> Result<RingFile> {
        let (process, pid) = (target.opened.process(), target.pid());
        let filters = OwnFilters::of(process).has_any();
        if filters.map_err(|source| process.exited_or(source))? {
            let why = "it has a seccomp filter of its own, which may not let it create their file";
            return Err(cannot_switch_on(pid, why));
        }
        let mut file = self.file(target, memory)?;
        let refused = file.refuse(process);
        refused.map_err(|why| cannot_switch_on(pid, why))?;
        Ok(file)
    }

    /// Returns those of the runtime of a process; `None` if it has none with symbols.
    fn of_process(functions: &Functions) -> Option<RuntimeSymbols> {
        let mut objects = functions.objects().iter();
        objects.find_map(|it| RuntimeSymbols::of(it.elf(), it.load_bias()?))
    }
}

/// Removes what a killed tool has left in a process whose events are off and have a file: the name of the file, and the
/// flag that says that events are paused. The flag has no effect while events are off, and the program could not clear
/// it.
///
/// # Errors
///
/// If the process has exited, or cannot be read or written to.
pub(crate) fn remove_left(target: &Target) -> Result<()> {
    let (process, pid) = (target.opened.process(), target.pid());
    let Some(mapping) = ring_mapping(process)? else {
        return Ok(());
    };
    let functions = Functions::to_select_of(pid)?;
    let Some(symbols) = RuntimeSymbols::of_process(&functions) else {
        return Ok(());
    };
    let memory = target.opened.unshadowed_memory_to_read()?;
    let state = || symbols.state(pid, &memory, Some(&mapping));
    if !matches!(state()?, EventsState::Left { .. }) {
        return Ok(());
    }
    // If the program switches them on itself right now, the file is there before the flag is set.
    thread::sleep(SETTLED);
    let EventsState::Left { is_paused } = state()? else {
        return Ok(());
    };
    if is_paused {
        clear(target, symbols.paused)?;
    }
    // If that fails, a file is left that nobody needs.
    let file = symbols.file(target, &memory);
    let _ = file.map(|file| file.remove(process, &mapping));
    Ok(())
}

/// Clears a flag of the runtime.
fn clear(target: &Target, flag: LiveAddr) -> Result<()> {
    write_word(target, flag, 0)
}

fn write_word(target: &Target, at: LiveAddr, word: u64) -> Result<()> {
    let memory = target.opened.unshadowed_memory()?;
    let written = memory.while_it_runs().write_code(at, &word.to_le_bytes());
    written.map_err(|source| Error::of_write(target.pid(), MemoryPart::RuntimeFlag, at, source))
}

/// Returns why events cannot be switched on in a process without the symbols that this needs, whose events are off.
fn without_symbols(pid: i32, functions: &Functions) -> Error {
    let has = |name| {
        let mut objects = functions.objects().iter();
        objects.any(|it| it.elf().data_symbol(name).is_some())
    };
    if has(OCAML_5_SYMBOL) {
        cannot_switch_on(
            pid,
            "its runtime lacks the symbols that this needs (stripped?)",
        )
    } else if has(OCAML_SYMBOL) {
        Error::of_process(pid, RuntimeEventsError::Ocaml4)
    } else {
        Error::of_process(pid, RuntimeEventsError::NoRuntime)
    }
}

fn cannot_switch_on(pid: i32, why: impl Into<String>) -> Error {
    let why = why.into();
    let error = Error::of_process(pid, RuntimeEventsError::CannotSwitchOn { why });
    error.with_effect_if_none(Effect::NothingChanged)
}

fn read_word(pid: i32, memory: &ProcessMemory, at: LiveAddr) -> Result<u64> {
    let word = memory.read_word(at);
    word.map_err(|source| Error::of_call(pid, Operation::Read, source))
}

/// Reads a path that ends with a NUL; `None` if `at` is 0, the null pointer.
fn read_path(pid: i32, memory: &ProcessMemory, at: u64) -> Result<Option<Vec<u8>>> {
    if at == 0 {
        return Ok(None);
    }
    let mut path = Vec::new();
    while path.len() < MAX_PATH {
        let at = LiveAddr(at).plus(path.len() as u64);
        // Never past the end of a page: the next one may not be mapped.
        let mut part = [0; 64];
        let part = &mut part[..64 - (at.0 % 64) as usize];
        let read = memory.read(at, part);
        read.map_err(|source| Error::of_call(pid, Operation::Read, source))?;
        match part.iter().position(|&byte| byte == 0) {
            Some(end) => {
                path.extend_from_slice(&part[..end]);
                return Ok(Some(path));
            }
            None => path.extend_from_slice(part),
        }
    }
    Ok(Some(path))
}
