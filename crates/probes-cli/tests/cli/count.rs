//! `count`: hits of running programs, in all formats.

use std::ffi::OsStr;
use std::fs::{self, OpenOptions};
use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Command, Stdio};

use nix::sys::signal::{Signal, kill, killpg};
use nix::sys::stat::Mode;
use nix::unistd::{Pid, mkfifo};
use serde_json::Value;
use test_support::tmux::Terminal;
use test_support::{Guard, Scratch, Talker, eventually, fixture, fixture_forms};

use crate::observers::wait_for_reading;
use crate::support::{both_forms, command, image, is_observed, object, run, states};

/// Starts the tool, and waits until it counts.
fn counting(line: &str, pid: i32) -> Talker {
    start_observing(&format!("count {line}"), pid)
}

/// Starts the tool, and waits until it observes a process.
pub(crate) fn start_observing(line: &str, pid: i32) -> Talker {
    start_observing_with(line.split(' '), pid)
}

/// Same as [`start_observing`], with arguments that may contain spaces.
pub(crate) fn start_observing_with<W: AsRef<OsStr>>(
    words: impl IntoIterator<Item = W>,
    pid: i32,
) -> Talker {
    start_observing_with_command(&mut command(words), pid)
}

fn start_observing_with_command(tool: &mut Command, pid: i32) -> Talker {
    let mut tool = Talker::spawn(tool.args(["-pid", &pid.to_string()]));
    // Sites are patched last, after memory is mapped: once `info` reports them, the tool observes.
    eventually("its sites are observed", || {
        let info = run(&format!("info -pid {pid}"));
        if info.stderr.contains("observed") {
            return Some(());
        }
        let status = tool.guard().child().try_wait().unwrap();
        assert_eq!(
            status, None,
            "the tool has exited; `info` prints {}",
            info.stderr
        );
        None
    });
    tool
}

pub(crate) fn end(mut tool: Talker, signal: Signal) -> Vec<String> {
    kill(Pid::from_raw(tool.pid()), signal).unwrap();
    let lines: Vec<String> = std::iter::from_fn(|| tool.line()).collect();
    assert_eq!(tool.guard().wait().code(), Some(0));
    lines
}

/// Hits and names of plain lines.
fn hits(lines: &[String]) -> Vec<String> {
    let hit = |line: &String| {
        let words: Vec<&str> = line.split(' ').collect();
        let rate: f64 = words[1].parse().unwrap();
        assert!(rate >= 0.0);
        format!("{} {}", words[0], words[2])
    };
    lines.iter().map(hit).collect()
}

#[test]
fn hits_are_counted_until_interrupted_then_all_restored() {
    for mut target in both_forms("gen_ocaml") {
        let pid = target.pid();
        let before = image(pid);
        for signal in [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP] {
            let tool = counting("-quiet", pid);
            for _ in 0..10 {
                target.hits();
            }
            assert_eq!(hits(&end(tool, signal)), ["30 shared", "10 only_alpha"]);
            assert!(!is_observed(pid));
        }
        let after = image(pid);
        // Only the lengths are compared: the target counts its own runs in its memory.
        assert_eq!(before.len(), after.len());
        assert_eq!(states(pid), "only_alpha disabled\nshared disabled\n");
    }
}

#[test]
fn only_selected_probes_are_counted() {
    for mut target in both_forms("gen_ocaml") {
        let pid = target.pid();
        for line in ["-probe only_alpha", "-regexp only"] {
            let tool = counting(&format!("-quiet {line}"), pid);
            target.hits();
            assert_eq!(hits(&end(tool, Signal::SIGINT)), ["1 only_alpha"]);
        }
        let tool = counting("-quiet -probe only_alpha,shared -sites", pid);
        target.hits();
        let lines = end(tool, Signal::SIGINT);
        assert_eq!(
            hits(&lines),
            ["1 only_alpha", "1 shared", "1 shared", "1 shared"]
        );
        assert!(lines.iter().all(|line| line.contains(" 0x")), "{lines:?}");
    }
}

