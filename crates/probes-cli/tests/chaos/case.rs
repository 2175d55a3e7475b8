//! A case of the suite: its share of the time, its deadline, and what it counts.

use std::collections::BTreeMap;
use std::process::abort;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crate::SUITE;

/// How long a case may count nothing, beyond its share. Far longer than it does on a busy machine:
/// only a hang should reach it.
const DEADLINE: Duration = Duration::from_secs(600);

/// A running case. When dropped, it prints what it counted.
pub(crate) struct Case {
    name: &'static str,
    started: Instant,
    share: Duration,
    counts: BTreeMap<String, u64>,
    random: u64,
    /// Tells the watchdog that the case goes on.
    progress: Sender<()>,
    _alone: MutexGuard<'static, ()>,
}

impl Case {
    /// Waits until no other case runs, then begins this one. `percent` is the share of this case in
    /// the seconds that the environment variable of the suite (`CHAOS_SECONDS`) says; without it,
    /// each case runs its least number of rounds.
    pub(crate) fn begin(name: &'static str, percent: u32) -> Case {
        static ALONE: Mutex<()> = Mutex::new(());
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let seconds =
            std::env::var(format!("{}_SECONDS", SUITE.to_uppercase())).unwrap_or_default();
        let seconds: u64 = match seconds.as_str() {
            "" => 0,
            number => number.parse().expect("a number of seconds"),
        };
        let share = Duration::from_secs(seconds) * percent / 100;
        let (progress, counted) = channel();
        thread::spawn(move || {
            let wait = || counted.recv_timeout(share + DEADLINE);
            let mut last = wait();
            while last == Ok(()) {
                last = wait();
            }
            if last == Err(RecvTimeoutError::Timeout) {
                eprintln!("{SUITE}: {name}: has hung");
                abort();
            }
        });
        Case {
            name,
            started: Instant::now(),
            share,
            counts: BTreeMap::new(),
            random: seed(name),
            progress,
            _alone: alone,
        }
    }

    /// Whether another round is due after `done` of them.
    pub(crate) fn has_another_round(&self, done: usize, least: usize) -> bool {
        done < least || self.has_time()
    }

    /// Whether any of its share of the time is left.
    pub(crate) fn has_time(&self) -> bool {
        self.started.elapsed() < self.share
    }

    /// Whether it has any time beyond its minimum number of rounds.
    pub(crate) fn is_long(&self) -> bool {
        !self.share.is_zero()
    }

    /// A number of repetitions: `all`, or a tenth of it if the case has no time beyond its
    /// least number of rounds.
    pub(crate) fn part_of(&self, all: usize) -> usize {
        if self.is_long() { all } else { all / 10 }
    }

    /// Counts one.
    pub(crate) fn count(&mut self, what: impl Into<String>) {
        self.add(what, 1);
    }

    /// Adds a number.
    pub(crate) fn add(&mut self, what: impl Into<String>, many: u64) {
        *self.counts.entry(what.into()).or_default() += many;
        // The watchdog waits for this as long as the case exists.
        let _ = self.progress.send(());
    }

    /// How many were counted.
    pub(crate) fn counted(&self, what: &str) -> u64 {
        self.counts.get(what).copied().unwrap_or(0)
    }

    /// The next pseudo-random number below `limit`, of a sequence that is the same in every run,
    /// and another one in each case: xorshift64, of Marsaglia's "Xorshift RNGs".
    pub(crate) fn random(&mut self, limit: u64) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random % limit
    }
}

/// Another number for each name, and not 0: FNV-1a.
fn seed(name: &str) -> u64 {
    let hash = name.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    hash.max(1)
}

impl Drop for Case {
    fn drop(&mut self) {
        println!("{SUITE}: {}, {:.1?}:", self.name, self.started.elapsed());
        for (what, count) in &self.counts {
            println!("{SUITE}: {count:8} {what}");
        }
    }
}
