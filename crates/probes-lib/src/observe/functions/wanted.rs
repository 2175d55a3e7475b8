//! What an observation wants of each place in a function, and what is known of the place.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use crate::address::{LiveAddr, LoadBias};
use crate::elf::mangling::Language;
use crate::error::{ObserveError, Refusal, Result};
use crate::expression::{BadExpression, Expression, Keys, Scope};
use crate::functions::{FunctionObject, FunctionPlace};
use crate::observe::functions::fibers::{self, ProcessStacks};
use crate::observe::functions::watching::{KnownArguments, Watching, marking_register};
use crate::observe::observation::Observation;
use crate::observe::role::{
    ArgumentSource, FilterRole, IntegerRole, KeyRole, Marks, PairEnd, PairFilter, Role, StackKind,
};

/// Tells a place from others of the process.
#[derive(PartialEq, Eq, Hash)]
pub(super) struct PlaceKey {
    object: *const FunctionObject,
    function: Option<LiveAddr>,
    offset: u64,
    is_probe_at_entry: bool,
}

impl PlaceKey {
    pub(super) fn of(place: &FunctionPlace<'_>) -> PlaceKey {
        PlaceKey {
            object: place.function.object,
            function: place.function.address(),
            offset: place.offset,
            is_probe_at_entry: place.is_probe_at_entry(),
        }
    }
}

pub(super) type EndsByPlace = HashMap<PlaceKey, Vec<PairEnd>>;

/// The places that are not counted.
pub(super) struct PlaceKinds {
    pub(super) timed: HashSet<PlaceKey>,
    pub(super) watched: HashSet<PlaceKey>,
    /// Those that were not selected, and free the stacks of fibers.
    pub(super) freed_stacks: HashSet<PlaceKey>,
    /// Those that are ends of pairs.
    pub(super) ends: EndsByPlace,
}

