//! A running target under the library's control; every update is compared byte by byte with what it
//! has to do.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};

use probes_lib::{Action, Actions, Object, Options, Report, Selector, State, Target};
use test_support::process::{Image, settle};
use test_support::{DEADLINE, Talker};

/// A process that takes commands line by line, and the library's view of it.
pub(crate) struct Session {
    pub(crate) talker: Talker,
    pub(crate) target: Target,
    /// How updates are made.
    pub(crate) options: Options,
    hits: BTreeMap<String, u64>,
}

/// Every probe.
pub(crate) fn all(action: Action) -> Actions {
    Actions::of(action, Selector::All)
}

/// The probe of that name.
pub(crate) fn named(action: Action, name: &str) -> Actions {
    Actions::of(action, Selector::name(name))
}

/// Options to wait for a thread to stop for as long as a test waits for anything: on a busy machine
/// it may take a while until the thread runs, and it stops only then.
pub(crate) fn patient() -> Options {
    Options {
        time_limit: DEADLINE,
        ..Options::default()
    }
}

/// Held by the tests whose targets use all the processor time they get, so that only one of them
/// runs at a time.
pub(crate) fn heavy_test_lock() -> MutexGuard<'static, ()> {
    static BUSY: Mutex<()> = Mutex::new(());
    BUSY.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Session {
    pub(crate) fn start(program: &Path) -> Session {
        Session::of(Talker::start(program))
    }

    pub(crate) fn of(talker: Talker) -> Session {
        let target = Target::open(talker.pid()).unwrap();
        Session::with_target(talker, target)
    }

    /// `target` is a process that the talker's process has started, and that answers the talker.
    pub(crate) fn with_target(talker: Talker, target: Target) -> Session {
        Session {
            talker,
            target,
            options: patient(),
            hits: BTreeMap::new(),
        }
    }

    /// Makes updates while the process runs, from now on.
    pub(crate) fn live(mut self) -> Session {
        self.options.live = true;
        self
    }

    /// The executable.
    pub(crate) fn object(&self) -> Object {
        self.target.objects().swap_remove(0)
    }

    /// Applies `actions`, with a long time limit.
    pub(crate) fn apply(&self, actions: &Actions) -> probes_lib::Result<Report> {
        self.target.update_with(actions, self.options)
    }

    pub(crate) fn pid(&self) -> i32 {
        self.talker.pid()
    }

    /// The executable's memory while the process waits for a line.
    pub(crate) fn image(&self) -> Image {
        settle(self.pid());
        Image::of(self.pid())
    }

    /// Counter and state of each name.
    pub(crate) fn states(&self) -> BTreeMap<String, (u16, State)> {
        let states = self.target.states().unwrap();
        let one = |probe: probes_lib::ProbeState<'_>| {
            (probe.name().to_owned(), (probe.counter(), probe.state()))
        };
        states.probes().map(one).collect()
    }

    /// Asserts that every name has this counter and state.
    #[track_caller]
    pub(crate) fn assert_all(&self, expected: (u16, State)) {
        let states = self.states();
        assert!(
            states.values().all(|&state| state == expected),
            "{states:?}"
        );
    }

    pub(crate) fn state(&self, name: &str) -> State {
        self.states()[name].1
    }

    /// Runs all sites once and returns the hits, in that run, of each name that the executable has
    /// a probe of.
    pub(crate) fn run(&mut self) -> BTreeMap<String, u64> {
        self.talker.send("run");
        let line = loop {
            let line = self.talker.line().expect("an answer");
            if line.starts_with("hits") || line.starts_with("round") {
                break line;
            }
        };
        let cumulative = line.starts_with("hits");
        let mut hits: BTreeMap<String, u64> = BTreeMap::new();
        for (key, count) in line
            .split_ascii_whitespace()
            .filter_map(|w| w.split_once('='))
        {
            // Sites of one name in several units: `shared`, `left.shared`.
            let name = key.rsplit_once('.').map_or(key, |(_, name)| name);
            let name = if name == "hits" { "*" } else { name };
            if name == "*" || self.object().table().probe(name).is_some() {
                *hits.entry(name.to_owned()).or_default() += count.parse::<u64>().unwrap_or(0);
            }
        }
        if !cumulative {
            return hits;
        }
        let before = std::mem::replace(&mut self.hits, hits.clone());
        let earlier = |name: &String| before.get(name).copied().unwrap_or(0);
        hits.into_iter()
            .map(|(name, count)| (name.clone(), count - earlier(&name)))
            .collect()
    }

    /// Applies `action` to the probes of `selector`, which have to be those that `chosen` names,
    /// and checks memory, states and report.
    pub(crate) fn update(
        &self,
        action: Action,
        selector: Selector,
        chosen: impl Fn(&str) -> bool,
    ) -> Report {
        let what = format!(
            "{action:?} {selector:?} of {}",
            self.target.program().display()
        );
        let step = |counter: u16| match action {
            Action::Enable => counter + 1,
            Action::Disable => counter.saturating_sub(1),
        };
        let before = self.target.states().unwrap();
        let mut memory = self.image();
        let mut states = self.states();
        let (mut changed, mut skipped) = (Vec::new(), Vec::new());
        for probe in before.probes().filter(|probe| chosen(probe.name())) {
            let name = probe.name().to_owned();
            let after = step(probe.counter());
            if after == probe.counter() {
                skipped.push(name);
                continue;
            }
            for semaphore in probe.semaphores() {
                let value = step(semaphore.value).to_le_bytes();
                memory.set(semaphore.address.0, &value);
            }
            let mut flipped = 0;
            for site in probe.sites() {
                memory.set(site.address.0 + 1, &[if after > 0 { 0xe8 } else { 0x3d }]);
                flipped += usize::from(site.enabled() != Some(after > 0));
            }
            let on = [State::Disabled, State::Enabled][usize::from(after > 0)];
            states.insert(name.clone(), (after, on));
            changed.push((name, probe.counter(), after, flipped));
        }

        let report = self.apply(&Actions::of(action, selector));
        let report = report.unwrap_or_else(|error| panic!("{what}: {error}"));

        self.image().assert_same(&memory, &what);
        assert_eq!(self.states(), states, "{what}");
        assert_eq!(report.pid, self.pid());
        let stopped = !changed.is_empty() && !self.options.live;
        assert_eq!(report.stopped.is_zero(), !stopped, "{what}");
        assert_eq!(report.skipped, skipped, "{what}");
        let mut reported: Vec<_> = report
            .changed
            .iter()
            .map(|change| {
                (
                    change.name.clone(),
                    change.before,
                    change.after,
                    change.sites,
                )
            })
            .collect();
        reported.sort();
        assert_eq!(reported, changed, "{what}");
        report
    }

    /// Closes the program's input, and asserts that it exits with success.
    pub(crate) fn end(mut self) {
        self.talker.close_input();
        assert!(self.talker.guard().wait().success());
    }
}
