//! Holds: changes of probes that are to be given back. Each is recorded before it is made, so that what a
//! killed holder has left can be given back by others.
//!
//! ```text
//!              update lock held                                  update lock held
//!   ┌──────────────────────────────────────┐      ┌────────────────────────────────────────────┐
//!   intent ──▶ counters written ──▶ settled  ···  intent ──▶ counters written ──▶ record deleted
//!   └──────────────────────────────────────┘      └────────────────────────────────────────────┘
//! ```
//!
//! A holder killed after an intent, and before the record is settled or deleted, leaves a record that does not say
//! whether the counters were written. The counters do, until another tool changes them. So an update settles such
//! records before it changes anything ([`settled_lock`]). What still cannot be known counts as not held: to
//! subtract what was not added would disable the probe of another tool.

pub(crate) mod files;
pub(crate) mod record;

use std::collections::{HashMap, HashSet};
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use nix::fcntl::OFlag;
use nix::unistd::geteuid;

use crate::address::LiveAddr;
use crate::error::{Error, Operation, Result, ToolProcess};
use crate::memory::ReadMemory;
use crate::process::Process;
use crate::process::load_bias::auxv_value;
use crate::process::memory::ProcessMemory;
use crate::process::program::Program;
use crate::process::status;
use crate::process::tool::{own_namespace, since_boot};
use crate::select::AppliedChange;
use crate::update::holds::files::{Directory, LockedRecord, RecordFile};
use crate::update::holds::record::{
    CounterEntry, EntryOutcome, Held, HolderRecord, ParsedRecord, ProcessKey,
};
use crate::update::lock::UpdateLock;
use crate::update::plan::UpdatePlan;
use crate::update::report::Report;

/// `AT_RANDOM` of getauxval(3): "The address of sixteen bytes containing a random value."
const AT_RANDOM: u64 = 25;

/// How often, and after which pause, the record of a dying holder is read again: the kernel may release its
/// update lock some microseconds before the lock of its record.
const DYING: (usize, Duration) = (20, Duration::from_micros(500));

impl ProcessKey {
    /// Returns the key of a process and its program.
    fn of(process: &Process) -> io::Result<ProcessKey> {
        let unknown = || io::Error::other("the process cannot be told from others");
        let (pid, start, namespace) = names_of(process)?;
        let auxv = process.read_of_living_thread("auxv")?;
        let at = auxv_value(&auxv, AT_RANDOM).ok_or_else(unknown)?;
        let mut random = [0; 16];
        ProcessMemory::open(process, OFlag::O_RDONLY)?.read(LiveAddr(at), &mut random)?;
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

/// The records of one process, wherever they are believed: those of root, of us, and of the user that the
/// process belongs to, who could change its counters anyway.
pub(crate) struct ProcessRecords {
    directories: Vec<Arc<Directory>>,
    key: ProcessKey,
}

/// A tool that has changed counters of a process and is to give back what it has added, according to its own
/// record ([`Target::hold`](crate::Target::hold)).
///
/// ```no_run
/// for holder in probes_lib::Target::open(4242)?.holders().list {
///     let names: Vec<&str> = holder.probes.iter().map(|probe| probe.name.as_str()).collect();
///     println!("{} holds {}", holder.tool, names.join(", "));
/// }
/// # Ok::<(), probes_lib::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder {
    /// Its process. If that is not alive, only [`Target::release_dead`](crate::Target::release_dead) gives back
    /// what it holds.
    pub tool: ToolProcess,
    /// The user that it runs as: its effective uid.
    pub user: u32,
    /// Whether we may give back what it holds once it is dead: only that user and root may.
    pub can_be_released: bool,
    /// What it holds, in the order of its changes.
    pub probes: Vec<HeldProbe>,
}

/// What is held of one probe.
///
/// [`Holder`] has an example.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeldProbe {
    /// Its name.
    pub name: String,
    /// What was added to its counters, and will be subtracted: 1, or -1 if it was disabled. If it has several
    /// counters, the largest amount.
    pub amount: i32,
}

