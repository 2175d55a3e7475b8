//! [`Counts`]: how often the sites of probes were executed, and functions called.

use std::iter;
use std::path::Path;
use std::sync::Arc;

use crate::address::LiveAddr;
use crate::elf::table::Site;
use crate::error::{Error, MemoryPart, Result};
use crate::memory::ReadMemory;
use crate::numbers::words;
use crate::observe::functions::{ObservedFunctions, RefusedFunction};
use crate::observe::layout::arena::Arena;
use crate::observe::layout::rows::header;
use crate::observe::plan::{ObservationPlan, PlannedPoint, PointOwner};
use crate::observe::read::data_source;
use crate::process::object::{Object, UnreadableObject};
use crate::process::program::Program;

/// How often the sites of probes were executed, and functions called, since the observation began.
///
/// ```no_run
/// use probes_lib::{Observation, Options, Selector, Target};
///
/// let observation = Observation::new().count(Selector::All);
/// let observer = Target::open(4242)?.observe(&observation, Options::default())?;
/// for (name, hits) in observer.counts()?.probes() {
///     println!("{name} {hits}");
/// }
/// # Ok::<(), probes_lib::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Counts {
    program: Arc<Program>,
    /// By index of the site in the program; `None` if it is not counted.
    hits: Vec<Option<PointHits>>,
    functions: Arc<ObservedFunctions>,
    /// By index of the function among those that are observed; `None` if it is not counted.
    function_hits: Vec<Option<PointHits>>,
}

/// How often a point was hit.
#[derive(Clone, Copy, Debug)]
struct PointHits {
    hits: u64,
    /// How many more there were for which the filter has no answer; `None` if there is no filter.
    untyped: Option<u64>,
}

impl PointHits {
    fn plus(self, other: PointHits) -> PointHits {
        let untyped = [self.untyped, other.untyped].into_iter().flatten();
        PointHits {
            hits: self.hits.saturating_add(other.hits),
            untyped: untyped.reduce(u64::saturating_add),
        }
    }
}

/// How often a function was called, or an instruction executed.
///
/// ```no_run
/// # let counts: probes_lib::Counts = unimplemented!();
/// for function in counts.functions() {
///     println!("{} {}", function.name, function.hits);
/// }
/// ```
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct FunctionHits<'c> {
    /// Its name as in the source, or its address if it has none; with an offset, `f+0x12`, of an instruction inside.
    pub name: &'c str,
    /// The path of the file that it is in.
    pub object: &'c Path,
    /// Where it is in the process.
    pub address: LiveAddr,
    /// How often. Jumps to its first instruction count, too, such as tail calls of itself.
    pub hits: u64,
    /// Calls that [`Observation::only_where`](crate::Observation::only_where) has no answer for, which are not in
    /// `hits`; `None` if all calls are counted.
    pub untyped: Option<u64>,
    /// Whether it is a site of a USDT probe.
    pub is_usdt: bool,
}

/// How often one site was executed.
///
/// ```no_run
/// # let counts: probes_lib::Counts = unimplemented!();
/// for site in counts.sites("req_start") {
///     println!("{} at {}: {}", site.object.path().display(), site.address, site.hits);
/// }
/// ```
#[derive(Clone, Copy, Debug)]
pub struct SiteHits<'c> {
    /// The object that it is in.
    pub object: &'c Object,
    /// The site.
    pub site: Site<'c>,
    /// The address of its nop in the process.
    pub address: LiveAddr,
    /// How often it was executed, enabled or not.
    pub hits: u64,
    /// See [`Counts::untyped`].
    pub untyped: Option<u64>,
}

