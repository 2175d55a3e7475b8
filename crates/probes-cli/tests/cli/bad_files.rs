//! Files without probes, and damaged files: each gives its error message, and nothing is changed.

use std::fs;

use serde_json::Value;
use test_support::{Talker, fixture, fixture_forms, program};

use crate::support::{golden, image, object, redacted, run, run_on};

// promise: Bad input: Every damaged file gives its error message, unless its probes can be
//    determined nevertheless (all of `corrupt/`)
#[test]
fn every_damaged_file_gets_its_message() {
    let directory = fixture("corrupt");
    let mut files: Vec<_> = fs::read_dir(&directory)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| {
            let name = path.file_name().unwrap().to_str().unwrap();
            name.ends_with("pie") || !name.contains('.') && name != "dune"
        })
        .collect();
    files.sort();
    assert!(files.len() > 50);
    let mut text = String::new();
    for file in files {
        let run = run_on("list", &file);
        let name = file.file_name().unwrap().to_str().unwrap();
        text += &format!("$ ocaml-probes list -prog {name}\n");
        text += &redacted(&(run.stdout + &run.stderr), &file);
    }
    golden("damaged-files.txt", &text);
}

#[test]
fn programs_without_ocaml_probes_get_a_hint() {
    for name in ["no_probes", "foreign_only"] {
        for file in fixture_forms(name) {
            let error = run_on("list", &file).failure();
            let expected = format!("ocaml-probes: no OCaml probes in {}", file.display());
            assert!(error.starts_with(&expected), "{error}");
            assert!(
                error.contains("hint: was it built by a compiler with probes"),
                "{error}"
            );

            let target = Talker::start(&file);
            let info = run(&format!("info -pid {}", target.pid())).failure();
            assert!(info.contains("no OCaml probes in "), "{info}");
        }
    }
}

#[test]
fn bytecode_without_probes_is_called_bytecode() {
    let file = program("bytecode/unprobed.bc");
    let assert_called_bytecode = |error: &str| {
        assert!(error.contains("runs OCaml bytecode"), "{error}");
        let hint = "hint: probes exist only in native code: build the program with ocamlopt";
        assert!(error.contains(hint), "{error}");
    };
    for line in ["list", "trace -enable-all", "trace -count"] {
        assert_called_bytecode(&run_on(line, &file).failure());
    }
    let target = Talker::start(&file);
    for line in ["info", "attach -enable-all", "count", "watch -regexp ."] {
        assert_called_bytecode(&run(&format!("{line} -pid {}", target.pid())).failure());
    }
    // The error names no pid: the process that was to run the file is gone.
    let with_notes = program("closures/bytecode");
    for line in ["trace -enable-all", "trace -count"] {
        let error = run_on(line, &with_notes).failure();
        let start = format!("ocaml-probes: {} runs OCaml", with_notes.display());
        assert!(error.starts_with(&start), "{error}");
        let error = object(&run_on(&format!("{line} -json"), &with_notes).stderr);
        assert_eq!(error["pid"], Value::Null);
    }
    // With -follow, the file is run: what it executes may have probes.
    let followed = run_on("trace -follow -enable-all", &file);
    assert_eq!(followed.code, Some(0), "{followed:?}");
    assert!(followed.stderr.contains("runs OCaml bytecode"));
}

#[test]
fn damaged_running_program_is_left_unchanged() {
    for name in [
        "note_random_bytes",
        "note_descsz_9",
        "note_pc_outside_segments",
        "note_semaphore_outside_probes",
        "site_opcode_0f",
        "site_opcode_cc",
        "site_nop_66",
        "section_headers_stripped",
    ] {
        for file in fixture_forms(&format!("corrupt/{name}")) {
            let mut target = Talker::start(&file);
            let before = image(target.pid());
            for line in ["attach -enable-all", "attach -force -disable-all", "info"] {
                let error = run(&format!("{line} -pid {}", target.pid())).failure();
                assert!(
                    error.contains(file.file_name().unwrap().to_str().unwrap()),
                    "{error}"
                );
            }
            let listed = run("ps");
            let (answer, pid) = (&listed.stdout, target.pid());
            let start = format!("{pid} ");
            assert!(!answer.lines().any(|it| it.starts_with(&start)), "{answer}");
            if name.starts_with("note_") {
                // Other tests may run the same program.
                let mut lines = listed
                    .stderr
                    .lines()
                    .filter(|it| it.contains("not listed: "));
                let pid = pid.to_string();
                let is_named = |line: &str| line.split([' ', ',', ':']).any(|it| it == pid);
                assert!(lines.any(is_named), "{}", listed.stderr);
            }
            assert!(image(target.pid()) == before, "{name}");
            target.hits();
        }
    }
}
