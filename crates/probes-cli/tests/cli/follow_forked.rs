//! `-follow` of the commands that observe: also the processes that are forked.

use std::fs;
use std::thread;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use test_support::process::children;
use test_support::tmux::Terminal;
use test_support::{Talker, eventually, fixture_forms, program_forms};

use crate::count::wait_for_hits;
use crate::count_functions::{ObservingTool, start_observing, start_observing_several};
use crate::support::{is_observed, run};

/// The number before a name in plain output; if it has several lines for the name, their sum.
fn hits(plain: &str, name: &str) -> u64 {
    let words = plain.lines().map(|line| line.split(' '));
    let of_name = words.filter(|words| words.clone().next_back() == Some(name));
    let numbers = of_name.map(|mut words| words.next().unwrap().parse::<u64>().unwrap());
    numbers.sum()
}

/// Ends a tool, and returns what it has printed, and said.
fn answer(tool: ObservingTool) -> (String, String) {
    let done = tool.end();
    assert_eq!(done.code, Some(0), "{}", done.stderr);
    (done.stdout, done.stderr)
}

/// Makes a process fork a child, which reads its lines from then on.
fn fork(target: &mut Talker) -> i32 {
    target.ask("child", "child");
    children(target.pid())[0]
}

// promise: Observations: With -follow, calls in children that are forked meanwhile are counted to the last one, however short
//    they live (4 programs of C, 2 of OCaml)
#[test]
fn calls_in_short_lived_children_are_counted() {
    for file in ["owners", "owners_static"]
        .into_iter()
        .flat_map(fixture_forms)
    {
        let mut target = Talker::start(&file);
        let tool = start_observing("count", "-follow -fn outer,leaf,half", target.pid());
        target.ask("forks 6 20000", "done 140000");
        target.ask("forks 30 500", "done 155500");
        let (counted, said) = answer(tool);
        let of = |name| hits(&counted, name);
        assert_eq!(
            (of("outer"), of("leaf"), of("half")),
            (155_500, 311_000, 466_500)
        );
        assert!(!said.contains("missing"), "{said}");
        assert!(!is_observed(target.pid()));
        target.ask("forks 1 10", "done 155520");
    }
    for file in program_forms("calls") {
        let mut target = Talker::start(&file);
        let tool = start_observing("count", "-follow -fn Calls.*,caml_*", target.pid());
        target.send("forks 4 20000");
        let own = target.line().unwrap();
        let (counted, _) = answer(tool);
        let own = own.split(' ').filter_map(|it| it.split_once('='));
        let own: Vec<(&str, u64)> = own
            .map(|(name, calls)| (name, calls.parse().unwrap()))
            .collect();
        assert_eq!(own.len(), 3);
        for (name, calls) in own {
            assert_eq!(
                hits(&counted, &format!("Calls.{name}")),
                5 * calls,
                "{counted}"
            );
        }
    }
}

// promise: Observations: With -follow, processes that were forked before are observed by themselves, and all are restored (2)
#[test]
fn existing_children_are_observed_separately() {
    for file in fixture_forms("forker") {
        let mut target = Talker::start(&file);
        let parent = target.pid();
        let child = fork(&mut target);
        let flags = "-follow -by pid -probe ping";
        let tool = start_observing_several("count", flags, parent, 2);
        target.ask("run", "hits ");
        target.ask("run", "hits ");
        let (counted, _) = answer(tool);
        let lines: Vec<Vec<&str>> = counted.lines().map(|it| it.split(' ').collect()).collect();
        let of_child = [&*child.to_string(), "ping"];
        assert_eq!(
            (lines[0][0], &lines[0][2..]),
            ("6", &of_child[..]),
            "{counted}"
        );
        assert!(!is_observed(parent) && !is_observed(child));
        target.ask("quit", "forked");
    }
}