impl Counts {
    /// Reads the counters of all points that are counted.
    pub(crate) fn read(
        pid: i32,
        source: &impl ReadMemory,
        plan: &ObservationPlan,
        arenas: &[Arena],
    ) -> Result<Counts> {
        let program = plan.program.clone();
        let mut site_hits = vec![None; program.site_count()];
        let mut function_hits = vec![None; plan.functions.functions.len()];
        for (point, hits, untyped) in read_hits(pid, source, plan, arenas)? {
            // With keys, the hits are in the table of the keys.
            if !point.role.is_counted || point.role.keys.is_some() {
                continue;
            }
            let untyped = point.role.filter.is_some().then_some(untyped);
            let count = PointHits { hits, untyped };
            match point.of {
                PointOwner::Site(site) => site_hits[site] = Some(count),
                // A function that is asked for its results has a point for each of its returns.
                PointOwner::Function(function)
                    if plan.functions.not_patched.contains(&function) => {}
                PointOwner::Function(function) => {
                    let others: &mut Option<PointHits> = &mut function_hits[function];
                    *others = Some(others.map_or(count, |others| others.plus(count)));
                }
            }
        }
        Ok(Counts {
            program,
            hits: site_hits,
            functions: plan.functions.clone(),
            function_hits,
        })
    }

    /// Returns each function that is counted, in the order of their addresses.
    pub fn functions(&self) -> impl ExactSizeIterator<Item = FunctionHits<'_>> {
        let functions = self.functions.functions.iter().zip(&self.function_hits);
        let counted = functions.filter_map(|(function, &hits)| {
            let PointHits { hits, untyped } = hits?;
            Some(FunctionHits {
                name: &function.wanted.name,
                object: &function.wanted.object,
                address: function.wanted.address,
                hits,
                untyped,
                is_usdt: function.wanted.is_usdt,
            })
        });
        counted.collect::<Vec<_>>().into_iter()
    }

    /// Returns how many functions were selected: to be counted or timed, and those that cannot be.
    pub fn selected_functions(&self) -> usize {
        let functions = self.functions.functions.iter().enumerate();
        let is_patched = |index| !self.functions.not_patched.contains(&index);
        let patched = functions.filter(|(index, it)| is_patched(*index) && !it.wanted.is_internal);
        patched.count() + self.functions.refused.len()
    }

    /// Returns the names of the sites of USDT probes that are observed: counted, timed or watched.
    ///
    /// ```no_run
    /// # let counts: probes_lib::Counts = unimplemented!();
    /// for name in counts.usdt_sites() {
    ///     println!("{name}");
    /// }
    /// ```
    pub fn usdt_sites(&self) -> impl Iterator<Item = &str> {
        let functions = self.functions.functions.iter().enumerate();
        let is_patched = |index: &usize| !self.functions.not_patched.contains(index);
        let sites = functions.filter(move |(index, it)| it.wanted.is_usdt && is_patched(index));
        sites.map(|(_, it)| &*it.wanted.name)
    }

    /// Returns the functions that were selected and cannot be counted, or timed.
    pub fn refused(&self) -> &[RefusedFunction] {
        &self.functions.refused
    }

    /// Returns the files that are mapped with code in them, and whose functions could not be read when they were
    /// selected.
    pub fn unreadable(&self) -> &[UnreadableObject] {
        &self.functions.unreadable
    }

    /// Returns each probe that is counted, by name, with the sum of the hits of its sites.
    pub fn probes(&self) -> impl Iterator<Item = (&str, u64)> {
        let names = self.program.probes().map(|probe| probe.name());
        names.filter_map(|name| Some((name, self.hits(name)?)))
    }

    /// Returns the sum of the hits of a probe's sites; `None` if it is not counted.
    pub fn hits(&self, name: &str) -> Option<u64> {
        self.hits_of_sites(name).map(|of| of.hits)
    }

    /// Returns for how many hits of a probe [`Observation::only_where`](crate::Observation::only_where) has no answer:
    /// an argument does not have the type that the expression needs, or memory could not be read. They are not in
    /// [`Counts::hits`]. `None` if all hits are counted, or the probe is not.
    pub fn untyped(&self, name: &str) -> Option<u64> {
        self.hits_of_sites(name)?.untyped
    }

    fn hits_of_sites(&self, name: &str) -> Option<PointHits> {
        let sites = self.program.probe(name)?.sites();
        let hits = sites.filter_map(|site| self.hits[site]);
        hits.reduce(PointHits::plus)
    }

    /// Returns each site of a probe that is counted: object by object, by address.
    pub fn sites(&self, name: &str) -> impl Iterator<Item = SiteHits<'_>> {
        let probe = self.program.probe(name).into_iter();
        probe.flat_map(|probe| probe.sites()).filter_map(|index| {
            let site = self.program.site(index);
            let PointHits { hits, untyped } = self.hits[index]?;
            Some(SiteHits {
                object: site.object,
                site: site.site,
                address: site.address(),
                hits,
                untyped,
            })
        })
    }

    /// Returns the objects that had probes when the observation began.
    pub fn objects(&self) -> &[Object] {
        self.program.objects()
    }

    /// Returns the sum of all hits.
    pub fn total(&self) -> u64 {
        self.all().map_or(0, |all| all.hits)
    }

    /// Returns for how many of all hits [`Observation::only_where`](crate::Observation::only_where) has no answer;
    /// `None` if all hits are counted.
    pub fn total_untyped(&self) -> Option<u64> {
        self.all()?.untyped
    }

    fn all(&self) -> Option<PointHits> {
        let hits = self.hits.iter().chain(&self.function_hits).flatten();
        hits.copied().reduce(PointHits::plus)
    }
}

