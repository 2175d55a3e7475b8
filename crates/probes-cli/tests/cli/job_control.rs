//! `trace` on a terminal, under a shell with job control: with `-wait`, the screen is compared with
//! that of the same program started directly.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use test_support::process::{children, processes, stat, state};
use test_support::{Guard, Scratch, Talker, eventually, fixture_forms, program};

const INTERRUPT: &str = "\x03";
const QUIT: &str = "\x1c";
const SUSPEND: &str = "\x1a";

/// Fields of /proc/PID/stat: proc(5).
const GROUP: usize = 5;
const SESSION: usize = 6;
const TERMINAL: usize = 7;
const FOREGROUND: usize = 8;

/// An interactive shell on its own terminal.
struct Shell {
    talker: Talker,
    pid: i32,
    terminal: String,
    shown: Vec<String>,
}

impl Shell {
    fn start() -> Shell {
        let mut script = Command::new("script");
        let bash = "exec bash --norc --noprofile --noediting -i";
        script
            .args(["-qec", bash, "/dev/null"])
            .env_remove("PROMPT_COMMAND");
        let mut shell = Shell {
            talker: Talker::spawn(&mut script),
            pid: 0,
            terminal: String::new(),
            shown: Vec::new(),
        };
        // The quotes in `I''am` distinguish the terminal's echo of this line from its output.
        shell
            .talker
            .send("stty -echo; ulimit -c 0; PS1=; echo; echo I''am $$ $(tty)");
        let line = shell.talker.expect("Iam");
        let mut words = line.split_ascii_whitespace().skip(1);
        shell.pid = words.next().unwrap().parse().unwrap();
        shell.terminal = words.next().unwrap().to_owned();
        shell
    }

    /// Types a line, and records what is shown up to a line that begins with `end`.
    fn type_line(&mut self, line: &str, end: &str) {
        self.talker.send(line);
        self.read_to(end);
    }

    fn read_to(&mut self, end: &str) {
        loop {
            let line = self.talker.line().unwrap_or_else(|| panic!("no {end:?}"));
            let line = line.trim();

            if !line.is_empty() {
                self.shown.push(line.to_owned());
            }
            if line.starts_with(end) {
                return;
            }
        }
    }

    /// Types a key that stops or ends the job, and waits until the shell reads the terminal: a job
    /// that is about to exit may still read what is typed.
    fn press(&mut self, key: &str) {
        self.talker.type_keys(key);
        self.wait_for_prompt();
    }

    fn wait_for_prompt(&mut self) {
        eventually("the shell is in the foreground", || {
            (stat(self.pid, FOREGROUND) == self.pid.to_string()).then_some(())
        });
    }

    /// Records the exit status of the last job. What the shell says about a job that was killed by
    /// a signal is left out: the tool exits with a status instead of being killed.
    fn note_status(&mut self) {
        let before = self.shown.len();
        self.type_line("echo status $?", "status");
        let status = self.shown.pop().unwrap();
        self.shown.truncate(before);
        self.shown.push(status);
    }

    /// Waits until all processes of the job are stopped and the shell lists the job as stopped. The
    /// list is not enough: the shell sees only its own children, and a grandchild that still
    /// runs may read what is typed.
    fn wait_for_stop(&mut self) {
        self.wait_for_stopped_processes();
        // The job may have been continued in the background just before, and stopped again. The shell may notice
        // that late: wait for the processes, and for the shell.
        eventually("the job is stopped", || {
            let before = self.shown.len();
            self.type_line("jobs; echo listed", "listed");
            let listed: Vec<_> = self.shown.drain(before..).collect();
            let stopped = listed.iter().any(|line| line.contains("Stopped"));
            stopped.then_some(())
        });
        self.wait_for_stopped_processes();
    }

    fn wait_for_stopped_processes(&self) {
        eventually("the whole job is stopped", || {
            self.job().all(is_stopped).then_some(())
        });
    }

    /// Waits until no process of the job is stopped. The kernel continues the processes of a group one after the
    /// other: the first one may already answer. If the group is stopped again before the last one is continued, the
    /// last one runs on.
    fn wait_until_all_run(&self) {
        eventually("the whole job runs", || {
            (!self.job().any(is_stopped)).then_some(())
        });
    }

    /// The processes of the shell's session that are not in the shell's own group.
    fn job(&self) -> impl Iterator<Item = i32> + use<> {
        let shell = self.pid.to_string();
        let of_job = move |&pid: &i32| stat(pid, SESSION) == shell && stat(pid, GROUP) != shell;
        processes().into_iter().filter(of_job)
    }