// promise: Observations: With -follow, a child that is forked meanwhile is counted with its parent, and restored in the end (2 × 4
//    commands)
#[test]
fn later_children_are_restored_in_the_end() {
    for file in fixture_forms("forker") {
        for (name, flags) in [
            ("count", "-follow -probe ping"),
            ("count", "-follow -by tid -probe ping"),
            ("hist", "-follow -of tid -probe ping"),
            ("watch", "-follow -probe ping"),
        ] {
            let mut target = Talker::start(&file);
            let tool = start_observing(name, flags, target.pid());
            target.ask("run", "hits ");
            let child = fork(&mut target);
            target.ask("run", "hits ");
            assert!(is_observed(child));
            // Its observer is that of its parent.
            let doctor = run(&format!("doctor -pid {child}")).stdout;
            let mut checks = doctor.lines();
            let is_passed = |it: &str| it.starts_with("check stale_observation pass ");
            assert!(checks.any(is_passed), "{doctor}");
            let (printed, said) = answer(tool);
            assert!(!is_observed(child) && !is_observed(target.pid()), "{flags}");
            assert!(!said.contains("warning"), "{said}");
            let has_both = match (name, flags.contains("tid")) {
                ("count", false) => hits(&printed, "ping") == 6,
                ("hist", _) => printed.contains("\n6 ") || printed.contains(" 6 "),
                _ => [target.pid(), child].iter().all(|tid| {
                    let tid = tid.to_string();
                    printed
                        .lines()
                        .any(|line| line.split(' ').any(|word| word == tid))
                }),
            };
            assert!(has_both, "{name} {flags}: {printed}");
            target.ask("run", "hits ");
            target.ask("quit", "forked");
        }
    }
}

/// Makes a process obey until a tool ends by itself; returns what that has printed.
fn obeyed_until_end(target: &mut Talker, line: &str, answer: &str, tool: ObservingTool) -> String {
    let ended = thread::spawn(move || tool.until_end());
    eventually("the tool has seen enough", || {
        target.ask(line, answer);
        ended.is_finished().then_some(())
    });
    let run = ended.join().unwrap();
    assert_eq!(run.code, Some(0), "{}", run.stderr);
    run.stdout
}

// promise: Observations: With -follow, strings are read also in a child, once it is found (2 programs of C, 2 of OCaml)
#[test]
fn strings_of_later_children_are_read() {
    let flags = "-follow -fields args -limit 1";
    for file in fixture_forms("forker") {
        let mut target = Talker::start(&file);
        let asked = format!("{flags} -fn fixture_command -where str(arg0)==\"later\"");
        let tool = start_observing("watch", &asked, target.pid());
        fork(&mut target);
        let shown = obeyed_until_end(&mut target, "later", "unknown command", tool);
        assert_eq!(shown.lines().count(), 1, "{shown}");
        target.ask("quit", "forked");
    }
    for file in program_forms("shown") {
        let mut target = Talker::start(&file);
        let asked = format!("{flags} -probe strings -where str(arg3)^=\"01234\"");
        let tool = start_observing("watch", &asked, target.pid());
        target.ask("child", "done");
        let shown = obeyed_until_end(&mut target, "hit strings 1", "done", tool);
        let begins = "empty=\"\" hello=\"hello\" word=\"8 bytes.\" sixty_four=\"0123";
        assert!(shown.starts_with(begins), "{shown}");
        assert_eq!(shown.lines().count(), 1, "{shown}");
    }
}

// promise: Observations: With -follow, a child whose parent is killed is still observed, and no hit is counted twice (2)
#[test]
fn children_of_a_killed_parent_are_observed() {
    for file in fixture_forms("forker") {
        let mut target = Talker::start(&file);
        let mut tool = start_observing("count", "-follow -probe ping -interval 20ms", target.pid());
        let child = fork(&mut target);
        target.ask("run", "hits ");
        // Its hits have been read, and it was looked for several times.
        let seconds = |line: &str| line.split(' ').next().unwrap().parse::<f64>().unwrap();
        let begun = seconds(&tool.line().unwrap());
        while seconds(&tool.line().unwrap()) < begun + 2.0 {}
        kill(Pid::from_raw(target.pid()), Signal::SIGKILL).unwrap();
        tool.expect_said(&format!("{child}: stopped "));
        target.ask("run", "hits ");
        let (counted, _) = answer(tool);
        let total = counted.lines().filter(|line| line.split(' ').count() == 3);
        let total: Vec<&str> = total.collect();
        assert_eq!(hits(&total.join("\n"), "ping"), 6, "{counted}");
        assert!(!is_observed(child));
        target.send("quit");
    }
}

