//! `trace -wait` without a terminal: exit status, signals, what the program inherits.

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{ChildStderr, Command, Stdio};

use nix::libc::{SIGCONT, SIGKILL, SIGSTOP, SIGTSTP};
use nix::sys::signal::{Signal, kill, killpg};
use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid};
use nix::unistd::Pid;
use serde_json::Value;
use test_support::process::{children, settle, state, status};
use test_support::{Guard, Talker, eventually, fixture, fixture_forms, program};

use crate::support::{command, object, run_command, run_on};

/// The first real-time signal that the C library leaves to programs.
const REAL_TIME: i32 = 34;

const WAIT: [&str; 5] = ["trace", "-wait", "-quiet", "-disable-all", "-prog"];

/// The tool, waiting for a program that has inherited its standard input and output.
struct WaitingTool {
    tool: Talker,
    program: i32,
}

impl WaitingTool {
    fn for_program(file: &Path) -> WaitingTool {
        WaitingTool::started_by(command(WAIT).arg(file))
    }

    /// `command` is the tool, or a program that becomes the tool with execve(2).
    fn started_by(command: &mut Command) -> WaitingTool {
        let mut tool = Talker::spawn(command);
        tool.expect("ready");
        let program = children(tool.pid());
        assert_eq!(program.len(), 1, "the program is its only child");
        WaitingTool {
            program: program[0],
            tool,
        }
    }

    /// The signals that the program has caught since it was last asked: number, code, sender,
    /// value.
    fn caught(&mut self) -> Vec<[i32; 4]> {
        let line = self.tool.ask("caught", "caught");
        let words = line.split_ascii_whitespace().skip(1);
        words
            .map(|word| {
                let numbers: Vec<i32> = word.split(':').map(|n| n.parse().unwrap()).collect();
                numbers.try_into().unwrap()
            })
            .collect()
    }

    /// Waits until the program has caught `count` signals, then sends the tool another one, `last`,
    /// and waits until the program has caught that, too, which shows that none is pending. Returns
    /// all that it has caught before `last`.
    fn caught_all(&mut self, count: usize, last: i32) -> Vec<[i32; 4]> {
        let mut all = Vec::new();
        eventually("all signals are caught", || {
            all.extend(self.caught());
            (all.len() >= count).then_some(())
        });
        self.tool.ask(&format!("catch {last}"), "catching");
        send(self.tool.pid(), last);
        let end = [last, 0, self.tool.pid(), 0];
        eventually("the last signal is caught", || {
            all.extend(self.caught());
            (all.last() == Some(&end)).then_some(())
        });
        all.pop();
        all
    }
}

/// Sends one process a signal that `Signal` has a name for: not a real-time signal.
fn send(pid: i32, number: i32) {
    kill(Pid::from_raw(pid), Signal::try_from(number).unwrap()).unwrap();
}

fn wait_for_state(pid: i32, wanted: char) {
    eventually(&format!("process {pid} is {wanted}"), || {
        (state(pid) == Some(wanted)).then_some(())
    });
}

// promise: Launching programs: The exit status of the program is passed on
#[test]
fn exit_status_is_passed_on() {
    for file in fixture_forms("job") {
        for code in [0, 1, 7, 255] {
            let mut waiting = WaitingTool::for_program(&file);
            waiting.tool.send(&format!("exit {code}"));
            assert_eq!(waiting.tool.guard().wait().code(), Some(code));
        }
    }
    for file in test_support::program_forms("terminating") {
        let answer = run_on("trace -wait -enable foobar", &file).answer();
        let end = "handlers fooia=0 foobar=2 collatz=0\n";
        assert!(answer.ends_with(end), "{answer}");
    }
}

// promise: Launching programs: The exit status for a program killed by a signal is 128 plus the
//    signal (10 signals)
#[test]
fn status_of_killed_program_is_128_plus_signal() {
    for file in fixture_forms("job") {
        for signal in [1, 2, 3, 6, 9, 11, 13, 15, REAL_TIME, 64] {
            let mut tool = Command::new("prlimit");
            tool.arg("--core=0").arg(env!("CARGO_BIN_EXE_ocaml-probes"));
            let mut waiting = WaitingTool::started_by(tool.args(WAIT).arg(&file));
            waiting.tool.send(&format!("raise {signal}"));
            let status = waiting.tool.guard().wait();
            assert_eq!(status.code(), Some(128 + signal), "{status}");
        }
    }
}

