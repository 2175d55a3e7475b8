//! What is done to a program: its probes are switched, it is observed, both in random order,
//! observers are killed, and it is started by the tool.

use std::io::Read;
use std::os::unix::process::ExitStatusExt;
use std::process::Stdio;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use test_support::{Guard, eventually};

use crate::case::Case;
use crate::program::{Program, Running};
use crate::shown;
use crate::support::{command, run};

/// What is done to a program in one run of it; `Storm` mixes switching and observing at random.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Switched,
    Observed,
    Storm,
    Launched,
}

const WAYS: [Way; 4] = [Way::Switched, Way::Observed, Way::Storm, Way::Launched];

/// The commands that update probes; one is run at a time.
const SWITCHES: [&str; 5] = [
    "attach -enable-all",
    "attach -disable-all",
    "attach -live -enable-all",
    "attach -live -disable-all",
    "attach -enable-all -for 10ms",
];

/// The commands that observe; `killed …` is the command that follows, or `count`, killed at a random moment.
const OBSERVATIONS: [&str; 12] = [
    "count -for 20ms",
    "count -for 20ms -fn *",
    "latency -for 20ms",
    "latency -for 20ms -fn caml_*,Stdlib.*",
    "hist -for 20ms -of 7",
    "hist -for 20ms -fn caml_a*,caml_g* -of arg0",
    "watch -json -limit 300 -for 200ms -regexp .",
    "killed",
    "killed -fn *",
    "killed latency -fn caml_*,Stdlib.*",
    "killed hist -fn caml_a*,caml_g* -of arg0",
    "observe -clean",
];

/// The flags of `trace` by which a program is started; with `killed`, the tool is killed in the end.
pub(crate) const LAUNCHES: [&str; 7] = [
    "-count",
    "-count -fn *",
    "-latency",
    "-watch",
    "-wait -enable-all",
    "-follow",
    "-count killed",
];

/// Runs a program in every way: in the long run of the suite in both forms (PIE and non-PIE), in
/// the short run each way in one of them.
pub(crate) fn every_way(name: &'static str, program: &Program) {
    let mut case = Case::begin(name, 100);
    assert!(alone(program, &mut case) > 0);
    let mut rounds = 0;
    while case.has_another_round(rounds, 1) {
        for (index, way) in WAYS.into_iter().enumerate() {
            for form in 0..2 {
                if case.is_long() || form == (index + name.len()) % 2 {
                    treat(&mut case, program, form, way);
                }
            }
        }
        rounds += 1;
    }
}

/// Runs both forms without the tool and without input; returns how many rounds they did.
fn alone(program: &Program, case: &mut Case) -> u64 {
    let rounds = (0..2).map(|form| program.start(form).end("alone"));
    let rounds = rounds.sum();
    case.add("rounds alone", rounds);
    rounds
}

fn treat(case: &mut Case, program: &Program, form: usize, way: Way) {
    if way == Way::Launched {
        for launch in LAUNCHES {
            launched(case, program, form, launch);
        }
        return;
    }
    let mut running = program.start(form);
    let each = if case.is_long() { 100 } else { 10 };
    // In this order even in a storm, so that what the program has enabled itself is not disabled.
    let mut switches = SWITCHES.into_iter().cycle();
    for step in 0..each {
        let words = match way {
            Way::Switched => SWITCHES[step % SWITCHES.len()],
            Way::Observed => OBSERVATIONS[step % OBSERVATIONS.len()],
            _ if case.random(2) == 0 => switches.next().unwrap(),
            _ => OBSERVATIONS[case.random(OBSERVATIONS.len() as u64) as usize],
        };
        act(case, &running, words);
        running.speak();
    }
    act(case, &running, "observe -clean");
    running.assert_unobserved();
    let rounds = running.end(&format!("{way:?}"));
    case.add(format!("rounds, {way:?}"), rounds);
}

