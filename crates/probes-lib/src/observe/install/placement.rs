//! Finds addresses for the arenas of an observation. They are unmapped, and near enough for calls from the points; for
//! points with punned jumps, they are where these jumps can lead ([`patch_plan`](crate::patch_plan)).

use std::collections::HashMap;
use std::ops::Range;

use crate::address::{LiveAddr, PAGE};
use crate::error::{Error, ObserveError, Result};
use crate::observe::layout::arena::{Arena, HeaderVersion};
use crate::observe::layout::observer_record::ObserverRecord;
use crate::observe::layout::semaphores::{ChangedWord, SemaphoreRecord};
use crate::observe::layout::shared::SharedLayout;
use crate::observe::plan::{ObservationPlan, PlannedPoint};
use crate::process::maps::Mapping;
use crate::process::tool::new_id;

/// How far from its points an arena may begin or end: calls reach 2 GiB.
const REACH: u64 = (1 << 31) - (1 << 20);

/// How many bytes stay unmapped on each side of an arena, so that the kernel does not merge it with another mapping.
const GAP: u64 = 1 << 20;

/// The gap on each side of an arena of one point whose window has no room for [`GAP`].
const NARROW_GAP: u64 = 16 * PAGE;

/// How far the stack of the main thread may grow down.
const STACK_ROOM: u64 = 1 << 30;

/// How far the heap may grow up (brk(2)); where it cannot, malloc(3) maps memory elsewhere.
const HEAP_ROOM: u64 = 16 << 20;

/// The distance between two addresses that are tried one after the other; also the lowest address of an arena.
const STEP: u64 = 16 << 20;

/// The window of a point is the range of addresses where its trampoline can begin. If it is at least this long, the
/// trampoline is placed near the point; if it is shorter (narrow), the arena has to be placed within it.
const WIDE: u64 = 1 << 30;

/// The largest number of arenas within narrow windows. Each adds about 50 us to the stop time.
const MAX_NARROW: usize = 128;

/// Where the arenas of a plan are, or which of its points have no room.
pub(crate) enum Placed {
    /// They hold the points of the plan in its order.
    Arenas(Vec<Arena>),
    /// The indices of functions for whose trampolines no address is free.
    NoRoom(Vec<usize>),
}

/// Returns the arenas of a plan whose trampolines are `trampoline_len` bytes long, and sorts the points of the plan in
/// the order of the arenas. First comes one arena for each group of points that are near each other, by address; then
/// one for each group of points whose narrow windows overlap. The first arena has the shared data, and each has the
/// record of `observer`.
///
/// # Errors
///
/// If there is no room near a site, or there are no points.
pub(crate) fn place(
    pid: i32,
    plan: &mut ObservationPlan,
    trampoline_len: u64,
    maps: &[Mapping],
    observer: &ObserverRecord,
) -> Result<Placed> {
    let mut placing = Placing {
        occupied: maps.iter().map(with_room_to_grow).collect(),
        arenas: Vec::new(),
        trampoline_len,
        shared: plan.shared,
        is_filtered: plan.is_filtered(),
        is_sampled: plan.is_sampled(),
        observer,
        max_arenas_in_windows: MAX_NARROW,
    };
    let windows = narrow_windows(plan);
    let window = |planned: &PlannedPoint| windows.get(&planned.point.address);
    plan.sort_by_key(|planned| {
        let window = window(planned).map(|window| (window.start, window.end));
        (window, planned.point.address)
    });
    let first_narrow = plan.points.partition_point(|it| window(it).is_none());
    let (wide, narrow) = plan.points.split_at(first_narrow);
    let not_near = placing.place_all_near(wide);
    if not_near.iter().any(|it| it.site().is_some()) {
        return Err(Error::of_process(pid, ObserveError::NoRoom));
    }
    let not_within = placing.place_all_within(narrow, window);
    let no_room = not_near.into_iter().filter_map(PlannedPoint::function);
    let mut no_room: Vec<usize> = no_room.chain(not_within).collect();
    if !no_room.is_empty() {
        no_room.sort_unstable();
        return Ok(Placed::NoRoom(no_room));
    }
    let arenas = placing.arenas;
    if arenas.is_empty() {
        return Err(Error::of_process(pid, ObserveError::NoSites));
    }
    let order = arenas.iter().flat_map(|it| &it.points);
    let index: HashMap<LiveAddr, usize> = order.map(|it| it.address).zip(0..).collect();
    plan.sort_by_key(|planned| index.get(&planned.point.address).copied());
    Ok(Placed::Arenas(arenas))
}