// promise: Launching programs: Every signal sent to the tool is passed on once (2 programs × every
//    catchable signal, by kill and queued)
#[test]
fn every_signal_to_the_tool_is_passed_once() {
    let mut sender = Talker::start(&fixture("job.pie"));
    for file in fixture_forms("job") {
        let mut waiting = WaitingTool::for_program(&file);
        let tool = waiting.tool.pid();
        // Left out: uncatchable signals, SIGCONT, those of the C library (32, 33), and SIGRTMAX.
        let catchable = (1..=64).filter(|n| ![SIGKILL, SIGSTOP, SIGCONT, 32, 33, 64].contains(n));
        for number in catchable.clone() {
            waiting.tool.ask(&format!("catch {number}"), "catching");
            sender.ask(&format!("send {number} {tool}"), "sent");
            eventually(&format!("signal {number} is caught"), || {
                let caught = waiting.caught();
                // The tool is the sender: kill(2) cannot name another process as the sender.
                let expected = [[number, 0, tool, 0]];
                (caught == expected).then_some(())
            });
        }
        // A queued signal carries its sender and a value.
        for number in catchable.clone() {
            sender.ask(&format!("queue {number} {tool} 1"), "queued");
        }
        let queued = |number| [number, -1, sender.pid(), 0];
        let mut caught = waiting.caught_all(catchable.clone().count(), 12);
        caught.sort_unstable();
        assert_eq!(caught, catchable.map(queued).collect::<Vec<_>>());
        waiting.tool.send("quit");
        assert_eq!(waiting.tool.guard().wait().code(), Some(0));
    }
}

// promise: Launching programs: A thousand queued signals are passed on in order (2 × 1,000)
#[test]
fn thousand_queued_signals_arrive_in_order() {
    const COUNT: i32 = 1000;
    let mut sender = Talker::start(&fixture("job.pie"));
    for file in fixture_forms("job") {
        let mut waiting = WaitingTool::for_program(&file);
        let tool = waiting.tool.pid();
        waiting.tool.ask(&format!("catch {REAL_TIME}"), "catching");
        sender.ask(&format!("queue {REAL_TIME} {tool} {COUNT}"), "queued");
        let caught = waiting.caught_all(COUNT as usize, 12);
        let values: Vec<i32> = caught.iter().map(|signal| signal[3]).collect();
        assert_eq!(values, (0..COUNT).collect::<Vec<_>>());
    }
}

#[test]
fn signals_from_the_program_are_not_passed_back() {
    for file in fixture_forms("job") {
        let mut waiting = WaitingTool::for_program(&file);
        let tool = waiting.tool.pid();
        for number in [1, 2, 10, 15, REAL_TIME] {
            waiting.tool.ask(&format!("catch {number}"), "catching");
            waiting.tool.ask(&format!("send {number} {tool}"), "sent");
            waiting
                .tool
                .ask(&format!("queue {number} {tool} 1"), "queued");
        }
        assert_eq!(waiting.caught_all(0, 12), [] as [[i32; 4]; 0]);
        assert!(waiting.tool.guard().is_running());
    }
}

#[test]
fn default_action_ends_the_program_and_the_tool() {
    for number in [1, 2, 3, 15] {
        let mut tool = Command::new("prlimit");
        tool.arg("--core=0").arg(env!("CARGO_BIN_EXE_ocaml-probes"));
        let file = fixture("job.nopie");
        let mut waiting = WaitingTool::started_by(tool.args(WAIT).arg(&file));
        send(waiting.tool.pid(), number);
        let status = waiting.tool.guard().wait();
        assert_eq!(status.code(), Some(128 + number), "{status}");
        assert_eq!(state(waiting.program), None, "it is reaped");
    }
}

#[test]
fn alarm_that_the_tool_inherits_ends_the_program() {
    let mut perl = Command::new("perl");
    perl.args(["-e", "alarm 10; exec @ARGV"])
        .arg(env!("CARGO_BIN_EXE_ocaml-probes"))
        .args(WAIT)
        .arg(fixture("job.pie"));
    let mut waiting = WaitingTool::started_by(&mut perl);
    assert_eq!(waiting.tool.guard().wait().code(), Some(128 + 14));
}

// promise: Launching programs: The program runs on when the tool is killed
#[test]
fn program_runs_on_when_the_tool_is_killed() {
    for file in fixture_forms("job") {
        let mut waiting = WaitingTool::for_program(&file);
        send(waiting.tool.pid(), SIGKILL);
        waiting.tool.guard().wait();
        assert_eq!(waiting.tool.ask("run", "hits"), "hits ping=0 pong=0");
        waiting.tool.close_input();
        eventually("the program ends", || {
            matches!(state(waiting.program), None | Some('Z')).then_some(())
        });
    }
}

#[test]
fn waiting_takes_no_processor_time() {
    let mut waiting = WaitingTool::for_program(&fixture("job.pie"));
    let tool = waiting.tool.pid();
    // The tool starts the program with the help of threads, which end first. 7 is poll(2).
    eventually("the tool does nothing but poll", || {
        let syscall = fs::read_to_string(format!("/proc/{tool}/syscall")).unwrap();
        (status(tool, "Threads") == "1" && syscall.starts_with("7 ")).then_some(())
    });
    let switches = || status(tool, "voluntary_ctxt_switches");
    let before = switches();
    for _ in 0..100 {
        waiting.tool.ask("counters", "sem");
    }
    assert_eq!(switches(), before, "it has not even been woken");
}

