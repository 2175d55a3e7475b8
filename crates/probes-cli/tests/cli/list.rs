//! Probes of files, in all formats.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

use test_support::{fixture, fixture_forms, program, program_forms};

use crate::support::{Directory, command, golden, probe, redacted, run, run_command, run_on};

#[test]
fn plain_lines_are_names_sorted() {
    for file in program_forms("service") {
        let answer = run_on("list", &file).answer();
        assert_eq!(answer, "cache_miss\nreq_end\nreq_start\ntick\n");
    }
    let many = run_on("list", &program("many")).answer();
    let names: Vec<_> = (0..200).map(|i| format!("many_{i:03}\n")).collect();
    assert_eq!(many, names.concat());
}

#[test]
fn sites_are_listed_below_their_names() {
    let file = program("twolibs");
    let sites = run_on("list -sites", &file).answer();
    let table = run_on("list -sites -format table", &file).answer();
    let short = run_on("list -format table", &file).answer();
    let inlined = sites.lines().nth(1).unwrap();
    assert!(inlined.contains(" Left.bump "), "{inlined}");
    assert!(inlined.ends_with(" left.ml:10"), "{inlined}");
    for text in [&table, &short] {
        assert!(text.contains("\n shared "), "{text}");
    }
    assert!(
        table.contains("Twolibs.round") && table.contains("3 sites"),
        "{table}"
    );

    let full = run_on("list -sites -paths full", &file).answer();
    let inlined = full.lines().nth(1).unwrap();
    assert!(inlined.ends_with("/twolibs/left/left.ml:10"), "{inlined}");

    let arguments = run_on("list -sites", &fixture("arguments.pie")).answer();
    golden("list-arguments.txt", &redacted(&arguments, &file));
}

#[test]
fn named_values_are_arguments_in_registers() {
    let registers = ["rdi", "rsi", "rdx", "rcx", "r8", "r9"].map(|name| format!("8@%{name}"));
    for file in program_forms("shown") {
        let json = run_on("list -json", &file).json();
        for (name, named) in [("nothing", 0), ("numbered", 5), ("ints", 6)] {
            let arguments = &probe(&json, name)["sites"][0]["arguments"];
            assert_eq!(*arguments, serde_json::json!(registers[..named]), "{name}");
        }
        let ints = ["zero", "one", "minus_one", "answer", "max_int", "min_int"];
        let site = &probe(&json, "ints")["sites"][0];
        assert_eq!(site["argument_names"], serde_json::json!(ints));
        assert!(probe(&json, "nothing")["sites"][0]["argument_names"].is_null());
        let plain = run_on("list -sites", &file).answer();
        let named = ints.iter().zip(&registers);
        let named: Vec<String> = named
            .map(|(name, register)| format!("{name}={register}"))
            .collect();
        assert!(plain.contains(&format!(" {}\n", named.join(" "))));
    }
}

#[test]
fn json_has_the_fields_of_info_or_null() {
    for file in program_forms("twolibs") {
        let json = run_on("list -json", &file).json();
        assert_eq!(json["version"], 1);
        assert_eq!(json["pid"], serde_json::Value::Null);
        assert_eq!(json["program"], file.to_str().unwrap());
        assert_eq!(json["probes"].as_array().unwrap().len(), 5);
        let shared = probe(&json, "shared");
        assert!(shared["state"].is_null() && shared["counter"].is_null());
        let sites = shared["sites"].as_array().unwrap();
        assert_eq!(sites.len(), 3);
        for site in sites {
            assert!(site["address"].is_null() && site["enabled"].is_null());
            assert!(site["file_address"].as_str().unwrap().starts_with("0x"));
            assert_eq!(site["generation"], "ocaml_2");
            assert!(site["file"].as_str().unwrap().ends_with(".ml"));
            assert!(site["line"].as_u64().unwrap() > 0);
            assert!(site["function"].as_str().unwrap().contains('.'));
            assert_eq!(site["object"], file.to_str().unwrap());
        }
        let semaphore = &shared["semaphores"][0];
        assert!(semaphore["address"].is_null() && semaphore["value"].is_null());
    }
}