/// Has the program fork children until one has this pid; returns it, or `None` if none gets it.
fn reuse(pid: i32, target: &mut Talker) -> std::io::Result<Option<i32>> {
    for _ in 0..100 {
        fs::write("/proc/sys/kernel/ns_last_pid", (pid - 1).to_string())?;
        if fork(target) == pid {
            return Ok(Some(pid));
        }
        target.ask("quit", "forked");
    }
    Ok(None)
}

#[test]
fn child_with_a_reused_pid_is_observed() {
    let [file, _] = fixture_forms("forker");
    let mut target = Talker::start(&file);
    let flags = "-follow -pair ping,pong -interval 20ms";
    let mut tool = start_observing("latency", flags, target.pid());
    // Another process may have taken the pid, and keep it: then another child is tried.
    let reused = (0..20).find_map(|_| {
        let pid = fork(&mut target);
        tool.expect_said(&format!("{pid}: stopped "));
        target.ask("quit", "forked");
        reuse(pid, &mut target).transpose()
    });
    let pid = match reused.unwrap() {
        Ok(pid) => pid,
        // Others cannot choose pids: it is enough that root does.
        Err(_) => return,
    };
    tool.expect_said(&format!("{pid}: stopped "));
    // Children are looked for several times from now on.
    let seconds = |line: &str| line.split(' ').next().unwrap().parse::<f64>().unwrap();
    let begun = seconds(&tool.line().unwrap());
    while seconds(&tool.line().unwrap()) < begun + 2.0 {}
    let (_, said) = answer(tool);
    assert!(!said.contains("already observed"), "{said}");
    assert!(!is_observed(pid));
    target.ask("quit", "forked");
}

// promise: Observations: With -follow, a daemon, whose parent has exited, is counted and restored like a child (2 × 2)
#[test]
fn daemons_are_counted_and_restored() {
    for file in fixture_forms("forker") {
        for first_process_leaves in [false, true] {
            let mut target = Talker::start(&file);
            let flags = "-follow -probe ping -interval 20ms";
            let mut tool = start_observing("count", flags, target.pid());
            target.ask("run", "hits ");
            // What is not read before a process exits is lost, and said to be.
            wait_for_hits(|| tool.line(), 3);
            let line = if first_process_leaves {
                "leave"
            } else {
                "daemon"
            };
            let said = target.ask(line, "daemon ");
            let daemon: i32 = said.trim_start_matches("daemon ").parse().unwrap();
            if first_process_leaves {
                tool.expect_said(&format!("{daemon}: stopped "));
            }
            target.ask("run", "hits ");
            let (counted, said) = answer(tool);
            let total = counted.lines().filter(|line| line.split(' ').count() == 3);
            let total: Vec<&str> = total.collect();
            assert_eq!(hits(&total.join("\n"), "ping"), 6, "{counted}{said}");
            assert!(!is_observed(daemon));
            // A warning about the first process is expected if that has exited.
            let warnings = said.matches("warning: ").count();
            let of_exit = said.matches(" has exited: the last reading is ").count();
            assert_eq!(warnings, usize::from(first_process_leaves), "{said}");
            assert_eq!(of_exit, warnings, "{said}");
            target.send("quit");
        }
    }
}

// promise: Observations: With -follow, a child that is forked meanwhile is timed by itself once it is found, and a warning says what is
//    missing (2)
#[test]
fn later_children_are_timed_once_found() {
    for file in fixture_forms("forker") {
        let mut target = Talker::start(&file);
        let parent = target.pid();
        let line = format!("latency -follow -pair ping,pong -for 1ms -json -pid {parent}");
        let said = run(&line).stderr;
        let note = "those of processes that exit before are missing";
        assert!(said.contains(note), "{said}");
        let mut tool = start_observing("latency", "-follow -pair ping,pong -by pid", parent);
        let child = fork(&mut target);
        tool.expect_said(&format!(
            "ocaml-probes: warning: {child}: process {parent} has forked process {child}, which is observed from now on: \
             its hits and times until now are missing\n"
        ));
        target.ask("run", "hits ");
        let (timed, _) = answer(tool);
        let line = timed
            .lines()
            .find(|line| line.starts_with("1 "))
            .unwrap_or_else(|| panic!("{timed}"));
        assert!(line.contains(&format!("{child} ping,pong")), "{timed}");
        assert!(!is_observed(child) && !is_observed(parent));
        target.ask("quit", "forked");
    }
}

