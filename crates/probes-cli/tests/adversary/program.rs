//! A program that checks itself, as PIE and as non-PIE: starts it, sends it commands, and ends it.

use std::ffi::OsString;
use std::fs::{self, File};
use std::path::PathBuf;
use std::process::Command;

use probes_lib::Target;
use test_support::{Scratch, Talker, eventually, fixture_forms, program_forms};

/// A program, with all that a run of it needs.
#[derive(Clone, Debug)]
pub(crate) struct Program {
    forms: [PathBuf; 2],
    pub(crate) args: Vec<OsString>,
    /// OCAMLRUNPARAM.
    runtime: &'static str,
    /// Sends it commands from time to time, and asserts what it answers.
    dialogue: fn(&mut Talker),
    /// Whether it prints the result of its own checks before it exits.
    has_verdict: bool,
    /// Whether an update or observation of it may be refused, for want of memory for example.
    pub(crate) may_refuse: bool,
    /// Whether it loads and unloads objects with probes. A probe that is enabled in one object and
    /// not in another, loaded later, is inconsistent: `-force` alone repairs it, and never with
    /// `-live`. What was changed in an object cannot be undone once that is unloaded.
    pub(crate) loads_objects: bool,
    /// Whether it has a runtime of OCaml.
    pub(crate) has_runtime: bool,
}

impl Program {
    /// A program of `test-programs/adversary`.
    pub(crate) fn checked(name: &str) -> Program {
        Program {
            has_verdict: true,
            ..Program::other(&format!("adversary/{name}"), |_| {})
        }
    }

    /// Another one; `dialogue` asserts that its answers are right.
    pub(crate) fn other(name: &str, dialogue: fn(&mut Talker)) -> Program {
        Program {
            forms: program_forms(name),
            args: Vec::new(),
            runtime: "",
            dialogue,
            has_verdict: false,
            may_refuse: false,
            loads_objects: false,
            has_runtime: true,
        }
    }

    /// A fixture: a program in assembler, with the sites of compilers that this machine lacks.
    pub(crate) fn fixture(name: &str, dialogue: fn(&mut Talker)) -> Program {
        Program {
            forms: fixture_forms(name),
            has_runtime: false,
            ..Program::other("handlers", dialogue)
        }
    }

    pub(crate) fn with_args(mut self, args: impl IntoIterator<Item = impl Into<OsString>>) -> Self {
        self.args = args.into_iter().map(Into::into).collect();
        self
    }

    pub(crate) fn with_runtime(mut self, runtime: &'static str) -> Self {
        self.runtime = runtime;
        self
    }

    pub(crate) fn may_be_refused(mut self) -> Self {
        self.may_refuse = true;
        self
    }

    pub(crate) fn loading_objects(mut self) -> Self {
        self.loads_objects = true;
        self
    }

    /// The executable: PIE if `form` is even, non-PIE if it is odd.
    pub(crate) fn form(&self, form: usize) -> &PathBuf {
        &self.forms[form % 2]
    }

    /// The probes with sites, by name.
    pub(crate) fn probes(&self) -> Vec<String> {
        let table = probes_lib::ProbeTable::read(&self.forms[0]).unwrap();
        let probes = table.probes().filter(|probe| probe.sites().count() > 0);
        probes.map(|probe| probe.name().to_owned()).collect()
    }

    /// Starts it.
    pub(crate) fn start(&self, form: usize) -> Running<'_> {
        let mut command = Command::new(self.form(form));
        self.spawn(command.args(&self.args))
    }

    /// Starts it by a command that runs it with its arguments.
    pub(crate) fn spawn(&self, command: &mut Command) -> Running<'_> {
        let scratch = Scratch::new();
        let errors = File::create(scratch.file("errors")).unwrap();
        command.env("OCAMLRUNPARAM", self.runtime).stderr(errors);
        let mut talker = Talker::spawn(command);
        let ready = talker.expect("ready");
        let pid = ready.rsplit_once("pid=");
        let pid = pid.map_or(talker.pid(), |(_, pid)| pid.parse().unwrap());
        Running {
            program: self,
            talker,
            pid,
            scratch,
        }
    }
}

/// A running program.
pub(crate) struct Running<'a> {
    pub(crate) program: &'a Program,
    pub(crate) talker: Talker,
    /// Its pid, or that of the tool that has started it, if it does not print its own.
    pub(crate) pid: i32,
    /// Holds its standard error, and what observers write.
    pub(crate) scratch: Scratch,
}

impl Running<'_> {
    /// Sends its commands, checks the answers, and asserts that it still runs.
    pub(crate) fn speak(&mut self) {
        (self.program.dialogue)(&mut self.talker);
        let is_running = self.talker.guard().is_running();
        assert!(
            is_running,
            "{:?} has exited: {}",
            self.program,
            self.errors()
        );
    }

    /// Asserts that nothing observes it any more.
    pub(crate) fn assert_unobserved(&self) {
        let target = Target::open(self.pid).unwrap();
        // A program that loads and unloads objects all the time may do so whenever its states are read.
        let states = eventually("its states are read", || match target.states() {
            Err(error) if self.program.loads_objects && error.is_transient() => None,
            states => Some(states.unwrap()),
        });
        assert_eq!(
            (states.observed_sites(), states.observed_functions()),
            (0, 0),
            "{:?}",
            self.program.forms
        );
    }

    /// Ends its input, and asserts that all its checks have held. Returns its rounds.
    pub(crate) fn end(mut self, what: &str) -> u64 {
        let what = format!("{what}: {:?} {:?}", self.program.forms, self.program.args);
        let rounds = self.verdict(&what);
        let status = self.talker.guard().wait();
        assert!(status.success(), "{what}: {status}: {}", self.errors());
        rounds
    }

    /// The end of its standard error, without the hits that `trace -watch` shows there.
    fn errors(&self) -> String {
        let errors = fs::read(self.scratch.file("errors")).unwrap();
        let errors = String::from_utf8_lossy(&errors);
        let is_hit = |line: &&str| line.as_bytes().get(2) == Some(&b':');
        let lines: Vec<&str> = errors.lines().filter(|line| !is_hit(line)).collect();
        lines[lines.len().saturating_sub(30)..].join("\n")
    }

    /// Same as [`Running::end`], for a program that is not a child of this process: its exit status
    /// is not checked.
    pub(crate) fn verdict(&mut self, what: &str) -> u64 {
        if !self.program.has_verdict {
            (self.program.dialogue)(&mut self.talker);
            self.talker.close_input();
            while self.talker.line().is_some() {}
            return 1;
        }
        self.talker.close_input();
        let mut verdict = String::new();
        while let Some(line) = self.talker.line() {
            if line.starts_with("verdict") {
                verdict = line;
            }
        }
        let rounds = verdict.strip_prefix("verdict good rounds=");
        let rounds = rounds.unwrap_or_else(|| {
            let status = self.talker.guard().wait();
            panic!("{what}: {verdict:?}, {status}: {}", self.errors())
        });
        rounds.parse().unwrap()
    }
}
