//! What to do with which probes: resolves [`Actions`] to [`Choice`]s, refuses conflicts, and
//! suggests similar names for an unknown one.

pub(crate) mod function;
pub(crate) mod glob;

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use regex::Regex;

use crate::address::LiveAddr;
use crate::error::{Error, ProbeError, Result};
use crate::near::near_names;
use crate::process::object::UnreadableObject;
use crate::process::program::{ProbeId, Program};

/// What to do with a probe. Its counter says how many tools have enabled it, so that tools can
/// share the probe.
///
/// [`Target`](crate::Target) has an example.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Action {
    /// Adds one to its counter; its sites are enabled when the counter leaves 0.
    Enable,
    /// Subtracts one from its counter; its sites are disabled when the counter reaches 0.
    Disable,
}

/// Which probes an action is for.
///
/// ```
/// use probes_lib::{Actions, Selector};
///
/// let requests = Selector::Pair { start: "req_start".into(), stop: "req_stop".into() };
/// let long = Selector::predicate(|name| name.len() > 20);
/// let actions = Actions::new().enable(requests).disable(long);
/// # let _ = actions;
/// ```
#[derive(Clone)]
pub enum Selector {
    /// Every probe.
    All,
    /// The probe of this name. It must exist, and disabling it fails if it is disabled already.
    Name(String),
    /// The probes at the start and the stop of an event. The stop is enabled first and the start disabled
    /// first, so that no event is recorded without its stop.
    Pair {
        /// At the start of the event.
        start: String,
        /// At its stop.
        stop: String,
    },
    /// The probes whose name has a match that begins at its first character.
    Regexp(Regex),
    /// The probes for whose name the function is true.
    Predicate(Arc<dyn Fn(&str) -> bool + Send + Sync>),
}

impl Selector {
    /// Selects the probe called `name`.
    pub fn name(name: impl Into<String>) -> Selector {
        Selector::Name(name.into())
    }

    /// Selects the probes whose name `pattern` matches at its start, in the syntax of the `regex` crate: `req`
    /// matches `req_start`, `_start` does not, `.*_start` does.
    ///
    /// # Errors
    ///
    /// If `pattern` is not a regular expression ([`ProbeError::BadRegexp`]).
    pub fn regexp(pattern: &str) -> Result<Selector> {
        match Regex::new(pattern) {
            Ok(regex) => Ok(Selector::Regexp(regex)),
            Err(source) => Err(ProbeError::BadRegexp {
                pattern: pattern.to_owned(),
                source,
            }
            .into()),
        }
    }

    /// Selects the probes whose name satisfies `predicate`.
    pub fn predicate(predicate: impl Fn(&str) -> bool + Send + Sync + 'static) -> Selector {
        Selector::Predicate(Arc::new(predicate))
    }
}

impl fmt::Debug for Selector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Selector::All => f.write_str("All"),
            Selector::Name(name) => write!(f, "Name({name:?})"),
            Selector::Pair { start, stop } => write!(f, "Pair({start:?}, {stop:?})"),
            Selector::Regexp(regex) => write!(f, "Regexp({:?})", regex.as_str()),
            Selector::Predicate(_) => f.write_str("Predicate(..)"),
        }
    }
}

/// What to do in one update: all of it, or nothing.
///
/// ```
/// use probes_lib::{Actions, Selector};
///
/// let actions = Actions::new()
///     .enable(Selector::name("req_start"))
///     .disable(Selector::regexp("cache_")?);
/// # Ok::<(), probes_lib::Error>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct Actions {
    list: Vec<(Action, Selector)>,
    force: bool,
}

impl Actions {
    /// Returns an empty list, to which actions can be added.
    pub fn new() -> Actions {
        Actions::default()
    }

    /// Returns one action for the probes of one selector.
    pub fn of(action: Action, selector: Selector) -> Actions {
        Actions::new().and(action, selector)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// Also enables these probes.
    #[must_use]
    pub fn enable(self, selector: Selector) -> Actions {
        self.and(Action::Enable, selector)
    }

    /// Also disables these probes.
    #[must_use]
    pub fn disable(self, selector: Selector) -> Actions {
        self.and(Action::Disable, selector)
    }

    /// Also does `action` to the probes of `selector`.
    #[must_use]
    pub fn and(mut self, action: Action, selector: Selector) -> Actions {
        self.list.push((action, selector));
        self
    }

    /// Sets counters to 1 or 0, whatever they were, and the sites to match: repairs a process in which
    /// counters and sites disagree.
    #[must_use]
    pub fn force(mut self, force: bool) -> Actions {
        self.force = force;
        self
    }

    /// Returns whether counters are set, whatever others have added to them: see [`Actions::force`].
    pub fn is_forced(&self) -> bool {
        self.force
    }
}

/// What an update does to the counters of a probe; its sites follow.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum CounterChange {
    /// Adds or subtracts one.
    Count(Action),
    /// Sets them to 1 or 0.
    Set(Action),
    /// Subtracts what was added to each, but not below zero.
    Undo(Box<[(LiveAddr, i32)]>),
}

/// A chosen probe and what to do with it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Choice {
    pub(crate) probe: ProbeId,
    pub(crate) counter_change: CounterChange,
    /// Whether it was named, so that disabling it fails if it is disabled already.
    pub(crate) fails_if_disabled: bool,
    /// Choices of a lower stage are carried out before those of a higher one.
    pub(crate) stage: u8,
}

