//! [`JumpTargets`]: where indirect jumps lead, as jump tables and other data say.

use iced_x86::Register;

use crate::numbers::u64_at;
use crate::patch_plan::tables::{JumpSource, Origin};
use crate::patch_plan::targets::{Group, Ranges, Sweep, Targets};

/// How many entries of jump tables are read in one object, plus pieces of functions searched for labels, at most; real
/// objects have far fewer. Without a limit, a file could make each function read the same data.
pub(super) const MAX_ENTRIES: usize = 1 << 24;

/// Where an indirect jump leads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::patch_plan) enum JumpTargets {
    /// To addresses that may not be in [`Targets`].
    Untracked,
    /// To addresses in [`Targets`]; to which of them is not known.
    AnyTarget,
    /// To other functions.
    Outside,
    /// Into its own function.
    Inside,
}

/// Returns where a jump leads that may use either of two tables; `None` stands for data that is no table.
fn either_table(one: Option<JumpTargets>, other: Option<JumpTargets>) -> Option<JumpTargets> {
    match (one, other) {
        (Some(one), Some(other)) if one != other => Some(JumpTargets::AnyTarget),
        _ => one.or(other),
    }
}

impl Targets {
    /// Returns whether the tables of all code have to be read: the table of some jump is in none of the data that its
    /// function refers to, as another part of the function may load it, or its target is computed in an unknown way.
    pub(super) fn reads_all(&mut self, sweep: &Sweep<'_>) -> bool {
        let mut is_elsewhere = |group: &Group, source: JumpSource| match source {
            JumpSource::Relative { table, .. } => {
                let found = self.possible_addresses(group, table, |it| sweep.code.is_data(it));
                found.is_none_or(|found| found.is_empty())
            }
            JumpSource::Computed => true,
            _ => false,
        };
        let mut jumps = sweep
            .groups
            .iter()
            .flat_map(|group| group.jumps.iter().map(move |(_, source)| (group, *source)));
        jumps.any(|(group, source)| is_elsewhere(group, source))
    }

    /// Adds what jump tables of offsets can yield, then finds out where each indirect jump leads.
    ///
    /// All data that a function with such a jump refers to are read as if they were tables whose offsets count from
    /// their own start; strings and numbers add nothing, as their first entry leads out of the code. If `reads_all`, so
    /// are the data that all other functions refer to.
    pub(super) fn read_tables(&mut self, sweep: &mut Sweep<'_>, reads_all: bool) {
        let mut references = std::mem::take(&mut sweep.references);
        let mut all = [&references[..], &sweep.other_references[..]].concat();
        all.sort_unstable();
        all.dedup();
        references.sort_unstable();
        references.dedup();
        let tables = if reads_all { &all } else { &references };
        for &start in tables {
            let entries = self.offsets(sweep, start, start);
            self.add_labels(&entries.unwrap_or_default());
        }
        sweep.references = all;
        let groups = std::mem::take(&mut sweep.groups);
        // Tables of offsets first, then those of addresses: what they hold tells where other jumps may lead.
        for order in 0..3 {
            for group in &groups {
                let jumps = group.jumps.iter();
                for &(address, source) in jumps.filter(|(_, source)| source.order() == order) {
                    let found = self.targets_of_source(sweep, group, source);
                    self.jumps.insert(address, found);
                }
            }
        }
    }

    /// Returns where a jump leads whose target comes from `source`.
    fn targets_of_source(
        &mut self,
        sweep: &Sweep<'_>,
        group: &Group,
        source: JumpSource,
    ) -> JumpTargets {
        match source {
            JumpSource::Pointer => *group.of_pointers.get_or_init(|| self.of_pointer(group)),
            JumpSource::Slot if self.has_own_label(group) => JumpTargets::AnyTarget,
            JumpSource::Slot => JumpTargets::Outside,
            JumpSource::Address(target) => {
                let found = self.classify(group, sweep.ranges, &[target]);
                let is_unknown = sweep.code.is_executable(target) && !sweep.ranges.contains(target);
                found.unwrap_or(if is_unknown {
                    JumpTargets::AnyTarget
                } else {
                    JumpTargets::Outside
                })
            }
            JumpSource::Computed => JumpTargets::Untracked,
            JumpSource::Distant => self.outside_if_no_labels(sweep, group),
            JumpSource::Absolute(origin) => match self.follow_addresses(sweep, group, origin) {
                Some(Some(found)) => found,
                Some(None) => self.outside_if_no_labels(sweep, group),
                None => JumpTargets::Untracked,
            },
            JumpSource::Relative { table, base } => {
                let found = self.follow_offsets(sweep, group, [table, base]);
                found.unwrap_or(JumpTargets::Untracked)
            }
        }
    }

