//! Functions are those that readelf and gdb see, in files and in processes.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

use probes_lib::{FunctionTable, Functions, SourceMap};
use test_support::{Talker, fixture, output, program_forms};

fn stdout(command: &mut Command) -> String {
    let output = output(command.env("LC_ALL", "C"));
    assert!(output.status.success(), "{command:?}: {output:?}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn hex(digits: &str) -> u64 {
    u64::from_str_radix(digits.trim_start_matches("0x"), 16).unwrap()
}

fn files() -> Vec<PathBuf> {
    let programs = ["service", "twolibs", "shown", "threads"];
    let files = programs.into_iter().flat_map(program_forms);
    let libraries = ["libc.so.6", "libm.so.6"].map(mapped_library);
    files
        .chain([fixture("objects/plugin.so")])
        .chain(libraries.into_iter().flatten())
        .collect()
}

/// A library of this process, if it is mapped.
fn mapped_library(name: &str) -> Option<PathBuf> {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let line = maps.lines().find(|line| line.ends_with(name))?;
    Some(line[line.find('/')?..].into())
}

/// Address and symbol of each function.
fn symbols(file: &Path) -> BTreeSet<(u64, String)> {
    let table = FunctionTable::read(file).unwrap();
    let symbols = table.functions().flat_map(|function| {
        let address = function.address().0;
        function
            .names()
            .map(move |name| (address, name.symbol.into_owned()))
    });
    symbols.collect()
}

/// Address, length and symbol of each function that readelf lists.
fn read_by_readelf(file: &Path) -> Vec<(u64, u64, String)> {
    let text = stdout(Command::new("readelf").args(["-sW", "--"]).arg(file));
    let mut functions = Vec::new();
    for line in text.lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        // Number, value, size, type, binding, visibility, section, name.
        let [_, value, size, "FUNC" | "IFUNC", _, _, section, name, ..] = words[..] else {
            continue;
        };
        let name = name.split('@').next().unwrap();
        if section != "UND" && !name.ends_with(".cold") {
            let size = size
                .strip_prefix("0x")
                .map_or_else(|| size.parse().unwrap(), hex);
            functions.push((hex(value), size, name.to_owned()));
        }
    }
    assert!(functions.len() > 10, "{}", file.display());
    functions
}

#[test]
fn readelf_lists_the_same_functions() {
    for file in files() {
        let listed = read_by_readelf(&file);
        let expected = listed
            .iter()
            .map(|(address, _, name)| (*address, name.clone()));
        let expected: BTreeSet<(u64, String)> = expected.collect();
        let found = symbols(&file);
        let differing: Vec<_> = found.symmetric_difference(&expected).collect();
        assert!(differing.is_empty(), "{}: {differing:?}", file.display());

        let mut lens: BTreeMap<u64, u64> = BTreeMap::new();
        for (address, len, _) in listed.into_iter().filter(|it| it.1 > 0) {
            let longest = lens.entry(address).or_default();
            *longest = len.max(*longest);
        }
        let table = FunctionTable::read(&file).unwrap();
        for function in table.functions() {
            if let Some(len) = lens.remove(&function.address().0) {
                assert_eq!(
                    function.len(),
                    len,
                    "{} {}",
                    file.display(),
                    function.address()
                );
            }
        }
        assert!(lens.is_empty(), "{lens:?}");
    }
}

