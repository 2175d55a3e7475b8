//! How long updates stop a program with many threads, and how long `-live` delays its threads.

use std::time::Instant;

use probes_lib::{Action, Options, Target};

use crate::document::{Table, median_p99};
use crate::failure::Result;
use crate::prepare::{self, Program};
use crate::spin::{Spin, Threads};
use crate::stats::Samples;
use crate::stop_time::{MeasuredStops, switch};

const SITES: [u64; 3] = [10, 1_000, 10_000];

/// The threads of the target, and what the table says about them.
const CASES: [(Threads, &str); 5] = [
    (Threads::ONE, ""),
    (waiting(16), "1 busy, 15 wait"),
    (busy(16), "16 busy"),
    (waiting(256), "1 busy, 255 wait"),
    (busy(256), "256 busy"),
];

/// All threads but one wait; the one that spins measures the times of the row.
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

/// The times of one row, in ns: the longest gaps between the clock readings of the spinning
/// threads, and the stop times that updates reported.
#[derive(Default)]
struct Row {
    unattached: Samples,
    enable: MeasuredStops,
    disable: MeasuredStops,
    live: Samples,
}

pub(crate) fn table(programs: &[Program], rounds: usize) -> Result<String> {
    let mut table = Table::new(&[
        "threads",
        "sites",
        "no tool attached",
        "enable",
        "disable",
        "enable, as reported",
        "enable `-live`",
    ]);
    for (threads, what) in CASES {
        for sites in SITES {
            let program = prepare::with_sites(programs, sites)?;
            let row = measure(program, threads, rounds)?;
            let what = if what.is_empty() {
                String::new()
            } else {
                format!(": {what}")
            };
            table.row([
                format!("{}{what}", threads.count()),
                sites.to_string(),
                median_p99(&row.unattached),
                median_p99(&row.enable.gap),
                median_p99(&row.disable.gap),
                median_p99(&row.enable.reported),
                median_p99(&row.live),
            ]);
        }
    }
    Ok(table.finish())
}

fn measure(program: &Program, threads: Threads, rounds: usize) -> Result<Row> {
    let count = threads.count();
    eprintln!("bench: {} with {count} threads", program.name);
    let mut row = Row::default();
    let mut spin = Spin::start_with(&program.path, threads)?;
    let target = Target::open(spin.pid())?;
    let switch =
        |spin: &mut Spin, action, options| switch(spin, &target, action, program.sites, options);
    let live = Options {
        live: true,
        ..Options::default()
    };
    for _ in 0..rounds {
        let begun = Instant::now();
        let enabled = switch(&mut spin, Action::Enable, Options::default())?;
        let round = begun.elapsed();
        row.enable.push_report(enabled);
        let disabled = switch(&mut spin, Action::Disable, Options::default())?;
        row.disable.push_report(disabled);
        let (_, gap) = switch(&mut spin, Action::Enable, live)?;
        row.live.push_time(gap);
        switch(&mut spin, Action::Disable, live)?;
        let ((), gap) = spin.longest_gap_during(|| {
            std::thread::sleep(round);
            Ok(())
        })?;
        row.unattached.push_time(gap);
    }
    spin.wait_for_every_thread()?;
    Ok(row)
}