    /// Returns where a jump through a table of addresses leads, if it has one; `None` if too many entries have been read.
    fn follow_addresses(
        &mut self,
        sweep: &Sweep<'_>,
        group: &Group,
        origin: Origin,
    ) -> Option<Option<JumpTargets>> {
        let mut found = None;
        for table in self.possible_addresses(group, origin, |_| true)? {
            let entries = self.addresses(sweep, table)?;
            entries.iter().for_each(|it| self.table_labels.insert(*it));
            // A table of labels may follow one of functions.
            let has_function = entries.iter().any(|it| sweep.ranges.begins_function(*it));
            let leads = match self.classify(group, sweep.ranges, &entries) {
                Some(JumpTargets::Inside) if has_function => Some(JumpTargets::AnyTarget),
                leads => leads,
            };
            found = either_table(found, leads);
        }
        Some(found)
    }

    /// Returns where a jump through a table of offsets leads; `None` if that is unknown.
    fn follow_offsets(
        &mut self,
        sweep: &Sweep<'_>,
        group: &Group,
        [table, base]: [Origin; 2],
    ) -> Option<JumpTargets> {
        let mut found = None;
        let mut starts = self.possible_addresses(group, table, |it| sweep.code.is_data(it))?;
        if starts.is_empty() {
            starts =
                self.possible_addresses(group, Origin::Unknown, |it| sweep.code.is_data(it))?;
        }
        for start in starts {
            let mut bases = Vec::new();
            if base != table {
                bases = self.possible_addresses(group, base, |_| true)?;
                if bases.is_empty() {
                    bases = self.possible_addresses(group, Origin::Unknown, |_| true)?;
                }
            }
            if base == table || !matches!(base, Origin::Address(_)) {
                bases.push(start);
            }
            for base in bases {
                let entries = self.offsets(sweep, start, base)?;
                self.add_labels(&entries);
                let leads = self.classify(group, sweep.ranges, &entries);
                found = either_table(found, leads);
            }
        }
        found
    }

    /// Returns where a jump leads through a table with these entries; `None` if that is unknown.
    fn classify(
        &mut self,
        group: &Group,
        ranges: Ranges<'_>,
        entries: &[u64],
    ) -> Option<JumpTargets> {
        let (mut is_inside, mut is_known) = (false, true);
        for &entry in entries {
            let part = ranges.part_at(entry);
            if let Some(part) = part.filter(|it| !it.contains(group.range.start)) {
                self.owners.add_label(part, &group.range);
                is_inside = true;
            }
            is_inside |= entry > group.range.start && entry < group.range.end;
            // Compilers let impossible cases lead to the end.
            is_known &= ranges.contains(entry) || entry == group.range.end;
        }
        let is_part = ranges.part_at(group.range.start).is_some();
        if entries.is_empty() {
            None
        } else if !is_inside && entries.iter().all(|it| ranges.begins_function(*it)) {
            Some(JumpTargets::Outside)
        } else if !is_inside && !is_part {
            None
        } else if is_known {
            Some(JumpTargets::Inside)
        } else {
            Some(JumpTargets::AnyTarget)
        }
    }

    fn add_labels(&mut self, entries: &[u64]) {
        for &entry in entries {
            self.all.insert(entry);
            if !self.labels.contains(entry) {
                self.table_labels.insert(entry);
                self.labels.insert(entry);
            }
        }
    }

    /// Returns where a jump through a pointer leads: out of its function, unless data hold the address of a label in
    /// it, as in an interpreter whose instructions are addresses of its labels; or the function stores such an address
    /// itself, to go on there when it is called again.
    fn of_pointer(&mut self, group: &Group) -> JumpTargets {
        if self.has_own_label(group) {
            return JumpTargets::AnyTarget;
        }
        match self.has_label(group, |targets, it| !targets.table_labels.contains(it)) {
            None => JumpTargets::Untracked,
            Some(true) => JumpTargets::AnyTarget,
            Some(false) => JumpTargets::Outside,
        }
    }

