//! The records that the holders of probes of a process have written: which are trusted, and what became of those whose
//! holder was killed.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use nix::fcntl::OFlag;
use nix::unistd::geteuid;

use crate::address::LiveAddr;
use crate::error::{ToolProcess, is_shortage};
use crate::memory::ReadMemory;
use crate::process::memory::{ProcessMemory, random_bytes_at};
use crate::process::status;
use crate::process::tool::{own_namespace, since_boot};
use crate::process::{Process, is_task_gone};
use crate::update::holds::files::{Directory, LockedRecord, MAX_RECORD, RecordFile};
use crate::update::holds::record::{
    self, EntryOutcome, Held, HolderRecord, ParsedRecord, ProcessKey,
};
use crate::update::holds::{HeldProbe, Holder};

/// How often, and after which pause, the record of a dying holder is read again: the kernel may release its
/// update lock some microseconds before the lock of its record. That many times for all records together: there may be
/// forged ones.
const DYING: (usize, Duration) = (20, Duration::from_micros(500));

/// How many records of one process are read of each directory, and how many bytes of them in all: the owner of the
/// process can write any number of them, and each that is read is kept open. Room for the longest record, and others.
const MAX_READ: (usize, u64) = (256, MAX_RECORD + (1 << 20));

impl ProcessKey {
    /// Returns the key of a process and its program.
    pub(super) fn of(process: &Process) -> io::Result<ProcessKey> {
        let unknown = || io::Error::other("the process cannot be distinguished from others");
        let (pid, start, namespace) = names_of(process)?;
        let at = random_bytes_at(process)?.ok_or_else(unknown)?;
        let mut random = [0; 16];
        ProcessMemory::open(process, OFlag::O_RDONLY)?.read(at, &mut random)?;
        Ok(ProcessKey {
            pid,
            start,
            namespace,
            random: u128::from_le_bytes(random),
        })
    }
}

/// Returns what the names of the records of a process begin with.
fn names_of(process: &Process) -> io::Result<(i32, u64, u64)> {
    let stat = process.read("stat")?;
    let start = status::start_time(&stat).ok_or(io::ErrorKind::InvalidData)?;
    Ok((process.pid(), start, own_namespace()))
}

/// The records of one process, wherever they are trusted: those of root, of us, and of the user that the
/// process belongs to, who could change its counters anyway.
pub(crate) struct ProcessRecords {
    directories: Vec<Arc<Directory>>,
    key: ProcessKey,
}

/// A record that was found.
pub(crate) struct FoundRecord {
    pub(crate) file: RecordFile,
    pub(crate) record: ParsedRecord,
    /// Whether its holder is alive, or a tool is undoing it on its behalf.
    pub(crate) is_alive: bool,
    /// How many bytes it has.
    len: u64,
}

impl FoundRecord {
    /// Returns its holder, with what that holds.
    pub(crate) fn holder(&self) -> Holder {
        let HolderRecord {
            pid,
            namespace,
            begun,
            ref command,
        } = self.record.holder;
        let mut probes: Vec<HeldProbe> = Vec::new();
        let mut index_of: HashMap<&str, usize> = HashMap::new();
        for Held { entry, amount } in self.record.held().filter(|held| held.amount != 0) {
            let index = *index_of.entry(&entry.name).or_insert(probes.len());
            match probes.get_mut(index) {
                Some(probe) if amount.abs() > probe.amount.abs() => probe.amount = amount,
                Some(_) => {}
                None => probes.push(HeldProbe {
                    name: entry.name.clone(),
                    amount,
                }),
            }
        }
        let directory = self.file.directory();
        Holder {
            tool: ToolProcess {
                pid,
                is_in_our_namespace: namespace == own_namespace(),
                command: command.clone(),
                age: since_boot().saturating_sub(Duration::from_nanos(begun)),
                is_alive: self.is_alive,
                observes_another: false,
            },
            user: directory.owner,
            can_be_released: directory.can_write(),
            probes,
        }
    }
}

impl ProcessRecords {
    /// Returns `None` if there is no record of this process, or it is not known which program it executes: its
    /// memory may not be read.
    ///
    /// # Errors
    ///
    /// If we lack files or memory to find out ([`is_shortage`]).
    pub(crate) fn of(process: &Process) -> io::Result<Option<ProcessRecords>> {
        let own = geteuid().as_raw();
        let mut directories = Directory::of_users(&[own, 0, process.effective_user()])?;
        let pid = process.pid();
        let mut are_any = false;
        for directory in &directories {
            are_any |= directory.has_records_of(pid)?;
        }
        if !are_any {
            return Ok(None);
        }
        // A user does not own a program that has gained privileges.
        let owner = process.owner().unwrap_or(own);
        directories.retain(|directory| [own, 0, owner].contains(&directory.owner));
        match ProcessKey::of(process) {
            Ok(key) => Ok(Some(ProcessRecords { directories, key })),
            Err(error) if is_shortage(&error) => Err(error),
            Err(_) => Ok(None),
        }
    }

