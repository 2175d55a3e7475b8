//! [`Observation`]: what to record of the hits of a process.

use std::num::NonZeroU64;
use std::time::Duration;

use crate::address::LiveAddr;
use crate::error::ObserveError;
use crate::expression::times::TimeRange;
use crate::expression::{Expression, Keys};
use crate::observe::buckets::Linear;
use crate::observe::layout::semaphores::ChangedWord;
use crate::observe::role::PairEnd;
use crate::select::Selector;
use crate::select::function::FunctionSelector;
use crate::select::glob::Glob;

/// What to record of the hits of a process: counts, times between hits, each hit with its arguments.
///
/// ```
/// use probes_lib::{Observation, Selector};
///
/// let observation = Observation::new()
///     .count(Selector::All)
///     .time("req_start", "req_end")
///     .watch(Selector::regexp("^cache_")?);
/// # Ok::<(), probes_lib::Error>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct Observation {
    pub(super) counted: Vec<Selector>,
    /// The names of the probes that start and stop each pair.
    pub(super) pairs: Vec<(String, String)>,
    /// The same for USDT probes of other providers, `PROVIDER:NAME`.
    pub(super) usdt_pairs: Vec<(Glob, Glob)>,
    pub(super) watched: Vec<Selector>,
    pub(crate) counted_functions: Vec<FunctionSelector>,
    pub(crate) timed_functions: Vec<FunctionSelector>,
    pub(crate) watched_functions: Vec<FunctionSelector>,
    /// How many arguments to record of a function whose number of arguments is unknown.
    pub(crate) unknown_arguments: usize,
    /// Whether the results of functions that are watched are recorded, too.
    pub(crate) watches_results: bool,
    /// Whether all exits of functions that are watched are recorded, too.
    pub(crate) watches_exits: bool,
    /// One in this many hits of each watched point is recorded; `None`: all.
    pub(crate) sample: Option<NonZeroU64>,
    pub(crate) self_times: bool,
    pub(crate) by_caller: bool,
    /// Which hits are counted, and watched.
    pub(crate) filter: Option<Expression>,
    /// The integer of which histograms are made, instead of counting hits.
    pub(crate) histogram: Option<Expression>,
    pub(crate) linear: Option<Linear>,
    /// What hits are counted by.
    pub(crate) keys: Option<Keys>,
    /// The key by which the stop of a pair finds its start.
    pub(crate) pair_key: Option<Keys>,
    /// Whether that key is also evaluated for recorded hits.
    pub(crate) has_pair_keys: bool,
    /// The keys by which times are distinguished.
    pub(crate) time_keys: Option<Keys>,
    /// Pairs and timed calls that last this long or longer are recorded one by one.
    pub(crate) slow_from: Option<Duration>,
    /// Which pairs, by their starts, and which calls are timed.
    pub(crate) start_filter: Option<Expression>,
    /// Whether the stack of each hit that is recorded is copied.
    pub(crate) with_stacks: bool,
    /// How many bytes of records a ring has to hold, if not as many as usual.
    pub(crate) ring_bytes: Option<u64>,
    /// Whether hits in processes that are forked are recorded, too.
    pub(crate) records_forked: bool,
    /// Whether functions that are asked for by name may be refused.
    pub(crate) leaves_out_refused: bool,
    /// What is called once, before the first call of one of the counted functions.
    pub(crate) calls_once: Option<CallOnce>,
}

/// A C function without arguments that the process is to call once, before it executes a counted C function without
/// arguments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CallOnce {
    /// The counted function.
    pub(crate) before: LiveAddr,
    pub(crate) callee: LiveAddr,
    /// Some `ret` instruction in the code of the process.
    pub(crate) ret: LiveAddr,
    /// The process, as getpid(2) returns it there: children that are forked call nothing.
    pub(crate) pid: i32,
    /// The word of the program that is changed while the counted function is observed.
    pub(crate) word: ChangedWord,
}

