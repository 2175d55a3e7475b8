//! [`ObservationPlan`]: which points of a program are observed, and what is recorded of each. Pure.

pub(crate) mod available;
mod site_roles;

use std::sync::Arc;
use std::time::Duration;

use self::site_roles::SiteRoles;
use crate::address::{LiveAddr, LoadBias};
use crate::error::Refusal;
use crate::error::{Error, FunctionError, ObserveError, ProbeError, Result};
use crate::expression::Expression;
use crate::expression::times::TimeRange;
use crate::observe::buckets::Linear;
use crate::observe::functions::fibers::ProcessStacks;
use crate::observe::functions::{ObservedFunction, ObservedFunctions};
use crate::observe::layout::arena::Arena;
use crate::observe::layout::calls::CallsLayout;
use crate::observe::layout::keys::{self, KeysLayout};
use crate::observe::layout::semaphores::ChangedWord;
use crate::observe::layout::shared::SharedLayout;
use crate::observe::layout::shared::record;
use crate::observe::layout::stack_copies::StackCopies;
use crate::observe::layout::values::{MAX_HISTOGRAMS, ValuesLayout};
use crate::observe::observation::{CallOnce, Observation};
use crate::observe::point::Point;
use crate::observe::role::{
    ArgumentRoom, ExitsRole, FreedStackRole, HistogramRole, KeyKind, KeyRole, Role, TimedRole,
};
use crate::observe::value_pages::ValuePages;
use crate::patch_plan::site::PatchSite;
use crate::process::Process;
use crate::process::image::Image;
use crate::process::program::Program;
use crate::process::seccomp::OwnFilters;
use crate::site::SiteCode;

/// What an observation records in a process.
pub(crate) struct ObservationPlan {
    /// Whether hits in processes that are forked are recorded, too.
    pub(crate) records_forked: bool,
    /// Whether functions that are asked for by name may be refused.
    pub(crate) leaves_out_refused: bool,
    pub(crate) program: Arc<Program>,
    /// The functions that are observed.
    pub(crate) functions: Arc<ObservedFunctions>,
    /// Sorted by address; once the observation is prepared, arena by arena.
    pub(crate) points: Vec<PlannedPoint>,
    /// Those of OCaml's probes first.
    pub(crate) pairs: Vec<PlannedPair>,
    /// The histograms of probes; empty if each key has one instead. Those of functions are numbered after them.
    pub(crate) histograms: Vec<PlannedHistogram>,
    /// The buckets of histograms, if they are not those of powers of two.
    pub(crate) linear: Option<Linear>,
    /// The kinds of the parts of keys, if hits are counted, or times distinguished, by keys.
    pub(crate) key_kinds: Vec<KeyKind>,
    /// The names of the probes that are counted by keys, or `START,STOP` of the pairs whose times are distinguished by
    /// keys. Names of functions are numbered after them.
    pub(crate) key_names: Arc<Vec<String>>,
    /// The least duration of the pairs and calls that are reported; zero if none are.
    pub(crate) slow_from: Duration,
    /// Whether the key of pairs is evaluated for hits that are recorded at their ends.
    pub(crate) has_pair_keys: bool,
    /// Which times are recorded; `None`: all.
    pub(crate) times: Option<TimeRange>,
    /// Whether times are distinguished by keys, the last of which is the name of the pair or function.
    pub(crate) times_by_key: bool,
    /// The expression with the longest text, if there are any.
    pub(crate) longest_expression: Option<Expression>,
    /// The layout of the data that all points share.
    pub(crate) shared: SharedLayout,
}

/// What the bytes of keys mean; see [`ObservationPlan::key_kinds`] and [`ObservationPlan::key_names`].
#[derive(Clone)]
pub(crate) struct KeyFormat {
    pub(crate) kinds: Vec<KeyKind>,
    names: Arc<Vec<String>>,
    functions: Arc<ObservedFunctions>,
}

impl KeyFormat {
    /// Returns the name with this number: of a probe, a pair or a function.
    pub(crate) fn name(&self, number: u32) -> Option<&str> {
        let number = number as usize;
        match number.checked_sub(self.names.len()) {
            None => self.names.get(number).map(String::as_str),
            Some(index) => {
                let function = self.functions.functions.get(index)?;
                Some(&function.wanted.name)
            }
        }
    }
}

/// A histogram of all sites of a probe whose values are alike.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PlannedHistogram {
    pub(crate) name: String,
    pub(crate) is_signed: bool,
}

