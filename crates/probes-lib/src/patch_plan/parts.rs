//! [`PartOwners`]: which function owns each part that the compiler has moved away (`.cold`). The owner jumps to the
//! part, directly or through a table, or is where the part jumps back to.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use crate::address::CodeRange;

/// Which functions the parts belong to; parts are named by their starts.
#[derive(Clone, Debug, Default)]
pub(super) struct PartOwners {
    /// A part, and an address of its owner: the start of an owner that jumps to the part, or where the part jumps back
    /// to.
    by_jump: BTreeSet<(u64, u64)>,
    /// The same pairs, with the address first.
    parts: BTreeSet<(u64, u64)>,
    /// By the start of a function: its end, and the parts that its jump tables lead to.
    by_table: BTreeMap<u64, (u64, BTreeSet<u64>)>,
    /// The function whose jump tables lead to a part; `None` if there are several.
    of_table: BTreeMap<u64, Option<u64>>,
    /// The function that jumps to a part; `None` if there are several, or if it overlaps another function.
    of_jump: BTreeMap<u64, Option<u64>>,
}

impl PartOwners {
    /// Adds a jump to a part, from the function at this address; `is_alone` if that overlaps no other function.
    pub(super) fn add_jump(&mut self, part: CodeRange, function: u64, is_alone: bool) {
        self.add_jump_back(part, function);
        let owner = self.of_jump.entry(part.start.0).or_insert(Some(function));
        *owner = owner.filter(|it| *it == function && is_alone);
    }

    /// Returns whether several functions jump to a part, or may do so because they overlap: its exits would be exits of
    /// each of them.
    pub(super) fn is_shared(&self, part: CodeRange) -> bool {
        self.of_jump.get(&part.start.0) == Some(&None)
    }

    /// Returns the start of the only function that jumps to a part, directly or through a table; `None` if no such
    /// function is known, or there are several.
    pub(super) fn only_owner(&self, part: CodeRange) -> Option<u64> {
        let found = [&self.of_jump, &self.of_table].map(|owners| owners.get(&part.start.0));
        match found {
            [Some(one), None] => *one,
            // The table may have been read beyond its end.
            [None, Some(one)] => one.filter(|one| self.leads_back_to(part, *one)),
            [Some(one), Some(other)] => one.filter(|_| one == other),
            [None, None] => None,
        }
    }

    /// Returns whether all jumps from a part lead to the function that begins at `start` and has a table.
    fn leads_back_to(&self, part: CodeRange, start: u64) -> bool {
        let end = self.by_table.get(&start).map_or(start, |(end, _)| *end);
        let jumps = (part.start.0, 0)..=(part.start.0, u64::MAX);
        let mut back = self.by_jump.range(jumps);
        back.all(|(_, address)| (start..end).contains(address))
    }

    /// Adds a jump from a part to an address of a function.
    pub(super) fn add_jump_back(&mut self, part: CodeRange, address: u64) {
        self.by_jump.insert((part.start.0, address));
        self.parts.insert((address, part.start.0));
    }

    /// Adds an entry of a function's jump table that leads to a part.
    pub(super) fn add_label(&mut self, part: CodeRange, function: &Range<u64>) {
        let (part, start) = (part.start.0, function.start);
        let new = || (function.end, BTreeSet::new());
        self.by_table
            .entry(start)
            .or_insert_with(new)
            .1
            .insert(part);
        let owner = self.of_table.entry(part).or_insert(Some(start));
        *owner = owner.filter(|it| *it == start);
    }

    /// Returns whether a function may have parts.
    pub(super) fn has_part(&self, function: &Range<u64>) -> bool {
        let pairs = (function.start, 0)..(function.end, 0);
        self.by_table.contains_key(&function.start) || self.parts.range(pairs).next().is_some()
    }

    /// Returns the parts that the function at an address jumps to through tables; `None` if one of them may belong to
    /// another function, because a table may have been read beyond its end.
    pub(super) fn by_table(&self, address: u64) -> Option<Vec<u64>> {
        let before = self.by_table.range(..=address).next_back();
        let Some((&start, (end, labelled))) = before.filter(|(_, (end, _))| address < *end) else {
            return Some(Vec::new());
        };
        let function = start..*end;
        let mut found = Vec::new();
        for &part in labelled {
            let mut owners = self.by_jump.range((part, 0)..=(part, u64::MAX));
            let is_own = owners.clone().any(|(_, it)| function.contains(it));
            if !is_own && owners.next().is_some() {
                continue;
            }
            if !is_own && self.of_table.get(&part) != Some(&Some(start)) {
                return None;
            }
            found.push(part);
        }
        Some(found)
    }
}
