//! [`ObservedFunctions`]: the functions that an observation counts, times or records, the candidates for the patches of
//! each, and those that are left out, with the reason.

use std::cell::LazyCell;
use std::collections::{HashMap, HashSet};
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use iced_x86::{Decoder, DecoderOptions, InstructionInfoFactory, OpAccess, Register};

use crate::address::{CodeRange, FileAddr, LiveAddr, LoadBias};
use crate::elf::functions::{FunctionKind, FunctionName};
use crate::elf::mangling::Language;
use crate::error::Refusal;
use crate::error::{Error, FunctionError, ObserveError, Result};
use crate::expression::{BadExpression, Expression, Keys, Scope};
use crate::functions::{FunctionObject, FunctionPlace, Functions};
use crate::memory::{ReadMemory, runs};
use crate::observe::fibers::{self, ProcessStacks};
use crate::observe::frame_id::has_runtime;
use crate::observe::layout::calls::MAX_TIMED;
use crate::observe::layout::semaphores::{ChangedWord, WordChange};
use crate::observe::observation::{CallOnce, Observation};
use crate::observe::point::{Island, PATCH_LEN, PatchBytes, Point, PointKind};
use crate::observe::role::{
    ArgumentSource, FilterRole, IntegerRole, KeyRole, PairEnd, PairFilter, Role, StackKind,
};
use crate::observe::watching::{WatchedWords, Watching};
#[cfg(test)]
use crate::patch_plan::code::Code;
use crate::patch_plan::jump::{Jump, SHORT_LEN};
use crate::patch_plan::site::PatchSite;
use crate::patch_plan::{EntryPlanner, PatchPlanner};
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
    /// Those that are watched without their results, although these are to be recorded.
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
    others: Vec<Candidate>,
    /// If its calls are timed.
    timing: Option<Timing>,
    /// If its calls are recorded. If they are neither timed nor recorded, they are counted.
    watching: Option<Watching>,
    /// Which of its calls are counted, recorded or timed; `None`: all.
    filter: Option<Arc<FilterRole>>,
    /// What its histogram is of; then its calls are not counted.
    integer: Option<Arc<IntegerRole>>,
    /// The keys by which its calls are counted, or their times are distinguished; not yet with the number of its name.
    keys: Option<KeyRole>,
    /// Whether its hits are its returns, whose results are asked for.
    pub(crate) is_asked_at_exits: bool,
    /// If its results or exits are recorded or asked for, the patches of its returns, or of all exits, that the patch
    /// of its entry does not displace.
    ends: Vec<Candidate>,
    /// Of a USDT probe that is an end of pairs: what is recorded there.
    paired: Option<Arc<Role>>,
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
}

/// A function, or an instruction of one, that is to be observed.
#[derive(Clone, Debug)]
pub(crate) struct WantedFunction {
    pub(crate) name: String,
    pub(crate) object: Arc<Path>,
    /// That of its first byte. What is patched may be behind an `endbr64`.
    pub(crate) address: LiveAddr,
    /// See [`FunctionPlace::named_by`].
    named_by: Option<usize>,
}

/// A way to patch a place in a function.
#[derive(Clone, Debug)]
struct Candidate {
    site: PatchSite,
    /// How many bytes it overwrites at its address.
    len: usize,
    /// The bytes there; of a punned jump also those that are its last bytes and stay as they are.
    code: PatchBytes,
    island: Option<Island>,
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
    /// See [`FunctionPlace::named_by`].
    named_by: Option<usize>,
}

