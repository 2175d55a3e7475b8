//! [`ObservationPlan`]: which points of a program are observed, and what is recorded of each. Pure.

use std::cell::OnceCell;
use std::sync::Arc;
use std::time::Duration;

use iced_x86::Register;

use crate::address::LoadBias;
use crate::error::Refusal;
use crate::error::{Error, FunctionError, ObserveError, ProbeError, Result};
use crate::expression::times::TimeRange;
use crate::expression::{Expression, Parameter, ParameterKind, Scope};
use crate::observe::buckets::Linear;
use crate::observe::fibers::ProcessStacks;
use crate::observe::frame_id::{FrameId, is_called_by_ocaml, is_ocaml_4};
use crate::observe::functions::ObservedFunctions;
use crate::observe::layout::calls::CallsLayout;
use crate::observe::layout::keys::{self, KeysLayout};
use crate::observe::layout::semaphores::ChangedWord;
use crate::observe::layout::shared::{MAX_ARGUMENTS, MAX_PAIRS, SharedLayout, record};
use crate::observe::layout::stack_copies::StackCopies;
use crate::observe::layout::values::{MAX_HISTOGRAMS, ValuesLayout};
use crate::observe::observation::{CallOnce, Observation};
use crate::observe::point::Point;
use crate::observe::role::{
    ArgumentSource, ExitsRole, FilterRole, HistogramRole, IntegerRole, KeyKind, KeyRole, Marks,
    PairEnd, PairFilter, Role, TimedRole, WatchRole,
};
use crate::observe::value_pages::ValuePages;
use crate::patch_plan::site::PatchSite;
use crate::process::Process;
use crate::process::image::Image;
use crate::process::program::{LiveSite, Program};
use crate::process::seccomp::OwnFilters;
use crate::select::{Actions, Selector, choose};
use crate::site::SiteCode;

/// What an observation records in a process.
pub(crate) struct ObservationPlan {
    /// Whether hits in processes that are forked are recorded, too.
    pub(crate) records_forked: bool,
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
    /// What the parts of keys are, if hits are counted, or times distinguished, by keys.
    pub(crate) key_kinds: Vec<KeyKind>,
    /// The names of the probes that are counted by keys, or `START,STOP` of the pairs whose times are distinguished by
    /// keys. Names of functions are numbered after them.
    pub(crate) key_names: Arc<Vec<String>>,
    /// How long pairs and calls last at least that are reported; zero if none are.
    pub(crate) slow_from: Duration,
    /// Whether hits that are recorded at ends of pairs say their key.
    pub(crate) has_pair_keys: bool,
    /// Which times are recorded; `None`: all.
    pub(crate) times: Option<TimeRange>,
    /// Whether times are distinguished by keys, the last of which is the name of the pair or function.
    pub(crate) times_by_key: bool,
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
    /// Whether what tells its events apart is an argument that has one name at all sites of both probes: then different
    /// numbers are those of different events.
    pub(crate) has_named_number: bool,
    /// Whether only times of a range are recorded.
    pub(crate) has_range: bool,
}

/// A point that is observed.
pub(crate) struct PlannedPoint {
    pub(crate) point: Point,
    pub(crate) role: Role,
    pub(crate) of: PointOf,
    /// Which of the places of its function it is: the entry, 0, or an exit.
    pub(crate) part: usize,
    /// The semaphore, or the other word, that is changed while it is observed.
    pub(crate) changed_word: Option<ChangedWord>,
}

/// What a point belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum PointOf {
    /// The site with this index among those of the program.
    Site(usize),
    /// The function with this index among those that are observed.
    Function(usize),
}

impl PlannedPoint {
    /// Returns the index of its function, if it is at one.
    pub(crate) fn function(&self) -> Option<usize> {
        match self.of {
            PointOf::Site(_) => None,
            PointOf::Function(function) => Some(function),
        }
    }

