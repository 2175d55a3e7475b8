//! The documents agree with the tests: docs/promises.md is generated from them, and every test
//! that a page names exists.

#[path = "import_layers.rs"]
mod import_layers;
#[path = "json.rs"]
mod json; // JSON output: its page and its schema
#[path = "type_examples.rs"]
mod type_examples;
#[path = "type_names.rs"]
mod type_names;

use std::collections::BTreeSet;
use std::env;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use test_support::{Scratch, Talker, output_within, program_forms};

use crate::support::golden_file;

/// The sections of docs/promises.md, in order.
const SECTIONS: [&str; 26] = [
    "Stopping and resuming",
    "Signals",
    "All or nothing",
    "Death of the tool",
    "Exit, exec and fork of the process",
    "Other tracers and tools",
    "Processes that are hard to change",
    "Objects that come and go",
    "Containers",
    "OCaml 5",
    "Live updates",
    "Updates for a time",
    "Launching programs",
    "Following",
    "Observations",
    "Closures",
    "top",
    "Own probes",
    "Bad input",
    "Functions",
    "Runtime events",
    "Stacks",
    "Profiles",
    "Documents",
    "Serving",
    "Time lines",
];

const INTRODUCTION: &str = "\
# Promises

Each promise, the test that tries to break it, and how often it tries in one `make test-all`. “2 ×” means once as a
position-independent program and once at a fixed address. [reliability.md](reliability.md) says the same in prose, [not-promised.md](not-promised.md) what is not promised.

`live::…` and `unit::…` are tests of `probes-lib` (`--test live`, `--lib`), `cli::…`, `chaos::…`, `adversary::…` and
`matrix::…` of `probes-cli`, `interface::…` of `probes-c`.

This page is generated from the `// promise:` comments above the tests; `UPDATE_GOLDEN=1 cargo test -p probes-cli --test cli
documents::` rewrites it.
";