#[test]
fn last_json_line_has_all_hits_others_new() {
    for mut target in both_forms("gen_ocaml") {
        let mut tool = counting("-quiet -json -interval 1ms -for 1h", target.pid());
        let answer = |tool: &mut Talker| object(&tool.line().unwrap());
        let first = answer(&mut tool);
        assert_eq!(first["pid"], target.pid());
        assert_eq!(first["version"], 1);
        target.hits();
        let mut seen = 0;
        while seen < 3 {
            let next = answer(&mut tool);
            assert!(next["at"].as_f64() > first["at"].as_f64());
            let probes = next["probes"].as_array().unwrap();
            let shared = probes
                .iter()
                .find(|probe| probe["name"] == "shared")
                .unwrap();
            seen += shared["hits"].as_u64().unwrap();
        }
        let lines = end(tool, Signal::SIGINT);
        let last = object(lines.last().unwrap());
        assert_eq!(last["at"], Value::Null);
        assert_eq!(last["probes"][0]["name"], "shared");
        assert_eq!(last["probes"][0]["hits"], 3);
    }
}

#[test]
fn tables_of_intervals_have_their_time() {
    for target in both_forms("gen_ocaml") {
        let mut tool = counting("-quiet -format table -interval 1ms", target.pid());
        assert_eq!(
            words(&tool.line().unwrap()),
            ["seconds", "probe", "hits", "hits/s"]
        );
        let row = std::iter::from_fn(|| tool.line()).find(|line| line.contains(" shared "));
        let row = row.unwrap();
        assert!(words(&row)[0].parse::<f64>().is_ok(), "{row}");
        let lines = end(tool, Signal::SIGINT);
        // The last table is that of all hits.
        let head = words(&lines[lines.len() - 4]);
        assert_eq!(head, ["probe", "hits", "hits/s"]);
    }
}

fn words(line: &str) -> Vec<&str> {
    let words = line.split_whitespace();
    words.filter(|word| *word != "|").collect()
}

#[test]
fn hits_of_intervals_add_up_to_all() {
    for mut target in both_forms("gen_ocaml") {
        let mut tool = counting("-quiet -json -interval 1ms", target.pid());
        // At least one interval ends before the hits, which may come after the last interval that is printed.
        let first = object(&tool.line().unwrap());
        target.hits();
        let lines = end(tool, Signal::SIGINT);
        let mut objects: Vec<Value> = lines.iter().map(|line| object(line)).collect();
        let total = objects.pop().unwrap();
        let at = |it: &Value| it["at"].as_f64();
        assert!(at(&total).is_none() && at(objects.last().unwrap_or(&first)) > Some(0.0));
        let seconds = |it: &Value| it["seconds"].as_f64().unwrap();
        let intervals = || std::iter::once(&first).chain(&objects);
        assert!((intervals().map(seconds).sum::<f64>() - seconds(&total)).abs() < 1e-6);
        for name in ["shared", "only_alpha"] {
            let hits = |it: &Value| {
                let probes = it["probes"].as_array().unwrap();
                let probe = probes.iter().find(|probe| probe["name"] == name).unwrap();
                probe["hits"].as_u64().unwrap()
            };
            assert_eq!(
                intervals().map(hits).sum::<u64>(),
                hits(&total),
                "{lines:?}"
            );
        }
    }
}

#[test]
fn count_ends_after_its_duration_or_the_process() {
    for mut target in both_forms("gen_ocaml") {
        let pid = target.pid();
        let timed = run(&format!("count -quiet -for 1ms -pid {pid}")).answer();
        let lines: Vec<String> = timed.lines().map(str::to_owned).collect();
        assert_eq!(hits(&lines), ["0 only_alpha", "0 shared"]);
        let mut tool = counting("-interval 1ms", pid);
        tool.line().unwrap();
        target.send("quit");
        while tool.line().is_some() {}
        assert_eq!(tool.guard().wait().code(), Some(0));
    }
}

// promise: Observations: A process that ends before an interval is over: the tool prints the values
//    read in between (2 × 2 ends × 2 intervals)
#[test]
fn values_between_intervals_are_printed_at_the_end() {
    for file in fixture_forms("exec_self") {
        for end in ["exec", "quit"] {
            for interval in ["", " -interval 1h"] {
                let mut target = Talker::start(&file);
                let mut tool = counting(&format!("-quiet{interval}"), target.pid());
                target.hits();
                wait_for_reading(tool.pid());
                target.send(end);
                let lines: Vec<String> = std::iter::from_fn(|| tool.line()).collect();
                let counted = hits(&lines);
                assert!(!counted.is_empty(), "{end}{interval}");
                assert!(
                    !counted[0].starts_with("0 "),
                    "{end}{interval}: {counted:?}"
                );
                assert_eq!(tool.guard().wait().code(), Some(0));
            }
        }
    }
}

