//! `profile`: where threads run, as the kernel samples them, or as it is found by stopping them.

use std::process::{Command, Stdio};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use test_support::{Guard, Scratch, Talker, eventually, fixture, fixture_forms, process, program};

use crate::profile::{assert_adds_up, function, lines, profiling, running};
use crate::support::{Run, object, run, run_command};
use crate::waits::{EACCES, PERF_EVENT_OPEN, TOOL, filter_against};

/// Whether the kernel has sampled the threads that ran.
fn kernel_samples(profile: &Value) -> bool {
    ["sampled", "user_sampled"].contains(&profile["running_method"].as_str().unwrap())
}

/// Runs `profile` where it may not use perf_event_open.
fn profile_without_perf(pid: i32, flags: &[&str]) -> Run {
    let scratch = Scratch::new();
    let filter = scratch.file("no_perf.bpf");
    filter_against(PERF_EVENT_OPEN, EACCES, &filter);
    let mut tool = Command::new(fixture("under_filters.exe"));
    tool.arg(&filter)
        .args(["--", TOOL, "profile", "-pid", &pid.to_string()]);
    run_command(tool.args(["-for", "500ms"]).args(flags))
}

// promise: Profiles: Where threads are stopped or not read, rows add up to the exact running time, too, and errors of waits are said
#[test]
fn times_add_up_without_the_kernel() {
    let mut target = Talker::start(&fixture("turns.pie"));
    let pid = target.pid();
    for flags in [&["-json"][..], &["-json", "-on-cpu"], &["-json", "-live"]] {
        // Its threads run in short bursts: on a busy machine, one profile may meet none of them.
        let is_met = (0..20).any(|_| {
            target.send("bursts 300");
            let said = profile_without_perf(pid, flags);
            let profile = object(&said.stdout);
            let exact = profile["times"]["running_seconds"].as_f64().unwrap();
            assert_adds_up(&profile, exact);
            // One thread runs at a time.
            let seconds = profile["seconds"].as_f64().unwrap();
            assert!(exact > 0.0 && exact <= seconds, "{profile}");
            if !flags.contains(&"-on-cpu") {
                let error = profile["waits"]["error_seconds"].as_f64().unwrap();
                assert!(error > 0.0, "{profile}");
            }
            target.expect("burst");
            let (all, unsampled) = running(&profile);
            unsampled < 0.8 * all
        });
        assert!(is_met, "{flags:?}");
    }
}

/// Has a program share one processor with another one, which is returned; of those that this process may use, the
/// first.
fn share_processor(pid: i32) -> Guard {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let allowed = status
        .lines()
        .find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
    let first = allowed.unwrap().trim().split(['-', ',']).next().unwrap();
    let mut pin = Command::new("taskset");
    pin.args(["--pid", "--cpu-list", first, &pid.to_string()]);
    assert!(pin.stdout(Stdio::null()).status().unwrap().success());
    let mut other = Command::new("taskset");
    other.args(["--cpu-list", first, "sh", "-c", "while :; do :; done"]);
    Guard::spawn(&mut other)
}

// promise: Profiles: A thread that was woken, and waits for a processor, is not taken for one that runs where it has slept (2 programs that
//    share their processor)
#[test]
fn woken_threads_do_not_run_yet() {
    for file in fixture_forms("turns") {
        let mut target = Talker::start(&file);
        let pid = target.pid();
        let _other = share_processor(pid);
        let tool = profiling(&["-json", "-on-cpu"], pid);
        let answer = target.ask("turns 30", "turned");
        let profile = object(&lines(tool)[0]);
        let computed: f64 = answer.split(' ').nth(1).unwrap().parse().unwrap();
        assert_eq!(profile["waits"]["method"], "recorded", "{profile}");
        let stacks = profile["stacks"].as_array().unwrap().iter();
        let in_naps = stacks.filter(|it| it["frames"].to_string().contains("\"naps\""));
        let in_naps: f64 = in_naps.map(|it| it["seconds"].as_f64().unwrap()).sum();
        // It is on a processor there for a few microseconds: in a sample or two.
        let number = |field: &str| profile[field].as_f64().unwrap();
        let of_sample = if kernel_samples(&profile) {
            1.0 / 99.0
        } else {
            number("seconds") / number("samples")
        };
        let most = 0.1 * computed / 1e9 + 2.5 * of_sample;
        assert!(in_naps < most, "{in_naps} of {most} {profile}");
        if kernel_samples(&profile) {
            let computes = function(&profile, "computes").1 / (computed / 1e9);
            assert!((0.8..1.2).contains(&computes), "{computes} {profile}");
            assert_eq!(profile["stops"], 0, "{profile}");
        }
    }
}

