//! Our stop against that of the prototype which our algorithm comes from: `bench_final`, a C program
//! of a few hundred lines that stops every thread of a process with the same proofs, writes one
//! byte, and lets go. Both work on the same process, in turns, so that both meet the same noise.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use probes_lib::{Action, Actions, Options, Selector, Target};

use crate::document::{Table, ms};
use crate::failure::{Failure, Result};
use crate::prepare::{self, Program};
use crate::spin::{Spin, Threads};
use crate::stats::Samples;

/// How often each has its turn.
const TURNS: usize = 5;

/// Updates in a turn, half of which enable, half of which disable; and the pause between two, which
/// is the prototype's.
const UPDATES: usize = 50;
const PAUSE: Duration = Duration::from_millis(3);

/// How long stopping may take, as with the prototype: on a busy machine, it may take long for 256
/// threads to get a processor each, which they need to stop.
const DEADLINE: Duration = Duration::from_secs(5);

/// The probe that is switched, which has one site.
const PROBE: &str = "probe_0";

/// We may take this much longer.
const GOAL: f64 = 1.25;

/// What is compared: the threads, and what they do.
const TARGETS: [(Threads, &str); 6] = [
    (idle(1), "idle"),
    (busy(1), "busy"),
    (idle(16), "idle"),
    (busy(16), "busy"),
    (idle(256), "idle"),
    (busy(256), "busy"),
];

const fn idle(waiting: u64) -> Threads {
    Threads {
        spinning: 0,
        waiting,
    }
}

const fn busy(spinning: u64) -> Threads {
    Threads {
        spinning,
        waiting: 0,
    }
}

/// How long each stood in one turn, in ns.
struct Turn {
    median: u64,
    largest: u64,
}

/// Builds the prototype in `folder`, if it is there, and compares.
pub(crate) fn table(programs: &[Program], folder: &Path) -> Result<String> {
    let source = folder.join("bench_final.c");
    if !source.exists() {
        return Ok("Not compared: the prototypes are not here.\n".to_owned());
    }
    let prototype = build(&source)?;
    // In this one, each probe has one site.
    let program = prepare::with_sites(programs, 10)?;
    let mut table = Table::new(&[
        "threads",
        "the prototype",
        "ours",
        "ratio",
        "smallest, largest ratio",
        "goal",
        "reached",
    ]);
    for (threads, what) in TARGETS {
        let count = threads.count();
        eprintln!("bench: {count} {what} threads: against the prototype");
        let turns = take_turns(program, threads, &prototype)?;
        let text = |of: fn(&(Turn, Turn)) -> &Turn| {
            let medians: Samples = turns.iter().map(|turn| of(turn).median).collect();
            let largest: Samples = turns.iter().map(|turn| of(turn).largest).collect();
            format!("{} / {}", ms(medians.median()), ms(largest.median()))
        };
        let mut ratios: Vec<f64> = turns
            .iter()
            .map(|(theirs, ours)| ours.median as f64 / theirs.median as f64)
            .collect();
        ratios.sort_unstable_by(f64::total_cmp);
        let ratio = ratios[TURNS / 2];
        table.row([
            format!("{count} {what}"),
            text(|turn| &turn.0),
            text(|turn| &turn.1),
            format!("{ratio:.2}"),
            format!("{:.2}, {:.2}", ratios[0], ratios[TURNS - 1]),
            format!("{GOAL}"),
            if ratio <= GOAL { "yes" } else { "no" }.to_owned(),
        ]);
    }
    Ok(table.finish())
}

fn build(source: &Path) -> Result<PathBuf> {
    let built = prepare::own_folder()?.join("bench_final");
    let flags = "-O2 -w -pthread -include stddef.h -o";
    let mut gcc = Command::new("gcc");
    prepare::run(gcc.args(flags.split(' ')).arg(&built).arg(source))?;
    Ok(built)
}

/// The prototype and we, one after the other.
fn take_turns(program: &Program, threads: Threads, prototype: &Path) -> Result<Vec<(Turn, Turn)>> {
    let spin = Spin::start_with(&program.path, threads)?;
    let target = Target::open(spin.pid())?;
    let object = target.objects().swap_remove(0);
    let probe = object.table().probe(PROBE);
    let site = probe.and_then(|probe| probe.sites().next());
    let site = site.ok_or_else(|| Failure::new("the target has no such probe"))?;
    // The nop comes before the byte that is written.
    let opcode = object.load_bias().live(site.address()).0 + 1;
    let mut turns = Vec::new();
    for _ in 0..TURNS {
        let theirs = theirs(prototype, spin.pid(), opcode)?;
        turns.push((theirs, ours(&target)?));
    }
    spin.every_thread_goes_on()?;
    Ok(turns)
}

/// From its first `PTRACE_SEIZE` to its last `PTRACE_DETACH`.
fn theirs(prototype: &Path, pid: i32, opcode: u64) -> Result<Turn> {
    let mut command = Command::new(prototype);
    command.args([pid.to_string(), format!("{opcode:x}"), UPDATES.to_string()]);
    command.args(["detach", "fifo"]);
    let output = test_support::output(&mut command);
    let text = String::from_utf8_lossy(&output.stdout);
    parse(&text).ok_or_else(|| {
        let why = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        Failure::new(format!("the prototype failed: {why}"))
    })
}

/// `detach/fifo SEIZE..last release n=50 min 1.0 median 2.0 p99 3.0 max 4.0 us`
fn parse(text: &str) -> Option<Turn> {
    let line = text.lines().find(|line| line.contains("SEIZE.."))?;
    let figure = |name: &str| {
        let mut words = line.split_whitespace().skip_while(|&word| word != name);
        let us: f64 = words.nth(1)?.parse().ok()?;
        Some((us * 1e3) as u64)
    };
    Some(Turn {
        median: figure("median")?,
        largest: figure("max")?,
    })
}

/// By our report, which spans the same: an upper bound of any thread's pause.
fn ours(target: &Target) -> Result<Turn> {
    let options = Options {
        deadline: DEADLINE,
        ..Options::default()
    };
    let mut stopped = Samples::default();
    for update in 0..UPDATES {
        let action = [Action::Enable, Action::Disable][update % 2];
        let actions = Actions::of(action, Selector::name(PROBE));
        stopped.push_time(target.update_with(&actions, options)?.stopped);
        std::thread::sleep(PAUSE);
    }
    Ok(Turn {
        median: stopped.median(),
        largest: stopped.max(),
    })
}

#[cfg(test)]
mod tests {
    use super::parse;

    #[test]
    fn prototype_output_gives_the_whole_stop_time() {
        let text = "\
detach/fifo SEIZE..last release  n=50    min 50.1 median 60.5 p99 99.0 max 101.5 us
detach/fifo first stop..last release  n=50    min 1.0 median 2.0 p99 3.0 max 4.0 us
";
        let turn = parse(text).unwrap();
        assert_eq!((turn.median, turn.largest), (60_500, 101_500));
        assert!(parse("stop err 1 to 0\n").is_none());
    }
}
