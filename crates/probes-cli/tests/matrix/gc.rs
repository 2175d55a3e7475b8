//! `gc`, compared with what the program's own consumer of runtime events reads.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::time::Duration;

use nix::time::{ClockId, clock_gettime};
use probes_lib::{Options, RingEntry, RuntimeEventKind, RuntimeEvents, Target};
use test_support::{Scratch, Talker, as_nobody, program_forms};

use crate::chroot::{ChrootProgram, Isolation};
use crate::events::own_lines;
use crate::support::{Directory, command, run};

/// What events of the program's own consumer add up to: the ends of each phase, and over all domains the count and
/// sum of the outermost ones, and what was allocated and promoted.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Sums {
    pub(crate) phases: BTreeMap<String, u64>,
    pub(crate) pauses: (u64, u64),
    pub(crate) bytes: (u64, u64),
}

pub(crate) fn sums(lines: &[String]) -> Sums {
    let mut sums = Sums::default();
    let mut open: BTreeMap<&str, Vec<u64>> = BTreeMap::new();
    for line in lines {
        let words: Vec<&str> = line.split(' ').collect();
        let ["event", domain, time, what, rest @ ..] = words.as_slice() else {
            panic!("{line}");
        };
        let time: u64 = time.parse().unwrap();
        let open = open.entry(domain).or_default();
        match (*what, rest) {
            (_, ["domain_condition_wait"]) => {}
            ("begin", _) => open.push(time),
            ("end", [phase]) => {
                // Events were switched on inside of some phases.
                let Some(began) = open.pop() else { continue };
                *sums.phases.entry((*phase).to_owned()).or_default() += 1;
                if open.is_empty() {
                    sums.pauses.0 += 1;
                    sums.pauses.1 += time - began;
                }
            }
            ("counter", ["minor_allocated", bytes]) => {
                sums.bytes.0 += bytes.parse::<u64>().unwrap();
            }
            ("counter", ["minor_promoted", bytes]) => {
                sums.bytes.1 += bytes.parse::<u64>().unwrap();
            }
            _ => {}
        }
    }
    sums
}

// promise: Runtime events: Pauses, their sum, phases and allocated bytes of `gc` are exactly those of the program's own events
//    (4 programs in each chroot)
#[test]
fn figures_equal_sums_of_the_own_consumer() {
    for isolation in Isolation::ALL {
        for file in program_forms("ocaml5/events") {
            let mut program = ChrootProgram::start(isolation, &file, &[]);
            let pid = program.pid;
            program.talker.ask("start", "started");
            let line = format!("gc -json -pid {pid} -interval 20ms -over 1ns");
            let mut tool = Talker::spawn(&mut command(line.split(' ')));
            let begun = tool.line().expect("it has begun");
            assert!(begun.starts_with("{\"type\":\"gc\""), "{begun}");
            program.talker.ask("work 3 10", "worked");
            let expected = sums(&own_lines(&mut program));
            program.end();
            let (mut last, mut long) = (begun, (0, 0));
            while let Some(line) = tool.line() {
                let object = crate::support::object(&line);
                if object["type"] == "gc_pause" {
                    long.0 += 1;
                    long.1 += object["ns"].as_u64().unwrap();
                    let first = &object["phases"][0];
                    assert_eq!((&first["depth"], &first["ns"]), (&0.into(), &object["ns"]));
                } else {
                    last = line;
                }
            }
            assert!(tool.guard().wait().success());
            let report = crate::support::object(&last);
            assert_eq!(report["at"], serde_json::Value::Null);
            let number = |name: &str| report[name].as_u64().unwrap();
            let phases = report["phases"].as_array().unwrap().iter();
            let phases = phases.map(|it| {
                let phase = it["phase"].as_str().unwrap().to_owned();
                (phase, it["count"].as_u64().unwrap())
            });
            let pauses = &report["pauses"];
            let pauses = ["count", "total_ns"].map(|name| pauses[name].as_u64().unwrap());
            let found = Sums {
                phases: phases.collect(),
                pauses: pauses.into(),
                bytes: (number("allocated_bytes"), number("promoted_bytes")),
            };
            assert_eq!(found, expected, "{isolation:?} {}", file.display());
            assert_eq!(number("lost_words"), 0);
            assert!(expected.bytes.0 > expected.bytes.1 && expected.bytes.1 > 0);
            // Pauses of at most a nanosecond are not longer than one.
            assert!(long.0 <= pauses[0] && long.1 <= pauses[1] && long.1 + pauses[0] >= pauses[1]);
        }
    }
}

