//! [`WatchedPoint`]: how the hits of a point are decoded, from its plan.

use std::collections::HashMap;
use std::iter;
use std::sync::Arc;

use super::{EventKind, EventOrigin};
use crate::observe::plan::{ObservationPlan, PlannedPoint, PointOwner};
use crate::observe::role::{ArgumentFormat, ArgumentSource, KeyRole};

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
    let watched = |(index, planned): (usize, &PlannedPoint)| {
        let role = &planned.role;
        role.watched.as_ref().or(role.reported.as_ref())?;
        Some((planned.site()?, index))
    };
    let planned = plan.points.iter().enumerate();
    let index_of: HashMap<usize, usize> = planned.filter_map(watched).collect();
    let mut points: Vec<Option<WatchedPoint>> = plan.points.iter().map(|_| None).collect();
    for (index, planned) in plan.points.iter().enumerate() {
        let role = &planned.role;
        let recorded = role.watched.as_ref().or(role.reported.as_ref());
        let (PointOwner::Function(function), Some(watched)) = (planned.of, recorded) else {
            continue;
        };
        let is_c = watched.function.is_none_or(|it| !it.is_ocaml) || !watched.formats.is_empty();
        let shape = |(source, format): (&ArgumentSource, ArgumentFormat)| ArgumentShape {
            source: *source,
            size: format.size,
            signed: format.signed,
            is_float: format.is_float,
            is_c,
        };
        let formats = watched.formats.iter().copied();
        let formats = formats.chain(iter::repeat(ArgumentFormat::WORD));
        let has_results =
            role.watched.is_none() || watched.function.is_some_and(|it| it.has_results);
        let watched = WatchedPoint {
            of: EventOrigin::Function(function),
            is_watched: role.watched.is_some(),
            is_pair_end: !role.ends.is_empty(),
            pair_key: None,
            arguments: watched.arguments.iter().zip(formats).map(shape).collect(),
            has_results,
            result: (watched.result_format.filter(|_| has_results))
                .map(|format| shape((&ArgumentSource::RESULT, format))),
            has_frames: watched.function.is_some_and(|it| it.exits_on.is_some()),
        };
        points[index] = Some(watched);
    }
    for probe in plan.program.probes() {
        for site in probe.sites() {
            let Some(&index) = index_of.get(&site) else {
                continue;
            };
            let role = &plan.points[index].role;
            // `watched` and `reported` have the same arguments.
            let sources = role.watched.as_ref().or(role.reported.as_ref());
            let sources = sources.into_iter().flat_map(|it| &it.arguments);
            let arguments = plan.program.site(site).site.arguments();
            let shapes = sources
                .zip(arguments)
                .map(|(source, argument)| ArgumentShape {
                    source: *source,
                    size: argument.as_ref().map_or(8, |it| it.size),
                    signed: argument.is_some_and(|it| it.signed),
                    is_float: false,
                    is_c: false,
                });
            let watched = WatchedPoint {
                of: EventOrigin::Site {
                    probe: probe.id(),
                    site,
                },
                is_watched: role.watched.is_some(),
                is_pair_end: !role.ends.is_empty(),
                pair_key: role.pair_key.clone().filter(|_| plan.has_pair_keys),
                has_results: false,
                result: None,
                has_frames: false,
                arguments: shapes.collect(),
            };
            points[index] = Some(watched);
        }
    }
    points
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