/// A test of the workspace, with the promises written above it.
struct Test {
    /// `SUITE::FILE::NAME`, or `unit::NAME` for a unit test.
    name: String,
    promises: Vec<String>,
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Adds all files in `directory` and below whose names end in `extension`, in the order of their names.
fn collect_files(directory: &Path, extension: &str, files: &mut Vec<PathBuf>) {
    let entries = fs::read_dir(directory).unwrap();
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    for path in paths {
        if path.is_dir() {
            collect_files(&path, extension, files);
        } else if path.extension().is_some_and(|it| it == extension) {
            files.push(path);
        }
    }
}

/// The name of a file's tests: `unit` in a crate's sources, else the path below `tests`.
fn module(path: &Path) -> String {
    let path = path.with_extension("");
    let words: Vec<&str> = path.iter().filter_map(|it| it.to_str()).collect();
    match words.iter().rposition(|it| *it == "tests") {
        Some(at) if words[at - 2] == "crates" => words[at + 1..].join("::"),
        _ => "unit".to_owned(),
    }
}

/// Adds the tests of one file.
fn parse_tests(path: &Path, tests: &mut Vec<Test>) {
    let text = fs::read_to_string(path).unwrap();
    let mut promises: Vec<String> = Vec::new();
    let mut is_test = false;
    for line in text.lines().map(str::trim_start) {
        if let Some(promise) = line.strip_prefix("// promise: ") {
            promises.push(promise.to_owned());
        } else if let (Some(more), Some(last)) = (line.strip_prefix("//    "), promises.last_mut())
        {
            *last += " ";
            *last += more;
        } else if line == "#[test]" {
            is_test = true;
        } else if let (Some(rest), true) = (line.strip_prefix("fn "), is_test) {
            let name = rest.split('(').next().unwrap();
            tests.push(Test {
                name: format!("{}::{name}", module(path)),
                promises: std::mem::take(&mut promises),
            });
            is_test = false;
        } else {
            let is_above_test = line.starts_with("#[") || line.starts_with("//");
            assert!(
                promises.is_empty() || is_above_test,
                "{}: a promise that is not above a test: {promises:?}",
                path.display()
            );
        }
    }
}

/// All tests of the workspace.
fn tests() -> Vec<Test> {
    let mut files = Vec::new();
    collect_files(&root().join("crates"), "rs", &mut files);
    let mut tests = Vec::new();
    for file in files {
        parse_tests(&file, &mut tests);
    }
    assert!(tests.len() > 600, "{}", tests.len());
    tests
}

/// One row of the table: `Section: sentence (how often)` without its section.
fn row(promise: &str, test: &str) -> String {
    match promise
        .strip_suffix(')')
        .and_then(|it| it.rsplit_once(" ("))
    {
        Some((sentence, rounds)) => format!("| {sentence} | `{test}` | {rounds} |\n"),
        None => format!("| {promise} | `{test}` | |\n"),
    }
}

#[test]
fn promises_page_is_generated() {
    let mut tables = SECTIONS.map(|_| String::new());
    for test in tests() {
        for promise in &test.promises {
            let found = SECTIONS.iter().enumerate().find_map(|(at, section)| {
                let rest = promise.strip_prefix(section)?.strip_prefix(": ")?;
                Some((at, rest))
            });
            let (at, rest) = found.unwrap_or_else(|| panic!("in no section: {promise}"));
            tables[at] += &row(rest, &test.name);
        }
    }
    let mut page = INTRODUCTION.to_owned();
    for (section, table) in SECTIONS.iter().zip(tables) {
        let head = "| promise | test | how often |\n|---|---|---|\n";
        write!(page, "\n## {section}\n\n{head}{table}").unwrap();
    }
    golden_file(&root().join("docs/promises.md"), &page);
}

#[test]
fn tests_named_by_pages_exist() {
    let mut pages = vec![root().join("README.md")];
    collect_files(&root().join("docs"), "md", &mut pages);
    let tests = tests();
    let names: BTreeSet<&str> = tests.iter().map(|test| test.name.as_str()).collect();
    let suites = names.iter().filter_map(|it| Some(it.split_once("::")?.0));
    let suites: BTreeSet<&str> = suites.collect();
    let mut missing = Vec::new();
    for path in pages {
        let page = fs::read_to_string(&path).unwrap();
        let named = page.split('`').filter(|it| {
            let suite = it.split_once("::").map(|(suite, _)| suite);
            suite.is_some_and(|it| suites.contains(it)) || it.matches("::").count() == 2
        });
        let wrong = named.filter(|it| !it.contains(['{', ' ', '…']) && !names.contains(it));
        missing.extend(wrong.map(|it| format!("{}: {it}", path.display())));
    }
    assert!(missing.is_empty(), "{missing:#?}");
}

#[test]
fn every_supported_combination_names_a_test() {
    let page = fs::read_to_string(root().join("docs/support.md")).unwrap();
    let rows = page.lines().filter(|line| line.starts_with("| "));
    let tests = tests();
    let names: BTreeSet<&str> = tests.iter().map(|test| test.name.as_str()).collect();
    let mut cells = 0;
    for row in rows {
        let is_head = row.starts_with("| compiled by |") || row.starts_with("| the code is |");
        for cell in row.split('|').skip(2).map(str::trim) {
            let is_named = cell.split('`').any(|it| names.contains(it));
            assert!(
                is_head || is_named || ["", "–"].contains(&cell),
                "no test: {cell}"
            );
            cells += 1;
        }
    }
    assert!(cells > 30, "{cells}");
}

#[test]
fn test_names_have_at_most_eight_words() {
    let tests = tests();
    let names = tests
        .iter()
        .filter_map(|test| test.name.rsplit("::").next());
    let long: Vec<&str> = names.filter(|it| it.split('_').count() > 8).collect();
    assert!(long.is_empty(), "{long:#?}");
}

/// All pages: at the top of the repository, and in the directories that have some.
fn pages() -> Vec<PathBuf> {
    let mut pages = Vec::new();
    for directory in ["docs", "ocaml", "fuzz"] {
        collect_files(&root().join(directory), "md", &mut pages);
    }
    for entry in fs::read_dir(root()).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|it| it == "md") {
            pages.push(path);
        }
    }
    pages
}

/// What the headings of a page can be linked by.
fn anchors(page: &Path) -> BTreeSet<String> {
    let text = fs::read_to_string(page).unwrap();
    // Every second part is a block of code.
    let outside = text.split("\n```").step_by(2);
    let headings = outside
        .flat_map(str::lines)
        .filter(|line| line.starts_with('#'));
    let anchor = |heading: &str| {
        let letters = heading.trim_start_matches('#').trim().chars();
        let kept = letters.filter(|it| it.is_alphanumeric() || " -_".contains(*it));
        kept.collect::<String>().to_lowercase().replace(' ', "-")
    };
    headings.map(anchor).collect()
}