// promise: Observations: If standard output cannot be written, the results are on standard error (2
//    tools)
#[test]
fn results_go_to_stderr_if_stdout_fails() {
    let mut target = Talker::start(&fixture("timed.pie"));
    let pid = target.pid();
    let full = || OpenOptions::new().write(true).open("/dev/full").unwrap();
    for (line, result) in [
        // The write fails at the end, or at an interval before it.
        ("count -for 1ms", "0 0.0 start\n"),
        ("count -interval 1ms", " start\n"),
        ("latency -pair start,stop -for 1ms", " start,stop\n"),
        ("latency -pair start,stop -interval 1ms", " start,stop\n"),
    ] {
        let mut command = command(line.split(' '));
        command.args(["-quiet", "-pid", &pid.to_string()]);
        let tool = command.stdout(full()).stderr(Stdio::piped()).spawn();
        let output = tool.unwrap().wait_with_output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{line}: {said}");
        assert!(said.contains(result), "{line}: {said}");
        let why = "ocaml-probes: cannot write the output: No space left on device\n";
        assert!(said.ends_with(why), "{line}: {said}");
        assert_eq!(said.matches("cannot write").count(), 1, "{line}: {said}");
        assert!(!is_observed(pid));
    }
    target.hits();
}

#[test]
fn results_go_to_stderr_if_stdout_blocks() {
    for target in both_forms("gen_ocaml") {
        let pid = target.pid();
        // Standard output, and a named pipe given by -o; each is open for reading, and nothing reads it.
        for is_file in [false, true] {
            let mut count = command("count -quiet -json -interval 1us -pid".split(' '));
            count.arg(pid.to_string()).stdin(Stdio::null());
            let (scratch, mut reader) = (Scratch::new(), None);
            if is_file {
                let pipe = scratch.file("pipe");
                mkfifo(&pipe, Mode::S_IRWXU).unwrap();
                reader = Some(
                    OpenOptions::new()
                        .read(true)
                        .write(true)
                        .open(&pipe)
                        .unwrap(),
                );
                count.arg("-o").arg(&pipe);
            }
            let mut tool = Guard::spawn(count.stdout(Stdio::piped()).stderr(Stdio::piped()));
            assert_results_on_stderr(&mut tool);
            assert!(!is_observed(pid));
            drop(reader);
        }
    }
}

// promise: Observations: If a signal ends a command while nobody reads its answer, it says that the answer is cut off (2 commands)
#[test]
fn unread_answers_are_reported_as_cut_off() {
    let target = Talker::start(&fixture("threads_spin.pie"));
    let pid = target.pid();
    for line in ["count -format plain -interval 1us", "watch -probe ping"] {
        let mut tool = command(line.split(' '));
        tool.args(["-pid", &pid.to_string()]).stdin(Stdio::null());
        let mut tool = Guard::spawn(tool.stdout(Stdio::piped()).stderr(Stdio::piped()));
        wait_for_reader(&tool);
        kill(Pid::from_raw(tool.pid()), Signal::SIGTERM).unwrap();
        let said = std::io::read_to_string(tool.child().stderr.take().unwrap()).unwrap();
        let warning = "ocaml-probes: warning: the answer is cut off, perhaps within a line: ";
        assert_eq!(said.matches(warning).count(), 1, "{line}: {said}");
        assert_eq!(tool.wait().code(), Some(0));
        assert!(!is_observed(pid));
    }
}

/// Waits until a tool waits for its reader: it is in poll(2), without a timeout, for a signal and for its output.
#[track_caller]
fn wait_for_reader(tool: &Guard) {
    eventually("it waits for its reader", || {
        let call = std::fs::read_to_string(format!("/proc/{}/syscall", tool.pid())).unwrap();
        let words: Vec<&str> = call.split(' ').collect();
        let limit = words.get(3).unwrap_or(&"");
        (words[0] == "7" && words[2] == "0x2" && limit.ends_with("ffffffff")).then_some(())
    });
}

/// Interrupts `count -json` while it waits for its reader; asserts that the results are on standard error.
#[track_caller]
fn assert_results_on_stderr(tool: &mut Guard) {
    wait_for_reader(tool);
    kill(Pid::from_raw(tool.pid()), Signal::SIGTERM).unwrap();
    let said = std::io::read_to_string(tool.child().stderr.take().unwrap()).unwrap();
    let last = object(&said);
    assert_eq!(last["at"], Value::Null);
    assert_eq!(last["probes"][0]["hits"], 0);
    assert_eq!(tool.wait().code(), Some(0));
}