/// The tools that hold probes of a process, as far as their records can be found and read.
///
/// [`Holder`] has an example.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Holders {
    /// The holders, the oldest first.
    pub list: Vec<Holder>,
    /// How many records cannot be read: damaged, or of a later version. They are not believed.
    pub unreadable: usize,
}

/// What [`Target::release_dead`](crate::Target::release_dead) has given back for one dead holder.
///
/// ```no_run
/// let target = probes_lib::Target::open(4242)?;
/// for released in target.release_dead(Default::default())? {
///     match released.report {
///         Ok(report) => println!("{}: gave back {} probes", released.holder.tool, report.changed.len()),
///         Err(error) => println!("{}: {error}", released.holder.tool),
///     }
/// }
/// # Ok::<(), probes_lib::Error>(())
/// ```
#[derive(Debug)]
pub struct ReleasedHold {
    /// The holder, with what it held. It has no probes if it was killed before it changed any counter: then only
    /// sites are restored, if it had begun to switch them.
    pub holder: Holder,
    /// What was changed, or why that failed ([`Error::effect`]). What is known to be still held stays recorded.
    pub report: Result<Report>,
}

/// A record that was found.
pub(crate) struct FoundRecord {
    pub(crate) file: RecordFile,
    pub(crate) record: ParsedRecord,
    /// Whether its holder is alive, or a tool is giving it back on its behalf.
    pub(crate) is_alive: bool,
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
    /// memory cannot be read.
    pub(crate) fn of(process: &Process) -> Option<ProcessRecords> {
        let own = geteuid().as_raw();
        let mut directories = Directory::of_users(&[own, 0, process.effective_user()]);
        let pid = process.pid();
        if !directories
            .iter()
            .any(|directory| directory.has_records_of(pid))
        {
            return None;
        }
        // A user does not own a program that has gained privileges.
        let owner = process.owner().unwrap_or(own);
        directories.retain(|directory| [own, 0, owner].contains(&directory.owner));
        let key = ProcessKey::of(process).ok()?;
        Some(ProcessRecords { directories, key })
    }

    /// Returns the names of the records' files, with their directories.
    fn names(&self) -> Vec<(Arc<Directory>, String)> {
        let ProcessKey {
            pid,
            start,
            namespace,
            ..
        } = self.key;
        let names = |directory: &Arc<Directory>| {
            let names = directory.records_of(pid, start, namespace).into_iter();
            let directory = directory.clone();
            names.map(move |name| (directory.clone(), name))
        };
        self.directories.iter().flat_map(names).collect()
    }

    /// Reads all records; also returns how many cannot be read, which are not believed.
    pub(crate) fn read(&self) -> (Vec<FoundRecord>, usize) {
        let mut unreadable = 0;
        let mut found = Vec::new();
        for (directory, name) in self.names() {
            match self.open(&directory, &name) {
                Ok(one) => found.extend(one),
                Err(_) => unreadable += 1,
            }
        }
        (found, unreadable)
    }

