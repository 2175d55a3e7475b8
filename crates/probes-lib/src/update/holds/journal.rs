//! [`HoldJournal`]: the record of a hold as its holder writes it: what it is about to change, then what became of that.

use std::collections::{HashMap, HashSet};
use std::io;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::address::LiveAddr;
use crate::error::{Effect, Error, Operation, Result};
use crate::process::Process;
use crate::process::program::Program;
use crate::select::AppliedChange;
use crate::update::holds::entries::{taken, undone};
use crate::update::holds::files::{Directory, LockedRecord};
use crate::update::holds::process_records::{is_stale, outcomes_now};
use crate::update::holds::record::{
    self, CounterEntry, EntryOutcome, Held, HolderRecord, ParsedRecord, ProcessKey,
};
use crate::update::plan::UpdatePlan;
use crate::update::report::Report;

/// Whether a change takes a hold, or undoes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HoldChange {
    Take,
    Undo,
}

impl HoldChange {
    fn on_failure(self) -> OnFailure {
        match self {
            HoldChange::Take => OnFailure::GiveUp,
            HoldChange::Undo => OnFailure::KeepIntent,
        }
    }
}

/// The record of a hold: ours, or one whose holder is dead.
#[derive(Debug)]
pub(crate) struct HoldJournal {
    state: Mutex<HoldState>,
    /// Whether a change that cannot be recorded must not be made.
    is_required: bool,
    /// What other holders hold of each counter.
    held_by_others: HashMap<LiveAddr, i32>,
}

/// What to do if the outcome of a change cannot be recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum OnFailure {
    /// Go on without a record; [`HoldJournal::failure`] says why.
    GiveUp,
    /// Keep the record as it is: only it says that something is still held.
    KeepIntent,
}

#[derive(Debug)]
struct HoldState {
    /// `None` before the first change, after one that could not be recorded, and after everything was undone.
    file: Option<LockedRecord>,
    record: ParsedRecord,
    /// What `record` was before the last intent, if it was settled then.
    before_intent: Option<ParsedRecord>,
    /// Why the hold is not recorded.
    failure: Option<io::Error>,
}

impl HoldJournal {
    /// Returns the record of a hold that we are about to take. Nothing is written yet.
    pub(crate) fn new(process: &Process) -> HoldJournal {
        let (process, failure) = match ProcessKey::of(process) {
            Ok(key) => (key, None),
            Err(error) => (ProcessKey::default(), Some(error)),
        };
        let record = ParsedRecord {
            process,
            holder: HolderRecord::own(),
            entries: Vec::new(),
            outcomes: Some(Vec::new()),
            settled_at: None,
            complete: 0,
        };
        HoldJournal {
            state: Mutex::new(HoldState {
                file: None,
                record,
                before_intent: None,
                failure,
            }),
            is_required: false,
            held_by_others: HashMap::new(),
        }
    }

    /// Returns the record of a dead holder. `held_by_others` is what other holders hold of each counter: see
    /// [`ProcessRecords::held_by_keepers`](super::process_records::ProcessRecords::held_by_keepers).
    pub(crate) fn of_dead(
        file: LockedRecord,
        record: ParsedRecord,
        held_by_others: HashMap<LiveAddr, i32>,
    ) -> HoldJournal {
        HoldJournal {
            state: Mutex::new(HoldState {
                file: Some(file),
                record,
                before_intent: None,
                failure: None,
            }),
            is_required: true,
            held_by_others,
        }
    }

    /// Returns the entries for a plan that undoes what is held. If files cannot be read, what a dead holder holds
    /// of probes that are not found stays held: they may be in these files.
    fn undone(
        &self,
        record: &ParsedRecord,
        plan: &UpdatePlan,
        program: &Program,
    ) -> Vec<CounterEntry> {
        undone(
            record,
            plan,
            program,
            &self.held_by_others,
            self.is_required,
        )
    }

    fn state(&self) -> MutexGuard<'_, HoldState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns why the hold is not recorded; `None` if it is, or there is nothing to record.
    pub(crate) fn failure(&self) -> Option<String> {
        self.state().failure.as_ref().map(ToString::to_string)
    }

    /// Returns what is held, as changes to be undone in a program that may have fewer objects by now. The
    /// probes of which nothing is held are among them: some of their sites may be switched and others not.
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

