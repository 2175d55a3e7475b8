//! Finds the functions that an observation selects, and what is wanted of each.

use std::cell::LazyCell;
use std::collections::{HashMap, HashSet};
use std::path::Path;
use std::sync::Arc;

use crate::elf::functions::FunctionName;
use crate::elf::mangling::Language;
use crate::error::{ElfDefect, Error, ErrorKind, FileError, FunctionError, Refusal, Result};
use crate::functions::{FunctionObject, FunctionPlace, Functions};
use crate::observe::frame_id::has_runtime;
use crate::observe::functions::fibers::ProcessStacks;
use crate::observe::functions::freed_stacks::FreedStacks;
use crate::observe::functions::patches::Patching;
use crate::observe::functions::wanted::{
    EndsByPlace, ExpressionsByKind, KnownPlace, PlaceKey, PlaceKinds, Wanted,
};
use crate::observe::functions::watching::KnownArguments;
use crate::observe::functions::{ObservedFunction, ObservedFunctions, WantedFunction};
use crate::observe::layout::calls::MAX_TIMED;
use crate::observe::layout::semaphores::{ChangedWord, WordChange};
use crate::observe::observation::{CallOnce, Observation};
use crate::observe::role::{Marks, PairEnd, Role};
use crate::patch_plan::EntryPlanner;
use crate::process::code_files::CodeCopy;
use crate::process::object::UnreadableObject;
use crate::select::function::FunctionSelector;

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
        let Selection {
            places,
            selectors,
            mut kinds,
        } = Selection::of(&all, observation)?;
        let [_, timed, watched, counted] = &places;
        let asked = asked_places(observation, timed, counted);
        let words = KnownArguments::of(pid, observation, &all, watched, &asked);
        let (start_filter, _) = observation.asked_of_times()?;
        let questions = ExpressionsByKind::of(observation, start_filter.as_ref(), &words);
        let stacks = ProcessStacks::of(all.objects().iter().map(FunctionObject::elf));
        let freed_stacks = if timed.is_empty() || stacks == ProcessStacks::OfThreads {
            Vec::new()
        } else {
            FreedStacks::of(&all)
        };
        let mut unreadable = [all.unreadable(), &all.unreadable_notes()].concat();
        let mut all_selectors = selectors.iter().flatten();
        if all_selectors.all(|it| matches!(it, FunctionSelector::Usdt(_))) {
            unreadable.retain(|file| !has_nothing(file));
        }
        let mut observed = ObservedFunctions {
            unreadable,
            mapped: all.mapped().clone(),
            ..ObservedFunctions::default()
        };
        let mut places = merged(&all, places.into_iter().zip(&selectors));
        let is_selected = |it: &FreedStacks<'_>| places.iter().any(|place| it.is_at(place));
        let internal = freed_stacks.iter().filter(|it| !is_selected(it));
        let internal: Vec<FunctionPlace<'_>> = internal.map(|it| it.place.clone()).collect();
        kinds.freed_stacks = internal.iter().map(PlaceKey::of).collect();
        if !internal.is_empty() {
            places = all.merged([places, internal].concat());
        }
        let wanted = |place: &FunctionPlace<'_>| questions.wanted(place, &kinds);
        let is_same = |one: &FunctionPlace<'_>, other: &FunctionPlace<'_>| {
            std::ptr::eq(one.function.object, other.function.object)
        };
        for places in places.chunk_by(is_same) {
            observed.add(places[0].function.object, places, stacks, wanted)?;
        }
        observed.refuse_outside(&all, selectors.iter().flatten());
        observed.refuse_copies(all.copies());
        let has_runtime = LazyCell::new(|| all.objects().iter().any(|it| has_runtime(it.elf())));
        for function in &mut observed.functions {
            function.is_ocaml = function.is_ocaml && *has_runtime;
        }
        observed
            .functions
            .sort_unstable_by_key(|function| function.wanted.address);
        if let Some(once) = observation.calls_once {
            observed.call_once(once);
        }
        observed.notice_freed_stacks(&freed_stacks);
        let selectors = selectors.into_iter().flatten();
        observed.selectors = selectors
            .filter(|it| !matches!(it, FunctionSelector::Address(_)))
            .collect();
        let records_calls = !observation.watched_functions.is_empty();
        observed.all = records_calls.then(|| Arc::new(all));
        Ok(observed)
    }

    /// Refuses the sites of USDT probes that are in no function.
    fn refuse_outside<'s>(
        &mut self,
        all: &Functions,
        selectors: impl Iterator<Item = &'s FunctionSelector>,
    ) {
        for (object, name, address) in selectors.flat_map(|it| all.usdt_sites_outside(it)) {
            let Some(bias) = object.load_bias() else {
                continue;
            };
            let site = WantedFunction {
                name,
                object: object.table().path().into(),
                address: bias.live(address),
                is_usdt: true,
                is_internal: false,
                named_by: None,
            };
            if let Some(refused) = site.refused(Refusal::NoFunction) {
                if !self.refused.contains(&refused) {
                    self.refused.push(refused);
                }
            }
        }
    }

    /// Refuses each function that is observed in one second mapping of its code.
    fn refuse_copies(&mut self, copies: &[CodeCopy]) {
        let mut known = HashSet::new();
        let refused = self.functions.iter().filter_map(|function| {
            let place = function.bias.file(function.wanted.address);
            let of_file = copies
                .iter()
                .filter(|it| *function.wanted.object == it.path);
            let addresses = of_file.map(|copy| (copy, copy.bias.live(place)));
            let mut there = addresses.filter(|(copy, address)| copy.range.contains(address));
            let (_, address) = there.next()?;
            let wanted = WantedFunction {
                address,
                named_by: None,
                ..function.wanted.clone()
            };
            // A file that is loaded twice has it twice.
            let is_new = known.insert(address);
            is_new.then(|| wanted.refused(Refusal::MappedAgain))?
        });
        let refused: Vec<_> = refused.collect();
        self.refused.extend(refused);
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
        let has_ocaml = LazyCell::new(|| has_ocaml(object));
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
            let patching = Patching::of(&place, &planner, exit_planner.as_ref(), bias, stacks);
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
        let evaluates_at_exits = known.evaluates_at_exits();
        let wanted = WantedFunction {
            name: known.shown,
            object: path.clone(),
            address: known.address,
            is_usdt: place.selected_by.is_usdt(),
            is_internal: matches!(known.wanted, Wanted::FreedStacks),
            named_by: place.named_by,
        };
        let planned = match planned {
            Ok(planned) => planned,
            Err(why) => {
                self.refused.extend(wanted.refused(why));
                return Ok(());
            }
        };
        let without = planned.without_results.and_then(|why| wanted.refused(why));
        self.without_results.extend(without);
        let (filter, integer, keys) = asked.unwrap_or_default();
        let paired = paired.map(|role| {
            if !planned.at_equivalent_instruction {
                return role;
            }
            let marks = Marks::default();
            Role { marks, ..role }
        });
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
            evaluates_at_exits,
            ends: planned.ends,
            paired: paired.map(Arc::new),
            freed_stack: None,
        });
        Ok(())
    }
}

