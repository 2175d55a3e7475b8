//! Which phases and counters the runtime of each version of OCaml has, by the numbers that its events have:
//! `ev_runtime_phase` and `ev_runtime_counter` of runtime/caml/runtime_events.h.

use std::str;

use crate::numbers::u64_at;

/// The y of the last OCaml 5.y whose numbers are known.
const LAST_MINOR: u32 = 4;

/// All phases, in the order of their numbers in the last version.
const PHASES: [&str; 50] = [
    "explicit_gc_set",
    "explicit_gc_stat",
    "explicit_gc_minor",
    "explicit_gc_major",
    "explicit_gc_full_major",
    "explicit_gc_compact",
    "major",
    "major_sweep",
    "major_mark_roots",
    "major_memprof_roots",
    "major_mark",
    "minor",
    "minor_local_roots",
    "minor_memprof_roots",
    "minor_memprof_clean",
    "minor_finalized",
    "explicit_gc_major_slice",
    "finalise_update_first",
    "finalise_update_last",
    "interrupt_remote",
    "major_ephe_mark",
    "major_ephe_sweep",
    "major_finish_marking",
    "major_gc_cycle_domains",
    "major_gc_phase_change",
    "major_gc_stw",
    "major_mark_opportunistic",
    "major_slice",
    "major_finish_cycle",
    "minor_clear",
    "minor_finalizers_oldify",
    "minor_global_roots",
    "minor_leave_barrier",
    "stw_api_barrier",
    "stw_handler",
    "stw_leader",
    "major_finish_sweeping",
    "major_memprof_clean",
    "minor_finalizers_admin",
    "minor_remembered_set",
    "minor_remembered_set_promote",
    "minor_local_roots_promote",
    "domain_condition_wait",
    "domain_resize_heap_reservation",
    "compact",
    "compact_evacuate",
    "compact_forward",
    "compact_release",
    "empty_minor",
    "minor_ephe_clean",
];

/// All counters, in the order of their numbers in every version: later ones only have more.
const COUNTERS: [&str; 26] = [
    "force_minor_alloc_small",
    "force_minor_make_vect",
    "force_minor_set_minor_heap_size",
    "force_minor_memprof",
    "minor_promoted",
    "minor_allocated",
    "request_major_alloc_shr",
    "request_major_adjust_gc_speed",
    "request_minor_realloc_ref_table",
    "request_minor_realloc_ephe_ref_table",
    "request_minor_realloc_custom_table",
    "major_heap_pool_words",
    "major_heap_pool_live_words",
    "major_heap_large_words",
    "major_heap_pool_frag_words",
    "major_heap_pool_live_blocks",
    "major_heap_large_blocks",
    "major_heap_words",
    "major_allocated_words",
    "major_allocated_work",
    "major_dependent_work",
    "major_extra_work",
    "major_work_counter",
    "major_alloc_counter",
    "major_slice_target",
    "major_slice_budget",
];

/// The events of a ring itself, `ev_lifecycle`.
pub(super) const LIFECYCLE: [&str; 8] = [
    "ring_start",
    "ring_stop",
    "ring_pause",
    "ring_resume",
    "fork_parent",
    "fork_child",
    "domain_spawn",
    "domain_terminate",
];

/// Returns the name of an event of the ring itself.
pub(super) fn lifecycle(id: u16) -> Option<&'static str> {
    LIFECYCLE.get(usize::from(id)).copied()
}

/// The names of phases and counters, by their numbers in one version.
#[derive(Debug)]
pub(crate) struct Names {
    phases: Vec<&'static str>,
    counters: &'static [&'static str],
}

impl Names {
    /// Returns the names of a version, which is written as `Sys.ocaml_version` has it; `None` if the numbers of its
    /// events are not known: OxCaml, which calls itself `5.2.0+ox`, has numbers of its own.
    pub(super) fn of(version: &str) -> Option<Names> {
        let stock = version.strip_suffix("+options").unwrap_or(version);
        let is_stock = stock.bytes().all(|it| it == b'.' || it.is_ascii_digit());
        let [5, minor @ 0..=LAST_MINOR, _] = numbers(stock).filter(|_| is_stock)? else {
            return None;
        };
        let counters = match minor {
            0 => 11,
            1 | 2 => 17,
            _ => COUNTERS.len(),
        };
        let phases = PHASES.into_iter().filter(|name| since(name) <= minor);
        Some(Names {
            phases: phases.collect(),
            counters: &COUNTERS[..counters],
        })
    }

    /// The names of all phases.
    pub(super) fn phases(&self) -> impl Iterator<Item = &'static str> {
        self.phases.iter().copied()
    }

    /// The names of all counters.
    pub(super) fn counters(&self) -> impl Iterator<Item = &'static str> {
        self.counters.iter().copied()
    }

    pub(super) fn phase(&self, id: u16) -> Option<&'static str> {
        self.phases.get(usize::from(id)).copied()
    }

    pub(super) fn counter(&self, id: u16) -> Option<&'static str> {
        self.counters.get(usize::from(id)).copied()
    }
}

/// Returns the y of the first OCaml 5.y that has a phase.
fn since(phase: &str) -> u32 {
    match phase {
        "empty_minor" | "minor_ephe_clean" => 4,
        _ if phase.contains("memprof") => 3,
        _ if phase.starts_with("compact") => 2,
        _ => 0,
    }
}

