//! `-follow`: the probes of libraries and plugins that followed programs load.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};

use nix::sys::signal::{Signal, kill};
use nix::unistd::{Pid, geteuid};
use test_support::process::{self, status};
use test_support::{Guard, Talker, eventually, fixture, fixture_forms};

use crate::follow::{Following, assert_left_alone, leave, quit, read};
use crate::support::{Directory, command};

// promise: Following: The probes of libraries are set before their initialisers run, in followed
//    processes too (8)
#[test]
fn library_probes_are_enabled_before_their_initialisers() {
    for family in fixture_forms("family") {
        let eager = ["objects/eager", "objects/musl/eager"].map(fixture_forms);
        for eager in eager.as_flattened() {
            let mut talker = Talker::start(&family);
            let following = Following::attach(talker.pid());
            talker.ask(&format!("exec {}", eager.display()), "ready");
            let hits = talker.ask("plugins", "plugins");
            assert_eq!(hits, "plugins 0:ping=2,plug=4");
            leave(following, talker);
        }
    }
}

// promise: Following: Every object loaded later has its probes set before it runs (2 × 72 loads)
#[test]
fn objects_loaded_later_have_their_probes_set() {
    for host in fixture_forms("objects/host") {
        let mut talker = Talker::start(&host);
        let pid = talker.pid();
        let directory = Directory::new("follow-objects");
        let eager = directory.copy(&fixture("objects/eager.so"), "eager.so");
        let plugin = fixture("objects/plugin.so");
        let following = Following::attach(pid);
        let hits = |talker: &mut Talker| talker.ask("plugins", "plugins");
        talker.ask(&format!("load {}", eager.display()), "loaded 0");
        // Hit once in the constructor of the object, and once by the command `plugins`.
        assert_eq!(hits(&mut talker), "plugins 0:ping=2,plug=4");
        talker.ask(&format!("isolate {}", eager.display()), "loaded 1");
        assert_eq!(hits(&mut talker), "plugins 0:ping=3,plug=6 1:ping=2,plug=4");
        for _ in 0..20 {
            talker.ask("unload 0", "unloaded");
            talker.ask(&format!("load {}", plugin.display()), "loaded 0");
        }
        assert!(hits(&mut talker).starts_with("plugins 0:ping=1,plug=2 "));
        talker.ask("unload 0", "unloaded");
        talker.ask(&format!("churn 50 {}", plugin.display()), "churned");
        following.end();
        assert_left_alone(pid);
        talker.ask(&format!("load {}", plugin.display()), "loaded 0");
        assert!(hits(&mut talker).starts_with("plugins 0:ping=0,plug=0 "));
        quit(talker);
    }
}

#[test]
fn probes_missing_at_first_are_set_later() {
    let plugin = fixture("objects/eager.so");
    for (program, missing) in [
        ("objects/host", "no probe \"plug\" in host."),
        ("family", "no probe \"plug\" in family."),
        ("no_probes", "no OCaml probes in "),
    ] {
        for file in fixture_forms(program) {
            let mut trace = command(["trace", "-follow", "-wait", "-enable", "plug", "-prog"]);
            trace.arg(&file).stderr(Stdio::piped());
            let mut traced = Talker::spawn(&mut trace);
            traced.expect("ready");
            let mut running = Talker::start(&file);
            let pid = running.pid();
            let mut attach = command(["attach", "-follow", "-enable", "plug", "-pid"]);
            attach.arg(pid.to_string()).stderr(Stdio::piped());
            let mut following = Following::started(&mut attach, pid);
            for talker in [&mut traced, &mut running] {
                match program {
                    "objects/host" => {
                        talker.ask(&format!("load {}", plugin.display()), "loaded");
                        let hits = talker.ask("plugins", "plugins");
                        assert_eq!(hits, "plugins 0:ping=0,plug=4");
                    }
                    "family" => {
                        let eager = fixture("objects/eager.pie");
                        talker.ask(&format!("spawn {}", eager.display()), "ready");
                        let hits = talker.ask("plugins", "plugins");
                        assert_eq!(hits, "plugins 0:ping=0,plug=4");
                        talker.ask("quit", "started 0");
                    }
                    _ => drop(talker.ask("run", "hits")),
                }
                talker.send("quit");
            }
            for tool in [&mut traced, &mut following.0] {
                let said = tool.guard().child().stderr.take().unwrap();
                assert_eq!(tool.guard().wait().code(), Some(0));
                let said = read(said);
                assert!(said.contains("ocaml-probes: warning: "), "{said}");
                assert!(said.contains(missing), "{said}");
            }
        }
    }
}