/// What is wanted of a function.
#[derive(Clone, Copy)]
pub(super) enum Wanted<'w> {
    /// With questions: only some calls, by keys, or in a histogram.
    Counted(Option<&'w CallExpressions<'w>>),
    /// With questions, only some calls; with words, slow calls are reported.
    Timed(Option<&'w CallExpressions<'w>>, Option<&'w KnownArguments>),
    /// With questions, only some calls.
    Watched(&'w KnownArguments, Option<&'w CallExpressions<'w>>),
    /// Nothing: it is called, and one of its instructions is executed, to switch events on.
    NotObserved,
    /// Not its hits: it is patched because it frees the stacks of fibers.
    FreedStacks,
    /// These ends of pairs.
    Paired(&'w KnownArguments, &'w [PairEnd], &'w Observation),
}

/// Returns what is recorded at a site of a USDT probe that is these ends of pairs. `scope` is what expressions can ask
/// of the site, and `arguments` is where its arguments are.
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

/// Returns whether the arguments are asked for at an end of pairs.
pub(super) fn asks_at_end(role: &Role) -> bool {
    role.pair_key.is_some()
        || role.time_keys.is_some()
        || role
            .reported
            .as_ref()
            .is_some_and(|it| !it.arguments.is_empty())
        || matches!(role.pair_filter, PairFilter::Starts(_))
}

impl<'w> Wanted<'w> {
    fn questions(self) -> Option<&'w CallExpressions<'w>> {
        match self {
            Wanted::Counted(questions)
            | Wanted::Timed(questions, _)
            | Wanted::Watched(_, questions) => questions,
            Wanted::Paired(..) | Wanted::NotObserved | Wanted::FreedStacks => None,
        }
    }
}

/// What an observation asks of the places of each kind.
pub(super) struct ExpressionsByKind<'w> {
    observation: &'w Observation,
    words: &'w KnownArguments,
    counted: Option<CallExpressions<'w>>,
    timed: Option<CallExpressions<'w>>,
    watched: Option<CallExpressions<'w>>,
}

impl<'w> ExpressionsByKind<'w> {
    /// `start_filter` is the filter that [`Observation::asked_of_times`] returns.
    pub(super) fn of(
        observation: &'w Observation,
        start_filter: Option<&'w Expression>,
        words: &'w KnownArguments,
    ) -> ExpressionsByKind<'w> {
        let questions = CallExpressions {
            filter: observation.filter.as_ref(),
            histogram: observation.histogram.as_ref(),
            keys: observation.keys.as_ref(),
            at_exits: observation.asks_for_results(),
            words,
        };
        let asks =
            questions.filter.is_some() || questions.histogram.is_some() || questions.keys.is_some();
        let asks_of_times = start_filter.is_some() || observation.time_keys.is_some();
        ExpressionsByKind {
            observation,
            words,
            counted: asks.then_some(questions),
            timed: asks_of_times.then_some(CallExpressions {
                filter: start_filter,
                histogram: None,
                keys: observation.time_keys.as_ref(),
                at_exits: false,
                words,
            }),
            watched: observation.filter.is_some().then_some(CallExpressions {
                histogram: None,
                ..questions
            }),
        }
    }

    /// Returns what is wanted of a place.
    pub(super) fn wanted<'s>(
        &'s self,
        place: &FunctionPlace<'_>,
        kinds: &'s PlaceKinds,
    ) -> Wanted<'s> {
        let once = self.observation.calls_once;
        let key = PlaceKey::of(place);
        if once.is_some_and(|once| place.is_at(once.before)) {
            // Even if it is also selected for something else.
            Wanted::Counted(None)
        } else if once.is_some_and(|once| place.is_in_function_at(once.callee)) {
            Wanted::NotObserved
        } else if kinds.freed_stacks.contains(&key) {
            Wanted::FreedStacks
        } else if let Some(ends) = kinds.ends.get(&key) {
            Wanted::Paired(self.words, ends, self.observation)
        } else if kinds.timed.contains(&key) {
            let reported = self.observation.slow_from.map(|_| self.words);
            Wanted::Timed(self.timed.as_ref(), reported)
        } else if kinds.watched.contains(&key) {
            Wanted::Watched(self.words, self.watched.as_ref())
        } else {
            Wanted::Counted(self.counted.as_ref())
        }
    }
}

/// What is asked of calls.
#[derive(Clone, Copy)]
pub(super) struct CallExpressions<'w> {
    /// Which calls are meant.
    filter: Option<&'w Expression>,
    /// The integer of their histogram.
    histogram: Option<&'w Expression>,
    /// The keys by which they are counted.
    keys: Option<&'w Keys>,
    /// Whether these are evaluated where calls return.
    at_exits: bool,
    words: &'w KnownArguments,
}

impl CallExpressions<'_> {
    /// Returns what is asked of the calls of a function with this scope and these arguments.
    fn of_calls(
        &self,
        scope: &Scope,
        arguments: &[ArgumentSource],
    ) -> std::result::Result<CompiledExpressions, BadExpression> {
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

pub(super) type CompiledExpressions = (
    Option<Arc<FilterRole>>,
    Option<Arc<IntegerRole>>,
    Option<KeyRole>,
);

/// A place in a function, with what is wanted there and known of the function.
pub(super) struct KnownPlace<'w> {
    pub(super) place: &'w FunctionPlace<'w>,
    pub(super) wanted: Wanted<'w>,
    pub(super) address: LiveAddr,
    /// The name of the function; empty if it has none.
    function_name: String,
    /// The name of the place, as it is shown.
    pub(super) shown: String,
    /// Whether the function has a name of OCaml's; `None` if it has no name.
    is_named_ocaml: Option<bool>,
    /// Whether it may be OCaml code: a function without a name may be C or OCaml code.
    pub(super) may_be_ocaml: bool,
}

