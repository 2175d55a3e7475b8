//! [`ObservedFunctions`]: the functions that an observation counts, times or records, the candidates for the patches of
//! each, and those that are left out, with the reason.

mod arities;
pub(crate) mod fibers;
mod find;
mod freed_stacks;
mod leaning;
pub(crate) mod observable;
mod patches;
mod usdt_arguments;
mod wanted;
pub(crate) mod watching;

use std::collections::{BTreeSet, HashSet};
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::address::{FileAddr, LiveAddr, LoadBias};
use crate::error::Refusal;
use crate::functions::Functions;
use crate::memory::{ReadMemory, runs};
use crate::observe::functions::patches::{Candidate, OtherPatches, TimedPatches};
use crate::observe::functions::watching::Watching;
use crate::observe::layout::semaphores::ChangedWord;
use crate::observe::observation::CallOnce;
use crate::observe::point::{PATCH_LEN, PatchBytes, Point, PointKind};
use crate::observe::role::{FilterRole, FreedStackRole, IntegerRole, KeyRole, Role, StackKind};
use crate::patch_plan::displaced::ExitKind;
use crate::patch_plan::jump::PREFIX_LEN;
use crate::patch_plan::site::PatchSite;
use crate::process::code_files::MappedCode;
use crate::process::maps::{self, Mapping};
use crate::process::object::UnreadableObject;
use crate::select::function::FunctionSelector;
use crate::site::INT3;

/// The functions of a process that are observed.
#[derive(Clone, Debug, Default)]
pub(crate) struct ObservedFunctions {
    /// In the order of their addresses.
    pub(crate) functions: Vec<ObservedFunction>,
    /// Those that cannot be observed.
    pub(crate) refused: Vec<RefusedFunction>,
    /// The indices of those of `functions` that are among the refused ones all the same: they could not be patched.
    pub(crate) not_patched: BTreeSet<usize>,
    /// Those that are watched without their results or exits, although these were asked for.
    pub(crate) without_results: Vec<RefusedFunction>,
    /// The mapped files whose functions are not known.
    pub(crate) unreadable: Vec<UnreadableObject>,
    /// What selects them, other than addresses.
    pub(crate) selectors: Vec<FunctionSelector>,
    /// The mappings of the files that they were selected from.
    pub(crate) mapped: MappedCode,
    /// Whether they are observed from the program's first instruction on.
    pub(crate) are_from_start: bool,
    /// All functions of the process, if calls are recorded.
    pub(crate) all: Option<Arc<Functions>>,
    /// What is called once, before the first call of one of them.
    pub(crate) calls_once: Option<CallOnce>,
}

/// A function that is observed.
#[derive(Clone, Debug)]
pub(crate) struct ObservedFunction {
    pub(crate) wanted: WantedFunction,
    /// Whether it is known to be OCaml code: it has a name of OCaml's, in a process with OCaml's runtime.
    pub(crate) is_ocaml: bool,
    /// Whether it has a name of OCaml's, in whatever process.
    pub(crate) is_named_ocaml: bool,
    bias: LoadBias,
    /// The semaphore of the USDT probe that it is a site of, or [`CallOnce::word`].
    pub(crate) changed_word: Option<ChangedWord>,
    /// Whether it is in the executable, which stays mapped.
    is_in_executable: bool,
    best: Candidate,
    /// What is tried if `best` turns out not to be possible, the best one last.
    others: Vec<OtherPatches>,
    /// How its calls are timed, if they are.
    timing: Option<Timing>,
    /// How its calls are recorded, if they are. If they are neither timed nor recorded, they are
    /// counted.
    watching: Option<Watching>,
    /// Which of its calls are counted, recorded or timed; `None`: all.
    filter: Option<Arc<FilterRole>>,
    /// The integer of its histogram, if it has one; then its calls are not counted.
    integer: Option<Arc<IntegerRole>>,
    /// The keys by which its calls are counted, or their times distinguished. The number of its name is set later.
    keys: Option<KeyRole>,
    /// Whether its hits are its returns, because an expression asks for its result.
    pub(crate) evaluates_at_exits: bool,
    /// The patches of its returns, or of all its exits, if results or exits are recorded or asked for; without those
    /// that the patch of its entry displaces.
    ends: Vec<Candidate>,
    /// What is recorded at a USDT probe that is an end of pairs.
    paired: Option<Arc<Role>>,
    /// What is done if it frees the stacks of fibers.
    pub(crate) freed_stack: Option<FreedStackRole>,
}