    /// Returns the directories, each with the names of its records.
    fn names(&self) -> io::Result<Vec<(Arc<Directory>, Vec<String>)>> {
        let ProcessKey {
            pid,
            start,
            namespace,
            ..
        } = self.key;
        let names = |directory: &Arc<Directory>| {
            let names = directory.records_of(pid, start, namespace)?;
            Ok((directory.clone(), names))
        };
        self.directories.iter().map(names).collect()
    }

    /// Reads all records, as far as there are not too many; also returns how many cannot be read, which are not trusted.
    ///
    /// # Errors
    ///
    /// See [`ProcessRecords::of`].
    pub(crate) fn read(&self) -> io::Result<(Vec<FoundRecord>, usize)> {
        let mut unreadable = 0;
        let mut found = Vec::new();
        for (directory, names) in self.names()? {
            let (mut records, mut bytes) = MAX_READ;
            for name in names {
                match self.open(&directory, &name, bytes) {
                    Ok(None) => {}
                    Ok(Some(one)) if records > 0 => {
                        (records, bytes) = (records - 1, bytes.saturating_sub(one.len));
                        found.push(one);
                    }
                    Err(error) if is_shortage(&error) => return Err(error),
                    Ok(Some(_)) | Err(_) => unreadable += 1,
                }
            }
        }
        Ok((found, unreadable))
    }

