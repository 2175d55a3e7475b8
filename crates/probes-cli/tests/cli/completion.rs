//! Completion: what the tool answers, and what bash, zsh and fish make of it on a terminal.

use std::path::Path;

use test_support::tmux::Terminal;
use test_support::{Talker, fixture, fixture_forms, program_forms};

use crate::support::{command, run, run_command, states};

const TOOL: &str = env!("CARGO_BIN_EXE_ocaml-probes");

/// The words that complete the last of these.
fn completions(words: &[&str]) -> Vec<String> {
    let asked = ["completion", "-answer", "--"].iter().chain(words);
    let answer = run_command(&mut command(asked)).answer();
    let words = answer.lines().map(|line| line.split_once('\t').unwrap().0);
    words.map(str::to_owned).collect()
}

fn file_names_are_wanted(words: &[&str]) -> bool {
    let asked = ["completion", "-answer", "--"].iter().chain(words);
    run_command(&mut command(asked)).answer() == "\tfiles\n"
}

#[test]
fn subcommands_and_flags_are_those_of_the_help() {
    let help = run("help").answer();
    for name in completions(&[""]) {
        assert!(help.contains(&format!("  {name} ")), "{name}");
    }
    assert_eq!(completions(&["att"]), ["attach"]);
    assert_eq!(completions(&["help", "lat"]), ["latency"]);
    for (typed, expected) in [
        ("-enable-r", "-enable-regexp"),
        ("--enable-r", "--enable-regexp"),
    ] {
        assert_eq!(completions(&["attach", typed]), [expected]);
    }
    // Also after an abbreviated subcommand, and a value.
    assert_eq!(completions(&["att", "-p", "7", "-gig"]), ["-gigatext"]);
    let flags = completions(&["completion", "-"]);
    assert!(!flags.contains(&"-answer".to_owned()), "{flags:?}");
}

#[test]
fn values_of_flags_are_completed() {
    assert_eq!(
        completions(&["info", "-format", ""]),
        ["json", "plain", "table"]
    );
    assert_eq!(completions(&["info", "-format=j"]), ["-format=json"]);
    assert_eq!(
        completions(&["latency", "-gc", "minor,s"]),
        ["minor,slice", "minor,stw"]
    );
    // What is in the list is not offered again.
    assert_eq!(
        completions(&["latency", "-gc", "slice,minor,s"]),
        ["slice,minor,stw"]
    );
    assert_eq!(completions(&["completion", "z"]), ["zsh"]);
    assert_eq!(completions(&["info", "-limit", ""]), [""; 0]);
    assert_eq!(completions(&["nonsense", "-x", ""]), completions(&[""]));
    for words in [
        &["list", "-prog", ""][..],
        &["info", "-o", "x"],
        &["trace", "-prog", "a", "--", "b"],
    ] {
        assert!(file_names_are_wanted(words), "{words:?}");
    }
}

#[test]
fn probes_are_those_of_the_process() {
    for file in program_forms("service") {
        let target = Talker::start(&file);
        let pid = target.pid().to_string();
        let states = states(target.pid());
        let names = states.lines().map(|line| line.split(' ').next().unwrap());
        let names: Vec<&str> = names.collect();
        for flag in ["-enable", "-disable"] {
            assert_eq!(completions(&["attach", "-pid", &pid, flag, ""]), names);
        }
        assert_eq!(
            completions(&["count", "-p", &pid, "-probe", "req_s"]),
            ["req_start"]
        );
        let pair = completions(&["latency", &format!("-pid={pid}"), "-pair=req_start,req_e"]);
        assert_eq!(pair, ["-pair=req_start,req_end"]);
        // Of the file, too.
        let file = file.to_str().unwrap();
        assert_eq!(completions(&["trace", "-prog", file, "-enable", ""]), names);
        assert_eq!(completions(&["attach", "-enable", ""]), [""; 0]);
        assert_eq!(
            completions(&["attach", "-pid", "4194305", "-enable", ""]),
            [""; 0]
        );
    }
}

#[test]
fn functions_are_those_of_the_program() {
    for file in program_forms("service") {
        let target = Talker::start(&file);
        let pid = target.pid().to_string();
        let listed = run(&format!("list -functions -pid {pid}")).answer();
        let found = completions(&["count", "-pid", &pid, "-fn", "Service."]);
        assert!(found.contains(&"Service.serve".to_owned()), "{found:?}");
        for name in &found {
            let end = format!(" {name}");
            assert!(listed.lines().any(|line| line.ends_with(&end)), "{name}");
        }
        // Too many to be shown: the modules that they are in.
        let all = completions(&["count", "-pid", &pid, "-fn", ""]);
        assert!(all.len() <= 200, "{}", all.len());
        assert!(all.contains(&"Service.".to_owned()), "{all:?}");
        assert!(
            completions(&["count", "-pid", &pid, "-fn", "a,Service.ser"])
                .contains(&"a,Service.serve".to_owned())
        );
    }
}