/// Returns the sums of what [`read_hits`] returns of the points that have keys; others may be watched, for example.
pub(super) fn read_keyed_hits(
    pid: i32,
    source: &impl ReadMemory,
    plan: &ObservationPlan,
    arenas: &[Arena],
) -> Result<(u64, u64)> {
    let (mut all, mut all_untyped) = (0_u64, 0_u64);
    for (point, hits, untyped) in read_hits(pid, source, plan, arenas)? {
        if point.role.keys.is_some() {
            all = all.saturating_add(hits);
            all_untyped = all_untyped.saturating_add(untyped);
        }
    }
    Ok((all, all_untyped))
}

/// Returns each point with its hits, and those for which its filter, histogram or keys have no answer. The second number
/// means nothing for a point that has none of these.
pub(super) fn read_hits<'p>(
    pid: i32,
    source: &impl ReadMemory,
    plan: &'p ObservationPlan,
    arenas: &'p [Arena],
) -> Result<Vec<(&'p PlannedPoint, u64, u64)>> {
    let mut hits = Vec::with_capacity(plan.points.len());
    for (arena, points) in plan.points_by_arena(arenas) {
        let of_points = points.iter().zip(read_arena(pid, source, arena)?);
        hits.extend(of_points.map(|(point, (hits, untyped))| (point, hits, untyped)));
    }
    Ok(hits)
}

/// Returns the sums of the two counters of each point of an arena over all rows that are in use.
fn read_arena(pid: i32, source: &impl ReadMemory, arena: &Arena) -> Result<Vec<(u64, u64)>> {
    let (rows, data) = (arena.rows(), arena.data());
    // A row that is claimed after this is read the next time.
    let mut header = [0; header::LEN as usize];
    let header_at = data.plus(rows.header());
    let read = source.read(header_at, &mut header);
    read.map_err(|source| Error::of_read(pid, MemoryPart::ObservationData, header_at, source))?;
    let mut hits = vec![0_u64; rows.points];
    for range in rows.in_use(&header) {
        let len = range.end - range.start;
        let counters = data_source::read(pid, source, data.plus(range.start), len)?;
        for row in counters.chunks_exact(rows.row_len() as usize) {
            for (sum, count) in hits.iter_mut().zip(words(row)) {
                *sum = sum.wrapping_add(count);
            }
        }
    }
    let untyped = hits.split_off(arena.points.len());
    let untyped = untyped.into_iter().chain(iter::repeat(0));
    Ok(hits.into_iter().zip(untyped).collect())
}

