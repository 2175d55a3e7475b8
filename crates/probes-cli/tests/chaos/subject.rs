//! The process under test. Its memory is read without the library, and what errors, `states()` and
//! `info` say is compared with it.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;

use probes_lib::{Action, Actions, Effect, Options, Report, Selector, State, Target};
use test_support::process::{self, Image};
use test_support::{DEADLINE, Talker, eventually};

/// The opcode of an enabled site.
const CALL: u8 = 0xe8;

/// Counter and state of each name.
pub(crate) type States = BTreeMap<String, (u16, State)>;

/// The addresses of a probe in the process.
struct Place {
    name: String,
    sites: Vec<u64>,
    counters: Vec<u64>,
}

/// A process that takes commands line by line, with all probes disabled at first.
pub(crate) struct Subject {
    pub(crate) talker: Talker,
    pub(crate) file: PathBuf,
    places: Vec<Place>,
    /// Its code as built.
    built: Image,
    hits: u64,
}

/// Every probe.
pub(crate) fn all(action: Action) -> Actions {
    Actions::of(action, Selector::All)
}

/// Options whose time limit is [`DEADLINE`], the longest time that a test waits for anything.
pub(crate) fn patient_options() -> Options {
    Options {
        time_limit: DEADLINE,
        ..Options::default()
    }
}

impl Subject {
    pub(crate) fn start(file: &Path, args: impl IntoIterator<Item = impl AsRef<OsStr>>) -> Subject {
        Subject::spawn(file, Command::new(file).args(args))
    }

    /// `command` has to run `file`.
    pub(crate) fn spawn(file: &Path, command: &mut Command) -> Subject {
        let mut talker = Talker::spawn(command);
        talker.expect("ready");
        let target = Target::open(talker.pid()).unwrap();
        let states = target.states().unwrap();
        let places = states.probes().map(|probe| Place {
            name: probe.name().to_owned(),
            sites: probe.sites().map(|site| site.address.0).collect(),
            counters: probe.semaphores().map(|one| one.address.0).collect(),
        });
        let subject = Subject {
            file: file.to_owned(),
            places: places.collect(),
            built: Image::of(talker.pid()).text(),
            talker,
            hits: 0,
        };
        subject.assert_all((0, State::Disabled), "as built");
        subject
    }

    pub(crate) fn pid(&self) -> i32 {
        self.talker.pid()
    }

    /// Opens the process again, and changes it.
    pub(crate) fn try_apply(
        &self,
        actions: &Actions,
        options: Options,
    ) -> probes_lib::Result<Report> {
        Target::open(self.pid())
            .map_err(|error| error.with_effect_if_none(Effect::NothingChanged))?
            .update_with(actions, options)
    }

    /// Same as [`Subject::try_apply`], with [`patient_options`]; asserts that it
    /// succeeds.
    #[track_caller]
    pub(crate) fn apply(&self, actions: &Actions) -> Report {
        self.try_apply(actions, patient_options()).unwrap()
    }

    /// Opens the process again, switches every probe, and compares with the states that the library
    /// reads. Does not read the bytes as well, which would take longer than all of the rest if
    /// threads never pause.
    #[track_caller]
    pub(crate) fn switch(&self, action: Action, what: &str) -> Report {
        let target = Target::open(self.pid()).unwrap();
        let report = target.update_with(&all(action), patient_options()).unwrap();
        let states = states_of(&target);
        assert!(
            states.values().all(|&state| state == state_after(action)),
            "{}: {what}: {states:?}",
            self.file.display()
        );
        report
    }

    /// The states according to the bytes in memory, where nothing may have changed but opcodes and
    /// counters.
    #[track_caller]
    pub(crate) fn states_in_memory(&self) -> States {
        self.states_in(&Image::of(self.pid()))
    }

    #[track_caller]
    pub(crate) fn states_in(&self, image: &Image) -> States {
        let mut text = image.text();
        let mut states = States::new();
        for place in &self.places {
            let is_on = |&site: &u64| image.get(site + 1, 1) == [CALL];
            let counter = |&at: &u64| {
                let bytes = image.get(at, 2);
                u16::from_le_bytes([bytes[0], bytes[1]])
            };
            let counters: Vec<u16> = place.counters.iter().map(counter).collect();
            let all_on = place.sites.iter().all(is_on);
            let all_off = !place.sites.iter().any(is_on);
            // Every prefix of the writes is safe: no counter says on while a site is off.
            assert!(
                all_on || counters.iter().all(|&counter| counter == 0),
                "{}: counters {counters:?} are set before all sites are enabled",
                place.name
            );
            let state = if all_on && counters.iter().all(|&counter| counter > 0) {
                State::Enabled
            } else if all_off && counters.iter().all(|&counter| counter == 0) {
                State::Disabled
            } else {
                State::Inconsistent
            };
            let smallest = counters.iter().copied().min().unwrap_or(0);
            states.insert(place.name.clone(), (smallest, state));
            for &site in &place.sites {
                text.set(site + 1, self.built.get(site + 1, 1));
            }
        }
        text.assert_same(&self.built, "the code beside the opcodes");
        states
    }

