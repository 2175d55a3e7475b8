//! Functions that lean on the next one: the patch of their only exit, a return of one byte, overwrites the first byte of the
//! next function, too, whose own jump is behind that byte ([`PatchPlanner::leaning`]). Both are patched together: they are
//! on one page, which is written at once. The other function does not need the first one: its first byte is a REX
//! prefix, which does not matter to a jump.
//!
//! [`PatchPlanner::leaning`]: crate::PatchPlanner::leaning

use std::io;

use crate::address::FileAddr;
use crate::error::Refusal;
use crate::memory::ReadMemory;
use crate::observe::functions::patches::Candidate;
use crate::observe::functions::{ObservedFunction, ObservedFunctions};

impl ObservedFunctions {
    /// Patches functions in another way whose exit would otherwise overlap the entry of the next function: they lean on
    /// it. Returns whether there are such functions.
    pub(crate) fn lean(&mut self) -> bool {
        let mut is_changed = false;
        for index in (0..self.functions.len()).rev() {
            let Some(next) = self.may_lean_on(index) else {
                continue;
            };
            if !self.functions[next].best.is_prefixed() {
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

    /// Returns the index of the function that one of these does not lean on yet, but may lean on.
    fn may_lean_on(&self, index: usize) -> Option<usize> {
        let function = &self.functions[index];
        let timing = function.timing.as_ref().filter(|it| !it.leans)?;
        let exit = timing.other.as_ref()?.exits.last()?;
        self.timed_behind(function, exit)
    }

    /// Returns the index of the function that one of these leans on.
    fn leans_on(&self, index: usize) -> Option<usize> {
        let function = &self.functions[index];
        let timing = function.timing.as_ref().filter(|it| it.leans)?;
        let next = self.timed_behind(function, timing.exits.last()?)?;
        (self.functions[next].best.is_prefixed()).then_some(next)
    }

    /// Returns the index of the function right behind an exit, if it is timed and the patch of its entry begins there.
    fn timed_behind(&self, function: &ObservedFunction, exit: &Candidate) -> Option<usize> {
        let end = exit.site.address().0 + exit.site.displaced().len() as u64;
        let end = function.bias.live(FileAddr(end));
        let found = self.begins_at(end)?;
        let next = &self.functions[found];
        let begins = next.bias.live(next.best.site.address()) == end;
        (begins && next.timing.is_some()).then_some(found)
    }

    /// Patches the functions as before that lean on one which is no longer among these.
    pub(super) fn lean_no_longer(&mut self) {
        // From the last on: whether another leans on a function may depend on how that is patched.
        for index in (0..self.functions.len()).rev() {
            if self.functions[index].leans() && self.leans_on(index).is_none() {
                self.functions[index].swap_patches();
            }
        }
    }

    /// Adds the functions that lean on some of these, which are given by ascending index and are not patched: they
    /// cannot be patched either.
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

    /// The same as [`ObservedFunctions::changed`], and the functions that lean on them.
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
    fn leans(&self) -> bool {
        self.timing.as_ref().is_some_and(|timing| timing.leans)
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
        if is_prefixed && let Some(prefixed) = self.best.prefixed() {
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

    /// The functions of fixture `wrappers`, seven wrappers and one more, of which these are timed.
    fn timed(pid: i32, range: Range<usize>) -> ObservedFunctions {
        let names = (0..7).map(|it| format!("wrapper_{it}"));
        let names: Vec<String> = names.chain(["after_wrappers".to_owned()]).collect();
        let timed = names[range].iter().fold(Observation::new(), |timed, name| {
            timed.time_functions(FunctionSelector::Glob(name.parse().unwrap()))
        });
        ObservedFunctions::find(pid, &timed).unwrap()
    }

    fn leaning(functions: &ObservedFunctions) -> Vec<bool> {
        let functions = functions.functions.iter();
        functions.map(ObservedFunction::leans).collect()
    }

    fn prefixed(functions: &ObservedFunctions) -> Vec<bool> {
        let functions = functions.functions.iter();
        functions.map(|it| it.best.is_prefixed()).collect()
    }

    #[test]
    fn functions_lean_on_the_next() {
        let [file, _] = fixture_forms("wrappers");
        let target = Talker::start(&file);
        let mut all = timed(target.pid(), 0..8);
        assert!(!all.overlapping().is_empty() && prefixed(&all) == [false; 8]);
        assert!(all.lean());
        assert_eq!(leaning(&all), [[true; 7].as_slice(), &[false]].concat());
        assert_eq!(prefixed(&all), [[false].as_slice(), &[true; 7]].concat());
        assert_eq!(all.overlapping(), []);
        // Nothing is left to do.
        assert!(!all.lean());
        let places = all.functions.iter().flat_map(ObservedFunction::points);
        let (entries, exits): (Vec<_>, Vec<_>) = places.partition(|(part, _)| *part == 0);
        for ((_, exit), (_, next)) in exits.iter().zip(&entries[1..]) {
            // The short jump ends where the next one begins.
            assert_eq!(exit.address.0 + 2, next.address.0);
            assert!(all.name_at(next.address).is_some());
        }
        // Without the next function, there is nothing to lean on.
        let mut some = timed(target.pid(), 0..3);
        assert!(some.lean());
        assert_eq!(leaning(&some), [true, true, false]);
    }

    #[test]
    fn refused_functions_are_not_leant_on() {
        let [file, _] = fixture_forms("wrappers");
        let target = Talker::start(&file);
        let mut all = timed(target.pid(), 0..8);
        all.lean();
        all.refuse(&[(4, Refusal::ChangedCode)]);
        let expected = [true, true, true, false, true, true, false];
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
    fn changed_functions_leave_out_those_that_lean_on_them() {
        let [file, _] = fixture_forms("wrappers");
        let target = Talker::start(&file);
        let process = Process::open(target.pid()).unwrap();
        let memory = ProcessMemory::open(&process, OFlag::O_RDWR).unwrap();
        let mut all = timed(target.pid(), 0..8);
        all.lean();
        assert_eq!(all.left_out(&memory).unwrap(), []);
        let third = all.functions[3].wanted.address;
        memory.write(third.plus(1), &[0xcc]).unwrap();
        let left_out = all.left_out(&memory).unwrap();
        // The first ones lean on the next each.
        let expected = (0..4).map(|index| (index, Refusal::Breakpoint));
        assert_eq!(left_out, expected.collect::<Vec<_>>());
    }
}