impl ObservedFunctions {
    /// Finds the functions that are selected, and plans their patches. Reads files only.
    ///
    /// # Errors
    ///
    /// If a selector matches none, more are to be timed or watched than is possible, an expression does not suit a
    /// function, or a file cannot be read.
    pub(crate) fn find(pid: i32, observation: &Observation) -> Result<ObservedFunctions> {
        if !observation.has_functions() {
            return Ok(ObservedFunctions::default());
        }
        let all = Functions::to_select_of(pid)?;
        let timed = limited(&all, &observation.timed_functions)?;
        let watched = limited(&all, &observation.watched_functions)?;
        let counted = all.places(&observation.counted_functions)?;
        let (usdt_pairs, pair_ends): (Vec<FunctionSelector>, Vec<PairEnd>) =
            observation.usdt_ends().into_iter().unzip();
        let (paired, ends) = places_of_pairs(&all, usdt_pairs.iter().zip(pair_ends))?;
        let [is_timed, is_watched]: [HashSet<_>; 2] =
            [&timed, &watched].map(|places| places.iter().map(key).collect());
        let asks = observation.filter.is_some()
            || observation.histogram.is_some()
            || observation.keys.is_some();
        let (start_filter, _) = observation.asked_of_times()?;
        let asks_of_calls = start_filter.is_some() || observation.time_keys.is_some();
        let reports = observation.slow_from.is_some();
        let asked = [(asks, &counted), (asks_of_calls || reports, &timed)];
        let asked = asked.into_iter().filter(|(asks, _)| *asks);
        let asked: Vec<FunctionPlace<'_>> = asked.flat_map(|(_, places)| places.clone()).collect();
        let words = WatchedWords::of(pid, observation, &all, &watched, &asked);
        let questions = Questions {
            filter: observation.filter.as_ref(),
            histogram: observation.histogram.as_ref(),
            keys: observation.keys.as_ref(),
            at_exits: observation.asks_for_results(),
            words: &words,
        };
        let choice = Questions {
            histogram: None,
            ..questions
        };
        let timed_choice = Questions {
            filter: start_filter.as_ref(),
            histogram: None,
            keys: observation.time_keys.as_ref(),
            at_exits: false,
            ..questions
        };
        let calls_once = observation.calls_once;
        let wanted = |place: &FunctionPlace<'_>| {
            let key = key(place);
            if calls_once.is_some_and(|once| place.is_at(once.before)) {
                // Whatever else selects it.
                Wanted::Counted(None)
            } else if calls_once.is_some_and(|once| place.is_in_function_at(once.callee)) {
                Wanted::LeftAlone
            } else if let Some(ends) = ends.get(&key) {
                Wanted::Paired(&words, ends, observation)
            } else if is_timed.contains(&key) {
                Wanted::Timed(
                    asks_of_calls.then_some(&timed_choice),
                    reports.then_some(&words),
                )
            } else if is_watched.contains(&key) {
                Wanted::Watched(&words, observation.filter.is_some().then_some(&choice))
            } else {
                Wanted::Counted(asks.then_some(&questions))
            }
        };
        let selectors = [
            &usdt_pairs,
            &observation.timed_functions,
            &observation.watched_functions,
            &observation.counted_functions,
        ];
        let places = [paired, timed, watched, counted].into_iter();
        let places = merged(&all, places.zip(selectors));
        let stacks = ProcessStacks::of(all.objects().iter().map(FunctionObject::elf));
        let mut observed = ObservedFunctions {
            unreadable: [all.unreadable(), &all.unreadable_notes()].concat(),
            selectors: selectors
                .into_iter()
                .flatten()
                .filter(|it| !matches!(it, FunctionSelector::Address(_)))
                .cloned()
                .collect(),
            mapped: all.mapped().clone(),
            ..ObservedFunctions::default()
        };
        let is_same = |one: &FunctionPlace<'_>, other: &FunctionPlace<'_>| {
            std::ptr::eq(one.function.object, other.function.object)
        };
        for places in places.chunk_by(is_same) {
            observed.add(places[0].function.object, places, stacks, wanted)?;
        }
        let has_runtime = LazyCell::new(|| all.objects().iter().any(|it| has_runtime(it.elf())));
        for function in &mut observed.functions {
            function.is_ocaml = function.is_ocaml && *has_runtime;
        }
        observed
            .functions
            .sort_unstable_by_key(|function| function.wanted.address);
        if let Some(once) = calls_once {
            observed.call_once(once);
        }
        let records_calls = !observation.watched_functions.is_empty();
        observed.all = records_calls.then(|| Arc::new(all));
        Ok(observed)
    }

    fn call_once(&mut self, once: CallOnce) {
        self.calls_once = Some(once);
        let all = self.functions.iter_mut();
        for function in all.filter(|it| it.wanted.address == once.before) {
            function.changed_word = Some(once.word);
        }
    }

    /// Adds places in functions of an object.
    fn add<'w>(
        &mut self,
        object: &FunctionObject,
        places: &[FunctionPlace<'_>],
        stacks: ProcessStacks,
        wanted: impl Fn(&FunctionPlace<'_>) -> Wanted<'w>,
    ) -> Result<()> {
        let Some(bias) = object.load_bias() else {
            return Ok(());
        };
        let has_ocaml = LazyCell::new(|| {
            let mut functions = object.table().functions();
            let is_ocaml = |name: FunctionName<'_>| name.language == Some(Language::Ocaml);
            functions.any(|it| it.first_call().is_some() || it.names().any(is_ocaml))
        });
        let known = |place| KnownPlace::of(place, bias, wanted(place), || *has_ocaml);
        let known: Vec<KnownPlace<'_>> = places.iter().map(known).collect();
        let exit_planner = known.iter().any(KnownPlace::needs_exits);
        let exit_planner = exit_planner.then(|| object.patch_planner()).transpose()?;
        let planner = match &exit_planner {
            Some(planner) => EntryPlanner::of(planner),
            None => {
                let ranges = places.iter().map(|it| it.function.function.range());
                object.entry_planner(&ranges.collect::<Vec<_>>())?
            }
        };
        let path: Arc<Path> = object.table().path().into();
        for place in known {
            let patching = Patching {
                planner: &planner,
                exit_planner: exit_planner.as_ref(),
                bias,
                stacks,
                keeps_faults: place.may_be_ocaml && stacks == ProcessStacks::OfThreads,
            };
            self.add_place(place, &path, &patching)?;
        }
        Ok(())
    }

    fn add_place(
        &mut self,
        known: KnownPlace<'_>,
        path: &Arc<Path>,
        patching: &Patching<'_>,
    ) -> Result<()> {
        let asked = known.asked()?;
        let paired = known.paired()?;
        let planned = patching.of_place(&known, asked.as_ref(), paired.as_ref());
        let place = known.place;
        let is_ocaml = known.is_ocaml();
        let is_asked_at_exits = known.is_asked_at_exits();
        let wanted = WantedFunction {
            name: known.shown,
            object: path.clone(),
            address: known.address,
            named_by: place.named_by,
        };
        let planned = match planned {
            Ok(planned) => planned,
            Err(why) => {
                self.refused.push(wanted.refused(why));
                return Ok(());
            }
        };
        let without = planned.without_results.map(|why| wanted.refused(why));
        self.without_results.extend(without);
        let (filter, integer, keys) = asked.unwrap_or_default();
        self.functions.push(ObservedFunction {
            wanted,
            is_ocaml,
            is_named_ocaml: is_ocaml,
            bias: patching.bias,
            changed_word: place.selected_by.semaphore().map(|at| ChangedWord {
                at: patching.bias.live(at),
                change: WordChange::Count,
            }),
            is_in_executable: place.function.object.is_executable(),
            best: planned.best,
            others: planned.others,
            timing: planned.timing,
            watching: planned.watching,
            filter,
            integer,
            keys,
            is_asked_at_exits,
            ends: planned.ends,
            paired: paired.map(Arc::new),
        });
        Ok(())
    }

    /// Returns the name of the function the patch of whose entry is at this address, if it is one of these.
    pub(crate) fn name_at(&self, address: LiveAddr) -> Option<String> {
        // An `endbr64` is not displaced.
        const ENDBR_LEN: u64 = 4;
        let functions = &self.functions;
        let begins = |at: u64| functions.binary_search_by_key(&at, |it| it.wanted.address.0);
        let found = begins(address.0).or_else(|_| begins(address.0.wrapping_sub(ENDBR_LEN)));
        found.ok().map(|index| functions[index].wanted.name.clone())
    }

    /// Returns the indices of the functions that are timed.
    pub(crate) fn timed(&self) -> impl Iterator<Item = usize> {
        let functions = self.functions.iter().enumerate();
        functions.filter_map(|(index, function)| function.timing.is_some().then_some(index))
    }

    /// Returns the indices of the functions that have a histogram.
    pub(crate) fn with_histogram(&self) -> impl Iterator<Item = usize> {
        let functions = self.functions.iter().enumerate();
        functions.filter_map(|(index, function)| function.integer.is_some().then_some(index))
    }

    /// Returns the refused functions, with the reasons, of each name of which nothing can be observed; all of them if
    /// nothing at all can.
    pub(crate) fn why_not(&self) -> Vec<(String, Refusal)> {
        let left: HashSet<usize> = self
            .functions
            .iter()
            .filter_map(|it| it.wanted.named_by)
            .collect();
        let is_lost = |one: &&RefusedFunction| {
            let is_lost_name = one
                .named_by
                .is_some_and(|selector| !left.contains(&selector));
            self.functions.is_empty() || is_lost_name
        };
        let lost = self.refused.iter().filter(is_lost);
        lost.map(|one| (one.name.clone(), one.why.clone()))
            .collect()
    }

    /// Refuses these functions, given by ascending index.
    pub(crate) fn refuse(&mut self, failed: &[(usize, Refusal)]) {
        for (index, _) in failed {
            self.functions[*index].others.clear();
        }
        self.try_next(failed);
    }

    /// Takes off the best candidate of each of these functions, given by ascending index, because it is not possible
    /// here; refuses those that have no other.
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
                Some(next) => {
                    function.best = next;
                    if let Some(watching) = &mut function.watching {
                        let had_exits = watching.function.exits_on.take().is_some();
                        if std::mem::take(&mut watching.function.has_results) || had_exits {
                            function.ends.clear();
                            without_results.push(function.wanted.refused(why.clone()));
                        }
                    }
                    true
                }
                None => {
                    refused.push(function.wanted.refused(why.clone()));
                    false
                }
            }
        });
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
                // The one that has other candidates, if only one has; else the later one.
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

    /// Returns the functions that are not, or no longer, in code that belongs to the process alone and is mapped from a
    /// file.
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

    /// Notes that these functions, which have a place in the observation, are not patched after all.
    pub(crate) fn add_refused(&mut self, failed: Vec<(usize, Refusal)>) {
        for (index, why) in failed {
            let wanted = &self.functions[index].wanted;
            self.refused.push(wanted.refused(why));
        }
    }

    /// Returns addresses in the code of the executable at which no debugger sets a breakpoint, and the byte at each:
    /// one of each function that has such a byte where its entry is patched.
    pub(crate) fn harmless_bytes(&self) -> impl Iterator<Item = (LiveAddr, u8)> {
        let functions = self.functions.iter().filter(|it| it.is_in_executable);
        functions.filter_map(|function| {
            let (site, bias) = function.site(0)?;
            let (at, byte) = site.harmless_byte()?;
            Some((bias.live(at), byte))
        })
    }

    /// Returns the code that is compared: addresses and lengths.
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
                    let is_breakpoint = both.any(|(&found, &own)| found == INT3 && own != INT3);
                    let why = if is_breakpoint {
                        Refusal::Breakpoint
                    } else {
                        Refusal::ChangedCode
                    };
                    changed.push((*index, why));
                }
            }
        }
        changed.sort_by_key(|(index, _)| *index);
        changed.dedup_by_key(|(index, _)| *index);
        Ok(changed)
    }
}