#[cfg(test)]
mod tests {
    use test_support::{Talker, fixture};

    use super::*;
    use crate::address::{FileAddr, LoadBias};
    use crate::error::{ObserveError, Refusal};
    use crate::memory::double::SliceMemory;
    use crate::observe::observation::Observation;
    use crate::observe::read::keys::{Key, KeyedCounts};
    use crate::select::Selector;
    use crate::select::function::FunctionSelector;
    use crate::testing::{
        ProgramSpec, RecordedData, arena, loaded_twice, program_with_arguments, program_with_probes,
    };

    /// Returns the counts of `a`, which is counted, and `b`, which is watched only, in two arenas with
    /// these hits of their points.
    fn counts(hits: [[u64; 2]; 2]) -> Counts {
        let program = program_with_probes(&["a", "b"]);
        let program = Arc::new(loaded_twice(&program, LoadBias(0x1000_0000)));
        let observation = Observation::new()
            .count(Selector::name("a"))
            .watch(Selector::name("b"));
        let plan = ObservationPlan::of(&observation, program, Arc::default()).unwrap();
        let arena = |(number, planned): (u64, &[crate::observe::plan::PlannedPoint])| Arena {
            points: planned.iter().map(|planned| planned.point).collect(),
            id: number,
            ..arena(0x10_0000 + number * 0x10_0000)
        };
        let arenas: Vec<Arena> = (0..).zip(plan.points.chunks(2)).map(arena).collect();
        let pieces = arenas.iter().zip(hits).map(|(arena, hits)| {
            let rows = arena.rows();
            let mut bytes = vec![0; rows.len() as usize];
            let mut put = |at: u64, hits: u64| {
                bytes[at as usize..][..8].copy_from_slice(&hits.to_le_bytes());
            };
            // One row has an owner: it counts one of the hits of the second point.
            put(rows.header() + header::CLAIMED, 1);
            put(rows.shared_row(0), hits[0]);
            put(rows.shared_row(0) + 8, hits[1] - 1);
            put(rows.owned_row(0) + 8, 1);
            put(rows.owned_row(1), 99);
            (arena.data().0, bytes)
        });
        let memory = SliceMemory::new(pieces);
        Counts::read(1, &memory, &plan, &arenas).unwrap()
    }

    #[test]
    fn hits_are_summed_by_site_probe_and_program() {
        let counts = counts([[12, 3], [10, 4]]);
        assert_eq!(counts.hits("a"), Some(22));
        // `b` is not counted, and there is no `c`.
        assert_eq!((counts.hits("b"), counts.hits("c")), (None, None));
        assert_eq!(counts.probes().collect::<Vec<_>>(), [("a", 22)]);
        assert_eq!((counts.total(), counts.objects().len()), (22, 2));
        let sites: Vec<(u64, u64)> = counts
            .sites("a")
            .map(|site| (site.address.0, site.hits))
            .collect();
        let first = ProgramSpec::TEXT;
        assert_eq!(sites, [(first, 12), (first + 0x1000_0000, 10)]);
        assert_eq!(counts.sites("b").count() + counts.sites("c").count(), 0);
    }

    #[test]
    fn sums_saturate() {
        let counts = counts([[u64::MAX, 1], [2, 1]]);
        assert_eq!(
            (counts.total(), counts.hits("a")),
            (u64::MAX, Some(u64::MAX))
        );
    }