#[test]
fn gdb_knows_the_same_source_lines() {
    for file in program_forms("service") {
        let table = FunctionTable::read(&file).unwrap();
        let sources = SourceMap::read(&file).unwrap();
        let of_ocaml =
            |name: &str| name.starts_with("Service.") || name.starts_with("Stdlib.List.");
        let functions: Vec<_> = table
            .functions()
            .filter(|function| function.names().any(|name| of_ocaml(&name.text)))
            .collect();
        let mut gdb = Command::new("gdb");
        gdb.args(["-q", "-nx", "-batch"]).arg(&file);
        for function in &functions {
            gdb.args(["-ex", &format!("info line *{}", function.address())]);
        }
        let text = stdout(&mut gdb);
        // `Line 92 of "list.ml" starts at address …`; other texts if there is no line.
        let lines = text.lines().filter(|line| line.contains("address"));
        let mut compared = 0;
        for (function, answer) in functions.iter().zip(lines) {
            let expected = answer.strip_prefix("Line ").map(|rest| {
                let (line, rest) = rest.split_once(" of \"").unwrap();
                (
                    line.parse::<u32>().unwrap(),
                    rest.split('"').next().unwrap(),
                )
            });
            let (file, line) = sources.line(function.address());
            if let (Some((expected, path)), Some(file)) = (expected, file) {
                assert_eq!(line, Some(expected), "{answer}");
                assert!(
                    file.ends_with(path.rsplit('/').next().unwrap()),
                    "{answer} {file}"
                );
                compared += 1;
            }
        }
        assert!(compared > 20, "{compared} of {}: {text}", functions.len());
    }
}

#[test]
fn gdb_finds_functions_of_a_process_there() {
    for file in program_forms("service") {
        let target = Talker::start(&file);
        let functions = Functions::of_process(target.pid()).unwrap();
        assert!(functions.unreadable().is_empty(), "{functions:?}");
        assert_eq!(functions.program(), file);
        let globs = ["caml_alloc_*", "Stdlib.List.*", "clock_gettime", "strlen"];
        let globs = globs.map(|glob| glob.parse().unwrap());
        let selected = functions.select(&globs).unwrap();
        let pid = target.pid().to_string();
        let mut gdb = Command::new("gdb");
        gdb.args(["-q", "-nx", "-batch", "-p", &pid]);
        for function in &selected {
            gdb.args([
                "-ex",
                &format!("info symbol {}", function.address().unwrap()),
            ]);
        }
        let text = stdout(&mut gdb);
        // `caml_alloc_small in section .text of /srv/service.exe`
        let answers = text.lines().filter(|line| line.contains(" in section "));
        let mut objects = BTreeSet::new();
        for (function, answer) in selected.iter().zip(answers) {
            let symbol = answer.split(' ').next().unwrap();
            let mut names = function.function.names();
            assert!(
                names.any(|name| name.symbol == symbol),
                "{answer} {:?}",
                function.name
            );
            objects.insert(function.object.table().path().to_owned());
        }
        let answers = text.lines().filter(|line| line.contains(" in section "));
        assert_eq!(answers.count(), selected.len(), "{text}");
        // The program, libc and the vDSO.
        assert!(objects.len() >= 3, "{objects:?}");
        assert!(objects.contains(Path::new("[vdso]")), "{objects:?}");
    }
}

#[test]
fn functions_of_a_plugin_are_at_its_addresses() {
    let mut target = Talker::start(&fixture("objects/host.pie"));
    let plugin = fixture("objects/plugin.so");
    target.ask(&format!("load {}", plugin.display()), "loaded");
    let functions = Functions::of_process(target.pid()).unwrap();
    let objects = functions.objects();
    let object = objects
        .iter()
        .find(|object| object.table().path() == plugin);
    let object = object.unwrap();
    let maps = std::fs::read_to_string(format!("/proc/{}/maps", target.pid())).unwrap();
    let code = maps
        .lines()
        .find(|line| line.contains("r-xp") && line.ends_with("plugin.so"));
    let (start, end) = code
        .unwrap()
        .split(' ')
        .next()
        .unwrap()
        .split_once('-')
        .unwrap();
    let code = hex(start)..hex(end);
    let mut count = 0;
    for function in object.table().functions() {
        let address = object.load_bias().unwrap().live(function.address());
        assert!(code.contains(&address.0), "{address}");
        count += 1;
    }
    assert!(count > 2);
}
