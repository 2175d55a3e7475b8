//! `profile`: the waits, all of which the kernel records, and the answer where it may not; `doctor`, progress, and the
//! flame graph in a browser.

use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use nix::unistd::geteuid;
use serde_json::Value;
use test_support::process::settle;
use test_support::tmux::Terminal;
use test_support::{Scratch, Talker, as_nobody, fixture, fixture_forms, output_within};

use crate::profile::{lines, profiling};
use crate::support::{Directory, command, object, run, run_command};

pub(crate) const TOOL: &str = env!("CARGO_BIN_EXE_ocaml-probes");

/// The number of perf_event_open(2) on x86-64, and the error with which it is refused.
pub(crate) const PERF_EVENT_OPEN: u32 = 298;
pub(crate) const EACCES: u32 = 13;

/// Profiles a process while it executes a command; returns the profile, and the time at the end of the answer, in
/// seconds.
fn profile_of(target: &mut Talker, line: &str, start: &str) -> (Value, f64) {
    let tool = profiling(&["-off-cpu", "-json"], target.pid());
    let answer = target.ask(line, start);
    let lines = lines(tool);
    let number = answer.split(' ').next_back().unwrap();
    (object(&lines[0]), number.parse::<f64>().unwrap() / 1e9)
}

fn number(value: &Value, field: &str) -> f64 {
    let number = value[field].as_f64();
    number.unwrap_or_else(|| panic!("{field}: {value}"))
}

/// The number and the total time of the waits in those stacks for which `is_wanted` is true.
fn waits(profile: &Value, is_wanted: impl Fn(&Value) -> bool) -> (f64, f64) {
    let stacks = profile["stacks"].as_array().unwrap().iter();
    let wanted = stacks.filter(|it| is_wanted(it));
    wanted.fold((0.0, 0.0), |(count, seconds), it| {
        (
            count + number(&it["waits"], "count"),
            seconds + number(it, "seconds"),
        )
    })
}

/// Whether the waits of a stack are naps, or unseen, which naps may be.
fn is_nap(stack: &Value) -> bool {
    stack["state"] == "unseen" || stack["system_call"] == "clock_nanosleep"
}

// promise: Profiles: Each wait is recorded, and their sum is that of the program's own clock within 2 % (2 programs, 30 naps)
#[test]
fn waits_are_those_of_the_program() {
    const NAPS: f64 = 30.0;
    for file in fixture_forms("turns") {
        let mut target = Talker::start(&file);
        let (profile, napped) = profile_of(&mut target, &format!("turns {NAPS}"), "turned");
        assert_eq!(profile["waits"]["method"], "recorded", "{profile}");
        assert_eq!(profile["waits"]["lost_records"], 0, "{profile}");
        let (count, seconds) = waits(&profile, is_nap);
        // Waits while it reads its command may be among the unseen ones.
        assert!((NAPS..NAPS + 4.0).contains(&count), "{profile}");
        // The time for which a thread that was woken or preempted waits for a processor is no wait.
        let runnable = number(&profile["times"], "runnable_seconds");
        let of_program = 0.98 * napped - runnable..1.02 * napped + 0.01;
        assert!(of_program.contains(&seconds), "{napped}: {profile}");
        let all = profile["stacks"].as_array().unwrap().iter();
        let nap = all
            .filter(|it| it["system_call"] == "clock_nanosleep")
            .max_by(|one, other| number(one, "seconds").total_cmp(&number(other, "seconds")));
        let lengths = &nap.unwrap()["waits"];
        assert!(number(lengths, "p50_ns") >= 29_000_000.0, "{lengths}");
        assert!(number(lengths, "p50_ns") <= number(lengths, "p90_ns"));
        assert!(number(lengths, "p999_ns") <= number(lengths, "max_ns"));
    }
}

// promise: Profiles: Waits that are too short to be looked at are counted, each, and said to be so (2,000 of about 60 us)
#[test]
fn short_waits_are_counted_and_reported() {
    const NODS: f64 = 2000.0;
    let mut target = Talker::start(&fixture("turns.pie"));
    let (profile, nodded) = profile_of(&mut target, &format!("nods {NODS}"), "nodded");
    let (count, seconds) = waits(&profile, is_nap);
    // On a busy machine, some naps are over before the thread has left the processor: these are no waits.
    assert!((0.95 * NODS..NODS + 4.0).contains(&count), "{profile}");
    assert!(seconds > 0.01 && seconds < nodded + 0.01, "{profile}");
    assert!(number(&profile["waits"], "unseen_seconds") > 0.0);
    let (unseen, _) = waits(&profile, |it| it["state"] == "unseen");
    assert!(unseen > 0.0, "{profile}");
    let names = |it: &Value| it["frames"][0] == "[unseen waits]";
    let stacks = profile["stacks"].as_array().unwrap().iter();
    assert!(stacks.filter(|it| it["state"] == "unseen").all(names));
}

