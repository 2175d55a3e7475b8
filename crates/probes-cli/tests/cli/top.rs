//! `top`: a live screen, read back from a terminal.

use std::process::{Command, Stdio};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use test_support::process::state;
use test_support::tmux::Terminal;
use test_support::{Guard, Scratch, Talker, eventually, fixture, fixture_forms, program};

use crate::observers::wait_for_reading;
use crate::restore::strace;
use crate::support::{both_forms, is_observed, run, run_command, states};

const TOOL: &str = env!("CARGO_BIN_EXE_ocaml-probes");

/// The line of a probe, word by word.
fn row(screen: &str, name: &str) -> Vec<String> {
    let mut lines = screen.lines().map(str::split_ascii_whitespace);
    let line = lines.find(|words| words.clone().next() == Some(name));
    line.into_iter().flatten().map(str::to_owned).collect()
}

/// The probes of a screen from top to bottom.
fn names(screen: &str) -> Vec<&str> {
    let lines = screen.lines().skip_while(|line| !line.starts_with("PROBE"));
    let names = lines.skip(1).map(|line| line.split(' ').next().unwrap());
    names.take_while(|name| !name.is_empty()).collect()
}

/// `top` on a terminal, on which it has shown something. The shell prints a checksum of the
/// terminal's settings before and after it.
struct Top {
    terminal: Terminal,
    pid: i32,
    tool: i32,
}

impl Top {
    fn start(pid: i32, flags: &str) -> Top {
        Top::start_after(pid, flags, "")
    }

    /// The same, after the shell has executed the command `before`.
    fn start_after(pid: i32, flags: &str, before: &str) -> Top {
        Top::start_shown(pid, flags, before, &format!(", process {pid}"))
    }

    /// The same, once `shown` is on the terminal.
    fn start_shown(pid: i32, flags: &str, before: &str, shown: &str) -> Top {
        let terminal = Terminal::open(100, 30);
        terminal.type_line(&format!(
            "{before} clear; stty -g | md5sum; {TOOL} top -pid {pid} {flags}; echo \"status $?\"; \
             stty -g | md5sum"
        ));
        terminal.wait_for(shown);
        Top {
            tool: terminal.child("ocaml-probes"),
            terminal,
            pid,
        }
    }

    fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.tool), signal).unwrap();
    }

    /// Waits until it has exited with 0; returns what is on the terminal then, without the shell's
    /// own lines.
    fn wait_for_exit(&self) -> String {
        let screen = self.terminal.wait_until("its status", |screen| {
            screen.contains("status 0") && screen.matches("  -").count() == 2
        });
        let sums: Vec<&str> = screen.lines().filter(|it| it.ends_with("  -")).collect();
        assert_eq!(sums[0], sums[1], "the terminal is set as before");
        let known = self.terminal.format("#{alternate_on} #{cursor_flag}");
        assert_eq!(known, "0 1", "the main screen, and a cursor");
        let said = screen.split(sums[0]).nth(1).unwrap();
        said.split("status").next().unwrap().trim().to_owned()
    }

    /// Waits until the tool has exited, and asserts that it has restored the process.
    fn wait_until_gone(&self) {
        eventually("the tool ends", || {
            matches!(state(self.tool), None | Some('Z')).then_some(())
        });
        assert!(!is_observed(self.pid));
    }
}

#[test]
fn only_hits_that_are_true_are_counted() {
    let mut target = Talker::start(&program("shown"));
    let top = Top::start(
        target.pid(),
        "-interval 10ms -regexp '^(ints|numbered)$' -where 'probe==\"ints\"||int(arg0)==0&&int(arg2)==1'",
    );
    target.ask("hit 10", "done");
    let screen = top
        .terminal
        .wait_until("all hits", |screen| screen.contains(" 10 untyped; by"));
    assert!(screen.contains("2 probes, 0 on; 10 hits, "), "{screen}");
    assert_eq!(row(&screen, "ints")[1..3], ["off", "10"]);
    assert_eq!(row(&screen, "numbered")[1..3], ["off", "0"]);
    top.terminal.press(&["q"]);
    assert_eq!(top.wait_for_exit(), "");
    top.wait_until_gone();
    target.ask("hit 1", "done");
}

