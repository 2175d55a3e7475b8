//! [`Observation`]: what is to be results of the hits of a process, and what that makes of its sites.
//! Pure.

use crate::error::{ObserveError, Result};
use crate::observe::layout::shared::{MAX_PAIRS, Shared, record};
use crate::observe::plan::{ArgumentSource, MOST_ARGUMENTS, PairEnd, Role, WatchRole};
use crate::process::program::Program;
use crate::select::{Actions, Selector, choose};

/// What is to be results of the hits of a process.
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
    counted: Vec<Selector>,
    pairs: Vec<(String, String)>,
    watched: Vec<Selector>,
}

impl Observation {
    /// Nothing yet.
    pub fn new() -> Observation {
        Observation::default()
    }

    /// Also counts the hits of these probes.
    #[must_use]
    pub fn count(mut self, selector: Selector) -> Observation {
        self.counted.push(selector);
        self
    }

    /// Also takes the times from the hits of `start` to those of `stop` in the same thread: a stop
    /// ends the last start that has not ended yet. They may be the same probe: then from each hit to
    /// the next.
    #[must_use]
    pub fn time(mut self, start: impl Into<String>, stop: impl Into<String>) -> Observation {
        self.pairs.push((start.into(), stop.into()));
        self
    }

    /// Also shows the hits of these probes one by one, with their arguments.
    #[must_use]
    pub fn watch(mut self, selector: Selector) -> Observation {
        self.watched.push(selector);
        self
    }

    pub(crate) fn pairs(&self) -> &[(String, String)] {
        &self.pairs
    }

    /// The role of each site of a program.
    ///
    /// # Errors
    ///
    /// If a probe is not there, or there are too many pairs.
    pub(crate) fn roles(&self, program: &Program) -> Result<Vec<Role>> {
        if self.pairs.len() > MAX_PAIRS as usize {
            let (given, most) = (self.pairs.len(), MAX_PAIRS as usize);
            return Err(ObserveError::TooManyPairs { given, most }.into());
        }
        let mut roles = vec![Role::default(); program.site_count()];
        for site in chosen(program, &self.counted)? {
            roles[site].is_counted = true;
        }
        for (number, (start, stop)) in (0..).zip(&self.pairs) {
            // The end of one comes before the start of the next, where both are the same site.
            for (name, end) in [
                (stop, PairEnd::Stop(number)),
                (start, PairEnd::Start(number)),
            ] {
                for site in chosen(program, &[Selector::name(name)])? {
                    roles[site].ends.push(end);
                }
            }
        }
        for role in &mut roles {
            role.ends
                .sort_by_key(|end| matches!(end, PairEnd::Start(_)));
        }
        for site in chosen(program, &self.watched)? {
            let arguments = program.site(site).site.arguments().take(MOST_ARGUMENTS);
            roles[site].watched = Some(WatchRole {
                site: site as u32,
                arguments: arguments
                    .map(|it| ArgumentSource::of(it.as_ref()))
                    .collect(),
            });
        }
        Ok(roles)
    }

    /// What sites of these roles share.
    pub(crate) fn shared(&self, roles: &[Role]) -> Shared {
        let watched = roles.iter().filter_map(|role| role.watched.as_ref());
        let most = watched.map(|watched| watched.arguments.len()).max();
        Shared {
            pairs: self.pairs.len() as u32,
            record_len: most.map_or(0, record::len),
        }
    }
}

/// The sites of the probes of selectors.
fn chosen(program: &Program, selectors: &[Selector]) -> Result<Vec<usize>> {
    // To choose by; nothing is enabled.
    let actions = selectors.iter().cloned();
    let choices = choose(program, &actions.fold(Actions::new(), Actions::enable))?;
    let probes = choices.iter().map(|choice| program.by_id(choice.probe));
    Ok(probes.flat_map(|probe| probe.sites()).collect())
}