/// Lets a program collect until the tool has exited; returns what this has printed.
pub(crate) fn collect_until_exit(program: &mut ChrootProgram, mut tool: Talker) -> Output {
    test_support::eventually("the tool has exited", || {
        program.talker.ask("work 2 5", "worked");
        (!tool.guard().is_running()).then_some(())
    });
    let mut out = String::new();
    while let Some(line) = tool.line() {
        out += &(line + "\n");
    }
    let errors = tool.guard().child().stderr.take().unwrap();
    let err = std::io::read_to_string(errors).unwrap();
    let is_success = tool.guard().wait().success();
    Output {
        is_success,
        out,
        err,
    }
}

pub(crate) struct Output {
    pub(crate) is_success: bool,
    pub(crate) out: String,
    pub(crate) err: String,
}

fn gc(pid: i32, flags: &str) -> Talker {
    let line = format!("gc -pid {pid} {flags}");
    let mut command = command(line.split_ascii_whitespace());
    Talker::spawn(command.stderr(Stdio::piped()))
}

/// Whether a program writes events while it collects, and whether their file has a name.
pub(crate) fn writes_events(program: &mut ChrootProgram) -> (bool, bool) {
    let maps = std::fs::read_to_string(format!("/proc/{}/maps", program.pid)).unwrap();
    let ring = maps.lines().find(|line| line.contains(".events"));
    let has_name = ring.is_some_and(|line| !line.ends_with("(deleted)"));
    let Ok(mut events) = RuntimeEvents::of_process(program.pid) else {
        assert_eq!(ring, None);
        return (false, false);
    };
    program.talker.ask("work 2 5", "worked");
    let mut found = false;
    events.read(|_| found = true).unwrap();
    (found, has_name)
}

// promise: Runtime events: `gc` switches them on in a program that collects in several domains, and off again, however it ends
//    (4 programs × 3 ends in each chroot)
#[test]
fn events_are_switched_on_and_off() {
    for isolation in Isolation::ALL {
        for file in program_forms("ocaml5/events") {
            let mut program = ChrootProgram::start(isolation, &file, &[]);
            let pid = program.pid;
            for round in 0..3 {
                let mut tool = gc(pid, "-json -interval 20ms");
                // However busy the machine is.
                loop {
                    let line = collect_until_line(&mut program, &mut tool);
                    let so_far = crate::support::object(&line);
                    let domains = so_far["domains"].as_array().unwrap().iter();
                    let last = domains.map(|it| it["stop_the_world"]["last"].as_u64().unwrap());
                    if last.sum::<u64>() > 0 && so_far["allocated_bytes"].as_u64() > Some(0) {
                        break;
                    }
                }
                signal(tool.pid(), "INT");
                let output = collect_until_exit(&mut program, tool);
                assert!(output.is_success, "{}", output.err);
                let on = "to switch runtime events on";
                assert!(output.err.contains(on), "{round}: {}", output.err);
                let report = crate::support::object(output.out.lines().last().unwrap());
                assert_eq!(report["at"], serde_json::Value::Null);
                let count = report["pauses"]["count"].as_u64().unwrap();
                assert!(count > 0 && report["allocated_bytes"].as_u64().unwrap() > 0);
                let domains = report["domains"].as_array().unwrap().iter();
                // Also if it was in a pause when they were switched off the last time.
                let mut counts = domains.clone().map(|it| it["count"].as_u64().unwrap());
                assert!(counts.next() > Some(0), "{report}");
                let stw: Vec<_> = domains.map(|it| &it["stop_the_world"]).collect();
                let sum =
                    |of: fn(&serde_json::Value) -> u64| stw.iter().map(|it| of(it)).sum::<u64>();
                assert!(sum(|it| it["led"].as_u64().unwrap()) > 0);
                let joined = sum(|it| it["late"]["count"].as_u64().unwrap());
                let last = sum(|it| it["last"].as_u64().unwrap());
                assert!(joined >= last && last > 0, "{joined} {last}");
                assert_eq!(writes_events(&mut program), (false, false));
            }
            for (end, next) in [
                ("INT", ""),
                ("KILL", "count -fn caml_garbage_collection -for 1ms"),
                // It cleans first, and then waits in vain for the program to allocate.
                ("KILL", "count -events minor -for 1ms"),
            ] {
                let mut tool = gc(pid, "-interval 10ms");
                let first = collect_until_line(&mut program, &mut tool);
                assert!(first.contains(" all count "), "{first}");
                signal(tool.pid(), end);
                assert_eq!(tool.guard().wait().success(), end == "INT");
                if end == "KILL" {
                    assert_eq!(writes_events(&mut program), (true, false));
                    let next = run(&format!("{next} -pid {pid}"));
                    let is_idle = next.stderr.contains("which it has not done meanwhile");
                    assert!(next.code == Some(0) || is_idle, "{next:?}");
                }
                assert_eq!(writes_events(&mut program), (false, false), "{end}");
            }
            program.end();
        }
    }
}