// promise: Profiles: Waits of some milliseconds are those of the functions that wait, by the program's own clock (5 functions, 750 waits of 1 to 8 ms)
#[test]
fn waits_belong_to_the_functions_that_wait() {
    // On a busy machine, the profiler itself waits for a processor, and fewer waits are looked at.
    let shares = (0..12).map(|_| share_of_waits_in_wrong_place());
    let mut shares = shares.inspect(|share| eprintln!("{share}"));
    assert!(shares.any(|share| share < 0.04));
}

/// Returns which share of the waits of a program, by time, the profile shows in another function than the one that
/// waited.
fn share_of_waits_in_wrong_place() -> f64 {
    const PLACES: usize = 5;
    let mut target = Talker::start(&fixture("turns.pie"));
    let tool = profiling(&["-off-cpu", "-json"], target.pid());
    let answer = target.ask("places 150", "placed");
    let profile = object(&lines(tool)[0]);
    let own = answer.split(' ').skip(1).map(|it| it.parse::<f64>());
    let own: Vec<f64> = own.map(|it| it.unwrap() / 1e9).collect();
    let found: Vec<f64> = (1..=PLACES)
        .map(|place| {
            let name = format!("place_{place}");
            let is_there = |stack: &Value| {
                let mut frames = stack["frames"].as_array().unwrap().iter();
                frames.any(|frame| frame == name.as_str())
            };
            waits(&profile, is_there).1
        })
        .collect();
    let (of_program, all): (f64, f64) = (own.iter().sum(), found.iter().sum());
    // The time for which a thread that was woken waits for a processor is no wait.
    let runnable = number(&profile["times"], "runnable_seconds");
    let least = 0.9 * (of_program - runnable);
    assert!(all > least, "{own:?} {found:?}: {profile}");
    // With fewer looks, this share was 7 % to 10 %.
    let missing = own.iter().zip(&found);
    let missing = missing.map(|(own, found)| (own / of_program - found / all).max(0.0));
    missing.sum()
}

// promise: Profiles: Waits of threads that begin and exit between two samples are recorded (20 threads)
#[test]
fn waits_of_new_threads_are_recorded() {
    const THREADS: f64 = 20.0;
    let mut target = Talker::start(&fixture("turns.pie"));
    let pid = target.pid();
    let (profile, napped) = profile_of(&mut target, &format!("threads {THREADS}"), "exited");
    let (count, seconds) = waits(&profile, |it| it["tid"] != pid);
    assert!((THREADS..=2.0 * THREADS).contains(&count), "{profile}");
    let runnable = number(&profile["times"], "runnable_seconds");
    let of_program = 0.98 * napped - runnable..1.02 * napped + 0.01;
    assert!(of_program.contains(&seconds), "{napped}: {profile}");
}

// promise: Profiles: Of a wait that had begun before, or lasts at the end, the time counts, and the length does not
#[test]
fn waits_seen_in_part_have_no_length() {
    let mut target = Talker::start(&fixture("turns.pie"));
    let pid = target.pid();
    // It waits for a command, before and after.
    settle(pid);
    let waiting = run(&format!("profile -off-cpu -json -for 300ms -pid {pid}")).json();
    let [stack] = &waiting["stacks"].as_array().unwrap()[..] else {
        panic!("{waiting}");
    };
    assert_eq!(stack["system_call"], "read");
    assert_eq!(
        (&stack["waits"]["count"], &stack["waits"]["parts"]),
        (&0.into(), &1.into())
    );
    assert!(stack["waits"].get("max_ns").is_none(), "{waiting}");
    assert!(number(stack, "seconds") > 0.29, "{waiting}");
    assert_eq!(waiting["waits"]["parts"], 1);
    let table = run(&format!(
        "profile -off-cpu -format table -for 300ms -pid {pid}"
    ))
    .answer();
    assert!(
        table.contains(" | 0+1   |     |     |     |     | [read]"),
        "{table}"
    );
    assert!(
        table.contains("0 waits, each recorded; 1 more (after +) seen in part"),
        "{table}"
    );
    let plain = run(&format!(
        "profile -off-cpu -by syscall -for 300ms -pid {pid}"
    ))
    .answer();
    assert!(
        plain.contains(" parts 1\n") && plain.contains(" 0 - - - - read\n"),
        "{plain}"
    );
    // The naps are seen whole, so all lengths are theirs.
    let (profile, _) = profile_of(&mut target, "turns 10", "turned");
    // In part: the wait for this command, and the wait for the next one, if that has begun by the end.
    let parts = number(&profile["waits"], "parts");
    assert!((1.0..=2.0).contains(&parts), "{profile}");
    let (count, _) = waits(&profile, is_nap);
    assert!((10.0..14.0).contains(&count), "{profile}");
    let stacks = profile["stacks"].as_array().unwrap().iter();
    let reads = stacks.filter(|it| it["system_call"] == "read");
    let whole = reads.map(|it| number(&it["waits"], "count"));
    assert_eq!(whole.sum::<f64>(), 0.0, "{profile}");
}