/// How the calls of a function are timed.
#[derive(Clone, Debug)]
pub(crate) struct Timing {
    pub(crate) stack: StackKind,
    pub(crate) is_ocaml: bool,
    /// What is recorded of slow calls, if they are reported.
    pub(crate) reported: Option<Watching>,
    /// The patches of its exits that the patch of its entry does not displace.
    exits: Vec<Candidate>,
    /// Whether it leans on the function after it (functions/leaning.rs), so that both can be patched.
    leans: bool,
    /// If it can be patched either way, the patches of the other way. Their `overwrites_next` is always that of the way
    /// in which it leans.
    other: Option<Box<TimedPatches>>,
}

/// A function, or an instruction of one, that is to be observed.
#[derive(Clone, Debug)]
pub(crate) struct WantedFunction {
    pub(crate) name: String,
    pub(crate) object: Arc<Path>,
    /// The address of its first byte; the patch may come after an `endbr64`.
    pub(crate) address: LiveAddr,
    /// Whether it is a site of a USDT probe.
    pub(crate) is_usdt: bool,
    /// Whether it was not selected: it is patched for the records of other functions, and never reported.
    pub(crate) is_internal: bool,
    /// See [`FunctionPlace::named_by`].
    named_by: Option<usize>,
}

/// A function that is not observed, because it cannot be patched.
///
/// ```no_run
/// # let counts: probes_lib::Counts = unimplemented!();
/// for function in counts.refused() {
///     println!("{} {}", function.name, function.why);
/// }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RefusedFunction {
    /// Its name as in the source, or its address if it has none.
    pub name: String,
    /// The path of the file that it is in.
    pub object: PathBuf,
    /// Where it begins in the process.
    pub address: LiveAddr,
    /// Why.
    pub why: Refusal,
    /// Whether it is a site of a USDT probe.
    pub is_usdt: bool,
    /// See [`FunctionPlace::named_by`].
    named_by: Option<usize>,
}

impl ObservedFunctions {
    /// Returns the name of the observed function whose entry is patched at this address.
    pub(crate) fn name_at(&self, address: LiveAddr) -> Option<String> {
        // An `endbr64` is not displaced.
        const ENDBR_LEN: u64 = 4;
        let begins = |before: u64| self.begins_at(LiveAddr(address.0.wrapping_sub(before)));
        let found = [0, ENDBR_LEN, PREFIX_LEN].into_iter().find_map(begins);
        found.map(|index| self.functions[index].wanted.name.clone())
    }

    /// Returns the index of the function that begins at this address, if it is one of these.
    fn begins_at(&self, address: LiveAddr) -> Option<usize> {
        let found = self
            .functions
            .binary_search_by_key(&address, |it| it.wanted.address);
        found.ok()
    }

    /// Returns the indices of the functions that are timed.
    pub(crate) fn timed_indices(&self) -> impl Iterator<Item = usize> {
        let functions = self.functions.iter().enumerate();
        functions.filter_map(|(index, function)| function.timing.is_some().then_some(index))
    }

    /// Returns the indices of the functions that have a histogram.
    pub(crate) fn with_histogram(&self) -> impl Iterator<Item = usize> {
        let functions = self.functions.iter().enumerate();
        functions.filter_map(|(index, function)| function.integer.is_some().then_some(index))
    }

    /// Returns whether any function is observed that was selected.
    pub(crate) fn has_selected(&self) -> bool {
        self.functions.iter().any(|it| !it.wanted.is_internal)
    }

