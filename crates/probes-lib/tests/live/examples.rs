//! The examples do what the first lines of their source say.

use std::path::PathBuf;
use std::process::Command;

use test_support::{Talker, fixture, fixture_forms, output, program_forms};

/// The built example of that name: `cargo test` builds them next to the tests, but
/// `cargo test --test live` does not.
pub(crate) fn example(name: &str) -> PathBuf {
    let tests = std::env::current_exe().unwrap();
    let profile = tests.parent().unwrap().parent().unwrap();
    let example = profile.join("examples").join(name);
    let missing = format!("no {}: run `cargo build --examples`", example.display());
    assert!(example.exists(), "{missing}");
    example
}

fn stdout(command: &mut Command) -> String {
    let output = output(command);
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn list_prints_the_probes_of_a_file() {
    for file in program_forms("init") {
        assert_eq!(
            stdout(Command::new(example("list")).arg(file)),
            "starts_off (1 sites)\nstarts_on (1 sites)\nstarts_on_twice (2 sites)\n\
             tested_only (0 sites)\n"
        );
    }
    let output = output(&mut Command::new(example("list")));
    assert!(!output.status.success());
    assert!(
        String::from_utf8(output.stderr)
            .unwrap()
            .contains("usage: list FILE")
    );
}

#[test]
fn toggle_switches_a_probe_on_and_off_again() {
    for file in fixture_forms("gen_ocaml_dot1") {
        let mut talker = Talker::start(&file);
        let pid = talker.pid().to_string();
        let toggle = || stdout(Command::new(example("toggle")).args([&pid, "first"]));
        assert!(toggle().starts_with("Enabled first, stopped for "));
        assert_eq!(talker.hits()[0], ("first".to_owned(), 2));
        assert!(toggle().starts_with("Disabled first, stopped for "));
        assert_eq!(
            talker.hits()[0],
            ("first".to_owned(), 2),
            "no more than before"
        );
    }
}

#[test]
fn own_example_switches_a_preloaded_probe() {
    let own = |name: &str| {
        let mut own = Command::new(example("own"));
        own.arg(name)
            .env("LD_PRELOAD", fixture("objects/plugin.so"));
        own
    };
    assert_eq!(
        stdout(&mut own("plug")),
        "ping Disabled\nplug Enabled\nping Disabled\nplug Disabled\n"
    );
    for (mut command, error) in [
        (own("plugs"), "kind: Probe(Unknown {"),
        (Command::new(example("own")), "usage: own NAME"),
    ] {
        let output = output(&mut command);
        assert!(!output.status.success());
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(said.contains(error), "{said}");
    }
    let without_plugin = output(Command::new(example("own")).arg("plug"));
    let said = String::from_utf8(without_plugin.stderr).unwrap();
    assert!(said.contains("NoProbes"), "{said}");
}