#[test]
fn separate_job_stops_and_continues_as_one() {
    for file in fixture_forms("job") {
        let mut waiting = WaitingTool::started_by(command(WAIT).arg(&file).process_group(0));
        let (tool, program) = (waiting.tool.pid(), waiting.program);
        let assert_stopped_by = |signal| {
            let by = eventually("the tool stops", || {
                let flags = WaitPidFlag::WSTOPPED | WaitPidFlag::WNOHANG;
                match waitid(Id::Pid(Pid::from_raw(tool)), flags).unwrap() {
                    WaitStatus::Stopped(_, by) => Some(by),
                    _ => None,
                }
            });
            assert_eq!(by, signal);
            assert_eq!(
                state(program),
                Some('T'),
                "the program stops before the tool"
            );
        };
        // To the tool alone, as kill(1) sends it; to the program alone; to both, as a shell sends it.
        for (signal, receiver) in [
            (Signal::SIGTSTP, tool),
            (Signal::SIGTTIN, tool),
            (Signal::SIGTTOU, program),
            (Signal::SIGSTOP, program),
            (Signal::SIGTSTP, -tool),
            (Signal::SIGTTOU, -tool),
        ] {
            kill(Pid::from_raw(receiver), signal).unwrap();
            assert_stopped_by(signal);
            // SIGCONT is sent to both; then, after another stop, to the tool alone.
            for continued in [-tool, tool] {
                if continued == tool {
                    kill(Pid::from_raw(receiver), signal).unwrap();
                    assert_stopped_by(signal);
                }
                kill(Pid::from_raw(continued), Signal::SIGCONT).unwrap();
                wait_for_state(tool, 'S');
                waiting.tool.ask("counters", "sem");
            }
        }
        waiting.tool.send("exit 3");
        assert_eq!(waiting.tool.guard().wait().code(), Some(3));
    }
}

#[test]
fn job_runs_on_after_stop_and_continue() {
    const ROUNDS: usize = 500;
    for file in fixture_forms("job") {
        let mut waiting = WaitingTool::started_by(command(WAIT).arg(&file).process_group(0));
        let tool = Pid::from_raw(waiting.tool.pid());
        for _ in 0..ROUNDS {
            // The stop is sent with kill, so the tool passes it on, too: it must not do so after
            // the program was continued.
            killpg(tool, Signal::SIGTSTP).unwrap();
            killpg(tool, Signal::SIGCONT).unwrap();
            waiting.tool.ask("counters", "sem");
            wait_for_state(tool.as_raw(), 'S');
            waiting.tool.ask("counters", "sem");
        }
        waiting.tool.send("exit 6");
        assert_eq!(waiting.tool.guard().wait().code(), Some(6));
    }
}

#[test]
fn handler_of_sigtstp_decides_when_the_job_stops() {
    let mut waiting =
        WaitingTool::started_by(command(WAIT).arg(fixture("job.pie")).process_group(0));
    let tool = waiting.tool.pid();
    waiting.tool.ask(&format!("catch {SIGTSTP}"), "catching");
    send(tool, SIGTSTP);
    eventually("it is caught", || {
        (waiting.caught() == [[SIGTSTP, 0, tool, 0]]).then_some(())
    });
    // The program has not stopped.
    wait_for_state(tool, 'S');
    waiting.tool.send("raise 19");
    wait_for_state(tool, 'T');
    killpg(Pid::from_raw(tool), Signal::SIGCONT).unwrap();
    waiting.tool.expect("raised 19");
    wait_for_state(tool, 'S');
}

#[test]
fn without_job_control_the_tool_does_not_stop() {
    for file in fixture_forms("job") {
        let mut waiting = WaitingTool::for_program(&file);
        let (tool, program) = (waiting.tool.pid(), waiting.program);
        settle(program);
        // A throttle or a debugger stops the program like this. It continues only the program, so the tool must not
        // stop with it.
        for _ in 0..20 {
            send(program, SIGSTOP);
            wait_for_state(program, 'T');
            send(program, SIGCONT);
            waiting.tool.ask("counters", "sem");
        }
        wait_for_state(tool, 'S');
        // The program is stopped: a signal that continues the tool continues the program.
        send(program, SIGSTOP);
        wait_for_state(program, 'T');
        wait_for_state(tool, 'S');
        send(tool, SIGCONT);
        waiting.tool.ask("counters", "sem");
        // A tool that is stopped by SIGSTOP does not stop the program, which still answers and exits.
        send(tool, SIGSTOP);
        wait_for_state(tool, 'T');
        waiting.tool.ask("counters", "sem");
        waiting.tool.send("exit 5");
        wait_for_state(program, 'Z');
        send(tool, SIGCONT);
        assert_eq!(waiting.tool.guard().wait().code(), Some(5));
    }
}

