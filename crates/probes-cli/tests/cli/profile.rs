//! `profile`: where the time of a process goes.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::process::{Command, Stdio};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use test_support::process::settle;
use test_support::{Scratch, Talker, eventually, fixture, fixture_forms, output, program};

use crate::count_functions::start_observing;
use crate::stacks::{check_collections, check_complete, samples};
use crate::support::{blocks_termination, command, object, run, run_command};

/// Starts the tool with these flags, and waits until it has begun.
pub(crate) fn profiling(flags: &[&str], pid: i32) -> Talker {
    let mut tool = command(["profile", "-pid", &pid.to_string()]);
    let tool = Talker::spawn(tool.args(flags).stderr(Stdio::piped()));
    eventually("it samples", || {
        // Signals that would end it are blocked from when it begins.
        blocks_termination(tool.pid()).then_some(())
    });
    tool
}

/// Interrupts the tool; returns the lines that it prints.
pub(crate) fn lines(mut tool: Talker) -> Vec<String> {
    kill(Pid::from_raw(tool.pid()), Signal::SIGINT).unwrap();
    let lines: Vec<String> = std::iter::from_fn(|| tool.line()).collect();
    assert_eq!(tool.guard().wait().code(), Some(0));
    lines
}

fn profile_of_turns(target: &mut Talker, flags: &[&str], rounds: u32) -> (Vec<String>, [f64; 2]) {
    profile_of_several(target, flags, &[rounds])
}

/// Profiles rounds of turns, one after the other; also returns for how long all of them computed and napped.
fn profile_of_several(
    target: &mut Talker,
    flags: &[&str],
    rounds: &[u32],
) -> (Vec<String>, [f64; 2]) {
    let tool = profiling(flags, target.pid());
    let mut sums = [0.0; 2];
    for rounds in rounds {
        let answer = target.ask(&format!("turns {rounds}"), "turned");
        for (sum, time) in sums.iter_mut().zip(answer.split(' ').skip(1)) {
            *sum += time.parse::<f64>().unwrap() / 1e9;
        }
    }
    (lines(tool), sums)
}

/// Profiles rounds of turns; if that gives few samples, profiles more of them. On a busy machine, stops take long, so
/// samples are taken less often.
fn samples_of_turns(target: &mut Talker, flags: &[&str], rounds: u32) -> (Vec<String>, [f64; 2]) {
    const ENOUGH: f64 = 60.0;
    let mut times = 1;
    loop {
        let profiled = profile_of_several(target, flags, &vec![rounds; times]);
        let line = &profiled.0[0];
        let samples = if line.starts_with('{') {
            object(line)["samples"].as_f64().unwrap()
        } else {
            number(line, "samples")
        };
        if samples >= ENOUGH || times == 8 {
            return profiled;
        }
        times *= 2;
    }
}

/// Asserts that a sampled time is near one that a program has measured, from `least` to `most`, by five standard
/// deviations of so many samples. Where processors are shared, samples are few, and a program measures also the time
/// that it waits for a processor.
#[track_caller]
fn assert_near((samples, seconds): (f64, f64), found: f64, least: f64, most: f64) {
    let error = seconds * (0.02 + 5.0 * 0.5 / samples.sqrt());
    assert!(
        least - error < found && found < most + error,
        "{found} of {samples} samples: {least} to {most}, error {error}"
    );
}

/// A number of the first line, after its name.
fn number(line: &str, name: &str) -> f64 {
    let mut words = line.split(' ').skip_while(|word| *word != name);
    words.nth(1).unwrap().parse().unwrap()
}

pub(crate) fn function(profile: &Value, name: &str) -> (f64, f64) {
    sampled_function(profile, name).unwrap_or_else(|| panic!("{name}: {profile}"))
}

/// The same; `None` if it is in no sample.
fn sampled_function(profile: &Value, name: &str) -> Option<(f64, f64)> {
    let mut functions = profile["functions"].as_array().unwrap().iter();
    let function = functions.find(|it| it["function"] == name)?;
    let time = |field: &str| function[field].as_f64().unwrap();
    Some((time("self_seconds"), time("total_seconds")))
}