/// The header of a block has its length in words from this bit on, and a colour and a tag below.
const LEN_SHIFT: u32 = 10;
const STRING_TAG: u64 = 252;

/// The header of `Sys.ocaml_release`: four fields, tag 0, and the colour of what is never collected.
const RELEASE_HEADER: u64 = 4 << LEN_SHIFT | 3 << 8;

/// How far in bytes the string of a version is from the record of the same version, at most: the compiler puts one
/// after the other.
const NEAR: usize = 512;

/// Returns the version of the compiler that a program was compiled by, from its static data: `Sys.ocaml_version`, a
/// string that begins with the numbers of the record `Sys.ocaml_release` near it. Other strings of the program that
/// look like a version have no such record near.
pub(super) fn version(data: &[u8]) -> Option<String> {
    let word = |index: usize| u64_at(data, 8 * index);
    (0..data.len() / 8).find_map(|at| {
        let fields = [word(at)?, word(at + 1)?, word(at + 2)?, word(at + 3)?];
        let [RELEASE_HEADER, major, minor, patch] = fields else {
            return None;
        };
        let start = at.saturating_sub(NEAR / 8) * 8;
        let end = data.len().min(at * 8 + NEAR);
        let release = [major, minor, patch].map(|value| value >> 1);
        let mut strings = strings(data.get(start..end)?);
        let named = |text: &&str| numbers(text).is_some_and(|it| it.map(u64::from) == release);
        strings.find(named).map(str::to_owned)
    })
}

/// Returns the strings of OCaml in static data, if they are short.
fn strings(data: &[u8]) -> impl Iterator<Item = &str> {
    (0..data.len() / 8).filter_map(|at| {
        let (header, rest) = (u64_at(data, at * 8)?, data.get(at * 8 + 8..)?);
        let len = usize::try_from(header >> LEN_SHIFT).ok()?;
        let is_short_string = header & 0xff == STRING_TAG && (1..=8).contains(&len);
        let block = is_short_string.then(|| rest.get(..len * 8))??;
        // The last byte says how many bytes before it pad the string to whole words.
        let len = block.len().checked_sub(usize::from(*block.last()?) + 1)?;
        str::from_utf8(&block[..len]).ok()
    })
}

/// Returns the three numbers that a version begins with.
fn numbers(version: &str) -> Option<[u32; 3]> {
    let end = version.find(|it: char| !it.is_ascii_digit() && it != '.');
    let mut numbers = version[..end.unwrap_or(version.len())].split('.');
    let mut number = || numbers.next()?.parse().ok();
    Some([number()?, number()?, number()?])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_have_the_numbers_of_their_headers() {
        let lens = |version: &str| {
            let names = Names::of(version).unwrap();
            (names.phases.len(), names.counters.len())
        };
        assert_eq!(lens("5.0.0"), (40, 11));
        assert_eq!(lens("5.1.1"), (40, 17));
        assert_eq!(lens("5.2.0"), (44, 17));
        assert_eq!(lens("5.3.0"), (48, 26));
        assert_eq!(lens("5.4.1+options"), (50, 26));
        for (version, minor, leader) in [("5.2.1", 10, 32), ("5.3.0", 11, 35), ("5.4.0", 11, 35)] {
            let names = Names::of(version).unwrap();
            assert_eq!(names.phase(minor), Some("minor"));
            assert_eq!(names.phase(leader), Some("stw_leader"));
            assert_eq!(names.phase(50), None);
        }
    }

    #[test]
    fn versions_with_unknown_numbers_are_refused() {
        for version in [
            "4.14.1",
            "5.5.0",
            "5.10.0",
            "6.0.0",
            "5.2.0+ox",
            "5.4.0~beta1",
            "5.3",
            "5",
            "",
            "5.x.0",
        ] {
            assert!(Names::of(version).is_none(), "{version}");
        }
    }

    fn string(text: &str) -> Vec<u8> {
        let len = text.len() / 8 + 1;
        let header = (len as u64) << LEN_SHIFT | 3 << 8 | STRING_TAG;
        let mut bytes = header.to_le_bytes().to_vec();
        bytes.extend(text.bytes());
        bytes.resize(8 + len * 8, 0);
        *bytes.last_mut().unwrap() = (len * 8 - text.len() - 1) as u8;
        bytes
    }

    fn release(numbers: [u64; 3]) -> Vec<u8> {
        let [major, minor, patch] = numbers.map(|number| number * 2 + 1);
        let words = [RELEASE_HEADER, major, minor, patch, 1];
        words.map(u64::to_le_bytes).concat()
    }

    #[test]
    fn version_is_found_beside_its_release() {
        let data = [
            string("5.1.0"),
            release([5, 3, 0]),
            string("Unix"),
            string("5.3.0"),
        ]
        .concat();
        assert_eq!(version(&data).as_deref(), Some("5.3.0"));
        for end in 0..data.len() {
            assert_eq!(version(&data[..end]), None);
        }
        let data = [string("5.2.0+ox"), release([5, 2, 0])].concat();
        assert_eq!(version(&data).as_deref(), Some("5.2.0+ox"));
    }

    #[test]
    fn string_without_release_is_no_version() {
        let far = [release([5, 3, 0]), vec![0; NEAR], string("5.3.0")].concat();
        for data in [string("5.3.0"), release([5, 3, 0]), far, Vec::new()] {
            assert_eq!(version(&data), None);
        }
    }
}
