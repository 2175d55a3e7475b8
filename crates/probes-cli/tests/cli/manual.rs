//! Manual pages, read by mandoc.

use std::fs;
use std::process::{Command, Stdio};

use test_support::{Scratch, output};

use crate::support::{command, run, run_command};

/// A page as a reader sees it, without highlighting.
fn shown(page: &str) -> String {
    let scratch = Scratch::new();
    let file = scratch.file("page.1");
    fs::write(&file, page).unwrap();
    let mut mandoc = Command::new("mandoc");
    let mandoc = mandoc.args(["-T", "ascii", "-O", "width=200"]).arg(file);
    let text = String::from_utf8(output(mandoc).stdout).unwrap();
    // A letter, a backspace and the letter again is a bold one.
    let mut plain = String::new();
    for letter in text.chars() {
        if letter == '\u{8}' {
            plain.pop();
        } else {
            plain.push(letter);
        }
    }
    plain
}

#[test]
fn each_subcommand_has_a_page_without_warnings() {
    let scratch = Scratch::new();
    let folder = scratch.file("man1");
    run_command(command(["man", "-all"]).arg(&folder)).answer();
    let help = run("help").answer();
    let (_, rest) = help.split_once("Subcommands:\n").unwrap();
    let subcommands = rest.lines().take_while(|line| line.starts_with("  "));
    let names = subcommands.map(|line| line.split_whitespace().next().unwrap());
    let mut pages: Vec<String> = names.map(|name| format!("ocaml-probes-{name}.1")).collect();
    pages.push("ocaml-probes.1".to_owned());
    for page in &pages {
        let mut lint = Command::new("mandoc");
        let lint = lint
            .args(["-T", "lint", "-W", "warning"])
            .arg(folder.join(page));
        let found = output(lint.stderr(Stdio::piped()));
        let found = String::from_utf8_lossy(&found.stdout).into_owned();
        // Who packs the pages dates them.
        let found = found.lines().filter(|line| !line.contains("missing date"));
        let found: Vec<&str> = found.collect();
        assert!(found.is_empty(), "{page}: {found:#?}");
    }
    let written = fs::read_dir(&folder).unwrap().count();
    assert_eq!(written, pages.len());
}

#[test]
fn page_has_flags_and_text_of_the_help() {
    let page = shown(&run("man attach").answer());
    for text in [
        "ocaml-probes-attach - Change the probes of a running process, all or nothing",
        "ocaml-probes attach -pid N ACTIONS [FLAGS]",
        "-p, -pid N",
        "The process; may be repeated",
        "-enable-pair START,STOP",
        "NAME BEFORE -> AFTER, N sites",
        "SEE ALSO",
    ] {
        assert!(page.contains(text), "no {text:?} in\n{page}");
    }
    let all = shown(&run("man").answer());
    assert!(all.contains("ocaml-probes-latency(1)"), "{all}");
    assert!(
        all.contains("Exit status: 0 success, 1 failure, 2 usage error"),
        "{all}"
    );
}