impl Observation {
    /// Returns an observation that records nothing.
    pub fn new() -> Observation {
        Observation::default()
    }

    /// Also counts the hits of these probes.
    #[must_use]
    pub fn count(mut self, selector: Selector) -> Observation {
        self.counted.push(selector);
        self
    }

    /// Also counts the calls of these functions or, for an address or a source line, the executions
    /// of the selected instructions. Calls that the compiler has inlined are not counted. Functions
    /// that cannot be observed are left out ([`Counts::refused`](crate::Counts::refused)).
    ///
    /// ```
    /// use probes_lib::{FunctionSelector, Observation};
    ///
    /// let lists = FunctionSelector::Glob("Stdlib.List.*".parse().unwrap());
    /// let observation = Observation::new().count_functions(lists);
    /// ```
    #[must_use]
    pub fn count_functions(mut self, selector: FunctionSelector) -> Observation {
        self.counted_functions.push(selector);
        self
    }

    /// Counts and records only the hits for which this expression is true. Hits for which it has no answer are counted
    /// separately ([`Counts::untyped`](crate::Counts::untyped), [`Events::untyped`](crate::Events::untyped)). It does
    /// not affect times. It cannot be combined with [`Observation::watch_results`] or [`Observation::watch_exits`].
    ///
    /// ```
    /// use probes_lib::{Observation, Selector};
    ///
    /// let large = "arg1 > 1000".parse()?;
    /// let observation = Observation::new().count(Selector::name("req_end")).only_where(large);
    /// # Ok::<(), probes_lib::BadExpression>(())
    /// ```
    #[must_use]
    pub fn only_where(mut self, expression: Expression) -> Observation {
        self.filter = Some(expression);
        self
    }

    /// Makes histograms of the value of this expression at each hit, an integer, instead of counting the hits: one for
    /// each probe, by name, and one for each function ([`Observer::histograms`](crate::Observer::histograms)). At most
    /// 1,024 are possible.
    ///
    /// ```
    /// use probes_lib::{Observation, Selector};
    ///
    /// let bytes = "arg1".parse()?;
    /// let observation = Observation::new().count(Selector::name("req_end")).histogram_of(bytes);
    /// # Ok::<(), probes_lib::BadExpression>(())
    /// ```
    #[must_use]
    pub fn histogram_of(mut self, expression: Expression) -> Observation {
        self.histogram = Some(expression);
        self
    }

    /// Makes histograms with buckets of one width in a range; by default, they are narrow for small values and wide for
    /// large ones, of either sign, so that no value is outside.
    #[must_use]
    pub fn linear(mut self, range: Linear) -> Observation {
        self.linear = Some(range);
        self
    }

    /// Counts hits by the values of these keys, all counted probes and functions together
    /// ([`Observer::keyed_counts`](crate::Observer::keyed_counts)). With [`Observation::histogram_of`], makes a
    /// histogram for each key instead of one for each name
    /// ([`Observer::keyed_histograms`](crate::Observer::keyed_histograms)).
    ///
    /// ```
    /// use probes_lib::{Observation, Selector};
    ///
    /// let page = "str(arg0)".parse()?;
    /// let observation = Observation::new().count(Selector::name("request")).by(page);
    /// # Ok::<(), probes_lib::BadExpression>(())
    /// ```
    #[must_use]
    pub fn by(mut self, keys: Keys) -> Observation {
        self.keys = Some(keys);
        self
    }

    /// Also measures how long each call of these functions lasts, from its entry to its exit: a return, or a jump to
    /// another function in tail position. Calls that an exception ends are counted separately. A
    /// function that is selected to be both counted and timed is only timed. Functions that cannot
    /// be timed are left out ([`Counts::refused`](crate::Counts::refused)).
    ///
    /// ```
    /// use probes_lib::{FunctionSelector, Observation};
    ///
    /// let requests = FunctionSelector::Glob("Http.handle*".parse().unwrap());
    /// let observation = Observation::new().time_functions(requests);
    /// ```
    #[must_use]
    pub fn time_functions(mut self, selector: FunctionSelector) -> Observation {
        self.timed_functions.push(selector);
        self
    }

