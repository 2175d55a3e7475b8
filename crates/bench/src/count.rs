//! What a hit costs that is counted inside the process, beside one that bpftrace counts in the kernel,
//! and how long the process stands still for it.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use probes_lib::{Action, Actions, Observation, Options, Selector, Target};
use test_support::{Guard, Talker, eventually};

use crate::document::{Table, ms};
use crate::failure::{Failure, Result};
use crate::prepare::{self, Program};
use crate::stats::Samples;

/// Below the built `test-programs`: its threads execute its four sites over and over.
pub(crate) const FILE: &str = "fixtures/threads_spin.pie";
const SITES: f64 = 4.0;

const THREADS: [u64; 2] = [1, 4];

/// How long hits are counted for one sample.
const SAMPLE: Duration = Duration::from_millis(200);

/// Rounds of bpftrace, which takes seconds to begin.
const FEW: usize = 3;

/// The target at work.
struct Spinning {
    talker: Talker,
    threads: u64,
}

impl Spinning {
    fn start(file: &Path, threads: u64) -> Spinning {
        Spinning {
            talker: Talker::start_with(file, [threads.to_string()]),
            threads,
        }
    }

    fn rounds(&mut self) -> u64 {
        let line = self.talker.ask("report", "report");
        let words = line.split_ascii_whitespace().skip(1);
        words.filter_map(|word| word.parse::<u64>().ok()).sum()
    }

    /// How long a thread takes for a site, in picoseconds.
    fn sample(&mut self) -> u64 {
        let (before, begun) = (self.rounds(), Instant::now());
        std::thread::sleep(SAMPLE);
        let (after, took) = (self.rounds(), begun.elapsed());
        let hits = (after - before) as f64 * SITES / self.threads as f64;
        (took.as_secs_f64() * 1e12 / hits) as u64
    }
}

pub(crate) fn table(targets: &Path, rounds: usize) -> Result<String> {
    let file = targets.join(FILE);
    let mut table = Table::new(&[
        "threads",
        "probes",
        "a site",
        "counted",
        "counting adds",
        "bpftrace adds",
    ]);
    for threads in THREADS {
        for action in [Action::Disable, Action::Enable] {
            eprintln!("bench: counting the hits of {threads} threads");
            let mut spinning = Spinning::start(&file, threads);
            let failed = || Failure::of("cannot count");
            let target = Target::open(spinning.talker.pid()).map_err(failed())?;
            let actions = Actions::of(action, Selector::All);
            let on = match action {
                Action::Enable => {
                    target.update(&actions).map_err(failed())?;
                    "on"
                }
                Action::Disable => "off",
            };
            let (mut bare, mut counted) = <(Samples, Samples)>::default();
            for _ in 0..rounds {
                bare.push(spinning.sample());
                let observer =
                    target.observe(&Observation::new().count(Selector::All), Options::default());
                let observer = observer.map_err(failed())?;
                counted.push(spinning.sample());
                observer.remove().map_err(failed())?;
            }
            let adds = |samples: &Samples| samples.median() as f64 - bare.median() as f64;
            let kernel = by_bpftrace(&mut spinning, &file)?;
            table.row([
                threads.to_string(),
                on.to_owned(),
                ns(bare.median() as f64),
                ns(counted.median() as f64),
                ns(adds(&counted)),
                kernel.map_or("–".to_owned(), |kernel| {
                    let ratio = adds(&kernel) / adds(&counted);
                    format!("{}, {ratio:.0} times", ns(adds(&kernel)))
                }),
            ]);
        }
    }
    Ok(table.finish())
}

fn ns(picoseconds: f64) -> String {
    format!("{:.1} ns", picoseconds / 1e3)
}

/// The same while bpftrace counts the same sites; `None` where it cannot.
fn by_bpftrace(spinning: &mut Spinning, file: &Path) -> Result<Option<Samples>> {
    let program = format!("usdt:{}:* {{ @ = count(); }}", file.display());
    let mut command = Command::new("bpftrace");
    command.args(["-p", &spinning.talker.pid().to_string(), "-e", &program]);
    command.stdout(Stdio::piped()).stderr(Stdio::null());
    let Ok(child) = command.spawn() else {
        return Ok(None);
    };
    let mut tool = Guard::from(child);
    let Some(output) = tool.child().stdout.take() else {
        return Ok(None);
    };
    let mut lines = BufReader::new(output).lines().map_while(|line| line.ok());
    if !lines.any(|line| line.starts_with("Attaching")) {
        return Ok(None);
    }
    // It says so before it has.
    let slow = 50 * spinning.sample();
    eventually("bpftrace counts", || {
        (spinning.sample() > slow).then_some(())
    });
    let samples = (0..FEW).map(|_| spinning.sample()).collect();
    let told = kill(Pid::from_raw(tool.pid()), Signal::SIGINT);
    told.map_err(Failure::of("cannot end bpftrace"))?;
    tool.wait();
    Ok(Some(samples))
}

/// How long a program with many sites stands still to be observed, and no more.
pub(crate) fn stops(programs: &[Program], rounds: usize) -> Result<String> {
    let mut table = Table::new(&[
        "sites",
        "observed, median",
        "largest",
        "put back, median",
        "largest",
    ]);
    for sites in [10, 1_000, 10_000] {
        let program = prepare::with_sites(programs, sites)?;
        let talker = Talker::start(&program.path);
        let failed = || Failure::of("cannot count");
        let target = Target::open(talker.pid()).map_err(failed())?;
        let (mut began, mut ended) = <(Samples, Samples)>::default();
        for _ in 0..rounds {
            let observer =
                target.observe(&Observation::new().count(Selector::All), Options::default());
            let observer = observer.map_err(failed())?;
            began.push_time(observer.stopped());
            let begun = Instant::now();
            observer.remove().map_err(failed())?;
            ended.push_time(begun.elapsed());
        }
        table.row([
            sites.to_string(),
            ms(began.median()),
            ms(began.max()),
            ms(ended.median()),
            ms(ended.max()),
        ]);
    }
    Ok(table.finish())
}
