//! What is asked of each hit: the keys that hits are counted by, and the values that histograms are made of.

use probes_lib::{Expression, Keys, Linear, Observation};

/// How many keys are shown without `-top`.
const SHOWN: usize = 20;

/// A value of `-by`: the stack; or the pid, expressions, or both.
#[derive(Clone, Debug)]
pub(crate) struct ByKeys {
    pub(crate) by_pid: bool,
    pub(crate) by_stack: bool,
    pub(crate) keys: Option<Keys>,
}

/// What hits are counted by, and how many are shown.
#[derive(Clone, Debug)]
pub(crate) struct CountedBy {
    pub(crate) by: ByKeys,
    /// How many keys are shown, if `-top` says it.
    pub(crate) top: Option<usize>,
}

impl CountedBy {
    /// By name, with all names shown: the default for several processes.
    pub(crate) fn by_name() -> CountedBy {
        CountedBy {
            by: ByKeys {
                by_pid: false,
                by_stack: false,
                keys: None,
            },
            top: Some(usize::MAX),
        }
    }

    pub(crate) fn add_to(&self, observation: Observation) -> Observation {
        match &self.by.keys {
            Some(keys) => observation.by(keys.clone()),
            None => observation,
        }
    }

    pub(crate) fn keys(&self) -> Option<&Keys> {
        self.by.keys.as_ref()
    }

    /// Whether the only key is `caller`.
    pub(crate) fn is_caller(&self) -> bool {
        self.texts().eq(["caller"])
    }

    /// Whether processes are distinguished.
    pub(crate) fn has_pid(&self) -> bool {
        self.by.by_pid
    }

    /// Whether stacks are distinguished, and nothing else.
    pub(crate) fn is_stack(&self) -> bool {
        self.by.by_stack
    }

    /// Whether any key is an expression.
    pub(crate) fn has_expressions(&self) -> bool {
        self.by.keys.is_some()
    }

    /// The keys as they were typed; `probe` is the last one if none is an expression.
    pub(crate) fn texts(&self) -> impl Iterator<Item = &str> {
        let pid = self.by.by_pid.then_some("pid");
        let keys = self.by.keys.iter();
        let keys = keys.flat_map(|it| it.expressions().map(|it| it.as_str()));
        let name = (!self.has_expressions()).then_some("probe");
        pid.into_iter().chain(keys).chain(name)
    }

    pub(crate) fn has_caller(&self) -> bool {
        self.texts().any(|it| it == "caller")
    }

    /// How many keys are shown.
    pub(crate) fn shown(&self) -> usize {
        self.top.unwrap_or(SHOWN)
    }

    /// Refuses `-top`, for an answer whose lines are not those of keys: all of them are shown.
    pub(crate) fn refuse_top(&self) -> Result<(), String> {
        match self.top {
            Some(_) => {
                let by: Vec<&str> = self.texts().filter(|&it| it != "probe").collect();
                let by = by.join(",");
                Err(format!(
                    "-top limits keys; -by {by} has none, and shows all lines"
                ))
            }
            None => Ok(()),
        }
    }
}

/// The expression whose values histograms are made of, and their buckets if these are linear.
#[derive(Clone, Debug)]
pub(crate) struct WantedHistogram {
    pub(crate) expression: Expression,
    pub(crate) linear: Option<Linear>,
}

impl WantedHistogram {
    /// Returns an observation with histograms instead of counts.
    pub(crate) fn add_to(&self, observation: Observation) -> Observation {
        let observation = observation.histogram_of(self.expression.clone());
        match self.linear {
            Some(linear) => observation.linear(linear),
            None => observation,
        }
    }
}
