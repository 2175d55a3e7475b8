//! Probes of libraries and plugins in the answers, and `ps`.

use serde_json::Value;
use test_support::{Talker, fixture, fixture_forms, process};

use crate::support::{command, probe, run, run_on};

/// Programs that have loaded a plugin.
fn hosts() -> [Talker; 2] {
    fixture_forms("objects/host").map(|file| {
        let mut target = Talker::start(&file);
        let plugin = fixture("objects/plugin.so");
        target.ask(&format!("load {}", plugin.display()), "loaded");
        target
    })
}

#[test]
fn sites_say_which_object_has_them() {
    let plugin = fixture("objects/plugin.so").display().to_string();
    for target in hosts() {
        let pid = target.pid();
        let plain = run(&format!("info -pid {pid} -sites")).answer();
        let (ping, rest) = plain.split_once("plug disabled\n").unwrap();
        let of_plugin = format!("\n  in {plugin}\n");
        assert!(ping.starts_with("ping disabled\n  site 0x"), "{plain}");
        // Once before its site and once before its semaphore, behind the program's.
        assert_eq!(ping.matches(&of_plugin).count(), 2, "{plain}");
        assert!(rest.starts_with(&of_plugin[1..]), "{plain}");

        let json = run(&format!("info -json -pid {pid}")).json();
        assert_eq!(json["program"], program_of(&target));
        let objects = |name: &str, what: &str| -> Vec<Value> {
            let all = probe(&json, name)[what].as_array().unwrap().iter();
            all.map(|one| one["object"].clone()).collect()
        };
        assert_eq!(objects("plug", "sites"), [&plugin[..], &plugin]);
        assert_eq!(objects("plug", "semaphores"), [&plugin[..]]);
        assert_eq!(objects("pong", "sites"), [program_of(&target)]);
        assert_eq!(objects("ping", "sites").len(), 4);

        let table = run(&format!("info -format table -sites -pid {pid}")).answer();
        assert!(table.contains("| what      | object "), "{table}");
        assert!(table.contains(&format!("| {plugin} ")), "{table}");
        let without = run(&format!("info -format table -pid {pid}")).answer();
        assert!(
            without.contains(" plug  | disabled | 0       | 2     "),
            "{without}"
        );
    }
}

fn program_of(target: &Talker) -> String {
    let exe = std::fs::read_link(format!("/proc/{}/exe", target.pid()));
    exe.unwrap().display().to_string()
}

#[test]
fn a_name_is_switched_in_all_objects() {
    for mut target in hosts() {
        let line = format!("attach -pid {} -enable ping,plug", target.pid());
        assert_eq!(
            run(&line).answer(),
            "ping 0 -> 1, 4 sites\nplug 0 -> 1, 2 sites\n"
        );
        assert_eq!(target.ask("plugins", "plugins"), "plugins 0:ping=1,plug=2");
        assert_eq!(target.ask("run", "hits"), "hits ping=3 pong=0");
    }
}

#[test]
fn programs_of_musl_are_listed_started_told_and_switched() {
    for file in fixture_forms("objects/musl/host") {
        assert_eq!(run_on("list", &file).answer(), "ping\npong\n");
    }
    for file in fixture_forms("objects/musl/linked") {
        let mut trace = command(["trace", "-enable", "plug", "-wait", "-prog"]);
        let mut tool = Talker::spawn(trace.arg(&file));
        tool.expect("ready");
        assert_eq!(tool.ask("plugins", "plugins"), "plugins 0:ping=0,plug=2");
        let pid = process::children(tool.pid())[0];
        let info = run(&format!("info -pid {pid}")).answer();
        assert_eq!(info, "ping disabled\nplug enabled\n");
        run(&format!("attach -pid {pid} -disable plug")).answer();
        assert_eq!(tool.ask("plugins", "plugins"), "plugins 0:ping=0,plug=2");
        tool.hang_up();
        assert!(tool.guard().wait().success());
    }
}

#[test]
fn ps_lists_the_processes_with_probes_and_how_many_are_on() {
    let [host, other] = hosts();
    let dot1 = Talker::start(&fixture("gen_ocaml_dot1.pie"));
    run(&format!("attach -pid {} -enable plug", host.pid())).answer();
    let plain = run("ps").answer();
    let line = |target: &Talker, rest: &str| {
        let start = format!("{} ", target.pid());
        let found = plain.lines().find(|line| line.starts_with(&start));
        let found = found.unwrap_or_else(|| panic!("{start}: {plain}"));
        let end = format!(" {rest} {}", program_of(target));
        assert!(found.ends_with(&end), "{found}");
    };
    line(&host, "ocaml_2 3 1");
    line(&other, "ocaml_2 3 0");
    line(&dot1, "ocaml.1 2 0");
    let pids: Vec<i32> = plain
        .lines()
        .map(|line| line.split(' ').next().unwrap().parse().unwrap())
        .collect();
    assert!(pids.is_sorted(), "{plain}");
    // Programs without probes, such as this one, are left out.
    assert!(!pids.contains(&(std::process::id() as i32)));

    let json = run("ps -json").json();
    let all = json["processes"].as_array().unwrap();
    let of_host = all.iter().find(|one| one["pid"] == host.pid()).unwrap();
    assert_eq!(of_host["program"], program_of(&host));
    assert_eq!(of_host["generations"], serde_json::json!(["ocaml_2"]));
    assert_eq!(
        (&of_host["probes"], &of_host["enabled"]),
        (&3.into(), &1.into())
    );
    assert_eq!(of_host["uid"], nix::unistd::getuid().as_raw());
    assert!(json["denied"].is_u64());

    let table = run("ps -format table").answer();
    assert!(
        table.contains("| provider | probes | enabled | program "),
        "{table}"
    );
}
