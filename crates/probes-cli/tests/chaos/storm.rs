//! Signals are sent without a pause to every thread of a process while its probes are switched all
//! the time: each signal arrives once, and in order.

use std::path::{Path, PathBuf};
use std::process::Command;

use probes_lib::Action;
use test_support::{Scratch, Talker, eventually, fixture, fixture_forms, program_forms};

use crate::case::Case;
use crate::subject::{Subject, state_after};

/// Signals sent to each process, at least.
const SIGNALS: u64 = 10_000;

/// How often the probes are enabled and disabled again in one round, on all programs together.
const CYCLES: usize = 1000;

/// Only once in this many cycles is the program asked what its threads do, as the thread that
/// answers may have to wait: an OCaml thread that never pauses lets others run only now and then.
const CYCLES_PER_CHECK: usize = 100;

/// A storm of signals over one process.
pub(crate) struct Storm {
    sender: Talker,
    what: String,
    _directory: Scratch,
}

impl Storm {
    /// Starts a program with this many threads, and the storm over it.
    pub(crate) fn start(file: &Path, threads: &str) -> (Storm, Subject) {
        let directory = Scratch::new();
        let shared = directory.file("storm");
        std::fs::write(&shared, [0; 4096]).unwrap();
        // At the priority of these threads, which never pause, the tool would get no more processor
        // time than one of them.
        let mut command = Command::new("nice");
        command.args(["-n", "5", "--"]).arg(file).arg(threads);
        command.env("STORM_FILE", &shared);
        command.env("LD_PRELOAD", fixture("storm.so"));
        let subject = Subject::spawn(file, &mut command);
        let mut sender = Command::new(fixture("storm.exe"));
        sender.arg(subject.pid().to_string()).arg(&shared);
        let mut sender = Talker::spawn(sender.arg(SIGNALS.to_string()));
        sender.expect("ready");
        let storm = Storm {
            sender,
            what: file.display().to_string(),
            _directory: directory,
        };
        (storm, subject)
    }

    /// Ends the storm, and asserts that every signal has arrived once and in order.
    pub(crate) fn end(&mut self, case: &mut Case) {
        self.sender.close_input();
        let line = self.sender.expect("received");
        let words: Vec<&str> = line.split_ascii_whitespace().collect();
        let received = words[1].parse().unwrap();
        assert!(received >= SIGNALS, "{}: {line}", self.what);
        assert_eq!(
            words[2..6],
            ["lost", "0", "disordered", "0"],
            "{}: {line}",
            self.what
        );
        case.add("signals, each received once and in order", received);
        assert!(self.sender.guard().wait().success());
    }
}

/// A program whose threads do nothing but execute sites.
struct Workers {
    subject: Subject,
    hits: u64,
    times_asked: u64,
}

impl Workers {
    /// How many handlers have run, and the most that can have run; the latter is asked for
    /// afterwards, so it is never too low.
    fn hits(&mut self) -> (u64, u64) {
        if !self.subject.file.to_string_lossy().contains("threads_spin") {
            return self.hits_of_ocaml();
        }
        self.hits += self.subject.run();
        let rounds = self.subject.rounds();
        self.times_asked += 1;
        // A round executes four sites, and the last one may not be over; the thread that answers
        // executes the four sites, too, each time it is asked.
        let most = rounds.iter().map(|rounds| 4 * (rounds + 1)).sum::<u64>();
        (self.hits, most + 4 * self.times_asked)
    }

    fn hits_of_ocaml(&mut self) -> (u64, u64) {
        self.subject.talker.send("report");
        let (mut hits, mut most) = (0, 0);
        loop {
            let line = self.subject.talker.line().expect("the program still runs");
            if line == "report end" {
                return (hits, most);
            }
            for word in line.split_ascii_whitespace() {
                match word.split_once('=') {
                    // One handler runs in every iteration, another in every second iteration.
                    Some(("iterations", count)) => most += 2 * count.parse::<u64>().unwrap(),
                    Some((_, count)) => hits += count.parse::<u64>().unwrap(),
                    None => {}
                }
            }
        }
    }

    /// Asserts that its threads run handlers.
    fn assert_hit(&mut self) {
        let then = self.hits().0;
        // More handlers than the thread that answers can have run itself.
        eventually("a handler runs", || {
            let by_answers = 4 * self.times_asked;
            (self.hits().0 > then + by_answers).then_some(())
        });
    }

    /// Asserts that its threads run no handlers, and still run.
    fn assert_not_hit(&mut self) {
        // Handlers that had started may still end and be counted: wait until every thread has done
        // another round.
        self.wait_for_progress();
        let (then, _) = self.hits();
        self.wait_for_progress();
        assert_eq!(self.hits().0, then, "{}", self.subject.file.display());
    }

    fn wait_for_progress(&mut self) {
        if self.subject.file.to_string_lossy().contains("threads_spin") {
            return self.subject.wait_for_round();
        }
        let (_, then) = self.hits();
        eventually("its threads run on", || {
            (self.hits().1 > then + 100).then_some(())
        });
    }
}

fn switch_in_storm(case: &mut Case, file: &Path, cycles: usize) {
    let (mut storm, subject) = Storm::start(file, "8");
    let mut workers = Workers {
        subject,
        hits: 0,
        times_asked: 0,
    };
    for cycle in 0..cycles {
        let what = format!("cycle {cycle}");
        for action in [Action::Enable, Action::Disable] {
            let report = workers.subject.switch(action, &what);
            assert_eq!(report.changed.len(), 2, "{what}");
            if cycle % 10 == 0 {
                workers.subject.assert_all(state_after(action), &what);
            }
            match action {
                Action::Enable if cycle % CYCLES_PER_CHECK == 0 => workers.assert_hit(),
                Action::Disable if cycle % CYCLES_PER_CHECK == 0 => workers.assert_not_hit(),
                _ => {}
            }
        }
        case.count("cycles of attach, enable, attach, disable");
    }
    let (hits, most) = workers.hits();
    assert!(
        hits > 0 && hits <= most,
        "{}: {hits} of {most}",
        file.display()
    );
    case.add("handlers run", hits);
    storm.end(case);
    workers.subject.assert_released();
    workers.subject.end();
}

// promise: Stopping and resuming: Every thread is stopped and runs on afterwards, under a storm of
//    signals (1,000 cycles, 8 busy threads)
// promise: Signals: Each signal is delivered once and in order, while updates stop all threads
//    (1,000 cycles, at least 10,000 queued signals to each of 4 targets)
#[test]
fn thousand_updates_under_a_signal_storm_lose_nothing() {
    let mut case = Case::begin("switched under a storm of signals", 20);
    let mut files: Vec<PathBuf> = fixture_forms("threads_spin").into();
    files.extend(program_forms("threads"));
    let each = CYCLES.div_ceil(files.len());
    let mut rounds = 0;
    while case.has_another_round(rounds, 1) {
        for file in &files {
            switch_in_storm(&mut case, file, each);
        }
        rounds += 1;
    }
}