// promise: Observations: `top` of several processes has the sum of their hits, switches probes in all of them, and keeps the hits of one
//    that exits
#[test]
fn several_processes_are_one_table() {
    let file = fixture("gen_ocaml.pie");
    let (mut one, mut other) = (Talker::start(&file), Talker::start(&file));
    let pids = [one.pid(), other.pid()];
    let shown = format!(", 2 processes: {}, {}", pids[0], pids[1]);
    let flags = format!("-pid {} -interval 10ms -regexp shared", pids[1]);
    let top = Top::start_shown(pids[0], &flags, "", &shown);
    for _ in 0..10 {
        one.hits();
    }
    for _ in 0..5 {
        other.hits();
    }
    let screen = top.terminal.wait_until("all hits", |screen| {
        screen.contains("1 probe, 0 on; 45 hits, ")
    });
    assert_eq!(row(&screen, "shared")[1..3], ["off", "45"]);
    top.terminal.press(&["e"]);
    top.terminal.wait_for("shared 0 -> 1 in 2 processes");
    for pid in pids {
        assert!(states(pid).contains("shared enabled"));
    }
    drop(other);
    top.terminal
        .wait_for(&format!("{} not read any more", pids[1]));
    one.hits();
    let screen = top
        .terminal
        .wait_until("more hits", |screen| screen.contains("; 48 hits, "));
    assert_eq!(row(&screen, "shared")[1..3], ["on", "48"]);
    top.terminal.press(&["q"]);
    let said = top.wait_for_exit();
    assert!(said.contains("restored: shared"), "{said}");
    top.wait_until_gone();
    assert!(states(pids[0]).contains("shared disabled"));
}

#[test]
fn several_processes_have_rows_by_pid() {
    let file = fixture("gen_ocaml.pie");
    let (mut one, mut other) = (Talker::start(&file), Talker::start(&file));
    let pids = [one.pid(), other.pid()];
    let shown = format!(", 2 processes: {}, {}", pids[0], pids[1]);
    let flags = format!("-pid {} -interval 10ms -regexp shared -by pid", pids[1]);
    let top = Top::start_shown(pids[0], &flags, "", &shown);
    one.hits();
    other.hits();
    other.hits();
    let screen = top
        .terminal
        .wait_until("all hits", |screen| screen.contains("; 9 hits, 0.0/s"));
    for (pid, hits) in pids.into_iter().zip(["3", "6"]) {
        let row = row(&screen, &pid.to_string());
        assert_eq!(row[1..4], ["shared", "off", hits], "{screen}");
    }
    // Sorted by rate or hits, the row of the other process is first.
    top.terminal.press(&["j", "e"]);
    top.terminal.wait_for("shared 0 -> 1");
    assert!(states(pids[1]).contains("shared enabled"));
    assert!(states(pids[0]).contains("shared disabled"));
    top.terminal.press(&["e"]);
    top.terminal.wait_for("shared 1 -> 0");
    drop(other);
    let ended = pids[1];
    top.terminal.wait_for(&format!("{ended} not read any more"));
    top.terminal.press(&["e"]);
    let not_switched = format!("process {ended} is not read any more: shared was not switched");
    top.terminal.wait_for(&not_switched);
    top.terminal.press(&["q"]);
    top.wait_for_exit();
    top.wait_until_gone();
}

#[test]
fn removal_waits_for_no_other_process() {
    let [busy, free] = both_forms("forker").try_into().unwrap();
    let terminal = Terminal::open(100, 30);
    let pids = format!("-pid {} -pid {}", busy.pid(), free.pid());
    terminal.type_line(&format!("clear; {TOOL} top -interval 20ms {pids}"));
    terminal.wait_for("STATE");
    let tracer = strace(busy.pid());
    terminal.press(&["q"]);
    let is_restored = |pid| eventually("it is restored", || (!is_observed(pid)).then_some(()));
    is_restored(free.pid());
    assert!(is_observed(busy.pid()));
    drop(tracer);
    is_restored(busy.pid());
}

