//! `doctor`: what is found, against what the commands then do.

use std::collections::BTreeMap;
use std::process::{Command, Stdio};

use nix::unistd::geteuid;
use serde_json::Value;
use test_support::{
    Guard, Scratch, Talker, as_nobody, eventually, fixture, fixture_forms, process, program,
    program_forms,
};

use crate::confined::without_proc;
use crate::support::{Directory, command, image, object, run, run_command, states};

const TOOL: &str = env!("CARGO_BIN_EXE_ocaml-probes");

/// What `doctor -json` says, whatever its exit status.
struct Diagnosis(Value);

impl Diagnosis {
    fn of(run: crate::support::Run) -> Diagnosis {
        assert_eq!(run.stderr, "");
        let diagnosis = Diagnosis(object(&run.stdout));
        let mut commands = diagnosis.list("commands").into_values();
        let fails = commands.any(|it| it["result"] == "fails");
        assert_eq!(run.code, Some(i32::from(fails)), "{}", diagnosis.0);
        diagnosis
    }

    fn of_process(pid: i32) -> Diagnosis {
        Diagnosis::of(run(&format!("doctor -json -pid {pid}")))
    }

    fn list(&self, list: &str) -> BTreeMap<String, Value> {
        let items = self.0[list].as_array().unwrap().iter();
        let named = |item: &Value| (item["name"].as_str().unwrap().to_owned(), item.clone());
        items.map(named).collect()
    }

    #[track_caller]
    fn check(&self, name: &str) -> Value {
        self.list("checks")[name].clone()
    }

    #[track_caller]
    fn command(&self, name: &str) -> Value {
        self.list("commands")[name].clone()
    }

    /// Asserts that a command fails for the reason and with the hint that `doctor` has for it.
    #[track_caller]
    fn assert_predicts(&self, check: &str, failure: &str) {
        let check = self.check(check);
        assert_eq!(check["result"], "fail", "{check}");
        let finding = check["finding"].as_str().unwrap();
        let hint = check["hint"].as_str().unwrap();
        let line = failure.lines().next().unwrap();
        let line = line.strip_suffix("; nothing was changed").unwrap_or(line);
        assert_eq!(line, format!("ocaml-probes: {finding}"));
        assert_eq!(failure.lines().nth(1).unwrap(), format!("hint: {hint}"));
    }
}

// promise: Bad input: `doctor` names each command, and changes no byte of the process (2 ×)
#[test]
fn doctor_changes_nothing_and_names_each_command() {
    let help = run("help").answer();
    let (_, rest) = help.split_once("Subcommands:\n").unwrap();
    let lines = rest.lines().take_while(|line| line.starts_with("  "));
    let mut names: Vec<&str> = lines
        .map(|line| line.split_whitespace().next().unwrap())
        .filter(|name| *name != "help")
        .collect();
    names.sort_unstable();
    for file in program_forms("service") {
        let target = Talker::start(&file);
        let pid = target.pid();
        let before = image(pid);
        let diagnosis = Diagnosis::of_process(pid);
        assert!(image(pid) == before);
        let commands: Vec<String> = diagnosis.list("commands").into_keys().collect();
        assert_eq!(commands, names);
        for name in ["attach", "info", "list", "count", "watch", "stack", "top"] {
            assert_eq!(
                diagnosis.command(name)["result"],
                "works",
                "{}",
                diagnosis.0
            );
        }
        // An ordinary user may have no samples of the kernel.
        let is_sampled = diagnosis.check("perf_samples")["result"] == "pass";
        let expected = if is_sampled { "works" } else { "limited" };
        let profile = diagnosis.command("profile");
        assert_eq!(profile["result"], expected, "{}", diagnosis.0);
        let counts = states(pid).lines().count();
        let probes = diagnosis.check("probes");
        let finding = probes["finding"].as_str().unwrap();
        let expected = format!("{counts} with provider ");
        assert!(finding.starts_with(&expected), "{finding}");
        // OCaml 4 has no events, and functions are timed instead.
        let gc = run(&format!("gc -pid {pid} -for 10ms"));
        let predicted = diagnosis.command("gc");
        assert_eq!(
            gc.code == Some(0),
            predicted["result"] != "fails",
            "{predicted}"
        );
        let has_events = diagnosis.check("runtime_events")["result"] == "pass";
        assert_eq!(predicted["result"] == "works", has_events, "{predicted}");
    }
}

#[test]
fn filters_of_some_threads_are_reported() {
    for file in fixture_forms("seccomp") {
        let target = Talker::start_with(&file, ["worker"]);
        let check = Diagnosis::of_process(target.pid()).check("seccomp");
        assert_eq!(check["result"], "pass", "{check}");
        let finding = check["finding"].as_str().unwrap();
        assert!(finding.starts_with("some of its threads"), "{finding}");
    }
}