    fn suspend(&mut self) {
        self.press(SUSPEND);
        self.wait_for_stop();
        self.type_line("jobs; echo listed", "listed");
    }

    /// Resumes the job in the foreground, and asks the program for an answer.
    fn resume(&mut self) {
        self.type_line("fg", "");
        self.type_line("counters", "sem");
        self.wait_until_all_run();
    }
}

fn is_stopped(pid: i32) -> bool {
    // `t` if it is traced, as a followed process is.
    matches!(state(pid), Some('T' | 't'))
}

/// Runs `scenario` with the command `template` three times, with PROGRAM replaced by the program,
/// by the tool that starts it, and by the tool that starts and follows it. What the shell shows
/// must be the same.
fn check_same_as_direct(file: &Path, template: &str, scenario: impl Fn(&mut Shell, &str)) {
    let direct = file.display().to_string();
    let tool = env!("CARGO_BIN_EXE_ocaml-probes");
    let with_tool = |options| format!("{tool} trace {options} -quiet -disable-all -prog {direct}");
    let programs = [
        direct.clone(),
        with_tool("-wait"),
        with_tool("-follow -wait"),
    ];
    let [direct, waiting, following] = programs.map(|program| {
        let command = template.replace("PROGRAM", &program);
        let mut shell = Shell::start();
        scenario(&mut shell, &command);
        let shown = shell.shown.iter();
        let shown: Vec<_> = shown
            .map(|line| line.replace(&program, "PROGRAM"))
            .collect();
        shown
    });
    assert_eq!(waiting, direct, "{template}");
    assert_eq!(following, direct, "{template}, followed");
}

// promise: Launching programs: Keys and window sizes reach the program once
#[test]
fn keys_and_window_sizes_reach_the_program_once() {
    for file in fixture_forms("job") {
        check_same_as_direct(&file, "PROGRAM", |shell, command| {
            shell.type_line(command, "ready");
            for signal in [2, 3, 20, 28] {
                shell.type_line(&format!("catch {signal}"), "catching");
            }
            shell.type_line(&format!("{INTERRUPT}{QUIT}{SUSPEND}caught"), "caught");
            let mut stty = Command::new("stty");
            stty.args(["-F", &shell.terminal, "rows", "51"]);
            assert!(test_support::output(&mut stty).status.success());
            shell.type_line("caught", "caught");
            let caught = |line: &&String| line.starts_with("caught");
            let caught: Vec<_> = shell.shown.iter().filter(caught).collect();
            assert_eq!(
                caught,
                ["caught 2:128:0:0 3:128:0:0 20:128:0:0", "caught 28:128:0:0"]
            );
        });
    }
}

// promise: Launching programs: Job control under `trace -wait` and `-follow` equals that of a
//    program started directly (against the shell alone)
#[test]
fn job_is_suspended_and_resumed_like_any_other() {
    for file in fixture_forms("job") {
        for template in [
            "PROGRAM",
            "PROGRAM | cat",
            "(PROGRAM; echo after $?)",
            "bash -c 'PROGRAM; echo after $?'",
        ] {
            check_same_as_direct(&file, template, |shell, command| {
                shell.type_line(command, "ready");
                // More than once, because state may remain from the previous time.
                for _ in 0..3 {
                    shell.suspend();
                    shell.resume();
                }
                let scratch = Scratch::new();
                let may_read = scratch.file("may-read");
                shell.type_line(&format!("wait {}", may_read.display()), "waiting");
                shell.suspend();
                shell.type_line("bg", "[1]+");
                shell.wait_until_all_run();
                // In the background, the program is stopped because it reads from the terminal.
                fs::write(&may_read, "").unwrap();
                shell.wait_for_stop();
                shell.resume();
                shell.talker.send("exit 7");
                shell.wait_for_prompt();
                shell.note_status();
            });
        }
    }
}

#[test]
fn program_that_stops_itself_is_a_stopped_job() {
    for file in fixture_forms("job") {
        check_same_as_direct(&file, "PROGRAM", |shell, command| {
            shell.type_line(command, "ready");
            // As top and nano do on Ctrl-Z.
            for signal in [19, 20, 21, 22] {
                shell.talker.send(&format!("raise {signal}"));
                shell.wait_for_prompt();
                shell.wait_for_stop();
                shell.type_line("fg", &format!("raised {signal}"));
                shell.type_line("counters", "sem");
                shell.wait_until_all_run();
            }
            shell.talker.send("quit");
            shell.wait_for_prompt();
            shell.note_status();
        });
    }
}

