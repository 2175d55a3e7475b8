//! `list -provider`: the USDT probes of all providers, in all formats.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;
use test_support::{Scratch, Talker, fixture, fixture_forms, output};

use crate::objects::{damage_messages, damaged_plugin, hosts};
use crate::support::{Run, image, run, run_on};

/// A note, or what is shown of a site: probe, address in the file, arguments.
type Note = (String, u64, String);

fn parse_hex(text: &str) -> u64 {
    u64::from_str_radix(text.strip_prefix("0x").unwrap(), 16).unwrap()
}

pub(crate) fn libstdcxx() -> PathBuf {
    let file = Path::new("/usr/lib/x86_64-linux-gnu/libstdc++.so.6");
    file.canonicalize().unwrap()
}

/// The sites, and the semaphores of probes, as readelf shows them.
fn shown_by_readelf(file: &Path) -> (BTreeSet<Note>, BTreeSet<(String, u64)>) {
    let notes = output(Command::new("readelf").arg("-n").arg(file));
    let notes = String::from_utf8(notes.stdout).unwrap();
    let (mut sites, mut semaphores) = (BTreeSet::new(), BTreeSet::new());
    let mut probe = String::new();
    let mut location = Vec::new();
    for line in notes.lines() {
        let Some((key, value)) = line.trim_start().split_once(": ") else {
            continue;
        };
        match key {
            "Provider" => probe = value.to_owned() + ":",
            "Name" => probe += value,
            "Location" => {
                let numbers = value.split(", ");
                location = numbers
                    .map(|part| parse_hex(part.rsplit(' ').next().unwrap()))
                    .collect();
            }
            // The last line of a note.
            "Arguments" => {
                let [pc, _base, semaphore] = location[..] else {
                    panic!("{location:x?}");
                };
                if pc != 0 {
                    sites.insert((probe.clone(), pc, value.to_owned()));
                }
                if semaphore != 0 {
                    semaphores.insert((probe.clone(), semaphore));
                }
            }
            _ => {}
        }
    }
    (sites, semaphores)
}

fn each<'j>(json: &'j Value, field: &'j str) -> impl Iterator<Item = (String, &'j Value)> {
    let probes = json["probes"].as_array().unwrap().iter();
    probes.flat_map(move |probe| {
        let [provider, name] = ["provider", "name"].map(|part| probe[part].as_str().unwrap());
        let parts = probe[field].as_array().unwrap().iter();
        parts.map(move |part| (format!("{provider}:{name}"), part))
    })
}

/// The sites and semaphores of an object in a JSON answer.
fn shown(json: &Value, object: &Path) -> (BTreeSet<Note>, BTreeSet<(String, u64)>) {
    let is_of = |part: &Value| part["object"] == object.to_str().unwrap();
    let address = |part: &Value| parse_hex(part["file_address"].as_str().unwrap());
    let sites = each(json, "sites").filter(|(_, site)| is_of(site));
    let sites = sites.map(|(probe, site)| {
        let arguments = site["arguments"].as_str().unwrap().to_owned();
        (probe, address(site), arguments)
    });
    let semaphores = each(json, "semaphores").filter(|(_, semaphore)| is_of(semaphore));
    let semaphores = semaphores.map(|(probe, semaphore)| (probe, address(semaphore)));
    (sites.collect(), semaphores.collect())
}

// promise: Functions: USDT probes of all providers are those that readelf shows (libstdc++, 8 fixtures)
#[test]
fn file_has_the_probes_that_readelf_shows() {
    let fixtures = ["usdt", "foreign", "foreign_only", "gen_ocaml_2"];
    let fixtures = fixtures.into_iter().flat_map(fixture_forms);
    for file in fixtures.chain([libstdcxx()]) {
        let expected = shown_by_readelf(&file);
        assert!(!expected.0.is_empty(), "{}", file.display());
        let json = run_on("list -json -provider any", &file).json();
        assert_eq!(shown(&json, &file), expected);
        assert!(json["pid"].is_null());
        assert!(each(&json, "sites").all(|(_, site)| site["address"].is_null()));
        let plain = run_on("list -provider any", &file).answer();
        let lines: Vec<&str> = plain.lines().collect();
        // Some of OCaml's have only a semaphore.
        let sites = expected.0.iter().map(|(probe, ..)| probe.as_str());
        let semaphores = expected.1.iter().map(|(probe, _)| probe.as_str());
        let sorted: BTreeSet<&str> = sites.chain(semaphores).collect();
        assert_eq!(lines, sorted.into_iter().collect::<Vec<_>>());
    }
}