    #[test]
    fn hits_of_functions_are_read_with_untyped_ones() {
        let code: [(FileAddr, &[u8]); 3] = [0, 1, 2].map(|index| {
            let start = FileAddr(0x60_0000 + 0x100 * index);
            // mov $1,%eax; ret
            (start, &b"\xb8\x01\0\0\0\xc3"[..])
        });
        let functions = ObservedFunctions {
            unreadable: vec![UnreadableObject {
                path: "/srv/plugin.so".into(),
                why: Arc::new(Error::of_process(1, ObserveError::NoRoom)),
                may_have_usdt_probes: true,
            }],
            ..ObservedFunctions::of_code(&code, LoadBias::NONE)
        };
        let program = program_with_arguments(&[("a", "8@%rdi"), ("b", "")]);
        let counted = Observation::new().count(Selector::name("a"));
        let counted = counted.only_where("arg0 == 1".parse().unwrap());
        let functions = Arc::new(functions);
        let mut plan = ObservationPlan::of(&counted, Arc::new(program), functions).unwrap();
        plan.refuse(&[(1, Refusal::ChangedCode)]);
        let mut data = RecordedData::of(&plan);
        for (point, hits) in [(0, 10), (1, 20), (2, 40)] {
            data.hit(point, hits);
            data.hit(data.arena.untyped_counter(point), hits / 10);
        }
        let arenas = [data.arena];
        let counts = Counts::read(1, &data.memory, &plan, &arenas).unwrap();
        assert_eq!((counts.hits("a"), counts.untyped("a")), (Some(10), Some(1)));
        let functions: Vec<_> = counts
            .functions()
            .map(|it| (it.address.0, it.hits, it.untyped))
            .collect();
        // These have no filter.
        assert_eq!(functions, [(0x60_0000, 20, None), (0x60_0200, 40, None)]);
        assert_eq!((counts.total(), counts.total_untyped()), (70, Some(1)));
        assert_eq!(
            (counts.selected_functions(), counts.refused().len()),
            (3, 1)
        );
        let [unreadable] = counts.unreadable() else {
            panic!("{:?}", counts.unreadable());
        };
        assert_eq!(unreadable.path, Path::new("/srv/plugin.so"));
        assert!(counts.untyped("b").is_none());
        // Another observation has no filter.
        let unfiltered = super::tests::counts([[1, 1], [1, 1]]);
        assert_eq!(
            (unfiltered.total_untyped(), unfiltered.untyped("a")),
            (None, None)
        );
        let by_name = KeyedCounts::by_name(&counts);
        let hits: Vec<u64> = by_name.keys().iter().map(|it| it.hits).collect();
        assert_eq!((hits, by_name.untyped()), (vec![40, 20, 10], 1));
        assert_eq!(by_name.keys()[2].key, [Key::Probe("a".to_owned())]);
    }

    #[test]
    fn exits_of_a_function_are_one_count() {
        let one = PointHits {
            hits: 3,
            untyped: Some(4),
        };
        let other = PointHits {
            hits: 5,
            untyped: None,
        };
        let sum = one.plus(other);
        assert_eq!((sum.hits, sum.untyped), (8, Some(4)));
        assert_eq!(other.plus(other).untyped, None);
        let target = Talker::start(&fixture("calls.pie"));
        let outer = FunctionSelector::Glob("outer".parse().unwrap());
        let asked = Observation::new().count_functions(outer);
        let asked = asked.only_where("retval == 3".parse().unwrap());
        let functions = ObservedFunctions::find(target.pid(), &asked).unwrap();
        let program = Arc::new(program_with_probes(&["a"]));
        let plan = ObservationPlan::of(&asked, program, Arc::new(functions)).unwrap();
        let mut data = RecordedData::of(&plan);
        for point in 0..plan.points.len() {
            data.hit(point, 10);
            data.hit(data.arena.untyped_counter(point), 3);
        }
        let arenas = [data.arena];
        let counts = Counts::read(1, &data.memory, &plan, &arenas).unwrap();
        let points = plan.points.len() as u64;
        let hits: Vec<_> = counts
            .functions()
            .map(|it| (it.name, it.hits, it.untyped))
            .collect();
        assert_eq!(hits, [("outer", 10 * points, Some(3 * points))]);
    }
}
