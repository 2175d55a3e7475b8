//! Functions whose only exit, a return, is patched with a short jump to an island among their own displaced
//! instructions, because the function after them is patched, too ([`PatchPlanner::leaning`]). If there is no padding
//! between the two, the last byte of the short jump is the first byte of the next function, whose own jump begins after
//! that byte: the function *leans* on the next one. Both are patched together: they are on one page, which is written
//! at once. The next function does not need the first one: its own first byte is a REX prefix, which does not matter to
//! a jump.
//!
//! [`PatchPlanner::leaning`]: crate::PatchPlanner::leaning

use std::io;

use crate::address::FileAddr;
use crate::error::Refusal;
use crate::memory::ReadMemory;
use crate::observe::functions::{ObservedFunction, ObservedFunctions};
use crate::patch_plan::jump::JUMP_LEN;

impl ObservedFunctions {
    /// Changes the patches of functions whose exit would otherwise overlap the patch of the next function. Returns
    /// whether there are such functions.
    pub(crate) fn lean(&mut self) -> bool {
        let mut is_changed = false;
        for index in (0..self.functions.len()).rev() {
            let Some((next, overwrites_next)) = self.may_lean_on(index) else {
                continue;
            };
            if overwrites_next && !self.functions[next].best.is_prefixed() {
                let Some(prefixed) = self.functions[next].best.prefixed() else {
                    continue;
                };
                self.functions[next].best = prefixed;
            }
            self.functions[index].swap_patches();
            is_changed = true;
        }
        is_changed
    }

    /// Returns the index of the timed function whose patch the exit of this one overlaps although it need not, and
    /// whether the exit would overwrite the first byte of that function instead.
    fn may_lean_on(&self, index: usize) -> Option<(usize, bool)> {
        let function = &self.functions[index];
        let timing = function.timing.as_ref().filter(|it| !it.leans)?;
        let overwrites_next = timing.other.as_ref()?.overwrites_next;
        let reserved = timing.exits.last()?.site.reserved().next()?;
        // The next function begins right after the return, or elsewhere within the punned jump.
        let most = if overwrites_next { 1 } else { JUMP_LEN - 1 };
        let mut after = reserved.start.0 + 1..reserved.start.0 + 1 + most;
        let found = after.find_map(|at| self.timed_at(function, FileAddr(at)))?;
        Some((found, overwrites_next))
    }

    /// Returns the index of the function on which this one leans.
    fn leans_on(&self, index: usize) -> Option<usize> {
        let function = &self.functions[index];
        let exit = function.timing.as_ref()?.exits.last()?;
        let end = exit.site.address().0 + exit.site.displaced().len() as u64;
        let next = self.timed_at(function, FileAddr(end))?;
        let leans = function.overwrites_next() && self.functions[next].best.is_prefixed();
        leans.then_some(next)
    }

    /// Returns the index of the function that begins at an address of the object of another one, if it is timed and the
    /// patch of its entry begins there.
    fn timed_at(&self, function: &ObservedFunction, at: FileAddr) -> Option<usize> {
        let at = function.bias.live(at);
        let found = self.begins_at(at)?;
        let next = &self.functions[found];
        let begins = next.bias.live(next.best.site.address()) == at;
        (begins && next.timing.is_some()).then_some(found)
    }

    /// Changes back the patches of the functions that lean on one which is no longer among these.
    pub(super) fn lean_no_longer(&mut self) {
        // From the last to the first: whether a function leans on the next one may depend on how that one is patched.
        for index in (0..self.functions.len()).rev() {
            if self.functions[index].overwrites_next() && self.leans_on(index).is_none() {
                self.functions[index].swap_patches();
            }
        }
    }

    /// Adds to `left_out`, which is sorted by index, the functions that lean on one of these: they cannot be
    /// patched either.
    fn add_leaning(&self, left_out: &mut Vec<(usize, Refusal)>) {
        for index in (0..self.functions.len()).rev() {
            let Some(next) = self.leans_on(index) else {
                continue;
            };
            let place = |index: usize| left_out.binary_search_by_key(&index, |(it, _)| *it);
            if let (Ok(next), Err(at)) = (place(next), place(index)) {
                let why = left_out[next].1.clone();
                left_out.insert(at, (index, why));
            }
        }
    }

    /// Returns the functions that [`ObservedFunctions::changed`] returns, and those that lean on them.
    ///
    /// # Errors
    ///
    /// If the process is gone.
    pub(crate) fn left_out(&self, memory: &impl ReadMemory) -> io::Result<Vec<(usize, Refusal)>> {
        let mut left_out = self.changed(memory)?;
        self.add_leaning(&mut left_out);
        Ok(left_out)
    }
}

impl ObservedFunction {
    /// Whether the patch of its exit overwrites the first byte of the next function.
    fn overwrites_next(&self) -> bool {
        let leaning = self.timing.as_ref().filter(|timing| timing.leans);
        let other = leaning.and_then(|timing| timing.other.as_ref());
        other.is_some_and(|other| other.overwrites_next)
    }