/// Returns whether a file has functions that are known to be OCaml's.
pub(super) fn has_ocaml(object: &FunctionObject) -> bool {
    let mut functions = object.table().functions();
    let is_ocaml = |name: FunctionName<'_>| name.language == Some(Language::Ocaml);
    functions.any(|it| it.first_call().is_some() || it.names().any(is_ocaml))
}

/// Returns whether a file has neither functions nor notes of USDT probes, as one that has only data.
fn has_nothing(file: &UnreadableObject) -> bool {
    let kind = file.why.kind();
    let has_no_functions = matches!(
        kind,
        ErrorKind::File(FileError::Elf(ElfDefect::NoFunctions))
    );
    has_no_functions && !file.may_have_usdt_probes
}

/// The places that an observation selects.
struct Selection<'f> {
    /// Ends of pairs, timed, watched, and counted ones.
    places: [Vec<FunctionPlace<'f>>; 4],
    /// What selects them, in the same order.
    selectors: [Vec<FunctionSelector>; 4],
    kinds: PlaceKinds,
}

impl<'f> Selection<'f> {
    fn of(all: &'f Functions, observation: &Observation) -> Result<Selection<'f>> {
        let timed = limited(all, &observation.timed_functions)?;
        let watched = limited(all, &observation.watched_functions)?;
        let counted = all.places(&observation.counted_functions)?;
        let (usdt_pairs, pair_ends): (Vec<FunctionSelector>, Vec<PairEnd>) =
            observation.usdt_ends().into_iter().unzip();
        let (paired, ends) = places_of_pairs(all, usdt_pairs.iter().zip(pair_ends))?;
        let [timed_keys, watched_keys] =
            [&timed, &watched].map(|places| places.iter().map(PlaceKey::of).collect());
        Ok(Selection {
            places: [paired, timed, watched, counted],
            selectors: [
                usdt_pairs,
                observation.timed_functions.clone(),
                observation.watched_functions.clone(),
                observation.counted_functions.clone(),
            ],
            kinds: PlaceKinds {
                timed: timed_keys,
                watched: watched_keys,
                freed_stacks: HashSet::new(),
                ends,
            },
        })
    }
}

/// Returns the places whose arguments are asked for, other than those that are watched.
fn asked_places<'f>(
    observation: &Observation,
    timed: &[FunctionPlace<'f>],
    counted: &[FunctionPlace<'f>],
) -> Vec<FunctionPlace<'f>> {
    let asks = observation.filter.is_some()
        || observation.histogram.is_some()
        || observation.keys.is_some();
    let asks_of_calls = observation.start_filter.is_some()
        || observation.time_keys.is_some()
        || observation.slow_from.is_some();
    let asked = [(asks, counted), (asks_of_calls, timed)];
    let asked = asked.into_iter().filter(|(asks, _)| *asks);
    asked.flat_map(|(_, places)| places.to_vec()).collect()
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
            by_place.entry(PlaceKey::of(&place)).or_default().push(end);
            place.named_by = Some(index);
            places.push(place);
        }
    }
    Ok((all.merged(places), by_place))
}

/// Returns the places of all lists, each of which comes with its selectors. The index in `named_by` is changed to one
/// among the selectors of all lists.
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
    let mut named: HashMap<usize, usize> = HashMap::new();
    for index in places.iter().filter_map(|place| place.named_by) {
        *named.entry(index).or_default() += 1;
    }
    for place in &mut places {
        place.is_named_alone = place.named_by.is_some_and(|index| named[&index] == 1);
    }
    let is_kernels = |place: &FunctionPlace<'_>| place.function.object.is_kernels();
    if !places.iter().all(is_kernels) {
        // A pattern that also matches other places is not meant for code that can never be patched.
        places.retain(|place| !is_kernels(place) || place.named_by.is_some());
    }
    places
}