/// Writes a seccomp filter that refuses a system call with an error.
pub(crate) fn filter_against(call: u32, error: u32, path: &Path) {
    // struct sock_filter: load the number of the system call; if it is `call`, return the error, else allow it.
    let instructions: [(u16, u8, u8, u32); 4] = [
        (0x20, 0, 0, 0),
        (0x15, 0, 1, call),
        (0x06, 0, 0, 0x0005_0000 | error),
        (0x06, 0, 0, 0x7fff_0000),
    ];
    let bytes = instructions.into_iter().flat_map(|(code, yes, no, value)| {
        let mut bytes = code.to_le_bytes().to_vec();
        bytes.extend([yes, no]);
        bytes.extend(value.to_le_bytes());
        bytes
    });
    fs::write(path, bytes.collect::<Vec<u8>>()).unwrap();
}

// promise: Profiles: Where perf_event_open is refused, waits are sampled, and the answer says so, why, and how large the error may be
#[test]
fn refused_records_are_replaced_by_samples() {
    let scratch = Scratch::new();
    let filter = scratch.file("no_perf.bpf");
    filter_against(PERF_EVENT_OPEN, EACCES, &filter);
    let mut target = Talker::start(&fixture("turns.pie"));
    let pid = target.pid().to_string();
    let tool = |command: &str| {
        let mut tool = Command::new(fixture("under_filters.exe"));
        tool.arg(&filter).args(["--", TOOL, command, "-pid", &pid]);
        tool
    };
    let doctor = run_command(tool("doctor").args(["-format", "plain"])).stdout;
    let record = doctor
        .lines()
        .find(|line| line.starts_with("command record limited "));
    let is_said =
        record.is_some_and(|it| it.contains("without -off-cpu only: perf_event_open is refused"));
    assert!(is_said, "{doctor}");
    let refused = |flags: &[&str]| run_command(tool("profile").args(["-for", "500ms"]).args(flags));
    target.send("turns 20");
    let profile = refused(&["-json"]).json();
    assert_eq!(profile["waits"]["method"], "sampled", "{profile}");
    let because = profile["waits"]["because"].as_str().unwrap();
    assert!(
        because.contains("perf_event_open is refused: "),
        "{because}"
    );
    assert!(because.contains("Permission denied"), "{because}");
    assert!(profile["waits"]["count"].is_null());
    let margins = |it: &Value| number(it, "error_seconds");
    let stacks = profile["stacks"].as_array().unwrap().iter();
    assert!(stacks.map(margins).sum::<f64>() > 0.0, "{profile}");
    // Each sample holds the only thread once.
    let stacks = profile["stacks"].as_array().unwrap().iter();
    let of_stacks: f64 = stacks.map(|it| number(it, "samples")).sum();
    assert!(of_stacks <= number(&profile, "samples"), "{profile}");
    target.expect("turned");
    target.send("turns 20");
    let lines = refused(&["-off-cpu"]).answer();
    let said = lines.lines().nth(1).unwrap();
    assert!(said.starts_with("waits sampled error "), "{said}");
    assert!(said.contains("Permission denied"), "{said}");
    let naps = lines
        .lines()
        .find(|line| line.ends_with(" [clock_nanosleep]"));
    assert!(naps.unwrap().contains(" - - - - - "), "{lines}");
    let errors = lines.lines().skip(2).map(|line| {
        let error = line.split(' ').nth(1).unwrap();
        error.parse::<f64>().unwrap()
    });
    assert!(errors.sum::<f64>() > 0.0, "{lines}");
    target.expect("turned");
    // A time line holds only recorded waits.
    let mut record = tool("record");
    let record = record.args(["-off-cpu", "-o"]);
    let error = run_command(record.arg(scratch.file("waits.json"))).failure();
    assert!(
        error.contains(" cannot have its waits recorded: "),
        "{error}"
    );
    assert!(error.contains("Permission denied"), "{error}");
}