/// Returns the windows of the points that have narrow ones ([`WIDE`]), by the addresses of the points.
fn narrow_windows(plan: &ObservationPlan) -> HashMap<LiveAddr, Range<u64>> {
    let window = |planned: &PlannedPoint| {
        let (site, bias) = plan.patch_site(planned)?;
        let window = site.trampolines(bias);
        let window = window.start.0..window.end.0;
        (window.end - window.start < WIDE).then_some((planned.point.address, window))
    };
    plan.points.iter().filter_map(window).collect()
}

/// Returns the addresses of a mapping, and those into which it may grow.
fn with_room_to_grow(mapping: &Mapping) -> (u64, u64) {
    let (start, end) = (mapping.start.0, mapping.end.0);
    match mapping.path() {
        b"[stack]" => (start.saturating_sub(STACK_ROOM), end),
        b"[heap]" => (start, end.saturating_add(HEAP_ROOM)),
        _ => (start, end),
    }
}

/// Returns the addresses that all of these windows have in common.
fn common_window<'w>(windows: impl Iterator<Item = &'w Range<u64>>) -> Range<u64> {
    windows.fold(0..u64::MAX, |one, other| {
        one.start.max(other.start)..one.end.min(other.end)
    })
}

/// The arenas that are placed so far, and what the next ones need.
struct Placing<'o> {
    /// The ranges where no arena may be, in no order: mappings, and the arenas so far.
    occupied: Vec<(u64, u64)>,
    arenas: Vec<Arena>,
    trampoline_len: u64,
    shared: SharedLayout,
    is_filtered: bool,
    is_sampled: bool,
    observer: &'o ObserverRecord,
    /// The most arenas within windows.
    max_arenas_in_windows: usize,
}

