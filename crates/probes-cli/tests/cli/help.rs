//! Help and version, word for word.

use crate::support::{golden, run};

#[test]
fn help_equals_the_golden_files() {
    let text = run("help").answer();
    assert_lines_are_short(&text);
    golden("help.txt", &text);
    for subcommand in [
        "trace",
        "attach",
        "info",
        "list",
        "hist",
        "gc",
        "latency",
        "observe",
        "top",
        "watch",
        "stack",
        "profile",
        "record",
        "serve",
        "doctor",
        "completion",
        "man",
        "version",
    ] {
        let text = run(&format!("help {subcommand}")).answer();
        assert_lines_are_short(&text);
        golden(&format!("help-{subcommand}.txt"), &text);
    }
}

/// A terminal shows help without wrapping its lines.
fn assert_lines_are_short(help: &str) {
    let long = help.lines().filter(|line| line.chars().count() > 100);
    assert_eq!(long.collect::<Vec<_>>(), [""; 0]);
}

#[test]
fn help_can_be_requested_in_every_spelling() {
    for (subcommand, ways) in [
        (
            "help",
            ["-help", "--help", "-h", "-?", "help -h", "help -?"],
        ),
        (
            "help info",
            [
                "info -help",
                "info --help",
                "inf -h",
                "info -pid 7 -?",
                "help info -h",
                "help --help info",
            ],
        ),
    ] {
        let text = run(subcommand).answer();
        for way in ways {
            assert_eq!(run(way).answer(), text, "{way}");
        }
    }
}

#[test]
fn version_can_be_requested_in_every_spelling() {
    let version = run("version").answer();
    for way in ["-version", "--version", "vers"] {
        assert_eq!(run(way).answer(), version, "{way}");
    }
}

#[test]
fn version_says_what_was_built() {
    let version = run("version -json").json();
    assert_eq!(version["release"], env!("CARGO_PKG_VERSION"));
    let target = version["target"].as_str().unwrap();
    assert!(
        target.starts_with("x86_64-") && target.contains("linux"),
        "{target}"
    );
    assert_eq!(version["features"], serde_json::json!(["fault-injection"]));
    let text = run("version").answer();
    let commit = version["commit"].as_str().unwrap_or("unknown");
    let first = concat!("ocaml-probes ", env!("CARGO_PKG_VERSION"));
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(
        lines[..3],
        [
            first,
            &format!("commit {commit}"),
            &format!("target {target}")
        ]
    );
    assert!(
        lines[3].starts_with("features ") && lines.len() == 4,
        "{text}"
    );
}

#[test]
fn every_flag_is_described_in_the_help() {
    for subcommand in [
        "trace",
        "attach",
        "info",
        "list",
        "count",
        "hist",
        "gc",
        "latency",
        "observe",
        "top",
        "watch",
        "stack",
        "profile",
        "record",
        "serve",
        "ps",
        "doctor",
        "completion",
        "man",
    ] {
        let text = run(&format!("help {subcommand}")).answer();
        assert_lines_are_short(&text);
        for line in text
            .lines()
            .filter(|line| line.trim_start().starts_with('-'))
        {
            assert!(line.trim_start().split("  ").count() > 1, "{line}");
        }
    }
}