/// A pair of probes whose times are measured.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct PlannedPair {
    /// The name of the probe that starts it.
    pub(crate) start: String,
    pub(crate) stop: String,
    /// Whether the argument that distinguishes its events has the same name at all sites of both probes: then different
    /// numbers mean different events.
    pub(crate) has_named_number: bool,
    /// Whether only times of a range are recorded.
    pub(crate) has_range: bool,
}

/// A point that is observed.
pub(crate) struct PlannedPoint {
    pub(crate) point: Point,
    pub(crate) role: Role,
    pub(crate) of: PointOwner,
    /// Its number among the places of its function: 0 is the entry, all others are exits.
    pub(crate) part: usize,
    /// The semaphore, or the other word, that is changed while it is observed.
    pub(crate) changed_word: Option<ChangedWord>,
}

/// What a point belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum PointOwner {
    /// The site with this index among those of the program.
    Site(usize),
    /// The function with this index among those that are observed.
    Function(usize),
}

impl PlannedPoint {
    fn of_site(site: usize, address: LiveAddr, code: SiteCode, role: Role) -> PlannedPoint {
        PlannedPoint {
            point: Point::probe_site(address, code),
            role,
            of: PointOwner::Site(site),
            part: 0,
            changed_word: None,
        }
    }

    /// Returns the index of its function, if it is at one.
    pub(crate) fn function(&self) -> Option<usize> {
        match self.of {
            PointOwner::Site(_) => None,
            PointOwner::Function(function) => Some(function),
        }
    }

    /// Returns the index of its site, if it is one.
    pub(crate) fn site(&self) -> Option<usize> {
        match self.of {
            PointOwner::Site(site) => Some(site),
            PointOwner::Function(_) => None,
        }
    }
}

#[cfg(test)]
impl ObservationPlan {
    /// Returns a plan for these points, and nothing else.
    pub(crate) fn of_points(points: Vec<PlannedPoint>, shared: SharedLayout) -> ObservationPlan {
        ObservationPlan {
            records_forked: false,
            leaves_out_refused: false,
            program: Arc::new(crate::testing::program_with_probes(&["a"])),
            functions: Arc::default(),
            points,
            pairs: Vec::new(),
            histograms: Vec::new(),
            linear: None,
            key_kinds: Vec::new(),
            key_names: Arc::default(),
            slow_from: Duration::ZERO,
            has_pair_keys: false,
            times: None,
            times_by_key: false,
            longest_expression: None,
            shared,
        }
    }
}

impl ObservationPlan {
    /// Returns what an observation records in a program.
    ///
    /// # Errors
    ///
    /// If a probe is missing, an expression does not fit a point, there are too many pairs or histograms, or what is
    /// asked cannot be combined.
    pub(crate) fn of(
        observation: &Observation,
        program: Arc<Program>,
        functions: Arc<ObservedFunctions>,
    ) -> Result<ObservationPlan> {
        if observation.watches_ends() && observation.records_some() {
            return Err(ObserveError::ResultsOfSomeCalls.into());
        }
        observation.refuse_keys_of_times()?;
        let (_, times) = observation.asked_of_times()?;
        let SiteRoles {
            mut roles,
            histograms,
            key_names,
            with_named_number,
        } = SiteRoles::of(observation, &program)?;
        let sites = program.sites_by_address().filter_map(|placed| {
            let site = placed.index();
            let code = program.site(site).site.code();
            let role = std::mem::take(&mut roles[site]);
            (!role.is_empty()).then(|| PlannedPoint::of_site(site, placed.address, code, role))
        });
        let linear = observation.linear;
        let of_functions = function_points(&functions, histograms.len(), key_names.len(), linear);
        let mut points: Vec<PlannedPoint> = sites.chain(of_functions).collect();
        mark_range(&mut points, times);
        let of_keys = PlannedKeys::of(&points, linear, || {
            let of_functions = functions.with_histogram().count();
            layout_of_values(histograms.len() + of_functions, linear)
        })?;
        let pair = |(number, (start, stop))| PlannedPair {
            start,
            stop,
            has_named_number: with_named_number.contains(&number),
            has_range: times.is_some(),
        };
        let pairs: Vec<PlannedPair> = (0..).zip(observation.all_pairs()).map(pair).collect();
        let shared = SharedLayout {
            pairs: pairs.len() as u32,
            filters_memory: points.iter().any(|it| it.role.filters_memory()),
            calls: layout_of_calls(observation, &functions),
            values: of_keys.values,
            keys: of_keys.keys,
            pairs_by_key: observation.pair_key.is_some() && !pairs.is_empty(),
            asks_for_threads: observation.asks_for_threads(),
            ..layout_of_records(observation, &points)
        };
        let ring_bytes = observation.ring_bytes.filter(|_| shared.record_len > 0);
        let shared = ring_bytes.map_or(shared, |bytes| shared.with_rings_of(bytes));
        let mut plan = ObservationPlan {
            records_forked: observation.records_forked,
            leaves_out_refused: observation.leaves_out_refused && observation.usdt_pairs.is_empty(),
            pairs,
            program,
            functions,
            points,
            histograms,
            linear,
            key_kinds: of_keys.kinds,
            key_names: Arc::new(key_names),
            slow_from: observation.slow_from.unwrap_or_default(),
            has_pair_keys: observation.has_pair_keys,
            times,
            times_by_key: of_keys.are_of_times,
            longest_expression: observation.longest_expression().cloned(),
            shared,
        };
        plan.sort_by_key(|planned| planned.point.address);
        Ok(plan)
    }