    /// Opens a record; returns `None` if it has just been deleted, is still empty, or is about a program that the
    /// process does not execute any more.
    fn open(&self, directory: &Arc<Directory>, name: &str) -> io::Result<Option<FoundRecord>> {
        let file = match directory.record(name, directory.can_write()) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            file => file?,
        };
        let is_alive = file.is_locked();
        let found = self.parse(&file)?;
        Ok(found.map(|record| FoundRecord {
            file,
            record,
            is_alive,
        }))
    }

    fn parse(&self, file: &RecordFile) -> io::Result<Option<ParsedRecord>> {
        let bytes = file.read()?;
        if bytes.is_empty() {
            // Its holder was killed before it wrote anything, or is about to.
            return Ok(None);
        }
        let mut record = ParsedRecord::parse(&bytes).ok_or(io::ErrorKind::InvalidData)?;
        let is_marked = |directory: &Arc<Directory>| directory.is_marked_changed(&file.name);
        if self.directories.iter().any(is_marked) {
            record.outcomes = Some(vec![EntryOutcome::Unknown; record.entries.len()]);
        }
        Ok((record.process == self.key).then_some(record))
    }

    /// Returns what is held of each counter by those of these holders who keep it: they are alive, or another user's.
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
        let record = self.parse(locked.file()).ok()??;
        Some((locked, record))
    }

    /// Finds out what a holder wrote that was killed while it changed counters. To be called with the update
    /// lock held.
    fn settle(&self, process: &Process) {
        let (times, pause) = DYING;
        for (directory, name) in self.names() {
            for _ in 0..times {
                match self.open(&directory, &name) {
                    Ok(Some(found)) if found.record.outcomes.is_none() => {
                        if !found.is_alive {
                            self.write_outcomes(found, |record| outcomes_now(process, record));
                            break;
                        }
                    }
                    _ => break,
                }
                std::thread::sleep(pause);
            }
        }
    }

    /// Records that dead holders hold nothing of these probes any more. A record that we may not write is marked:
    /// then nothing at all is held by it.
    fn forget(&self, is_meant: impl Fn(&str) -> bool) {
        for found in self.read().0 {
            if found.is_alive || !found.record.held().any(|held| is_meant(&held.entry.name)) {
                continue;
            }
            self.write_outcomes(found, |record| {
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
        if locked.append(record.complete, &settled).is_err() {
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

/// Returns what became of the entries of a record that was not concluded, according to the counters.
pub(crate) fn outcomes_now(process: &Process, record: &ParsedRecord) -> Vec<EntryOutcome> {
    let memory = ProcessMemory::open(process, OFlag::O_RDONLY).ok();
    record.outcomes_by(|at| {
        let mut counter = [0; 2];
        memory.as_ref()?.read(at, &mut counter).ok()?;
        Some(u16::from_le_bytes(counter))
    })
}

/// Returns the holders of probes of a process.
pub(crate) fn holders(process: &Process) -> Holders {
    let Some(records) = ProcessRecords::of(process) else {
        return Holders::default();
    };
    let (found, unreadable) = records.read();
    let holders = found.into_iter().map(|mut found| {
        if found.record.outcomes.is_none() {
            // It is being written, or its holder was killed then.
            found.record.outcomes = Some(outcomes_now(process, &found.record));
        }
        found.holder()
    });
    let mut list: Vec<Holder> = holders.filter(|it| !it.probes.is_empty()).collect();
    list.sort_by_key(|holder| std::cmp::Reverse(holder.tool.age));
    Holders { list, unreadable }
}

/// Waits for the update lock, as [`UpdateLock::wait`], and settles the records of holders that were killed
/// while they had it.
pub(crate) fn settled_lock(process: &Process, deadline: Instant) -> Result<UpdateLock> {
    let lock = UpdateLock::wait(process, deadline)?;
    if let Some(records) = ProcessRecords::of(process) {
        records.settle(process);
    }
    Ok(lock)
}

/// Makes dead holders hold nothing of the probes with the names for which `is_meant` is true: their counters are about
/// to be set, whatever they were. To be called with the update lock held.
pub(crate) fn forget(process: &Process, is_meant: impl Fn(&str) -> bool) {
    if let Some(records) = ProcessRecords::of(process) {
        records.forget(is_meant);
    }
}

/// Whether a change takes a hold, or gives it back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HoldChange {
    Take,
    GiveBack,
}

/// The record of a hold: ours, or one whose holder is dead.
#[derive(Debug)]
pub(crate) struct HoldRecord {
    state: Mutex<HoldState>,
    /// Whether a change that cannot be recorded is not made.
    is_required: bool,
    /// What other holders, who keep it, hold of each counter.
    held_by_others: HashMap<LiveAddr, i32>,
}

/// What to do if it cannot be recorded what became of a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum OnFailure {
    /// Go on without a record, which the holder says ([`HoldRecord::failure`]).
    GiveUp,
    /// Keep the record as it is: something is still held that nobody else knows of.
    KeepAnnounced,
}

#[derive(Debug)]
struct HoldState {
    /// `None` before the first change, if that cannot be recorded, and after everything was given back.
    file: Option<LockedRecord>,
    record: ParsedRecord,
    /// Why it is not recorded.
    failure: Option<io::Error>,
}

impl HoldRecord {
    /// Returns the record of a hold that we are about to take. Nothing is written yet.
    pub(crate) fn new(process: &Process) -> HoldRecord {
        let (process, failure) = match ProcessKey::of(process) {
            Ok(key) => (key, None),
            Err(error) => (ProcessKey::default(), Some(error)),
        };
        let record = ParsedRecord {
            process,
            holder: HolderRecord::own(),
            entries: Vec::new(),
            outcomes: Some(Vec::new()),
            complete: 0,
        };
        HoldRecord {
            state: Mutex::new(HoldState {
                file: None,
                record,
                failure,
            }),
            is_required: false,
            held_by_others: HashMap::new(),
        }
    }

    /// Returns the record of a dead holder; `held_by_others` is what those hold of each counter who keep it.
    pub(crate) fn of_dead(
        file: LockedRecord,
        record: ParsedRecord,
        held_by_others: HashMap<LiveAddr, i32>,
    ) -> HoldRecord {
        HoldRecord {
            state: Mutex::new(HoldState {
                file: Some(file),
                record,
                failure: None,
            }),
            is_required: true,
            held_by_others,
        }
    }

    fn state(&self) -> MutexGuard<'_, HoldState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns why the hold is not recorded; `None` if it is, or there is nothing to record.
    pub(crate) fn failure(&self) -> Option<String> {
        self.state().failure.as_ref().map(ToString::to_string)
    }

    /// Returns what is held, as changes to be undone in a program that may have fewer objects by now. The
    /// probes of which nothing is held are among them: their sites may be half switched.
    pub(crate) fn applied(&self, program: &Program) -> Vec<AppliedChange> {
        let state = self.state();
        let mut applied: Vec<(&CounterEntry, Vec<(LiveAddr, i32)>)> = Vec::new();
        let mut index_of: HashMap<&str, usize> = HashMap::new();
        for Held { entry, amount } in state.record.held() {
            if program.probe(&entry.name).is_none() {
                continue;
            }
            let index = *index_of.entry(&entry.name).or_insert(applied.len());
            if index == applied.len() {
                applied.push((entry, Vec::new()));
            }
            applied[index].1.push((entry.at, amount));
        }
        let change = |(entry, added): (&CounterEntry, Vec<_>)| AppliedChange {
            name: entry.name.clone(),
            stage: entry.stage,
            added: added.into(),
        };
        applied.into_iter().map(change).collect()
    }

    /// Returns the names of the probes of which something is held; none once the record is deleted.
    pub(crate) fn names(&self) -> HashSet<String> {
        let state = self.state();
        if state.file.is_none() {
            return HashSet::new();
        }
        let held = state.record.held().filter(|held| held.amount != 0);
        held.map(|held| held.entry.name.clone()).collect()
    }

    /// Records that a plan gives back what it can, without a write. Nothing is recorded if nothing stays held: the
    /// record is deleted then ([`HoldRecord::conclude`]).
    ///
    /// # Errors
    ///
    /// See [`HoldRecord::announce`].
    pub(crate) fn announce_without_writes(
        &self,
        plan: &UpdatePlan,
        program: &Program,
        change: HoldChange,
        pid: i32,
    ) -> Result<()> {
        let left = || given_back(&self.state().record, plan, program, &self.held_by_others);
        if change == HoldChange::GiveBack && left().iter().any(|entry| entry.held_after != 0) {
            self.announce(plan, program, change, pid)?;
        }
        Ok(())
    }

    /// Records what a plan is about to write.
    ///
    /// # Errors
    ///
    /// Only for a dead holder's record, which stays as it is. A hold of ours goes on without a record.
    pub(crate) fn announce(
        &self,
        plan: &UpdatePlan,
        program: &Program,
        change: HoldChange,
        pid: i32,
    ) -> Result<()> {
        let mut state = self.state();
        let state = &mut *state;
        let is_first = state.file.is_none() && change == HoldChange::Take;
        if state.failure.is_some() || !(is_first || state.file.is_some()) {
            return Ok(());
        }
        let entries = match change {
            HoldChange::Take => taken(plan, program),
            HoldChange::GiveBack => given_back(&state.record, plan, program, &self.held_by_others),
        };
        let part = record::intent(&entries);
        let written = if is_first {
            state.create(&part)
        } else {
            state.append(&part)
        };
        match written {
            Ok(()) => {
                state.record.entries = entries;
                state.record.outcomes = None;
                Ok(())
            }
            Err(source) if self.is_required => {
                Err(Error::of_call(pid, Operation::RecordHold, source))
            }
            Err(error) => {
                state.give_up(error);
                Ok(())
            }
        }
    }

    /// Records what became of the announced change: everything was written or, if it failed, what the counters
    /// say. A record of nothing is deleted.
    pub(crate) fn conclude(
        &self,
        process: &Process,
        change: HoldChange,
        done: std::result::Result<&Report, &Error>,
    ) {
        let mut state = self.state();
        let state = &mut *state;
        if state.record.outcomes.is_some() {
            let is_nothing_left = done.is_ok_and(|report| report.not_undone.is_empty());
            if change == HoldChange::GiveBack && is_nothing_left {
                state.remove();
            }
            return;
        }
        let outcomes = if done.is_ok() {
            vec![EntryOutcome::After; state.record.entries.len()]
        } else {
            outcomes_now(process, &state.record)
        };
        let on_failure = match change {
            HoldChange::Take => OnFailure::GiveUp,
            HoldChange::GiveBack => OnFailure::KeepAnnounced,
        };
        state.settle(outcomes, self.is_required && done.is_err(), on_failure);
    }

    /// Records that the announced change was not carried out, before it is tried again: nothing was written.
    pub(crate) fn not_carried_out(&self) {
        let mut state = self.state();
        if state.record.outcomes.is_none() {
            let outcomes = vec![EntryOutcome::Before; state.record.entries.len()];
            state.settle(outcomes, self.is_required, OnFailure::GiveUp);
        }
    }

    /// Deletes the record: the process has exited, or executed another program.
    pub(crate) fn remove(&self) {
        self.state().remove();
    }
}

impl HoldState {
    /// Creates the file, with its first part.
    fn create(&mut self, part: &str) -> io::Result<()> {
        let directory = Directory::own()?;
        let process = self.record.process;
        directory
            .sweep(|pid, start, namespace, file| is_stale(&process, (pid, start, namespace), file));
        let text = record::head(&process, &self.record.holder) + part;
        let file = directory.new_record(&process)?;
        if let Err(error) = file.append(0, &text) {
            file.remove();
            return Err(error);
        }
        self.file = Some(file);
        self.record.complete = text.len();
        Ok(())
    }

    /// Records what became of the announced change. A record of nothing is deleted, unless it `stays`: that of a dead holder says which sites
    /// may be half switched.
    fn settle(&mut self, outcomes: Vec<EntryOutcome>, stays: bool, on_failure: OnFailure) {
        let part = record::settled(&outcomes);
        self.record.outcomes = Some(outcomes);
        if !stays && !self.record.holds_anything() {
            self.remove();
            return;
        }
        match (self.append(&part), on_failure) {
            (Err(error), OnFailure::GiveUp) if !stays => self.give_up(error),
            // What is announced stays, and the counters tell what became of it.
            _ => {}
        }
    }

    fn append(&mut self, part: &str) -> io::Result<()> {
        if let Some(file) = &self.file {
            file.append(self.record.complete, part)?;
            self.record.complete += part.len();
        }
        Ok(())
    }

    /// Goes on without a record: one that is not true would be worse.
    fn give_up(&mut self, error: io::Error) {
        self.remove();
        self.failure = Some(error);
    }

    fn remove(&mut self) {
        if let Some(file) = self.file.take() {
            file.remove();
        }
    }
}

/// Returns the entries for a plan that takes a hold.
fn taken(plan: &UpdatePlan, program: &Program) -> Vec<CounterEntry> {
    entries(plan, program, |_, added| (0, added, None))
}

/// Returns the entries for a plan that gives back what is held according to `record`, as far as nobody else has taken
/// it away: see [`kept_below_zero`].
fn given_back(
    record: &ParsedRecord,
    plan: &UpdatePlan,
    program: &Program,
    held_by_others: &HashMap<LiveAddr, i32>,
) -> Vec<CounterEntry> {
    let mut held: HashMap<LiveAddr, (&CounterEntry, i32)> = HashMap::new();
    for one in record.held() {
        held.insert(one.entry.at, (one.entry, one.amount));
    }
    let planned = plan.changes.iter().map(|change| change.probe);
    let probes = planned.chain(plan.skipped.iter().copied());
    let indices = probes.flat_map(|probe| program.by_id(probe).semaphores());
    let counters: HashMap<LiveAddr, u16> = indices
        .map(|index| (program.counter(index), plan.before.counters[index]))
        .collect();
    let kept = |at: LiveAddr, amount: i32| {
        let others = held_by_others.get(&at).copied().unwrap_or(0);
        let counter = counters.get(&at);
        counter.map_or(0, |&counter| kept_below_zero(counter, amount, others))
    };
    let mut entries = entries(plan, program, |at, _| {
        let (amount, stage) = held
            .remove(&at)
            .map_or((0, None), |(entry, amount)| (amount, Some(entry.stage)));
        // That of the change that is given back, from which each attempt concludes its own.
        (amount, kept(at, amount), stage)
    });
    // Nothing is left of these, or they cannot be given back now and stay held.
    let is_kept = |name: &str| {
        let mut kept = plan.not_undone.iter();
        kept.any(|&probe| program.by_id(probe).name() == name)
    };
    entries.extend(held.into_iter().map(|(at, (entry, amount))| CounterEntry {
        before: 0,
        after: 0,
        held_before: amount,
        held_after: if is_kept(&entry.name) {
            amount
        } else {
            kept(at, amount)
        },
        ..entry.clone()
    }));
    entries
}

/// Returns what stays held of a counter of which `amount` is given back, because it does not go below zero. Others who
/// hold a negative amount of it will add that later: what they have subtracted was this holder's, and would be left over.
fn kept_below_zero(counter: u16, amount: i32, held_by_others: i32) -> i32 {
    let missing = amount.saturating_sub(i32::from(counter)).max(0);
    let taken_away = held_by_others.saturating_neg().max(0);
    missing.min(taken_away)
}

/// Returns an entry for each counter of the probes that a plan changes; `held(address, added)` returns what
/// is held of it before and after, and maybe the stage, if that is not the plan's.
fn entries(
    plan: &UpdatePlan,
    program: &Program,
    mut held: impl FnMut(LiveAddr, i32) -> (i32, i32, Option<u8>),
) -> Vec<CounterEntry> {
    let mut entries = Vec::new();
    for change in &plan.changes {
        let probe = program.by_id(change.probe);
        for (index, &(at, added)) in probe.semaphores().zip(&change.added) {
            let before = plan.before.counters[index];
            let (held_before, held_after, stage) = held(at, added);
            entries.push(CounterEntry {
                name: probe.name().to_owned(),
                stage: stage.unwrap_or(change.stage),
                at,
                before,
                after: (i32::from(before) + added) as u16,
                held_before,
                held_after,
            });
        }
    }
    entries
}

/// Whether a record is outdated: `named`, from the name of its file, is a process that has exited; or it is the process
/// `of_now`, which does not execute the recorded program any more.
fn is_stale(of_now: &ProcessKey, named: (i32, u64, u64), file: &RecordFile) -> bool {
    let (pid, start, namespace) = named;
    if namespace != of_now.namespace {
        // Its pids are not ours.
        return false;
    }
    if (pid, start) == (of_now.pid, of_now.start) {
        let record = file
            .read()
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

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::select::{Action, Actions, Selector};
    use crate::testing::SimulatedProcess;

    #[test]
    fn change_tried_again_keeps_what_was_held() {
        let process = Process::own().unwrap();
        let hold = HoldRecord::new(&process);
        let mut simulated = SimulatedProcess::of("multi_semaphore.pie");
        let (start, stop) = ("single".to_owned(), "many".to_owned());
        let enable = Actions::of(Action::Enable, Selector::Pair { start, stop });
        let (_, on) = simulated.plan(&enable).unwrap();
        let (pid, done) = (process.pid(), Report::of_nothing(process.pid()));
        let announce = |plan: &UpdatePlan, program: &Program, change| {
            hold.announce(plan, program, change, pid).unwrap();
        };
        let held = |program: &Program| -> i32 {
            let applied = hold.applied(program);
            let added = applied.iter().flat_map(|it| it.added.iter());
            added.map(|(_, amount)| amount).sum()
        };
        announce(&on, &simulated.program, HoldChange::Take);
        hold.not_carried_out();
        assert_eq!((hold.failure(), held(&simulated.program)), (None, 0));
        // Nothing was to be done the next time: nothing is held.
        hold.conclude(&process, HoldChange::Take, Ok(&done));
        assert_eq!(held(&simulated.program), 0);
        announce(&on, &simulated.program, HoldChange::Take);
        simulated.update(&enable).unwrap();
        hold.conclude(&process, HoldChange::Take, Ok(&done));
        assert_eq!(held(&simulated.program), 4);

        let (_, off) = simulated.plan_for(&simulated.undo(&on), false).unwrap();
        let stages = |program: &Program| -> BTreeMap<String, u8> {
            let applied = hold.applied(program).into_iter();
            applied.map(|it| (it.name, it.stage)).collect()
        };
        let before = stages(&simulated.program);
        announce(&off, &simulated.program, HoldChange::GiveBack);
        hold.not_carried_out();
        assert_eq!(held(&simulated.program), 4);
        assert_eq!(stages(&simulated.program), before);
        announce(&off, &simulated.program, HoldChange::GiveBack);
        hold.conclude(&process, HoldChange::GiveBack, Ok(&done));
        assert_eq!(held(&simulated.program), 0);
        assert!(hold.state().file.is_none());
    }

    #[test]
    fn failed_write_keeps_what_was_recorded_first() {
        let process = Process::own().unwrap();
        let hold = HoldRecord::new(&process);
        let mut simulated = SimulatedProcess::of("multi_semaphore.pie");
        let enable = Actions::of(Action::Enable, Selector::All);
        let (_, on) = simulated.plan(&enable).unwrap();
        let (pid, done) = (process.pid(), Report::of_nothing(process.pid()));
        hold.announce(&on, &simulated.program, HoldChange::Take, pid)
            .unwrap();
        simulated.update(&enable).unwrap();
        hold.conclude(&process, HoldChange::Take, Ok(&done));

        // Something else is in the code of one probe, which stays held.
        let choices = simulated.undo(&on);
        let nop = LiveAddr(simulated.opcodes("single")[0].0 - 1);
        simulated.memory.poke(nop, &[0xcc]);
        let (_, off) = simulated.plan_for(&choices, false).unwrap();
        assert_eq!(off.not_undone.len(), 1);
        hold.announce(&off, &simulated.program, HoldChange::GiveBack, pid)
            .unwrap();
        // No record is so long.
        hold.state().record.complete = files::MAX_RECORD as usize;
        hold.conclude(&process, HoldChange::GiveBack, Ok(&done));
        assert_eq!(hold.failure(), None);
        let bytes = hold.state().file.as_ref().unwrap().file().read().unwrap();
        let record = ParsedRecord::parse(&bytes).unwrap();
        assert_eq!(record.outcomes, None);
        let counters = |at: LiveAddr| {
            record
                .entries
                .iter()
                .find(|it| it.at == at)
                .map(|it| it.after)
        };
        let settled = ParsedRecord {
            outcomes: Some(record.outcomes_by(counters)),
            ..record.clone()
        };
        let held = settled.held().filter(|held| held.amount != 0);
        let names: HashSet<&str> = held.map(|held| held.entry.name.as_str()).collect();
        assert_eq!(names, HashSet::from(["single"]));
        hold.remove();
    }

    #[test]
    fn only_what_others_took_away_stays_held() {
        // The counter is 0 because another holder has disabled the probe.
        assert_eq!(kept_below_zero(0, 1, -1), 1);
        assert_eq!(kept_below_zero(0, 3, -2), 2);
        // Because a tool that holds nothing has.
        assert_eq!(kept_below_zero(0, 1, 0), 0);
        assert_eq!(kept_below_zero(0, 1, 1), 0);
        // It can be given back.
        assert_eq!(kept_below_zero(1, 1, -1), 0);
        assert_eq!(kept_below_zero(0, -1, -1), 0);
    }
}