// promise: Runtime events: A command whose events were switched on by another one says that they went off with it (2 commands)
#[test]
fn events_switched_off_meanwhile_are_reported() {
    let [file, _] = program_forms("ocaml5/events");
    let mut program = ChrootProgram::start(Isolation::Chroot, &file, &[]);
    let mut first = gc(program.pid, "-interval 10ms");
    collect_until_line(&mut program, &mut first);
    let others = ["gc", "count -events minor -json"].map(|start| {
        let line = format!("{start} -interval 10ms -pid {}", program.pid);
        let mut command = command(line.split(' '));
        let mut other = Talker::spawn(command.stderr(Stdio::piped()));
        collect_until_line(&mut program, &mut other);
        other
    });
    signal(first.pid(), "INT");
    assert!(first.guard().wait().success());
    for other in others {
        signal(other.pid(), "INT");
        let output = collect_until_exit(&mut program, other);
        assert!(output.is_success, "{}", output.err);
        let why = "writes no runtime events any more";
        assert!(output.err.contains(why), "{}", output.err);
    }
    program.end();
}

/// Lets a program collect until the tool has printed a line.
pub(crate) fn collect_until_line(program: &mut ChrootProgram, tool: &mut Talker) -> String {
    test_support::eventually("the tool prints a line", || {
        program.talker.ask("work 2 5", "worked");
        tool.line_within(Duration::from_millis(1))
    })
}

#[test]
fn paused_events_are_paused_again() {
    let [file, _] = program_forms("ocaml5/events");
    let mut program = ChrootProgram::start(Isolation::Chroot, &file, &[]);
    program.talker.ask("start", "started");
    // The program pauses its events before.
    own_lines(&mut program);
    assert_eq!(writes_events(&mut program), (false, true));
    let mut tool = gc(program.pid, "-json -interval 20ms");
    loop {
        let line = collect_until_line(&mut program, &mut tool);
        if crate::support::object(&line)["pauses"]["count"].as_u64() > Some(0) {
            break;
        }
    }
    signal(tool.pid(), "INT");
    let output = collect_until_exit(&mut program, tool);
    assert!(output.is_success, "{}", output.err);
    assert_eq!(writes_events(&mut program), (false, true));
    program.end();
}

/// Interrupts a tool, and returns what it has said.
fn said_by(program: &mut ChrootProgram, tool: Talker) -> String {
    signal(tool.pid(), "INT");
    let output = collect_until_exit(program, tool);
    assert!(output.is_success, "{}", output.err);
    output.err
}

// promise: Runtime events: Where a program pauses its events while they are read, a warning says so, and they can be switched on again
//    (3 times)
#[test]
fn pauses_by_the_program_are_reported() {
    let [file, _] = program_forms("ocaml5/events");
    let mut program = ChrootProgram::start(Isolation::Chroot, &file, &[]);
    let pid = program.pid;
    for _ in 0..2 {
        let mut tool = gc(pid, "-interval 10ms");
        collect_until_line(&mut program, &mut tool);
        program.talker.ask("pause", "paused");
        let said = said_by(&mut program, tool);
        assert!(said.contains("writes no runtime events any more"), "{said}");
        assert_eq!(writes_events(&mut program), (false, false));
    }
    program.end();
    let mut program = ChrootProgram::start(Isolation::Chroot, &file, &[]);
    program.talker.ask("start", "started");
    let mut tool = gc(program.pid, "-interval 10ms");
    collect_until_line(&mut program, &mut tool);
    program.talker.ask("pause", "paused");
    program.talker.ask("resume", "resumed");
    let said = said_by(&mut program, tool);
    let why = "the program has paused and resumed its runtime events";
    assert!(said.contains(why), "{said}");
    program.end();
}

// promise: Runtime events: If the directory of the file is removed before events are on, they are not switched on, and the program runs on
//    (before `gc`, and while it waits)
#[test]
fn program_without_its_directory_runs_on() {
    let [file, _] = program_forms("ocaml5/events");
    let chroot = std::env::var("OCAML_PROBES_CHROOT").unwrap();
    for waits in [false, true] {
        let mut program = ChrootProgram::start(Isolation::Chroot, &file, &[]);
        let name = format!("/tmp/directory-{}", program.pid);
        let directory = std::path::PathBuf::from(format!("{chroot}{name}"));
        std::fs::create_dir(&directory).unwrap();
        program.talker.ask(&format!("chdir {name}"), "changed");
        let remove = || std::fs::remove_dir(&directory).unwrap();
        if !waits {
            remove();
        }
        let mut tool = gc(program.pid, "-json -for 60s");
        let errors = tool.guard().child().stderr.take().unwrap();
        let mut errors = std::io::BufReader::new(errors);
        let mut until = |what: &str| {
            let mut said = String::new();
            while !said.contains(what) {
                let read = std::io::BufRead::read_line(&mut errors, &mut said).unwrap();
                assert!(read > 0, "{said}");
            }
        };
        if waits {
            until("waiting for the process to allocate");
            remove();
        }
        until("has been removed: the collector's functions are timed instead");
        // Once they are observed.
        until("stopped ");
        program.talker.ask("work 2 5", "worked");
        signal(tool.pid(), "INT");
        let report = crate::support::object(&tool.line().unwrap());
        assert_eq!(report["from"], "functions", "{report}");
        assert!(tool.guard().wait().success());
        program.talker.ask("work 2 5", "worked");
        program.end();
    }
}