/// Reads the lines of intervals until they have this number of hits together: those of one run may be in several.
pub(crate) fn wait_for_hits(mut next_line: impl FnMut() -> Option<String>, expected: u64) {
    let mut hits = 0;
    while hits < expected {
        let line = next_line().unwrap();
        // After the time.
        hits += line.split(' ').nth(1).unwrap().parse::<u64>().unwrap();
    }
}

// promise: Observations: If one interrupt ends the tool and the process, the tool prints the values
//    read last (10)
#[test]
fn interrupt_ending_the_process_prints_the_last_values() {
    for file in fixture_forms("gen_ocaml") {
        for _ in 0..5 {
            let mut target = Talker::start_job(&file);
            let pid = target.pid();
            let words = ["count", "-quiet", "-interval", "1ms"];
            let mut tool = start_observing_with_command(command(words).process_group(pid), pid);
            target.hits();
            // Three of `shared`, and one of `only_alpha`.
            wait_for_hits(|| tool.line(), 4);
            killpg(Pid::from_raw(pid), Signal::SIGINT).unwrap();
            assert_eq!(target.guard().wait().signal(), Some(Signal::SIGINT as i32));
            let lines: Vec<String> = std::iter::from_fn(|| tool.line()).collect();
            assert_eq!(tool.guard().wait().code(), Some(0), "{lines:?}");
            let total = hits(&lines[lines.len() - 2..]);
            assert_eq!(total, ["3 shared", "1 only_alpha"]);
        }
    }
}

#[test]
fn table_on_a_terminal_is_refreshed() {
    for mut target in both_forms("gen_ocaml") {
        let pid = target.pid();
        let terminal = Terminal::open(40, 12);
        let tool = env!("CARGO_BIN_EXE_ocaml-probes");
        terminal.type_line(&format!(
            "clear; {tool} count -quiet -interval 10ms -pid {pid}"
        ));
        terminal.wait_for(" shared     | 0    | 0");
        for hits in ["3", "6"] {
            target.hits();
            terminal.wait_for(&format!(" shared     | {hits}    | 0"));
        }
        terminal.press(&["C-c"]);
        terminal.wait_for("$");
        assert!(!is_observed(pid));
        assert_eq!(terminal.screen().matches("hits/s").count(), 1);
    }
}

#[test]
fn last_message_stays_on_the_terminal() {
    for file in fixture_forms("gen_ocaml") {
        for line in ["count", "latency -pair only_alpha,shared"] {
            let target = Talker::start(&file);
            let pid = target.pid();
            let terminal = Terminal::open(100, 30);
            let tool = env!("CARGO_BIN_EXE_ocaml-probes");
            terminal.type_line(&format!("clear; {tool} {line} -interval 10ms -pid {pid}"));
            terminal.wait_for("only_alpha | ");
            drop(target);
            let is_over = |screen: &str| screen.trim_end().ends_with('$');
            let screen = terminal.wait_until("the end", is_over);
            let lines: Vec<&str> = screen.lines().collect();
            assert!(lines[0].starts_with("stopped "), "{screen}");
            let warning = "ocaml-probes: warning: the process has exited: ";
            assert!(lines[1].starts_with(warning), "{screen}");
            assert_eq!(screen.matches("only_alpha | ").count(), 1, "{screen}");
        }
    }
}

#[test]
fn resumed_count_overwrites_nothing_on_the_terminal() {
    let drawn = "only_alpha | ";
    for target in both_forms("gen_ocaml") {
        for line in ["count", "latency -pair only_alpha,shared"] {
            let pid = target.pid();
            let terminal = Terminal::open(60, 30);
            let tool = env!("CARGO_BIN_EXE_ocaml-probes");
            terminal.type_line(&format!("{tool} {line} -quiet -interval 10ms -pid {pid}"));
            terminal.wait_for(drawn);
            terminal.press(&["C-z"]);
            terminal.wait_for("Stopped");
            terminal.type_line("seq 1001 1004");
            terminal.wait_for("1004\n$");
            terminal.type_line("fg");
            let has_two = |screen: &str| screen.matches(drawn).count() == 2;
            terminal.wait_until("a second table", has_two);
            terminal.press(&["C-c"]);
            let is_over = |screen: &str| screen.trim_end().ends_with('$');
            let screen = terminal.wait_until("the end", is_over);
            assert!(screen.contains("\n1001\n1002\n1003\n1004\n"), "{screen}");
            assert!(!is_observed(pid));
        }
    }
}