    /// Opens a record; returns `None` if it has just been deleted, is still empty, or is about a program that the
    /// process does not execute any more.
    ///
    /// # Errors
    ///
    /// Also if it has more than `limit` bytes.
    fn open(
        &self,
        directory: &Arc<Directory>,
        name: &str,
        limit: u64,
    ) -> io::Result<Option<FoundRecord>> {
        let file = match directory.record(name, directory.can_write()) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            file => file?,
        };
        let is_alive = file.is_locked();
        let bytes = file.read(limit)?;
        let len = bytes.len() as u64;
        let found = self.parse(&file, &bytes)?;
        Ok(found.map(|record| FoundRecord {
            file,
            record,
            is_alive,
            len,
        }))
    }

    fn parse(&self, file: &RecordFile, bytes: &[u8]) -> io::Result<Option<ParsedRecord>> {
        if bytes.is_empty() {
            // Its holder was killed before it wrote anything, or is about to.
            return Ok(None);
        }
        let mut record = ParsedRecord::parse(bytes).ok_or(io::ErrorKind::InvalidData)?;
        let is_marked = |directory: &Arc<Directory>| directory.is_marked_changed(&file.name);
        if self.directories.iter().any(is_marked) {
            record.outcomes = Some(vec![EntryOutcome::Unknown; record.entries.len()]);
        }
        Ok((record.process == self.key).then_some(record))
    }

    /// Returns what is held of each counter by the holders that keep it: those that are alive, or belong to another
    /// user.
    pub(crate) fn held_by_keepers(found: &[FoundRecord]) -> HashMap<LiveAddr, i32> {
        let mut amounts: HashMap<LiveAddr, i32> = HashMap::new();
        let keepers = found
            .iter()
            .filter(|one| one.is_alive || !one.file.directory().can_write());
        for held in keepers.flat_map(|one| one.record.held()) {
            let amount = amounts.entry(held.entry.at).or_default();
            *amount = amount.saturating_add(held.amount);
        }
        amounts
    }

    /// Locks the record of a dead holder, and reads it again; returns `None` if another tool has it now, or it
    /// is another user's.
    pub(crate) fn lock(&self, found: FoundRecord) -> Option<(LockedRecord, ParsedRecord)> {
        if found.is_alive || !found.file.directory().can_write() {
            return None;
        }
        let locked = found.file.lock()?;
        let bytes = locked.file().read(MAX_RECORD).ok()?;
        let record = self.parse(locked.file(), &bytes).ok()??;
        Some((locked, record))
    }

    /// Finds out what holders wrote that were killed while they changed counters, as far as there are not too many. To be
    /// called with the update lock held.
    ///
    /// # Errors
    ///
    /// If the counters or records cannot be read now: later, the counters will not tell any more.
    pub(super) fn settle(&self, process: &Process) -> io::Result<()> {
        let (mut tries, pause) = DYING;
        for (directory, names) in self.names()? {
            let (records, mut bytes) = MAX_READ;
            for name in names.iter().take(records) {
                let limit = bytes.min(MAX_RECORD);
                loop {
                    let found = match self.open(&directory, name, limit) {
                        Err(error) if is_shortage(&error) => return Err(error),
                        found => found.ok().flatten(),
                    };
                    let len = found.as_ref().map_or(0, |found| found.len);
                    bytes = bytes.saturating_sub(len);
                    match found.filter(|found| found.record.outcomes.is_none()) {
                        Some(found) if found.is_alive && tries > 0 => tries -= 1,
                        Some(found) if found.is_alive => break,
                        Some(found) => {
                            let outcomes = outcomes_now(process, &found.record)?;
                            self.write_outcomes(found, |_| outcomes);
                            break;
                        }
                        None => break,
                    }
                    std::thread::sleep(pause);
                }
            }
        }
        Ok(())
    }

    /// Returns the records of the dead holders that hold any of these probes.
    ///
    /// # Errors
    ///
    /// See [`ProcessRecords::of`].
    pub(super) fn of_dead_holders(
        &self,
        is_meant: impl Fn(&str) -> bool,
    ) -> io::Result<Vec<FoundRecord>> {
        let (mut found, _) = self.read()?;
        found.retain(|one| {
            let mut held = one.record.held();
            !one.is_alive && held.any(|held| is_meant(&held.entry.name))
        });
        Ok(found)
    }

    /// Records that these dead holders hold nothing of these probes any more. A record that we may not write is marked:
    /// then nothing at all is held by it.
    pub(super) fn forget(&self, found: Vec<FoundRecord>, is_meant: impl Fn(&str) -> bool) {
        for one in found {
            self.write_outcomes(one, |record| {
                let outcomes = record.outcomes.iter().flatten().zip(&record.entries);
                let forgotten = outcomes.map(|(&outcome, entry)| {
                    if is_meant(&entry.name) {
                        EntryOutcome::Unknown
                    } else {
                        outcome
                    }
                });
                forgotten.collect()
            });
        }
    }

    /// Writes what became of the entries of a record whose holder is dead.
    fn write_outcomes(
        &self,
        found: FoundRecord,
        outcomes: impl FnOnce(&ParsedRecord) -> Vec<EntryOutcome>,
    ) {
        if !found.file.directory().can_write() {
            mark_changed(&found.file.name);
            return;
        }
        let Some((locked, record)) = self.lock(found) else {
            return;
        };
        let settled = record::settled(&outcomes(&record));
        // In place of what was settled before, for which there is room on a full disk.
        let at = record.settled_at.unwrap_or(record.complete);
        if locked.settle(at, &settled).is_err() {
            // Later, the counters will not tell any more.
            locked.remove();
        }
    }
}

fn mark_changed(record: &str) {
    if let Ok(own) = Directory::own() {
        own.mark_changed(record);
    }
}

/// Returns what became of the entries of a record that was not settled, according to the counters: unknown if the process has
/// exited.
///
/// # Errors
///
/// If its memory cannot be opened.
pub(crate) fn outcomes_now(
    process: &Process,
    record: &ParsedRecord,
) -> io::Result<Vec<EntryOutcome>> {
    let memory = match ProcessMemory::open(process, OFlag::O_RDONLY) {
        Err(error) if !is_task_gone(&error) => return Err(error),
        memory => memory.ok(),
    };
    Ok(record.outcomes_by(|at| {
        let mut counter = [0; 2];
        memory.as_ref()?.read(at, &mut counter).ok()?;
        Some(u16::from_le_bytes(counter))
    }))
}

/// Whether a record is outdated: `named`, from the name of its file, is a process that has exited; or it is the process
/// `of_now`, which does not execute the recorded program any more.
pub(super) fn is_stale(of_now: &ProcessKey, named: (i32, u64, u64), file: &RecordFile) -> bool {
    let (pid, start, namespace) = named;
    if namespace != of_now.namespace {
        // Its pids are not ours.
        return false;
    }
    if (pid, start) == (of_now.pid, of_now.start) {
        let record = file
            .read(MAX_RECORD)
            .ok()
            .and_then(|bytes| ParsedRecord::parse(&bytes));
        return record.is_some_and(|record| record.process != *of_now);
    }
    match Process::open(pid).and_then(|process| {
        let names = names_of(&process);
        names.map_err(|source| process.exited_or(source))
    }) {
        Ok((_, found, _)) => found != start,
        Err(error) => error.is_gone(),
    }
}