#[test]
fn functions_of_several_processes_are_added_up() {
    let files = test_support::program_forms("calls");
    let mut targets = files.map(|file| Talker::start(&file));
    let pids = targets.each_ref().map(Talker::pid);
    let shown = format!(", 2 processes: {}, {}", pids[0], pids[1]);
    let flags = format!("-pid {} -interval 10ms -fn Calls.leaf,Calls.deep", pids[1]);
    let top = Top::start_shown(pids[0], &flags, "", &shown);
    for target in &mut targets {
        target.ask("run 1 100", "calls");
    }
    let screen = top.terminal.wait_until("all hits", |screen| {
        row(screen, "Calls.leaf").contains(&"300".to_owned())
    });
    assert!(screen.contains("2 functions, 2 called; "), "{screen}");
    top.terminal.press(&["q"]);
    assert_eq!(top.wait_for_exit(), "");
    top.wait_until_gone();
}

#[test]
fn probes_are_shown_with_states_hits_and_rates() {
    for mut target in both_forms("gen_ocaml") {
        let pid = target.pid();
        run(&format!("attach -quiet -enable only_alpha -pid {pid}")).answer();
        let top = Top::start(pid, "-interval 10ms");
        for _ in 0..10 {
            target.hits();
        }
        let screen = top.terminal.wait_until("all hits", |screen| {
            screen.contains("2 probes, 1 on; 40 hits, ")
        });
        assert_eq!(row(&screen, "only_alpha")[1..3], ["on", "10"]);
        assert_eq!(row(&screen, "shared")[1..3], ["off", "30"]);
        top.terminal.press(&["q"]);
        assert_eq!(top.wait_for_exit(), "");
        // As it was before.
        assert_eq!(states(pid), "only_alpha enabled\nshared disabled\n");
    }
    let target = Talker::start(&fixture("threads_spin.pie"));
    let top = Top::start(target.pid(), "-interval 100ms -regexp .*");
    let screen = top.terminal.wait_until("rates", |screen| {
        let rows = names(screen).into_iter().map(|name| row(screen, name));
        let mut rows = rows.peekable();
        // On a busy machine, some threads may have had no processor in the last interval.
        let is_fast = |rate: &str| {
            rate.replace(',', "")
                .parse()
                .is_ok_and(|it: f64| it > 1000.0)
        };
        let is_shown =
            |row: Vec<String>| row.len() == 6 && row[5].chars().count() > 3 && is_fast(&row[3]);
        rows.peek().is_some() && rows.all(is_shown)
    });
    let rows: Vec<_> = names(&screen).iter().map(|it| row(&screen, it)).collect();
    let share = |row: &Vec<String>| row[4].trim_end_matches('%').parse::<f64>().unwrap();
    let shares: f64 = rows.iter().map(share).sum();
    assert!((99.0..101.0).contains(&shares), "{screen}");
}

// promise: top: `top -fn` shows the calls of functions and their source lines, of a program without probes (2)
#[test]
fn functions_are_shown_with_source_lines() {
    for file in fixture_forms("calls") {
        let mut target = Talker::start(&file);
        let pid = target.pid();
        let top = Top::start(pid, "-fn leaf,outer,main -interval 50ms");
        target.ask("calls 2 500", "called");
        let shown = |name: &str, hits: &str| {
            let is_shown = |screen: &str| row(screen, name).get(2).is_some_and(|it| it == hits);
            let screen = top.terminal.wait_until("the calls", is_shown);
            assert!(row(&screen, name)[1].starts_with("calls.c:"), "{screen}");
            screen
        };
        shown("leaf", "2,000");
        let screen = shown("outer", "1,000");
        let title = "\n3 functions, 2 called; 3,000 hits, ";
        assert!(screen.contains(title), "{screen}");
        assert!(row(&screen, "main").len() > 3, "{screen}");
        assert!(!row(&screen, "FUNCTION").is_empty(), "{screen}");
        // There is nothing to enable.
        top.terminal.press(&["Down", "e"]);
        top.terminal
            .wait_for("is a function: only probes of OCaml can be enabled or disabled");
        top.terminal.press(&["q"]);
        top.wait_for_exit();
        assert!(!is_observed(pid));
    }
}