// promise: Observations: What a killed tool has left is reported, and removed by the next
//    observation (2)
#[test]
fn next_count_removes_what_a_killed_one_left() {
    for file in fixture_forms("gen_ocaml") {
        let mut target = Talker::start(&file);
        let pid = target.pid();
        let mut tool = counting("-quiet", pid);
        kill(Pid::from_raw(tool.pid()), Signal::SIGKILL).unwrap();
        tool.guard().wait();
        assert!(is_observed(pid));
        target.hits();
        let info = run(&format!("info -pid {pid}"));
        let json = run(&format!("info -quiet -json -pid {pid}")).json();
        assert_eq!(json["observed_sites"], 4);
        assert!(
            info.stderr
                .contains("4 sites are instrumented, but no observer reads them"),
            "{}",
            info.stderr
        );
        assert_eq!(info.answer(), "only_alpha disabled\nshared disabled\n");
        run(&format!("count -quiet -for 1ms -pid {pid}")).answer();
        assert!(!is_observed(pid));
        target.hits();
    }
}

// promise: Observations: The tool reports memory that stays mapped (2)
#[test]
fn memory_that_stays_mapped_is_reported() {
    for file in fixture_forms("seccomp") {
        let mut target = Talker::start_with(&file, ["later"]);
        let pid = target.pid();
        let mut count = command(["count", "-probe", "ping"]);
        let mut tool = start_observing_with_command(count.stderr(Stdio::piped()), pid);
        target.ask("forbid", "forbidden");
        target.hits();
        kill(Pid::from_raw(tool.pid()), Signal::SIGINT).unwrap();
        let lines: Vec<String> = std::iter::from_fn(|| tool.line()).collect();
        assert_eq!(hits(&lines), ["3 ping"]);
        let errors = std::io::read_to_string(tool.guard().child().stderr.take().unwrap()).unwrap();
        assert_eq!(tool.guard().wait().code(), Some(0));
        let line = format!("observe -clean -pid {pid}");
        let what = format!("bytes stay mapped in process {pid} (harmless)");
        assert!(errors.contains(&what) && errors.contains(&line), "{errors}");
        let info = run(&format!("info -pid {pid}"));
        assert!(!info.stderr.contains("observed"), "{}", info.stderr);
        let cleaned = run(&line);
        assert_eq!(cleaned.stdout, format!("{pid} 0\n"));
        assert!(cleaned.stderr.contains(&what), "{}", cleaned.stderr);
        let json = run(&format!("{line} -json -quiet")).json();
        assert!(json["still_mapped"].as_u64().unwrap() > 0);
        target.hits();
    }
}

// promise: Observations: The tool tries again to remove an observation from a process that cannot
//    be stopped (2)
#[test]
fn removal_is_retried_until_the_process_can_stop() {
    for file in fixture_forms("vforker") {
        let mut target = Talker::start(&file);
        let pid = target.pid();
        let mut count = command(["count", "-verbose", "-probe", "ping"]);
        let mut tool = start_observing_with_command(count.stderr(Stdio::piped()), pid);
        target.hits();
        target.vfork();
        kill(Pid::from_raw(tool.pid()), Signal::SIGINT).unwrap();
        let stderr = BufReader::new(tool.guard().child().stderr.take().unwrap());
        let mut errors = stderr.lines().map(Result::unwrap);
        assert!(errors.any(|line| line.starts_with("trying again: ")));
        target.ask("", "vforked");
        let lines: Vec<String> = std::iter::from_fn(|| tool.line()).collect();
        assert_eq!(hits(&lines), ["3 ping"]);
        assert_eq!(tool.guard().wait().code(), Some(0));
        assert!(!is_observed(pid));
        target.hits();
    }
}

// promise: Observations: If the observation can only be removed later, rates are those of the time until then, and a note says
//    so (2)
#[test]
fn time_ends_when_the_observation_is_removed() {
    for file in fixture_forms("vforker") {
        let mut target = Talker::start(&file);
        let pid = target.pid();
        let mut count = command("count -for 4s -probe ping".split(' '));
        let mut tool = start_observing_with_command(count.stderr(Stdio::piped()), pid);
        target.hits();
        target.vfork();
        let stderr = BufReader::new(tool.guard().child().stderr.take().unwrap());
        let mut errors = stderr.lines().map(Result::unwrap);
        assert!(
            errors.any(|line| line.starts_with("not restored so far, trying for up to 30 s: "))
        );
        target.ask("", "vforked");
        let answer = tool.line().unwrap();
        let words: Vec<&str> = answer.split(' ').collect();
        assert_eq!((words[0], words[2]), ("3", "ping"));
        // 0.8 in the 4 seconds alone.
        assert!(words[1].parse::<f64>().unwrap() < 0.7, "{answer}");
        assert!(errors.any(|line| line.starts_with("the figures are of ")));
        assert_eq!(tool.guard().wait().code(), Some(0));
    }
}