    /// Returns where a jump leads whose target is unknown: out of its function, if that has no parts, and neither
    /// tables nor other data hold a label in it.
    fn outside_if_no_labels(&mut self, sweep: &Sweep<'_>, group: &Group) -> JumpTargets {
        let Some(has_label) = self.has_label(group, |_, _| true) else {
            return JumpTargets::Untracked;
        };
        let is_part = sweep.ranges.part_at(group.range.start).is_some();
        if has_label || self.has_own_label(group) || is_part || self.owners.has_part(&group.range) {
            JumpTargets::AnyTarget
        } else {
            JumpTargets::Outside
        }
    }

    /// Returns whether a group loads the address of an instruction of its own, other than one that a call returns to.
    fn has_own_label(&self, group: &Group) -> bool {
        let is_label = |it: &u64| !self.returns.contains(*it);
        let find = || group.own_labels.iter().any(is_label);
        *group.has_own_label.get_or_init(find)
    }

    /// Returns whether a group has a label for which `counts` is true, other than its start; `None` if too many entries
    /// have been read.
    fn has_label(&mut self, group: &Group, counts: impl Fn(&Targets, u64) -> bool) -> Option<bool> {
        // 64 addresses count as one entry.
        let steps = (group.range.end - group.range.start) as usize / 64;
        self.count_entries(1 + steps)?;
        let is_label =
            |it: u64| self.labels.contains(it) && !self.returns.contains(it) && counts(self, it);
        Some((group.range.start.saturating_add(1)..group.range.end).any(is_label))
    }

    /// Returns the possible addresses that an origin may stand for in a group; `None` if too many have been read.
    fn possible_addresses(
        &mut self,
        group: &Group,
        origin: Origin,
        is_possible: impl Fn(u64) -> bool,
    ) -> Option<Vec<u64>> {
        let register = match origin {
            Origin::Address(address) => return Some(vec![address]),
            Origin::Register(register) => Some(register),
            Origin::Unknown => None,
        };
        self.count_entries(group.leas.len())?;
        self.count_entries(group.constants.len())?;
        let may_be = |it: &&(Register, u64)| register.is_none_or(|register| register == it.0);
        let leas = group.leas.iter().filter(may_be).map(|it| it.1);
        let constants = group.constants.iter().copied();
        let constants = constants.filter(|_| register.is_none());
        let mut found: Vec<u64> = leas
            .chain(constants)
            .filter(|it| is_possible(*it))
            .collect();
        found.sort_unstable();
        found.dedup();
        Some(found)
    }

    /// Reads a table of offsets from `base`, up to an entry that is not in code, or to another table.
    fn offsets(&mut self, sweep: &Sweep<'_>, table: u64, base: u64) -> Option<Vec<u64>> {
        let mut after = sweep.tables.range(table.saturating_add(1)..);
        let end = after.next().copied().unwrap_or(u64::MAX);
        self.read((table..end).step_by(4), |at| {
            let offset = sweep.code.bytes(at, 4).try_into().ok()?;
            let entry = base.wrapping_add_signed(i32::from_le_bytes(offset).into());
            sweep.code.is_label(entry).then_some(entry)
        })
    }

    /// Reads a table of addresses, up to an entry that is not in code, or to data that other code refers to. All
    /// addresses in data are known to be targets, whether they are read here or not.
    fn addresses(&mut self, sweep: &Sweep<'_>, table: u64) -> Option<Vec<u64>> {
        let after = sweep.references.partition_point(|it| *it <= table);
        let end = sweep.references.get(after).copied().unwrap_or(u64::MAX);
        self.read((table..end).step_by(8), |at| {
            let entry = u64_at(sweep.code.bytes(at, 8), 0);
            entry.filter(|it| sweep.code.is_label(*it))
        })
    }

    /// Reads a table; `None` if too many entries have been read.
    fn read(
        &mut self,
        mut places: impl Iterator<Item = u64>,
        entry_at: impl Fn(u64) -> Option<u64>,
    ) -> Option<Vec<u64>> {
        let mut entries = Vec::new();
        self.count_entries(1)?;
        while let Some(entry) = places.next().and_then(&entry_at) {
            self.count_entries(1)?;
            entries.push(entry);
        }
        Some(entries)
    }

    /// Takes so many from the entries that may still be read; `None` if not as many are left.
    fn count_entries(&mut self, count: usize) -> Option<()> {
        let left = self.entries_left.checked_sub(count);
        self.entries_left = left.unwrap_or(0);
        left.map(drop)
    }
}