/// The entry `name` of `list` (`checks` or `commands`) in the answer of `doctor -json`.
fn of_doctor(run: &crate::support::Run, list: &str, name: &str) -> Value {
    let diagnosis = object(&run.stdout);
    let items = diagnosis[list].as_array().unwrap();
    items.iter().find(|it| it["name"] == name).unwrap().clone()
}

// promise: Bad input: `doctor` tries the samples of `profile`, and what it says of them is what `profile` then does (2 users)
#[test]
fn doctor_tries_the_samples_of_profiles() {
    let mut target = Talker::start(&fixture("turns.pie"));
    let pid = target.pid();
    let found = of_doctor(
        &run(&format!("doctor -json -pid {pid}")),
        "checks",
        "perf_samples",
    );
    target.send("turns 40");
    let method = |flags: &str| {
        let line = format!("profile -json -on-cpu -for 200ms -pid {pid}{flags}");
        let method = run(&line).json()["running_method"].clone();
        method.as_str().unwrap().to_owned()
    };
    let methods = [method(""), method(" -live")];
    let expected = match found["finding"].as_str().unwrap() {
        said if said.contains(" and in the kernel") => ["sampled", "sampled"],
        said if said.contains(" and not in the kernel: ") => ["stopped", "user_sampled"],
        _ => ["stopped", "unread"],
    };
    assert_eq!(methods, expected, "{found}");
    assert_eq!(found["result"] == "pass", expected[0] == "sampled");
    if !geteuid().is_root() {
        return;
    }
    // An ordinary user, with this machine's kernel.perf_event_paranoid.
    let directory = Directory::new("samples");
    let tool = directory.copy(TOOL.as_ref(), "ocaml-probes");
    let doctor = run_command(as_nobody(&tool).args(["doctor", "-json"]));
    let found = of_doctor(&doctor, "checks", "perf_samples");
    let paranoid = fs::read_to_string("/proc/sys/kernel/perf_event_paranoid").unwrap();
    let paranoid: i32 = paranoid.trim().parse().unwrap();
    let finding = found["finding"].as_str().unwrap();
    let (result, said) = match paranoid {
        ..=1 => ("pass", " and in the kernel".to_owned()),
        2 => (
            "fail",
            format!(
                "kernel.perf_event_paranoid={paranoid} permits samples in the kernel only with"
            ),
        ),
        _ => ("fail", "the kernel does not sample threads: ".to_owned()),
    };
    assert!(
        found["result"] == result && finding.contains(&said),
        "{found}"
    );
    let profile = of_doctor(&doctor, "commands", "profile");
    let expected = if result == "pass" { "works" } else { "limited" };
    assert_eq!(profile["result"], expected, "{profile}");
}

