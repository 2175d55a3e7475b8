//! [`SiteRoles`]: what is recorded at the sites of probes that an observation selects.

use std::cell::OnceCell;
use std::sync::Arc;

use iced_x86::Register;

use super::PlannedHistogram;
use crate::error::{ObserveError, Result};
use crate::expression::MAX_ARGUMENTS;
use crate::expression::{Expression, Parameter, ParameterKind, Scope};
use crate::observe::frame_id::{FrameId, is_called_by_ocaml, is_ocaml_4};
use crate::observe::layout::shared::MAX_PAIRS;
use crate::observe::observation::Observation;
use crate::observe::role::{
    ArgumentSource, FilterRole, HistogramRole, IntegerRole, KeyRole, Marks, PairEnd, PairFilter,
    Role, WatchRole,
};
use crate::process::program::{LiveSite, Program};
use crate::select::{Actions, Selector, choose};

/// What is recorded at the sites of a program.
pub(super) struct SiteRoles {
    /// The role of each site.
    pub(super) roles: Vec<Role>,
    pub(super) histograms: Vec<PlannedHistogram>,
    /// The names of the probes or pairs that keys number.
    pub(super) key_names: Vec<String>,
    /// The pairs of which [`PlannedPair::has_named_number`] is true.
    pub(super) with_named_number: Vec<u32>,
}

impl SiteRoles {
    pub(super) fn of(observation: &Observation, program: &Program) -> Result<SiteRoles> {
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

    /// Adds the counters and the histograms.
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

    /// Returns the histogram of a site. The sites of a probe share it if their values are all signed, or all unsigned.
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

/// The arguments of one name at both ends of pairs, by which events are distinguished.
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
            // Each hit of such a probe begins another event.
            if start == stop {
                continue;
            }
            // A missing probe is reported when the ends are added.
            let sites = selected(program, &[Selector::name(start), Selector::name(stop)]);
            let sites = sites.unwrap_or_default();
            let Some(name) = name_in_common(program, &sites) else {
                continue;
            };
            let own = |site: &usize| named.of_sites[*site].is_none_or(|own| own == name);
            // A site has one mark, even if it is an end of several pairs.
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

/// Returns the first name of an argument that all these sites have and can be marked by.
fn name_in_common<'p>(program: &'p Program, sites: &[usize]) -> Option<&'p str> {
    let (first, others) = sites.split_first()?;
    let mut names = program.site(*first).site.argument_names();
    names.find(|name| {
        let has_it = |site: &usize| marking_register(program.site(*site), Some(name)).is_some();
        !name.is_empty() && has_it(first) && others.iter().all(has_it)
    })
}

/// Returns the key by which stops find their starts, for a site that is an end of a pair.
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

/// Returns the marks of a site that is an end of a pair; its events are distinguished by the argument of this name, or
/// by the first one.
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