#[test]
fn of_many_functions_those_called_are_shown() {
    let mut target = Talker::start(&fixture("calls.pie"));
    let top = Top::start(target.pid(), "-fn '*' -interval 50ms");
    target.ask("calls 1 700", "called");
    let is_shown = |screen: &str| row(screen, "leaf").get(2).is_some_and(|it| it == "1,400");
    let screen = top.terminal.wait_until("the calls", is_shown);
    assert!(row(&screen, "fixture_broken").is_empty(), "{screen}");
    top.terminal.press(&["/", "l", "e", "a", "f", "Enter"]);
    let screen = top.terminal.wait_for(" with \"leaf\"");
    assert!(row(&screen, "outer").is_empty(), "{screen}");
    top.terminal.press(&["q"]);
    top.wait_for_exit();
}

#[test]
fn times_of_pairs_are_shown_below() {
    for file in fixture_forms("timed") {
        let mut target = Talker::start(&file);
        let top = Top::start(
            target.pid(),
            "-interval 10ms -probe start -pair start,stop -pair start,start",
        );
        target.ask("do (.)(.)(.)", "done");
        let screen = top.terminal.wait_until("all times", |screen| {
            let count = |name, column: usize| row(screen, name).get(column).cloned();
            let counts = [
                count("start", 2),
                count("start,stop", 1),
                count("start,start", 1),
            ];
            counts.map(Option::unwrap_or_default) == ["3", "3", "2"]
        });
        assert_eq!(names(&screen), ["start"]);
        // Each at least a millisecond, and not longer than we wait. A time that has come while they were read
        // may be in their number, and not yet in their sum.
        let milliseconds = |screen: &str| -> Vec<f64> {
            let times = row(screen, "start,stop");
            let times = times.get(2..).unwrap_or_default().chunks(2);
            let of_time = |time: &[String]| {
                let factor = match &*time[1] {
                    "us" => 1e-3,
                    "ms" => 1.0,
                    other => panic!("{other} in {screen}"),
                };
                time[0].parse::<f64>().unwrap() * factor
            };
            times.map(of_time).collect()
        };
        top.terminal.wait_until("whole times", |screen| {
            let times = milliseconds(screen);
            let is_long = |time: &f64| (1.0..30_000.0).contains(time);
            times.len() == 4 && times.iter().all(is_long)
        });
        top.terminal.press(&["q"]);
        assert_eq!(top.wait_for_exit(), "");
        top.wait_until_gone();
    }
    let target = Talker::start(&fixture("timed.pie"));
    let terminal = Terminal::open(100, 10);
    terminal.type_line(&format!(
        "{TOOL} top -pid {} -pair start,sotp; echo \"status $?\"",
        target.pid()
    ));
    let screen = terminal.wait_for("status 1");
    assert!(screen.contains("no probe \"sotp\" in "), "{screen}");
}

#[test]
fn terminal_without_alternate_screen_is_cleared() {
    let target = Talker::start(&fixture("gen_ocaml.pie"));
    let terminal = Terminal::open(100, 30);
    terminal.type_line(&format!(
        "tmux set-option -g alternate-screen off; yes '########' | head -n 30; {TOOL} top -pid {}",
        target.pid()
    ));
    let screen = terminal.wait_for("? keys");
    assert!(!screen.contains('#'), "{screen}");
}

