//! docs/reliability.md and the README: every test that they name exists.

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

/// The tests that a page names, of the form `kind::module::name`, by the rows of its tables.
fn rows(page: &str) -> impl Iterator<Item = (&str, Vec<&str>)> {
    let rows = page.lines().filter(|line| line.starts_with("| "));
    rows.map(|row| {
        (
            row,
            row.split('`')
                .filter(|it| it.matches("::").count() == 2)
                .collect(),
        )
    })
}

/// Reads a page, and finds all tests that it names, which have to exist.
fn page_with_tests(path: &str) -> String {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let folders = [
        ("unit", "crates/probes-lib/src"),
        ("live", "crates/probes-lib/tests/live"),
        ("cli", "crates/probes-cli/tests/cli"),
        ("chaos", "crates/probes-cli/tests/chaos"),
        ("rooms", "crates/probes-cli/tests/rooms"),
        ("interface", "crates/probes-c/tests/interface"),
    ];
    let page = fs::read_to_string(root.join(path)).unwrap();
    let is_missing = |test: &&str| {
        let words: Vec<&str> = test.split("::").collect();
        let (_, folder) = folders.iter().find(|(it, _)| *it == words[0]).unwrap();
        !has_test(&root.join(folder), words[1], words[2])
    };
    let missing: Vec<&str> = rows(&page)
        .flat_map(|(_, tests)| tests)
        .filter(is_missing)
        .collect();
    assert!(missing.is_empty(), "{path}: {missing:#?}");
    page
}

#[test]
fn every_test_that_the_page_on_reliability_names_exists() {
    let page = page_with_tests("docs/reliability.md");
    let named: usize = rows(&page).map(|(_, tests)| tests.len()).sum();
    assert!(named > 50, "{named}");
    for (row, tests) in rows(&page) {
        let is_head = row.starts_with("| promise |");
        assert!(is_head || !tests.is_empty(), "no test: {row}");
    }
}

#[test]
fn every_cell_of_what_it_works_with_names_a_test_that_exists() {
    let page = page_with_tests("README.md");
    let start = page.find("## Works with").unwrap();
    let section = page[start..].split("\n## ").next().unwrap();
    let mut cells = 0;
    for (row, _) in rows(section) {
        let is_head =
            row.starts_with("| compiled by |") || row.starts_with("| where the code is |");
        for cell in row
            .split('|')
            .skip(2)
            .map(str::trim)
            .filter(|it| !it.is_empty())
        {
            let is_named = cell.matches("::").count() >= 2;
            assert!(is_head || is_named || cell == "–", "no test: {cell}");
            cells += 1;
        }
    }
    assert!(cells > 30, "{cells}");
}