    /// Returns the refused functions of each name that has no function left to observe; all refused functions if no
    /// function at all is left.
    pub(crate) fn why_not(&self) -> Vec<&RefusedFunction> {
        let left: HashSet<usize> = self
            .functions
            .iter()
            .filter_map(|it| it.wanted.named_by)
            .collect();
        let is_lost = |one: &&RefusedFunction| {
            let is_lost_name = one
                .named_by
                .is_some_and(|selector| !left.contains(&selector));
            !self.has_selected() || is_lost_name
        };
        self.refused.iter().filter(is_lost).collect()
    }

    /// Refuses these functions, given by ascending index.
    pub(crate) fn refuse(&mut self, failed: &[(usize, Refusal)]) {
        for (index, _) in failed {
            self.functions[*index].others.clear();
        }
        self.try_next(failed);
    }

    /// Refuses functions with changed code, given by ascending index, as [`ObservedFunctions::changed`] returns them. If
    /// results or exits were to be recorded, and only the code there has a breakpoint, the function is watched without
    /// them.
    pub(crate) fn refuse_changed(&mut self, changed: &[(usize, Refusal)]) {
        for (index, why) in changed {
            let function = &mut self.functions[*index];
            let (bias, records_ends) = (function.bias, function.records_ends());
            function.others.retain(|other| match why {
                Refusal::Breakpoint { at } => {
                    records_ends && other.exits.is_none() && !other.uses_at_entry(*at, bias)
                }
                _ => false,
            });
        }
        self.try_next(changed);
    }

    /// Replaces the patches of each of these functions, given by ascending index, by the next best ones, because they
    /// are not possible here; refuses the functions that have no others.
    pub(crate) fn try_next(&mut self, failed: &[(usize, Refusal)]) {
        let mut failed = failed.iter().peekable();
        let mut index = 0..;
        let (refused, without_results) = (&mut self.refused, &mut self.without_results);
        self.functions.retain_mut(|function| {
            let index = index.next();
            let Some((_, why)) = failed.next_if(|(failed, _)| Some(*failed) == index) else {
                return true;
            };
            match function.others.pop() {
                Some(OtherPatches { entry, exits }) => {
                    function.best = entry;
                    if let Some(exits) = exits {
                        function.set_exits(exits);
                    } else if let Some(watching) = &mut function.watching {
                        let had_exits = watching.function.exits_on.take().is_some();
                        if std::mem::take(&mut watching.function.has_results) || had_exits {
                            function.ends.clear();
                            without_results.extend(function.wanted.refused(why.clone()));
                        }
                    }
                    true
                }
                None => {
                    refused.extend(function.wanted.refused(why.clone()));
                    false
                }
            }
        });
        self.lean_no_longer();
    }

    /// Returns the functions whose patches would overwrite bytes that others need, by ascending index: a punned jump
    /// ends with the first bytes of what follows it.
    pub(crate) fn overlapping(&self) -> Vec<(usize, Refusal)> {
        let functions = self.functions.iter().enumerate();
        let mut reserved: Vec<(u64, u64, usize)> = functions
            .flat_map(|(index, function)| {
                let bias = function.bias;
                let live = move |range: Range<FileAddr>| {
                    (bias.live(range.start).0, bias.live(range.end).0, index)
                };
                let patches = function.patches();
                patches.flat_map(move |patch| patch.site.reserved().map(live))
            })
            .collect();
        reserved.sort_unstable();
        let (mut end, mut owner) = (0, usize::MAX);
        let mut overlapping = Vec::new();
        for (start, until, index) in reserved {
            if start < end && index != owner {
                // The function with other candidates gives way, if only one has any; otherwise the
                // later one.
                let has_other = |index: usize| !self.functions[index].others.is_empty();
                let is_owner = has_other(owner) && !has_other(index);
                let loser = if is_owner { owner } else { index };
                overlapping.push((loser, Refusal::Overlap { offset: 0 }));
                if is_owner {
                    (end, owner) = (until, index);
                }
            } else if until > end {
                (end, owner) = (until, index);
            }
        }
        overlapping.sort_by_key(|(index, _)| *index);
        overlapping.dedup_by_key(|(index, _)| *index);
        overlapping
    }

