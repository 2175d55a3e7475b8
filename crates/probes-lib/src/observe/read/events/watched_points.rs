//! [`WatchedPoint`]: how the hits of a point are decoded, from its plan.

use std::collections::HashMap;
use std::iter;
use std::sync::Arc;

use super::{EventKind, EventOrigin};
use crate::elf::arguments::Argument;
use crate::observe::plan::{ObservationPlan, PlannedPoint, PointOwner};
use crate::observe::role::{ArgumentFormat, ArgumentSource, KeyRole, Role, WatchRole};
use crate::process::program::ProbeId;

/// A point that is watched, and the arguments that are recorded.
#[derive(Debug)]
pub(super) struct WatchedPoint {
    pub(super) of: EventOrigin,
    /// Whether each of its hits is recorded, and not only those at the ends of slow pairs.
    pub(super) is_watched: bool,
    /// Whether it is an end of pairs.
    pub(super) is_pair_end: bool,
    /// The key of its pairs, if it is evaluated for hits.
    pub(super) pair_key: Option<Arc<KeyRole>>,
    pub(super) arguments: Vec<ArgumentShape>,
    /// Whether returns are recorded.
    pub(super) has_results: bool,
    /// How its result is decoded, if results are recorded and it has one.
    pub(super) result: Option<ArgumentShape>,
    /// Whether all exits are recorded, and where calls are.
    pub(super) has_frames: bool,
}

/// How to decode an argument of a record.
#[derive(Clone, Copy, Debug)]
pub(super) struct ArgumentShape {
    pub(super) source: ArgumentSource,
    pub(super) size: u8,
    pub(super) signed: bool,
    pub(super) is_float: bool,
    pub(super) is_c: bool,
}

impl WatchedPoint {
    /// Returns how a place of a function is watched, of whose hits this is `recorded`.
    fn of_function(of: EventOrigin, role: &Role, recorded: &WatchRole) -> WatchedPoint {
        let function = recorded.function;
        let is_c = function.is_none_or(|it| !it.is_ocaml) || !recorded.formats.is_empty();
        let shape = |(source, format): (&ArgumentSource, ArgumentFormat)| ArgumentShape {
            source: *source,
            size: format.size,
            signed: format.signed,
            is_float: format.is_float,
            is_c,
        };
        let formats = recorded.formats.iter().copied();
        let formats = formats.chain(iter::repeat(ArgumentFormat::WORD));
        let has_results = role.watched.is_none() || function.is_some_and(|it| it.has_results);
        let result_format = recorded.result_format.filter(|_| has_results);
        WatchedPoint {
            of,
            is_watched: role.watched.is_some(),
            is_pair_end: !role.ends.is_empty(),
            pair_key: None,
            arguments: recorded.arguments.iter().zip(formats).map(shape).collect(),
            has_results,
            result: result_format.map(|format| shape((&ArgumentSource::RESULT, format))),
            has_frames: function.is_some_and(|it| it.exits_on.is_some()),
        }
    }

    /// Returns which arguments the records of this kind have.
    pub(super) fn shapes(&self, kind: EventKind) -> &[ArgumentShape] {
        match kind {
            EventKind::Hit => &self.arguments,
            EventKind::Return => self.result.as_slice(),
            EventKind::Jump => &[],
        }
    }
}

/// Returns how each point of a plan is watched; `None` if it is not, and no slow pairs are recorded there.
pub(super) fn watched_points(plan: &ObservationPlan) -> Vec<Option<WatchedPoint>> {
    let probes = plan.program.probes();
    let probes = probes.flat_map(|probe| probe.sites().map(move |site| (site, probe.id())));
    let probes: HashMap<usize, ProbeId> = probes.collect();
    let watched = |planned: &PlannedPoint| {
        let role = &planned.role;
        // `watched` and `reported` have the same arguments.
        let recorded = role.watched.as_ref().or(role.reported.as_ref())?;
        Some(match planned.of {
            PointOwner::Function(function) => {
                WatchedPoint::of_function(EventOrigin::Function(function), role, recorded)
            }
            PointOwner::Site(site) => {
                let probe = *probes.get(&site)?;
                let arguments = plan.program.site(site).site.arguments();
                WatchedPoint {
                    of: EventOrigin::Site { probe, site },
                    is_watched: role.watched.is_some(),
                    is_pair_end: !role.ends.is_empty(),
                    pair_key: role.pair_key.clone().filter(|_| plan.has_pair_keys),
                    arguments: shapes_at_site(&recorded.arguments, arguments),
                    has_results: false,
                    result: None,
                    has_frames: false,
                }
            }
        })
    };
    plan.points.iter().map(watched).collect()
}

/// Returns the arguments of a site that are recorded from `sources`.
fn shapes_at_site<'a>(
    sources: &[ArgumentSource],
    arguments: impl Iterator<Item = Option<Argument<'a>>>,
) -> Vec<ArgumentShape> {
    let shape = |(source, argument): (&ArgumentSource, Option<Argument<'a>>)| ArgumentShape {
        source: *source,
        size: argument.as_ref().map_or(8, |it| it.size),
        signed: argument.is_some_and(|it| it.signed),
        is_float: false,
        is_c: false,
    };
    sources.iter().zip(arguments).map(shape).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::observe::observation::Observation;
    use crate::observe::read::events::decoder::tests::{function, plan_of_functions};

    #[test]
    fn ocaml_arguments_without_format_are_values() {
        let mut plan = plan_of_functions(&Observation::new().watch_functions(function("leaf")));
        let mut is_c = |is_ocaml: bool, formats: &[ArgumentFormat]| {
            let watched = plan.points[0].role.watched.as_mut().unwrap();
            watched.function.as_mut().unwrap().is_ocaml = is_ocaml;
            watched.formats = formats.to_vec();
            watched_points(&plan)[0].as_ref().unwrap().arguments[0].is_c
        };
        assert!(is_c(false, &[]) && !is_c(true, &[]));
        // What has a format is a number or a pointer, whatever passes it.
        assert!(is_c(true, &[ArgumentFormat::WORD]));
    }
}