#[test]
fn sites_and_semaphores_are_below_their_names() {
    for file in fixture_forms("usdt") {
        let name = file.file_name().unwrap().to_str().unwrap();
        let (sites, semaphores) = shown_by_readelf(&file);
        let at = |probe: &str| {
            let sites = sites.iter().filter(|it| it.0 == probe);
            sites.map(|it| it.1).collect::<Vec<_>>()
        };
        let (between, guarded, open) = (at("demo:between"), at("demo:guarded"), at("demo:open"));
        let semaphore = semaphores.first().unwrap().1;
        let source = include_str!("../../../../test-programs/fixtures/usdt.S");
        let lines = |code: &str| {
            let is_code = |(_, line): &(usize, &str)| line.trim_start().starts_with(code);
            let found = source.lines().enumerate().filter(is_code);
            found.map(|(index, _)| index + 1).collect::<Vec<_>>()
        };
        let guarded_lines = lines("GUARDED");
        let expected = format!(
            "demo:between\n  site {:#x} {name} usdt_round usdt.S:{}\n\
             demo:guarded\n  site {:#x} {name} usdt_round usdt.S:{} -4@%edi 8@%rsi\n  \
             site {:#x} {name} usdt_round usdt.S:{} -4@%edi 8@%rsi\n  semaphore {semaphore:#x}\n\
             demo:open\n  site {:#x} {name} usdt_round usdt.S:{} 8@%rdi\n",
            between[0],
            lines("FOREIGN demo, between")[0],
            guarded[0],
            guarded_lines[0],
            guarded[1],
            guarded_lines[1],
            open[0],
            lines("FOREIGN demo, open")[0],
        );
        assert_eq!(
            run_on("list -provider any -sites", &file).answer(),
            expected
        );
        let table = run_on("list -provider any -sites -format table", &file).answer();
        assert!(table.contains("\n demo:guarded | 2 sites "), "{table}");
        assert!(
            table.contains(&format!(" semaphore | {semaphore:#x} ")),
            "{table}"
        );
        let short = run_on("list -provider any -format table", &file).answer();
        assert!(short.contains("\n demo:guarded | 2 "), "{short}");
    }
    // A library without a symbol table: exported functions are known, lines are not.
    let throw = run_on("list -provider any -sites", &libstdcxx()).answer();
    assert!(throw.contains(" __cxa_throw - "), "{throw}");
}

/// The address of the first mapping of a file.
fn first_mapping(pid: i32, file: &Path) -> u64 {
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    let of_file = |line: &&str| line.ends_with(file.to_str().unwrap());
    let first = maps.lines().find(of_file).unwrap();
    u64::from_str_radix(first.split('-').next().unwrap(), 16).unwrap()
}

#[test]
fn process_has_the_probes_of_its_libraries() {
    let library = libstdcxx();
    for file in fixture_forms("usdt") {
        let file = file.canonicalize().unwrap();
        let mut target = Talker::spawn(Command::new(&file).env("LD_PRELOAD", &library));
        // From here on, its libraries are loaded.
        target.expect("ready");
        let pid = target.pid();
        let json = run(&format!("list -json -provider any -pid {pid}")).json();
        assert_eq!(json["pid"], pid);
        assert_eq!(json["program"], file.to_str().unwrap());
        assert_eq!(json["unreadable"], Value::Array(Vec::new()));
        for object in [&file, &library] {
            let expected = shown_by_readelf(object);
            assert_eq!(shown(&json, object), expected);
            let is_fixed = object.to_str().unwrap().ends_with("nopie");
            let bias = if is_fixed {
                0
            } else {
                first_mapping(pid, object)
            };
            for (_, part) in each(&json, "sites").chain(each(&json, "semaphores")) {
                if part["object"] == object.to_str().unwrap() {
                    let [live, in_file] = ["address", "file_address"]
                        .map(|field| parse_hex(part[field].as_str().unwrap()));
                    assert_eq!(live, in_file + bias);
                }
            }
        }
        let site = &json["probes"][0]["sites"][0];
        let plain = run(&format!("list -sites -provider any -pid {pid}")).answer();
        let line = format!("  site {} ", site["address"].as_str().unwrap());
        assert!(plain.lines().any(|it| it.starts_with(&line)), "{plain}");
    }
}