/// Returns what a place is called that is at `address`, in a function of this name.
fn shown_name(name: Option<String>, address: LiveAddr, place: &FunctionPlace<'_>) -> String {
    let mut name = match (name, place.selected_by.name(), place.offset) {
        (None, None, _) => address.to_string(),
        (Some(name), None, 0) => name,
        (Some(name), None, offset) => format!("{name}+{offset:#x}"),
        (None, Some(line), _) => line.to_string(),
        (Some(name), Some(line), _) => format!("{line} in {name}"),
    };
    if place.function.function.kind() == FunctionKind::Resolver {
        // Its hits are not those of the function that it chooses.
        name += " (resolver)";
    }
    name
}

impl WantedFunction {
    fn refused(&self, why: Refusal) -> RefusedFunction {
        RefusedFunction {
            name: self.name.clone(),
            object: self.object.to_path_buf(),
            address: self.address,
            why,
            named_by: self.named_by,
        }
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
            };
            let address = self.bias.live(patch.site.address());
            (part, Point { address, kind })
        })
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

    /// Returns which of its calls are counted, recorded or timed; `None`: all.
    pub(crate) fn filter(&self) -> Option<&Arc<FilterRole>> {
        self.filter.as_ref()
    }

    /// Returns by what its calls are counted, if they are.
    pub(crate) fn keys(&self) -> Option<&KeyRole> {
        self.keys.as_ref()
    }

    /// Returns what its histogram is of, if it has one.
    pub(crate) fn integer(&self) -> Option<&Arc<IntegerRole>> {
        self.integer.as_ref()
    }

    /// Returns what is recorded there, if it is an end of pairs.
    pub(crate) fn paired(&self) -> Option<&Role> {
        self.paired.as_deref()
    }

    /// Returns how it is timed, if it is.
    pub(crate) fn timing(&self) -> Option<&Timing> {
        self.timing.as_ref()
    }

    /// The code that its patches overwrite, displace, or rely on.
    fn expected(&self) -> impl Iterator<Item = (LiveAddr, &[u8])> {
        self.patches().flat_map(|patch| {
            let island = patch.island.as_ref();
            let island = island.map(|island| (island.at, &island.before[..]));
            let address = self.bias.live(patch.site.address());
            // Padding behind the displaced instructions may be overwritten, too.
            [
                (address, patch.site.displaced()),
                (address, &patch.code[..]),
            ]
            .into_iter()
            .chain(island)
        })
    }
}