    /// Measures self times: from the time of each call, the time of the timed functions that it
    /// calls is subtracted. In OCaml 5, only calls on the same stack are subtracted: from OCaml
    /// functions those of OCaml functions on the same fiber, from C functions those of C functions
    /// on the same thread.
    ///
    /// ```
    /// use probes_lib::{FunctionSelector, Observation};
    ///
    /// let parser = FunctionSelector::Glob("Parser.*".parse().unwrap());
    /// let observation = Observation::new().time_functions(parser).self_times();
    /// ```
    #[must_use]
    pub fn self_times(mut self) -> Observation {
        self.self_times = true;
        self
    }

    /// Also measures the times of the timed functions for each place that calls them
    /// ([`FunctionLatency::callers`](crate::FunctionLatency::callers)).
    ///
    /// ```
    /// use probes_lib::{FunctionSelector, Observation};
    ///
    /// let parse = FunctionSelector::Glob("Http.parse".parse().unwrap());
    /// let observation = Observation::new().time_functions(parse).by_caller();
    /// ```
    #[must_use]
    pub fn by_caller(mut self) -> Observation {
        self.by_caller = true;
        self
    }

    /// Also measures the times from the hits of `start` to those of `stop` in the same thread: a stop
    /// belongs to the last start that has no stop yet. If `start` and `stop` are the same probe,
    /// the times are those from each hit to the next.
    #[must_use]
    pub fn time(mut self, start: impl Into<String>, stop: impl Into<String>) -> Observation {
        self.pairs.push((start.into(), stop.into()));
        self
    }

    /// Does the same as [`Observation::time`] for USDT probes of other providers than OCaml's; `start` and `stop` match
    /// `PROVIDER:NAME`. While the probes are observed, their semaphores are raised by one.
    ///
    /// ```
    /// use probes_lib::Observation;
    ///
    /// let (start, stop) = ("postgresql:query__start".parse()?, "postgresql:query__done".parse()?);
    /// let observation = Observation::new().time_usdt(start, stop);
    /// # Ok::<(), probes_lib::BadGlob>(())
    /// ```
    #[must_use]
    pub fn time_usdt(mut self, start: Glob, stop: Glob) -> Observation {
        self.usdt_pairs.push((start, stop));
        self
    }

    /// Returns the names of all pairs: those of OCaml's probes first.
    pub(super) fn all_pairs(&self) -> Vec<(String, String)> {
        let of_usdt = self.usdt_pairs.iter();
        let of_usdt = of_usdt.map(|(start, stop)| (start.to_string(), stop.to_string()));
        self.pairs.iter().cloned().chain(of_usdt).collect()
    }

    /// Returns what selects each end of the pairs of USDT probes, with the end and the pair that it is.
    pub(super) fn usdt_ends(&self) -> Vec<(FunctionSelector, PairEnd)> {
        let first = self.pairs.len() as u32;
        let pairs = (first..).zip(&self.usdt_pairs);
        let ends = pairs.flat_map(|(number, (start, stop))| {
            [
                (FunctionSelector::Usdt(stop.clone()), PairEnd::Stop(number)),
                (
                    FunctionSelector::Usdt(start.clone()),
                    PairEnd::Start(number),
                ),
            ]
        });
        ends.collect()
    }