    /// Records an undo that has nothing to write, if something stays held after it. If nothing does, the record is
    /// deleted later ([`HoldJournal::record_outcome`]).
    ///
    /// # Errors
    ///
    /// See [`HoldJournal::record_intent`].
    pub(crate) fn record_intent_without_writes(
        &self,
        plan: &UpdatePlan,
        program: &Program,
        change: HoldChange,
        pid: i32,
    ) -> Result<()> {
        let left = || self.undone(&self.state().record, plan, program);
        if change == HoldChange::Undo && left().iter().any(|entry| entry.held_after != 0) {
            self.record_intent(plan, program, change, pid)?;
        }
        Ok(())
    }

    /// Records what a plan is about to write.
    ///
    /// # Errors
    ///
    /// Only for a dead holder's record, which stays as it is. A hold of ours goes on without a record.
    pub(crate) fn record_intent(
        &self,
        plan: &UpdatePlan,
        program: &Program,
        change: HoldChange,
        pid: i32,
    ) -> Result<()> {
        let mut state = self.state();
        let state = &mut *state;
        let is_first = state.file.is_none() && change == HoldChange::Take;
        let entries = match change {
            HoldChange::Take => taken(plan, program),
            HoldChange::Undo => self.undone(&state.record, plan, program),
        };
        let is_settled = !is_first && state.record.outcomes.is_some();
        let before = is_settled.then(|| state.record.clone());
        match state.write_intent(&entries, is_first) {
            Ok(()) => {}
            Err(source) if self.is_required => {
                return Err(Error::of_call(pid, Operation::RecordHold, source));
            }
            Err(error) if change == HoldChange::Take => state.give_up(error),
            // If the undo is not carried out, what is held is written anew.
            Err(error) => state.blank(error),
        }
        state.before_intent = before;
        state.record.entries = entries;
        state.record.outcomes = None;
        Ok(())
    }

    /// Records what became of the intended change: everything was written or, if it failed, what the counters
    /// say. A record by which nothing is held is deleted.
    pub(crate) fn record_outcome(
        &self,
        process: &Process,
        change: HoldChange,
        done: std::result::Result<&Report, &Error>,
    ) {
        let mut state = self.state();
        let state = &mut *state;
        if state.record.outcomes.is_some() {
            let is_nothing_left = done.is_ok_and(|report| report.not_undone.is_empty());
            if change == HoldChange::Undo && is_nothing_left {
                state.forget();
            }
            return;
        }
        let outcomes = match done {
            Ok(_) => vec![EntryOutcome::After; state.record.entries.len()],
            Err(error) => outcomes_after(process, &state.record, error.effect()),
        };
        let is_half_changed = |error: &Error| error.effect() == Effect::HalfChanged;
        let stays = done.is_err_and(|error| self.is_required || is_half_changed(error));
        state.settle(outcomes, stays, change.on_failure());
    }

    /// Records that the intended change was not carried out, before it is tried again: nothing was written.
    pub(crate) fn record_not_carried_out(&self, change: HoldChange) {
        let mut state = self.state();
        if state.record.outcomes.is_none() {
            let outcomes = vec![EntryOutcome::Before; state.record.entries.len()];
            state.settle(outcomes, self.is_required, change.on_failure());
        }
    }

    /// Deletes the record: the process has exited, or executed a new program.
    pub(crate) fn remove(&self) {
        self.state().forget();
    }
}

/// Returns what became of the entries of an update of ours that has failed: what the counters say or, if they cannot be
/// read, what the error says.
fn outcomes_after(process: &Process, record: &ParsedRecord, effect: Effect) -> Vec<EntryOutcome> {
    outcomes_now(process, record).unwrap_or_else(|_| {
        let outcome = if effect == Effect::HalfChanged {
            EntryOutcome::Unknown
        } else {
            EntryOutcome::Before
        };
        vec![outcome; record.entries.len()]
    })
}

impl HoldState {
    /// Writes an intent, with room for what will become of it.
    fn write_intent(&mut self, entries: &[CounterEntry], is_first: bool) -> io::Result<()> {
        if is_first && self.failure.is_none() {
            self.create()?;
        }
        let Some(file) = &self.file else {
            return Ok(());
        };
        let mut part = record::intent(entries);
        if self.record.complete == 0 {
            part = record::head(&self.record.process, &self.record.holder) + &part;
        }
        file.append(
            self.record.complete,
            &part,
            record::settled_len(entries.len()),
        )?;
        self.record.complete += part.len();
        Ok(())
    }

    /// Creates the file.
    fn create(&mut self) -> io::Result<()> {
        let directory = Directory::own()?;
        let process = self.record.process;
        directory
            .sweep(|pid, start, namespace, file| is_stale(&process, (pid, start, namespace), file));
        self.file = Some(directory.new_record(&process)?);
        self.record.complete = 0;
        Ok(())
    }