/// Tells a place from others of the process.
type PlaceKey = (*const FunctionObject, Option<LiveAddr>, u64);

type EndsByPlace = HashMap<PlaceKey, Vec<PairEnd>>;

fn key(place: &FunctionPlace<'_>) -> PlaceKey {
    let object: *const FunctionObject = place.function.object;
    (object, place.function.address(), place.offset)
}

/// Returns the places that these select; fails if they are more than can be timed, or watched.
fn limited<'f>(
    all: &'f Functions,
    selectors: &[FunctionSelector],
) -> Result<Vec<FunctionPlace<'f>>> {
    let places = all.places(selectors)?;
    let given = places.len();
    if given > MAX_TIMED {
        let kind = FunctionError::TooManyTimed {
            given,
            most: MAX_TIMED,
        };
        return Err(Error::of_file(all.program(), kind));
    }
    Ok(places)
}

/// Returns the places that are ends of pairs, and which ends each of them is.
fn places_of_pairs<'f, 's>(
    all: &'f Functions,
    ends: impl Iterator<Item = (&'s FunctionSelector, PairEnd)>,
) -> Result<(Vec<FunctionPlace<'f>>, EndsByPlace)> {
    let mut places = Vec::new();
    let mut by_place = EndsByPlace::new();
    for (index, (selector, end)) in ends.enumerate() {
        for mut place in all.places(std::slice::from_ref(selector))? {
            by_place.entry(key(&place)).or_default().push(end);
            place.named_by = Some(index);
            places.push(place);
        }
    }
    Ok((all.merged(places), by_place))
}

/// Returns the places of all lists, each of which comes with its selectors: the index of the one that names a place is
/// then that among the selectors of all lists.
fn merged<'f, 's>(
    all: &'f Functions,
    lists: impl Iterator<Item = (Vec<FunctionPlace<'f>>, &'s Vec<FunctionSelector>)>,
) -> Vec<FunctionPlace<'f>> {
    let mut selectors = 0;
    let renamed = lists.flat_map(|(mut places, list)| {
        for place in &mut places {
            place.named_by = place.named_by.map(|index| selectors + index);
        }
        selectors += list.len();
        places
    });
    let mut places = all.merged(renamed.collect());
    let is_kernels = |place: &FunctionPlace<'_>| place.function.object.is_kernels();
    if !places.iter().all(is_kernels) {
        // A pattern that matches others as well is not meant for code that never can be patched.
        places.retain(|place| !is_kernels(place) || place.named_by.is_some());
    }
    places
}

