//! Other tools see what we see: `readelf -n` and gdb in files, gdb in processes.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

use probes_lib::{Action, ProbeTable};
use test_support::{output, program_forms};

use crate::expected;
use crate::session::{Session, all};

const PROVIDERS: [&str; 4] = ["ocaml", "ocaml.1", "ocaml_1", "ocaml_2"];

fn stdout(command: &mut Command) -> String {
    let output = output(command.env("LC_ALL", "C"));
    assert!(output.status.success(), "{command:?}: {output:?}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Name, address of the nop, arguments of each site as the library reads it.
fn sites(file: &Path) -> BTreeSet<(String, u64, String)> {
    let table = ProbeTable::read(file).unwrap();
    let sites = table.probes().flat_map(|probe| {
        probe.sites().map(move |site| {
            let arguments: Vec<&str> = site.argument_texts().collect();
            (
                probe.name().to_owned(),
                site.address().0,
                arguments.join(" "),
            )
        })
    });
    sites.collect()
}

fn hex(digits: &str) -> u64 {
    u64::from_str_radix(digits.trim_start_matches("0x"), 16).unwrap()
}

/// The fixtures, except the largest (`spin_10000`), and the programs.
fn files() -> Vec<std::path::PathBuf> {
    let names = [
        "terminating",
        "service",
        "handlers",
        "init",
        "threads",
        "shown",
        "twolibs",
        "many",
    ];
    let fixtures = expected::fixtures().into_iter().map(|subject| subject.file);
    let small = fixtures.filter(|file| !file.to_str().unwrap().contains("spin_10000"));
    small
        .chain(names.into_iter().flat_map(program_forms))
        .collect()
}

#[test]
fn readelf_lists_the_same_sites_and_arguments() {
    for file in files() {
        let notes = stdout(Command::new("readelf").args(["-n", "-W", "--"]).arg(&file));
        let mut found = BTreeSet::new();
        let (mut provider, mut name, mut location) = ("", "", 0);
        let mut base = 0;
        for line in notes.lines() {
            // The first line of a note begins with its size and type.
            let (key, value) = line.trim().split_once(':').unwrap_or((line, ""));
            let (key, value) = (key.rsplit('\t').next().unwrap_or(key).trim(), value.trim());
            match key {
                "Provider" => provider = value,
                "Name" => name = value,
                "Location" => {
                    let words: Vec<&str> = value.split(", ").collect();
                    location = hex(words[0]);
                    base = hex(words[1].trim_start_matches("Base: "));
                }
                "Arguments" if location != 0 && PROVIDERS.contains(&provider) => {
                    found.insert((name.to_owned(), (location, base), value.to_owned()));
                }
                _ => {}
            }
        }
        let shift = found
            .iter()
            .map(|(_, (_, base), _)| base.wrapping_sub(base_section(&file)))
            .next()
            .unwrap_or(0);
        let found: BTreeSet<_> = found
            .into_iter()
            .map(|(name, (location, _), arguments)| (name, location.wrapping_sub(shift), arguments))
            .collect();
        assert_eq!(found, sites(&file), "{}", file.display());
    }
}

/// Address of `.stapsdt.base`.
fn base_section(file: &Path) -> u64 {
    let sections = stdout(Command::new("readelf").args(["-S", "-W", "--"]).arg(file));
    let line = sections
        .lines()
        .find(|line| line.contains(" .stapsdt.base "));
    let mut words = line.unwrap().split_ascii_whitespace();
    words.find(|word| *word == "PROGBITS").unwrap();
    hex(words.next().unwrap())
}

#[test]
fn gdb_lists_the_same_sites_of_files() {
    for file in files() {
        let mut gdb = Command::new("gdb");
        gdb.args(["-q", "-nx", "-batch", "-ex", "info probes stap"])
            .arg(&file);
        let text = stdout(&mut gdb);
        let found: BTreeSet<(String, u64)> = text
            .lines()
            .map(|line| line.split_ascii_whitespace().collect::<Vec<_>>())
            // Type, provider, name, address, semaphore; notes without a site have an address too.
            .filter(|words| words.len() >= 5 && words[0] == "stap" && PROVIDERS.contains(&words[1]))
            .map(|words| (words[2].to_owned(), hex(words[3])))
            // That address is 0, or negative if gdb has adjusted it like any other.
            .filter(|(_, address)| (*address as i64) > 0)
            .collect();
        let expected: BTreeSet<(String, u64)> = sites(&file)
            .into_iter()
            .map(|(name, address, _)| (name, address))
            .collect();
        assert_eq!(found, expected, "{}", file.display());
    }
}

// promise: Other tracers and tools: gdb sees the bytes that we see (6 programs)
#[test]
fn gdb_reads_the_same_bytes_in_memory() {
    for name in ["gen_ocaml_2", "segments"] {
        for subject in expected::fixture_subjects(name) {
            assert_gdb_agrees(&Session::start(&subject.file));
        }
    }
    for file in program_forms("init") {
        assert_gdb_agrees(&Session::start(&file));
    }
}

fn assert_gdb_agrees(session: &Session) {
    session.apply(&all(Action::Enable)).unwrap();
    let states = session.target.states().unwrap();
    let mut gdb = Command::new("gdb");
    gdb.args(["-q", "-nx", "-batch", "-p", &session.pid().to_string()]);
    let mut expected = Vec::new();
    for probe in states.probes() {
        for site in probe.sites() {
            gdb.args(["-ex", &format!("x/6xb {}", site.address)]);
            assert_eq!(site.enabled(), Some(true));
            expected.push(site.code.0.to_vec());
        }
        for semaphore in probe.semaphores() {
            gdb.args(["-ex", &format!("x/2xb {}", semaphore.address)]);
            expected.push(semaphore.value.to_le_bytes().to_vec());
        }
    }
    let text = stdout(&mut gdb);
    let found: Vec<Vec<u8>> = text
        .lines()
        // "0x401234 <symbol+2>:\t0x90\t0xe8…"
        .filter_map(|line| line.split_once(":\t"))
        .filter(|(address, _)| address.starts_with("0x"))
        .map(|(_, bytes)| bytes.split('\t').map(|byte| hex(byte) as u8).collect())
        .collect();
    assert_eq!(found, expected, "{text}");
}