// promise: Profiles: The kernel's times on and off the processor are those of the program's own clocks, and those of functions are near
//    them (2 programs, 40 turns)
#[test]
fn times_are_those_of_the_program() {
    for file in fixture_forms("turns") {
        let mut target = Talker::start(&file);
        let (lines, [computed, napped]) = samples_of_turns(&mut target, &["-json"], 40);
        let [line] = &lines[..] else {
            panic!("{lines:?}");
        };
        let profile = object(line);
        let time = |field: &str| profile["times"][field].as_f64().unwrap();
        // What the program does besides, and what the tool costs it: the stops.
        let extra = time("running_seconds") - computed;
        assert!(
            (-0.001..0.05 * computed).contains(&extra),
            "{extra} of {computed}"
        );
        let runnable = time("runnable_seconds");
        assert!(time("off_seconds") + runnable >= 0.98 * napped, "{profile}");
        // Where samples are few, the function may be in none.
        let computes = sampled_function(&profile, "computes").map_or(0.0, |it| it.1);
        let of_all = |field: &str| profile[field].as_f64().unwrap();
        let all = (of_all("samples"), of_all("seconds"));
        assert_near(all, computes, computed, computed + runnable);
        let naps = function(&profile, "naps").1;
        let stacks = profile["stacks"].as_array().unwrap();
        // On a busy machine, the first waits may be over before one was looked at.
        let is_unseen = |it: &&Value| it["state"] == "unseen";
        let unseen = stacks.iter().filter(is_unseen);
        let unseen: f64 = unseen.map(|it| it["seconds"].as_f64().unwrap()).sum();
        assert_near(all, naps, napped - runnable - unseen, napped);
        let total = function(&profile, "main").1;
        assert!(total >= naps + computes, "{profile}");
        // A thread that has waited again before it was stopped is not read.
        let is_unread = |it: &Value| it["stack"] == "unread" && it["state"] == "running";
        let is_complete = |it: &&Value| it["stack"] == "complete" || is_unread(it) || is_unseen(it);
        let complete = stacks.iter().filter(is_complete).count();
        assert_eq!(complete, stacks.len(), "{profile}");
        let in_naps = stacks
            .iter()
            .find(|it| it["system_call"] == "clock_nanosleep");
        assert_eq!(in_naps.unwrap()["state"], "blocked");
    }
}

/// The sum of the running times, and the part of it of which there is no sample.
pub(crate) fn running(profile: &Value) -> (f64, f64) {
    let stacks = profile["stacks"].as_array().unwrap().iter();
    let running = stacks.filter(|it| it["state"] == "running");
    let seconds = |it: &Value| it["seconds"].as_f64().unwrap();
    let unsampled = running.clone().filter(|it| it["tid"].is_null());
    (
        running.clone().map(seconds).sum(),
        unsampled.map(seconds).sum(),
    )
}

/// Asserts that the times of what runs add up to the exact time, which is that of a program by its own clock.
#[track_caller]
pub(crate) fn assert_adds_up(profile: &Value, computed: f64) {
    let time = |field: &str| profile["times"][field].as_f64().unwrap();
    let exact = time("running_seconds");
    let extra = exact - computed;
    assert!(
        (-0.001..0.01 + 0.05 * computed).contains(&extra),
        "{exact}, and {computed} by the program: {profile}"
    );
    let (sum, _) = running(profile);
    assert!((sum - exact).abs() < 1e-6, "{sum} of {exact}: {profile}");
    let functions = profile["functions"].as_array().unwrap().iter();
    let own = functions.map(|it| it["self_seconds"].as_f64().unwrap());
    let all = sum + profile["waits"]["seconds"].as_f64().unwrap();
    assert!((own.sum::<f64>() - all).abs() < 1e-6, "{all}: {profile}");
}