/// What is wanted of a function.
#[derive(Clone, Copy)]
enum Wanted<'w> {
    /// With questions, only some calls, by keys, or a histogram of them.
    Counted(Option<&'w Questions<'w>>),
    /// With questions, only some calls; with words, slow calls are reported.
    Timed(Option<&'w Questions<'w>>, Option<&'w WatchedWords>),
    /// With questions, only some calls.
    Watched(&'w WatchedWords, Option<&'w Questions<'w>>),
    /// Nothing: it is called, and one of its instructions is executed, to switch events on.
    LeftAlone,
    /// These ends of pairs.
    Paired(&'w WatchedWords, &'w [PairEnd], &'w Observation),
}

/// Returns what is recorded at a site of a USDT probe that is these ends of pairs. What expressions can ask of the site
/// is in `scope`, and where it has its arguments in `arguments`.
fn role_of_ends(
    observation: &Observation,
    ends: &[PairEnd],
    (scope, arguments): (Scope, Vec<ArgumentSource>),
) -> Result<Role> {
    let mut ends = ends.to_vec();
    // A site that both stops and starts a pair stops it first.
    ends.sort_by_key(|end| matches!(end, PairEnd::Start(_)));
    ends.dedup();
    let is_start = ends.iter().any(|end| matches!(end, PairEnd::Start(_)));
    let is_stop = ends.iter().any(|end| matches!(end, PairEnd::Stop(_)));
    let of_keys = |parts: std::result::Result<_, BadExpression>| -> Result<KeyRole> {
        Ok(KeyRole {
            parts: parts.map_err(ObserveError::Expression)?,
            arguments: arguments.clone(),
            name: 0,
        })
    };
    let pair_key = observation.pair_key.as_ref();
    let pair_key = pair_key.map(|keys| of_keys(keys.parts_of_pair(&scope)));
    let time_keys = observation.time_keys.as_ref().filter(|_| is_stop);
    let time_keys = time_keys.map(|keys| of_keys(keys.parts_at_stop(&scope)));
    let (start_filter, _) = observation.asked_of_times()?;
    let pair_filter = match start_filter {
        None => PairFilter::All,
        Some(_) if !is_start => PairFilter::Stops,
        Some(expression) => PairFilter::Starts(Arc::new(FilterRole {
            filter: expression
                .filter(&scope)
                .map_err(ObserveError::Expression)?,
            arguments: arguments.clone(),
        })),
    };
    Ok(Role {
        ends,
        pair_key: pair_key.transpose()?.map(Arc::new),
        time_keys: time_keys
            .transpose()?
            .map(|keys| Arc::new(keys.with_name())),
        pair_filter,
        ..Role::default()
    })
}

/// Returns whether something is asked at an end of pairs.
fn asks_at_end(role: &Role) -> bool {
    let has_keys = role.pair_key.is_some() || role.time_keys.is_some();
    has_keys || matches!(role.pair_filter, PairFilter::Starts(_))
}

impl<'w> Wanted<'w> {
    fn questions(self) -> Option<&'w Questions<'w>> {
        match self {
            Wanted::Counted(questions)
            | Wanted::Timed(questions, _)
            | Wanted::Watched(_, questions) => questions,
            Wanted::Paired(..) | Wanted::LeftAlone => None,
        }
    }
}

/// What is asked of calls.
#[derive(Clone, Copy)]
struct Questions<'w> {
    /// Which of them.
    filter: Option<&'w Expression>,
    /// What their histogram is of.
    histogram: Option<&'w Expression>,
    /// By what they are counted.
    keys: Option<&'w Keys>,
    /// Whether they are asked where calls return.
    at_exits: bool,
    words: &'w WatchedWords,
}

impl Questions<'_> {
    /// Returns what is asked of the calls of a function with this scope and these arguments.
    fn of_calls(
        &self,
        scope: &Scope,
        arguments: &[ArgumentSource],
    ) -> std::result::Result<AskedOfCalls, BadExpression> {
        let filter = self.filter.map(|expression| {
            Ok(Arc::new(FilterRole {
                filter: expression.filter(scope)?,
                arguments: arguments.to_vec(),
            }))
        });
        let integer = self.histogram.map(|expression| {
            let integer = if self.keys.is_some() {
                expression.integer_beside_keys(scope)
            } else {
                expression.integer(scope)
            };
            Ok(Arc::new(IntegerRole {
                integer: integer?,
                arguments: arguments.to_vec(),
            }))
        });
        let keys = self.keys.map(|keys| {
            Ok(KeyRole {
                parts: keys.parts(scope)?,
                arguments: arguments.to_vec(),
                name: 0,
            })
        });
        Ok((filter.transpose()?, integer.transpose()?, keys.transpose()?))
    }
}

type AskedOfCalls = (
    Option<Arc<FilterRole>>,
    Option<Arc<IntegerRole>>,
    Option<KeyRole>,
);

/// A place in a function, with what is wanted there and known of the function.
struct KnownPlace<'w> {
    place: &'w FunctionPlace<'w>,
    wanted: Wanted<'w>,
    address: LiveAddr,
    /// The name of the function; empty if it has none.
    function_name: String,
    /// What the place is called.
    shown: String,
    /// Whether the function has a name of OCaml's; `None` if it has no name.
    is_named_ocaml: Option<bool>,
    /// One without a name may be of C or of OCaml.
    may_be_ocaml: bool,
}

