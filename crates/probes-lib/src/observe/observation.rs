//! [`Observation`]: what to record of the hits of a process, as the caller says it.

use crate::select::Selector;
use crate::select::function::FunctionSelector;

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
    /// Of each pair, the names of the probes that start and stop it.
    pub(super) pairs: Vec<(String, String)>,
    pub(super) watched: Vec<Selector>,
    pub(crate) counted_functions: Vec<FunctionSelector>,
    pub(crate) timed_functions: Vec<FunctionSelector>,
    pub(crate) watched_functions: Vec<FunctionSelector>,
    /// How many arguments are recorded of functions of which it is not known how many they have.
    pub(crate) unknown_arguments: usize,
    /// Whether the results of functions that are watched are recorded, too.
    pub(crate) watches_results: bool,
    pub(crate) self_times: bool,
    pub(crate) by_caller: bool,
}

impl Observation {
    /// Records nothing yet.
    pub fn new() -> Observation {
        Observation::default()
    }

    /// Also counts the hits of these probes.
    #[must_use]
    pub fn count(mut self, selector: Selector) -> Observation {
        self.counted.push(selector);
        self
    }

    /// Also counts the calls of these functions, or the executions of an instruction. Of calls that the compiler has
    /// inlined nothing is known. Functions that cannot be observed are left out
    /// ([`Counts::refused`](crate::Counts::refused)).
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

    /// Also measures how long each call of these functions lasts, from its entry to its exit: a return, or a jump to
    /// another function in tail position. Calls that an exception ends are counted by themselves. A function that is to be
    /// counted as well is only timed. Functions that cannot be timed are left out
    /// ([`Counts::refused`](crate::Counts::refused)).
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

    /// Measures self times of the functions that are timed: without the time of the calls that they make of functions that are timed,
    /// too. In OCaml 5, that of OCaml code without the calls of OCaml functions, and that of C functions without those of C functions.
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

    /// Tells the callers of the functions that are timed apart ([`FunctionLatency::callers`](crate::FunctionLatency::callers)).
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

    /// Also records each hit of these probes, with its arguments.
    #[must_use]
    pub fn watch(mut self, selector: Selector) -> Observation {
        self.watched.push(selector);
        self
    }

    /// Also records each call of these functions, or each execution of an instruction; of a call its arguments, if it is known
    /// how many there are. A function that is to be timed as well is only timed; one that is to be counted as well is only
    /// recorded. Functions that cannot be observed are left out ([`Counts::refused`](crate::Counts::refused)).
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

    /// Of functions of which it is not known how many arguments they have, takes them to have `many`, six at most: none by
    /// default. What a function does not have is shown as what happens to be in that register.
    #[must_use]
    pub fn unknown_arguments(mut self, many: usize) -> Observation {
        self.unknown_arguments = many;
        self
    }

    /// Of functions that are watched, also records the results, where they return. A call that ends otherwise has none: by a jump
    /// to another function in tail position, or by an exception. Functions whose returns cannot be observed are watched without
    /// results ([`Observer::without_results`](crate::Observer::without_results)).
    #[must_use]
    pub fn watch_results(mut self) -> Observation {
        self.watches_results = true;
        self
    }

    /// Returns whether it is about probes, so that a program without any cannot be observed.
    pub(crate) fn needs_probes(&self) -> bool {
        let probes = !self.counted.is_empty() || !self.watched.is_empty();
        probes || !self.pairs.is_empty() || !self.has_functions()
    }

    pub(crate) fn has_functions(&self) -> bool {
        let counted = !self.counted_functions.is_empty() || !self.timed_functions.is_empty();
        counted || !self.watched_functions.is_empty()
    }
}