/// The signal sets of a process as /proc shows them, and its session.
fn inheritance(pid: i32) -> Vec<String> {
    let signals = ["SigBlk", "SigIgn", "SigCgt", "SigPnd", "ShdPnd"].map(|name| {
        let set = u64::from_str_radix(&status(pid, name), 16).unwrap();
        // Without signals 32 and 33: they are the C library's own, and may differ between the two
        // ways in which it starts programs.
        format!("{name} {:x}", set & !(3 << 31))
    });
    let mut all = signals.to_vec();
    all.push(format!("session {}", test_support::process::stat(pid, 6)));
    all
}

#[test]
fn program_inherits_signal_dispositions_as_usual() {
    for file in fixture_forms("job") {
        for signals in [
            vec![],
            vec!["--ignore-signal=CHLD,HUP,INT,USR1,TSTP"],
            vec!["--block-signal=INT,TERM,CHLD,CONT,USR2,SEGV"],
            vec!["--ignore-signal=CHLD,QUIT", "--block-signal=CHLD,HUP,TTOU"],
        ] {
            let env_command = || {
                let mut env = Command::new("env");
                env.args(&signals);
                env
            };
            let mut direct = Talker::spawn(env_command().arg(&file));
            direct.expect("ready");
            let mut tool = env_command();
            tool.arg(env!("CARGO_BIN_EXE_ocaml-probes"));
            let mut waiting = WaitingTool::started_by(tool.args(WAIT).arg(&file));
            for pid in [direct.pid(), waiting.program] {
                settle(pid);
            }
            assert_eq!(
                inheritance(waiting.program),
                inheritance(direct.pid()),
                "{signals:?}"
            );
            let group = |pid| test_support::process::stat(pid, 5);
            assert_eq!(group(waiting.program), group(waiting.tool.pid()));
            let descriptors = |pid| test_support::process::descriptors(pid).len();
            assert_eq!(descriptors(waiting.program), descriptors(direct.pid()));
            // A process that ignores SIGCHLD gets no exit status of its children (wait(2)); the tool has to get it.
            waiting.tool.send("exit 9");
            assert_eq!(waiting.tool.guard().wait().code(), Some(9), "{signals:?}");
        }
    }
}

#[test]
fn answer_is_printed_before_waiting() {
    let mut waiting = ToolWithStderr::start(command(["trace", "-wait", "-json", "-prog"]));
    let json = waiting.read_object();
    assert_eq!(
        children(waiting.tool.pid()),
        [json["pid"].as_i64().unwrap() as i32]
    );
    waiting.tool.expect("ready");
    waiting.tool.send("exit 4");
    assert_eq!(waiting.tool.guard().wait().code(), Some(4));
}

#[test]
fn unwritable_answer_does_not_end_the_wait() {
    let flags = ["trace", "-wait", "-json", "-o", "/dev/full", "-prog"];
    let mut waiting = ToolWithStderr::start(command(flags));
    let error = waiting.read_object();
    let pid = children(waiting.tool.pid())[0];
    assert_eq!(error["kind"], "done_unwritten");
    assert_eq!(
        error["message"],
        format!(
            "cannot write the output to /dev/full: No space left on device; the program runs as process {pid}"
        )
    );
    waiting.tool.expect("ready");
    waiting.tool.send("exit 0");
    assert_eq!(waiting.tool.guard().wait().code(), Some(0), "the program's");
}

/// The tool, which waits for a program, and its standard error.
struct ToolWithStderr {
    tool: Talker,
    errors: BufReader<ChildStderr>,
}

impl ToolWithStderr {
    fn start(mut command: Command) -> ToolWithStderr {
        command
            .arg(fixture("job.pie"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut guard = Guard::spawn(&mut command);
        let errors = BufReader::new(guard.child().stderr.take().unwrap());
        let tool = Talker::of(guard);
        ToolWithStderr { tool, errors }
    }

    /// Reads the next JSON object from the tool's standard error.
    fn read_object(&mut self) -> Value {
        let mut line = String::new();
        self.errors.read_line(&mut line).unwrap();
        object(&line)
    }
}

#[test]
fn program_that_cannot_start_is_an_error() {
    for (prog, code) in [("/nowhere/x", Some(1)), ("", Some(2))] {
        let run = run_command(command(["trace", "-wait", "-prog"]).arg(prog));
        assert_eq!(run.code, code, "{run:?}");
        assert_eq!(run.stdout, "");
    }
    let error = run_on("trace -wait -enable fooai", &program("terminating")).failure();
    assert!(error.contains("did you mean \"fooia\"?"), "{error}");
}
