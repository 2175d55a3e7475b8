//! The pages of the book that a reader types along: each command of their `console` blocks runs in one shell,
//! from top to bottom. It succeeds or fails as on the page, and shows the OCaml functions that the page shows.

use std::fs;
use std::net::TcpListener;
use std::path::Path;
use std::process::Command;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use test_support::{Scratch, output_within, program};

/// A command of a page, and what the page shows below it.
struct Step {
    command: String,
    answer: Vec<String>,
}

impl Step {
    /// Whether the page shows that it fails.
    fn fails(&self) -> bool {
        self.answer.iter().any(|it| is_error(it))
    }

    /// Whether it prints the same columns whatever the process does at this moment; a table leaves out those that
    /// have only zeros.
    fn has_fixed_columns(&self) -> bool {
        let command = self.command.strip_prefix("ocaml-probes ");
        command.is_some_and(|it| !it.starts_with("stack ") && !it.contains("-format table"))
    }

    /// The names of OCaml's functions in the answer, such as `Shop.search`.
    fn names(&self) -> impl Iterator<Item = &str> {
        let words = self.answer.iter().flat_map(|it| it.split(' '));
        words.filter(|word| {
            word.starts_with(|it: char| it.is_ascii_uppercase())
                && word.split('.').count() == 2
                && word
                    .split('.')
                    .all(|it| !it.is_empty() && it.chars().all(is_of_name))
        })
    }
}

/// What lines that show the same figures have in common, whatever their values: how many numbers a line begins with,
/// or else its words without those that have digits or quoted text.
fn shape(line: &str) -> Vec<&str> {
    let is_figure = |word: &str| word.contains(|it: char| it.is_ascii_digit() || it == '"');
    let is_number = |word: &&str| {
        let digits = word.trim_matches(|it: char| it.is_ascii_digit() || "-.".contains(it));
        digits.is_empty()
    };
    let words = line.split_ascii_whitespace();
    let numbers = words.clone().take_while(is_number).count();
    if numbers > 0 {
        return vec!["#"; numbers];
    }
    words
        .map(|it| if is_figure(it) { "#" } else { it })
        .collect()
}

/// Whether a line is an error of the tool, which the status of a pipe does not show.
fn is_error(line: &str) -> bool {
    line.starts_with("ocaml-probes: ") && !line.starts_with("ocaml-probes: warning: ")
}

fn is_of_name(it: char) -> bool {
    it.is_ascii_alphanumeric() || it == '_'
}

/// The commands of a page; one that ends with a backslash goes on in the next line.
fn steps(page: &str) -> Vec<Step> {
    let mut steps: Vec<Step> = Vec::new();
    for block in page.split("\n```console\n").skip(1) {
        let (block, _) = block.split_once("\n```").unwrap();
        let mut is_open = false;
        for line in block.lines() {
            if let Some(command) = line.strip_prefix("$ ") {
                steps.push(Step {
                    command: command.to_owned(),
                    answer: Vec::new(),
                });
                is_open = command.ends_with('\\');
            } else if is_open {
                let last = steps.last_mut().unwrap();
                last.command = format!("{}\n{line}", last.command);
                is_open = line.ends_with('\\');
            } else {
                steps.last_mut().unwrap().answer.push(line.to_owned());
            }
        }
    }
    steps
}

/// A port that is free now.
fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.local_addr().unwrap().port()
}

/// The script that runs the steps, each with its output and status in files of `directory`.
fn script(steps: &[Step], directory: &Path) -> String {
    let port = free_port().to_string();
    let mut script = String::from("trap 'kill $(jobs -p) 2>/dev/null' EXIT\n");
    for (index, step) in steps.iter().enumerate() {
        let command = step.command.replace("8080", &port);
        // The shop writes slowly once in 1,000 requests: on a busy machine, in some seconds not at all.
        let time = if command.contains("Ledger.") {
            "-for 4s"
        } else {
            "-for 1s"
        };
        let command = command.replace("-for 10s", time);
        let file = directory.join(index.to_string());
        let file = file.display();
        script += &format!(
            "{{ {command}\n}} >'{file}.output' 2>&1 </dev/null; echo $? >'{file}.status'\n"
        );
    }
    script
}

/// One page at a time: each puts a server under load.
static ONE_PAGE: Mutex<()> = Mutex::new(());

/// Runs the commands of a page in the directory of the shop, as a reader does.
fn run(page: &str) {
    let _one_page = ONE_PAGE.lock().unwrap_or_else(PoisonError::into_inner);
    let steps = steps(page);
    assert!(steps.len() >= 3, "{} commands", steps.len());
    let scratch = Scratch::new();
    let shop = program("shop/shop");
    scratch.copy(&shop, "shop.exe");
    scratch.copy(&shop.with_file_name("load.lua"), "load.lua");
    let tool = Path::new(env!("CARGO_BIN_EXE_ocaml-probes"))
        .parent()
        .unwrap();
    let path = format!("{}:{}", tool.display(), std::env::var("PATH").unwrap());
    let mut shell = Command::new("bash");
    shell.args(["-c", &script(&steps, scratch.path())]);
    shell.current_dir(scratch.path());
    shell.env("PATH", path).env("TMPDIR", scratch.path());
    output_within(Duration::from_secs(240), &mut shell, || {});
    for (index, step) in steps.iter().enumerate() {
        let read =
            |extension| fs::read_to_string(scratch.path().join(format!("{index}.{extension}")));
        let (output, status) = (read("output").unwrap(), read("status").unwrap());
        let expected = if step.fails() { "1" } else { "0" };
        assert_eq!(status.trim(), expected, "{}: {output}", step.command);
        assert_eq!(
            output.lines().any(is_error),
            step.fails(),
            "{}: {output}",
            step.command
        );
        assert!(
            step.answer.is_empty() || !output.is_empty(),
            "{}: no output",
            step.command
        );
        // The figures differ from those of the page, but lines that begin like the first one on the page have as many
        // columns.
        let shown = step.answer.iter().find(|it| it.trim() != "...");
        if let Some(shown) = shown.filter(|_| step.has_fixed_columns()) {
            let shown_shape = shape(shown);
            let mut alike = output.lines().map(shape);
            let is_there = alike.clone().any(|it| it == shown_shape);
            let is_other = alike.any(|it| it.first() == shown_shape.first());
            assert!(
                is_there || !is_other,
                "{}: nothing like\n{shown}\nin\n{output}",
                step.command
            );
        }
        for name in step.names() {
            assert!(
                output.contains(name),
                "{}: no {name} in\n{output}",
                step.command
            );
        }
    }
}

macro_rules! page {
    ($name:literal) => {
        run(include_str!(concat!("../../../../docs/", $name, ".md")))
    };
}

// promise: Documents: Every command of the tutorial succeeds or fails as on the page, and shows the OCaml functions that the page
//    shows, on a web server under load
#[test]
fn tutorial_works_as_written() {
    page!("tutorial");
}

// promise: Documents: So does every command of the pages by task (6 pages)
#[test]
fn slow_requests_are_found_as_written() {
    page!("tasks/slow-request");
}

#[test]
fn waits_are_found_as_written() {
    page!("tasks/waiting");
}

#[test]
fn allocations_are_found_as_written() {
    page!("tasks/allocation");
}

#[test]
fn exceptions_are_found_as_written() {
    page!("tasks/exceptions");
}

#[test]
fn one_module_is_logged_as_written() {
    page!("tasks/logging");
}

#[test]
fn many_processes_are_watched_as_written() {
    page!("tasks/fleet");
}