#[test]
fn providers_and_names_are_selected_by_globs() {
    let file = fixture("foreign.pie");
    let listed = |line: &str| run_on(&format!("list -provider {line}"), &file).answer();
    assert_eq!(
        listed("postgres*"),
        "postgresql:done\npostgresql:query\npostgresql:tick\n"
    );
    assert_eq!(listed("any tick"), "ocaml_2:tick\npostgresql:tick\n");
    assert_eq!(
        listed("libc s* memory_*"),
        "libc:memory_sbrk_more\nlibc:setjmp\n"
    );
    assert_eq!(listed("ocaml_2"), "ocaml_2:tick\nocaml_2:tock\n");
    assert_eq!(listed("[!a-z]*"), "OCAML_2:lookalike\n");
}

#[test]
fn selecting_unknown_probes_fails_with_a_suggestion() {
    let file = fixture("usdt.pie");
    let failure = |line: &str| run_on(&format!("list -provider {line}"), &file).failure();
    let hint = format!(
        "hint: `ocaml-probes list -prog {} -provider any` lists the USDT probes\n",
        file.display()
    );
    for (line, why) in [
        ("dmeo", "dmeo:*; did you mean \"demo:*\"?"),
        ("demo garded", "demo:garded; did you mean \"demo:guarded\"?"),
        ("any open garded", "garded; did you mean \"guarded\"?"),
        ("ocaml*", "ocaml*:*"),
    ] {
        let expected = format!("ocaml-probes: no USDT probe in usdt.pie matches {why}\n{hint}");
        assert_eq!(failure(line), expected);
    }
    let none = run_on("list -provider any", &fixture("no_probes.pie")).failure();
    let expected = "ocaml-probes: no USDT probe in no_probes.pie matches *:*\n";
    assert_eq!(none, expected);
    let target = Talker::start(&file);
    let pid = target.pid();
    let unknown = run(&format!("count -usdt demo:nothing -pid {pid}")).failure();
    let hint = format!("hint: `ocaml-probes list -pid {pid} -provider any` lists the USDT probes");
    assert!(unknown.contains(&hint), "{unknown}");
    let json = run_on("list -json -provider nobody", &file).stderr;
    assert!(json.contains("\"kind\":\"function.no_usdt\""), "{json}");
}

/// Builds a file with these notes. Each is a provider, a name, arguments and the offset of the site from `_start`, as
/// they are written in assembly.
fn with_notes(scratch: &Scratch, notes: &[(&str, &str, &str, &str)]) -> PathBuf {
    let (source, file) = (scratch.file("notes.s"), scratch.file("notes"));
    let mut assembly = String::from(".text\n.globl _start\n_start: nop; ret\n");
    assembly += ".section .note.stapsdt,\"\",\"note\"\n";
    for (provider, name, arguments, offset) in notes {
        assembly += &format!(
            ".balign 4; .4byte 8, 1f - 0f, 3; .asciz \"stapsdt\"\n\
             0: .8byte _start + {offset}, 0, 0\n\
             .asciz \"{provider}\"; .asciz \"{name}\"; .asciz \"{arguments}\"\n1: .balign 4\n"
        );
    }
    fs::write(&source, assembly).unwrap();
    let mut gcc = Command::new("gcc");
    gcc.args(["-nostdlib", "-no-pie", "-static", "-o"]);
    assert!(gcc.arg(&file).arg(&source).status().unwrap().success());
    file
}

// promise: Bad input: Unprintable bytes in notes of USDT probes are escaped before they reach a terminal (1)
#[test]
fn unprintable_bytes_of_notes_are_escaped() {
    let scratch = Scratch::new();
    let notes = [
        ("a", "good", r"8@\033[31m\n\377", "0"),
        ("b", "outside", "", "0x10000000"),
        ("c", r"con\033trol", "", "0"),
        (r"\377", "encoding", "", "0"),
    ];
    let file = with_notes(&scratch, &notes);
    let shown = run_on("list -provider any -sites", &file);
    let note = "3 notes of ";
    assert!(shown.stderr.contains(note), "{}", shown.stderr);
    let answer = shown.answer();
    let [name, site] = answer.lines().collect::<Vec<_>>()[..] else {
        panic!("{answer}");
    };
    assert_eq!(name, "a:good");
    let end = " - 8@\\u{1b}[31m\\n\u{fffd}";
    assert!(site.ends_with(end), "{site}");
    let Run { stdout, .. } = run_on("list -provider any -json", &file);
    assert!(!stdout.contains('\u{1b}'), "{stdout}");
    let json = run_on("list -provider any -json -quiet", &file).json();
    let arguments = &json["probes"][0]["sites"][0]["arguments"];
    assert_eq!(arguments, "8@\u{1b}[31m\n\u{fffd}");
}