    /// Finds out which table tells the trampolines what memory of values they may read, if they read any; and whether
    /// there are stacks of fibers, if stacks are copied.
    pub(crate) fn find_values_and_stacks(&mut self, process: &Process, image: &Image) {
        if self.shared.has_pages() {
            let objects = self.program.objects().iter();
            let objects = objects.map(|object| (&*object.elf, object.bias));
            let executable = image.executable_without_probes(process);
            let objects = objects.chain(executable);
            if self.shared.stacks != StackCopies::None {
                let files = objects.clone().map(|(elf, _)| elf);
                self.shared.stacks = StackCopies::Copied {
                    fibers: ProcessStacks::of(files).fibers(),
                    may_ask_kernel: OwnFilters::of(process).allow_questions(),
                };
            }
            self.shared.value_pages = ValuePages::of(objects);
        }
    }

    /// Sorts the points, and numbers those that are watched in the new order.
    pub(crate) fn sort_by_key<K: Ord>(&mut self, key: impl FnMut(&PlannedPoint) -> K) {
        self.points.sort_by_cached_key(key);
        for (index, planned) in (0..).zip(&mut self.points) {
            let role = &mut planned.role;
            for recorded in role.watched.iter_mut().chain(&mut role.reported) {
                recorded.point = index;
            }
        }
    }