#[test]
fn keys_work_and_the_terminal_may_be_resized() {
    for mut target in both_forms("gen_ocaml") {
        let top = Top::start(target.pid(), "-interval 10ms");
        target.hits();
        let by = |key, text: &str, expected: [&str; 2]| {
            top.terminal.press(&[key]);
            let screen = top.terminal.wait_for(text);
            assert_eq!(names(&screen), expected, "{screen}");
        };
        top.terminal.wait_for("; 4 hits");
        by("s", "by hits", ["shared", "only_alpha"]);
        by("r", "by hits, reversed", ["only_alpha", "shared"]);
        by("s", "by name", ["only_alpha", "shared"]);
        by("r", "by name, reversed", ["shared", "only_alpha"]);

        top.terminal.press(&["/", "L", "Y", "q", "BSpace"]);
        let screen = top.terminal.wait_for("filter: LY_");
        assert_eq!(names(&screen), ["only_alpha"]);
        top.terminal.press(&["Enter"]);
        top.terminal.wait_for("1 with \"LY\"");
        top.terminal.press(&["/", "x"]);
        top.terminal.wait_for("filter: LYx_");
        // A key that follows Escape at once would be read as that key with Alt.
        top.terminal.press(&["Escape"]);
        let screen = top.terminal.wait_for("q quit");
        assert_eq!(names(&screen), ["only_alpha"]);

        top.terminal.press(&["?"]);
        top.terminal
            .wait_for("Quitting removes all instrumentation");
        top.terminal.resize(40, 8);
        let screen = top.terminal.wait_until("few columns", |screen| {
            screen.contains("HITS/S") && !screen.contains("SHARE")
        });
        assert_eq!(screen.lines().count(), 8);
        top.terminal.resize(90, 25);
        top.terminal.wait_for("SHARE");
        top.terminal.press(&["C-c"]);
        top.wait_for_exit();
    }
}

// promise: top: Probes that a key has switched are switched back at the end, and what other tools
//    have enabled stays enabled (2)
#[test]
fn probe_is_switched_by_key_and_restored_finally() {
    for target in both_forms("gen_ocaml") {
        let pid = target.pid();
        run(&format!("attach -quiet -enable shared -pid {pid}")).answer();
        let top = Top::start(pid, "-interval 10ms");
        top.terminal.press(&["Enter"]);
        top.terminal.wait_for("no probe is selected");
        top.terminal.press(&["s", "s", "Down", "Enter"]);
        top.terminal.wait_for("only_alpha 0 -> 1");
        assert_eq!(states(pid), "only_alpha enabled\nshared enabled\n");
        top.terminal.press(&["j", "Space"]);
        let screen = top.terminal.wait_for("shared 1 -> 0");
        assert_eq!(row(&screen, "only_alpha")[1], "on");
        assert_eq!(row(&screen, "shared")[1], "off");
        assert_eq!(states(pid), "only_alpha enabled\nshared disabled\n");
        top.terminal.press(&["Escape"]);
        assert_eq!(top.wait_for_exit(), "restored: only_alpha, shared");
        assert_eq!(states(pid), "only_alpha disabled\nshared enabled\n");

        // A probe that is switched twice is left as it is; what other tools have enabled too
        // stays on.
        let top = Top::start(pid, "-interval 10ms");
        top.terminal.press(&["s", "s", "Down", "e"]);
        top.terminal.wait_for("only_alpha 0 -> 1");
        run(&format!("attach -quiet -enable only_alpha -pid {pid}")).answer();
        top.terminal.press(&["e"]);
        top.terminal
            .wait_for("only_alpha 2 -> 1: still enabled, because others have enabled it too");
        top.terminal.press(&["q"]);
        assert_eq!(top.wait_for_exit(), "");
        assert_eq!(states(pid), "only_alpha enabled\nshared enabled\n");
    }
}

