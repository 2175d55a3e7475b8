//! Builds and starts `tests/programs/own.c`, a program that updates its own probes, and sends it commands.

use std::collections::BTreeMap;
use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

use probes_lib::{Actions, Options, State, Target};
use test_support::{DEADLINE, Scratch, Talker, output};

/// The build of libprobes that the program is linked with.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Library {
    Shared,
    Static,
}

/// A running `own`.
pub(crate) struct SelfSwitching {
    pub(crate) talker: Talker,
    /// The same process, opened by this test.
    pub(crate) target: Target,
    _directory: Scratch,
}

impl SelfSwitching {
    /// Builds and starts it as PIE and as non-PIE, linked with `library`, and makes it open its probes.
    pub(crate) fn forms(library: Library) -> impl Iterator<Item = SelfSwitching> {
        programs(library).map(move |directory| {
            let mut talker = Talker::start(&directory.file("own"));
            assert_eq!(talker.ask("open", ""), "done");
            let target = Target::open(talker.pid()).unwrap();
            SelfSwitching {
                talker,
                target,
                _directory: directory,
            }
        })
    }

    /// Sends a line; returns the answer.
    pub(crate) fn ask(&mut self, line: &str) -> String {
        self.talker.ask(line, "")
    }

    /// Sends a command, and asserts that the answer is `done`.
    #[track_caller]
    pub(crate) fn command(&mut self, line: &str) {
        assert_eq!(self.ask(line), "done", "{line}");
    }

    /// The hits that executing all sites once adds to `ping` and `pong`.
    pub(crate) fn run(&mut self) -> (u64, u64) {
        // Executes all sites once, and returns all hits since the start.
        let hits = |own: &mut SelfSwitching| BTreeMap::from_iter(own.talker.hits());
        let before = hits(self);
        let after = hits(self);
        (
            after["ping"] - before["ping"],
            after["pong"] - before["pong"],
        )
    }

    /// Asserts that both probes are in these states, as the program reports them and as this test reads them.
    #[track_caller]
    pub(crate) fn assert_states(&mut self, ping: (State, u16), pong: (State, u16)) {
        let number = |state| match state {
            State::Disabled => 0,
            State::Enabled => 1,
            State::Inconsistent => 2,
        };
        let [(ping_state, ping_counter), (pong_state, pong_counter)] =
            [ping, pong].map(|(state, counter)| (number(state), counter));
        assert_eq!(
            self.ask("states"),
            format!("states ping={ping_state}/{ping_counter} pong={pong_state}/{pong_counter}")
        );
        let states = self.target.states().unwrap();
        for (name, expected) in [("ping", ping), ("pong", pong)] {
            let probe = states.probe(name).unwrap();
            assert_eq!((probe.state(), probe.counter()), expected, "{name}");
        }
    }

    /// Updates its probes from this process.
    pub(crate) fn change(&self, actions: &Actions, live: bool) {
        let options = Options {
            time_limit: DEADLINE,
            live,
            ..Options::default()
        };
        self.target.update_with(actions, options).unwrap();
    }

    /// Closes its input, and asserts that it exits with success.
    pub(crate) fn end(mut self) {
        self.talker.close_input();
        assert!(self.talker.guard().wait().success());
    }
}

/// Directories with the program, in both forms, linked with `library`.
pub(crate) fn programs(library: Library) -> impl Iterator<Item = Scratch> {
    ["-pie", "-no-pie"].into_iter().map(move |form| {
        let directory = Scratch::new();
        build(&directory.file("own"), form, library);
        directory
    })
}

/// A file that cargo has built before this test, in the directory of the test's binary.
pub(crate) fn path_beside_tests(name: &str) -> PathBuf {
    let file = env::current_exe().unwrap().with_file_name(name);
    assert!(file.exists(), "no {}", file.display());
    file
}

fn build(program: &Path, form: &str, library: Library) {
    let crate_directory = Path::new(env!("CARGO_MANIFEST_DIR"));
    let fixtures = crate_directory.join("../../test-programs/fixtures");
    let mut gcc = Command::new("gcc");
    gcc.args([form, "-g", "-O2", "-Wall", "-Wextra", "-Werror", "-o"])
        .arg(program);
    gcc.arg(if form == "-pie" { "-fPIE" } else { "-fno-pie" });
    gcc.arg("-I").arg(crate_directory.join("include"));
    gcc.arg("-I").arg(&fixtures);
    gcc.arg(crate_directory.join("tests/programs/own.c"));
    gcc.args(["target.c", "few_sites.S", "wrapper.S"].map(|file| fixtures.join(file)));
    match library {
        Library::Shared => {
            let library = path_beside_tests("libprobes.so");
            let directory = library.parent().unwrap();
            gcc.arg(format!("-Wl,-rpath,{}", directory.display()));
            gcc.arg(library);
        }
        Library::Static => {
            gcc.arg(path_beside_tests("libprobes.a"));
        }
    }
    gcc.args(["-lpthread", "-ldl", "-lm"]);
    let output = output(&mut gcc);
    assert!(
        output.status.success(),
        "{gcc:?}:\n{}",
        String::from_utf8_lossy(&output.stderr)
    );
}