// promise: Objects that come and go: A library whose notes are damaged is named, and the USDT probes of the others are
//    listed (2)
#[test]
fn damaged_library_is_named_and_others_listed() {
    let scratch = Scratch::new();
    let damaged = damaged_plugin(&scratch);
    let [why, hint] = damage_messages(&damaged);
    for mut target in hosts() {
        let pid = target.pid();
        // It is named once, though it is loaded twice.
        for how in ["load", "isolate"] {
            target.ask(&format!("{how} {}", damaged.display()), "loaded");
        }
        let plain = run(&format!("list -provider any -pid {pid}"));
        let warning = format!("ocaml-probes: warning: skipped: {why}\n{hint}");
        assert_eq!(plain.stderr, warning);
        let expected = "ocaml_2:ping\nocaml_2:plug\nocaml_2:pong\n";
        assert_eq!(plain.answer(), expected);
        let json = run(&format!("list -json -provider any -pid {pid}")).json();
        let unreadable = json["unreadable"].as_array().unwrap();
        assert_eq!(unreadable.len(), 1);
        assert_eq!(unreadable[0]["object"], damaged.to_str().unwrap());
    }
    let error = run_on("list -provider any", &damaged).failure();
    assert!(error.contains(&why), "{error}");
}

#[test]
fn damaged_program_is_named_and_left_unchanged() {
    for file in fixture_forms("corrupt/note_descsz_9") {
        let target = Talker::start(&file);
        let pid = target.pid();
        let before = image(pid);
        let found = run(&format!("list -provider any -pid {pid}"));
        assert_eq!((found.code, &*found.stdout), (Some(1), ""));
        let start = format!("ocaml-probes: warning: skipped: {} ", file.display());
        assert!(found.stderr.starts_with(&start), "{}", found.stderr);
        let error = "\nocaml-probes: no USDT probe in note_descsz_9.";
        assert!(found.stderr.contains(error), "{}", found.stderr);
        assert!(image(pid) == before);
    }
}

#[test]
fn equal_notes_of_a_site_are_one_site() {
    let scratch = Scratch::new();
    let note = |arguments| ("a", "folded", arguments, "0");
    let file = with_notes(&scratch, &["8@%rdi", "4@%esi", "8@%rdi"].map(note));
    let answer = run_on("list -provider any -sites", &file).answer();
    assert_eq!(answer.matches("  site ").count(), 2, "{answer}");
}

/// A copy of a file with other bytes at these offsets.
fn patched(scratch: &Scratch, file: &Path, name: &str, patches: &[(usize, &[u8])]) -> PathBuf {
    let copy = scratch.copy(file, name);
    let mut bytes = fs::read(&copy).unwrap();
    for (at, patch) in patches {
        bytes[*at..at + patch.len()].copy_from_slice(patch);
    }
    fs::write(&copy, bytes).unwrap();
    copy
}

// promise: Bad input: A file without section headers is refused, not listed as without USDT probes (2)
#[test]
fn file_without_section_headers_is_refused() {
    let scratch = Scratch::new();
    for file in fixture_forms("usdt") {
        // elf(5), Elf64_Ehdr: e_shoff, e_shentsize, e_shnum, e_shstrndx.
        let copy = patched(&scratch, &file, "bare", &[(40, &[0; 8]), (58, &[0; 6])]);
        let error = run_on("list -provider any", &copy).failure();
        assert!(error.contains("bare has no section headers, "), "{error}");
        let target = Talker::start(&copy);
        let listed = run(&format!("list -provider any -pid {}", target.pid()));
        let expected = "bare has no section headers, ";
        assert!(listed.stderr.contains(expected), "{}", listed.stderr);
    }
}

/// A copy of a program that can still be executed, but whose section header places the symbol table past the end of
/// the file.
pub(crate) fn without_function_names(scratch: &Scratch, file: &Path) -> PathBuf {
    let bytes = fs::read(file).unwrap();
    let long = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap()) as usize;
    let sections = long(40);
    // Elf64_Shdr has 64 bytes: sh_type at 4, SHT_SYMTAB is 2; sh_offset at 24.
    let is_symbols = |at: &usize| bytes[at + 4..at + 8] == 2_u32.to_le_bytes();
    let symbols = (sections..bytes.len())
        .step_by(64)
        .find(is_symbols)
        .unwrap();
    let name = file.file_name().unwrap().to_str().unwrap();
    let far = 0x7fff_ffff_u64.to_le_bytes();
    patched(scratch, file, name, &[(symbols + 24, &far)])
}