// promise: Profiles: The running time is that of the program's own clock, also of threads of 4 ms one after the other, and the rows add up to
//    it, with what is in no sample (100 threads, 5 ways)
#[test]
fn times_of_short_threads_add_up() {
    let mut target = Talker::start(&fixture("turns.pie"));
    let pid = target.pid();
    let ways: [&[&str]; 5] = [
        &[],
        &["-on-cpu"],
        &["-live"],
        &["-on-cpu", "-by", "thread"],
        &["-hz", "997"],
    ];
    for flags in ways {
        let flags: Vec<&str> = flags.iter().copied().chain(["-json"]).collect();
        let tool = profiling(&flags, pid);
        let answer = target.ask("bursts 100", "burst");
        let profile = object(&lines(tool)[0]);
        let computed: f64 = answer.split(' ').nth(1).unwrap().parse().unwrap();
        assert_adds_up(&profile, computed / 1e9);
        assert_eq!(profile["threads"], 101, "{profile}");
        let (all, unsampled) = running(&profile);
        if profile["running_method"] == "sampled" && !flags.contains(&"997") {
            // A thread is sampled once it has run for 10 ms.
            assert!(unsampled > 0.8 * all, "{unsampled} of {all}: {profile}");
        }
    }
}

// promise: Profiles: The running time is whole when the process exits meanwhile (50 threads)
#[test]
fn times_add_up_when_the_process_exits() {
    let mut target = Talker::start(&fixture("turns.pie"));
    let mut tool = profiling(&["-json"], target.pid());
    let answer = target.ask("bursts 50", "burst");
    target.close_input();
    assert!(target.guard().wait().success());
    let profile = object(&tool.line().unwrap());
    assert_eq!(tool.guard().wait().code(), Some(0));
    let computed: f64 = answer.split(' ').nth(1).unwrap().parse().unwrap();
    assert_adds_up(&profile, computed / 1e9);
}

// promise: Profiles: Times are counted from one moment on, once the kernel records: none of them is longer than the process was watched
#[test]
fn times_begin_at_one_moment() {
    let target = Talker::start(&fixture("turns.pie"));
    let pid = target.pid();
    settle(pid);
    for flags in ["", " -off-cpu"] {
        let profile = run(&format!("profile -json -for 300ms -pid {pid}{flags}")).json();
        let seconds = profile["seconds"].as_f64().unwrap();
        // It waits for a command, all the time.
        let waited = profile["waits"]["seconds"].as_f64().unwrap();
        assert!((waited - seconds).abs() < 0.001, "{profile}");
        let off = profile["times"]["off_seconds"].as_f64().unwrap();
        assert!((off - seconds).abs() < 0.001, "{profile}");
        assert_eq!(profile["times"]["off_error_seconds"], 0.0);
    }
}

// promise: Profiles: -off-cpu stops nothing, and has only the time off the processor; -on-cpu has only the other
#[test]
fn time_on_and_off_processor_is_distinguished() {
    let mut target = Talker::start(&fixture("turns.pie"));
    let (lines, [_, napped]) = profile_of_turns(&mut target, &["-off-cpu", "-by", "syscall"], 20);
    let (head, rest) = lines.split_first().unwrap();
    assert!(head.contains(" stopped 0.000000 "), "{head}");
    // Unseen waits are naps, too.
    let is_nap = |call: &str| ["clock_nanosleep", "unseen"].contains(&call);
    let words = rest.iter().skip(1).map(|line| line.split(' '));
    let slept: f64 = words
        .filter(|words| words.clone().next_back().is_some_and(is_nap))
        .map(|mut words| words.next().unwrap().parse::<f64>().unwrap())
        .sum();
    let all = (number(head, "samples"), number(head, "all"));
    assert_near(all, slept, napped - number(head, "runnable"), napped);
    assert!(
        !lines
            .iter()
            .any(|line| line.contains("running") && line != head),
        "{lines:?}"
    );
    let (lines, [computed, _]) = samples_of_turns(&mut target, &["-on-cpu"], 20);
    let of = |name: &str| {
        lines
            .iter()
            .find(|line| line.ends_with(&format!(" {name}")))
    };
    assert!(of("[clock_nanosleep]").is_none(), "{lines:?}");
    // Where samples are few, the function may be in none.
    let total = |line: &String| line.split(' ').nth(2).unwrap().parse::<f64>().unwrap();
    let computes = of("computes").map_or(0.0, total);
    let head = &lines[0];
    let all = (number(head, "samples"), number(head, "all"));
    let most = computed + number(head, "runnable");
    assert_near(all, computes, computed, most);
}