// promise: Runtime events: If the tool is killed while it waits, the file that the program creates then loses its name when it is cleaned;
//    and so it does if the program goes to another directory meanwhile
#[test]
fn late_files_lose_their_names() {
    let [file, _] = program_forms("ocaml5/events");
    for ends in ["KILL", "INT"] {
        let mut program = ChrootProgram::start(Isolation::Chroot, &file, &[]);
        let pid = program.pid;
        let mut tool = gc(pid, "-interval 10ms");
        test_support::eventually("it is observed", || {
            let info = run(&format!("info -pid {pid}"));
            info.stderr.contains("observed").then_some(())
        });
        if ends == "KILL" {
            signal(tool.pid(), ends);
            assert!(!tool.guard().wait().success());
            assert_eq!(writes_events(&mut program), (false, false));
            program.talker.ask("work 2 5", "worked");
            assert_eq!(writes_events(&mut program), (true, true));
            run(&format!("observe -clean -pid {pid}")).answer();
        } else {
            program.talker.ask("chdir /tmp", "changed");
            collect_until_line(&mut program, &mut tool);
            assert_eq!(writes_events(&mut program), (true, false));
            said_by(&mut program, tool);
        }
        assert_eq!(writes_events(&mut program), (false, false), "{ends}");
        program.end();
    }
}

#[test]
fn events_that_come_on_late_are_off() {
    let [file, _] = program_forms("ocaml5/events");
    for _ in 0..20 {
        let mut program = ChrootProgram::start(Isolation::Chroot, &file, &[]);
        let target = Target::open_any(program.pid).unwrap();
        program.talker.send("work 2 20");
        let switched = target.switch_on_events(Options::default()).unwrap();
        switched.unwrap().switch_off().unwrap();
        program.talker.expect("worked");
        assert_eq!(writes_events(&mut program), (false, false));
        assert!(!target.check_events().unwrap());
        program.end();
    }
}

// promise: Runtime events: A phase that was under way when events were switched off is none that is under way when they are on again, for any reader
//    (3 such phases)
#[test]
fn phases_end_where_events_are_off() {
    let [file, _] = program_forms("ocaml5/events");
    let mut program = ChrootProgram::start(Isolation::Chroot, &file, &[]);
    let pid = program.pid;
    let target = Target::open_any(pid).unwrap();
    let mut left = 0;
    for _ in 0..100 {
        // It goes on for longer than the events are on.
        program.talker.send("work 3 300");
        let off = clock_gettime(ClockId::CLOCK_MONOTONIC).unwrap();
        let off = Duration::from(off).as_nanos() as u64;
        let switched = target.switch_on_events(Options::default()).unwrap();
        let mut switched = switched.unwrap();
        test_support::eventually("events are on", || switched.is_on().unwrap().then_some(()));
        let joined = RuntimeEvents::of_process(pid).unwrap();
        for phase in joined.under_way() {
            assert!(phase.began > off, "{phase:?}");
        }
        left += usize::from(has_open_phase_before(joined.from_start(), off));
        switched.switch_off().unwrap();
        program.talker.expect("worked");
        if left >= 3 {
            return program.end();
        }
    }
    panic!("{left} phases had begun before events were switched off");
}

/// Whether a phase of some domain that began before `time` has no end before it.
fn has_open_phase_before(mut events: RuntimeEvents, time: u64) -> bool {
    let mut depths: BTreeMap<u32, i64> = BTreeMap::new();
    let read = events.read(|entry| {
        let RingEntry::Event {
            domain,
            time: at,
            kind,
        } = entry
        else {
            return;
        };
        let change = match kind {
            RuntimeEventKind::Begin(_) => 1,
            RuntimeEventKind::End(_) => -1,
            _ => 0,
        };
        if at < time {
            let depth = depths.entry(domain).or_default();
            *depth = (*depth + change).max(0);
        }
    });
    read.unwrap();
    depths.values().any(|&depth| depth > 0)
}