    /// Measures only the times of pairs for whose start this is true, and of calls for whose entry it is. Those for
    /// which it has no answer are left out, and counted ([`Latency::untyped`](crate::Latency::untyped),
    /// [`FunctionLatency::untyped`](crate::FunctionLatency::untyped)).
    ///
    /// Conditions on `elapsed`, joined to others by `&&`, are checked at the end: `arg1 > 1000 && elapsed > 10ms`. The
    /// rate of the time stamp counter is known to about 1 % for the comparison. The time of calls that are left out is
    /// still subtracted from the self times of their callers.
    ///
    /// ```
    /// use probes_lib::Observation;
    ///
    /// let large = "arg1 > 1000".parse()?;
    /// let observation = Observation::new().time("req_start", "req_end").only_starts_where(large);
    /// # Ok::<(), probes_lib::BadExpression>(())
    /// ```
    #[must_use]
    pub fn only_starts_where(mut self, expression: Expression) -> Observation {
        self.start_filter = Some(expression);
        self
    }

    /// Matches each stop of a pair with the start that has the same key, in whichever thread, instead of with the last
    /// start of its thread: for requests that interleave in a thread, or move between threads. The key must differ
    /// between all requests that are under way at a time, and be the same at both ends: this excludes `caller` and
    /// `probe`. Only the first 64 bytes of a string count. At least some ten thousand requests of a pair may be under
    /// way ([`Latency::dropped`](crate::Latency::dropped)).
    ///
    /// ```
    /// use probes_lib::Observation;
    ///
    /// let request = "arg0".parse()?;
    /// let observation = Observation::new().time("req_start", "req_end").match_by(request);
    /// # Ok::<(), probes_lib::BadExpression>(())
    /// ```
    #[must_use]
    pub fn match_by(mut self, key: Keys) -> Observation {
        self.pair_key = Some(key);
        self
    }

    /// Also evaluates the key of [`Observation::match_by`] at each end of a pair that is watched
    /// ([`Event::pair_key`](crate::Event::pair_key)), from what is recorded of the hit. A key that needs more is
    /// refused.
    ///
    /// ```
    /// use probes_lib::{Observation, Selector};
    ///
    /// let ends = ["req_start", "req_end"].map(Selector::name);
    /// let watched = ends.into_iter().fold(Observation::new(), Observation::watch);
    /// let request = "arg0".parse()?;
    /// let observation = watched.time("req_start", "req_end").match_by(request).with_pair_keys();
    /// # Ok::<(), probes_lib::BadExpression>(())
    /// ```
    #[must_use]
    pub fn with_pair_keys(mut self) -> Observation {
        self.has_pair_keys = true;
        self
    }

    /// Also distinguishes times by the values of these keys: of pairs at the stop, of calls at the entry of the
    /// function ([`Observer::keyed_times`](crate::Observer::keyed_times)). For pairs, only one of the keys may be made
    /// of arguments. Cannot be combined with [`Observation::by`], [`Observation::self_times`] or
    /// [`Observation::report_slow`].
    ///
    /// ```
    /// use probes_lib::Observation;
    ///
    /// let page = "str(arg1)".parse()?;
    /// let observation = Observation::new().time("req_start", "req_end").time_by(page);
    /// # Ok::<(), probes_lib::BadExpression>(())
    /// ```
    #[must_use]
    pub fn time_by(mut self, keys: Keys) -> Observation {
        self.time_keys = Some(keys);
        self
    }

    /// Also records, one by one, the pairs and the calls of timed functions that last `bound` or longer
    /// ([`Events::slow_pairs`](crate::Events::slow_pairs)): a pair with the arguments at both ends, a call with its
    /// arguments and its result. Only the words of these are recorded, not what they point to. The process itself
    /// compares the times, so shorter pairs and calls are not copied.
    ///
    /// ```
    /// use std::time::Duration;
    ///
    /// use probes_lib::Observation;
    ///
    /// let slow = Duration::from_millis(10);
    /// let observation = Observation::new().time("req_start", "req_end").report_slow(slow);
    /// ```
    #[must_use]
    pub fn report_slow(mut self, bound: Duration) -> Observation {
        self.slow_from = Some(bound);
        self
    }

    /// Also records each hit of these probes, with its arguments.
    #[must_use]
    pub fn watch(mut self, selector: Selector) -> Observation {
        self.watched.push(selector);
        self
    }