// promise: Observations: If the observation cannot be removed, the tool says so and prints the
//    values read last (2)
#[test]
fn failed_removal_is_reported_with_the_last_values() {
    for file in fixture_forms("vforker") {
        let mut target = Talker::start(&file);
        let pid = target.pid();
        let mut count = command("count -verbose -interval 1ms -probe ping".split(' '));
        let mut tool = start_observing_with_command(count.stderr(Stdio::piped()), pid);
        target.hits();
        wait_for_hits(|| tool.line(), 3);
        target.vfork();
        let stderr = BufReader::new(tool.guard().child().stderr.take().unwrap());
        let mut errors = stderr.lines().map(Result::unwrap);
        kill(Pid::from_raw(tool.pid()), Signal::SIGINT).unwrap();
        assert!(errors.any(|line| line.starts_with("trying again: ")));
        kill(Pid::from_raw(tool.pid()), Signal::SIGINT).unwrap();
        let lines: Vec<String> = std::iter::from_fn(|| tool.line()).collect();
        assert_eq!(hits(&lines[lines.len() - 1..]), ["3 ping"]);
        assert_eq!(tool.guard().wait().code(), Some(1));
        let errors: Vec<String> = errors.collect();
        let says = |what: &str| errors.iter().any(|line| line.contains(what));
        let clean = format!("observe -clean -pid {pid}");
        assert!(
            says(&format!(
                "process {pid} is still observed, because removing the observation failed: "
            )),
            "{errors:?}"
        );
        assert!(says(&clean), "{errors:?}");
        let last = format!(
            "process {pid} cannot be read any more: the results are those of the last reading"
        );
        assert!(says(&last), "{errors:?}");
        target.ask("", "vforked");
        target.hits();
        assert_eq!(run(&clean).answer(), format!("{pid} 3\n"));
        assert!(!is_observed(pid));
    }
}

#[test]
fn unknown_names_and_processes_are_errors() {
    for target in both_forms("gen_ocaml") {
        let failure = run(&format!("count -pid {} -probe nothing", target.pid())).failure();
        assert!(failure.contains("no probe \"nothing\" in "), "{failure}");
        assert!(failure.contains("nothing was changed"), "{failure}");
        assert!(!is_observed(target.pid()));
    }
}

/// Copies a program, with 2 GiB of debugging information, all but nothing of which is on the disk.
fn copy_with_large_debug_info(program: &Path, copy: &Path) {
    const LEN: u64 = 2 << 30;
    let mut bytes = fs::read(program).unwrap();
    let number = |at: usize, len: usize| {
        let mut number = [0; 8];
        number[..len].copy_from_slice(&bytes[at..at + len]);
        u64::from_le_bytes(number) as usize
    };
    // elf(5): e_shoff, e_shnum and e_shstrndx; of a section, sh_name, sh_offset and sh_size.
    let headers = number(0x28, 8);
    let names = number(headers + 64 * number(0x3e, 2) + 24, 8);
    let mut sections = (0..number(0x3c, 2)).map(|index| headers + 64 * index);
    let info = sections.find(|at| bytes[names + number(*at, 4)..].starts_with(b".debug_info\0"));
    let (info, end) = (info.unwrap(), bytes.len() as u64);
    bytes[info + 24..info + 32].copy_from_slice(&end.to_le_bytes());
    bytes[info + 32..info + 40].copy_from_slice(&LEN.to_le_bytes());
    fs::write(copy, bytes).unwrap();
    let file = OpenOptions::new().write(true).open(copy).unwrap();
    file.set_len(end + LEN).unwrap();
    file.set_permissions(PermissionsExt::from_mode(0o755))
        .unwrap();
}

#[test]
fn source_lines_left_out_are_reported_once() {
    let scratch = Scratch::new();
    let program = scratch.file("program");
    copy_with_large_debug_info(&fixture("gen_ocaml_2.nopie"), &program);
    let target = Talker::start(&program);
    let said = run(&format!("count -sites -for 1ms -pid {}", target.pid())).stderr;
    let warning = format!(
        "warning: source lines are missing: the debugging information of {} was not read",
        program.display()
    );
    assert_eq!(said.matches(&warning).count(), 1, "{said}");
}