impl<'w> KnownPlace<'w> {
    pub(super) fn of(
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

    pub(super) fn is_ocaml(&self) -> bool {
        self.is_named_ocaml == Some(true)
    }

    fn is_function(&self) -> bool {
        self.place.offset == 0 && self.place.selected_by.name().is_none()
    }

    pub(super) fn evaluates_at_exits(&self) -> bool {
        let questions = self.wanted.questions();
        self.is_function() && questions.is_some_and(|it| it.at_exits)
    }

    /// What is recorded of its calls, if they are recorded.
    pub(super) fn watched(&self) -> Option<&'w KnownArguments> {
        match self.wanted {
            Wanted::Watched(words, _) => Some(words),
            _ => None,
        }
    }

    /// What is recorded of its calls, if something is recorded where they end.
    pub(super) fn watched_to_end(&self) -> Option<&'w KnownArguments> {
        let words = self.watched().filter(|_| self.is_function());
        words.filter(|it| it.has_results() || it.has_exits())
    }

    /// Returns whether more than its entry is patched.
    pub(super) fn needs_exits(&self) -> bool {
        let is_timed = matches!(self.wanted, Wanted::Timed(..));
        is_timed || self.evaluates_at_exits() || self.watched_to_end().is_some()
    }

    pub(super) fn stack(&self, stacks: ProcessStacks) -> std::result::Result<StackKind, Refusal> {
        match self.is_named_ocaml {
            None if self.may_be_ocaml => stacks.of_any(),
            is_ocaml => stacks.of_function(&self.function_name, is_ocaml == Some(true)),
        }
    }

    fn scope(&self, words: &KnownArguments) -> (Scope, Vec<ArgumentSource>) {
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
    pub(super) fn watching(&self, words: &KnownArguments) -> Watching {
        let (is_ocaml, may_be_ocaml) = (self.is_ocaml(), self.may_be_ocaml);
        words.of_place(self.place, self.address, is_ocaml, may_be_ocaml)
    }

    /// Returns what is asked of its calls; `None` if that is an argument that it does not have.
    pub(super) fn asked(&self) -> Result<Option<CompiledExpressions>> {
        let Some(questions) = self.wanted.questions() else {
            return Ok(Some(CompiledExpressions::default()));
        };
        let (scope, arguments) = if self.evaluates_at_exits() {
            let words = questions.words;
            words.scope_of_exits(&self.shown, self.address, self.is_ocaml())
        } else {
            self.scope(questions.words)
        };
        match questions.of_calls(&scope, &arguments) {
            Ok(asked) => Ok(Some(asked)),
            // A pattern or a name that others have as well is not meant for these.
            Err(bad)
                if !self.place.is_named_alone
                    && (bad.is_about_arguments()
                        || questions.of_calls(&scope.of_words(), &arguments).is_ok()) =>
            {
                Ok(None)
            }
            Err(bad) => Err(ObserveError::Expression(bad).into()),
        }
    }

    /// Returns what is recorded there if it is an end of pairs.
    pub(super) fn paired(&self) -> Result<Option<Role>> {
        let Wanted::Paired(words, ends, observation) = self.wanted else {
            return Ok(None);
        };
        let is_reported = observation.slow_from.is_some();
        Ok(Some(Role {
            marks: Marks {
                argument: marking_register(self.place),
                is_word: true,
                ..Marks::default()
            },
            reported: is_reported.then(|| self.watching(words).role(0, false)),
            ..role_of_ends(observation, ends, self.scope(words))?
        }))
    }
}

/// Returns the shown name of the place at `address`, in a function of this name.
fn shown_name(name: Option<String>, address: LiveAddr, place: &FunctionPlace<'_>) -> String {
    let mut name = match (name, place.selected_by.name(), place.offset) {
        (None, None, _) => address.to_string(),
        (Some(name), None, 0) => name,
        (Some(name), None, offset) => format!("{name}+{offset:#x}"),
        (None, Some(line), _) => line.to_string(),
        (Some(name), Some(line), _) => format!("{line} in {name}"),
    };
    if let Some(remark) = place.function.function.kind().remark() {
        // Its hits are not those of the function that it chooses, or is made for.
        name += &format!(" ({remark})");
    }
    name
}