    /// The memory of a process, once all its probes are switched, if it was `before` until then.
    pub(crate) fn switched(&self, before: &Image, action: Action) -> Image {
        let mut after = before.clone();
        let (opcode, counter) = match action {
            Action::Enable => (CALL, 1_u16),
            Action::Disable => (0x3d, 0),
        };
        for place in &self.places {
            for &site in &place.sites {
                after.set(site + 1, &[opcode]);
            }
            for &at in &place.counters {
                after.set(at, &counter.to_le_bytes());
            }
        }
        after
    }

    /// The states that the library reads, which have to be those in memory.
    #[track_caller]
    pub(crate) fn states(&self) -> States {
        let states = states_of(&Target::open(self.pid()).unwrap());
        assert_eq!(states, self.states_in_memory(), "{}", self.file.display());
        states
    }

    /// Asserts that every name has this counter and state.
    #[track_caller]
    pub(crate) fn assert_all(&self, expected: (u16, State), what: &str) {
        let states = self.states();
        assert!(
            states.values().all(|&state| state == expected),
            "{}: {what}: {states:?}",
            self.file.display()
        );
    }

    /// Asserts that no thread is traced or stopped.
    #[track_caller]
    pub(crate) fn assert_released(&self) {
        assert_released(self.pid());
    }

    /// Repairs it, whatever its state is.
    #[track_caller]
    pub(crate) fn force(&self, action: Action) {
        self.apply(&all(action).force(true));
        self.assert_all(state_after(action), "forced");
    }

    /// Executes every site once, and returns how many handlers ran.
    pub(crate) fn run(&mut self) -> u64 {
        self.talker.send("run");
        let line = loop {
            let line = self.talker.line().expect("the process still answers");
            if line.starts_with("hits") || line.starts_with("round") {
                break line;
            }
        };
        let counts = line.split_ascii_whitespace();
        let counts = counts.filter_map(|word| word.split_once('=')?.1.parse::<u64>().ok());
        let sum = counts.sum();
        if line.starts_with("round") {
            return sum;
        }
        sum - std::mem::replace(&mut self.hits, sum)
    }

    /// How often each thread of a fixture that never pauses has executed all sites.
    pub(crate) fn rounds(&mut self) -> Vec<u64> {
        let line = self.talker.ask("report", "report");
        let words = line.split_ascii_whitespace().skip(1);
        words.map(|word| word.parse().unwrap()).collect()
    }

    /// Waits until each thread has executed all sites once more.
    pub(crate) fn wait_for_round(&mut self) {
        let then = self.rounds();
        eventually("every thread has run on", || {
            let now = self.rounds();
            let on = now.iter().zip(&then).all(|(now, then)| now > then);
            on.then_some(())
        });
    }

    /// Closes the program's input, and asserts that it exits with success.
    pub(crate) fn end(mut self) {
        self.talker.close_input();
        assert!(self.talker.guard().wait().success());
    }
}

fn states_of(target: &Target) -> States {
    let states = target.states().unwrap();
    let one = |probe: probes_lib::ProbeState<'_>| {
        (probe.name().to_owned(), (probe.counter(), probe.state()))
    };
    states.probes().map(one).collect()
}

/// The counter and the state of a probe that was off, after `action`.
pub(crate) fn state_after(action: Action) -> (u16, State) {
    match action {
        Action::Enable => (1, State::Enabled),
        Action::Disable => (0, State::Disabled),
    }
}

/// Asserts that no thread of the process is traced or stopped.
#[track_caller]
pub(crate) fn assert_released(pid: i32) {
    eventually("every thread is released", || {
        let is_stopped = |tid| process::status(tid, "State").starts_with(['t', 'T']);
        let threads = process::threads(pid);
        let is_free = !threads.into_iter().any(is_stopped) && !is_traced(pid);
        is_free.then_some(())
    });
}

/// Whether a thread of the process is traced.
pub(crate) fn is_traced(pid: i32) -> bool {
    process::threads(pid).into_iter().any(|tid| {
        let tracer = process::status(tid, "TracerPid");
        !matches!(tracer.as_str(), "" | "0")
    })
}
