//! Help and version, word for word.

use crate::support::{golden, run};

#[test]
fn help_of_the_program_and_of_each_subcommand_is_as_written_down() {
    golden("help.txt", &run("help").answer());
    for subcommand in [
        "trace", "attach", "info", "list", "latency", "observe", "top", "watch", "version",
    ] {
        let text = run(&format!("help {subcommand}")).answer();
        golden(&format!("help-{subcommand}.txt"), &text);
    }
}

#[test]
fn help_can_be_asked_for_in_every_way() {
    for (subcommand, ways) in [
        ("help", ["-help", "--help", "-h", "-?"]),
        (
            "help info",
            ["info -help", "info --help", "inf -h", "info -pid 7 -?"],
        ),
    ] {
        let text = run(subcommand).answer();
        for way in ways {
            assert_eq!(run(way).answer(), text, "{way}");
        }
    }
}

#[test]
fn the_version_can_be_asked_for_in_every_way() {
    let version = concat!("ocaml-probes ", env!("CARGO_PKG_VERSION"), "\n");
    for way in ["version", "-version", "--version", "vers"] {
        assert_eq!(run(way).answer(), version, "{way}");
    }
}

#[test]
fn every_flag_stands_in_the_help_with_a_sentence() {
    for subcommand in [
        "trace", "attach", "info", "list", "count", "latency", "observe", "top", "watch", "ps",
    ] {
        let text = run(&format!("help {subcommand}")).answer();
        for line in text
            .lines()
            .filter(|line| line.trim_start().starts_with('-'))
        {
            assert!(line.trim_start().split("  ").count() > 1, "{line}");
            assert!(line.chars().count() <= 100, "{line}");
        }
    }
}