#[test]
fn strict_threads_cannot_be_timed() {
    for file in fixture_forms("no_tsc") {
        let target = Talker::start_with(&file, ["strict"]);
        let diagnosis = Diagnosis::of_process(target.pid());
        let check = diagnosis.check("invariant_tsc");
        assert_eq!(check["result"], "fail", "{check}");
        for (command, result) in [("latency", "fails"), ("count", "works")] {
            let predicted = &diagnosis.list("commands")[command];
            assert_eq!(predicted["result"], result, "{predicted}");
        }
    }
}

#[test]
fn foreign_proc_says_nothing_of_this_tool() {
    let mut unshare = Command::new("unshare");
    if !geteuid().is_root() {
        unshare.arg("-Ur");
    }
    unshare.args(["-pf", TOOL, "doctor", "-json"]);
    let diagnosis = Diagnosis::of(run_command(&mut unshare));
    for name in ["capabilities", "perf_events"] {
        let check = diagnosis.check(name);
        assert_ne!(check["result"], "fail", "{check}");
    }
    for name in ["hidepid", "user_namespace"] {
        let check = diagnosis.check(name);
        assert_eq!(check["result"], "unknown", "{check}");
    }
    let predicted = &diagnosis.list("commands")["list"];
    assert_eq!(predicted["result"], "limited", "{predicted}");
}

#[test]
fn nothing_is_stated_where_proc_is_missing() {
    let diagnosis = Diagnosis::of(run_command(&mut without_proc("doctor -json")));
    assert_eq!(diagnosis.check("proc")["result"], "fail");
    for name in ["hidepid", "capabilities", "user_namespace", "yama"] {
        let check = diagnosis.check(name);
        assert_eq!(check["result"], "unknown", "{check}");
    }
    let user = diagnosis.check("user")["finding"].to_string();
    assert!(!user.contains("may observe"), "{user}");
    // The clock source may show it.
    let tsc = diagnosis.check("invariant_tsc");
    assert_ne!(tsc["result"], "fail", "{tsc}");
}

#[test]
fn waits_are_recorded_where_ptrace_is_forbidden() {
    let target = Talker::start(&fixture("gen_ocaml_2.pie"));
    let scratch = Scratch::new();
    let file = scratch.file("waits.json");
    let pid = target.pid().to_string();
    let tool = |words: &[&str]| {
        let mut tool = Command::new(fixture("without_ptrace.exe"));
        run_command(tool.arg(TOOL).args(words).args(["-pid", &pid]))
    };
    let diagnosis = Diagnosis::of(tool(&["doctor", "-json"]));
    let record = diagnosis.command("record");
    let reason = record["reasons"][0].as_str().unwrap();
    let is_predicted = reason.starts_with("with -off-cpu only: ");
    let words = ["record", "-off-cpu", "-for", "10ms", "-o"];
    let file = file.to_str().unwrap();
    let recorded = tool(&[&words[..], &[file]].concat());
    assert_eq!(recorded.code == Some(0), is_predicted, "{record}");
    let expected = if is_predicted { "limited" } else { "fails" };
    assert_eq!(record["result"], expected, "{record}");
}

#[test]
fn machine_alone_is_checked_without_a_pid() {
    let diagnosis = Diagnosis::of(run("doctor -json"));
    assert_eq!(diagnosis.0["pid"], Value::Null);
    let checks = diagnosis.list("checks");
    for name in ["proc", "yama", "ptrace", "force_override", "invariant_tsc"] {
        assert!(checks.contains_key(name), "{name}");
    }
    assert!(!checks.contains_key("probes"));
    let plain = run("doctor -format plain").stdout;
    let table = run("doctor -format table").stdout;
    for name in checks.keys() {
        assert!(plain.contains(&format!("check {name} ")), "{plain}");
        assert!(table.contains(&format!(" {name} ")), "{table}");
    }
    assert!(plain.contains("\ncommand trace "), "{plain}");
}

#[test]
fn doctor_traces_and_writes_nothing() {
    let target = Talker::start(&fixture("gen_ocaml_2.pie"));
    let scratch = Scratch::new();
    let log = scratch.file("log");
    let mut strace = Command::new("strace");
    strace.args([
        "-f",
        "-y",
        "-e",
        "trace=ptrace,process_vm_writev,pwrite64,kill,tkill,tgkill",
        "-o",
    ]);
    strace
        .arg(&log)
        .arg(TOOL)
        .args(["doctor", "-pid", &target.pid().to_string()]);
    run_command(&mut strace);
    let log = std::fs::read_to_string(log).unwrap();
    for call in log
        .lines()
        .filter_map(|line| Some(line.split_once(' ')?.1.trim_start()))
    {
        // To know whether ptrace is permitted, it is tried on a pid that is never used; and a byte of the tool itself
        // is written.
        let is_harmless = match call.split('(').next().unwrap() {
            "ptrace" => call.starts_with("ptrace(PTRACE_SEIZE, 2147483647"),
            "pwrite64" => !call.contains("/mem>") || call.contains(", \"Z\", 1, "),
            "process_vm_writev" | "kill" | "tkill" | "tgkill" => false,
            _ => true,
        };
        assert!(is_harmless, "{call}");
    }
    assert!(log.contains("2147483647"), "{log}");
}

