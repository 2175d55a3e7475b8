//! [`Workload`]: a program whose threads execute the sites of one kind in a loop, and what each hit costs
//! it.

use std::path::Path;
use std::time::{Duration, Instant};

use test_support::{Talker, eventually};

use crate::failure::{Failure, Result};

/// The duration of a sample.
const SAMPLE: Duration = Duration::from_millis(100);

/// What the threads execute: functions of `kinds.S`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Silent,
    Int,
    String,
    /// Start and stop, alternating.
    Pair,
}

impl Kind {
    /// Returns the index of the first function and the number of functions, each with one site.
    fn functions(self) -> (u64, u64) {
        match self {
            Kind::Silent => (0, 1),
            Kind::Int => (1, 1),
            Kind::String => (2, 1),
            Kind::Pair => (3, 2),
        }
    }

    /// Returns the name of the probe, or of the first probe.
    pub(super) fn probe(self) -> &'static str {
        match self {
            Kind::Silent => "silent",
            Kind::Int => "int",
            Kind::String => "string",
            Kind::Pair => "start",
        }
    }
}

/// A running program, and what its threads execute now.
pub(super) struct Workload {
    talker: Talker,
    kind: Kind,
}

/// What a hit took in one sample.
pub(super) struct Sample {
    /// CPU time, in picoseconds.
    pub(super) cpu_ps: u64,
    /// Elapsed time divided by the hits of all threads, in picoseconds.
    pub(super) wall_ps: u64,
}

impl Workload {
    pub(super) fn start(file: &Path, threads: u64) -> Workload {
        let talker = Talker::start_with(file, [threads.to_string()]);
        let kind = Kind::Silent;
        let mut work = Workload { talker, kind };
        work.run_only(kind);
        work
    }

    pub(super) fn pid(&self) -> i32 {
        self.talker.pid()
    }

    /// Makes its threads execute only this kind.
    pub(super) fn run_only(&mut self, kind: Kind) {
        let (first, count) = kind.functions();
        self.talker.ask(&format!("only {first} {count}"), "only");
        self.kind = kind;
    }

    /// Takes a sample.
    pub(super) fn sample(&mut self) -> Result<Sample> {
        self.sample_while(|_| {
            std::thread::sleep(SAMPLE);
            Ok(())
        })
    }

    /// Takes a sample while `something` runs, which is passed the time at which to return.
    pub(super) fn sample_while(
        &mut self,
        something: impl FnOnce(Instant) -> Result<()>,
    ) -> Result<Sample> {
        let (begun, before) = (Instant::now(), self.totals()?);
        something(begun + SAMPLE)?;
        // If gdb handles the hits, one hit may take longer than `SAMPLE`.
        let after = eventually("the target makes progress", || match self.totals() {
            Ok(after) => (after.0 > before.0).then_some(Ok(after)),
            Err(failure) => Some(Err(failure)),
        })?;
        let wall = begun.elapsed();
        let hits = (after.0 - before.0) * self.kind.functions().1;
        Ok(Sample {
            cpu_ps: (after.1 - before.1) * 1000 / hits,
            wall_ps: wall.as_nanos() as u64 * 1000 / hits,
        })
    }

    /// Returns the rounds and the CPU time in ns of all threads so far.
    fn totals(&mut self) -> Result<(u64, u64)> {
        let line = self.talker.ask("work", "work");
        let mut numbers = line.split_ascii_whitespace().skip(1).map(str::parse);
        match (numbers.next(), numbers.next()) {
            (Some(Ok(rounds)), Some(Ok(nanoseconds))) => Ok((rounds, nanoseconds)),
            _ => Err(Failure::new(format!("the target answers {line:?}"))),
        }
    }

    /// Returns whether the kernel traces a probe for some tool: its SystemTap counter is not 0.
    pub(super) fn is_traced(&mut self, kind: Kind) -> bool {
        let line = self.talker.ask("counters", "sem");
        let start = format!("{}:stap=", kind.probe());
        let mut counters = line.split_ascii_whitespace();
        counters.any(|word| {
            let value = word.strip_prefix(&start);
            value.is_some_and(|value| !value.starts_with("0,"))
        })
    }
}