/// What an update did to the counters of one probe.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct AppliedChange {
    pub(crate) name: String,
    pub(crate) stage: u8,
    /// What was added to each of its counters, and where they were.
    pub(crate) added: Box<[(LiveAddr, i32)]>,
}

/// Resolves `actions` against the names of `program`, each probe at most once.
pub(crate) fn choose(program: &Program, actions: &Actions) -> Result<Vec<Choice>> {
    resolve(program, actions, true)
}

/// Same as [`choose`], for a program that was executed after the actions were given: names that it
/// does not have are skipped, and so are probes to disable that are disabled already.
pub(crate) fn choose_present(program: &Program, actions: &Actions) -> Result<Vec<Choice>> {
    resolve(program, actions, false)
}

fn resolve(program: &Program, actions: &Actions, strict: bool) -> Result<Vec<Choice>> {
    let mut chooser = Chooser {
        program,
        strict,
        force: actions.force,
        chosen: vec![None; program.probes().len()],
        choices: Vec::new(),
    };
    for (action, selector) in &actions.list {
        chooser.add(*action, selector)?;
    }
    Ok(chooser.choices)
}

/// Returns the choices that undo an update, in the reverse order of its changes.
pub(crate) fn choose_undo(program: &Program, applied: &[AppliedChange]) -> Result<Vec<Choice>> {
    let chooser = Chooser {
        program,
        strict: true,
        force: false,
        chosen: Vec::new(),
        choices: Vec::new(),
    };
    let last = applied.iter().map(|one| one.stage).max().unwrap_or(0);
    let choice = |one: &AppliedChange| {
        Ok(Choice {
            probe: chooser.find(&one.name)?,
            counter_change: CounterChange::Undo(one.added.clone()),
            fails_if_disabled: false,
            stage: last - one.stage,
        })
    };
    applied.iter().rev().map(choice).collect()
}

struct Chooser<'p> {
    program: &'p Program,
    /// Whether names that the program does not have are an error.
    strict: bool,
    force: bool,
    /// Of each probe, the action for which it has been chosen.
    chosen: Vec<Option<Action>>,
    choices: Vec<Choice>,
}

impl Chooser<'_> {
    fn add(&mut self, action: Action, selector: &Selector) -> Result<()> {
        match selector {
            Selector::Name(name) => self.choose_named(name, action, self.strict, 0),
            Selector::Pair { start, stop } => {
                let (first, second) = match action {
                    Action::Enable => (stop, start),
                    Action::Disable => (start, stop),
                };
                if self.strict {
                    // If both are missing, the error names the one that was typed first.
                    self.find(start)?;
                }
                self.choose_named(first, action, false, 0)?;
                self.choose_named(second, action, false, 1)
            }
            Selector::All => self.choose_if(action, "all", |_| true),
            Selector::Regexp(regex) => {
                // The leftmost match is at 0 if any match is.
                let anchored = |name: &str| regex.find(name).is_some_and(|m| m.start() == 0);
                self.choose_if(action, &format!("\"{}\"", regex.as_str()), anchored)
            }
            Selector::Predicate(predicate) => {
                self.choose_if(action, "the predicate", |name| predicate(name))
            }
        }
    }

    fn choose_named(
        &mut self,
        name: &str,
        action: Action,
        fails_if_disabled: bool,
        stage: u8,
    ) -> Result<()> {
        match self.find(name) {
            Ok(probe) => self.choose(probe, action, fails_if_disabled, stage),
            Err(error) if self.strict => Err(error),
            Err(_) => Ok(()),
        }
    }

    fn choose_if(
        &mut self,
        action: Action,
        pattern: &str,
        wanted: impl Fn(&str) -> bool,
    ) -> Result<()> {
        let program = self.program;
        let mut none = true;
        for probe in program.probes().filter(|probe| wanted(probe.name())) {
            none = false;
            self.choose(probe.id(), action, false, 0)?;
        }
        if none && self.strict {
            return Err(Error::of_file(
                program.path(),
                ProbeError::NoMatch {
                    pattern: pattern.to_owned(),
                    unreadable: paths(program.unreadable()),
                },
            ));
        }
        Ok(())
    }

    fn choose(
        &mut self,
        probe: ProbeId,
        action: Action,
        fails_if_disabled: bool,
        stage: u8,
    ) -> Result<()> {
        let name = || self.program.by_id(probe).name().to_owned();
        match self.chosen[probe] {
            Some(earlier) if earlier == action => {
                return Err(ProbeError::SelectedTwice { name: name() }.into());
            }
            Some(_) => return Err(ProbeError::Conflict { name: name() }.into()),
            None => self.chosen[probe] = Some(action),
        }
        let counter_change = if self.force {
            CounterChange::Set
        } else {
            CounterChange::Count
        };
        self.choices.push(Choice {
            probe,
            counter_change: counter_change(action),
            fails_if_disabled,
            stage,
        });
        Ok(())
    }

    fn find(&self, name: &str) -> Result<ProbeId> {
        match self.program.probe(name) {
            Some(probe) => Ok(probe.id()),
            None => Err(Error::of_file(
                self.program.path(),
                ProbeError::Unknown {
                    name: name.to_owned(),
                    unreadable: paths(self.program.unreadable()),
                    near: near_names(self.program.probes().map(|probe| probe.name()), name),
                },
            )),
        }
    }
}

fn paths(unreadable: &[UnreadableObject]) -> Vec<PathBuf> {
    unreadable.iter().map(|one| one.path.clone()).collect()
}

#[cfg(test)]
mod tests;
