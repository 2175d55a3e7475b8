//! Holds: changes of probes that are to be undone. Each is recorded before it is made, so that what a
//! killed holder has left can be undone by others.
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

mod entries;
pub(crate) mod files;
pub(crate) mod journal;
mod process_records;
pub(crate) mod record;

use std::collections::HashSet;
use std::io;
use std::time::Instant;

use crate::error::{Error, Operation, Result, ToolProcess};
use crate::process::Process;
use crate::update::lock::UpdateLock;
use crate::update::report::Report;
pub(crate) use process_records::ProcessRecords;
use process_records::{FoundRecord, outcomes_now};

/// A tool that has changed counters of a process and is to undo what it has added, according to its own
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
    /// Its process. If that is not alive, only [`Target::release_dead`](crate::Target::release_dead) undoes
    /// what it holds.
    pub tool: ToolProcess,
    /// The user that it runs as: its effective uid.
    pub user: u32,
    /// Whether we may undo what it holds once it is dead: only that user and root may.
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
    /// How many records cannot be read: damaged, or of a later version. They are not trusted.
    pub unreadable: usize,
}

/// What [`Target::release_dead`](crate::Target::release_dead) has undone for one dead holder.
///
/// ```no_run
/// let target = probes_lib::Target::open(4242)?;
/// for released in target.release_dead(Default::default())? {
///     match released.report {
///         Ok(report) => println!("{}: undid {} probes", released.holder.tool, report.changed.len()),
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
    /// What was changed, or why that failed ([`Error::effect`](crate::Error::effect)). What is known to be still held stays recorded.
    pub report: Result<Report>,
}

/// Returns the holders of probes of a process.
pub(crate) fn holders(process: &Process) -> Holders {
    let records = ProcessRecords::of(process);
    let found = records.and_then(|records| records.map(|it| it.read()).transpose());
    let (found, mut unreadable) = match found {
        Ok(found) => found.unwrap_or_default(),
        // It is not known how many there are.
        Err(_) => (Vec::new(), 1),
    };
    let holders = found.into_iter().filter_map(|mut found| {
        if found.record.outcomes.is_none() {
            // It is being written, or its holder was killed then.
            found.record.outcomes = outcomes_now(process, &found.record).ok();
            unreadable += usize::from(found.record.outcomes.is_none());
        }
        Some(found.holder()).filter(|it| !it.probes.is_empty())
    });
    let mut list: Vec<Holder> = holders.collect();
    list.sort_by_key(|holder| std::cmp::Reverse(holder.tool.age));
    Holders { list, unreadable }
}

/// Waits for the update lock, as [`UpdateLock::wait`], and settles the records of holders that were killed
/// while they had it.
///
/// # Errors
///
/// Also if these cannot be settled now.
pub(crate) fn settled_lock(process: &Process, deadline: Instant) -> Result<UpdateLock> {
    let lock = UpdateLock::wait(process, deadline)?;
    if let Some(records) = of_process(process)? {
        let settled = records.settle(process);
        settled.map_err(|source| unreadable(process, source))?;
    }
    Ok(lock)
}

/// Returns the records of a process, if there are any.
pub(crate) fn of_process(process: &Process) -> Result<Option<ProcessRecords>> {
    ProcessRecords::of(process).map_err(|source| unreadable(process, source))
}

/// Returns the error for records, or the counters that they are about, that cannot be read.
pub(crate) fn unreadable(process: &Process, source: io::Error) -> Error {
    Error::of_call(process.pid(), Operation::ReadHolds, source)
}

/// What dead holders hold of probes whose counters are to be set, whatever they are.
#[derive(Default)]
pub(crate) struct OverruledHolds {
    names: HashSet<String>,
    /// The records of these holders, if there are any.
    found: Option<(ProcessRecords, Vec<FoundRecord>)>,
}

impl OverruledHolds {
    /// Finds those of the probes with these names. To be called with the update lock held.
    ///
    /// # Errors
    ///
    /// If it cannot be read what is held.
    pub(crate) fn of(process: &Process, names: HashSet<String>) -> Result<OverruledHolds> {
        let mut found = None;
        if !names.is_empty() {
            if let Some(records) = of_process(process)? {
                let of_dead = records.of_dead_holders(|name| names.contains(name));
                let of_dead = of_dead.map_err(|source| unreadable(process, source))?;
                found = Some((records, of_dead));
            }
        }
        Ok(OverruledHolds { names, found })
    }

    /// Makes the holders hold nothing of these probes any more: the counters are about to be set.
    pub(crate) fn forget(self) {
        if let Some((records, found)) = self.found {
            records.forget(found, |name| self.names.contains(name));
        }
    }
}