#[test]
fn failed_switch_is_reported_and_top_continues() {
    let target = Talker::start(&fixture("gen_ocaml.pie"));
    let pid = target.pid();
    let top = Top::start(pid, "-interval 10ms -probe shared");
    // A debugger that is attached makes the switch fail.
    let mut gdb = Command::new("gdb");
    gdb.args(["-q", "-nx", "-p", &pid.to_string()]);
    gdb.args(["-ex", "echo \\nattached\\n"]);
    let mut gdb = Talker::spawn(gdb.stderr(Stdio::null()));
    gdb.expect("attached");
    top.terminal.press(&["Down", "Enter"]);
    top.terminal.wait_for("is already traced by");
    gdb.send("detach");
    gdb.close_input();
    gdb.guard().wait();
    top.terminal.press(&["Enter"]);
    top.terminal.wait_for("shared 0 -> 1");
    top.terminal.press(&["q"]);
    assert_eq!(top.wait_for_exit(), "restored: shared");
    top.wait_until_gone();
}

#[test]
fn shown_values_freeze_while_paused() {
    for mut target in both_forms("gen_ocaml") {
        let pid = target.pid();
        let top = Top::start(pid, "-interval 10ms");
        top.terminal.press(&["p"]);
        top.terminal.wait_for("PAUSED");
        target.hits();
        // States are current while paused: if `top` shows this one, it has read the process since.
        run(&format!("attach -quiet -enable shared -pid {pid}")).answer();
        let screen = top.terminal.wait_for("1 on");
        assert!(screen.contains("; 0 hits"), "{screen}");
        top.terminal.press(&["p"]);
        top.terminal.wait_for("; 4 hits");
    }
}

// promise: top: On a termination signal, `top` leaves terminal and process as they were (8)
#[test]
fn termination_signals_restore_terminal_and_process() {
    for target in both_forms("gen_ocaml") {
        let pid = target.pid();
        for signal in [
            Signal::SIGTERM,
            Signal::SIGINT,
            Signal::SIGHUP,
            Signal::SIGQUIT,
        ] {
            let top = Top::start(pid, "-interval 10ms");
            top.terminal.press(&["Down", "Enter"]);
            top.terminal.wait_for("0 -> 1");
            assert_eq!(top.terminal.format("#{alternate_on} #{cursor_flag}"), "1 0");
            top.signal(signal);
            let left = top.wait_for_exit();
            assert!(left.contains("\nrestored: "), "{left}");
            assert_eq!(row(&left, "shared")[1..3], ["off", "0"]);
            top.wait_until_gone();
            assert_eq!(states(pid), "only_alpha disabled\nshared disabled\n");
        }
    }
}

// promise: top: When its terminal is gone, `top` restores the process (4)
#[test]
fn lost_terminal_restores_the_process() {
    for target in both_forms("gen_ocaml") {
        let pid = target.pid();
        // It is notified by SIGHUP or, if that is ignored, by an error when it reads a key.
        for before in ["", "trap '' HUP;"] {
            let top = Top::start_after(pid, "-interval 10ms", before);
            top.terminal.press(&["Down", "Enter"]);
            top.terminal.wait_for("0 -> 1");
            top.terminal.close();
            top.wait_until_gone();
            assert_eq!(states(pid), "only_alpha disabled\nshared disabled\n");
        }
    }
}

// promise: Observations: A terminal that accepts no output does not keep a tool from exiting (3
//    tools)
// promise: top: A terminal that accepts no output does not keep `top` from exiting
#[test]
fn terminal_accepting_no_output_keeps_no_tool_alive() {
    let target = Talker::start(&fixture("threads_spin.pie"));
    let pid = target.pid();
    for command in [
        "top -interval 10ms",
        "count -interval 10ms",
        "latency -pair ping,pong -interval 10ms",
    ] {
        assert_ends_though_terminal_accepts_no_output(command, pid);
    }
}