impl<'w> KnownPlace<'w> {
    fn of(
        place: &'w FunctionPlace<'w>,
        bias: LoadBias,
        wanted: Wanted<'w>,
        has_ocaml: impl Fn() -> bool,
    ) -> KnownPlace<'w> {
        let address = bias.live(place.function.function.range().start);
        let address = address.plus(place.offset);
        let name = place.function.name();
        let is_named_ocaml = name
            .as_ref()
            .map(|name| name.language == Some(Language::Ocaml) || fibers::is_generated(&name.text));
        let text = name.map(|it| it.text);
        KnownPlace {
            place,
            wanted,
            address,
            function_name: text.clone().unwrap_or_default(),
            shown: shown_name(text, address, place),
            is_named_ocaml,
            may_be_ocaml: is_named_ocaml.unwrap_or_else(has_ocaml),
        }
    }

    fn is_ocaml(&self) -> bool {
        self.is_named_ocaml == Some(true)
    }

    fn is_function(&self) -> bool {
        self.place.offset == 0 && self.place.selected_by.name().is_none()
    }

    fn is_asked_at_exits(&self) -> bool {
        let questions = self.wanted.questions();
        self.is_function() && questions.is_some_and(|it| it.at_exits)
    }

    /// What is recorded of its calls, if they are recorded.
    fn watched(&self) -> Option<&'w WatchedWords> {
        match self.wanted {
            Wanted::Watched(words, _) => Some(words),
            _ => None,
        }
    }

    /// The same, if something is recorded where they end.
    fn watched_to_end(&self) -> Option<&'w WatchedWords> {
        let words = self.watched().filter(|_| self.is_function());
        words.filter(|it| it.has_results() || it.has_exits())
    }

    /// Returns whether more than its entry is patched.
    fn needs_exits(&self) -> bool {
        let is_timed = matches!(self.wanted, Wanted::Timed(..));
        is_timed || self.is_asked_at_exits() || self.watched_to_end().is_some()
    }

    fn stack(&self, stacks: ProcessStacks) -> std::result::Result<StackKind, Refusal> {
        match self.is_named_ocaml {
            None if self.may_be_ocaml => stacks.of_any(),
            is_ocaml => stacks.of_function(&self.function_name, is_ocaml == Some(true)),
        }
    }

    fn scope(&self, words: &WatchedWords) -> (Scope, Vec<ArgumentSource>) {
        let (is_ocaml, may_be_ocaml) = (self.is_ocaml(), self.may_be_ocaml);
        words.scope(
            &self.shown,
            self.place,
            self.address,
            is_ocaml,
            may_be_ocaml,
        )
    }

    /// Returns how its calls are recorded, without their results.
    fn watching(&self, words: &WatchedWords) -> Watching {
        let (is_ocaml, may_be_ocaml) = (self.is_ocaml(), self.may_be_ocaml);
        words.of_place(self.place, self.address, is_ocaml, may_be_ocaml)
    }

    /// Returns what is asked of its calls; `None` if that is an argument that it does not have.
    fn asked(&self) -> Result<Option<AskedOfCalls>> {
        let Some(questions) = self.wanted.questions() else {
            return Ok(Some(AskedOfCalls::default()));
        };
        let (scope, arguments) = if self.is_asked_at_exits() {
            questions.words.scope_of_exits(&self.shown, self.is_ocaml())
        } else {
            self.scope(questions.words)
        };
        match questions.of_calls(&scope, &arguments) {
            Ok(asked) => Ok(Some(asked)),
            // A pattern that matches others as well is not meant for these.
            Err(bad) if self.place.named_by.is_none() && bad.is_about_arguments() => Ok(None),
            Err(bad) => Err(ObserveError::Expression(bad).into()),
        }
    }

    /// Returns what is recorded there if it is an end of pairs.
    fn paired(&self) -> Result<Option<Role>> {
        let Wanted::Paired(words, ends, observation) = self.wanted else {
            return Ok(None);
        };
        role_of_ends(observation, ends, self.scope(words)).map(Some)
    }
}

/// The patches of a function.
struct FunctionPatches {
    /// That of its entry.
    best: Candidate,
    /// What is tried if `best` turns out not to be possible, the best one last.
    others: Vec<Candidate>,
    timing: Option<Timing>,
    /// If its calls are recorded.
    watching: Option<Watching>,
    /// Why its results are not recorded, although they are to be.
    without_results: Option<Refusal>,
    /// If its results or exits are recorded or asked for, those of its returns, or of all exits.
    ends: Vec<Candidate>,
}

impl FunctionPatches {
    fn of(best: Candidate) -> FunctionPatches {
        FunctionPatches {
            best,
            others: Vec::new(),
            timing: None,
            watching: None,
            without_results: None,
            ends: Vec::new(),
        }
    }

    /// Returns all patches of the entry, the best one last.
    fn all(mut self) -> Vec<Candidate> {
        self.others.push(self.best);
        self.others
    }
}

/// What is needed to plan the patches of a function.
struct Patching<'p> {
    planner: &'p EntryPlanner<'p>,
    /// If the exits of any function of the object are patched.
    exit_planner: Option<&'p PatchPlanner>,
    bias: LoadBias,
    stacks: ProcessStacks,
    /// Whether it may be code of OCaml 4, which raises `Stack_overflow` for a fault at the end of the stack only if the
    /// fault is in OCaml code: then instructions that write to the stack are not displaced.
    keeps_faults: bool,
}

