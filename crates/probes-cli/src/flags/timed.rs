//! What is to be timed: pairs of probes, and calls of functions.

use crate::question::CountedBy;
use probes_lib::{Expression, FunctionSelector, Observation};

use super::checked::Flags;
use super::filter::expression;
use super::function_selection::FunctionFlags;
use super::keys::KeyFlags;
use super::pairs::{OverFlag, PairFlags, Pairs, UsdtPair, usdt_pair};
use super::stack::{StackFlag, StackLimit};

// The pairs and functions to time.
#[derive(Debug, clap::Args)]
pub(crate) struct TimedFlags {
    #[command(flatten)]
    pairs: PairFlags,
    /// Time USDT probes of C and others: PROVIDER:START,PROVIDER:STOP
    #[arg(id = "usdt", long, value_name = "START,STOP", value_parser = usdt_pair)]
    usdt: Vec<UsdtPair>,
    /// Only pairs and calls that begin where EXPR is true, such as 'arg0 > 5'
    #[arg(id = "where", long, value_name = "EXPR", value_parser = expression, allow_hyphen_values = true)]
    filter: Option<Expression>,
    #[command(flatten)]
    over: OverFlag,
    #[command(flatten)]
    stack: StackFlag,
    #[command(flatten)]
    functions: FunctionFlags,
    /// Time functions without the calls that they make of other timed ones
    #[arg(id = "self", long)]
    self_times: bool,
    #[command(flatten)]
    by: KeyFlags,
}

/// The checked form of [`TimedFlags`].
#[derive(Debug)]
pub(crate) struct Timed {
    pairs: Pairs,
    usdt: Vec<UsdtPair>,
    /// Only the pairs and calls that begin where it is true are timed.
    filter: Option<Expression>,
    over: OverFlag,
    stack: StackFlag,
    functions: Vec<FunctionSelector>,
    self_times: bool,
    /// The keys by which times are distinguished.
    by: Option<CountedBy>,
}

impl Flags for TimedFlags {
    type Value = Timed;

    fn check(self) -> Result<Timed, String> {
        let timed = Timed {
            pairs: self.pairs.check_beside(!self.usdt.is_empty())?,
            usdt: self.usdt,
            filter: self.filter,
            over: self.over,
            stack: self.stack,
            functions: self.functions.selectors()?,
            self_times: self.self_times,
            by: self.by.check()?,
        };
        if timed.pairs.is_empty() && timed.functions.is_empty() && timed.usdt.is_empty() {
            let needed = "needs -pair START,STOP, -usdt START,STOP, -fn GLOBS or -gc WORK";
            return Err(needed.to_owned());
        }
        if timed.self_times && timed.functions.is_empty() {
            return Err("-self is for functions: it needs -fn GLOBS or -gc WORK".to_owned());
        }
        if timed.by_caller() && timed.functions.is_empty() {
            return Err("-by caller is for functions: it needs -fn GLOBS or -gc WORK".to_owned());
        }
        if timed.stack.limit().is_some() && !timed.over.is_given() {
            return Err(
                "-stack needs -over DURATION: it shows where slow pairs and calls end".to_owned(),
            );
        }
        if timed.by.as_ref().is_some_and(CountedBy::is_stack) {
            return Err("-by stack can only be used with `count`".to_owned());
        }
        if let (Some(by), None) = (&timed.by, timed.keys()) {
            by.refuse_top()?;
        }
        if timed.keys().is_some() && timed.self_times {
            let why = "-self and -by EXPR cannot be combined: the times of keys are whole times";
            return Err(why.to_owned());
        }
        if timed.keys().is_some() && timed.over.is_given() {
            let why = "-over and -by EXPR cannot be combined: slow pairs and calls are shown with their arguments, without keys";
            return Err(why.to_owned());
        }
        Ok(timed)
    }
}

impl Timed {
    /// Whether the process has to have probes.
    pub(crate) fn needs_probes(&self) -> bool {
        !self.pairs.is_empty()
    }

    /// Whether functions are timed without the calls that they make of other timed ones.
    pub(crate) fn self_times(&self) -> bool {
        self.self_times
    }

    /// Whether each function has a line for each of its callers.
    fn by_caller(&self) -> bool {
        self.by.as_ref().is_some_and(CountedBy::is_caller)
    }

    /// Whether the caller is one of the keys, or the only one.
    pub(crate) fn has_caller(&self) -> bool {
        self.by.as_ref().is_some_and(CountedBy::has_caller)
    }

    /// Whether processes are distinguished.
    pub(crate) fn by_pid(&self) -> bool {
        self.by.as_ref().is_some_and(CountedBy::has_pid)
    }

    /// The keys by which times are distinguished. `None` if none of them is an expression, or `caller` is the only one:
    /// then each function has a line for each of its callers.
    pub(crate) fn keys(&self) -> Option<&CountedBy> {
        let by = self.by.as_ref()?;
        (by.has_expressions() && !by.is_caller()).then_some(by)
    }

    /// Whether slow pairs and calls are shown one by one.
    pub(crate) fn shows_slow_pairs(&self) -> bool {
        self.over.is_given()
    }

    /// How many frames of the stacks of slow pairs and calls are shown; `None` if stacks are not.
    pub(crate) fn stack_limit(&self) -> Option<StackLimit> {
        self.stack.limit()
    }

    /// Whether functions, or USDT probes of C and others, are timed.
    pub(crate) fn has_functions_or_usdt(&self) -> bool {
        self.has_functions() || !self.usdt.is_empty()
    }

    pub(crate) fn has_functions(&self) -> bool {
        !self.functions.is_empty()
    }

    pub(crate) fn observation(&self) -> Observation {
        let observation = self.over.add_to(self.pairs.add_to(Observation::new()));
        let observation = self.stack.add_to(observation);
        let usdt = self.usdt.iter();
        let mut observation = usdt.fold(observation, |all, pair| pair.add_to(all));
        if let Some(filter) = &self.filter {
            observation = observation.only_starts_where(filter.clone());
        }
        let functions = self.functions.iter().cloned();
        let mut observation = functions.fold(observation, Observation::time_functions);
        if self.self_times {
            observation = observation.self_times();
        }
        if self.by_caller() {
            observation = observation.by_caller();
        }
        if let Some(keys) = self.keys().and_then(CountedBy::keys) {
            observation = observation.time_by(keys.clone());
        }
        observation
    }
}