// promise: Profiles: The same stacks are in a flame graph, in folded stacks, and in the files of speedscope and pprof
#[test]
fn pictures_have_the_same_stacks() {
    let scratch = Scratch::new();
    let mut target = Talker::start(&fixture("turns.pie"));
    for name in ["a.svg", "a.folded", "a.json", "a.pb.gz"] {
        let file = scratch.file(name);
        let flags = ["-off-cpu", "-o", file.to_str().unwrap(), "-by", "thread"];
        let (lines, _) = profile_of_turns(&mut target, &flags, 10);
        assert!(lines[0].starts_with("all "), "{lines:?}");
        let bytes = fs::read(&file).unwrap();
        let text = match name {
            "a.pb.gz" => {
                let mut gzip = Command::new("gzip");
                output(gzip.arg("-dc").arg(&file)).stdout
            }
            _ => bytes,
        };
        let text = String::from_utf8_lossy(&text);
        for function in ["naps", "[clock_nanosleep]", "turns.pie "] {
            assert!(text.contains(function), "{name}: {function}");
        }
        match name {
            "a.folded" => {
                let is_path = |line: &str| {
                    let (path, time) = line.rsplit_once(' ').unwrap();
                    path.starts_with("turns.pie ") && time.parse::<u64>().is_ok()
                };
                assert!(text.lines().all(is_path), "{text}");
            }
            "a.json" => {
                let file: Value = serde_json::from_str(&text).unwrap();
                let profile = &file["profiles"][0];
                let many = profile["samples"].as_array().unwrap().len();
                assert_eq!(profile["weights"].as_array().unwrap().len(), many);
            }
            _ => {}
        }
    }
}

#[test]
fn picture_has_any_name() {
    let scratch = Scratch::new();
    let target = Talker::start(&fixture("turns.pie"));
    let file = scratch.path().join(OsStr::from_bytes(b"caf\xe9.svg"));
    let mut tool = command(["profile", "-for", "100ms", "-pid"]);
    tool.arg(target.pid().to_string()).arg("-o").arg(&file);
    run_command(&mut tool).answer();
    assert!(fs::read_to_string(file).unwrap().contains("<svg"));
}

#[test]
fn program_is_not_started_without_its_picture() {
    let scratch = Scratch::new();
    let started = scratch.file("started");
    let mut tool = command(["profile", "-o"]);
    tool.arg(scratch.file("absent").join("a.svg"));
    tool.args(["-prog", "/bin/touch", "--"]);
    let refused = run_command(tool.arg(&started)).failure();
    assert!(
        refused.contains("a.svg: No such file or directory"),
        "{refused}"
    );
    assert!(!started.exists());
}

// promise: Profiles: Stacks of running OCaml code are complete wherever it is interrupted, also where exceptions are raised (all
//    but one of 20 or more)
#[test]
fn stacks_of_running_code_are_complete() {
    let mut target = Talker::start(&program("calls"));
    let pid = target.pid();
    target.send("run 1 10000000000");
    check_complete(pid);
}

/// The share of a function, and of what it calls, in the running time that was sampled: in profiles of a second, until
/// there are enough samples. On a busy machine, a program may be in none of a second.
fn sampled_share(function: &str, target: &str) -> f64 {
    const ENOUGH: u64 = 20;
    let (mut samples, mut in_function, mut sampled) = (0, 0.0, 0.0);
    for _ in 0..60 {
        let profile = run(&format!("profile -json -on-cpu -for 1s {target}")).json();
        let stacks = profile["stacks"].as_array().unwrap().iter();
        let of_running = stacks.filter(|it| it["state"] == "running");
        samples += of_running
            .map(|it| it["samples"].as_u64().unwrap())
            .sum::<u64>();
        let (all, unsampled) = running(&profile);
        sampled += all - unsampled;
        in_function += sampled_function(&profile, function).map_or(0.0, |it| it.1);
        if samples >= ENOUGH {
            return in_function / sampled;
        }
    }
    panic!("{samples} samples of {target}");
}