#[test]
fn pids_have_the_names_of_their_programs() {
    for file in fixture_forms("gen_ocaml_2") {
        let target = Talker::start(&file);
        let pid = target.pid().to_string();
        let asked = ["completion", "-answer", "--", "info", "-pid", &pid];
        let answer = run_command(&mut command(asked)).answer();
        let name = Path::new(&file).file_name().unwrap().to_str().unwrap();
        assert!(answer.contains(&format!("{pid}\t{name}\n")), "{answer}");
    }
}

#[test]
fn names_are_those_of_running_programs() {
    let files = program_forms("service");
    let targets = files.map(|file| Talker::start(&file));
    let names = completions(&["count", "-name", "service"]);
    for name in ["service.exe", "service_nopie.exe"] {
        assert!(names.iter().any(|it| it == name), "{names:?}");
    }
    drop(targets);
}

#[test]
fn words_of_keys_are_completed() {
    for (words, expected) in [
        (&["profile", "-by", "s"][..], &["stack", "syscall"][..]),
        (&["count", "-by", "p"], &["pid", "probe"]),
        (&["top", "-by", ""], &["pid"]),
        (&["hist", "-by", "tid,p"], &["tid,probe"]),
        (&["latency", "-key", "p"], &[]),
    ] {
        assert_eq!(completions(words), expected, "{words:?}");
    }
}

/// A terminal in which a shell has read its script, and its prompt is `> `.
fn shell(name: &str) -> Terminal {
    let terminal = Terminal::open(150, 40);
    let directory = Path::new(TOOL).parent().unwrap().display();
    terminal.type_line(&format!("PATH='{directory}':$PATH; clear"));
    let (start, script) = match name {
        "bash" => ("PS1='> '", "source <(ocaml-probes completion bash)"),
        "zsh" => (
            "exec zsh -f",
            "PS1='> '; autoload -U compinit; compinit -D -u; source <(ocaml-probes completion zsh)",
        ),
        _ => (
            "HOME=$(mktemp -d) exec fish --no-config",
            "function fish_prompt; echo '> '; end; ocaml-probes completion fish | source",
        ),
    };
    terminal.type_line(start);
    terminal.type_line(&format!("{script}; clear; echo rea''dy"));
    terminal.wait_for("ready");
    terminal
}

/// Types `typed` in a command that is not run, and presses `tabs`; waits until the line or the list below it has
/// `shown`, and then for an empty line.
fn completed(terminal: &Terminal, typed: &str, tabs: &[&str], shown: &str) {
    let line = format!("false && {typed}");
    terminal.press(&["-l", &line]);
    terminal.wait_for(&line);
    terminal.press(tabs);
    terminal.wait_for(shown);
    // In the list of fish, the first one chooses.
    terminal.press(&["Enter"]);
    terminal.press(&["Enter"]);
    terminal.type_line("clear");
    terminal.wait_until("an empty line", |screen| screen.trim() == ">");
}

fn completes(name: &str) {
    let target = Talker::start(&program_forms("service")[0]);
    let other = Talker::start(&fixture("gen_ocaml_2.pie"));
    let pid = target.pid();
    let terminal = shell(name);
    let one = |typed: &str, shown: &str| completed(&terminal, typed, &["Tab"], shown);
    one("ocaml-probes lat", "ocaml-probes latency ");
    one("ocaml-probes attach -enable-r", "attach -enable-regexp ");
    one("ocaml-probes info -format=ta", "-format=table ");
    let line = format!("ocaml-probes latency -pid {pid} -pair req_start,req_e");
    one(&line, "-pair req_start,req_end ");
    let line = format!("ocaml-probes count -pid={pid} -fn=Service.ser");
    one(&line, "-fn=Service.serve");
    one("ocaml-probes list -prog=/etc/debian_ver", "debian_version");
    let line = format!("ocaml-probes count -pid '{pid}' -fn 'Calls.*,Service.ser");
    one(&line, "-fn 'Calls.*,Service.serve' ");
    let line = format!("ocaml-probes count -pid {pid} -fn \"Calls.*,Service.ser");
    one(&line, "-fn \"Calls.*,Service.serve\" ");
    one("ocaml-probes man rec", "man record ");
    // Several: with what they mean.
    let several = |typed: &str, shown: &str| completed(&terminal, typed, &["Tab", "Tab"], shown);
    let line = format!("ocaml-probes attach -pid {pid} -enable req_");
    several(&line, "req_end");
    let common = common_start(&pid.to_string(), &other.pid().to_string());
    several(&format!("ocaml-probes info -pid {common}"), "service.exe");
}

fn common_start(one: &str, other: &str) -> String {
    let pairs = one.chars().zip(other.chars());
    pairs.take_while(|(a, b)| a == b).map(|(a, _)| a).collect()
}

#[test]
fn bash_completes_on_a_terminal() {
    completes("bash");
}

#[test]
fn zsh_completes_on_a_terminal() {
    completes("zsh");
}

#[test]
fn fish_completes_on_a_terminal() {
    completes("fish");
}