    /// Records what became of the intended change. A record by which nothing is held is deleted, unless it `stays`: it
    /// names the probes of which only some sites may be switched.
    fn settle(&mut self, outcomes: Vec<EntryOutcome>, stays: bool, on_failure: OnFailure) {
        let is_unwritten = outcomes.iter().all(|it| *it == EntryOutcome::Before);
        self.record.outcomes = Some(outcomes);
        // Otherwise, a change that is tried again and again would fill the file.
        if is_unwritten && self.roll_back() {
            return;
        }
        self.before_intent = None;
        if !stays && !self.record.holds_anything() {
            self.remove();
            return;
        }
        if self.is_blank() {
            return self.rewrite();
        }
        match (self.append_outcomes(), on_failure) {
            (Err(error), OnFailure::GiveUp) if !stays => self.give_up(error),
            // The intent stays, and the counters tell what became of it.
            _ => {}
        }
    }

    /// Takes back the last intent; returns false if that cannot be done.
    fn roll_back(&mut self) -> bool {
        let Some(before) = self.before_intent.take() else {
            return false;
        };
        if self.is_blank() {
            self.record = before;
            self.rewrite();
            return true;
        }
        let is_cut = match &self.file {
            Some(file) => file.append(before.complete, "", 0).is_ok(),
            None => true,
        };
        if is_cut {
            self.record = before;
        }
        is_cut
    }

    fn append_outcomes(&mut self) -> io::Result<()> {
        if let Some(file) = &self.file {
            let part = record::settled(self.record.outcomes.as_deref().unwrap_or_default());
            file.settle(self.record.complete, &part)?;
            self.record.complete += part.len();
        }
        Ok(())
    }

    /// Goes on without a record: a false one would be worse.
    fn give_up(&mut self, error: io::Error) {
        self.remove();
        self.failure = Some(error);
    }

    /// Empties the file, which has no room for a change, until the outcome of that is known: what the file says may be
    /// false by then. If that fails, too, goes on without a record; `error` is why the change could not be recorded.
    fn blank(&mut self, error: io::Error) {
        match &self.file {
            Some(file) if file.append(0, "", 0).is_ok() => self.record.complete = 0,
            _ => self.give_up(error),
        }
    }

    fn is_blank(&self) -> bool {
        self.file.is_some() && self.record.complete == 0
    }

    /// Writes the record into the emptied file. There is room: that of what the file held before.
    fn rewrite(&mut self) {
        let Some(file) = &self.file else {
            return;
        };
        let record = &self.record;
        let text = record::head(&record.process, &record.holder)
            + &record::intent(&record.entries)
            + &record::settled(record.outcomes.as_deref().unwrap_or_default());
        match file.append(0, &text, 0) {
            Ok(()) => self.record.complete = text.len(),
            Err(error) => self.give_up(error),
        }
    }

    /// Deletes the record, and forgets what was held: nothing of it is left.
    fn forget(&mut self) {
        self.remove();
        self.record.entries.clear();
        self.record.outcomes = Some(Vec::new());
    }