    /// Returns each arena with its points, once placement has sorted the points by arena.
    pub(crate) fn points_by_arena<'p>(
        &'p self,
        arenas: &'p [Arena],
    ) -> impl Iterator<Item = (&'p Arena, &'p [PlannedPoint])> {
        let mut rest = self.points.as_slice();
        arenas.iter().map(move |arena| {
            let (these, others) = rest.split_at(arena.points.len());
            rest = others;
            (arena, these)
        })
    }

    /// Refuses these functions, given by ascending index.
    pub(crate) fn refuse(&mut self, failed: &[(usize, Refusal)]) {
        if failed.is_empty() {
            return;
        }
        Arc::make_mut(&mut self.functions).refuse(failed);
        self.renew_function_points();
    }

    /// Refuses functions with changed code; see [`ObservedFunctions::refuse_changed`].
    pub(crate) fn refuse_changed(&mut self, changed: &[(usize, Refusal)]) {
        Arc::make_mut(&mut self.functions).refuse_changed(changed);
        self.renew_function_points();
    }

    /// Plans another patch for each of these functions, given by ascending index, because the present one is not
    /// possible; refuses those that have no other.
    pub(crate) fn try_next(&mut self, failed: &[(usize, Refusal)]) {
        Arc::make_mut(&mut self.functions).try_next(failed);
        self.renew_function_points();
    }

    /// Changes the patches of functions whose exit would overlap the entry of the next one; see
    /// [`ObservedFunctions::lean`].
    pub(crate) fn lean(&mut self) {
        if Arc::make_mut(&mut self.functions).lean() {
            self.renew_function_points();
        }
    }

    fn renew_function_points(&mut self) {
        self.points.retain(|planned| planned.site().is_some());
        let points = function_points(
            &self.functions,
            self.histograms.len(),
            self.key_names.len(),
            self.linear,
        );
        self.points.extend(points);
        mark_range(&mut self.points, self.times);
        self.sort_by_key(|planned| planned.point.address);
    }

    /// Checks that something is left of each function that was asked for by name, and of all together; if these may be refused,
    /// that anything is left.
    ///
    /// # Errors
    ///
    /// [`FunctionError::NonePossible`] if it is not.
    pub(crate) fn refuse_empty(&self) -> Result<()> {
        let refused = self.functions.why_not();
        let has_sites = self.points.iter().any(|it| it.site().is_some());
        let is_left = self.leaves_out_refused && (has_sites || self.functions.has_selected());
        if refused.is_empty() || is_left {
            return Ok(());
        }
        let kind = FunctionError::NonePossible {
            is_usdt: refused.iter().all(|it| it.is_usdt),
            refused: (refused.iter().map(|it| (it.name.clone(), it.why.clone()))).collect(),
        };
        Err(Error::of_file(self.program.path(), kind))
    }

    /// Returns what is called once before the function of a point, if something is.
    pub(crate) fn calls_once_at(&self, planned: &PlannedPoint) -> Option<&CallOnce> {
        let PointOwner::Function(index) = planned.of else {
            return None;
        };
        let function = self.functions.functions.get(index)?;
        let once = self.functions.calls_once.as_ref();
        once.filter(|once| once.before == function.wanted.address)
    }

    /// Returns how a point of a function is patched, and the load bias of its object; `None` for the site of a probe.
    pub(crate) fn patch_site(&self, planned: &PlannedPoint) -> Option<(&PatchSite, LoadBias)> {
        match planned.of {
            PointOwner::Site(_) => None,
            PointOwner::Function(function) => self.functions.functions[function].site(planned.part),
        }
    }

    /// Returns whether a point is in a function that is known to be of OCaml.
    pub(crate) fn is_of_ocaml(&self, planned: &PlannedPoint) -> bool {
        match planned.of {
            PointOwner::Site(_) => false,
            PointOwner::Function(function) => self.functions.functions[function].is_ocaml,
        }
    }

    /// Returns whether pairs or calls are timed.
    pub(crate) fn has_times(&self) -> bool {
        !self.pairs.is_empty() || self.functions.timed_indices().next().is_some()
    }

    /// Returns whether a running process is to share the recorded data with the children that it forks. Starts that
    /// wait for their stop are each process's own.
    pub(crate) fn shares_data(&self) -> bool {
        self.records_forked && !self.has_times()
    }

    /// Returns whether any trampoline reads the time stamp counter.
    pub(crate) fn is_timed(&self) -> bool {
        let mut points = self.points.iter();
        self.shared.filters_memory || points.any(|planned| planned.role.reads_time())
    }

    /// Returns whether expressions are evaluated at any point.
    pub(crate) fn has_expressions(&self) -> bool {
        self.points.iter().any(|it| it.role.has_expressions())
    }

    /// Returns whether expressions are evaluated for hits that are counted or watched, and may have no
    /// answer.
    pub(crate) fn is_filtered(&self) -> bool {
        self.points.iter().any(|it| it.role.may_be_untyped())
    }

    /// Returns whether only some of the hits that are watched are recorded.
    pub(crate) fn is_sampled(&self) -> bool {
        let mut watched = self.points.iter().filter_map(|it| it.role.watched.as_ref());
        watched.any(|watched| watched.sample.is_some())
    }

    /// Returns whether hits are counted by keys, and not put into a histogram for each key.
    pub(crate) fn counts_by_key(&self) -> bool {
        !self.key_kinds.is_empty() && !self.shared.keys.has_histograms
    }

    /// Returns what the bytes of keys mean.
    pub(crate) fn key_format(&self) -> KeyFormat {
        KeyFormat {
            kinds: self.key_kinds.clone(),
            names: self.key_names.clone(),
            functions: self.functions.clone(),
        }
    }

    /// Returns whether calls of functions are recorded, or USDT probes are ends of pairs: their trampolines read the
    /// thread control block.
    pub(crate) fn watches_functions(&self) -> bool {
        let mut points = self.points.iter();
        points.any(|planned| {
            let role = &planned.role;
            planned.site().is_none() && (role.watched.is_some() || !role.ends.is_empty())
        })
    }

    /// Returns whether a trampoline asks the kernel which memory can be read: of what an expression reads, of the words
    /// of a call or a return, or of a stack.
    pub(crate) fn asks_kernel(&self) -> bool {
        let mut roles = self.points.iter().map(|it| &it.role);
        let asks = |role: &Role| {
            // Of a slow call, no memory is recorded.
            let at_end = role.reported.as_ref().filter(|_| !role.ends.is_empty());
            let mut recorded = role.watched.iter().chain(at_end);
            role.expressions_ask_kernel() || recorded.any(|it| it.asks_kernel())
        };
        self.shared.stacks.may_ask_kernel() || roles.any(asks)
    }

    /// Returns the error for a site whose code in the process differs from its file.
    pub(crate) fn unexpected(&self, index: usize, found: SiteCode) -> ProbeError {
        let site = self.program.site(index);
        let mut probes = self.program.probes();
        let probe = probes.find(|probe| probe.sites().any(|site| site == index));
        ProbeError::UnexpectedSite {
            name: probe.map_or_else(String::new, |probe| probe.name().to_owned()),
            address: site.address(),
            found,
            expected: site.site.code(),
        }
    }
}

