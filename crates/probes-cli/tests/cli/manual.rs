//! Manual pages, read by mandoc, and their installation.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use regex::Regex;
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
    let directory = scratch.file("man1");
    run_command(command(["man", "-all"]).arg(&directory)).answer();
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
            .arg(directory.join(page));
        let found = output(lint.stderr(Stdio::piped()));
        let found = String::from_utf8_lossy(&found.stdout).into_owned();
        // The pages get their date when they are packaged.
        let found = found.lines().filter(|line| !line.contains("missing date"));
        let found: Vec<&str> = found.collect();
        assert!(found.is_empty(), "{page}: {found:#?}");
    }
    let written = fs::read_dir(&directory).unwrap().count();
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
        "/usr/share/doc/ocaml-probes",
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

/// All files below a directory, by their paths in it.
fn files(directory: &Path) -> BTreeSet<String> {
    let find = output(
        Command::new("find")
            .arg(directory)
            .args(["-type", "f", "-printf", "%P\n"]),
    );
    let listed = String::from_utf8(find.stdout).unwrap();
    listed.lines().map(str::to_owned).collect()
}

/// Fails if a link of a page in `documents` leads to a file that is not installed.
fn assert_links_are_installed(documents: &Path) {
    let link = Regex::new(r"\]\(([^)\s:#]+)(#[^)]*)?\)").unwrap();
    let pages = files(documents);
    let mut links = 0;
    for page in pages.iter().filter(|it| it.ends_with(".md")) {
        let page = documents.join(page);
        let text = fs::read_to_string(&page).unwrap();
        for found in link.captures_iter(&text) {
            let target = page.parent().unwrap().join(&found[1]);
            assert!(target.is_file(), "{}: {}", page.display(), &found[1]);
            links += 1;
        }
    }
    assert!(links > 100, "{links}");
    // The index leads to each page, except for pictures and examples.
    let index = fs::read_to_string(documents.join("index.md")).unwrap();
    for page in pages
        .iter()
        .filter(|it| it.ends_with(".md") && *it != "index.md")
    {
        assert!(
            index.contains(&format!("]({page})")),
            "no {page} in {index}"
        );
    }
}

/// Fails if the help or a manual page names a page that is not installed.
fn assert_named_pages_are_installed(manual: &Path, documents: &Path) {
    let name = Regex::new(r"docs/([a-z/-]+\.md)").unwrap();
    let mut named = BTreeSet::new();
    for page in files(manual) {
        let text = fs::read_to_string(manual.join(page))
            .unwrap()
            .replace('\\', "");
        named.extend(name.captures_iter(&text).map(|it| it[1].to_owned()));
    }
    assert!(named.len() > 5, "{named:#?}");
    for page in named {
        assert!(documents.join(&page).is_file(), "no {page}");
    }
}

#[test]
fn installation_is_complete_and_removes_itself() {
    let scratch = Scratch::new();
    // As with DESTDIR=scratch PREFIX="/usr local".
    let directory = scratch.file("usr local");
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/install");
    fs::create_dir_all(directory.join("bin")).unwrap();
    fs::write(directory.join("bin/other"), "").unwrap();
    let tool = env!("CARGO_BIN_EXE_ocaml-probes");
    let installed = output(Command::new(&script).arg(&directory).arg(tool));
    assert!(installed.status.success(), "{installed:?}");
    let found = files(&directory);
    for file in [
        "bin/ocaml-probes",
        "share/man/man1/ocaml-probes.1",
        "share/man/man1/ocaml-probes-attach.1",
        "share/bash-completion/completions/ocaml-probes",
        "share/zsh/site-functions/_ocaml-probes",
        "share/fish/vendor_completions.d/ocaml-probes.fish",
    ] {
        assert!(found.contains(file), "no {file} in {found:#?}");
    }
    let version = output(Command::new(directory.join("bin/ocaml-probes")).arg("version"));
    assert_eq!(
        String::from_utf8(version.stdout).unwrap(),
        run("version").answer()
    );
    let documents = directory.join("share/doc/ocaml-probes");
    assert_links_are_installed(&documents);
    assert_named_pages_are_installed(&directory.join("share/man/man1"), &documents);
    let removed = output(Command::new(&script).arg("--remove").arg(&directory));
    assert!(removed.status.success(), "{removed:?}");
    assert_eq!(files(&directory), BTreeSet::from(["bin/other".to_owned()]));
}