/// Runs the tool on a process, to its end or until it is killed.
fn act(case: &mut Case, running: &Running, words: &str) {
    if let Some(flags) = words.strip_prefix("killed") {
        return kill_observer(case, running, flags);
    }
    let mut line = format!("{words} -pid {}", running.pid);
    if words.starts_with("attach") && running.program.loads_objects {
        line = line.replace(" -live", "").replace(" -for 10ms", "") + " -force";
    }
    if words.starts_with("latency") {
        let probes = running.program.probes();
        line += &format!(" -pair {},{}", probes.last().unwrap(), probes[0]);
    }
    // On a busy machine, a thread may get no processor before the deadline.
    let ran = eventually("all threads can be stopped", || {
        let ran = run(&line);
        (!is_busy(ran.code, &ran.stderr)).then_some(ran)
    });
    let is_refused = running.program.may_refuse && ran.code == Some(1);
    if is_refused {
        let start = if line.contains(" -json ") {
            "{\"type\":\"error\","
        } else {
            "ocaml-probes: "
        };
        assert!(ran.stderr.starts_with(start), "{line}: {ran:?}");
        return case.count(format!("{words}: refused"));
    }
    assert_eq!(ran.code, Some(0), "{line}: {ran:?}");
    if words.starts_with("watch") {
        case.add(
            "hits whose values are right",
            shown::check(&ran.stdout, &line),
        );
    }
    case.count(words);
}

/// Whether the tool has given up, changed nothing, and says that trying again may help.
fn is_busy(code: Option<i32>, stderr: &str) -> bool {
    let effects = ["nothing was changed", "which does no harm"];
    let mut ends = effects.iter().map(|it| format!("{it}\nhint: try again"));
    code == Some(1) && ends.any(|end| stderr.contains(&end))
}

/// Kills an observer at any moment of its start, its work or its end.
fn kill_observer(case: &mut Case, running: &Running, flags: &str) {
    let named = ["latency", "hist"].into_iter().find_map(|name| {
        let flags = flags.strip_prefix(' ')?.strip_prefix(name)?;
        Some((name, flags))
    });
    let (name, flags) = named.unwrap_or(("count", flags));
    let line = format!("{name} -quiet -for 30ms -pid {}{flags}", running.pid);
    let mut tool = command(line.split(' '));
    tool.stdin(Stdio::null()).stdout(Stdio::null());
    let mut tool = Guard::spawn(tool.stderr(Stdio::piped()));
    // Functions take longer to plan.
    let longest = if flags.is_empty() { 100_000 } else { 2_000_000 };
    std::thread::sleep(Duration::from_micros(case.random(longest)));
    // It may have exited.
    let _ = tool.child().kill();
    let status = tool.wait();
    let is_killed = status.signal() == Some(Signal::SIGKILL as i32);
    let is_refused = running.program.may_refuse && status.code() == Some(1);
    let mut stderr = String::new();
    let errors = tool.child().stderr.as_mut().unwrap();
    errors.read_to_string(&mut stderr).unwrap();
    assert!(
        is_killed || is_refused || status.success() || is_busy(status.code(), &stderr),
        "{line}: {status}: {stderr}"
    );
    case.add("observers killed", u64::from(is_killed));
}

/// How long a program that `trace` has started runs.
const LAUNCHED: Duration = Duration::from_millis(150);

/// Runs the program under `trace`, which observes it or switches its probes from its first instruction on.
pub(crate) fn launched(case: &mut Case, program: &Program, form: usize, launch: &str) {
    let probes = program.probes();
    let mut tool = command(["trace", "-quiet"]);
    let words = launch.strip_suffix(" killed").unwrap_or(launch);
    for word in words.split(' ') {
        tool.arg(word);
        match word {
            "-latency" => tool.arg(format!("{},{}", probes.last().unwrap(), probes[0])),
            "-watch" => tool.arg(probes.join(",")),
            "-follow" => tool.args(["-wait", "-enable-all"]),
            _ => &mut tool,
        };
    }
    tool.arg("-prog").arg(program.form(form));
    tool.arg("--").args(&program.args);
    let mut running = program.spawn(&mut tool);
    let started = Instant::now();
    while started.elapsed() < LAUNCHED {
        running.speak();
        std::thread::sleep(Duration::from_millis(10));
    }
    let rounds = if launch == words {
        running.end(launch)
    } else {
        running.talker.guard().child().kill().unwrap();
        running.talker.guard().wait();
        running.verdict(launch)
    };
    case.add(format!("rounds under trace {launch}"), rounds);
}