#[test]
fn idle_program_is_waited_for() {
    let [file, _] = program_forms("ocaml5/events");
    let mut program = ChrootProgram::start(Isolation::Chroot, &file, &[]);
    let pid = program.pid;
    let mut tool = gc(pid, "-for 400ms");
    assert_eq!(tool.line(), None);
    assert!(!tool.guard().wait().success());
    let errors = tool.guard().child().stderr.take().unwrap();
    let error = std::io::read_to_string(errors).unwrap();
    let why = format!(
        "process {pid} writes no runtime events: they are switched on when it allocates or collects, \
         which it has not done meanwhile"
    );
    assert!(error.contains(&why), "{error}");
    assert!(
        error.contains("waiting for the process to allocate"),
        "{error}"
    );
    assert!(error.contains("hint: "), "{error}");
    program.talker.ask("work 2 5", "worked");
    assert_eq!(writes_events(&mut program), (false, false));
    program.end();
}

// promise: Runtime events: Events come on at the next allocation of a program, long before its minor heap is full (2 programs in each
//    chroot)
#[test]
fn next_allocation_switches_events_on() {
    for file in program_forms("service") {
        // Every 100 ms, it allocates some words.
        let program = ChrootProgram::start(Isolation::Chroot, &file, &["100"]);
        let mut tool = gc(program.pid, "-json -for 5s");
        let report = crate::support::object(&tool.line().unwrap());
        assert_eq!(report["from"], "events", "{report}");
        assert!(tool.guard().wait().success());
        drop(program);
    }
}

// promise: Runtime events: A program whose runtime could not create the file is refused, and runs on
//    (6 reasons in each chroot)
#[test]
fn program_that_cannot_create_the_file_is_refused() {
    for (setup, variable, why) in [
        ("", "/none", "cannot be opened"),
        (
            "mount -t tmpfs -o size=1m none $0/mnt",
            "/mnt",
            "has 1048576 free",
        ),
        ("mount -t tmpfs -o ro none $0/mnt", "/mnt", "read-only"),
        ("ulimit -f 1000", "/tmp", "RLIMIT_FSIZE is 512000"),
        (
            "mount -t tmpfs none $0/mnt",
            "/mnt",
            "no file can be created in /mnt, where theirs is: Operation not permitted",
        ),
        (
            "mount -t tmpfs none $0/mnt; for i in 1 2 3 4 5 6 7 8 9; do touch $0/mnt/$i.events; done",
            "/mnt",
            "already has a file",
        ),
    ] {
        let (mut talker, pid) = start_after(setup, variable);
        if why.contains("not permitted") {
            let mut chattr = Command::new("chattr");
            let changed = chattr.arg("+i").arg(format!("/proc/{pid}/root/mnt"));
            assert!(changed.status().unwrap().success());
        }
        let shown = run(&format!("gc -json -pid {pid} -for 10ms"));
        let error = shown.stderr.clone();
        let cannot = "cannot be switched on while it runs: ";
        assert!(error.contains(cannot), "{error}");
        assert!(error.contains(why), "{why}: {error}");
        let report = crate::support::object(&shown.answer());
        assert_eq!(report["from"], "functions");
        talker.ask("work 2 5", "worked");
        talker.close_input();
        assert!(talker.guard().wait().success(), "{why}");
    }
}

/// Starts a program with its file in `directory`, in a chroot and namespaces of its own, after the commands of
/// `setup`, for which `$0` is the chroot; returns it with its pid.
fn start_after(setup: &str, directory: &str) -> (Talker, i32) {
    let [file, _] = program_forms("ocaml5/events");
    let inside = crate::chroot::inside(&file);
    let chroot = std::env::var("OCAML_PROBES_CHROOT").unwrap();
    let line = format!("{setup}; exec chroot $0 {}", inside.display());
    let mut unshare = test_support::container::unshare();
    unshare.args(["sh", "-ec", line.trim_start_matches("; "), &chroot]);
    unshare.env("OCAML_RUNTIME_EVENTS_DIR", directory);
    let mut talker = Talker::spawn(&mut unshare);
    talker.expect("ready");
    let pid = test_support::container::only_child(talker.pid());
    (talker, pid)
}

// promise: Runtime events: If the disk of their file gets full, events are switched off with an error, and the program runs on
#[test]
fn full_disk_switches_events_off() {
    let (mut program, pid) = start_after("mount -t tmpfs -o size=128m none $0/mnt", "/mnt");
    let mut tool = gc(pid, "-interval 20ms");
    test_support::eventually("events are on", || {
        program.ask("work 2 5", "worked");
        tool.line_within(Duration::from_millis(1))
    });
    // Meanwhile it writes none.
    let file = format!("/proc/{pid}/root/mnt/file");
    let mut file = std::fs::File::create(file).unwrap();
    let error = std::io::copy(&mut std::io::repeat(1), &mut file).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::StorageFull);
    test_support::eventually("the tool has exited", || {
        (!tool.guard().is_running()).then_some(())
    });
    assert!(!tool.guard().wait().success());
    let errors = tool.guard().child().stderr.take().unwrap();
    let said = std::io::read_to_string(errors).unwrap();
    assert!(said.contains("bytes free on the disk"), "{said}");
    program.ask("work 2 5", "worked");
    let error = Target::open_any(pid).unwrap().check_events().unwrap_err();
    assert!(
        error
            .to_string()
            .contains("bytes are free on the disk of their file"),
        "{error}"
    );
    program.close_input();
    assert!(program.guard().wait().success());
}