fn assert_ends_though_terminal_accepts_no_output(command: &str, pid: i32) {
    let scratch = Scratch::new();
    let typescript = scratch.file("typescript");
    let mut script = Command::new("script");
    let line = format!("stty cols 200 rows 60; exec {TOOL} {command} -pid {pid}");
    script
        .args(["-qefc", &line])
        .arg(&typescript)
        .stdin(Stdio::piped())
        .stdout(Stdio::null());
    let script = Guard::spawn(&mut script);
    let written = || std::fs::metadata(&typescript).map_or(0, |file| file.len());
    eventually("it draws", || (written() > 10_000).then_some(()));
    let tool = eventually("it runs", || {
        let mut children = test_support::process::children(script.pid()).into_iter();
        children.find(|&pid| test_support::process::status(pid, "Name") == "ocaml-probes")
    });
    let script = Pid::from_raw(script.pid());
    kill(script, Signal::SIGSTOP).unwrap();
    eventually("it waits for the terminal alone", || {
        let call = std::fs::read_to_string(format!("/proc/{tool}/syscall")).unwrap();
        // poll(2), without a timeout.
        let words: Vec<&str> = call.split(' ').collect();
        let has_no_timeout = words
            .get(3)
            .is_some_and(|limit| limit.ends_with("ffffffff"));
        (words[0] == "7" && words[2] == "0x2" && has_no_timeout).then_some(())
    });
    kill(Pid::from_raw(tool), Signal::SIGTERM).unwrap();
    eventually("it has ended", || {
        matches!(state(tool), None | Some('Z')).then_some(())
    });
    assert!(!is_observed(pid), "{command}");
    kill(script, Signal::SIGCONT).unwrap();
}

// promise: top: `top` ends when the process exits, says so, and leaves the figures read last on the
//    terminal (2)
#[test]
fn top_leaves_its_figures_when_the_process_exits() {
    for mut target in both_forms("gen_ocaml") {
        let pid = target.pid();
        // It reads more often than it shows.
        let top = Top::start(pid, "-interval 1h");
        top.terminal.press(&["s", "s", "Down", "Enter", "p"]);
        top.terminal.wait_for("PAUSED");
        target.hits();
        wait_for_reading(top.tool);
        target.send("quit");
        target.guard().wait();
        let left = top.wait_for_exit();
        let said = format!("process {pid} has exited: these are the figures read last");
        assert!(left.ends_with(&said), "{left}");
        assert!(left.contains("2 probes, 1 on; 4 hits, "), "{left}");
        assert_eq!(row(&left, "only_alpha")[1..3], ["on", "1"]);
        assert_eq!(row(&left, "shared")[1..3], ["off", "3"]);
    }
}

// promise: top: `top` ends when the process executes a new program, says so, and leaves the figures
//    read last on the terminal (2)
#[test]
fn top_ends_at_an_exec_of_the_process() {
    for file in fixture_forms("exec_self") {
        let mut target = Talker::start(&file);
        let pid = target.pid();
        let top = Top::start(pid, "-interval 10ms");
        top.terminal.press(&["Down", "Enter"]);
        top.terminal.wait_for("0 -> 1");
        target.send("exec");
        target.expect("ready");
        let left = top.wait_for_exit();
        let said =
            format!("process {pid} has executed a new program: these are the figures read last");
        assert!(left.ends_with(&said), "{left}");
        assert!(!names(&left).is_empty(), "{left}");
        assert!(!states(pid).contains("enabled"));
    }
}

#[test]
fn only_probe_of_a_filter_is_switched() {
    let target = Talker::start(&fixture("gen_ocaml.pie"));
    let pid = target.pid();
    let top = Top::start(pid, "-interval 10ms");
    top.terminal.press(&["/", "o", "n", "l", "y", "Enter", "e"]);
    top.terminal.wait_for("only_alpha 0 -> 1");
    assert_eq!(states(pid), "only_alpha enabled\nshared disabled\n");
    top.terminal.press(&["q"]);
    assert_eq!(top.wait_for_exit(), "restored: only_alpha");
}