/// Marks the points that are timed, if only times of a range are recorded.
fn mark_range(points: &mut [PlannedPoint], times: Option<TimeRange>) {
    for PlannedPoint { role, .. } in points {
        let is_timed = !role.ends.is_empty() || role.timed.is_some() || role.freed_stack.is_some();
        role.is_in_range = is_timed && times.is_some();
    }
}

/// Returns the layout of so many histograms.
fn layout_of_values(histograms: usize, linear: Option<Linear>) -> Result<ValuesLayout> {
    let (given, most) = (histograms, MAX_HISTOGRAMS as usize);
    if given > most {
        return Err(ObserveError::TooManyHistograms { given, most }.into());
    }
    let steps = linear.filter(|_| given > 0).map_or(0, Linear::steps);
    Ok(ValuesLayout {
        histograms: given as u32,
        steps,
    })
}

/// Returns the points of functions. Their histograms and names are numbered after so many of probes and pairs.
fn function_points(
    functions: &ObservedFunctions,
    histograms: usize,
    key_names: usize,
    linear: Option<Linear>,
) -> impl Iterator<Item = PlannedPoint> {
    let mut timed = 0..;
    let mut histograms = histograms as u32..;
    let is_from_start = functions.are_from_start;
    let functions = functions.functions.iter().enumerate();
    functions.flat_map(move |(index, function)| {
        let number = function.timing().and_then(|_| timed.next());
        let histogram = function.integer().and_then(|integer| {
            Some(HistogramRole {
                // The histograms of keys are not those of names.
                number: function
                    .keys()
                    .map_or_else(|| histograms.next(), |_| Some(0))?,
                integer: integer.clone(),
                linear,
            })
        });
        let keys = function.keys().map(|keys| KeyRole {
            name: (key_names + index) as u32,
            ..keys.clone()
        });
        let of_all = match function.paired() {
            Some(paired) => paired.clone(),
            None => Role {
                histogram,
                ..role_of_function(function, number, keys, is_from_start)
            },
        };
        let is_paired = function.paired().is_some();
        function.points().map(move |(part, point)| {
            let mut role = of_all.clone();
            if let Some(timed) = &mut role.timed {
                timed.is_entry = part == 0;
            }
            role.freed_stack = role.freed_stack.filter(|_| part == 0);
            if let Some(watching) = function.watching().filter(|_| !is_paired) {
                role.watched = Some(watching.role(part, is_from_start));
            }
            PlannedPoint {
                point,
                role,
                of: PointOwner::Function(index),
                part,
                changed_word: function.changed_word.filter(|_| part == 0),
            }
        })
    })
}

/// Returns what all places of a function that is not paired have in common. `timed` is its number among timed ones.
fn role_of_function(
    function: &ObservedFunction,
    timed: Option<u32>,
    keys: Option<KeyRole>,
    is_from_start: bool,
) -> Role {
    let timing = function.timing();
    let (keys, time_keys) = match keys {
        Some(keys) if timed.is_some() => (None, Some(Arc::new(keys.with_name()))),
        keys => (keys.map(Arc::new), None),
    };
    let is_observed = timed.is_some() || function.watching().is_some();
    let is_counted = !is_observed && !function.wanted.is_internal;
    let reported = timing.and_then(|timing| timing.reported.as_ref());
    Role {
        is_counted: is_counted && function.integer().is_none(),
        filter: function.filter().cloned(),
        keys,
        time_keys,
        timed: timed.zip(timing).map(|(function, timing)| TimedRole {
            function,
            stack: timing.stack,
            is_ocaml: timing.is_ocaml,
            is_entry: false,
            is_from_start,
        }),
        reported: reported.map(|reported| reported.role(0, is_from_start)),
        freed_stack: function.freed_stack.map(|role| FreedStackRole {
            is_from_start,
            ..role
        }),
        exits: function.evaluates_at_exits.then_some(ExitsRole {
            is_ocaml: function.is_named_ocaml,
        }),
        ..Role::default()
    }
}