    /// Returns the functions whose code is not, or no longer, mapped privately from a file.
    pub(crate) fn unmapped(&self, maps: &[Mapping]) -> Vec<(usize, Refusal)> {
        let why_not = |function: &ObservedFunction| {
            let mut points = function.points();
            points.find_map(|(_, point)| {
                let mapping = maps::find(maps, point.address, PATCH_LEN as u64);
                match mapping.filter(|it| it.executable && it.inode != 0) {
                    Some(mapping) if !mapping.shared => None,
                    Some(_) => Some(Refusal::SharedCode),
                    None => Some(Refusal::ChangedCode),
                }
            })
        };
        let functions = self.functions.iter().enumerate();
        let unmapped = functions.filter_map(|(index, function)| Some((index, why_not(function)?)));
        unmapped.collect()
    }

    /// Adds functions of the plan to the refused ones, because they could not be patched.
    pub(crate) fn add_refused(&mut self, failed: Vec<(usize, Refusal)>) {
        for (index, why) in failed {
            let wanted = &self.functions[index].wanted;
            self.refused.extend(wanted.refused(why));
            self.not_patched.insert(index);
        }
    }

    /// Returns addresses in the code of the executable at which no debugger sets a breakpoint, and the byte at each:
    /// one of each function that has such a byte where its entry is patched.
    pub(crate) fn bytes_to_touch(&self) -> impl Iterator<Item = (LiveAddr, u8)> {
        let functions = self.functions.iter().filter(|it| it.is_in_executable);
        functions.filter_map(|function| {
            let (site, bias) = function.site(0)?;
            let (at, byte) = site.harmless_byte()?;
            Some((bias.live(at), byte))
        })
    }

    /// Returns the addresses and lengths of the code that [`ObservedFunctions::changed`] compares.
    pub(crate) fn expected_code(&self) -> impl Iterator<Item = (LiveAddr, u64)> {
        let expected = self.functions.iter().flat_map(ObservedFunction::expected);
        expected.map(|(at, code)| (at, code.len() as u64))
    }

    /// Compares the code with that of the files; returns the functions where it differs, or cannot be read: an object
    /// may have been unloaded.
    ///
    /// # Errors
    ///
    /// If the process is gone.
    pub(crate) fn changed(&self, memory: &impl ReadMemory) -> io::Result<Vec<(usize, Refusal)>> {
        let functions = self.functions.iter().enumerate();
        let mut expected: Vec<(LiveAddr, &[u8], usize)> = functions
            .flat_map(|(index, function)| {
                function.expected().map(move |(at, code)| (at, code, index))
            })
            .collect();
        expected.sort_unstable_by_key(|(at, ..)| *at);
        let mut changed = Vec::new();
        let mut found = Vec::new();
        for run in runs::group(expected.iter().map(|(at, ..)| (at.0, 0)), 1) {
            let these = &expected[run.range()];
            let ends = these
                .iter()
                .map(|(at, code, _)| at.0 - run.start + code.len() as u64);
            found.resize(ends.max().unwrap_or(0) as usize, 0);
            match memory.read(LiveAddr(run.start), &mut found) {
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Err(error),
                Err(_) => {
                    let these = these
                        .iter()
                        .map(|(.., index)| (*index, Refusal::ChangedCode));
                    changed.extend(these);
                    continue;
                }
                Ok(()) => {}
            }
            for (at, code, index) in these {
                let found = &found[(at.0 - run.start) as usize..][..code.len()];
                if found != *code {
                    let mut both = found.iter().zip(*code);
                    let breakpoint = both.position(|(&found, &own)| found == INT3 && own != INT3);
                    let why = breakpoint.map_or(Refusal::ChangedCode, |offset| {
                        let at = at.plus(offset as u64);
                        Refusal::Breakpoint { at }
                    });
                    changed.push((*index, why));
                }
            }
        }
        changed.sort_by_key(|(index, _)| *index);
        changed.dedup_by_key(|(index, _)| *index);
        Ok(changed)
    }
}

impl WantedFunction {
    /// Returns it as one that is not observed; `None` if it was not selected.
    fn refused(&self, why: Refusal) -> Option<RefusedFunction> {
        (!self.is_internal).then(|| RefusedFunction {
            name: self.name.clone(),
            object: self.object.to_path_buf(),
            address: self.address,
            why,
            is_usdt: self.is_usdt,
            named_by: self.named_by,
        })
    }
}

