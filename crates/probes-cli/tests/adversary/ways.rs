//! What is done to a program: its probes are switched, it is observed, both in random order,
//! observers are killed, and it is started by the tool.

use std::io::Read;
use std::os::unix::process::ExitStatusExt;
use std::process::Stdio;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use test_support::{Guard, Scratch, eventually};

use crate::case::Case;
use crate::program::{Program, Running};
use crate::shown;
use crate::support::{command, run_command};

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

/// The commands that observe or read; `killed …` is the command that follows, or `count`, killed at a random moment. PAIR
/// are two probes of the program, ALL are all of them, FILE is a file for the tool. Those that take long are not beside
/// each other.
const OBSERVATIONS: [&str; 37] = [
    "count -for 20ms",
    "latency -for 20ms -pair PAIR",
    "watch -json -limit 300 -for 200ms -regexp .",
    "killed latency -fn caml_*,Stdlib.*",
    "profile -for 30ms",
    "hist -for 20ms -of 7",
    "count -for 20ms -by stack",
    "killed",
    "watch -json -limit 100 -for 50ms -fn caml_a*",
    "stack",
    "count -for 20ms -fn *",
    "record -quiet -for 20ms -fn caml_a* -results -o FILE.fxt",
    "latency -for 20ms -pair PAIR -over 0 -stack",
    "gc -for 20ms",
    "info -sites",
    "watch -json -limit 100 -for 50ms -regexp . -sample 1/7",
    "hist -for 20ms -of 7 -by tid",
    "latency -for 20ms -self -fn caml_*,Stdlib.*",
    "profile -for 30ms -live",
    "killed hist -fn caml_a*,caml_g* -of arg0",
    "count -for 20ms -where tid>0",
    "observe -clean",
    "watch -json -limit 300 -for 50ms -fn Stdlib.L* -results",
    "count -for 20ms -follow",
    "latency -for 20ms -pair PAIR -key tid",
    "hist -for 20ms -fn caml_a*,caml_g* -of arg0",
    "profile -for 30ms -off-cpu",
    "watch -json -limit 100 -for 50ms -regexp . -stack",
    "count -for 20ms -by tid,probe",
    "latency -for 20ms -fn caml_*,Stdlib.* -pair PAIR",
    "record -quiet -for 20ms -pair PAIR -off-cpu -o FILE.perfetto-trace",
    "count -for 20ms -gc minor,slice",
    "list -functions caml_a*",
    "killed -fn *",
    "latency -for 20ms -follow -pair PAIR",
    "watch -json -limit 300 -for 50ms -regexp . -follow",
    "count -for 20ms -fn caml_a* -by caller",
];

/// The commands by which a program is started; with `killed`, the tool is killed in the end.
pub(crate) const LAUNCHES: [&str; 15] = [
    "trace -count",
    "trace -latency PAIR",
    "profile",
    "trace -count -fn *",
    "trace -wait -enable-all",
    "record -pair PAIR -off-cpu -o FILE.perfetto-trace",
    "trace -watch ALL",
    "trace -hist ALL -of 7",
    "trace -follow -wait -enable-all",
    "gc",
    "trace -latency PAIR -over 0",
    "record -fn caml_a* -o FILE.json",
    "trace -count killed",
    "trace -watch -fn caml_a* -results",
    "profile -off-cpu -live",
];

/// Those of the commands that can be used on the program: a fixture has no functions of OCaml's runtime.
fn usable(commands: &'static [&'static str], program: &Program) -> Vec<&'static str> {
    let of_runtime = [" caml_", " Stdlib", "gc"];
    let is_usable =
        |words: &&&str| program.has_runtime || !of_runtime.iter().any(|word| words.contains(word));
    commands.iter().filter(is_usable).copied().collect()
}

/// The commands in their order from a random place on. The short run of a case uses a part of them, so each
/// case uses another part.
fn from_random_place(case: &mut Case, mut commands: Vec<&'static str>) -> Vec<&'static str> {
    let place = case.random(commands.len() as u64);
    commands.rotate_left(place as usize);
    commands
}

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
    let (each, launches) = if case.is_long() {
        (100, LAUNCHES.len())
    } else {
        (10, 4)
    };
    if way == Way::Launched {
        let commands = from_random_place(case, usable(&LAUNCHES, program));
        for words in commands.into_iter().take(launches) {
            launched(case, program, form, words);
        }
        return;
    }
    let mut running = program.start(form);
    running.speak();
    let observations = from_random_place(case, usable(&OBSERVATIONS, program));
    // In this order even in a storm, so that what the program has enabled itself is not disabled.
    let mut switches = SWITCHES.into_iter().cycle();
    for step in 0..each {
        let words = match way {
            Way::Switched => SWITCHES[step % SWITCHES.len()],
            Way::Observed => observations[step % observations.len()],
            _ if case.random(2) == 0 => switches.next().unwrap(),
            _ => observations[case.random(observations.len() as u64) as usize],
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
    let words_of_line = filled_in(&line, running.program, &running.scratch);
    // On a busy machine, a thread may get no processor before the deadline.
    let ran = eventually("all threads can be stopped", || {
        let ran = run_command(&mut command(&words_of_line));
        (!is_busy(ran.code, &ran.stderr)).then_some(ran)
    });
    let is_refused = running.program.may_refuse && ran.code == Some(1);
    if is_refused {
        let start = if line.contains(" -json ") {
            "{\"type\":\"error\","
        } else {
            "ocaml-probes: "
        };
        // Notes may come before, and the hint after it.
        let mut said = ran.stderr.lines().rev();
        let last = said.find(|it| !it.starts_with("hint: "));
        assert!(
            last.is_some_and(|it| it.starts_with(start)),
            "{line}: {ran:?}"
        );
        return case.count(format!("{words}: refused"));
    }
    assert_eq!(ran.code, Some(0), "{line}: {ran:?}");
    let shows_numbers = running.program.has_runtime && !words.contains("-fn");
    if words.starts_with("watch") && shows_numbers {
        case.add(
            "hits whose values are right",
            shown::check(&ran.stdout, &line),
        );
    }
    case.count(words);
}

/// The words, with what they leave open.
fn filled_in(words: &str, program: &Program, scratch: &Scratch) -> Vec<String> {
    let probes = program.probes();
    let pair = format!("{},{}", probes.last().unwrap(), probes[0]);
    let file = scratch.file("recorded").display().to_string();
    let fill = |word: &str| {
        let word = word.replace("FILE", &file).replace("PAIR", &pair);
        word.replace("ALL", &probes.join(","))
    };
    words.split(' ').map(fill).collect()
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

/// How long a program that the tool has started runs.
const LAUNCHED: Duration = Duration::from_millis(150);

/// Runs the program under a command that starts it, and observes it or switches its probes from its first instruction on.
pub(crate) fn launched(case: &mut Case, program: &Program, form: usize, launch: &str) {
    let scratch = Scratch::new();
    let words = launch.strip_suffix(" killed").unwrap_or(launch);
    let mut tool = command(filled_in(words, program, &scratch));
    tool.args(["-quiet", "-prog"]).arg(program.form(form));
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
    case.add(format!("rounds under {launch}"), rounds);
}