// promise: Runtime events: `gc -prog` reads the events of a program from the first, and exits with its status
//    (2 programs in each chroot)
#[test]
fn program_is_read_from_its_start() {
    let chroot = std::env::var("OCAML_PROBES_CHROOT").unwrap();
    for file in program_forms("ocaml5/events") {
        // Its directory for temporary files has to be in the chroot as well.
        let script = "mkdir -p \"$0$OCAML_RUNTIME_EVENTS_DIR\" && chroot \"$0\" \"$1\" && \
                      rm -r \"$0$OCAML_RUNTIME_EVENTS_DIR\"; exit 7";
        let exec = script.replace("&& chroot", "&& exec chroot");
        for (script, code) in [(script, 7), (&exec, 0)] {
            let mut tool = command(["gc", "-json", "-prog", "sh", "--", "-c", script, &chroot]);
            tool.arg(crate::chroot::inside(&file));
            let mut tool = Talker::spawn(tool.stderr(Stdio::piped()));
            tool.expect("ready");
            tool.ask("work 2 5", "worked");
            if code == 0 {
                // Outside of the chroot, nothing is left of the file once the program has exited.
                test_support::eventually("the events are read", || {
                    let open = test_support::process::descriptors(tool.pid());
                    open.iter().any(|it| it.contains(".events")).then_some(())
                });
            }
            tool.close_input();
            let status = tool.guard().wait().code();
            let errors = tool.guard().child().stderr.take().unwrap();
            let said = std::io::read_to_string(errors).unwrap();
            assert_eq!(status, Some(code), "{said}");
            if code == 7 {
                // It is a child of the program.
                assert!(said.contains("sh has written no runtime events"), "{said}");
                continue;
            }
            let report = crate::support::object(&said);
            assert!(report["pauses"]["count"].as_u64().unwrap() > 0, "{said}");
            assert!(report["allocated_bytes"].as_u64().unwrap() > 0, "{said}");
            // The program preserves its file, for a tool that is too late to open it.
            let name = said_directory(&chroot);
            std::fs::remove_dir_all(name).unwrap();
        }
    }
}

// promise: Runtime events: `trace -gc` reports the collector of a program from the first event, alone, beside what else is observed,
//    and if it exits at once (2 programs × 4 runs in each chroot)
#[test]
fn trace_reports_the_collector_beside_the_rest() {
    for file in program_forms("ocaml5/events") {
        for (flags, rounds) in [("-gc", None), ("-gc -count -fn Events.round", Some(20))] {
            for words in ["", "work 2 5\n"] {
                let scratch = Scratch::new();
                let directory = scratch.file("input");
                let program = crate::chroot::inside(&file);
                let line = format!("trace {flags} -json -prog {}", program.display());
                let line: Vec<&str> = line.split(' ').collect();
                let directory = directory.parent().unwrap();
                let mut tool = crate::chroot::tool_inside(directory, &line, words);
                let run = crate::support::run_command(&mut tool);
                assert_eq!(run.code, Some(0), "{}", run.stderr);
                assert!(run.stdout.starts_with("ready"), "{}", run.stdout);
                let said = run.said();
                let of_type = |name| said.iter().find(|it| it["type"] == name);
                let report = of_type("gc").unwrap();
                assert_eq!(report["from"], "events");
                let bytes = report["allocated_bytes"].as_u64().unwrap();
                assert_eq!(bytes > 0, !words.is_empty(), "{report}");
                let hits = of_type("count").map(|it| &it["functions"][0]["hits"]);
                let expected = rounds.map(|rounds| if words.is_empty() { 0 } else { rounds });
                assert_eq!(hits.map(|it| it.as_u64().unwrap()), expected, "{said:?}");
            }
        }
    }
}

/// The directory of events that is left in a chroot.
fn said_directory(chroot: &str) -> std::path::PathBuf {
    let temporary = std::env::temp_dir();
    let directory = std::path::Path::new(chroot).join(temporary.strip_prefix("/").unwrap());
    let entries = std::fs::read_dir(directory).unwrap();
    let mut names = entries.map(|entry| entry.unwrap().path());
    let found = names.find(|path| path.to_string_lossy().contains("ocaml-probes-gc."));
    found.expect("the directory of the events")
}