    /// Also records each call of these functions, with its arguments if their number is known
    /// ([`Observation::unknown_arguments`]), or, for an address or a source line, each execution of
    /// the selected instructions. A function that is selected to be timed, too, is only timed; one
    /// that is selected to be counted, too, is only recorded. Functions that cannot be observed are
    /// left out ([`Counts::refused`](crate::Counts::refused)).
    ///
    /// ```
    /// use probes_lib::{FunctionSelector, Observation};
    ///
    /// let requests = FunctionSelector::Glob("Http.handle*".parse().unwrap());
    /// let observation = Observation::new().watch_functions(requests);
    /// ```
    #[must_use]
    pub fn watch_functions(mut self, selector: FunctionSelector) -> Observation {
        self.watched_functions.push(selector);
        self
    }

    /// Records `many` arguments, at most six, of each function whose number of arguments is
    /// unknown; by default none. If the function has fewer, the others are whatever is in their
    /// registers.
    #[must_use]
    pub fn unknown_arguments(mut self, many: usize) -> Observation {
        self.unknown_arguments = many;
        self
    }

    /// Also records the results of watched functions when they return. A call that ends with a jump
    /// to another function in tail position, or with an exception, has no result. Functions whose
    /// returns cannot be observed are watched without results
    /// ([`Observer::without_results`](crate::Observer::without_results)).
    #[must_use]
    pub fn watch_results(mut self) -> Observation {
        self.watches_results = true;
        self
    }

    /// Also records where watched functions are left: their returns, and the jumps to other functions in tail position,
    /// which are events of their own ([`EventKind`](crate::EventKind)). All events of such a function have the stack of
    /// the call and its place on that stack ([`Event::frame`](crate::Event::frame)), so that each exit can be matched
    /// with its call, even if calls are recursive or end by exceptions. Functions whose exits cannot be observed are
    /// watched without them ([`Observer::without_results`](crate::Observer::without_results)). Cannot be combined with
    /// [`Observation::only_where`] or [`Observation::sample`].
    ///
    /// ```
    /// use probes_lib::{FunctionSelector, Observation};
    ///
    /// let requests = FunctionSelector::Glob("Http.handle*".parse().unwrap());
    /// let observation = Observation::new().watch_functions(requests).watch_exits();
    /// ```
    #[must_use]
    pub fn watch_exits(mut self) -> Observation {
        self.watches_exits = true;
        self
    }

    /// Returns whether returns or other exits of watched functions are recorded.
    pub(crate) fn watches_ends(&self) -> bool {
        self.watches_results || self.watches_exits
    }

    /// Records only every `every`th hit of each watched site and function, counted in all threads together. Only hits
    /// for which [`Observation::only_where`] is true are counted. The number of hits that are not recorded is exact
    /// ([`Events::skipped`](crate::Events::skipped)). It cannot be combined with [`Observation::watch_results`] or
    /// [`Observation::watch_exits`]: it would not be known which return belongs to which call.
    ///
    /// ```
    /// use std::num::NonZeroU64;
    ///
    /// use probes_lib::{Observation, Selector};
    ///
    /// let some = NonZeroU64::new(1000).unwrap();
    /// let observation = Observation::new().watch(Selector::All).sample(some);
    /// ```
    #[must_use]
    pub fn sample(mut self, every: NonZeroU64) -> Observation {
        self.sample = Some(every);
        self
    }

    /// Also copies the stack at each watched hit, at each return, and at each end of a slow pair or call
    /// ([`Event::stack`](crate::Event::stack)): at most 80 KiB of it.
    ///
    /// ```
    /// use probes_lib::{Observation, Selector};
    ///
    /// let observation = Observation::new().watch(Selector::name("cache_miss")).with_stacks();
    /// ```
    #[must_use]
    pub fn with_stacks(mut self) -> Observation {
        self.with_stacks = true;
        self
    }