    fn remove(&mut self) {
        if let Some(file) = self.file.take() {
            file.remove();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::sync::Arc;

    use super::*;
    use crate::error::ProcessError;
    use crate::process::object::UnreadableObject;
    use crate::select::{Action, Actions, Selector};
    use crate::testing::SimulatedProcess;
    use crate::update::holds::files::MAX_RECORD;

    #[test]
    fn change_tried_again_keeps_what_was_held() {
        let process = Process::own().unwrap();
        let hold = HoldJournal::new(&process);
        let mut simulated = SimulatedProcess::of("multi_semaphore.pie");
        let (start, stop) = ("single".to_owned(), "many".to_owned());
        let enable = Actions::of(Action::Enable, Selector::Pair { start, stop });
        let (_, on) = simulated.plan(&enable).unwrap();
        let (pid, done) = (process.pid(), Report::of_nothing(process.pid()));
        let record_intent = |plan: &UpdatePlan, program: &Program, change| {
            hold.record_intent(plan, program, change, pid).unwrap();
        };
        let held = |program: &Program| -> i32 {
            let applied = hold.applied(program);
            let added = applied.iter().flat_map(|it| it.added.iter());
            added.map(|(_, amount)| amount).sum()
        };
        record_intent(&on, &simulated.program, HoldChange::Take);
        hold.record_not_carried_out(HoldChange::Take);
        assert_eq!((hold.failure(), held(&simulated.program)), (None, 0));
        // The next attempt found nothing to do: nothing is held.
        hold.record_outcome(&process, HoldChange::Take, Ok(&done));
        assert_eq!(held(&simulated.program), 0);
        record_intent(&on, &simulated.program, HoldChange::Take);
        simulated.update(&enable).unwrap();
        hold.record_outcome(&process, HoldChange::Take, Ok(&done));
        assert_eq!(held(&simulated.program), 4);

        let (_, off) = simulated.plan_for(&simulated.undo(&on), false).unwrap();
        let stages = |program: &Program| -> BTreeMap<String, u8> {
            let applied = hold.applied(program).into_iter();
            applied.map(|it| (it.name, it.stage)).collect()
        };
        let before = stages(&simulated.program);
        record_intent(&off, &simulated.program, HoldChange::Undo);
        hold.record_not_carried_out(HoldChange::Undo);
        assert_eq!(held(&simulated.program), 4);
        assert_eq!(stages(&simulated.program), before);
        // Attempts that are not carried out do not make the record longer.
        let complete = hold.state().record.complete;
        for _ in 0..3 {
            record_intent(&off, &simulated.program, HoldChange::Undo);
            hold.record_not_carried_out(HoldChange::Undo);
            assert_eq!(hold.state().record.complete, complete);
        }
        let bytes = hold
            .state()
            .file
            .as_ref()
            .unwrap()
            .file()
            .read(MAX_RECORD)
            .unwrap();
        assert_eq!(bytes.len(), complete);
        assert_eq!(held(&simulated.program), 4);
        record_intent(&off, &simulated.program, HoldChange::Undo);
        hold.record_outcome(&process, HoldChange::Undo, Ok(&done));
        assert_eq!(held(&simulated.program), 0);
        assert!(hold.state().file.is_none());
    }

    #[test]
    fn probes_of_unreadable_files_stay_held() {
        let process = Process::own().unwrap();
        let hold = HoldJournal::new(&process);
        let mut simulated = SimulatedProcess::of("multi_semaphore.pie");
        let enable = Actions::of(Action::Enable, Selector::All);
        let (_, on) = simulated.plan(&enable).unwrap();
        let (pid, done) = (process.pid(), Report::of_nothing(process.pid()));
        hold.record_intent(&on, &simulated.program, HoldChange::Take, pid)
            .unwrap();
        simulated.update(&enable).unwrap();
        hold.record_outcome(&process, HoldChange::Take, Ok(&done));

        // Later, the program has none of these probes.
        let later = SimulatedProcess::of("gen_ocaml_2.pie");
        let (_, nothing) = later.plan_for(&[], false).unwrap();
        let left = |program: &Program, keeps_unknown| -> i32 {
            let record = &hold.state().record;
            let entries = undone(record, &nothing, program, &HashMap::new(), keeps_unknown);
            entries.iter().map(|entry| entry.held_after).sum()
        };
        assert_eq!(left(&later.program, true), 0);
        let unreadable = UnreadableObject {
            path: "/srv/library.so".into(),
            why: Arc::new(Selector::regexp("(").unwrap_err()),
            may_have_usdt_probes: false,
        };
        let program = later.program.with_unreadable(vec![unreadable]);
        assert_eq!((left(&program, true), left(&program, false)), (4, 0));
        hold.record_outcome(&process, HoldChange::Undo, Ok(&done));
    }

    #[test]
    fn failed_write_keeps_what_was_recorded_first() {
        let process = Process::own().unwrap();
        let hold = HoldJournal::new(&process);
        let mut simulated = SimulatedProcess::of("multi_semaphore.pie");
        let enable = Actions::of(Action::Enable, Selector::All);
        let (_, on) = simulated.plan(&enable).unwrap();
        let (pid, done) = (process.pid(), Report::of_nothing(process.pid()));
        hold.record_intent(&on, &simulated.program, HoldChange::Take, pid)
            .unwrap();
        simulated.update(&enable).unwrap();
        hold.record_outcome(&process, HoldChange::Take, Ok(&done));

        // Something else is in the code of one probe, which stays held.
        let choices = simulated.undo(&on);
        let nop = LiveAddr(simulated.opcodes("single")[0].0 - 1);
        simulated.memory.poke(nop, &[0xcc]);
        let (_, off) = simulated.plan_for(&choices, false).unwrap();
        assert_eq!(off.not_undone.len(), 1);
        hold.record_intent(&off, &simulated.program, HoldChange::Undo, pid)
            .unwrap();
        // There is no room after this.
        hold.state().record.complete = MAX_RECORD as usize;
        hold.record_outcome(&process, HoldChange::Undo, Ok(&done));
        assert_eq!(hold.failure(), None);
        let bytes = hold
            .state()
            .file
            .as_ref()
            .unwrap()
            .file()
            .read(MAX_RECORD)
            .unwrap();
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

    /// A hold of all probes of a simulated process, recorded with our own pid, so that it has a key.
    fn held_by_us() -> (SimulatedProcess, HoldJournal, UpdatePlan) {
        let process = Process::own().unwrap();
        let hold = HoldJournal::new(&process);
        let mut simulated = SimulatedProcess::of("multi_semaphore.pie");
        let enable = Actions::of(Action::Enable, Selector::All);
        let (_, on) = simulated.plan(&enable).unwrap();
        let done = Report::of_nothing(process.pid());
        hold.record_intent(&on, &simulated.program, HoldChange::Take, process.pid())
            .unwrap();
        simulated.update(&enable).unwrap();
        hold.record_outcome(&process, HoldChange::Take, Ok(&done));
        (simulated, hold, on)
    }

    fn recorded(hold: &HoldJournal) -> Vec<u8> {
        let state = hold.state();
        state
            .file
            .as_ref()
            .unwrap()
            .file()
            .read(MAX_RECORD)
            .unwrap()
    }

    /// What is held according to the file.
    fn recorded_names(hold: &HoldJournal) -> HashSet<String> {
        let record = ParsedRecord::parse(&recorded(hold)).unwrap();
        let held = record.held().filter(|held| held.amount != 0);
        held.map(|held| held.entry.name.clone()).collect()
    }

    #[test]
    fn undo_without_room_keeps_the_record() {
        let (simulated, hold, on) = held_by_us();
        let names = recorded_names(&hold);
        assert!(!names.is_empty());
        let (_, off) = simulated.plan_for(&simulated.undo(&on), false).unwrap();
        let pid = std::process::id() as i32;
        let undo = || {
            hold.record_intent(&off, &simulated.program, HoldChange::Undo, pid)
                .unwrap();
        };
        // There is no room after this.
        hold.state().record.complete = MAX_RECORD as usize;
        undo();
        // What it said may be false by now.
        assert!(recorded(&hold).is_empty());
        // The undo is not carried out.
        hold.record_not_carried_out(HoldChange::Undo);
        assert_eq!((hold.failure(), recorded_names(&hold)), (None, names));
        undo();
        let done = Report::of_nothing(pid);
        hold.record_outcome(&Process::own().unwrap(), HoldChange::Undo, Ok(&done));
        assert!(hold.state().file.is_none());
    }

    #[test]
    fn half_changed_sites_stay_recorded() {
        let (simulated, hold, on) = held_by_us();
        let process = Process::own().unwrap();
        let (_, off) = simulated.plan_for(&simulated.undo(&on), false).unwrap();
        hold.record_intent(&off, &simulated.program, HoldChange::Undo, process.pid())
            .unwrap();
        let error = Error::of_process(process.pid(), ProcessError::KeepsChanging);
        let error = error.with_effect_if_none(Effect::HalfChanged);
        hold.record_outcome(&process, HoldChange::Undo, Err(&error));
        // We have no memory at the addresses of these counters, so nothing is to be subtracted; the sites are to be
        // restored.
        assert!(recorded_names(&hold).is_empty());
        let applied = hold.applied(&simulated.program);
        assert!(!applied.is_empty());
        let mut added = applied.iter().flat_map(|it| it.added.iter());
        assert!(added.all(|(_, amount)| *amount == 0));
        hold.remove();
        assert!(hold.applied(&simulated.program).is_empty());
    }

    #[test]
    fn outcome_of_a_recorded_change_needs_no_space() {
        let (simulated, hold, on) = held_by_us();
        let (_, off) = simulated.plan_for(&simulated.undo(&on), false).unwrap();
        let process = Process::own().unwrap();
        hold.record_intent(&off, &simulated.program, HoldChange::Undo, process.pid())
            .unwrap();
        let intended = recorded(&hold);
        assert_eq!(ParsedRecord::parse(&intended).unwrap().outcomes, None);
        let outcomes = vec![EntryOutcome::Unknown; hold.state().record.entries.len()];
        hold.state().settle(outcomes, true, OnFailure::KeepIntent);
        let settled = recorded(&hold);
        assert!(ParsedRecord::parse(&settled).unwrap().outcomes.is_some());
        assert_eq!(settled.len(), intended.len());
        hold.remove();
    }
}
