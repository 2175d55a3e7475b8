//! What each target is expected to have and to do: expected.txt says it for fixtures, and the table
//! in test-programs/README.md for OCaml programs.

use std::collections::BTreeMap;
use std::path::PathBuf;

use test_support::{fixture_forms, program_forms};

/// One program, in one form: position independent or fixed.
pub(crate) struct Subject {
    pub(crate) file: PathBuf,
    pub(crate) probes: BTreeMap<String, Expected>,
    /// It prints only the sum of the hits of all names.
    pub(crate) sum_only: bool,
}

/// What is expected of the probes of one name.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Expected {
    pub(crate) sites: usize,
    pub(crate) semaphores: usize,
    /// Hits of one run as built.
    pub(crate) built: u64,
    /// Hits of one run with all probes on.
    pub(crate) on: u64,
    /// Hits of one run with only this name on, besides those that are on as built.
    pub(crate) alone: u64,
}

impl Subject {
    /// The expected hits of one run, if `hits` gives the number for each name.
    pub(crate) fn hits(&self, hits: impl Fn(&str, &Expected) -> u64) -> BTreeMap<String, u64> {
        // A program does not report a name that has no hits even with all probes on.
        let each = self.probes.iter().filter(|(_, probe)| probe.on > 0);
        if self.sum_only {
            let sum = each.map(|(name, probe)| hits(name, probe)).sum();
            return BTreeMap::from([("*".to_owned(), sum)]);
        }
        each.map(|(name, probe)| (name.clone(), hits(name, probe)))
            .collect()
    }
}

const EXPECTED: &str = include_str!("../../../../test-programs/fixtures/expected.txt");

/// The providers of the four generations.
const PROVIDERS: [&str; 4] = ["ocaml", "ocaml.1", "ocaml_1", "ocaml_2"];

/// All fixtures with OCaml probes, in both forms.
pub(crate) fn fixtures() -> Vec<Subject> {
    let mut names: Vec<&str> = rows().map(|row| row[0]).collect();
    names.dedup();
    names.into_iter().flat_map(fixture_subjects).collect()
}

/// One fixture in both forms.
pub(crate) fn fixture_subjects(fixture: &str) -> Vec<Subject> {
    let mut probes: BTreeMap<String, Expected> = BTreeMap::new();
    for row in rows().filter(|row| row[0] == fixture) {
        let number = |column: usize| row[column].parse::<u64>().unwrap_or(0);
        let one = |names: u64| Expected {
            sites: (number(3) / names) as usize,
            semaphores: (number(7) / names) as usize,
            built: number(5) / names,
            on: number(6) / names,
            alone: number(6) / names,
        };
        if row[2] == "*" {
            // The row stands for as many names as it has semaphores, with equal numbers.
            let names = number(7);
            probes.extend((0..names).map(|i| (format!("probe_{i}"), one(names))));
            continue;
        }
        let probe = probes.entry(row[2].to_owned()).or_default();
        let more = one(1);
        probe.sites += more.sites;
        probe.semaphores += more.semaphores;
        probe.built += more.built;
        probe.on += more.on;
        probe.alone += more.alone;
    }
    let subject = |file| Subject {
        file,
        probes: probes.clone(),
        sum_only: false,
    };
    fixture_forms(fixture).map(subject).into()
}

/// The rows of OCaml probes in expected.txt.
fn rows() -> impl Iterator<Item = Vec<&'static str>> {
    EXPECTED
        .lines()
        .filter(|line| !line.starts_with('#'))
        .map(|line| line.split_ascii_whitespace().collect::<Vec<_>>())
        .filter(|row| row.len() == 8 && PROVIDERS.contains(&row[1]))
}

/// The OCaml programs that run a round on request, in both forms.
pub(crate) fn round_programs() -> Vec<Subject> {
    // Name, sites, hits as built, with all on, alone.
    let handlers = [
        ("alloc", 1, 0, 1, 1),
        ("collect", 1, 0, 1, 1),
        ("compact", 1, 0, 1, 1),
        ("raise", 1, 0, 2, 2),
        ("print", 1, 0, 1, 1),
        ("outer", 1, 0, 1, 1),
        ("inner", 1, 0, 1, 0),
        ("recursive", 1, 0, 10, 10),
        ("one_armed", 1, 0, 3, 3),
        ("closure", 1, 0, 1, 1),
        ("guarded", 1, 0, 1, 1),
    ];
    let init = [
        ("starts_on", 1, 1, 1, 1),
        ("starts_on_twice", 2, 2, 2, 2),
        ("starts_off", 1, 0, 1, 1),
        ("tested_only", 0, 0, 0, 0),
    ];
    let twolibs = [
        ("shared", 3, 0, 3, 3),
        ("inlined", 1, 0, 2, 2),
        ("left_only", 1, 0, 1, 1),
        ("right_only", 1, 0, 1, 1),
        ("main_only", 1, 0, 1, 1),
    ];
    let many = (0..200).map(|i| {
        let count = if i % 10 == 0 { 2 } else { 1 };
        (format!("many_{i:03}"), count as usize, 0, count, count)
    });
    let owned = |row: &(&str, usize, u64, u64, u64)| (row.0.to_owned(), row.1, row.2, row.3, row.4);
    [
        rounds_of("handlers", handlers.iter().map(owned), false),
        rounds_of("static/handlers", handlers.iter().map(owned), false),
        rounds_of("init", init.iter().map(owned), false),
        rounds_of("twolibs", twolibs.iter().map(owned), false),
        rounds_of("many", many, true),
    ]
    .into_iter()
    .flatten()
    .collect()
}

fn rounds_of(
    program: &str,
    rows: impl Iterator<Item = (String, usize, u64, u64, u64)>,
    sum_only: bool,
) -> Vec<Subject> {
    let probes: BTreeMap<String, Expected> = rows
        .map(|(name, sites, built, on, alone)| {
            let probe = Expected {
                sites,
                semaphores: 1,
                built,
                on,
                alone,
            };
            (name, probe)
        })
        .collect();
    let subject = |file| Subject {
        file,
        probes: probes.clone(),
        sum_only,
    };
    program_forms(program).map(subject).into()
}
