//! Every fixture as readelf(1) sees it, and as expected.txt says that it has to be.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Command;

use super::*;

/// What a note says; addresses are adjusted by the address of `.stapsdt.base`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Note {
    provider: String,
    name: String,
    pc: u64,
    counter: u64,
    arguments: String,
}

fn readelf(option: &str, path: &Path) -> String {
    let mut command = Command::new("readelf");
    command.env("LC_ALL", "C").args(["-W", option]).arg(path);
    let output = command.output().unwrap();
    String::from_utf8(output.stdout).unwrap()
}

/// The OCaml notes of a file.
fn notes_by_readelf(path: &Path) -> Vec<Note> {
    let sections = readelf("-S", path);
    let base_section = sections
        .lines()
        .find_map(|line| line.split_once(".stapsdt.base"))
        .map_or(0, |(_, rest)| hex(rest.split_whitespace().nth(1).unwrap()));

    let listed = counters_listed(path);
    let notes = readelf("-n", path);
    let mut lines = notes.lines();
    let mut seen = Vec::new();
    while let Some(line) = lines.next() {
        let Some((_, provider)) = line.split_once("Provider: ") else {
            continue;
        };
        let mut field = |label: &str| {
            let line = lines.next().unwrap().trim_start();
            line.strip_prefix(label).unwrap().trim().to_owned()
        };
        let (name, location, arguments) = (field("Name:"), field("Location:"), field("Arguments:"));
        let addresses: Vec<u64> = location
            .split([',', ' '])
            .filter(|word| word.starts_with("0x"))
            .map(hex)
            .collect();
        let [pc, base, semaphore] = addresses[..] else {
            panic!("{location}");
        };
        let moved = |address: u64| address.wrapping_sub(base).wrapping_add(base_section);
        let offset = match provider {
            "ocaml" if listed.contains(&moved(semaphore)) => 0,
            "ocaml" | "ocaml.1" | "ocaml_1" | "ocaml_2" => 2,
            _ => continue,
        };
        seen.push(Note {
            provider: provider.to_owned(),
            name,
            pc: if pc == 0 { 0 } else { moved(pc) },
            counter: moved(semaphore) + offset,
            arguments,
        });
    }
    seen.sort();
    seen
}

/// The addresses of counters that a fixture lists in its section `fixture_counters`: readelf does not tell where in a
/// semaphore of provider `ocaml` the counter is.
fn counters_listed(path: &Path) -> Vec<u64> {
    let dump = readelf("--hex-dump=fixture_counters", path);
    let lines = dump.lines().filter(|line| line.starts_with("  0x"));
    // A line is an address, up to four groups of four bytes, and these bytes as text.
    let digits: String = lines
        .flat_map(|line| line[13..48].chars())
        .filter(|digit| *digit != ' ')
        .collect();
    let addresses = digits.as_bytes().chunks_exact(16);
    let address = |digits: &[u8]| hex(std::str::from_utf8(digits).unwrap()).swap_bytes();
    addresses.map(address).collect()
}

fn hex(word: &str) -> u64 {
    u64::from_str_radix(word.trim_start_matches("0x"), 16).unwrap()
}

/// The sites of a table, as notes.
fn sites_of(table: &ProbeTable) -> Vec<Note> {
    let sites = table.probes().flat_map(|probe| {
        probe.sites().map(move |site| Note {
            provider: site.generation().provider().to_owned(),
            name: probe.name().to_owned(),
            pc: site.address().0,
            counter: table.semaphore(site.semaphore_index()).counter().0,
            arguments: site.argument_texts().collect::<Vec<_>>().join(" "),
        })
    });
    let mut sites: Vec<Note> = sites.collect();
    sites.sort();
    sites
}

/// All counters of a table, with the names of their probes.
fn counters_of(table: &ProbeTable) -> BTreeSet<(String, u64)> {
    let counters = table.probes().flat_map(|probe| {
        let name = probe.name().to_owned();
        counters(probe)
            .into_iter()
            .map(move |at| (name.clone(), at))
    });
    counters.collect()
}