impl ObservedFunction {
    /// The places where it is patched, each with its number: the entry, then the exits or returns that are patched.
    pub(crate) fn points(&self) -> impl Iterator<Item = (usize, Point)> {
        let patches = self.patches().enumerate();
        patches.map(|(part, patch)| {
            let kind = PointKind::Instruction {
                before: PatchBytes::of(&patch.code[..patch.len]),
                island: patch.island,
                is_exit: part > 0,
                is_usdt: self.wanted.is_usdt,
            };
            let address = self.bias.live(patch.site.jump_address());
            (part, Point { address, kind })
        })
    }

    /// Whether it is a site of a USDT probe whose `nop` is overwritten: a breakpoint that another tool sets there
    /// meanwhile would be in the middle of our jump.
    pub(crate) fn overwrites_nop(&self) -> bool {
        let nop = self.wanted.address;
        self.wanted.is_usdt
            && self.patches().any(|patch| {
                let at = self.bias.live(patch.site.address());
                (at..LiveAddr(at.0 + patch.len as u64)).contains(&nop)
            })
    }

    /// Sets the patches of its exits that go with the new patch of its entry.
    fn set_exits(&mut self, exits: Vec<Candidate>) {
        let Some(timing) = &mut self.timing else {
            self.ends = exits;
            return;
        };
        let has_leant = std::mem::take(&mut timing.leans);
        if has_leant || !exits.last().is_some_and(Candidate::is_punned) {
            timing.other = None;
        }
        timing.exits = exits;
    }

    fn patches(&self) -> impl Iterator<Item = &Candidate> {
        let exits = self.timing.iter().flat_map(|timing| &timing.exits);
        [&self.best].into_iter().chain(exits).chain(&self.ends)
    }

    /// How the place with a number is patched (see [`ObservedFunction::points`]), and the load bias of its object.
    pub(crate) fn site(&self, part: usize) -> Option<(&PatchSite, LoadBias)> {
        Some((&self.patches().nth(part)?.site, self.bias))
    }

    /// Returns how its calls are recorded, if they are.
    pub(crate) fn watching(&self) -> Option<&Watching> {
        self.watching.as_ref()
    }

    /// Whether results or exits of its calls are recorded.
    fn records_ends(&self) -> bool {
        let watched = self.watching.as_ref().map(|it| &it.function);
        watched.is_some_and(|it| it.has_results || it.exits_on.is_some())
    }

    /// Returns what is recorded of its slow calls, if they are reported.
    pub(crate) fn reported(&self) -> Option<&Watching> {
        self.timing.as_ref()?.reported.as_ref()
    }

    /// Returns which of its calls are counted, recorded or timed; `None`: all.
    pub(crate) fn filter(&self) -> Option<&Arc<FilterRole>> {
        self.filter.as_ref()
    }

    /// Returns by what its calls are counted, if they are.
    pub(crate) fn keys(&self) -> Option<&KeyRole> {
        self.keys.as_ref()
    }

    /// Returns the integer of its histogram, if it has one.
    pub(crate) fn integer(&self) -> Option<&Arc<IntegerRole>> {
        self.integer.as_ref()
    }

    /// Returns what is recorded there, if it is an end of pairs.
    pub(crate) fn paired(&self) -> Option<&Role> {
        self.paired.as_deref()
    }

    /// Returns how many of the exits that are patched are of this kind, and do not lead to its own entry.
    pub(crate) fn count_exits(&self, kind: ExitKind) -> usize {
        let exits = self.patches().flat_map(|patch| patch.site.exits());
        let exits = exits.filter(|exit| exit.kind == kind && !exit.begins_again);
        exits.count()
    }

    /// Returns how it is timed, if it is.
    pub(crate) fn timing(&self) -> Option<&Timing> {
        self.timing.as_ref()
    }

    /// The code that its patches overwrite, displace, or rely on.
    fn expected(&self) -> impl Iterator<Item = (LiveAddr, &[u8])> {
        self.patches().flat_map(|patch| patch.expected(self.bias))
    }
}