#[test]
fn functions_and_lines_need_debugging_information() {
    for file in fixture_forms("gen_ocaml_2_stripped") {
        let site = &run_on("list -json", &file).json()["probes"][1]["sites"][0];
        for field in ["file", "line", "function"] {
            assert!(site.get(field).unwrap().is_null(), "{field}");
        }
        let plain = run_on("list -sites", &file).answer();
        assert!(
            plain
                .lines()
                .any(|line| line.starts_with("  site 0x") && line.contains(" - -"))
        );
    }
}

#[test]
fn all_generations_are_named_by_their_provider() {
    let json = run_on("list -json", &fixture("mixed_generations.pie")).json();
    let generation = |name| probe(&json, name)["sites"][0]["generation"].clone();
    assert_eq!(generation("zero"), "ocaml");
    assert_eq!(generation("dot"), "ocaml.1");
    assert_eq!(generation("one"), "ocaml_1");
    assert_eq!(generation("two"), "ocaml_2");
}

// promise: Bad input: A stripped file that does not show where its counters are is refused (2)
#[test]
fn unknown_semaphore_layout_is_refused_with_a_hint() {
    let directory = Directory::new("layouts");
    for file in fixture_forms("gen_ocaml_4_11_1") {
        let copy = directory.copy(&file, "copy");
        assert_eq!(
            run_on("list -quiet", &copy).answer(),
            "only_alpha\nshared\n"
        );
        // Into other files: the copy is read-only.
        let strip = |how: &str, name: &str| {
            let stripped = copy.with_file_name(name);
            let mut strip = std::process::Command::new("strip");
            strip.args([how, "-o"]).args([&stripped, &copy]);
            assert!(strip.status().unwrap().success());
            stripped
        };
        let without_debug = strip("--strip-debug", "without_debug");
        assert_eq!(
            run_on("list -quiet", &without_debug).answer(),
            "only_alpha\nshared\n"
        );
        let stripped = strip("--strip-all", "stripped");
        let error = run_on("list -quiet", &stripped).failure();
        let (before, after) = error.split_once(" at 0x").unwrap();
        assert!(
            before.ends_with("has no symbol for the semaphore of probe shared"),
            "{error}"
        );
        assert!(
            after.ends_with(
                ", so its size (2 or 4 bytes) is unknown\n\
                 hint: do not strip its symbols (`strip --strip-debug` keeps them), or install its separate debug file\n"
            ),
            "{error}"
        );
        for file in [without_debug, stripped] {
            std::fs::remove_file(file).unwrap();
        }
        std::fs::remove_file(&copy).unwrap();
    }
}

#[test]
fn strange_paths_are_shown_escaped() {
    let directory = Directory::new("tricks");
    let good = fixture("gen_ocaml_2.pie");
    let file = directory.copy(&good, OsStr::from_bytes(b"a\xff\x1b[31m\nb"));
    let list = |flag| run_command(command(["list", flag, "-prog"]).arg(&file));
    assert!(
        list("-json").json()["program"]
            .as_str()
            .unwrap()
            .contains('\u{fffd}')
    );
    assert_eq!(list("-quiet").answer(), "flag\nplain\nwatched\n");

    std::fs::remove_file(&file).unwrap();
    std::fs::write(&file, "no program").unwrap();
    let error = list("-quiet").failure();
    assert!(
        error.contains("a\u{fffd}\\u{1b}[31m\\nb is not an ELF file"),
        "{error}"
    );
}

#[test]
fn file_is_a_path_and_not_looked_up() {
    let service = program("service");
    let mut list = command(["list", "-prog", "service.exe"]);
    let error = run_command(list.env("PATH", service.parent().unwrap())).failure();
    assert!(
        error.starts_with("ocaml-probes: cannot open service.exe: No such file"),
        "{error}"
    );
    assert!(error.contains("hint: give its path"), "{error}");
    let mut list = command(["list", "-prog", "service.exe"]);
    assert_eq!(
        run_command(list.current_dir(service.parent().unwrap())).code,
        Some(0)
    );
    assert_eq!(run("list -prog /").code, Some(1));
}