    /// Makes each of the 16 rings that hits are recorded in take up to so many bytes, rounded up to a power of two, and more than half of that: at most 64 MiB,
    /// and at least what they take without it, 1 or 2 MiB, or 16 MiB with stacks. The hits of a burst are lost if they do not
    /// fit into a ring before they are read. The rings that are used take as much memory in the process, because each is filled to its
    /// end before it is filled again.
    ///
    /// ```
    /// use probes_lib::{Observation, Selector};
    ///
    /// let observation = Observation::new().watch(Selector::name("cache_miss")).with_rings_of(16 << 20);
    /// ```
    #[must_use]
    pub fn with_rings_of(mut self, bytes: u64) -> Observation {
        self.ring_bytes = Some(bytes);
        self
    }

    /// Leaves out functions that are asked for by name and cannot be observed, as long as anything else can:
    /// [`Observer::refused`](crate::Observer::refused) says why. Not with pairs of USDT probes, whose ends belong together.
    ///
    /// ```
    /// use probes_lib::{FunctionSelector, Observation};
    ///
    /// let function = |name: &str| FunctionSelector::Glob(name.parse().unwrap());
    /// let observation = Observation::new().time_functions(function("Http.handle")).time_functions(function("Http.close"));
    /// let observation = observation.leave_out_refused();
    /// ```
    #[must_use]
    pub fn leave_out_refused(mut self) -> Observation {
        self.leaves_out_refused = true;
        self
    }

    /// Also records the hits of processes that the observed one forks meanwhile, and of those that these fork, as if
    /// they were its own. If something is timed, they are not recorded: each process has its own starts that wait for
    /// their stop, so times in forked processes are missing. Until such a process is found, about 200 ms after the
    /// fork, it is not known which memory it has mapped, and expressions that need strings or fields have no answer
    /// there. Processes that exist already, and programs that are executed, are not included:
    /// [`Target::forked_descendants`](crate::Target::forked_descendants) returns those that can be observed by
    /// themselves.
    ///
    /// ```
    /// use probes_lib::{Observation, Selector};
    ///
    /// let observation = Observation::new().count(Selector::All).record_forked();
    /// ```
    #[must_use]
    pub fn record_forked(mut self) -> Observation {
        self.records_forked = true;
        self
    }

