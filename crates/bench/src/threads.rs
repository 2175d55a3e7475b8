//! How long a program of many threads stands still, stopped and with `-live`.

use std::time::Instant;

use probes_lib::{Action, Options, Target};

use crate::document::{Table, median_p99};
use crate::failure::Result;
use crate::prepare::{self, Program};
use crate::spin::{Spin, Threads};
use crate::stats::Samples;
use crate::stillness::{Switch, switch};

const SITES: [u64; 3] = [10, 1_000, 10_000];

/// What the threads do.
const CROWDS: [(Threads, &str); 5] = [
    (Threads::ONE, ""),
    (waiting(16), "1 busy, 15 wait"),
    (busy(16), "16 busy"),
    (waiting(256), "1 busy, 255 wait"),
    (busy(256), "256 busy"),
];

/// All but one, which tells how long it stood still.
const fn waiting(count: u64) -> Threads {
    Threads {
        spinning: 1,
        waiting: count - 1,
    }
}

const fn busy(count: u64) -> Threads {
    Threads {
        spinning: count,
        waiting: 0,
    }
}

/// The gaps of one program, in ns.
#[derive(Default)]
struct Gaps {
    quiet: Samples,
    enable: Switch,
    disable: Switch,
    live: Samples,
}

pub(crate) fn table(programs: &[Program], rounds: usize) -> Result<String> {
    let mut table = Table::new(&[
        "threads",
        "sites",
        "nobody attaches",
        "enable",
        "disable",
        "enable, as reported",
        "enable `-live`",
    ]);
    for (threads, what) in CROWDS {
        for sites in SITES {
            let program = prepare::with_sites(programs, sites)?;
            let gaps = of(program, threads, rounds)?;
            let what = if what.is_empty() {
                String::new()
            } else {
                format!(": {what}")
            };
            table.row([
                format!("{}{what}", threads.count()),
                sites.to_string(),
                median_p99(&gaps.quiet),
                median_p99(&gaps.enable.gap),
                median_p99(&gaps.disable.gap),
                median_p99(&gaps.enable.reported),
                median_p99(&gaps.live),
            ]);
        }
    }
    Ok(table.finish())
}

fn of(program: &Program, threads: Threads, rounds: usize) -> Result<Gaps> {
    let count = threads.count();
    eprintln!("bench: {} with {count} threads", program.name);
    let mut gaps = Gaps::default();
    let mut spin = Spin::start_with(&program.path, threads)?;
    let target = Target::open(spin.pid())?;
    let change =
        |spin: &mut Spin, action, options| switch(spin, &target, action, program.sites, options);
    let live = Options {
        live: true,
        ..Options::default()
    };
    for _ in 0..rounds {
        let begun = Instant::now();
        let enabled = change(&mut spin, Action::Enable, Options::default())?;
        let round = begun.elapsed();
        gaps.enable.take(enabled);
        let disabled = change(&mut spin, Action::Disable, Options::default())?;
        gaps.disable.take(disabled);
        let (_, gap) = change(&mut spin, Action::Enable, live)?;
        gaps.live.push_time(gap);
        change(&mut spin, Action::Disable, live)?;
        let ((), gap) = spin.watch(|| {
            std::thread::sleep(round);
            Ok(())
        })?;
        gaps.quiet.push_time(gap);
    }
    spin.every_thread_goes_on()?;
    Ok(gaps)
}