#[test]
fn other_tracer_leaves_what_needs_no_stop() {
    for file in fixture_forms("gen_ocaml_2") {
        let target = Talker::start(&file);
        let pid = target.pid();
        let mut strace = Command::new("strace");
        let strace = strace.args(["-qq", "-o", "/dev/null", "-p", &pid.to_string()]);
        let mut tracer = Guard::spawn(strace.stderr(Stdio::null()));
        eventually("strace has attached", || {
            (process::status(pid, "TracerPid") != "0").then_some(())
        });
        let diagnosis = Diagnosis::of_process(pid);
        let failure = run(&format!("count -pid {pid} -for 10ms")).failure();
        diagnosis.assert_predicts("tracer", &failure);
        assert_eq!(diagnosis.command("count")["result"], "fails");
        assert_eq!(diagnosis.command("info")["result"], "works");
        for name in ["attach", "stack"] {
            let answer = diagnosis.command(name);
            assert_eq!(answer["result"], "limited", "{answer}");
            let reason = answer["reasons"][0].as_str().unwrap();
            assert!(reason.starts_with("with -live only: "), "{reason}");
        }
        run(&format!("attach -live -enable-all -pid {pid}")).answer();
        let _ = tracer.child().kill();
        tracer.wait();
    }
}

#[test]
fn process_of_another_user_is_reported() {
    if !geteuid().is_root() {
        // As an ordinary user, there may be no other user's process to look at.
        let machine = run("doctor").stdout;
        assert!(
            machine.contains("the processes of the same user"),
            "{machine}"
        );
        return;
    }
    let target = Talker::start(&fixture("gen_ocaml_2.pie"));
    let directory = Directory::new("nobody");
    let tool = directory.copy(TOOL.as_ref(), "ocaml-probes");
    let nobody = |words: &[&str]| run_command(as_nobody(&tool).args(words));
    let pid = target.pid().to_string();
    let diagnosis = Diagnosis::of(nobody(&["doctor", "-json", "-pid", &pid]));
    let failure = nobody(&["info", "-pid", &pid]).failure();
    diagnosis.assert_predicts("files", &failure);
    diagnosis.assert_predicts("user", &failure);
    assert_eq!(diagnosis.check("probes")["result"], "unknown");
    assert_eq!(diagnosis.command("info")["result"], "fails");
    // Root traces the process, but that is not the reason: `nobody` may not read it either way.
    let mut strace = Command::new("strace");
    let strace = strace.args(["-qq", "-o", "/dev/null", "-p", &pid]);
    let mut tracer = Guard::spawn(strace.stderr(Stdio::null()));
    eventually("strace has attached", || {
        (process::status(target.pid(), "TracerPid") != "0").then_some(())
    });
    assert_eq!(nobody(&["info", "-pid", &pid]).failure(), failure);
    let traced = Diagnosis::of(nobody(&["doctor", "-json", "-pid", &pid]));
    for name in ["files", "memory", "user"] {
        assert_eq!(traced.check(name), diagnosis.check(name));
    }
    let _ = tracer.child().kill();
    tracer.wait();
}

#[test]
fn ocaml_without_a_version_is_no_other_program() {
    for file in [&program_forms("calls")[0], &program("bytecode/unprobed.bc")] {
        let target = Talker::start(file);
        let diagnosis = Diagnosis::of_process(target.pid());
        let finding = diagnosis.check("ocaml_version")["finding"].to_string();
        assert!(!finding.contains("not an OCaml program"), "{finding}");
    }
}

#[test]
fn program_without_probes_has_its_functions() {
    for file in fixture_forms("blocked") {
        let target = Talker::start(&file);
        let pid = target.pid();
        let diagnosis = Diagnosis::of_process(pid);
        let failure = run(&format!("info -pid {pid}")).failure();
        diagnosis.assert_predicts("probes", &failure);
        assert_eq!(diagnosis.command("attach")["result"], "fails");
        let count = diagnosis.command("count");
        assert_eq!(count["result"], "limited", "{count}");
    }
}

#[test]
fn doctor_of_no_process_fails_like_others() {
    let expected = run("info -pid 4194305").failure();
    assert_eq!(run("doctor -pid 4194305").failure(), expected);
    let own = std::process::id() as i32;
    let diagnosis = Diagnosis::of_process(own);
    let refusal = run(&format!("count -fn main -pid {own} -for 10ms")).failure();
    diagnosis.assert_predicts("ancestor", &refusal);
    let usage = run_command(&mut command(["doctor", "-pid", "x"]));
    assert_eq!(usage.code, Some(2));
}