impl Patching<'_> {
    /// Plans the patches of a place. `asked` is what is asked of its hits, `None` if that is an argument that it does
    /// not have; `paired` is what is recorded there if it is an end of pairs.
    fn of_place(
        &self,
        known: &KnownPlace<'_>,
        asked: Option<&AskedOfCalls>,
        paired: Option<&Role>,
    ) -> std::result::Result<FunctionPatches, Refusal> {
        if known.place.function.object.is_kernels() {
            return Err(Refusal::KernelCode);
        }
        let asked = asked.ok_or(Refusal::NoArgument)?;
        match known.wanted {
            Wanted::LeftAlone => Err(Refusal::SwitchesEvents),
            Wanted::Timed(_, words) => {
                let reported = words.map(|words| known.watching(words));
                let stack = known.stack(self.stacks)?;
                self.timed(known.place, stack, known.is_ocaml(), reported)
            }
            _ if known.is_asked_at_exits() => self.asked_at_exits(known),
            _ => self.counted_or_watched(known, asked, paired),
        }
    }

    fn asked_at_exits(
        &self,
        known: &KnownPlace<'_>,
    ) -> std::result::Result<FunctionPatches, Refusal> {
        let (best, ends) = self.with_exits(known.place, |_| {})?;
        let mut watching = known.watched().map(|words| known.watching(words));
        if let Some(returns) = &mut watching {
            returns.function.has_only_results = true;
            returns.function.has_results = true;
        }
        Ok(FunctionPatches {
            watching,
            ends,
            ..FunctionPatches::of(best)
        })
    }

    fn counted_or_watched(
        &self,
        known: &KnownPlace<'_>,
        (filter, integer, _): &AskedOfCalls,
        paired: Option<&Role>,
    ) -> std::result::Result<FunctionPatches, Refusal> {
        let mut watching = known.watched().map(|words| known.watching(words));
        // At another instruction, its arguments may not be there.
        let any = |_| true;
        let asks_arguments = watching.as_ref().is_some_and(Watching::has_arguments)
            || (filter.as_ref()).is_some_and(|it| it.filter.test.has_argument(&any))
            || (integer.as_ref()).is_some_and(|it| it.integer.number.has_argument(&any));
        let is_exact =
            asks_arguments && known.place.selected_by.is_usdt() || paired.is_some_and(asks_at_end);
        let entry = self.counted(known.place, is_exact);
        let with_ends = known.watched_to_end();
        let with_ends = with_ends.map(|words| (words, self.with_ends(known, words)));
        let patches = match with_ends {
            None => entry?,
            Some((words, Ok((best, ends, exits_on)))) => {
                if let Some(watching) = &mut watching {
                    watching.function.has_results = words.has_results();
                    watching.function.exits_on = exits_on;
                }
                FunctionPatches {
                    ends,
                    // Without the results.
                    others: entry.map_or_else(|_| Vec::new(), FunctionPatches::all),
                    ..FunctionPatches::of(best)
                }
            }
            Some((_, Err(why))) => FunctionPatches {
                without_results: Some(why),
                ..entry?
            },
        };
        Ok(FunctionPatches {
            watching,
            ..patches
        })
    }

    /// Plans the patches of a function whose returns or exits are recorded, with the stack that the exits are on.
    fn with_ends(
        &self,
        known: &KnownPlace<'_>,
        words: &WatchedWords,
    ) -> std::result::Result<(Candidate, Vec<Candidate>, Option<StackKind>), Refusal> {
        if !words.has_exits() {
            let (best, ends) = self.with_exits(known.place, PatchSite::keep_returns)?;
            return Ok((best, ends, None));
        }
        let stack = known.stack(self.stacks)?;
        let (best, ends) = self.with_exits(known.place, |_| {})?;
        Ok((best, ends, Some(stack)))
    }

    /// Plans the patch of a place that is counted; unless it `is_exact`, maybe that of an instruction that is executed
    /// as often.
    fn counted(
        &self,
        place: &FunctionPlace<'_>,
        is_exact: bool,
    ) -> std::result::Result<FunctionPatches, Refusal> {
        let range = place.function.function.range();
        let at = FileAddr(range.start.0 + place.offset);
        let planned = self.counted_at(range, at, place.offset, place.selected_by.is_usdt());
        if planned.is_ok() || is_exact || place.selected_by.name().is_none() {
            return planned;
        }
        let mut others = self.planner.executed_with(range, at).into_iter();
        let other = others.find_map(|at| self.counted_at(range, at, place.offset, false).ok());
        other.map_or(planned, Ok)
    }

    fn counted_at(
        &self,
        range: CodeRange,
        at: FileAddr,
        offset: u64,
        is_usdt: bool,
    ) -> std::result::Result<FunctionPatches, Refusal> {
        let sites = if is_usdt {
            with_dead_flags(self.planner.usdt_site(range, at)?, offset)?
        } else if at == range.start {
            self.planner.entry(range)?
        } else {
            with_dead_flags(self.planner.instruction(range, at)?, offset)?
        };
        let mut why = Refusal::PageBorder;
        let mut candidates: Vec<Candidate> = Vec::new();
        for site in sites.into_iter().rev() {
            match self.check(&site) {
                Ok(()) => candidates.extend(candidate(self.planner, site, self.bias)),
                Err(refusal) => why = refusal,
            }
        }
        let best = candidates.pop().ok_or(why)?;
        Ok(FunctionPatches {
            others: candidates,
            ..FunctionPatches::of(best)
        })
    }

    /// Plans the patches of a function that is timed.
    fn timed(
        &self,
        place: &FunctionPlace<'_>,
        stack: StackKind,
        is_ocaml: bool,
        reported: Option<Watching>,
    ) -> std::result::Result<FunctionPatches, Refusal> {
        let (entry, exits) = self.with_exits(place, |_| {})?;
        let timing = Timing {
            stack,
            is_ocaml,
            reported,
            exits,
        };
        Ok(FunctionPatches {
            timing: Some(timing),
            ..FunctionPatches::of(entry)
        })
    }

    /// Plans the patches of the entry of a function, and of those exits that `keep` keeps.
    fn with_exits(
        &self,
        place: &FunctionPlace<'_>,
        keep: impl Fn(&mut PatchSite),
    ) -> std::result::Result<(Candidate, Vec<Candidate>), Refusal> {
        if place.offset > 0 {
            return Err(Refusal::NotEntry);
        }
        let range = place.function.function.range();
        let planner = self.exit_planner.ok_or(Refusal::NotCode)?;
        let mut plan = planner.exits(range, |site| self.check(site))?;
        keep(&mut plan.entry);
        plan.sites.iter_mut().for_each(keep);
        plan.sites.retain(|site| !site.exits().is_empty());
        for site in [&plan.entry].into_iter().chain(&plan.sites) {
            self.check(site)?;
        }
        let plan = plan.with_dead_flags(range)?;
        let candidate = |site| candidate(self.planner, site, self.bias).ok_or(Refusal::PageBorder);
        let exits = plan.sites.into_iter().map(candidate);
        let exits = exits.collect::<std::result::Result<_, _>>()?;
        Ok((candidate(plan.entry)?, exits))
    }

    fn check(&self, site: &PatchSite) -> std::result::Result<(), Refusal> {
        if self.keeps_faults && writes_stack(site.displaced()) {
            return Err(Refusal::StackWrite);
        }
        Ok(())
    }
}