#[test]
fn smallest_terminal_shows_a_probe_beside_help() {
    let target = Talker::start(&fixture("gen_ocaml.pie"));
    let top = Top::start(target.pid(), "-interval 10ms -probe shared");
    top.terminal.resize(20, 5);
    for (key, shown) in [
        ("?", "?: more (1 of "),
        ("?", "?: more (2 of "),
        ("/", "Enter keep  Esc drop"),
        ("Enter", "?: more (2 of "),
        ("e", "shared 0 -> 1"),
    ] {
        top.terminal.press(&[key]);
        let screen = top.terminal.wait_for(shown);
        assert_eq!(row(&screen, "shared"), ["shared", "0.0"], "{screen}");
    }
}

// promise: top: What a killed `top` has left is removed by the next one (2)
#[test]
fn next_top_removes_what_a_killed_one_left() {
    for target in both_forms("gen_ocaml") {
        let pid = target.pid();
        let top = Top::start(pid, "");
        top.signal(Signal::SIGKILL);
        top.terminal.wait_for("status 137");
        assert!(is_observed(pid));
        let top = Top::start(pid, "");
        top.terminal.press(&["q"]);
        top.wait_for_exit();
        top.wait_until_gone();
    }
}

// promise: top: `top` can be suspended: the terminal is restored, and the screen returns in the
//    foreground (2 × 3)
#[test]
fn top_is_suspended_and_resumed_in_the_foreground() {
    for mut target in both_forms("gen_ocaml") {
        let pid = target.pid();
        let top = Top::start(pid, "-interval 10ms");
        let suspend: [&dyn Fn(); 3] = [
            &|| top.terminal.press(&["C-z"]),
            &|| top.signal(Signal::SIGTSTP),
            &|| top.signal(Signal::SIGSTOP),
        ];
        for (round, suspend) in suspend.iter().enumerate() {
            suspend();
            eventually("it is stopped", || {
                (state(top.tool) == Some('T')).then_some(())
            });
            if round < 2 {
                assert_eq!(top.terminal.format("#{alternate_on} #{cursor_flag}"), "0 1");
            }
            target.hits();
            top.terminal.type_line("fg");
            let hits = 4 * (round + 1);
            top.terminal.wait_for(&format!("; {hits} hits"));
            assert_eq!(top.terminal.format("#{alternate_on} #{cursor_flag}"), "1 0");
        }
        top.terminal.press(&["q"]);
        top.wait_until_gone();
        assert_eq!(top.terminal.format("#{alternate_on} #{cursor_flag}"), "0 1");
    }
}

#[test]
fn top_is_not_suspended_without_a_shell() {
    let mut target = Talker::start(&fixture("gen_ocaml.pie"));
    let terminal = Terminal::open(100, 30);
    let pid = target.pid();
    terminal.type_line(&format!("exec {TOOL} top -interval 10ms -pid {pid}"));
    terminal.wait_for(", process");
    terminal.press(&["C-z"]);
    target.hits();
    terminal.wait_for("; 4 hits");
}

#[test]
fn top_without_a_terminal_suggests_other_commands() {
    let target = Talker::start(&fixture("gen_ocaml.pie"));
    let pid = target.pid();
    let hint = format!("hint: `ocaml-probes count -pid {pid} -interval 1s` prints lines instead");
    let failure = run(&format!("top -pid {pid}")).failure();
    assert_eq!(
        failure,
        format!("ocaml-probes: top needs a terminal, but standard input is not one\n{hint}\n")
    );
    for (line, why) in [
        (
            format!("{TOOL} top -pid {pid} | cat"),
            "standard output is not one",
        ),
        (
            format!("TERM=dumb {TOOL} top -pid {pid}"),
            "TERM is \"dumb\"",
        ),
    ] {
        let mut script = Command::new("script");
        script.args(["-qec", &line, "/dev/null"]);
        let shown = run_command(&mut script).stdout;
        assert_eq!(
            shown,
            format!("ocaml-probes: top needs a terminal, but {why}\r\n{hint}\r\n")
        );
    }
    assert!(!is_observed(pid));
}