// promise: Bad input: `doctor` tries perf_event_open as `profile` does, and says the meaning of its error (2 errors)
#[test]
fn doctor_tries_the_events_of_profiles() {
    const ENOSYS: u32 = 38;
    let scratch = Scratch::new();
    let target = Talker::start(&fixture("turns.pie"));
    let pid = target.pid().to_string();
    let check = |run, list: &str, name: &str| of_doctor(&run, list, name);
    for words in [vec!["-json"], vec!["-json", "-pid", &pid]] {
        let permitted = || run_command(command(["doctor"]).args(&words));
        assert_eq!(
            check(permitted(), "checks", "perf_events")["result"],
            "pass"
        );
        let is_sampled = check(permitted(), "checks", "perf_samples")["result"] == "pass";
        let expected = if is_sampled { "works" } else { "limited" };
        let profile = check(permitted(), "commands", "profile");
        assert_eq!(profile["result"], expected, "{profile}");
        for (error, name) in [
            (EACCES, "Permission denied"),
            (ENOSYS, "Function not implemented"),
        ] {
            let filter = scratch.file("no_perf.bpf");
            filter_against(PERF_EVENT_OPEN, error, &filter);
            let refused = || {
                let mut tool = Command::new(fixture("under_filters.exe"));
                tool.arg(&filter).args(["--", TOOL, "doctor"]).args(&words);
                run_command(&mut tool)
            };
            let found = check(refused(), "checks", "perf_events");
            assert_eq!(found["result"], "fail", "{found}");
            let finding = found["finding"].as_str().unwrap();
            let start = format!("perf_event_open is refused: {name}");
            assert!(finding.starts_with(&start), "{finding}");
            assert!(
                finding.ends_with(
                    "a seccomp filter of this tool may refuse it, as in many containers"
                ),
                "{finding}"
            );
            let samples = check(refused(), "checks", "perf_samples");
            assert_eq!(samples["result"], "fail", "{samples}");
            let said = samples["finding"].as_str().unwrap();
            let expected = format!("the kernel does not sample threads: {finding}");
            assert_eq!(said, expected);
            let profile = check(refused(), "commands", "profile");
            assert_eq!(profile["result"], "limited", "{profile}");
            let reasons = profile["reasons"].as_array().unwrap();
            let said = format!("waits are sampled: {finding}");
            assert!(reasons.iter().any(|it| *it == said), "{profile}");
        }
    }
}

// promise: Profiles: By how much unseen waits may be too long because of stops is in each form of the answer
#[test]
fn excess_of_unseen_waits_is_in_each_form() {
    let mut target = Talker::start(&fixture("turns.pie"));
    let pid = target.pid();
    let mut profile = |flags: &[&str]| {
        let tool = profiling(flags, pid);
        target.ask("nods 1000", "nodded");
        lines(tool)
    };
    let json = object(&profile(&["-json"])[0]);
    let waits = &json["waits"];
    let excess = number(waits, "unseen_excess_seconds");
    assert!(
        (0.0..=number(waits, "unseen_seconds")).contains(&excess),
        "{waits}"
    );
    let json = object(&profile(&["-json", "-off-cpu"])[0]);
    assert_eq!(
        json["waits"]["unseen_excess_seconds"], 0.0,
        "nothing is stopped"
    );
    let plain = profile(&["-format", "plain"]);
    let words: Vec<&str> = plain[1].split(' ').collect();
    assert_eq!((words[0], words[7]), ("waits", "excess"), "{plain:?}");
    let excess: f64 = words[8].parse().unwrap();
    assert!(excess >= 0.0);
}

// promise: Profiles: Progress of a profile is shown only on a terminal, and not with -quiet
#[test]
fn progress_is_shown_on_terminals_alone() {
    let target = Talker::start(&fixture("turns.pie"));
    let line = format!("profile -off-cpu -pid {}", target.pid());
    let terminal = Terminal::open(100, 24);
    terminal.type_line(&format!("{TOOL} {line} >/dev/null"));
    terminal.wait_until("it shows its samples", |screen| {
        let mut shown = screen.lines().filter(|it| it.starts_with("profiling "));
        shown.any(|it| it.contains(" samples; Ctrl-C ends it"))
    });
    terminal.press(&["C-c"]);
    terminal.wait_until("it is gone", |screen| !screen.contains("samples; Ctrl-C"));
    terminal.type_line(&format!("{TOOL} {line} -for 60s >/dev/null"));
    terminal.wait_until("it shows how far it is", |screen| {
        let mut shown = screen.lines().filter(|it| it.starts_with("profiling "));
        shown.any(|it| it.contains(" of 60 s, "))
    });
    terminal.press(&["C-c"]);
    terminal.wait_until("it is gone", |screen| !screen.contains(" of 60 s, "));
    let said = run(&format!("{line} -for 300ms"));
    assert_eq!(said.stderr, "");
}

#[test]
fn long_work_is_shown_on_terminals_alone() {
    let terminal = Terminal::open(200, 24);
    let file = fixture("calls.pie");
    let file = file.display();
    for (command, opened, shown) in [
        // When it opens its 40th file, it reads processes.
        (
            "ps".to_owned(),
            "when=40".to_owned(),
            "reading all processes: ",
        ),
        (
            format!("list -functions -prog {file}"),
            format!("when=1 -P {file}"),
            "reading the functions of ",
        ),
    ] {
        // strace makes one openat(2) take two seconds.
        let slow = format!(
            "strace -f -qq -o /dev/null -e trace=openat -e inject=openat:delay_enter=2s:{opened}"
        );
        terminal.type_line(&format!("{slow} {TOOL} {command} >/dev/null"));
        terminal.wait_until("it goes on", |screen| {
            screen.lines().any(|line| line.starts_with(shown))
        });
        terminal.wait_until("it is gone", |screen| {
            !screen.lines().any(|line| line.starts_with(shown))
        });
        let elsewhere = run_slowly(&slow, &command);
        assert!(!elsewhere.contains(shown), "{elsewhere}");
    }
}