/// The keys by which hits are counted, or times distinguished.
struct PlannedKeys {
    kinds: Vec<KeyKind>,
    are_of_times: bool,
    /// The layout of histograms, whether each key has one or not.
    values: ValuesLayout,
    keys: KeysLayout,
}

impl PlannedKeys {
    /// `values` returns the layout of the histograms if keys have none.
    fn of(
        points: &[PlannedPoint],
        linear: Option<Linear>,
        values: impl FnOnce() -> Result<ValuesLayout>,
    ) -> Result<PlannedKeys> {
        // The parts of keys are of the same kinds at all points, as the expressions are the same.
        let mut keyed = points.iter().filter_map(|it| {
            let keys = it.role.keys.as_ref().or(it.role.time_keys.as_ref());
            Some((&it.role, keys?))
        });
        let keyed = keyed.next();
        let kinds = keyed.map_or_else(Vec::new, |(_, keys)| keys.kinds());
        let keys = KeysLayout::of(&kinds);
        let are_of_times = keyed.is_some_and(|(role, _)| role.time_keys.is_some());
        let have_histograms =
            are_of_times || keyed.is_some_and(|(role, _)| role.histogram.is_some());
        if !have_histograms {
            return Ok(PlannedKeys {
                kinds,
                are_of_times,
                values: values()?,
                keys,
            });
        }
        // Linear buckets are for values, not for times.
        let linear = linear.filter(|_| !are_of_times);
        Ok(PlannedKeys {
            kinds,
            are_of_times,
            values: ValuesLayout {
                histograms: keys::histograms::ALL,
                steps: linear.map_or(0, Linear::steps),
            },
            keys: keys.with_histograms(),
        })
    }
}

/// Returns the layout of the calls of functions that are timed.
fn layout_of_calls(observation: &Observation, functions: &ObservedFunctions) -> CallsLayout {
    let timed = functions.timed_indices().count();
    let has_timed = timed > 0;
    CallsLayout {
        functions: timed as u32,
        of_self: observation.self_times && has_timed,
        by_caller: observation.by_caller && has_timed,
        keeps_arguments: observation.slow_from.is_some() && has_timed,
    }
}

/// Returns the layout of records, and of what is kept of starts; the rest is empty.
fn layout_of_records(observation: &Observation, points: &[PlannedPoint]) -> SharedLayout {
    let watched = points.iter().filter_map(|it| it.role.watched.as_ref());
    let most_arguments = watched.map(|watched| {
        let has_results = watched.function.is_some_and(|it| it.has_results);
        watched.arguments.len().max(has_results.into())
    });
    let most_arguments = most_arguments.max();
    let reported = points.iter().filter_map(|it| it.role.reported.as_ref());
    // A result takes the place of an argument.
    let kept_arguments = reported.map(|it| {
        let has_result = it.function.is_some();
        it.arguments.len().max(has_result.into())
    });
    let kept_arguments = kept_arguments.max();
    let argument_room = if kept_arguments.is_some() {
        ArgumentRoom::Fields
    } else {
        let watched = points.iter().filter_map(|it| it.role.watched.as_ref());
        watched
            .map(|it| it.argument_room())
            .max()
            .unwrap_or_default()
    };
    let len = |arguments| record::len(arguments, argument_room);
    let kept_len = kept_arguments.map_or(0, len);
    let record_len = most_arguments.map_or(0, len).max(2 * kept_len);
    let stacks = if observation.with_stacks && record_len > 0 {
        StackCopies::OF_THREADS
    } else {
        StackCopies::None
    };
    let is_much = most_arguments > Some(0) || kept_arguments.is_some() || observation.watches_exits;
    SharedLayout {
        record_len: record_len + stacks.len(),
        argument_room,
        ring_doublings: is_much.into(),
        kept_len,
        stacks,
        ..SharedLayout::default()
    }
}

/// Checks that a program has the sites that an observation selects, and that expressions fit them.
///
/// # Errors
///
/// See [`ObservationPlan::of`].
pub(crate) fn check_sites(observation: &Observation, program: &Program) -> Result<()> {
    SiteRoles::of(observation, program).map(|_| ())
}

#[cfg(test)]
mod tests;