/// The files in /proc of a process that a tool has open.
fn open_files_of(pid: i32, tool: i32) -> usize {
    let directory = format!("/proc/{pid}");
    let opened = fs::read_dir(format!("/proc/{tool}/fd")).unwrap();
    let links = opened.filter_map(|it| fs::read_link(it.unwrap().path()).ok());
    links
        .filter(|link| {
            link.starts_with(&directory) || link.starts_with(format!("{directory} (deleted)"))
        })
        .count()
}

#[test]
fn nothing_stays_open_of_exited_children() {
    for file in fixture_forms("forker") {
        let mut target = Talker::start(&file);
        let mut tool = start_observing("latency", "-follow -pair ping,pong", target.pid());
        for _ in 0..3 {
            let child = fork(&mut target);
            tool.expect_said(&format!("process {child}, which is observed from now on"));
            assert!(open_files_of(child, tool.pid()) > 0);
            target.ask("quit", "forked");
            eventually("all is closed", || {
                (open_files_of(child, tool.pid()) == 0).then_some(())
            });
        }
        answer(tool);
    }
}

#[test]
fn top_shows_hits_of_children() {
    let tool = env!("CARGO_BIN_EXE_ocaml-probes");
    for file in fixture_forms("forker") {
        let mut target = Talker::start(&file);
        let terminal = Terminal::open(160, 20);
        let line = format!(
            "clear; {tool} top -follow -interval 20ms -pid {}",
            target.pid()
        );
        terminal.type_line(&line);
        terminal.wait_for("STATE");
        target.ask("run", "hits ");
        let child = fork(&mut target);
        target.ask("run", "hits ");
        terminal.wait_for(" 6 ");
        assert!(!terminal.screen().contains("missing"));
        terminal.press(&["q"]);
        eventually("the child is restored", || {
            (!is_observed(child)).then_some(())
        });
        assert!(!is_observed(target.pid()));
        target.ask("quit", "forked");
    }
}

// promise: Observations: What a killed tool with -follow has left in a process and its child can be removed from each (2)
#[test]
fn remains_of_killed_tool_with_follow_are_removed() {
    for file in fixture_forms("forker") {
        let mut target = Talker::start(&file);
        let tool = start_observing("count", "-follow", target.pid());
        let child = fork(&mut target);
        tool.kill();
        target.ask("run", "hits ");
        for pid in [child, target.pid()] {
            assert!(is_observed(pid));
            run(&format!("observe -clean -pid {pid}")).answer();
            assert!(!is_observed(pid));
        }
        target.ask("run", "hits ");
        target.ask("quit", "forked");
    }
}

#[test]
fn what_is_of_one_process_refuses_follow() {
    for (line, why) in [
        (
            "count -follow -pid 1 -events all",
            "-events and -follow cannot be combined",
        ),
        (
            "watch -follow -pid 1 -events all",
            "-events and -follow cannot be combined",
        ),
        (
            "count -follow -pid 1 -by stack",
            "-by stack is for one process: give it by -pid, without -follow",
        ),
        (
            "count -follow -pid 1 -sites",
            "-sites is for one process, because sites differ between processes: give one -pid, without -follow",
        ),
        (
            "top -follow -pid 1 -by pid -pair a,b",
            "-by pid cannot be combined with both -follow and -pair",
        ),
    ] {
        let refused = run(line);
        assert_eq!(refused.code, Some(2), "{line}");
        assert!(refused.stderr.contains(why), "{line}: {}", refused.stderr);
    }
}