// promise: Following: The shell sees the exit status of the program
#[test]
fn shell_sees_the_exit_status_of_the_program() {
    for file in fixture_forms("job") {
        check_same_as_direct(&file, "PROGRAM", |shell, command| {
            for key in [INTERRUPT, QUIT] {
                shell.type_line(command, "ready");
                shell.press(key);
                shell.note_status();
            }
            shell.type_line(command, "ready");
            shell.talker.send("exit 42");
            shell.wait_for_prompt();
            shell.note_status();
            // A background job, killed by its job number.
            let directory = Scratch::new();
            let log = directory.file("log");
            let line = format!("{command} </dev/zero >'{}' &", log.display());
            shell.type_line(&line, "");
            shell.shown.pop();
            eventually("the program runs", || {
                let printed = fs::read_to_string(&log).unwrap_or_default();
                printed.contains("ready").then_some(())
            });
            shell.type_line("kill %1; wait %1; echo status $?", "status");
            shell.shown.retain(|line| !line.starts_with("[1]"));
        });
    }
}

/// Returns the arguments of `trace` for a program that writes to the file `log` and reads nothing,
/// so that a hang-up is not mistaken for the end of its input.
fn ticking_args(log: &Path) -> String {
    format!(
        "-prog {} -disable-all >'{}' 2>&1",
        program("service").display(),
        log.display()
    )
}

fn ticks(log: &Path) -> usize {
    let log = fs::read_to_string(log).unwrap_or_default();
    log.matches("tick ").count()
}

/// The only child of a process, once it exists.
fn child_of(pid: i32) -> i32 {
    eventually("it has a child", || match children(pid).as_slice() {
        [child] => Some(*child),
        _ => None,
    })
}

fn wait_for_exit(pid: i32) {
    eventually(&format!("process {pid} exits"), || {
        matches!(state(pid), None | Some('Z')).then_some(())
    });
}

#[test]
fn program_exits_when_its_terminal_is_gone() {
    let scratch = Scratch::new();
    let log = scratch.file("log");
    let tool = env!("CARGO_BIN_EXE_ocaml-probes");
    let line = format!("exec {tool} trace -wait {}", ticking_args(&log));
    let mut script = Command::new("script");
    script
        .args(["-qec", &line, "/dev/null"])
        .stdin(Stdio::piped());
    let mut guard = Guard::spawn(&mut script);
    eventually("the program ticks", || (ticks(&log) > 0).then_some(()));
    let tool = child_of(guard.pid());
    let program = child_of(tool);
    assert_eq!(stat(tool, SESSION), tool.to_string());
    guard.child().kill().unwrap();
    guard.wait();
    wait_for_exit(program);
    wait_for_exit(tool);
}

// promise: Launching programs: Without `-wait`, the program runs on in the session of the terminal
#[test]
fn program_without_wait_stays_in_the_session() {
    let scratch = Scratch::new();
    let log = scratch.file("log");
    let tool = env!("CARGO_BIN_EXE_ocaml-probes");
    let mut shell = Shell::start();
    shell
        .talker
        .send(&format!("{tool} trace -v {}", ticking_args(&log)));
    shell.note_status();
    assert_eq!(shell.shown.pop().unwrap(), "status 0");
    let said = fs::read_to_string(&log).unwrap();
    let pid = said.split("as process ").nth(1).unwrap();
    let pid: i32 = pid.lines().next().unwrap().parse().unwrap();
    let _killed = Orphan(pid);

    shell.type_line("jobs; echo listed", "listed");
    assert_eq!(
        shell.shown.pop().unwrap(),
        "listed",
        "it is not a job of the shell"
    );
    // The program does not receive the signals of these keys, either.
    shell.press(&format!("{INTERRUPT}{QUIT}{SUSPEND}"));
    let before = ticks(&log);
    eventually("it runs on", || (ticks(&log) > before + 3).then_some(()));
    for field in [SESSION, TERMINAL] {
        assert_eq!(stat(pid, field), stat(shell.pid, field));
    }
}

/// A process whose parent has exited; it is killed when this is dropped.
struct Orphan(i32);

impl Drop for Orphan {
    fn drop(&mut self) {
        let _ = kill(Pid::from_raw(self.0), Signal::SIGKILL);
    }
}