/// Refuses patches before which a trampoline must not change the flags.
fn with_dead_flags(
    mut sites: Vec<PatchSite>,
    offset: u64,
) -> std::result::Result<Vec<PatchSite>, Refusal> {
    sites.retain(PatchSite::flags_are_dead);
    if sites.is_empty() {
        return Err(Refusal::LiveFlags { offset });
    }
    Ok(sites)
}

/// Returns a patch site with the bytes that it overwrites; `None` if these are on more than one page, or the file does
/// not have all of them.
fn candidate(planner: &EntryPlanner<'_>, site: PatchSite, bias: LoadBias) -> Option<Candidate> {
    if !site.is_on_one_page() {
        return None;
    }
    let (len, island) = match site.jump() {
        Jump::Near { .. } => (PATCH_LEN, None),
        Jump::Punned { chosen, .. } => (1 + usize::from(chosen), None),
        Jump::Short { island } => (SHORT_LEN as usize, Some(island)),
    };
    let island = match island {
        None => None,
        Some(island) => {
            let before = planner.code(island, PATCH_LEN).try_into().ok()?;
            let at = bias.live(island);
            Some(Island { at, before })
        }
    };
    let read = if island.is_some() { len } else { PATCH_LEN };
    let code = planner.code(site.address(), read);
    let is_whole = code.len() == read;
    let code = PatchBytes::of(code);
    is_whole.then_some(Candidate {
        site,
        len,
        code,
        island,
    })
}

/// Returns whether one of these instructions may be the first to access a page of the stack: what is read there was
/// written before.
fn writes_stack(code: &[u8]) -> bool {
    let mut factory = InstructionInfoFactory::new();
    Decoder::new(64, code, DecoderOptions::NONE)
        .iter()
        .any(|instruction| {
            let memory = factory.info(&instruction).used_memory();
            let mut of_stack = memory.iter().filter(|it| it.base() == Register::RSP);
            of_stack.any(|it| {
                !matches!(
                    it.access(),
                    OpAccess::Read | OpAccess::CondRead | OpAccess::NoMemAccess
                )
            })
        })
}

#[cfg(test)]
impl ObservedFunctions {
    /// Returns functions whose calls are counted, of an object without a file: their code is at these addresses of the
    /// object, which is loaded with this bias.
    pub(crate) fn of_code(functions: &[(FileAddr, &[u8])], bias: LoadBias) -> ObservedFunctions {
        let mut code = Code::default();
        let mut ranges = Vec::new();
        for (start, bytes) in functions {
            code.add(*start, bytes.to_vec(), true);
            ranges.push(CodeRange {
                start: *start,
                len: bytes.len() as u64,
            });
        }
        let planner = PatchPlanner::new(code, &ranges, &[], []);
        let planner = EntryPlanner::of(&planner);
        let function = |range: &CodeRange| {
            let sites = planner.entry(*range).unwrap().into_iter();
            let mut sites: Vec<Candidate> = sites
                .rev()
                .filter_map(|site| candidate(&planner, site, bias))
                .collect();
            ObservedFunction {
                wanted: WantedFunction {
                    name: format!("function_{:x}", range.start.0),
                    object: Path::new("/srv/server.exe").into(),
                    address: bias.live(range.start),
                    named_by: None,
                },
                is_ocaml: false,
                is_named_ocaml: false,
                bias,
                changed_word: None,
                is_in_executable: true,
                best: sites.pop().unwrap(),
                others: sites,
                timing: None,
                watching: None,
                filter: None,
                integer: None,
                keys: None,
                is_asked_at_exits: false,
                ends: Vec::new(),
                paired: None,
            }
        };
        ObservedFunctions {
            functions: ranges.iter().map(function).collect(),
            ..ObservedFunctions::default()
        }
    }
}