/// How many sites and semaphores a fixture has by expected.txt: for each name, and in all.
#[derive(Debug, Default)]
struct Expected {
    names: BTreeMap<String, (usize, usize)>,
    sums: (usize, usize),
    /// Whether expected.txt has a row for each name of the fixture, not one row (`*`) for all.
    by_name: bool,
}

fn expected() -> BTreeMap<String, Expected> {
    let text = std::fs::read_to_string(test_support::fixture("expected.txt")).unwrap();
    let mut fixtures: BTreeMap<String, Expected> = BTreeMap::new();
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let words: Vec<&str> = line.split_whitespace().collect();
        let [fixture, provider, name, sites, _, _, _, semaphores] = words[..] else {
            continue;
        };
        let entry = fixtures.entry(fixture.to_owned()).or_default();
        if Generation::of_provider(provider.as_bytes()).is_none() {
            continue;
        }
        let (sites, semaphores): (usize, usize) =
            (sites.parse().unwrap(), semaphores.parse().unwrap());
        entry.sums.0 += sites;
        entry.sums.1 += semaphores;
        entry.by_name = name != "*";
        let of_name = entry.names.entry(name.to_owned()).or_default();
        of_name.0 += sites;
        of_name.1 += semaphores;
    }
    fixtures
}

#[test]
fn every_fixture_is_read_as_by_readelf() {
    let fixtures = expected();
    assert!(fixtures.len() > 20);
    for (fixture, expected) in &fixtures {
        for path in test_support::fixture_forms(fixture) {
            let seen = notes_by_readelf(&path);
            let table = match ProbeTable::read(&path) {
                Ok(table) => table,
                Err(error) => {
                    let no_probes =
                        matches!(error.kind(), ErrorKind::Probe(ProbeError::NoProbes { .. }));
                    assert!(no_probes && expected.names.is_empty(), "{error}");
                    assert_eq!(seen, []);
                    continue;
                }
            };
            let shown_path = path.display();
            let noted = seen.iter().map(|note| (note.name.clone(), note.counter));
            assert_eq!(counters_of(&table), noted.collect(), "{shown_path}");
            let with_site: Vec<Note> = seen.into_iter().filter(|note| note.pc != 0).collect();
            assert_eq!(sites_of(&table), with_site, "{shown_path}");

            let sums = (table.site_count(), table.semaphore_count());
            assert_eq!(sums, expected.sums, "{shown_path}");
            if expected.by_name {
                let names = table.probes().map(|probe| {
                    let numbers = (probe.sites().len(), probe.semaphores().len());
                    (probe.name().to_owned(), numbers)
                });
                assert_eq!(
                    names.collect::<BTreeMap<_, _>>(),
                    expected.names,
                    "{shown_path}"
                );
            }
            let pie = path.extension().unwrap() == "pie";
            assert_eq!(table.linking() == Linking::PositionIndependent, pie);
        }
    }
}

#[test]
fn sites_hold_the_bytes_of_the_file() {
    for fixture in [
        "page_borders.pie",
        "segments.nopie",
        "spin_1000.pie",
        "gen_ocaml_1.pie",
    ] {
        let simulated = crate::testing::SimulatedProcess::of(fixture);
        for site in simulated.table.probes().flat_map(|probe| probe.sites()) {
            let address = simulated.bias.live(site.address());
            let loaded = (0..6).map(|i| simulated.loaded.byte(address.plus(i)));
            assert_eq!(loaded.collect::<Vec<_>>(), site.code().0, "{fixture}");
        }
    }
    let table = ProbeTable::read(test_support::fixture("gen_ocaml_1.pie")).unwrap();
    let enabled = |name: &str| {
        let site = table.probe(name).unwrap().sites().next().unwrap();
        site.code().enabled()
    };
    assert_eq!(
        (enabled("early"), enabled("late")),
        (Some(true), Some(false))
    );
}