// promise: Profiles: The time that threads spend in the trampolines of another tool is that of the observed functions, with their
//    callers: nearly all stacks are complete while functions are timed, counted, or their stacks are copied (3 tools)
#[test]
fn stacks_lead_through_trampolines() {
    let mut target = Talker::start(&program("calls"));
    let pid = target.pid();
    target.send("run 1 10000000000");
    for (command, asked) in [
        ("latency", "-fn Calls.*"),
        ("count", "-fn Calls.*"),
        ("count", "-fn Calls.* -by stack"),
    ] {
        let tool = start_observing(command, asked, pid);
        let stacks = check_complete(pid);
        let leads_to_work = |stack: &&Value| {
            let mut frames = stack["frames"].as_array().unwrap().iter();
            frames.any(|it| it == "Calls.work")
        };
        let (in_work, all) = (
            samples(stacks.iter().filter(leads_to_work)),
            samples(stacks.iter()),
        );
        assert!(
            10 * in_work > 8 * all,
            "{command} {asked}: {in_work} of {all}"
        );
        let share = sampled_share("Calls.work", &format!("-pid {pid} -live"));
        assert!(share > 0.8, "{command} {asked} -live: {share}");
        assert_eq!(tool.end().code, Some(0));
    }
}

#[test]
fn idle_threads_of_the_runtime_are_left_out() {
    let mut target = Talker::start(&program("stacks"));
    let pid = target.pid();
    target.ask("wait", "waits");
    let profile = run(&format!("profile -json -pid {pid} -for 300ms")).json();
    assert!(profile["idle_seconds"].as_f64().unwrap() > 0.0, "{profile}");
    let stacks = profile["stacks"].as_array().unwrap();
    assert!(
        !stacks
            .iter()
            .any(|it| it.to_string().contains("caml_thread_tick"))
    );
    for way in ["plain", "callback", "finaliser"] {
        assert!(function(&profile, &format!("Stacks.{way}")).1 > 0.0);
    }
}

// promise: Profiles: A profile ends with what is known when the process exits, and says so when it executes another program
#[test]
fn profile_ends_with_the_process() {
    let mut target = Talker::start(&fixture("turns.pie"));
    let mut tool = profiling(&[], target.pid());
    target.ask("turns 2", "turned");
    target.close_input();
    assert!(target.guard().wait().success());
    let first = tool.line().unwrap();
    assert!(first.starts_with("all "), "{first}");
    assert_eq!(tool.guard().wait().code(), Some(0));
}

#[test]
fn exit_before_the_end_is_noted() {
    let mut target = Talker::start(&fixture("turns.pie"));
    let tool = profiling(&["-for", "1h"], target.pid());
    target.ask("turns 2", "turned");
    target.close_input();
    assert!(target.guard().wait().success());
    let (lines, said, status) = crate::observers::rest(tool);
    assert!(lines[0].starts_with("all "), "{lines:?}");
    let note = "the process has exited: the profile is of ";
    assert!(said.contains(note) && said.contains(" of 3600 s"), "{said}");
    assert_eq!(status, Some(0));
}

#[test]
fn profile_ends_when_another_program_is_executed() {
    let mut target = Talker::start(&fixture("exec_self.pie"));
    let pid = target.pid();
    let tool = profiling(&[], pid);
    target.send("exec");
    target.expect("ready");
    let (lines, said, status) = crate::observers::rest(tool);
    assert!(lines[0].starts_with("all "), "{lines:?}");
    assert!(said.contains("executed a new program"), "{said}");
    assert_eq!(status, Some(1));
}

#[test]
fn flags_of_profiles_are_checked() {
    for (flags, why) in [
        ("-hz 0", "is not a number from 1 to 1000"),
        ("-hz 1001", "is not a number from 1 to 1000"),
        ("-by file", "there are function, stack, thread and syscall"),
        ("-on-cpu -off-cpu", "-off-cpu"),
    ] {
        let said = run(&format!("profile -pid 1 {flags}"));
        assert_eq!(said.code, Some(2), "{said:?}");
        assert!(said.stderr.contains(why), "{}", said.stderr);
    }
    let error = run("profile -pid 2").failure();
    assert!(error.contains("kernel thread"), "{error}");
}

