//! Functions are those that readelf and gdb see, in files and in processes.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

use probes_lib::{FunctionSelector, FunctionTable, Functions, Language, NameSource, SourceMap};
use test_support::{Scratch, Talker, fixture, output, program_forms};

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
pub(crate) fn symbols(file: &Path) -> BTreeSet<(u64, String)> {
    let table = FunctionTable::read(file).unwrap();
    let symbols = table.functions().flat_map(|function| {
        let address = function.address().0;
        function
            .names()
            .map(move |name| (address, name.symbol.into_owned()))
    });
    symbols.collect()
}

/// The separate debug file of a file, if it is installed.
fn installed_debug_file(file: &Path) -> Option<PathBuf> {
    let id = FunctionTable::read(file).unwrap().build_id()?.to_string();
    let (first, rest) = id.split_at(2);
    let path = format!("/usr/lib/debug/.build-id/{first}/{rest}.debug");
    Some(PathBuf::from(path)).filter(|it| it.exists())
}

/// Address, length and symbol of each function that readelf lists.
fn read_by_readelf(file: &Path) -> Vec<(u64, u64, String)> {
    let mut readelf = Command::new("readelf");
    let text = stdout(
        readelf
            .args(["-sW", "--"])
            .arg(file)
            .args(installed_debug_file(file)),
    );
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
        let answers: Vec<&str> = lines.collect();
        assert_eq!(answers.len(), functions.len(), "{text}");
        let mut compared = 0;
        for (function, answer) in functions.iter().zip(answers) {
            let expected = answer.strip_prefix("Line ").map(|rest| {
                let (line, rest) = rest.split_once(" of \"").unwrap();
                (
                    line.parse::<u32>().unwrap(),
                    rest.split('"').next().unwrap(),
                )
            });
            let (file, line) = sources.line(function.address());
            let expected_line = expected.map(|(line, _)| line);
            assert_eq!(line, expected_line, "{answer} {file:?}");
            if let (Some((_, path)), Some(file)) = (expected, file) {
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
fn gdb_finds_the_same_functions_in_a_process() {
    for file in program_forms("service") {
        let target = Talker::start(&file);
        let functions = Functions::of_process(target.pid()).unwrap();
        assert!(functions.unreadable().is_empty(), "{functions:?}");
        assert_eq!(functions.program(), file);
        let globs = ["caml_alloc_*", "Stdlib.List.*", "clock_gettime", "strlen"];
        let globs = globs.map(|glob| FunctionSelector::Glob(glob.parse().unwrap()));
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
                function.name()
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

/// A copy of a program without the symbols and the debugging information, and if `exports` is false also without the
/// exported symbols, which strip(1) keeps.
fn stripped(scratch: &Scratch, file: &Path, exports: bool) -> PathBuf {
    let copy = scratch.file("stripped");
    stdout(Command::new("strip").arg("-o").arg(&copy).arg(file));
    if !exports {
        let mut bytes = std::fs::read(&copy).unwrap();
        let at = |bytes: &[u8], offset: usize, len: usize| {
            let mut word = [0; 8];
            word[..len].copy_from_slice(&bytes[offset..][..len]);
            u64::from_le_bytes(word) as usize
        };
        let (headers, count) = (at(&bytes, 0x28, 8), at(&bytes, 0x3c, 2));
        for header in (0..count).map(|index| headers + 64 * index) {
            const SHT_DYNSYM: usize = 11;
            if at(&bytes, header + 4, 4) == SHT_DYNSYM {
                bytes[header + 32..][..8].fill(0);
            }
        }
        std::fs::write(&copy, bytes).unwrap();
    }
    copy
}

#[test]
fn stripped_programs_have_the_same_functions() {
    let scratch = Scratch::new();
    for file in program_forms("service") {
        let whole = FunctionTable::read(&file).unwrap();
        let stripped = FunctionTable::read(stripped(&scratch, &file, false)).unwrap();
        let known: BTreeMap<_, _> = whole
            .functions()
            .map(|it| (it.address(), it.len()))
            .collect();
        for function in stripped.functions() {
            let len = known.get(&function.address());
            // Some parts of functions that are 2 bytes long (ud2) look like functions.
            let is_function = len == Some(&function.len()) || function.len() == 2;
            assert!(is_function, "{} {}", function.address(), function.len());
        }
        let (found, expected) = (stripped.functions().len(), known.len());
        // A few, such as _init, are not in .eh_frame.
        assert!(found + 12 > expected, "{found} of {expected}");
    }
}

// promise: Functions: OCaml's functions of a stripped program have the names of its frametables (2 programs)
#[test]
fn frametables_name_functions_without_symbols() {
    let scratch = Scratch::new();
    for file in program_forms("service") {
        let whole = FunctionTable::read(&file).unwrap();
        let known: BTreeMap<_, _> = whole
            .functions()
            .filter_map(|it| Some((it.address(), it.name()?)))
            .collect();
        let stripped = FunctionTable::read(stripped(&scratch, &file, false)).unwrap();
        let (mut same, mut named) = (0, 0);
        for function in stripped.functions() {
            let Some(name) = function.name() else {
                continue;
            };
            assert_eq!(name.source, NameSource::Frametable);
            let symbol = &known[&function.address()];
            assert_eq!(symbol.language, Some(Language::Ocaml), "{symbol} {name}");
            named += 1;
            same += usize::from(name.text == symbol.text);
            // Some names differ: the symbol `Stdlib.List.fun` is `Stdlib.List.fold.(fun)` in the frametable, and
            // `Stdlib.List.entry` is `Stdlib.List`.
            let (module, _) = symbol.text.rsplit_once('.').unwrap();
            assert!(name.text.starts_with(module), "{symbol} {name}");
        }
        assert!(same > 400 && named > 700, "{same} {named}");
    }
}

#[test]
fn first_calls_are_in_their_functions() {
    let scratch = Scratch::new();
    for file in program_forms("service") {
        let sources = SourceMap::read(&file).unwrap();
        for exports in [false, true] {
            let table = FunctionTable::read(stripped(&scratch, &file, exports)).unwrap();
            let (mut near, mut calls) = (0, 0);
            for function in table.functions() {
                let Some(call) = function.first_call() else {
                    continue;
                };
                if let (Some(file), Some(line)) = sources.line(function.address()) {
                    let name = |path: &str| path.rsplit('/').next().unwrap().to_owned();
                    calls += 1;
                    let lines = line..line + 40;
                    near +=
                        usize::from(name(file) == name(&call.file) && lines.contains(&call.line));
                }
            }
            // The others begin with code that was inlined, or with the body of a local function.
            assert!(calls > 300 && near * 20 > calls * 19, "{near} of {calls}");
        }
    }
}