impl Placing<'_> {
    /// Returns an arena for these points, in the order of their addresses; its own address is not
    /// set.
    fn arena(&self, planned: &[PlannedPoint]) -> Arena {
        let mut planned: Vec<&PlannedPoint> = planned.iter().collect();
        planned.sort_unstable_by_key(|planned| planned.point.address);
        let semaphore = |(point, planned): (usize, &&PlannedPoint)| {
            let ChangedWord { at, change } = planned.changed_word?;
            Some(SemaphoreRecord { at, point, change })
        };
        let semaphores = planned.iter().enumerate().filter_map(semaphore).collect();
        Arena {
            code: LiveAddr(0),
            points: planned.iter().map(|planned| planned.point).collect(),
            semaphores,
            trampoline_len: self.trampoline_len,
            lead: 0,
            shared: if self.arenas.is_empty() {
                self.shared
            } else {
                SharedLayout::default()
            },
            is_filtered: self.is_filtered,
            is_sampled: self.is_sampled,
            id: new_id(),
            version: HeaderVersion::Current(self.observer.clone()),
        }
    }

    fn add(&mut self, arena: Arena) {
        let range = arena.range();
        self.occupied.push((range.start, range.end));
        self.arenas.push(arena);
    }

    /// Places an arena near each group of these points, sorted by address; returns the points for which there is no room.
    fn place_all_near<'p>(&mut self, mut points: &'p [PlannedPoint]) -> Vec<&'p PlannedPoint> {
        let mut no_room = Vec::new();
        while let Some(first) = points.first() {
            let first = first.point.address.0;
            // Half of the reach, so that there is room on both sides.
            let near_count = points.partition_point(|it| it.point.address.0 - first < REACH / 2);
            let (these, others) = points.split_at(near_count);
            points = others;
            if self.place_near(these).is_none() {
                no_room.extend(these);
            }
        }
        no_room
    }

    /// Places arenas within the windows of these points, sorted by their windows; returns the functions for which there is
    /// no room.
    fn place_all_within<'w>(
        &mut self,
        mut points: &[PlannedPoint],
        window: impl Fn(&PlannedPoint) -> Option<&'w Range<u64>>,
    ) -> Vec<usize> {
        let mut groups = Vec::new();
        while !points.is_empty() {
            let count = self.count_with_common_window(points.iter().filter_map(&window));
            let (group, others) = points.split_at(count);
            groups.push(group);
            points = others;
        }
        self.place_groups(groups, window)
    }

    /// Places an arena near these points.
    fn place_near(&mut self, planned: &[PlannedPoint]) -> Option<()> {
        let mut arena = self.arena(planned);
        arena.code = address_for(&arena, &self.occupied)?;
        self.add(arena);
        Some(())
    }

    /// Places an arena whose trampolines begin in `window`.
    fn place_within(&mut self, planned: &[PlannedPoint], window: &Range<u64>) -> Option<()> {
        let arena = self.arena(planned);
        let of_one = (planned.len() == 1).then_some(NARROW_GAP);
        let mut gaps = [GAP].into_iter().chain(of_one);
        let arena = gaps.find_map(|gap| self.placed_into(&arena, window, gap))?;
        self.add(arena);
        Some(())
    }

    /// Places arenas for groups of points that share a window each; returns the functions for which there is no room.
    fn place_groups<'w>(
        &mut self,
        mut groups: Vec<&[PlannedPoint]>,
        window: impl Fn(&PlannedPoint) -> Option<&'w Range<u64>>,
    ) -> Vec<usize> {
        let mut no_room = Vec::new();
        // The largest group is taken first, from the end, so that the limited number of arenas hold as many points as
        // possible.
        groups.sort_by_key(|group| group.len());
        let limit = self.arenas.len() + self.max_arenas_in_windows;
        while let Some(group) = groups.pop() {
            let common = common_window(group.iter().filter_map(&window));
            let is_full = self.arenas.len() >= limit;
            if !is_full && self.place_within(group, &common).is_some() {
                continue;
            }
            match group {
                [_, _, ..] if !is_full => groups.extend(group.chunks(group.len().div_ceil(2))),
                _ => no_room.extend(group.iter().filter_map(PlannedPoint::function)),
            }
        }
        no_room
    }

    /// Returns the arena at the lowest free address at which its trampolines begin in `window`.
    fn placed_into(&self, arena: &Arena, window: &Range<u64>, gap: u64) -> Option<Arena> {
        let mut arena = arena.clone();
        let last = arena.trampoline(arena.points.len() - 1).0;
        // Where the arena would have to begin for its first trampoline to begin where the window does.
        let lowest = window.start.saturating_sub(arena.trampoline(0).0);
        let mut start = lowest.next_multiple_of(PAGE);
        if start + last >= window.end {
            start = lowest & !(PAGE - 1);
        }
        start = start.max(STEP);
        loop {
            arena.lead = lowest.saturating_sub(start);
            let end = start + arena.code_len() + arena.data_len();
            if start + arena.lead + last >= window.end || end >= 1 << 47 {
                return None;
            }
            let (from, to) = (start.saturating_sub(gap), end + gap);
            let overlapping = self
                .occupied
                .iter()
                .filter(|&&(begin, end)| end > from && begin < to);
            match overlapping.map(|&(_, end)| end).max() {
                Some(end) => start = (end + gap).next_multiple_of(PAGE),
                None => break,
            }
        }
        arena.code = LiveAddr(start);
        Some(arena)
    }

    /// Returns how many windows, counted from the first, have enough addresses in common for one trampoline of each;
    /// at least one.
    fn count_with_common_window<'w>(&self, windows: impl Iterator<Item = &'w Range<u64>>) -> usize {
        let mut common = 0..u64::MAX;
        let fit = |(count, window): &(u64, &Range<u64>)| {
            common = common.start.max(window.start)..common.end.min(window.end);
            let len = common.end.saturating_sub(common.start);
            // An arena begins at a page.
            *count == 1 || len >= count * self.trampoline_len + PAGE
        };
        (1..).zip(windows).take_while(fit).count()
    }
}