/// Runs `profile -prog` on a program that takes its commands from a file.
fn profile_program(flags: &[&str], commands: &str) -> (i32, String, String) {
    let mut tool = command(["profile", "-prog"]);
    tool.arg(fixture("turns.pie")).args(flags);
    with_commands(&tool, commands)
}

/// Runs a command with a file of commands as its input.
fn with_commands(tool: &Command, commands: &str) -> (i32, String, String) {
    let scratch = Scratch::new();
    let input = scratch.file("input");
    fs::write(&input, commands).unwrap();
    let mut shell = Command::new("sh");
    shell.args(["-c", "exec \"$@\" < \"$0\""]).arg(&input);
    shell.arg(tool.get_program()).args(tool.get_args());
    let said = output(&mut shell);
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (
        said.status.code().unwrap(),
        text(said.stdout),
        text(said.stderr),
    )
}

// promise: Profiles: A program that is started is profiled until it exits, and its output and status are its own
#[test]
fn started_program_is_profiled_until_it_exits() {
    // The busier the machine is, the longer it takes until a function is seen at work, or in a wait.
    let sees = |flags: &[&str], is_seen: &dyn Fn(&str) -> bool| {
        [10, 100, 1000].into_iter().any(|turns| {
            let lines = format!("turns {turns}\nquit\n");
            let (status, stdout, stderr) = profile_program(flags, &lines);
            assert!(
                status == 0 && stdout.starts_with("ready\nturned ") && stderr.starts_with("all "),
                "{status} {stdout} {stderr}"
            );
            is_seen(&stderr)
        })
    };
    assert!(sees(&[], &|answer| answer.contains(" computes\n")));
    let scratch = Scratch::new();
    let file = scratch.file("flame.svg");
    let flags = ["-off-cpu", "-o", file.to_str().unwrap()];
    assert!(sees(&flags, &|_| fs::read_to_string(&file)
        .unwrap()
        .contains("naps")));
    let error = run("profile -prog /nonexistent/program").failure();
    assert_eq!(
        error,
        "ocaml-probes: cannot start /nonexistent/program: No such file or directory\n"
    );
}

// promise: Profiles: Of a program that executes others, such as a script, the last one is profiled
#[test]
fn program_that_is_executed_is_profiled() {
    for script in ["exec \"$0\"", "sleep 0.1; exec \"$0\"", "exec env \"$0\""] {
        let mut tool = command(["profile", "-prog", "/bin/sh", "--", "-c", script]);
        tool.arg(fixture("turns.pie"));
        // The busier the machine is, the longer it takes until it is seen at work.
        let is_seen = [10, 30, 100].into_iter().any(|turns| {
            let (status, stdout, stderr) = with_commands(&tool, &format!("turns {turns}\nquit\n"));
            assert_eq!(status, 0, "{stderr}");
            assert!(stdout.starts_with("ready\nturned "), "{stdout}");
            stderr.lines().any(|line| line.ends_with(" computes"))
        });
        assert!(is_seen, "{script}");
    }
}

// promise: Profiles: As root, the profiler has the best priority, and a program that it starts the usual one
#[test]
fn profiler_is_scheduled_first() {
    // Prints the nice values of the program and of its parent, the profiler.
    let script = "sleep 3; nice; cut -d' ' -f19 /proc/$PPID/stat";
    let started = output(&mut command([
        "profile", "-prog", "/bin/sh", "--", "-c", script,
    ]));
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    let printed = text(started.stdout);
    let usual = text(output(&mut Command::new("nice")).stdout);
    // The best nice value; the usual one if no better one is permitted.
    let best = text(output(Command::new("nice").args(["-n", "-40", "nice"])).stdout);
    assert_eq!(printed, format!("{usual}{best}"));
}

// promise: Profiles: With -gc, time during collections is distinguished, also in the stacks
#[test]
fn collections_are_distinguished() {
    let mut target = Talker::start(&program("stacks"));
    target.ask("collect", "collects");
    check_collections(target.pid());
    let target = Talker::start(&fixture("turns.pie"));
    let error = run(&format!("profile -gc -pid {}", target.pid())).failure();
    assert!(error.contains("runtime"), "{error}");
}