// promise: Documents: Every link of a page leads to a file that exists, and to a heading in it
#[test]
fn links_lead_to_files_and_headings() {
    let mut broken = Vec::new();
    let mut links = 0;
    for page in pages() {
        let text = fs::read_to_string(&page).unwrap();
        for (at, _) in text.match_indices("](") {
            let link = text[at + 2..].split(')').next().unwrap();
            if link.contains("://") || link.contains(char::is_whitespace) {
                continue;
            }
            links += 1;
            let (path, anchor) = link.split_once('#').unwrap_or((link, ""));
            let target = match path {
                "" => page.clone(),
                _ => page.parent().unwrap().join(path),
            };
            let is_page = target.extension().is_some_and(|it| it == "md");
            let is_found = target.exists()
                && (anchor.is_empty() || is_page && anchors(&target).contains(anchor));
            if !is_found {
                broken.push(format!("{}: {link}", page.display()));
            }
        }
    }
    assert!(links > 100, "{links}");
    assert!(broken.is_empty(), "{broken:#?}");
}

#[test]
fn every_page_is_in_the_book() {
    let summary = root().join("docs/SUMMARY.md");
    let text = fs::read_to_string(&summary).unwrap();
    let chapters = text.split("](").skip(1);
    let chapters = chapters.map(|it| it.split(')').next().unwrap().replace("../", ""));
    let chapters: BTreeSet<String> = chapters.collect();
    let mut pages = Vec::new();
    collect_files(&root().join("docs"), "md", &mut pages);
    for page in pages.iter().filter(|it| **it != summary) {
        let name = page.strip_prefix(root().join("docs")).unwrap();
        let name = name.to_str().unwrap();
        assert!(
            chapters.contains(name),
            "docs/SUMMARY.md does not have {name}"
        );
    }
}

/// The commands in the blocks of code of a page, without those that show placeholders, and those that belong to a shell script.
fn commands(page: &Path) -> Vec<String> {
    let text = fs::read_to_string(page).unwrap();
    let mut is_block = false;
    let mut commands = Vec::new();
    for line in text.lines() {
        if line.trim_start().starts_with("```") {
            is_block = !is_block;
        }
        let is_code = is_block || line.starts_with("    ");
        let command = line.trim_start();
        let command = command.strip_prefix("$ ").unwrap_or(command);
        let is_whole = !command.ends_with('\\') && !command.contains(['|', '[', '>', '$']);
        let has_placeholder = command
            .split([' ', ',', '='])
            .any(|word| word.len() <= 9 && word.chars().all(|it| it.is_ascii_uppercase()));
        if is_code && is_whole && !has_placeholder && command.starts_with("ocaml-probes ") {
            commands.push(command.to_owned());
        }
    }
    commands
}

// The pages whose commands run as a whole, with their answers, are those of `book` and `ask`.
// promise: Documents: Each command on a page is one that the tool understands
#[test]
fn commands_of_pages_are_understood() {
    let scratch = Scratch::new();
    let target = Talker::start(&program_forms("service")[0]);
    let tools = Path::new(env!("CARGO_BIN_EXE_ocaml-probes"))
        .parent()
        .unwrap();
    let path = format!("{}:{}", tools.display(), env::var("PATH").unwrap());
    let mut many = 0;
    for page in pages() {
        for shown in commands(&page) {
            let command = shown.replace("-for 10s", "-for 50ms");
            let command = command.replace("4242", &target.pid().to_string());
            let mut shell = Command::new("timeout");
            // Some run until Ctrl-C.
            shell.args([
                "-s",
                "INT",
                "-k",
                "60",
                "1",
                "sh",
                "-c",
                &format!("exec {command}"),
            ]);
            shell.current_dir(scratch.path()).env("PATH", &path);
            let output = output_within(Duration::from_secs(90), &mut shell, || {});
            let error = String::from_utf8_lossy(&output.stderr);
            // 0, or 1: the target has not all that a page observes; or what `timeout` returns.
            let code = output.status.code();
            assert!(
                matches!(code, Some(0 | 1 | 124)),
                "{}: {shown}: {code:?}: {error}",
                page.display()
            );
            many += 1;
        }
    }
    assert!(many > 60, "{many}");
}