// promise: Runtime events: Words that were lost are in every form of the output of `gc` (rings of 1,024 words)
#[test]
fn lost_words_are_in_every_output() {
    let [file, _] = program_forms("ocaml5/events");
    for (format, expected) in [
        ("plain", " lost "),
        ("table", "lost words"),
        ("json", "\"lost_words\":"),
    ] {
        let mut program = ChrootProgram::start_with(Isolation::Chroot, &file, &[], "e=10");
        let pid = program.pid;
        program.talker.ask("start", "started");
        let line = format!("gc -format {format} -pid {pid} -interval 20ms");
        let mut tool = Talker::spawn(command(line.split(' ')).stderr(std::process::Stdio::piped()));
        tool.line().expect("it has begun");
        // The tool does not run while more is written than a ring holds.
        signal(tool.pid(), "STOP");
        program.talker.ask("work 2 30", "worked");
        signal(tool.pid(), "CONT");
        program.end();
        let mut output = String::new();
        while let Some(line) = tool.line() {
            output += &(line + "\n");
        }
        assert!(output.contains(expected), "{output}");
        assert!(!output.trim_end().ends_with("lost 0"), "{output}");
        let has_chart = output.contains("pauses:\n") && output.contains("|@");
        assert_eq!(has_chart, format == "table", "{output}");
        let mut warning = String::new();
        let errors = tool.guard().child().stderr.take().unwrap();
        std::io::Read::read_to_string(&mut { errors }, &mut warning).unwrap();
        assert!(
            warning.contains("overwritten before they were read"),
            "{warning}"
        );
        assert!(tool.guard().wait().success());
    }
}

pub(crate) fn signal(pid: i32, name: &str) {
    let sent = std::process::Command::new("kill")
        .args([format!("-{name}"), pid.to_string()])
        .status();
    assert!(sent.unwrap().success());
}

/// Calls of a function, and how long they took in nanoseconds: without other functions in them, and from entry to exit.
#[derive(Debug)]
struct Calls {
    count: u64,
    own: u64,
    whole: u64,
}

/// What `latency -json` says of each function of the collector.
fn calls(latency: &str) -> BTreeMap<String, Calls> {
    let report = crate::support::object(latency.lines().last().unwrap());
    let functions = report["functions"].as_array().unwrap();
    let times = functions.iter().map(|it| {
        let number = |field: &str| it[field].as_u64().unwrap();
        let name = it["name"].as_str().unwrap().to_owned();
        let calls = Calls {
            count: number("count"),
            own: number("self_ns"),
            whole: number("total_ns"),
        };
        (name, calls)
    });
    times.collect()
}

/// Whether the times of so many pauses and calls differ by at most 2 %, apart from what is between an event and a
/// call: 3 us each.
fn agree(count: u64, one: u64, other: u64) -> bool {
    one.abs_diff(other) <= one.max(other) / 50 + 3000 * count
}

// promise: Runtime events: Pauses from events and from the functions of the collector are the same, and their sums within 2 % and 3 us each: all of a
//    program with one domain, and the slices of four (4 programs in each chroot)
#[test]
fn events_and_functions_agree() {
    /// A thread that loses its processor between an event and the entry of a function is measured by one of them.
    const TRIES: usize = 20;
    let measured = |pid: i32, program: &mut Talker, work: &str, answer: &str| {
        let flags = format!("-json -self -gc minor,slice,major,compact -pid {pid}");
        let mut latency = command(["latency"].into_iter().chain(flags.split(' ')));
        let mut latency = Talker::spawn(latency.stderr(Stdio::piped()));
        let mut said = BufReader::new(latency.guard().child().stderr.take().unwrap());
        let mut line = String::new();
        while !line.contains("stopped ") {
            line.clear();
            assert!(said.read_line(&mut line).unwrap() > 0);
        }
        let mut gc = gc(pid, "-json -interval 300ms");
        assert!(gc.line().is_some(), "it has begun");
        program.ask(work, answer);
        signal(gc.pid(), "INT");
        signal(latency.pid(), "INT");
        let last = |tool: &mut Talker| std::iter::from_fn(|| tool.line()).last().unwrap();
        (
            crate::support::object(&last(&mut gc)),
            calls(&last(&mut latency)),
        )
    };
    let events = &program_forms("ocaml5/events")[0];
    let directory = events.parent().unwrap().parent().unwrap();
    for name in ["calls.exe", "calls_nopie.exe"] {
        let mut program = Command::new("chroot");
        program.arg(std::env::var_os("OCAML_PROBES_CHROOT").unwrap());
        program.arg(crate::chroot::inside(&directory.join(name)));
        program.env("OCAML_RUNTIME_EVENTS_START", "1");
        program.env("OCAML_RUNTIME_EVENTS_DIR", "/tmp");
        let mut program = Talker::spawn(&mut program);
        program.expect("ready");
        let pid = program.pid();
        let mut tries = 0..TRIES;
        let agreed = tries.find(|_| {
            let (gc, times) = measured(pid, &mut program, "run 1 3000000", "calls");
            let (count, total) = times
                .values()
                .fold((0, 0), |sum, it| (sum.0 + it.count, sum.1 + it.own));
            assert!(count > 20, "{times:?}");
            assert_eq!(gc["pauses"]["count"], count, "{gc} {times:?}");
            agree(count, gc["pauses"]["total_ns"].as_u64().unwrap(), total)
        });
        // It removes its file when it exits.
        program.close_input();
        assert!(program.guard().wait().success());
        assert!(agreed.is_some(), "{name}");
    }
    for file in program_forms("ocaml5/events") {
        let mut program = ChrootProgram::start_with(Isolation::Chroot, &file, &[], "e=20");
        program.talker.ask("start", "started");
        let mut tries = 0..TRIES;
        let agreed = tries.find(|_| {
            let (gc, times) = measured(program.pid, &mut program.talker, "work 3 60", "worked");
            let phases = gc["phases"].as_array().unwrap();
            let slices = phases.iter().find(|it| it["phase"] == "major").unwrap();
            let calls = &times["caml_major_collection_slice"];
            assert_eq!(slices["count"], calls.count, "{gc} {times:?}");
            agree(
                calls.count,
                slices["total_ns"].as_u64().unwrap(),
                calls.whole,
            )
        });
        assert!(agreed.is_some(), "{}", file.display());
        program.end();
    }
}