    /// Returns whether something is asked of hits that may be unknown in a process that was just forked
    /// ([`record_forked`](Observation::record_forked)): strings, and fields of blocks, also those of watched arguments.
    ///
    /// ```
    /// use probes_lib::{Observation, Selector};
    ///
    /// let observation = Observation::new().count(Selector::All).record_forked();
    /// assert!(!observation.may_lack_values_of_forked());
    /// let observation = observation.only_where("str(arg0) == \"GET\"".parse()?);
    /// assert!(observation.may_lack_values_of_forked());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn may_lack_values_of_forked(&self) -> bool {
        let is_watched = !self.watched.is_empty() || !self.watched_functions.is_empty();
        let expressions = [&self.filter, &self.histogram];
        let mut expressions = expressions.into_iter().flatten();
        let asks = expressions.any(Expression::asks_for_memory)
            || self.keys.as_ref().is_some_and(Keys::ask_for_memory);
        self.records_forked && !self.is_timed() && (is_watched || asks)
    }

    /// Returns whether processes that the observed one forks meanwhile ([`record_forked`](Observation::record_forked))
    /// have to be observed by themselves, because something is timed: what they do before that is missing.
    ///
    /// ```
    /// use probes_lib::{Observation, Selector};
    ///
    /// let observation = Observation::new().count(Selector::All).record_forked();
    /// assert!(!observation.lacks_forked());
    /// assert!(observation.time("req_start", "req_end").lacks_forked());
    /// ```
    pub fn lacks_forked(&self) -> bool {
        self.records_forked && self.is_timed()
    }

    fn is_timed(&self) -> bool {
        !self.pairs.is_empty() || !self.usdt_pairs.is_empty() || !self.timed_functions.is_empty()
    }

    /// Returns whether only some of the hits are recorded.
    pub(crate) fn records_some(&self) -> bool {
        self.sample.is_some() || self.filter.is_some()
    }

    /// Refuses what cannot be combined with times by keys.
    ///
    /// # Errors
    ///
    /// If times are distinguished by keys, and something excludes that.
    pub(crate) fn refuse_keys_of_times(&self) -> Result<(), ObserveError> {
        if self.time_keys.is_none() {
            return Ok(());
        }
        let excluded = [
            (
                self.keys.is_some(),
                "cannot be combined with counts and histograms by keys",
            ),
            (
                self.histogram.is_some(),
                "cannot be combined with histograms of values",
            ),
            (self.self_times, "cannot be combined with self times"),
            (
                self.slow_from.is_some(),
                "cannot be combined with slow pairs and calls (report_slow)",
            ),
        ];
        let why = excluded.into_iter().find(|(is_asked, _)| *is_asked);
        why.map_or(Ok(()), |(_, why)| Err(ObserveError::TimesByKeys(why)))
    }

    /// Returns whether an expression asks for the results of functions: then the hits of a function are its
    /// returns.
    ///
    /// ```
    /// use probes_lib::{FunctionSelector, Observation};
    ///
    /// let find = FunctionSelector::Glob("Cache.find".parse().unwrap());
    /// let observation = Observation::new().count_functions(find).only_where("retval > 0".parse()?);
    /// assert!(observation.asks_for_results());
    /// # Ok::<(), probes_lib::BadExpression>(())
    /// ```
    pub fn asks_for_results(&self) -> bool {
        let keys = self.keys.iter().flat_map(|keys| keys.expressions());
        let asked = [&self.filter, &self.histogram];
        let mut all = asked.into_iter().flatten().chain(keys);
        all.any(Expression::asks_for_result)
    }

    /// Returns the condition on the start of pairs and calls, and the range of their times.
    ///
    /// # Errors
    ///
    /// If the condition uses `elapsed` in a way that is not possible.
    pub(crate) fn asked_of_times(
        &self,
    ) -> Result<(Option<Expression>, Option<TimeRange>), ObserveError> {
        let asked = self.start_filter.as_ref().map(Expression::split_times);
        let asked = asked.transpose().map_err(ObserveError::Expression)?;
        Ok(asked.unwrap_or((None, None)))
    }

    /// Returns whether an expression asks for the thread of a hit.
    pub(crate) fn asks_for_threads(&self) -> bool {
        self.expressions().any(Expression::asks_for_thread)
    }

    /// Returns the expression with the longest text, which as a rule has the most code.
    pub(crate) fn longest_expression(&self) -> Option<&Expression> {
        self.expressions().max_by_key(|it| it.as_str().len())
    }

    /// Returns all expressions that are evaluated for hits, or for the ends of pairs and calls.
    fn expressions(&self) -> impl Iterator<Item = &Expression> {
        let asked = [&self.filter, &self.histogram, &self.start_filter];
        let keys = [&self.keys, &self.pair_key, &self.time_keys];
        let keys = keys.into_iter().flatten();
        let keys = keys.flat_map(|keys| keys.expressions());
        asked.into_iter().flatten().chain(keys)
    }

    /// Returns whether it can only observe a program with probes: it selects probes, or nothing at
    /// all.
    pub(crate) fn needs_probes(&self) -> bool {
        let probes = !self.counted.is_empty() || !self.watched.is_empty();
        probes || !self.pairs.is_empty() || !self.has_functions()
    }

    pub(crate) fn has_functions(&self) -> bool {
        let counted = !self.counted_functions.is_empty() || !self.timed_functions.is_empty();
        counted || !self.watched_functions.is_empty() || !self.usdt_pairs.is_empty()
    }
}