/// Returns where an arena can begin that is within reach of its points.
fn address_for(arena: &Arena, occupied: &[(u64, u64)]) -> Option<LiveAddr> {
    let len = arena.code_len() + arena.data_len();
    // Points have to reach the trampolines, and trampolines the wrappers.
    let points = arena.points.iter();
    let near = points.flat_map(|point| [Some(point.address), point.wrapper()]);
    let near = near.flatten().map(|address| address.0);
    let (first, last) = (near.clone().min()?, near.max()?);
    let is_free = |start: u64| {
        let (from, to) = (start.saturating_sub(GAP), start.saturating_add(len + GAP));
        occupied
            .iter()
            .all(|&(begin, end)| end <= from || begin >= to)
    };
    // Addresses below the points are tried first, the nearest first; then those above, the farthest first, because the
    // heap grows upwards from the executable.
    let below = (1..REACH / STEP).map(|step| first.wrapping_sub(step * STEP + len));
    let above = (1..REACH / STEP)
        .rev()
        .map(|step| last.wrapping_add(step * STEP));
    let is_reached = |start: u64| {
        let lowest = first.min(start);
        let highest = last.max(start.saturating_add(len));
        start >= STEP && highest < 1 << 47 && highest - lowest < REACH
    };
    let starts = below.chain(above).map(|start| start & !(PAGE - 1));
    let mut fit = starts.filter(|&start| is_reached(start) && is_free(start));
    fit.next().map(LiveAddr)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::address::{FileAddr, LoadBias};
    use crate::error::ErrorKind;
    use crate::observe::functions::ObservedFunctions;
    use crate::observe::layout::arena::LINE;
    use crate::observe::observation::Observation;
    use crate::observe::plan::PointOwner;
    use crate::observe::point::{Point, PointKind};
    use crate::observe::role::Role;
    use crate::process::maps::parse;
    use crate::testing::program_with_probes;

    const MIB: u64 = 1 << 20;
    /// Where a PIE may be loaded.
    const HIGH: u64 = 0x5555_5555_0000;
    /// The length of an arena of one point that shares nothing: a page of code, 7 of counters, and one for
    /// the successor.
    const LEN: u64 = 9 * PAGE;

    /// Returns a plan with points at these addresses, each with the address of its wrapper.
    fn plan(points: &[(u64, u64)], shared: SharedLayout) -> ObservationPlan {
        let point = |&(address, wrapper): &(u64, u64)| PlannedPoint {
            point: Point {
                address: LiveAddr(address),
                kind: PointKind::Site {
                    operand: (wrapper.wrapping_sub(address + 6) as u32).to_le_bytes(),
                },
            },
            role: Role::default(),
            of: PointOwner::Site(0),
            part: 0,
            changed_word: None,
        };
        ObservationPlan::of_points(points.iter().map(point).collect(), shared)
    }

    fn maps(ranges: &[Range<u64>]) -> Vec<Mapping> {
        let line = |range: &Range<u64>| {
            let Range { start, end } = range;
            format!("{start:x}-{end:x} r-xp 00000000 fe:01 7 /bin/it\n")
        };
        parse(ranges.iter().map(line).collect::<String>().as_bytes())
    }

    fn arenas_of(plan: &mut ObservationPlan, maps: &[Mapping]) -> Result<Vec<Arena>> {
        match place(1, plan, LINE, maps, &ObserverRecord::default())? {
            Placed::Arenas(arenas) => Ok(arenas),
            Placed::NoRoom(functions) => panic!("no room for {functions:?}"),
        }
    }

    /// Returns where the arena of one point begins; `None` if there is no room.
    fn placed(point: u64, wrapper: u64, occupied: &[Range<u64>]) -> Option<u64> {
        let mut plan = plan(&[(point, wrapper)], SharedLayout::default());
        match arenas_of(&mut plan, &maps(occupied)) {
            Ok(arenas) => {
                assert_eq!(arenas.len(), 1);
                let range = arenas[0].range();
                assert_eq!((range.start % PAGE, range.end - range.start), (0, LEN));
                Some(range.start)
            }
            Err(error) => {
                assert!(matches!(
                    error.kind(),
                    ErrorKind::Observe(ObserveError::NoRoom)
                ));
                None
            }
        }
    }

    #[test]
    fn nearest_free_place_below_is_taken_first() {
        let own = HIGH..HIGH + MIB;
        let at_step = |step: u64| HIGH - step * 16 * MIB - LEN;
        let with = |other: Range<u64>| placed(HIGH + 8, HIGH + 0x500, &[own.clone(), other]);
        // The address of a point need not be that of a page.
        assert_eq!(with(own.clone()), Some(at_step(1)));
        assert_eq!(placed(HIGH + 0x500, HIGH, &[]), Some(at_step(1)));
        // One MiB on both sides stays unmapped.
        let (start, end) = (at_step(1), at_step(1) + LEN);
        assert_eq!(with(start - 2 * MIB..start - MIB), Some(start));
        assert_eq!(with(end + MIB..end + 2 * MIB), Some(start));
        for taken in [
            start - 2 * MIB..start - MIB + PAGE,
            end + MIB - PAGE..end + 2 * MIB,
            start + PAGE..end - PAGE,
            start - MIB..end + MIB,
        ] {
            assert_eq!(with(taken.clone()), Some(at_step(2)), "{taken:x?}");
        }
    }

    #[test]
    fn farthest_free_place_above_is_taken_last() {
        let last = HIGH + MIB + 0x1000;
        let above = |step: u64| last + step * 16 * MIB;
        let lower = HIGH - 4096 * MIB..last + PAGE;
        let with = |other: Range<u64>| placed(HIGH, last, &[lower.clone(), other]);
        assert_eq!(with(lower.clone()), Some(above(126)));
        assert_eq!(with(above(126)..above(127)), Some(above(125)));
        assert_eq!(with(above(0)..above(200)), None);
    }

    #[test]
    fn low_addresses_and_the_end_stay_free() {
        // Executables that are not position independent are at 4 MiB.
        for first in [4 * MIB, 18 * MIB] {
            let above = first + 126 * 16 * MIB;
            assert_eq!(placed(first, first, &[]), Some(above));
        }
        let at_16_mib = 32 * MIB + LEN;
        assert_eq!(placed(at_16_mib, at_16_mib, &[]), Some(16 * MIB));
        // User space ends one page before 1 << 47.
        let end = 1 << 47;
        let last = end - 16 * MIB - LEN;
        let lower = last - 4096 * MIB..last + PAGE;
        assert_eq!(placed(last, last, std::slice::from_ref(&lower)), None);
        let last = last - PAGE;
        assert_eq!(placed(last, last, &[lower]), Some(last + 16 * MIB));
    }

    #[test]
    fn arena_is_near_points_and_wrappers() {
        // From the arena to the wrapper, or from the point to the arena.
        let spanning = |span: u64| placed(HIGH, HIGH + span - 16 * MIB - LEN, &[]);
        assert_eq!(spanning(2047 * MIB), None);
        assert_eq!(spanning(2047 * MIB - PAGE), Some(HIGH - 16 * MIB - LEN),);
    }

    #[test]
    fn distant_points_get_arenas_of_their_own() {
        let near = 2047 * MIB / 2;
        let addresses = [HIGH, HIGH + near - 1, HIGH + near, HIGH + 2 * near - 1];
        let shared = SharedLayout {
            pairs: 1,
            record_len: 0,
            ..SharedLayout::default()
        };
        let mut plan = plan(&addresses.map(|at| (at, at)), shared);
        let arenas = arenas_of(&mut plan, &[]).unwrap();
        let of = |arena: &Arena| -> Vec<u64> {
            arena.points.iter().map(|point| point.address.0).collect()
        };
        let points: Vec<_> = arenas.iter().map(of).collect();
        assert_eq!(points, [&addresses[..2], &addresses[2..]]);
        // The first one has the shared data.
        assert_eq!(arenas[0].shared, shared);
        assert!(arenas[1].shared.is_empty());
        let (one, other) = (arenas[0].range(), arenas[1].range());
        assert!(one.end + MIB <= other.start || other.end + MIB <= one.start);
    }

    /// sub $8,%rsp; loop: cmp $1,%rax; jne loop; add $8,%rsp; ret. The last byte of a jump at its entry is the first
    /// one of `cmp`, so the trampoline has to begin in a window of 16 MiB, about 1152 MiB above.
    const PUNNED: &[u8] = b"\x48\x83\xec\x08\x48\x83\xf8\x01\x75\xfa\x48\x83\xc4\x08\xc3";
    /// The length of those 16 MiB.
    const WINDOW: u64 = 16 * MIB;
    /// mov $1,%eax; ret. Its trampoline may be anywhere near.
    const PLAIN: &[u8] = b"\xb8\x01\0\0\0\xc3";

    fn only(range: Range<u64>) -> [Range<u64>; 1] {
        [range]
    }

    /// Returns the lowest address that a jump of `PUNNED` at this address can reach.
    fn window_of(at: u64) -> u64 {
        at + 5 + 0x4800_0000
    }

    /// Returns a plan with functions of this code, at these addresses.
    fn plan_of_functions(functions: &[(u64, &[u8])]) -> ObservationPlan {
        let bias = LoadBias(HIGH);
        let functions = functions
            .iter()
            .map(|(at, code)| (FileAddr(at - HIGH), *code))
            .collect::<Vec<_>>();
        let functions = ObservedFunctions::of_code(&functions, bias);
        let program = Arc::new(program_with_probes(&["a"]));
        ObservationPlan::of(&Observation::new(), program, Arc::new(functions)).unwrap()
    }

    /// Places trampolines of this length, asserts that each is where its point's jump can lead, and that nothing near
    /// the arenas is mapped, and returns these.
    fn reached_arenas(plan: &mut ObservationPlan, len: u64, occupied: &[Range<u64>]) -> Vec<Arena> {
        let placed = place(1, plan, len, &maps(occupied), &ObserverRecord::default()).unwrap();
        let Placed::Arenas(arenas) = placed else {
            panic!("no room");
        };
        let mut points = plan.points.iter();
        let mut taken = occupied.to_vec();
        for arena in &arenas {
            let range = arena.range();
            assert_eq!(range.start % PAGE, 0);
            let is_near =
                |it: &Range<u64>| it.end > range.start - MIB && it.start < range.end + MIB;
            assert!(!taken.iter().any(is_near), "{range:x?} {taken:x?}");
            for (index, point) in arena.points.iter().enumerate() {
                let planned = points.next().unwrap();
                assert_eq!(planned.point, *point);
                let (site, bias) = plan.patch_site(planned).unwrap();
                let trampoline = arena.trampoline(index);
                assert!(site.trampolines(bias).contains(&trampoline));
            }
            taken.push(range);
        }
        assert!(points.next().is_none());
        arenas
    }

    /// Returns a state in which nothing is mapped or placed.
    fn placing(trampoline_len: u64, observer: &ObserverRecord) -> Placing<'_> {
        Placing {
            occupied: Vec::new(),
            arenas: Vec::new(),
            trampoline_len,
            shared: SharedLayout::default(),
            is_filtered: false,
            is_sampled: false,
            observer,
            max_arenas_in_windows: MAX_NARROW,
        }
    }

    /// Returns which functions have no room.
    fn without_room(plan: &mut ObservationPlan, occupied: &[Range<u64>]) -> Vec<usize> {
        match place(1, plan, LINE, &maps(occupied), &ObserverRecord::default()).unwrap() {
            Placed::Arenas(_) => Vec::new(),
            Placed::NoRoom(functions) => functions,
        }
    }

    #[test]
    fn trampolines_are_where_punned_jumps_lead() {
        let at = |index: u64| HIGH + 0x100 * index;
        let mut plan = plan_of_functions(&[(at(0), PUNNED), (at(1), PLAIN), (at(2), PUNNED)]);
        let arenas = reached_arenas(&mut plan, LINE, &only(HIGH..HIGH + MIB));
        // First the arena near its points, then the one within a window.
        let points = |arena: &Arena| arena.points.iter().map(|it| it.address.0).collect();
        let points: Vec<Vec<u64>> = arenas.iter().map(points).collect();
        assert_eq!(points, [vec![at(1)], vec![at(0), at(2)]]);
        // As low as possible.
        let trampolines = arenas[1].trampoline(0).0;
        assert!((window_of(at(2))..window_of(at(2)) + PAGE).contains(&trampolines));
    }

    #[test]
    fn mapped_parts_of_windows_are_avoided() {
        let start = window_of(HIGH);
        let mut plan = plan_of_functions(&[(HIGH, PUNNED)]);
        let mut begin = |occupied: &[Range<u64>]| {
            let arenas = reached_arenas(&mut plan, LINE, occupied);
            arenas[0].trampoline(0).0 - start
        };
        let free = begin(&[]);
        assert!(free < PAGE);
        // The next mapping may be one MiB after the arena, or before it.
        let page = start & !(PAGE - 1);
        let after = page + LEN + MIB + PAGE;
        assert_eq!(begin(&only(after..after + PAGE)), free);
        assert_eq!(begin(&only(page - 2 * MIB..page - MIB)), free);
        // An arena that would overlap a mapping begins one MiB after it; if it then overlaps the next one, after that.
        let first = begin(&only(page..page + PAGE));
        assert!((MIB..MIB + 3 * PAGE).contains(&first), "{first:x}");
        let next = page + 2 * MIB..page + 3 * MIB;
        let second = begin(&[page..page + PAGE, next]);
        assert!((4 * MIB..4 * MIB + PAGE).contains(&second), "{second:x}");
        // Trampolines may begin up to the end of the window.
        let last = begin(&only(page - MIB..page + WINDOW - MIB - PAGE));
        assert!((WINDOW - 2 * PAGE..WINDOW).contains(&last), "{last:x}");
        let full = page - MIB..page + WINDOW;
        assert_eq!(without_room(&mut plan, &[full]), [0]);
    }

    #[test]
    fn trampoline_begins_where_the_only_jump_leads() {
        // ret; call: four bytes of the call stay as they are.
        let code = b"\xc3\xe8\x0a\x80\x08\x00";
        let target = HIGH + 5 + 0x0880_0ae8;
        for (nearest, has_room) in [(MIB, true), (20 * PAGE, true), (4 * PAGE, false)] {
            let mut plan = plan_of_functions(&[(HIGH, code)]);
            let page = target & !(PAGE - 1);
            let mapped = page + LEN + PAGE + nearest;
            let maps = maps(&only(mapped..mapped + PAGE));
            let placed = place(1, &mut plan, LINE, &maps, &ObserverRecord::default()).unwrap();
            match placed {
                Placed::Arenas(arenas) => assert_eq!(arenas[0].trampoline(0).0, target),
                Placed::NoRoom(functions) => assert_eq!(functions, [0]),
            }
            let is_placed = without_room(&mut plan, &only(mapped..mapped + PAGE)).is_empty();
            assert_eq!(is_placed, has_room, "{nearest:x}");
        }
    }

    #[test]
    fn functions_without_room_are_reported() {
        let at = |index: u64| HIGH + 0x100 * index;
        let functions = [
            (at(0), PLAIN),
            (at(1), PUNNED),
            (at(2), PLAIN),
            (at(3), PUNNED),
        ];
        let mut plan = plan_of_functions(&functions);
        let windows = window_of(HIGH) - MIB..window_of(HIGH) + WINDOW + MIB;
        assert_eq!(
            without_room(&mut plan, std::slice::from_ref(&windows)),
            [1, 3]
        );
        let all = HIGH - 4096 * MIB..HIGH + 4096 * MIB;
        assert_eq!(
            without_room(&mut plan, std::slice::from_ref(&all)),
            [0, 1, 2, 3]
        );
        let around = HIGH - 4096 * MIB..window_of(HIGH) - MIB;
        let above = window_of(HIGH) + WINDOW + MIB..HIGH + 4096 * MIB;
        assert_eq!(without_room(&mut plan, &[around, above]), [0, 2]);
        assert!(without_room(&mut plan, &only(HIGH..HIGH + MIB)).is_empty());
    }

    #[test]
    fn windows_are_shared_if_all_trampolines_fit() {
        let functions =
            |at: &[u64]| -> Vec<(u64, &[u8])> { at.iter().map(|at| (HIGH + at, PUNNED)).collect() };
        let sizes = |at: &[u64], len: u64, occupied: &[Range<u64>]| -> Vec<usize> {
            let arenas = reached_arenas(&mut plan_of_functions(&functions(at)), len, occupied);
            arenas.iter().map(|arena| arena.points.len()).collect()
        };
        // The first two windows have 4 MiB in common, and the last one nothing with them.
        let at = [0, 12 * MIB, 32 * MIB];
        assert_eq!(sizes(&at, LINE, &[]), [2, 1]);
        let half = 2 * MIB - PAGE / 2;
        assert_eq!(sizes(&at[..2], half, &[]), [2]);
        assert_eq!(sizes(&at[..2], half + LINE, &[]), [1, 1]);
        // The window has a free part at each end, and neither has room for both trampolines: each gets one.
        let start = window_of(HIGH);
        let occupied = start + 5 * MIB / 2..start + 14 * MIB;
        assert_eq!(sizes(&[0, 0x100], MIB, &[]), [2]);
        assert_eq!(sizes(&[0, 0x100], MIB, &[occupied]), [1, 1]);
    }

    #[test]
    fn arenas_in_windows_are_few_and_hold_many() {
        let observer = ObserverRecord::default();
        let mut placing = placing(LINE, &observer);
        // No windows overlap, except those of the last two functions.
        let at = |index: u64| HIGH + 32 * MIB * index;
        let mut functions: Vec<(u64, &[u8])> = (0..4).map(|it| (at(it), PUNNED)).collect();
        functions.push((at(3) + 0x100, PUNNED));
        let plan = plan_of_functions(&functions);
        let windows: Vec<Range<u64>> = functions
            .iter()
            .map(|(at, _)| window_of(*at)..window_of(*at) + WINDOW)
            .collect();
        let window = |planned: &PlannedPoint| windows.get(planned.function()?);
        let groups = [0..1, 1..2, 2..3, 3..5].map(|range| &plan.points[range]);
        placing.max_arenas_in_windows = 3;
        let no_room = placing.place_groups(groups.to_vec(), window);
        assert_eq!(no_room, [0]);
        let sizes: Vec<usize> = placing.arenas.iter().map(|it| it.points.len()).collect();
        assert_eq!(sizes, [2, 1, 1]);
    }

    #[test]
    fn nothing_to_observe_is_an_error() {
        let mut none = plan(&[], SharedLayout::default());
        let error = arenas_of(&mut none, &[]).unwrap_err();
        assert!(matches!(
            error.kind(),
            ErrorKind::Observe(ObserveError::NoSites)
        ));
    }
}