// promise: Runtime events: What a program writes while the figures so far are not taken is in those at the end (2 commands in each
//    chroot)
#[test]
fn figures_include_events_while_output_waits() {
    let file = &program_forms("ocaml5/events")[0];
    for start in ["gc", "count -events minor"] {
        let mut program = ChrootProgram::start_with(Isolation::Chroot, file, &[], "e=20");
        program.talker.ask("start", "started");
        let line = format!("{start} -json -interval 1ms -pid {}", program.pid);
        let mut tool = command(line.split(' '));
        let mut tool = Talker::spawn(tool.stderr(Stdio::piped()));
        tool.line().expect("it has begun");
        // More lines than fit into a pipe.
        for _ in 0..20 {
            program.talker.ask("work 2 20", "worked");
        }
        signal(tool.pid(), "INT");
        let last = std::iter::from_fn(|| tool.line()).last().unwrap();
        let expected = sums(&own_lines(&mut program));
        let report = crate::support::object(&last);
        let minor = match report["phases"].as_array() {
            Some(phases) => &phases.iter().find(|it| it["phase"] == "minor").unwrap()["count"],
            None => &report["events"][0]["hits"],
        };
        assert_eq!(*minor, expected.phases["minor"], "{report}");
        program.end();
    }
}

// promise: Runtime events: Events of a process of another user are refused, and it writes on; a file that an earlier process of its pid has
//    left is neither read nor changed (4 commands in each chroot)
#[test]
fn files_of_others_are_not_read() {
    let file = &program_forms("ocaml5/events")[0];
    let mut program = ChrootProgram::start(Isolation::Chroot, file, &[]);
    let pid = program.pid;
    // The one that it would have in the directory that it works in, which is ours.
    let directory = std::fs::read_link(format!("/proc/{pid}/cwd")).unwrap();
    let left = directory.join(format!("{pid}.events"));
    std::fs::write(&left, [1; 4096]).unwrap();
    let not_on = run(&format!("watch -events all -pid {pid}")).failure();
    let said = run(&format!("gc -pid {pid} -for 10ms"));
    let bytes = std::fs::read(&left).unwrap();
    std::fs::remove_file(&left).unwrap();
    assert_eq!(bytes, [1; 4096]);
    assert!(not_on.contains(&format!("process {pid} ")), "{not_on}");
    assert!(not_on.contains("runtime events"), "{not_on}");
    assert!(said.stderr.contains("already has a file"), "{said:?}");
    program.talker.ask("start", "started");
    // The user `nobody` possibly cannot enter the build directory.
    let directory = Directory::new("nobody");
    let tool = directory.copy(env!("CARGO_BIN_EXE_ocaml-probes").as_ref(), "ocaml-probes");
    for flags in ["gc -for 10ms", "watch -events all -for 10ms"] {
        let mut nobody = as_nobody(&tool);
        nobody.args(flags.split(' ')).arg(format!("-pid={pid}"));
        let error = crate::support::run_command(&mut nobody).failure();
        assert!(
            error.contains(" belongs to uid 0 (root)"),
            "{flags}: {error}"
        );
        assert!(error.ends_with("\nhint: use sudo\n"), "{flags}: {error}");
    }
    program.talker.ask("work 2 5", "worked");
    assert!(sums(&own_lines(&mut program)).pauses.0 > 0);
    program.end();
}