    /// Returns the index of its site, if it is one.
    pub(crate) fn site(&self) -> Option<usize> {
        match self.of {
            PointOf::Site(site) => Some(site),
            PointOf::Function(_) => None,
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
            let role = std::mem::take(&mut roles[site]);
            (!role.is_empty()).then(|| PlannedPoint {
                point: Point::probe_site(placed.address, program.site(site).site.code()),
                role,
                of: PointOf::Site(site),
                part: 0,
                changed_word: None,
            })
        });
        let linear = observation.linear;
        let of_functions = function_points(&functions, histograms.len(), key_names.len(), linear);
        let mut points: Vec<PlannedPoint> = sites.chain(of_functions).collect();
        mark_range(&mut points, times);
        let of_keys = PlannedKeys::of(&points, linear, || {
            let of_functions = functions.with_histogram().count();
            layout_of_values(histograms.len() + of_functions, linear)
        })?;
        let pairs: Vec<PlannedPair> = (0..)
            .zip(observation.all_pairs())
            .map(|(number, (start, stop))| PlannedPair {
                start,
                stop,
                has_named_number: with_named_number.contains(&number),
                has_range: times.is_some(),
            })
            .collect();
        let has_timed = functions.timed_indices().next().is_some();
        let shared = SharedLayout {
            pairs: pairs.len() as u32,
            filters_memory: points.iter().any(|it| it.role.filters_memory()),
            calls: CallsLayout {
                functions: functions.timed_indices().count() as u32,
                of_self: observation.self_times && has_timed,
                by_caller: observation.by_caller && has_timed,
                keeps_arguments: observation.slow_from.is_some() && has_timed,
            },
            values: of_keys.values,
            keys: of_keys.keys,
            pairs_by_key: observation.pair_key.is_some() && !pairs.is_empty(),
            asks_for_threads: observation.asks_for_threads(),
            ..layout_of_records(observation, &points)
        };
        let mut plan = ObservationPlan {
            records_forked: observation.records_forked,
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

    /// Refuses these functions, given by ascending index.
    pub(crate) fn refuse(&mut self, failed: &[(usize, Refusal)]) {
        if failed.is_empty() {
            return;
        }
        Arc::make_mut(&mut self.functions).refuse(failed);
        self.renew_function_points();
    }

    /// Plans another patch for each of these functions, given by ascending index, because the present one is not
    /// possible; refuses those that have no other.
    pub(crate) fn try_next(&mut self, failed: &[(usize, Refusal)]) {
        Arc::make_mut(&mut self.functions).try_next(failed);
        self.renew_function_points();
    }

    /// Patches functions in another way whose exit would overlap the entry of the next one; see
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

    /// Checks that something is left of each function that was asked for by name, and of all together.
    ///
    /// # Errors
    ///
    /// [`FunctionError::NonePossible`] if it is not.
    pub(crate) fn refuse_empty(&self) -> Result<()> {
        let refused = self.functions.why_not();
        if refused.is_empty() {
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
        let PointOf::Function(index) = planned.of else {
            return None;
        };
        let function = self.functions.functions.get(index)?;
        let once = self.functions.calls_once.as_ref();
        once.filter(|once| once.before == function.wanted.address)
    }

    /// Returns how a point of a function is patched, and the load bias of its object; `None` for the site of a probe.
    pub(crate) fn patch_site(&self, planned: &PlannedPoint) -> Option<(&PatchSite, LoadBias)> {
        match planned.of {
            PointOf::Site(_) => None,
            PointOf::Function(function) => self.functions.functions[function].site(planned.part),
        }
    }

    /// Returns whether a point is in a function that is known to be of OCaml.
    pub(crate) fn is_of_ocaml(&self, planned: &PlannedPoint) -> bool {
        match planned.of {
            PointOf::Site(_) => false,
            PointOf::Function(function) => self.functions.functions[function].is_ocaml,
        }
    }

    /// Returns whether pairs or calls are timed.
    pub(crate) fn has_times(&self) -> bool {
        !self.pairs.is_empty() || self.functions.timed_indices().next().is_some()
    }

    /// Returns whether a running process is to share the recorded data with the children that it forks. Starts that wait for
    /// their stop are each process's own.
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

    /// Returns whether expressions are asked of hits that are counted or watched, and may have no answer.
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

/// Marks what is timed if only times of a range are recorded.
fn mark_range(points: &mut [PlannedPoint], times: Option<TimeRange>) {
    for PlannedPoint { role, .. } in points {
        let is_timed = !role.ends.is_empty() || role.timed.is_some();
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

/// Returns the points of functions, whose histograms and names are numbered after so many of probes and pairs.
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
        let number = function
            .timing()
            .and_then(|timing| Some((timed.next()?, timing)));
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
        let (keys, time_keys) = match keys {
            Some(keys) if number.is_some() => (None, Some(Arc::new(keys.with_name()))),
            keys => (keys.map(Arc::new), None),
        };
        let is_counted = number.is_none() && function.watching().is_none() && histogram.is_none();
        let paired = function.paired();
        function.points().map(move |(part, point)| PlannedPoint {
            point,
            role: if let Some(paired) = paired {
                paired.clone()
            } else {
                Role {
                    is_counted,
                    filter: function.filter().cloned(),
                    histogram: histogram.clone(),
                    keys: keys.clone(),
                    time_keys: time_keys.clone(),
                    watched: function
                        .watching()
                        .map(|watching| watching.role(part, is_from_start)),
                    timed: number.map(|(function, timing)| TimedRole {
                        function,
                        stack: timing.stack,
                        is_ocaml: timing.is_ocaml,
                        is_entry: part == 0,
                        is_from_start,
                    }),
                    reported: function
                        .timing()
                        .and_then(|timing| timing.reported.as_ref())
                        .map(|reported| reported.role(0, is_from_start)),
                    exits: function.is_asked_at_exits.then_some(ExitsRole {
                        is_ocaml: function.is_named_ocaml,
                    }),
                    ..Role::default()
                }
            },
            of: PointOf::Function(index),
            part,
            changed_word: function.changed_word.filter(|_| part == 0),
        })
    })
}

/// By what keys hits are counted, or times distinguished.
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
        // Times are not in steps.
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
    let kept_len = kept_arguments.map_or(0, record::len);
    let record_len = most_arguments.map_or(0, record::len).max(2 * kept_len);
    let stacks = if observation.with_stacks && record_len > 0 {
        StackCopies::OF_THREADS
    } else {
        StackCopies::None
    };
    SharedLayout {
        record_len: record_len + stacks.len(),
        has_large_rings: most_arguments > Some(0)
            || kept_arguments.is_some()
            || observation.watches_exits,
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

/// What is recorded at the sites of a program.
struct SiteRoles {
    /// Of each site.
    roles: Vec<Role>,
    histograms: Vec<PlannedHistogram>,
    /// The names of the probes or pairs that keys number.
    key_names: Vec<String>,
    /// The pairs of which [`PlannedPair::has_named_number`] is true.
    with_named_number: Vec<u32>,
}

impl SiteRoles {
    fn of(observation: &Observation, program: &Program) -> Result<SiteRoles> {
        let (given, most) = (observation.all_pairs().len(), MAX_PAIRS as usize);
        if given > most {
            return Err(ObserveError::TooManyPairs { given, most }.into());
        }
        let mut roles = SiteRoles {
            roles: vec![Role::default(); program.site_count()],
            histograms: Vec::new(),
            key_names: Vec::new(),
            with_named_number: Vec::new(),
        };
        roles.add_counted(observation, program)?;
        roles.add_pairs(observation, program)?;
        for (name, site) in selected_by_name(program, &observation.watched)? {
            let role = &mut roles.roles[site];
            role.filter = filter_of(observation, name, program.site(site))?;
            role.watched = Some(WatchRole {
                sample: observation.sample,
                ..record_of(program.site(site))
            });
        }
        Ok(roles)
    }

    /// Adds what is counted, and of what there are histograms.
    fn add_counted(&mut self, observation: &Observation, program: &Program) -> Result<()> {
        for (name, index) in selected_by_name(program, &observation.counted)? {
            let role = &mut self.roles[index];
            let site = program.site(index);
            role.is_counted = observation.histogram.is_none();
            role.filter = filter_of(observation, name, site)?;
            if let Some(keys) = &observation.keys {
                if self.key_names.last().is_none_or(|last| last != name) {
                    self.key_names.push(name.to_owned());
                }
                let parts = keys.parts(&scope_of(name, site));
                role.keys = Some(Arc::new(KeyRole {
                    parts: parts.map_err(ObserveError::Expression)?,
                    arguments: sources_of(site),
                    name: self.key_names.len() as u32 - 1,
                }));
            }
            if let Some(expression) = &observation.histogram {
                let histogram = self.histogram_of(observation, expression, name, site)?;
                self.roles[index].histogram = Some(histogram);
            }
        }
        Ok(())
    }

    /// Returns the histogram of a site, which it shares with those of the same probe whose values are alike.
    fn histogram_of(
        &mut self,
        observation: &Observation,
        expression: &Expression,
        name: &str,
        site: LiveSite<'_>,
    ) -> Result<HistogramRole> {
        let scope = scope_of(name, site);
        let has_keys = observation.keys.is_some();
        let integer = if has_keys {
            expression.integer_beside_keys(&scope)
        } else {
            expression.integer(&scope)
        };
        let integer = integer.map_err(ObserveError::Expression)?;
        let planned = PlannedHistogram {
            name: name.to_owned(),
            is_signed: integer.is_signed(),
        };
        // The sites of a probe follow each other: if it has a histogram already, that is one of the last.
        let known = self.histograms.iter().rposition(|it| *it == planned);
        let number = match known {
            // Each key has its own.
            _ if has_keys => 0,
            Some(known) => known,
            None => {
                self.histograms.push(planned);
                self.histograms.len() - 1
            }
        };
        Ok(HistogramRole {
            number: number as u32,
            integer: Arc::new(IntegerRole {
                integer,
                arguments: sources_of(site),
            }),
            linear: observation.linear,
        })
    }

    /// Adds the starts and stops of pairs.
    fn add_pairs(&mut self, observation: &Observation, program: &Program) -> Result<()> {
        if observation.time_keys.is_some() {
            let pairs = observation.all_pairs().into_iter();
            self.key_names = pairs
                .map(|(start, stop)| format!("{start},{stop}"))
                .collect();
        }
        let (start_filter, _) = observation.asked_of_times()?;
        let is_ocaml_4_once = OnceCell::new();
        let is_ocaml_4 = || *is_ocaml_4_once.get_or_init(|| is_ocaml_4(program));
        let named = NamedNumbers::of(observation, program);
        for (number, (start, stop)) in (0..).zip(&observation.pairs) {
            for (name, end) in [
                (stop, PairEnd::Stop(number)),
                (start, PairEnd::Start(number)),
            ] {
                for index in selected(program, &[Selector::name(name)])? {
                    let (role, site) = (&mut self.roles[index], program.site(index));
                    if role.ends.is_empty() {
                        role.marks = marks(site, named.of_sites[index], is_ocaml_4);
                        role.pair_key = pair_key(observation, name, site)?;
                        let is_reported = observation.slow_from.is_some();
                        role.reported = is_reported.then(|| record_of(site));
                    }
                    if let (Some(keys), PairEnd::Stop(_)) = (&observation.time_keys, end) {
                        let parts = keys.parts_at_stop(&scope_of(name, site));
                        let keys = KeyRole {
                            parts: parts.map_err(ObserveError::Expression)?,
                            arguments: sources_of(site),
                            name: 0,
                        };
                        role.time_keys = Some(Arc::new(keys.with_name()));
                    }
                    match (&start_filter, end) {
                        (Some(expression), PairEnd::Start(_)) => {
                            let filter = filter_role(expression, name, site)?;
                            role.pair_filter = PairFilter::Starts(filter);
                        }
                        (Some(_), PairEnd::Stop(_)) if role.pair_filter == PairFilter::All => {
                            role.pair_filter = PairFilter::Stops;
                        }
                        _ => {}
                    }
                    role.ends.push(end);
                }
            }
        }
        for role in &mut self.roles {
            // A site that both stops and starts a pair stops it first.
            role.ends
                .sort_by_key(|end| matches!(end, PairEnd::Start(_)));
        }
        self.with_named_number = named.pairs;
        Ok(())
    }
}

/// The arguments of one name at both ends of pairs, by which events are told apart.
struct NamedNumbers<'p> {
    /// The name at each site of the program.
    of_sites: Vec<Option<&'p str>>,
    /// The numbers of the pairs that have such an argument.
    pairs: Vec<u32>,
}

impl<'p> NamedNumbers<'p> {
    fn of(observation: &Observation, program: &'p Program) -> NamedNumbers<'p> {
        let mut named = NamedNumbers {
            of_sites: vec![None; program.site_count()],
            pairs: Vec::new(),
        };
        for (number, (start, stop)) in (0..).zip(&observation.pairs) {
            // From a hit to the next of the same probe, it is another event.
            if start == stop {
                continue;
            }
            // That a probe is missing is said when the ends are added.
            let sites = selected(program, &[Selector::name(start), Selector::name(stop)]);
            let sites = sites.unwrap_or_default();
            let Some(name) = name_in_common(program, &sites) else {
                continue;
            };
            let own = |site: &usize| named.of_sites[*site].is_none_or(|own| own == name);
            // A site has one mark, also if it is an end of several pairs.
            if sites.iter().all(own) {
                for site in sites {
                    named.of_sites[site] = Some(name);
                }
                named.pairs.push(number);
            }
        }
        named
    }
}

/// Returns the first name that each of these sites has for an argument that it can be marked by.
fn name_in_common<'p>(program: &'p Program, sites: &[usize]) -> Option<&'p str> {
    let (first, others) = sites.split_first()?;
    let mut names = program.site(*first).site.argument_names();
    names.find(|name| {
        let has_it = |site: &usize| marking_register(program.site(*site), Some(name)).is_some();
        !name.is_empty() && has_it(first) && others.iter().all(has_it)
    })
}

/// Returns the key by which stops find their starts, as a site has it that is an end of a pair.
fn pair_key(
    observation: &Observation,
    name: &str,
    site: LiveSite<'_>,
) -> Result<Option<Arc<KeyRole>>> {
    let Some(keys) = &observation.pair_key else {
        return Ok(None);
    };
    let scope = scope_of(name, site);
    let parts = if observation.has_pair_keys {
        keys.parts_of_recorded_pair(&scope)
    } else {
        keys.parts_of_pair(&scope)
    };
    Ok(Some(Arc::new(KeyRole {
        parts: parts.map_err(ObserveError::Expression)?,
        arguments: sources_of(site),
        name: 0,
    })))
}

/// Returns which hits of a site are counted, or recorded; `None`: all.
fn filter_of(
    observation: &Observation,
    name: &str,
    site: LiveSite<'_>,
) -> Result<Option<Arc<FilterRole>>> {
    let filter = observation.filter.as_ref();
    let filter = filter.map(|expression| filter_role(expression, name, site));
    filter.transpose()
}

fn filter_role(expression: &Expression, name: &str, site: LiveSite<'_>) -> Result<Arc<FilterRole>> {
    let filter = expression.filter(&scope_of(name, site));
    Ok(Arc::new(FilterRole {
        filter: filter.map_err(ObserveError::Expression)?,
        arguments: sources_of(site),
    }))
}

/// Returns what expressions can ask of the hits of a site.
fn scope_of(name: &str, site: LiveSite<'_>) -> Scope {
    let mut names = site.site.argument_names();
    let parameters = site.site.arguments().map(|argument| Parameter {
        name: names.next().map(str::to_owned),
        kind: match (&argument, ArgumentSource::of(argument.as_ref())) {
            (None, _) | (_, ArgumentSource::Unknown) => ParameterKind::Unread,
            (_, ArgumentSource::Vector(_)) => ParameterKind::Float,
            (Some(argument), _) if argument.size < 8 => ParameterKind::Number {
                bits: 8 * argument.size,
                signed: argument.signed,
            },
            _ => ParameterKind::Value,
        },
    });
    Scope::of(format!("probe {name}"), name, parameters.collect())
}

/// Returns what is recorded of each hit of a site.
fn record_of(site: LiveSite<'_>) -> WatchRole {
    let mut arguments = sources_of(site);
    arguments.truncate(MAX_ARGUMENTS);
    WatchRole {
        arguments,
        is_ocaml: is_called_by_ocaml(site),
        ..WatchRole::default()
    }
}

/// Returns where the arguments of a site are.
fn sources_of(site: LiveSite<'_>) -> Vec<ArgumentSource> {
    let arguments = site.site.arguments();
    arguments
        .map(|it| ArgumentSource::of(it.as_ref()))
        .collect()
}

/// Returns the register of the argument of this name, or of the first one, if it may distinguish events.
fn marking_register(site: LiveSite<'_>, name: Option<&str>) -> Option<Register> {
    let index = name.map_or(Some(0), |name| {
        site.site.argument_names().position(|it| it == name)
    });
    let argument = site.site.arguments().nth(index?).flatten()?;
    ArgumentSource::of(Some(&argument)).register_of_number(argument.size)
}

/// Returns the marks of a site that is an end of a pair; its events are told apart by the argument of this name, or by
/// the first one.
fn marks(site: LiveSite<'_>, name: Option<&str>, is_ocaml_4: impl Fn() -> bool) -> Marks {
    Marks {
        argument: marking_register(site, name),
        is_word: false,
        frame: FrameId::of(site, is_ocaml_4),
    }
}

/// Returns the sites of the probes that are selected.
fn selected(program: &Program, selectors: &[Selector]) -> Result<Vec<usize>> {
    let sites = selected_by_name(program, selectors)?.into_iter();
    Ok(sites.map(|(_, site)| site).collect())
}

/// Returns the sites of the probes that are selected, each with the name of its probe.
fn selected_by_name<'p>(
    program: &'p Program,
    selectors: &[Selector],
) -> Result<Vec<(&'p str, usize)>> {
    // The action does not matter, only the selection.
    let actions = selectors.iter().cloned();
    let choices = choose(program, &actions.fold(Actions::new(), Actions::enable))?;
    let probes = choices.iter().map(|choice| program.by_id(choice.probe));
    let sites = probes.flat_map(|probe| probe.sites().map(move |site| (probe.name(), site)));
    Ok(sites.collect())
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU64;

    use test_support::{Talker, fixture};

    use super::*;
    use crate::address::{FileAddr, LiveAddr};
    use crate::error::ErrorKind;
    use crate::expression::{Answer, Hit, Keys};
    use crate::observe::layout::semaphores::WordChange;
    use crate::select::function::FunctionSelector;
    use crate::testing::{ProgramSpec, loaded_twice, program_with_arguments};

    const AGAIN: LoadBias = LoadBias(0x1000_0000);

    /// Three probes, each with a site in each of two objects.
    fn program() -> Arc<Program> {
        let seven = ["8@%rdi"; 7].join(" ");
        let probes = [("a", "8@%rdi"), ("b", "8@%rax 4@8(%rsp)"), ("c", &seven)];
        Arc::new(loaded_twice(&program_with_arguments(&probes), AGAIN))
    }

    fn plan(observation: &Observation) -> ObservationPlan {
        ObservationPlan::of(observation, program(), Arc::default()).unwrap()
    }

    #[test]
    fn points_are_the_observed_sites_by_address() {
        let observation = Observation::new()
            .count(Selector::name("a"))
            .time("a", "b")
            .time("b", "b")
            .watch(Selector::name("b"));
        let plan = plan(&observation);
        let marks = |register| Marks {
            argument: Some(register),
            is_word: false,
            frame: FrameId::Stack,
        };
        let a = Role {
            is_counted: true,
            ends: vec![PairEnd::Start(0)],
            marks: marks(Register::RDI),
            ..Role::default()
        };
        let b = |point| Role {
            ends: vec![PairEnd::Stop(0), PairEnd::Stop(1), PairEnd::Start(1)],
            marks: marks(Register::RAX),
            watched: Some(WatchRole {
                point,
                function: None,
                is_ocaml: false,
                sample: None,
                formats: Vec::new(),
                result_format: Default::default(),
                arguments: vec![
                    ArgumentSource::Register(Register::RAX),
                    ArgumentSource::on_stack(8),
                ],
            }),
            ..Role::default()
        };
        let expected = [
            (ProgramSpec::TEXT, a.clone()),
            (ProgramSpec::TEXT + 8, b(1)),
            (ProgramSpec::TEXT + AGAIN.0, a),
            (ProgramSpec::TEXT + 8 + AGAIN.0, b(3)),
        ];
        assert_eq!(plan.points.len(), expected.len());
        for (planned, (address, role)) in plan.points.iter().zip(expected) {
            assert_eq!((planned.point.address.0, &planned.role), (address, &role));
            assert_eq!(
                plan.program.site(planned.site().unwrap()).address().0,
                address
            );
        }
        let record_len = record::len(2);
        assert_eq!(
            plan.shared,
            SharedLayout {
                pairs: 2,
                record_len,
                has_large_rings: true,
                ..SharedLayout::default()
            }
        );
        let pair = PlannedPair {
            start: "a".to_owned(),
            stop: "b".to_owned(),
            ..PlannedPair::default()
        };
        assert_eq!(plan.pairs[0], pair);
    }

    #[test]
    fn numbers_are_four_bytes_or_more_in_registers() {
        for (arguments, expected) in [
            ("8@%r12 8@%rax", Some(Register::R12)),
            ("4@%eax", Some(Register::RAX)),
            ("-8@%rdi", Some(Register::RDI)),
            ("2@%ax", None),
            ("8@8(%rsp) 8@%rax", None),
            ("8@%xmm1", None),
            ("", None),
        ] {
            let program = Arc::new(program_with_arguments(&[("a", arguments), ("b", "")]));
            let observation = Observation::new().time("a", "b");
            let plan = ObservationPlan::of(&observation, program, Arc::default()).unwrap();
            assert_eq!(plan.points[0].role.marks.argument, expected, "{arguments}");
        }
    }

    #[test]
    fn counting_needs_no_time_and_no_record() {
        let counted = plan(&Observation::new().count(Selector::All));
        assert_eq!(counted.points.len(), 6);
        assert!(!counted.is_timed() && counted.shared.is_empty());
        assert!(plan(&Observation::new().time("a", "c")).is_timed());
        assert!(plan(&Observation::new().watch(Selector::name("a"))).is_timed());
    }

    #[test]
    fn at_most_six_arguments_are_recorded() {
        let plan = plan(&Observation::new().watch(Selector::name("c")));
        let watched = plan.points[0].role.watched.as_ref().unwrap();
        assert_eq!(watched.arguments.len(), MAX_ARGUMENTS);
        assert_eq!(plan.shared.record_len, record::len(MAX_ARGUMENTS));
    }

    #[test]
    fn more_pairs_than_possible_are_refused() {
        let pairs = |many| (0..many).fold(Observation::new(), |all, _| all.time("a", "b"));
        assert_eq!(plan(&pairs(64)).shared.pairs, 64);
        let refusal = ObservationPlan::of(&pairs(65), program(), Arc::default())
            .err()
            .unwrap();
        assert!(matches!(
            refusal.kind(),
            ErrorKind::Observe(ObserveError::TooManyPairs {
                given: 65,
                most: 64
            })
        ));
    }

    #[test]
    fn unexpected_code_is_reported_with_its_probe() {
        let plan = plan(&Observation::new().count(Selector::All));
        let found = SiteCode([0xcc; 6]);
        let point = &plan.points[4];
        let ProbeError::UnexpectedSite {
            name,
            address,
            found: reported,
            expected,
        } = plan.unexpected(point.site().unwrap(), found)
        else {
            panic!("another error");
        };
        assert_eq!((&name[..], address), ("b", point.point.address));
        assert_eq!((reported, expected.operand()), (found, [1, 0, 0, 0]));
    }

    /// Returns the plan of an observation of the functions of a program that is running.
    fn plan_of_functions(observation: &Observation) -> ObservationPlan {
        let target = Talker::start(&fixture("calls.pie"));
        let functions = ObservedFunctions::find(target.pid(), observation).unwrap();
        ObservationPlan::of(observation, program(), Arc::new(functions)).unwrap()
    }

    fn function(name: &str) -> FunctionSelector {
        FunctionSelector::Glob(name.parse().unwrap())
    }

    #[test]
    fn functions_are_counted_or_asked_for_more() {
        let counted = plan_of_functions(&Observation::new().count_functions(function("leaf")));
        let role = &counted.points[0].role;
        assert!(role.is_counted && role.watched.is_none() && role.timed.is_none());
        assert!(counted.shared.is_empty());
        let watching = Observation::new().watch_functions(function("leaf"));
        let watched = plan_of_functions(&watching);
        let role = &watched.points[0].role;
        assert!(!role.is_counted && role.watched.is_some() && role.timed.is_none());
        assert!(watched.shared.record_len > 0);
        assert_eq!(watched.shared.stacks, StackCopies::None);
        let with_stacks = plan_of_functions(&watching.with_stacks());
        assert_eq!(with_stacks.shared.stacks, StackCopies::OF_THREADS);
        let longer = watched.shared.record_len + StackCopies::OF_THREADS.len();
        assert_eq!(with_stacks.shared.record_len, longer);
        let expression = "arg0".parse::<Expression>().unwrap();
        let counting = Observation::new().count_functions(function("leaf"));
        let in_histogram = plan_of_functions(&counting.histogram_of(expression));
        let role = &in_histogram.points[0].role;
        assert!(!role.is_counted && role.histogram.is_some() && role.watched.is_none());
        assert_eq!(in_histogram.shared.values.histograms, 1);
    }

    #[test]
    fn timed_functions_keep_what_is_asked() {
        let timing = || Observation::new().time_functions(function("outer"));
        let calls = |observation: &Observation| {
            let plan = plan_of_functions(observation);
            assert!(plan.points.iter().all(|it| !it.role.is_counted));
            assert!(plan.points.len() > 1, "an entry and exits");
            let entries = plan.points.iter().filter_map(|it| it.role.timed.as_ref());
            assert_eq!(entries.filter(|it| it.is_entry).count(), 1);
            let calls = plan.shared.calls;
            assert_eq!(calls.functions, 1);
            [calls.of_self, calls.by_caller, calls.keeps_arguments]
        };
        assert_eq!(calls(&timing()), [false, false, false]);
        assert_eq!(calls(&timing().self_times()), [true, false, false]);
        assert_eq!(calls(&timing().by_caller()), [false, true, false]);
        let slow = timing().report_slow(Duration::from_millis(1));
        assert_eq!(calls(&slow), [false, false, true]);
        // Of pairs alone, there are no calls.
        let pairs = Observation::new().time("a", "b").self_times().by_caller();
        let plan = plan(&pairs.report_slow(Duration::from_millis(1)));
        assert_eq!(plan.shared.calls, CallsLayout::default());
    }

    /// A hit with these words as arguments.
    struct Words([u64; 5]);

    impl Hit for Words {
        fn argument(&self, index: usize) -> Option<u64> {
            self.0.get(index).copied()
        }

        fn word_at(&self, _: u64) -> Option<u64> {
            None
        }
    }

    fn expression(text: &str) -> Expression {
        text.parse().unwrap()
    }

    fn keys(text: &str) -> Keys {
        text.parse().unwrap()
    }

    /// Returns the plan of a program with these probes and arguments in their notes.
    fn plan_with(observation: &Observation, probes: &[(&str, &str)]) -> Result<ObservationPlan> {
        let program = Arc::new(program_with_arguments(probes));
        ObservationPlan::of(observation, program, Arc::default())
    }

    #[test]
    fn expressions_know_what_notes_say_of_arguments() {
        let probes = [("a", "8@%rdi 4@%esi -2@%dx 8@%xmm1 8@$5")];
        let words = Words([
            7 << 1 | 1,
            0xdead_beef_8000_1007,
            0xfffe,
            2.5_f64.to_bits(),
            5,
        ]);
        for (text, expected) in [
            ("arg0 == 7", Answer::True),
            ("arg1 == 0x80001007", Answer::True),
            ("arg2 == -2", Answer::True),
            ("arg3 > 2.4 && arg3 < 2.6", Answer::True),
            ("arg0 == 15 || arg1 < 0 || arg2 > 0", Answer::False),
        ] {
            let counted = Observation::new().count(Selector::name("a"));
            let plan = plan_with(&counted.only_where(expression(text)), &probes).unwrap();
            let filter = plan.points[0].role.filter.as_ref().unwrap();
            assert_eq!(filter.filter.answer(&words), expected, "{text}");
        }
        // They are of other kinds, or not known.
        for text in ["arg1 > 2.5", "arg4 == 5", "arg5 == 5"] {
            let counted = Observation::new().count(Selector::name("a"));
            let refusal = plan_with(&counted.only_where(expression(text)), &probes).err();
            let refusal = refusal.expect(text);
            let is_it = matches!(
                refusal.kind(),
                ErrorKind::Observe(ObserveError::Expression(_))
            );
            assert!(is_it, "{text} {refusal:?}");
        }
    }

    #[test]
    fn sites_of_a_probe_share_its_histogram() {
        let counted = || Observation::new().count(Selector::All);
        let numbers = |plan: &ObservationPlan| -> Vec<u32> {
            let roles = plan.points.iter().map(|it| &it.role);
            roles
                .map(|it| it.histogram.as_ref().unwrap().number)
                .collect()
        };
        let by_name = plan(&counted().histogram_of(expression("arg0")));
        assert_eq!(numbers(&by_name), [0, 1, 2, 0, 1, 2]);
        assert_eq!(by_name.shared.values.histograms, 3);
        let names: Vec<&str> = by_name.histograms.iter().map(|it| &*it.name).collect();
        assert_eq!(names, ["a", "b", "c"]);
        assert!(by_name.is_filtered() && !by_name.counts_by_key());
        assert!(by_name.has_expressions() && !plan(&counted()).has_expressions());
        // Of keys, each has one.
        let by_key = plan(&counted().histogram_of(expression("arg0")).by(keys("tid")));
        assert_eq!(numbers(&by_key), [0; 6]);
        assert!(by_key.histograms.is_empty() && !by_key.counts_by_key());
        assert_eq!(by_key.shared.values.histograms, keys::histograms::ALL);
        assert!(by_key.shared.keys.has_histograms);
        let linear = plan(
            &counted()
                .histogram_of(expression("arg0"))
                .linear("0,9,3".parse().unwrap()),
        );
        assert_eq!(linear.shared.values.steps, 3);
        let linear_by_key = counted().histogram_of(expression("arg0")).by(keys("tid"));
        let linear_by_key = plan(&linear_by_key.linear("0,9,3".parse().unwrap()));
        assert_eq!(linear_by_key.shared.values.steps, 3);
        // Times are not in steps.
        let times = Observation::new().time("a", "b").time_by(keys("tid"));
        let times = plan(&times.linear("0,9,3".parse().unwrap()));
        assert!(times.shared.keys.has_histograms && times.shared.values.steps == 0);
    }

    #[test]
    fn forked_processes_share_what_is_not_timed() {
        let shares = |observation: Observation| {
            assert!(!plan_of_functions(&observation).shares_data());
            let forked = plan_of_functions(&observation.record_forked());
            (forked.has_times(), forked.shares_data())
        };
        let observation = Observation::new;
        let counted = observation().count(Selector::All);
        let counted = counted.count_functions(function("leaf"));
        assert_eq!(shares(counted), (false, true));
        assert_eq!(shares(observation().time("a", "b")), (true, false));
        let timed = observation().time_functions(function("outer"));
        assert_eq!(shares(timed), (true, false));
    }

    #[test]
    fn nothing_is_laid_out_that_is_not_asked() {
        let counted = || Observation::new().count(Selector::All);
        let linear = plan(&counted().linear("0,9,3".parse().unwrap()));
        assert!(linear.shared.is_empty() && linear.shared.values.steps == 0);
        assert_eq!(
            plan(&counted().with_stacks()).shared.stacks,
            StackCopies::None
        );
        let every = NonZeroU64::new(7);
        let watching = Observation::new().watch(Selector::All);
        let sample = |plan: ObservationPlan| plan.points[0].role.watched.as_ref().unwrap().sample;
        assert!(!plan(&watching).is_sampled() && !plan(&counted()).is_filtered());
        assert_eq!(sample(plan(&watching)), None);
        let sampled = watching.sample(every.unwrap());
        assert!(plan(&sampled).is_sampled());
        assert_eq!(sample(plan(&sampled)), every);
    }

    #[test]
    fn too_many_histograms_are_refused() {
        let of = |many: usize| {
            let names: Vec<String> = (0..many).map(|it| format!("p{it}")).collect();
            let probes: Vec<(&str, &str)> = names.iter().map(|it| (&**it, "8@%rdi")).collect();
            let counted = Observation::new().count(Selector::All);
            plan_with(&counted.histogram_of(expression("arg0")), &probes)
        };
        let most = MAX_HISTOGRAMS as usize;
        assert_eq!(of(most).unwrap().shared.values.histograms, MAX_HISTOGRAMS);
        let refusal = of(most + 1).err().unwrap();
        let kind = refusal.kind();
        let too_many = ObserveError::TooManyHistograms {
            given: most + 1,
            most,
        };
        assert_eq!(
            format!("{kind:?}"),
            format!("{:?}", ErrorKind::Observe(too_many))
        );
    }

    #[test]
    fn names_are_numbered_by_probe() {
        let counted = Observation::new().count(Selector::All).by(keys("probe"));
        let plan = plan(&counted);
        let number = |it: &PlannedPoint| it.role.keys.as_ref().unwrap().name;
        let numbers: Vec<u32> = plan.points.iter().map(number).collect();
        assert_eq!(numbers, [0, 1, 2, 0, 1, 2]);
        let format = plan.key_format();
        let names: Vec<Option<&str>> = (0..4).map(|it| format.name(it)).collect();
        assert_eq!(names, [Some("a"), Some("b"), Some("c"), None]);
        assert!(plan.counts_by_key() && plan.key_kinds == [KeyKind::Probe]);
        assert!(!plan_of_code(&Observation::new()).counts_by_key());
        // Those of functions follow.
        let mut functions = plan_of_code(&counted);
        functions.key_names = plan.key_names;
        let last = functions.functions.functions[1].wanted.name.clone();
        let format = functions.key_format();
        assert_eq!(format.name(4), Some(&*last));
        assert_eq!(format.name(6), None);
    }

    #[test]
    fn starts_are_filtered_and_stops_follow() {
        let filters = |observation: Observation| {
            let filtered = observation.only_starts_where(expression("arg0 == 1"));
            let plan = plan(&filtered);
            plan.points[..3]
                .iter()
                .map(|it| match it.role.pair_filter {
                    PairFilter::All => "all",
                    PairFilter::Starts(_) => "starts",
                    PairFilter::Stops => "stops",
                })
                .collect::<Vec<_>>()
        };
        let one_pair = Observation::new().time("a", "b");
        let with_c = one_pair.clone().count(Selector::name("c"));
        assert_eq!(filters(with_c), ["starts", "stops", "all"]);
        // One that both stops and starts, in either order.
        let chain = one_pair.clone().time("b", "c");
        assert_eq!(filters(chain), ["starts", "starts", "stops"]);
        let chain = Observation::new().time("b", "c").time("a", "b");
        assert_eq!(filters(chain), ["starts", "starts", "stops"]);
    }

    #[test]
    fn range_of_times_is_of_what_is_timed() {
        let timed = Observation::new().time("a", "b").count(Selector::name("c"));
        let in_range = |plan: &ObservationPlan| -> Vec<bool> {
            plan.points[..3]
                .iter()
                .map(|it| it.role.is_in_range)
                .collect()
        };
        assert_eq!(in_range(&plan(&timed)), [false; 3]);
        let plan = plan(&timed.only_starts_where(expression("elapsed > 1ms")));
        assert_eq!(in_range(&plan), [true, true, false]);
        assert!(plan.times.is_some());
        let timed = Observation::new().time_functions(function("outer"));
        let mut of_functions =
            plan_of_functions(&timed.only_starts_where(expression("elapsed > 1ms")));
        assert!(of_functions.points.iter().all(|it| it.role.is_in_range));
        of_functions.renew_function_points();
        assert!(of_functions.points.iter().all(|it| it.role.is_in_range));
    }

    #[test]
    fn slow_pairs_keep_arguments_of_both_ends() {
        let timed = Observation::new().time("a", "b");
        assert_eq!(plan(&timed).shared.record_len, 0);
        let slow = plan(&timed.report_slow(Duration::from_millis(1)));
        // Probe b has two arguments.
        assert_eq!(slow.shared.kept_len, record::len(2));
        assert_eq!(slow.shared.record_len, 2 * record::len(2));
        assert!(slow.shared.has_large_rings && slow.slow_from == Duration::from_millis(1));
        let reported = |it: &PlannedPoint| it.role.reported.as_ref().map(|it| it.arguments.len());
        assert_eq!(reported(&slow.points[0]), Some(1));
        assert_eq!(reported(&slow.points[1]), Some(2));
    }

    #[test]
    fn rings_are_large_if_more_is_recorded() {
        let watching = Observation::new().watch(Selector::name("a"));
        assert!(plan(&watching).shared.has_large_rings);
        let bare = plan_with(&watching, &[("a", "")]).unwrap();
        assert!(bare.shared.record_len > 0 && !bare.shared.has_large_rings);
        let exits = plan_with(&watching.watch_exits(), &[("a", "")]).unwrap();
        assert!(exits.shared.has_large_rings);
    }

    #[test]
    fn pairs_with_keys_are_matched_by_them() {
        let matched = Observation::new().match_by(keys("arg0"));
        assert!(!plan(&matched).shared.pairs_by_key);
        let pairs = plan(&matched.clone().time("a", "b"));
        assert!(pairs.shared.pairs_by_key && pairs.points[0].role.pair_key.is_some());
        assert!(!plan(&Observation::new().time("a", "b")).shared.pairs_by_key);
        let by_key = plan(&Observation::new().time("a", "b").time_by(keys("tid")));
        assert!(by_key.times_by_key && *by_key.key_names == ["a,b"]);
        let keyed = |it: &PlannedPoint| it.role.time_keys.is_some();
        assert!(!keyed(&by_key.points[0]) && keyed(&by_key.points[1]));
    }

    #[test]
    fn results_of_some_calls_only_are_refused() {
        let watching = Observation::new().watch_functions(function("leaf"));
        let some = |observation: Observation| {
            let every = NonZeroU64::new(2).unwrap();
            let refusal =
                ObservationPlan::of(&observation.sample(every), program(), Arc::default());
            refusal.is_err()
        };
        assert!(!some(watching.clone()));
        assert!(some(watching.clone().watch_results()) && some(watching.watch_exits()));
    }

    /// sub $8,%rsp; call; add $8,%rsp; ret: the patch of its entry is a punned jump or, if that is not possible, the call is moved.
    const WITH_CALL: &[u8] = b"\x48\x83\xec\x08\xe8\0\0\0\0\x48\x83\xc4\x08\xc3";
    /// mov $1,%eax; ret
    const PLAIN: &[u8] = b"\xb8\x01\0\0\0\xc3";

    /// Returns a plan with two functions of `PLAIN` and one of `WITH_CALL` between them, besides probes.
    fn plan_of_code(observation: &Observation) -> ObservationPlan {
        let codes = [PLAIN, WITH_CALL, PLAIN];
        let codes = (0..)
            .zip(codes)
            .map(|(index, code)| (FileAddr(0x60_0000 + 0x100 * index), code));
        let functions = ObservedFunctions::of_code(&codes.collect::<Vec<_>>(), LoadBias::NONE);
        ObservationPlan::of(observation, program(), Arc::new(functions)).unwrap()
    }

    fn function_points_of(plan: &ObservationPlan) -> Vec<(u64, usize)> {
        let points = plan.points.iter().filter(|it| it.site().is_none());
        let len = |it: &PlannedPoint| plan.patch_site(it).unwrap().0.displaced().len();
        points.map(|it| (it.point.address.0, len(it))).collect()
    }

    #[test]
    fn refused_functions_have_no_points() {
        let refusal = Refusal::ChangedCode;
        let counted = Observation::new().count(Selector::name("a"));
        let mut plan = plan_of_code(&counted);
        let all = [(0x60_0000, 5), (0x60_0100, 4), (0x60_0200, 5)];
        assert_eq!(function_points_of(&plan), all);
        plan.refuse(&[]);
        assert_eq!(function_points_of(&plan), all);
        // Another patch of the second one.
        plan.try_next(&[(1, refusal.clone())]);
        assert_eq!(function_points_of(&plan), [all[0], (0x60_0100, 9), all[2]]);
        assert!(plan.functions.refused.is_empty());
        plan.try_next(&[(1, refusal.clone())]);
        assert_eq!(function_points_of(&plan), [all[0], all[2]]);
        assert_eq!(plan.functions.refused.len(), 1);
        // Of those that can be patched in another way, too.
        let mut plan = plan_of_code(&counted);
        plan.refuse(&[(0, refusal.clone()), (1, refusal.clone())]);
        assert_eq!(function_points_of(&plan), [all[2]]);
        assert!(plan.refuse_empty().is_ok());
        plan.refuse(&[(0, refusal)]);
        // The sites are still there, by address.
        assert_eq!(plan.points.len(), 2);
        assert!(plan.points.is_sorted_by_key(|it| it.point.address));
        let empty = plan.refuse_empty().err().unwrap();
        let ErrorKind::Function(FunctionError::NonePossible { refused, .. }) = empty.kind() else {
            panic!("{empty:?}");
        };
        assert_eq!(refused.len(), 3);
    }

    #[test]
    fn one_function_is_called_before() {
        let mut plan = plan_of_code(&Observation::new().count(Selector::name("a")));
        let functions = Arc::make_mut(&mut plan.functions);
        let before = functions.functions[1].wanted.address;
        functions.calls_once = Some(CallOnce {
            before,
            callee: LiveAddr(0x1000),
            ret: LiveAddr(0x2000),
            pid: 1,
            word: ChangedWord {
                at: LiveAddr(0x3000),
                change: WordChange::Set,
            },
        });
        let called = |it: &&PlannedPoint| plan.calls_once_at(it).is_some();
        let called: Vec<LiveAddr> = plan
            .points
            .iter()
            .filter(called)
            .map(|it| it.point.address)
            .collect();
        assert_eq!(called, [before]);
    }

    #[test]
    fn kernel_is_asked_about_words_of_c() {
        let asks = |observation: &Observation| plan_of_functions(observation).asks_kernel();
        let watching = Observation::new().watch_functions(function("leaf"));
        assert!(asks(&watching) && plan_of_functions(&watching).watches_functions());
        let counted = Observation::new().count_functions(function("leaf"));
        assert!(!asks(&counted) && !plan_of_functions(&counted).watches_functions());
        let counted = Observation::new().count_functions(function("fixture_command"));
        assert!(asks(&counted.only_where(expression("str(arg0) == \"x\""))));
        let of_probes = plan(&Observation::new().watch(Selector::name("a")));
        assert!(!of_probes.asks_kernel() && !of_probes.watches_functions());
    }

    #[test]
    fn ocaml_functions_are_known_by_name_and_runtime() {
        let target = Talker::start(&test_support::program("service"));
        let plan = |selector: &str| {
            let counted = Observation::new().count_functions(function(selector));
            let functions = ObservedFunctions::find(target.pid(), &counted).unwrap();
            let counted = counted.count(Selector::name("a"));
            ObservationPlan::of(&counted, program(), Arc::new(functions)).unwrap()
        };
        let is_ocaml = |selector| {
            let plan = plan(selector);
            let [of_sites, of_functions] = [true, false].map(|is_site| {
                let points = plan
                    .points
                    .iter()
                    .filter(|it| it.site().is_some() == is_site);
                points.map(|it| plan.is_of_ocaml(it)).collect::<Vec<bool>>()
            });
            assert!(!of_sites.is_empty() && !of_sites.contains(&true));
            of_functions
        };
        assert_eq!(is_ocaml("caml_alloc_string"), [false]);
        assert_eq!(is_ocaml("Stdlib.failwith"), [true]);
    }

    #[test]
    fn sites_called_by_ocaml_are_known() {
        let target = Talker::start(&test_support::program("service"));
        let process = Process::open(target.pid()).unwrap();
        let image = Image::of(&process, Arc::default()).unwrap();
        let watching = Observation::new().watch(Selector::All);
        let of_ocaml = ObservationPlan::of(&watching, image.program, Arc::default()).unwrap();
        let watched = |plan: &ObservationPlan| -> Vec<bool> {
            let watched = plan.points.iter().filter_map(|it| it.role.watched.as_ref());
            watched.map(|it| it.is_ocaml).collect()
        };
        let are_called = watched(&of_ocaml);
        assert!(!are_called.is_empty() && !are_called.contains(&false));
        assert!(!watched(&plan(&watching)).contains(&true));
    }

    #[test]
    fn stacks_and_pages_are_those_of_runtimes() {
        let target = Talker::start(&test_support::program("service"));
        let process = Process::open(target.pid()).unwrap();
        let image = Image::of(&process, Arc::default()).unwrap();
        let found = |observation: &Observation| {
            let program = image.program.clone();
            let mut plan = ObservationPlan::of(observation, program, Arc::default()).unwrap();
            plan.find_values_and_stacks(&process, &image);
            (plan.shared.stacks, plan.shared.value_pages)
        };
        let objects = image.program.objects().iter();
        let pages = ValuePages::of(objects.map(|object| (&*object.elf, object.bias)));
        let counted = Observation::new().count(Selector::All);
        assert_eq!(found(&counted), (StackCopies::None, ValuePages::default()));
        let watching = Observation::new().watch(Selector::All);
        assert_eq!(found(&watching), (StackCopies::None, pages));
        let (stacks, of_stacks) = found(&watching.with_stacks());
        assert!(stacks.may_ask_kernel() && of_stacks == pages);
    }
}