    /// Patches it in the other way, if there is one. Another function may lean on it either way.
    fn swap_patches(&mut self) {
        let Some(timing) = &mut self.timing else {
            return;
        };
        let Some(other) = &mut timing.other else {
            return;
        };
        let is_prefixed = self.best.is_prefixed();
        std::mem::swap(&mut self.best, &mut other.entry);
        std::mem::swap(&mut timing.exits, &mut other.exits);
        timing.leans = !timing.leans;
        if let Some(prefixed) = self.best.prefixed().filter(|_| is_prefixed) {
            self.best = prefixed;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::ops::Range;

    use nix::fcntl::OFlag;
    use test_support::{Talker, fixture_forms};

    use super::*;
    use crate::observe::observation::Observation;
    use crate::patch_plan::jump::Jump;
    use crate::process::Process;
    use crate::process::memory::ProcessMemory;
    use crate::select::function::FunctionSelector;

    /// The functions of fixture `externals`, of which these are timed: seven wrappers, one with padding after it, and
    /// one that is no wrapper.
    fn timed(pid: i32, range: Range<usize>) -> ObservedFunctions {
        let names = (0..7).map(|it| format!("wrapper_{it}"));
        let others = ["padded_wrapper", "after_wrappers"].map(str::to_owned);
        let names: Vec<String> = names.chain(others).collect();
        let timed = names[range].iter().fold(Observation::new(), |timed, name| {
            timed.time_functions(FunctionSelector::Glob(name.parse().unwrap()))
        });
        ObservedFunctions::find(pid, &timed).unwrap()
    }

    fn leaning(functions: &ObservedFunctions) -> Vec<bool> {
        let functions = functions.functions.iter();
        functions.map(|it| it.timing().unwrap().leans).collect()
    }

    fn prefixed(functions: &ObservedFunctions) -> Vec<bool> {
        let functions = functions.functions.iter();
        functions.map(|it| it.best.is_prefixed()).collect()
    }

    #[test]
    fn functions_lean_on_the_next() {
        let [file, _] = fixture_forms("externals");
        let target = Talker::start(&file);
        let mut all = timed(target.pid(), 0..9);
        assert!(!all.overlapping().is_empty() && prefixed(&all) == [false; 9]);
        assert!(all.lean());
        assert_eq!(leaning(&all), [[true; 8].as_slice(), &[false]].concat());
        // What is after padding is spared.
        let expected = [[false].as_slice(), &[true; 7], &[false]].concat();
        assert_eq!(prefixed(&all), expected);
        assert_eq!(all.overlapping(), []);
        // Nothing is left to do.
        assert!(!all.lean());
        let places = all.functions.iter().flat_map(ObservedFunction::points);
        let (entries, exits): (Vec<_>, Vec<_>) = places.partition(|(part, _)| *part == 0);
        for ((_, exit), (_, next)) in exits.iter().zip(&entries[1..8]) {
            // The short jump ends where the next one begins.
            assert_eq!(exit.address.0 + 2, next.address.0);
            assert!(all.name_at(next.address).is_some());
        }
        // Without the next function, there is nothing to lean on.
        let mut some = timed(target.pid(), 0..3);
        assert!(some.lean());
        assert_eq!(leaning(&some), [true, true, false]);
        let mut last = timed(target.pid(), 7..9);
        assert!(last.lean() && last.overlapping().is_empty());
        last.refuse(&[(1, Refusal::ChangedCode)]);
        assert_eq!(leaning(&last), [true]);
    }

    #[test]
    fn refused_functions_are_not_leant_on() {
        let [file, _] = fixture_forms("externals");
        let target = Talker::start(&file);
        let mut all = timed(target.pid(), 0..9);
        all.lean();
        all.refuse(&[(4, Refusal::ChangedCode)]);
        let expected = [true, true, true, false, true, true, true, false];
        assert_eq!(leaning(&all), expected);
        let jumps = all.functions[3].patches().map(|it| it.site.jump());
        let jumps: Vec<Jump> = jumps.collect();
        assert!(
            matches!(jumps[..], [Jump::Prefixed, Jump::Punned { .. }]),
            "{jumps:?}"
        );
        assert!(!all.lean() && all.overlapping().is_empty());
    }

    #[test]
    fn functions_leaning_on_changed_ones_are_left_out() {
        let [file, _] = fixture_forms("externals");
        let target = Talker::start(&file);
        let process = Process::open(target.pid()).unwrap();
        let memory = ProcessMemory::open(&process, OFlag::O_RDWR).unwrap();
        let mut all = timed(target.pid(), 0..9);
        all.lean();
        assert_eq!(all.left_out(&memory).unwrap(), []);
        let third = all.functions[3].wanted.address;
        let at = third.plus(1);
        memory.write(at, &[0xcc]).unwrap();
        let left_out = all.left_out(&memory).unwrap();
        // The first ones lean on the next each.
        let expected = (0..4).map(|index| (index, Refusal::Breakpoint { at }));
        assert_eq!(left_out, expected.collect::<Vec<_>>());
    }
}
