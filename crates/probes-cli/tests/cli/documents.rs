//! docs/reliability.md: every test that it names exists.

use std::fs;
use std::path::{Path, PathBuf};

/// Adds the text of `path`, or of all sources in it and below.
fn read_all(path: &Path, text: &mut String) {
    if path.is_dir() {
        let mut entries: Vec<PathBuf> = fs::read_dir(path)
            .unwrap()
            .map(|entry| entry.unwrap().path())
            .collect();
        entries.sort();
        for entry in entries {
            read_all(&entry, text);
        }
    } else if path.extension().is_some_and(|it| it == "rs") {
        *text += &fs::read_to_string(path).unwrap();
    }
}

/// Whether a module has a test of that name, in its file or below.
fn has_test(folder: &Path, module: &str, name: &str) -> bool {
    let mut text = String::new();
    for path in [format!("{module}.rs"), module.to_owned()] {
        let path = folder.join(path);
        if path.exists() {
            read_all(&path, &mut text);
        }
    }
    // Tests of properties have arguments, and attributes further up.
    text.contains(&format!("fn {name}(")) && text.contains("#[test]")
}

#[test]
fn every_test_that_the_page_on_reliability_names_exists() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let page = fs::read_to_string(root.join("docs/reliability.md")).unwrap();
    let folders = [
        ("unit", "crates/probes-lib/src"),
        ("live", "crates/probes-lib/tests/live"),
        ("cli", "crates/probes-cli/tests/cli"),
        ("chaos", "crates/probes-cli/tests/chaos"),
        ("rooms", "crates/probes-cli/tests/rooms"),
        ("interface", "crates/probes-c/tests/interface"),
    ];
    let mut named = 0;
    let mut missing = Vec::new();
    for row in page.lines().filter(|line| line.starts_with("| ")) {
        let tests = row.split('`').filter(|word| word.contains("::"));
        for test in tests {
            let words: Vec<&str> = test.split("::").collect();
            let [kind, module, name] = words[..] else {
                panic!("{test} is no kind::module::name");
            };
            let (_, folder) = folders.iter().find(|(it, _)| *it == kind).unwrap();
            named += 1;
            if !has_test(&root.join(folder), module, name) {
                missing.push(test);
            }
        }
        let is_head = row.starts_with("| promise |");
        assert!(is_head || row.contains("::"), "no test: {row}");
    }
    assert!(missing.is_empty(), "{missing:#?}");
    assert!(named > 80, "{named}");
}