/// Runs the tool under strace, without a terminal; returns what it writes to standard error.
fn run_slowly(slow: &str, command: &str) -> String {
    let mut words = slow.split(' ').chain([TOOL]).chain(command.split(' '));
    let mut tool = Command::new(words.next().unwrap());
    let output = test_support::output(tool.args(words));
    assert!(output.status.success());
    String::from_utf8(output.stderr).unwrap()
}

/// Opens a page in a browser; returns its DOM after its script has run.
fn in_browser(address: &str) -> String {
    let scratch = Scratch::new();
    let mut browser = Command::new("chromium");
    browser.args([
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--disable-quic",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--dump-dom",
    ]);
    let profile = scratch.file("profile");
    browser.arg(format!("--user-data-dir={}", profile.display()));
    // The browser would write to the home directory otherwise.
    browser.env("HOME", scratch.path());
    let shown = output_within(BROWSER_LIMIT, browser.arg(address), || {});
    let said = String::from_utf8_lossy(&shown.stderr);
    assert!(
        shown.status.success(),
        "{:?}: {said}",
        shown.status.signal()
    );
    String::from_utf8(shown.stdout).unwrap()
}

/// A browser takes a few seconds to start, more on a busy machine.
const BROWSER_LIMIT: Duration = Duration::from_secs(120);

// promise: Profiles: A browser shows the flame graph: its frames have titles, and its search finds them
#[test]
fn browser_shows_the_flame_graph() {
    let scratch = Scratch::new();
    let file = scratch.file("flame.svg");
    let mut target = Talker::start(&fixture("turns.pie"));
    let tool = profiling(&["-off-cpu", "-o", file.to_str().unwrap()], target.pid());
    target.ask("turns 10", "turned");
    lines(tool);
    let page = in_browser(&format!("file://{}?s=clock_nanosleep", file.display()));
    let title = |name: &str| format!("<title>{name} (");
    for name in ["naps", "main", "_start", "[clock_nanosleep]"] {
        assert!(page.contains(&title(name)), "{name}: {page}");
    }
    // The script of the page has searched for the name, and shows the share of the frames that it found.
    let matched = page.split("Matched: ").find_map(|rest| {
        let share = rest.split('%').next()?;
        share.parse::<f64>().ok()
    });
    assert!(matched.is_some_and(|it| it > 10.0), "{page}");
    let absent = in_browser(&format!("file://{}?s=no_such_function", file.display()));
    let is_matched = |rest: &str| {
        rest.split('%')
            .next()
            .is_some_and(|it| it.parse::<f64>().is_ok_and(|it| it > 0.0))
    };
    assert!(!absent.split("Matched: ").any(is_matched), "{absent}");
}

// promise: Profiles: A process that is stopped is profiled: it waits, and that is said
#[test]
fn stopped_processes_are_profiled() {
    use nix::sys::signal::{Signal, kill};
    use nix::unistd::Pid;

    let mut target = Talker::start(&fixture("turns.pie"));
    let pid = target.pid();
    kill(Pid::from_raw(pid), Signal::SIGSTOP).unwrap();
    test_support::eventually("it is stopped", || {
        (test_support::process::state(pid) == Some('T')).then_some(())
    });
    let mut tool = command([
        "profile",
        "-json",
        "-for",
        "300ms",
        "-pid",
        &pid.to_string(),
    ]);
    let profile = run_command(&mut tool).json();
    let stacks = profile["stacks"].as_array().unwrap();
    assert!(
        !stacks.is_empty() && stacks.iter().all(|it| it["state"] == "stopped"),
        "{profile}"
    );
    assert_eq!(stacks[0]["frames"][0], "[stopped]");
    assert_eq!(test_support::process::state(pid), Some('T'));
    kill(Pid::from_raw(pid), Signal::SIGCONT).unwrap();
    target.ask("turns 1", "turned");
}