// promise: Profiles: With -live, nothing is stopped; the kernel samples threads where it may, and how much is not known is said
#[test]
fn live_profile_says_what_it_lacks() {
    let mut target = Talker::start(&fixture("turns.pie"));
    let pid = target.pid();
    let tool = profiling(&["-json", "-live"], pid);
    target.ask("turns 12", "turned");
    let profile = object(&lines(tool)[0]);
    assert!(
        kernel_samples(&profile),
        "is kernel.perf_event_paranoid 2 or less? {profile}"
    );
    assert_eq!(profile["stops"], 0, "{profile}");
    assert!(function(&profile, "computes").1 > 0.0);
    target.send("turns 1000");
    let said = profile_without_perf(pid, &["-live"]);
    assert!(
        said.stderr.contains("is not known: -live stops nothing"),
        "{}",
        said.stderr
    );
    assert!(
        said.stdout.contains(" stopped 0.000000 "),
        "{}",
        said.stdout
    );
    assert!(said.stdout.contains(" [not read]\n"), "{}", said.stdout);
}

// promise: Profiles: Where threads are not sampled by the kernel, and wait for processors, a warning says what that means
#[test]
fn busy_processors_are_reported_without_records() {
    let mut target = Talker::start(&fixture("turns.pie"));
    let pid = target.pid();
    let _other = share_processor(pid);
    target.send("turns 1000");
    let said = profile_without_perf(pid, &["-json"]);
    assert!(
        said.stderr.contains("for a processor, and ran "),
        "{}",
        said.stderr
    );
    assert_eq!(object(&said.stdout)["running_method"], "stopped");
}

// promise: Profiles: With -on-cpu, it is said why the kernel records nothing, and that no thread ran (idle and stopped processes)
#[test]
fn empty_profiles_say_why() {
    const NOTHING: &str = "no thread was on a processor meanwhile; -off-cpu shows where they were";
    let target = Talker::start(&fixture("turns.pie"));
    let pid = target.pid();
    let becomes = |state| {
        eventually("it does not run", || {
            (process::state(pid) == Some(state)).then_some(())
        })
    };
    for is_stopped in [false, true] {
        if is_stopped {
            kill(Pid::from_raw(pid), Signal::SIGSTOP).unwrap();
        }
        becomes(if is_stopped { 'T' } else { 'S' });
        let said = run(&format!("profile -on-cpu -for 300ms -pid {pid}"));
        assert_eq!(said.code, Some(0));
        assert!(said.stderr.contains(NOTHING), "{}", said.stderr);
    }
    kill(Pid::from_raw(pid), Signal::SIGCONT).unwrap();
    becomes('S');
    let said = profile_without_perf(pid, &["-on-cpu"]).stderr;
    assert!(
        said.contains("the kernel records nothing: perf_event_open"),
        "{said}"
    );
    assert!(said.contains(NOTHING), "{said}");
}

// promise: Profiles: The kernel's samples and stops both find the function that calls all others in nearly all the time, in whole stacks
//    (OCaml)
#[test]
fn samples_and_stops_find_the_callers() {
    let mut target = Talker::start(&program("calls"));
    let pid = target.pid();
    target.send("run 1 10000000000");
    let sampled = run(&format!("profile -json -on-cpu -live -pid {pid} -for 1s")).json();
    assert!(kernel_samples(&sampled), "{sampled}");
    let stopped = profile_without_perf(pid, &["-json", "-on-cpu"]);
    let stopped = object(&stopped.stdout);
    assert_eq!(stopped["running_method"], "stopped");
    for profile in [sampled, stopped] {
        // On a busy machine, it is not sampled for much of the little time that it runs: that time is of no thread.
        let stacks = profile["stacks"].as_array().unwrap().iter();
        let stacks = stacks.filter(|it| !it["tid"].is_null());
        let seconds = |stack: &Value| stack["seconds"].as_f64().unwrap();
        let complete = stacks.clone().filter(|it| it["stack"] == "complete");
        let complete: f64 = complete.map(seconds).sum();
        let all: f64 = stacks.map(seconds).sum();
        assert!(
            all > 0.0 && complete > 0.8 * all,
            "{complete} of {all}: {profile}"
        );
        let of_work = function(&profile, "Calls.work").1;
        assert!(of_work > 0.8 * all, "{of_work} of {all}: {profile}");
    }
}