// promise: Following: A program under seccomp is changed, and a warning says which loads cannot be
//    seen (2)
#[test]
fn warning_if_seccomp_hides_later_loads() {
    for seccomp in fixture_forms("seccomp") {
        let mut talker = Talker::start(&seccomp);
        let mut tool = command(["attach", "-follow", "-enable-all", "-pid"]);
        tool.arg(talker.pid().to_string());
        tool.stdout(Stdio::null()).stderr(Stdio::piped());
        let mut tool = Guard::spawn(&mut tool);
        eventually("its probes are on", || {
            (talker.hits().iter().map(|(_, hits)| hits).sum::<u64>() > 0).then_some(())
        });
        kill(Pid::from_raw(tool.pid()), Signal::SIGTERM).unwrap();
        assert_eq!(tool.wait().code(), Some(0));
        let said = read(tool.child().stderr.take().unwrap());
        let verb = if geteuid().is_root() {
            "forbids"
        } else {
            "may forbid"
        };
        let reason =
            format!("a seccomp filter {verb} the system calls of the hook in its dynamic loader");
        assert!(
            said.contains(&format!("will not be seen: {reason}")),
            "{said}"
        );
        assert_left_alone(talker.pid());
    }
}

/// Starts the program that loads plugins under the seccomp filters of systemd services and of Docker.
fn start_under_real_filters(host: &Path) -> Talker {
    let filters = ["system-service.x86_64.bpf", "docker.bpf"];
    let mut command = Command::new(fixture("under_filters.exe"));
    command.args(filters.map(|name| fixture("filters").join(name)));
    let mut talker = Talker::spawn(command.arg("--").arg(host));
    talker.expect("ready");
    talker
}

// promise: Following: Root sees what a process under the filters of systemd and Docker loads; others
//    are warned (2)
#[test]
fn loads_are_seen_under_real_filters() {
    let load = format!("load {}", fixture("objects/plugin.so").display());
    for host in fixture_forms("objects/host") {
        let mut talker = start_under_real_filters(&host);
        if geteuid().is_root() {
            let following = Following::attach(talker.pid());
            talker.ask(&load, "loaded 0");
            let hits = talker.ask("plugins", "plugins");
            assert_eq!(hits, "plugins 0:ping=1,plug=2");
            leave(following, talker);
            continue;
        }
        let mut tool = command(["attach", "-follow", "-enable-all", "-pid"]);
        tool.arg(talker.pid().to_string());
        tool.stdout(Stdio::null()).stderr(Stdio::piped());
        let mut tool = Guard::spawn(&mut tool);
        eventually("it is traced", || {
            (status(talker.pid(), "TracerPid") != "0").then_some(())
        });
        let mut warning = String::new();
        let errors = tool.child().stderr.as_mut().unwrap();
        BufReader::new(errors).read_line(&mut warning).unwrap();
        assert!(warning.contains("may forbid"), "{warning}");
        kill(Pid::from_raw(tool.pid()), Signal::SIGTERM).unwrap();
        assert_eq!(tool.wait().code(), Some(0));
        assert_left_alone(talker.pid());
        quit(talker);
    }
}

// promise: Following: A signal handler that interrupted the loader hook returns into it (2, until
//    it happens)
#[test]
fn signal_handler_returns_into_the_loader_hook() {
    for host in fixture_forms("objects/host") {
        let mut talker = Talker::start(&host);
        let pid = talker.pid();
        let plugin = fixture("objects/plugin.so");
        talker.ask("catch", "catching");
        eventually("a signal is received in the hook", || {
            let following = Following::attach(pid);
            talker.send(&format!("churn 1000 {}", plugin.display()));
            eventually("it loads and unloads", || {
                let maps = fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
                maps.contains("plugin.so").then_some(())
            });
            kill(Pid::from_raw(pid), Signal::SIGUSR1).unwrap();
            talker.expect("handling");
            following.end();
            assert_eq!(status(pid, "TracerPid"), "0");
            // If no thread was in the hook, the hook has been removed: try again.
            let is_left = process::is_loader_changed(pid);
            talker.ask("", "churned 1000");
            is_left.then_some(())
        });
        // The next tool that follows the process removes the hook that remains.
        let mut tool = command([
            "attach",
            "-follow",
            "-quiet",
            "-disable-all",
            "-force",
            "-pid",
        ]);
        let following = Following(Talker::spawn(tool.arg(pid.to_string())));
        eventually("it is traced", || {
            (status(pid, "TracerPid") != "0").then_some(())
        });
        following.end();
        assert_left_alone(pid);
        quit(talker);
    }
}
