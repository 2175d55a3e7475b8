//! Probes of libraries and plugins in the output, and `ps`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use nix::sys::signal::{Signal, kill};
use nix::sys::stat::Mode;
use nix::unistd::{Pid, mkfifo};
use serde_json::Value;
use test_support::{Scratch, Talker, eventually, fixture, fixture_forms, process};

use crate::support::{command, image, probe, run, run_on};

/// Programs that have loaded a plugin.
pub(crate) fn hosts() -> [Talker; 2] {
    fixture_forms("objects/host").map(|file| {
        let mut target = Talker::start(&file);
        let plugin = fixture("objects/plugin.so");
        target.ask(&format!("load {}", plugin.display()), "loaded");
        target
    })
}

#[test]
fn sites_name_their_object() {
    let plugin = fixture("objects/plugin.so").display().to_string();
    for target in hosts() {
        let pid = target.pid();
        let short = run(&format!("info -pid {pid} -sites")).answer();
        assert_eq!(short.matches("\n  in plugin.so\n").count(), 3, "{short}");
        let plain = run(&format!("info -pid {pid} -sites -paths full")).answer();
        let (ping, rest) = plain.split_once("plug disabled\n").unwrap();
        let of_plugin = format!("\n  in {plugin}\n");
        assert!(ping.starts_with("ping disabled\n  site 0x"), "{plain}");
        // The line with the plugin is there twice, before the plugin's site and before its
        // semaphore; both come after the program's.
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
        assert!(table.contains("| kind      | object "), "{table}");
        assert!(table.contains("| plugin.so "), "{table}");
        let without_sites = run(&format!("info -format table -pid {pid}")).answer();
        assert!(
            without_sites.contains(" plug  | disabled | 0       | 2     "),
            "{without_sites}"
        );
    }
}

fn program_of(target: &Talker) -> String {
    let exe = std::fs::read_link(format!("/proc/{}/exe", target.pid()));
    exe.unwrap().display().to_string()
}

#[test]
fn probe_is_enabled_in_all_objects() {
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

/// A copy of the plugin whose first note has a size that is too small.
pub(crate) fn damaged_plugin(scratch: &Scratch) -> PathBuf {
    let copy = scratch.copy(&fixture("objects/plugin.so"), "plugin.so");
    let mut bytes = fs::read(&copy).unwrap();
    let owner = b"stapsdt\0";
    let at = bytes.windows(owner.len()).position(|part| part == owner);
    // elf(5), Elf64_Nhdr: n_namesz, n_descsz, n_type, and the name.
    let descsz = at.unwrap() - 8;
    bytes[descsz..descsz + 4].copy_from_slice(&9_u32.to_le_bytes());
    fs::write(&copy, bytes).unwrap();
    copy
}

/// The error for a damaged plugin at `path`, and the hint.
pub(crate) fn damage_messages(path: &Path) -> [String; 2] {
    let path = path.display();
    [
        format!("{path} is corrupt: probe note 0 at 0x0 is malformed (descsz 9 < 24)"),
        format!("hint: the file is damaged, build it again; `readelf -n {path}` shows its notes\n"),
    ]
}

// promise: Objects that come and go: A damaged library is named, and the other objects are shown
//    and changed (2)
#[test]
fn damaged_library_is_named_and_others_are_changed() {
    let scratch = Scratch::new();
    let damaged = damaged_plugin(&scratch);
    let [why, hint] = damage_messages(&damaged);
    let warning = format!("ocaml-probes: warning: skipped: {why}\n{hint}");
    for mut target in hosts() {
        let pid = target.pid();
        target.ask(&format!("load {}", damaged.display()), "loaded");
        let info = run(&format!("info -pid {pid}"));
        assert_eq!(info.stderr, warning);
        let names = "ping disabled\nplug disabled\npong disabled\n";
        assert_eq!(info.answer(), names);
        let quiet = run(&format!("info -quiet -pid {pid}"));
        assert_eq!((&quiet.stdout[..], &quiet.stderr[..]), (names, ""));

        let attach = run(&format!("attach -enable-all -pid {pid}"));
        assert!(attach.stderr.starts_with(&warning), "{}", attach.stderr);
        assert_eq!(
            attach.answer(),
            "ping 0 -> 1, 4 sites\nplug 0 -> 1, 2 sites\npong 0 -> 1, 1 site\n"
        );
        let hits = target.ask("plugins", "plugins");
        assert_eq!(hits, "plugins 0:ping=1,plug=2 1:ping=0,plug=0");
    }
}

// promise: Objects that come and go: A probe name found only in a damaged library is refused with
//    the name of that library (2)
#[test]
fn name_only_in_a_damaged_library_is_refused() {
    let scratch = Scratch::new();
    let damaged = damaged_plugin(&scratch);
    let [why, hint] = damage_messages(&damaged);
    for file in fixture_forms("objects/host") {
        let mut target = Talker::start(&file);
        target.ask(&format!("load {}", damaged.display()), "loaded");
        let before = image(target.pid());
        let pid = target.pid();
        let name = file.file_name().unwrap().to_str().unwrap();
        for (action, what) in [
            ("-enable plug", format!("no probe \"plug\" in {name}")),
            (
                "-enable-regexp pl",
                format!("no probe in {name} matches \"pl\""),
            ),
        ] {
            let refused = run(&format!("attach {action} -pid {pid}"));
            assert_eq!((refused.code, &refused.stdout[..]), (Some(1), ""));
            let start = format!(
                "ocaml-probes: warning: skipped: {why}\n{hint}\
                 ocaml-probes: {what}, and plugin.so could not be read; nothing was changed\n"
            );
            assert!(refused.stderr.starts_with(&start), "{}", refused.stderr);
        }
        assert!(image(pid) == before);
    }
    let listed = run_on("list", &damaged).failure();
    assert_eq!(listed, format!("ocaml-probes: {why}\n{hint}"));
}

#[test]
fn program_with_only_a_damaged_library_is_refused() {
    let scratch = Scratch::new();
    let [why, hint] = damage_messages(&damaged_plugin(&scratch));
    for file in fixture_forms("objects/linked") {
        let copy = scratch.copy(&file, file.file_name().unwrap().to_str().unwrap());
        let target = Talker::start(&copy);
        let line = format!("-pid {}", target.pid());
        let info = run(&format!("info {line}")).failure();
        assert_eq!(info, format!("ocaml-probes: {why}\n{hint}"));
        let attach = run(&format!("attach -enable-all {line}")).failure();
        assert_eq!(
            attach,
            format!("ocaml-probes: {why}; nothing was changed\n{hint}")
        );
    }
}

// promise: Launching programs: A signal ends the start of a program whose loader waits for ever, and the program (4 commands)
#[test]
fn signals_end_a_loader_that_hangs() {
    let scratch = Scratch::new();
    let answer = scratch.file("answer.json");
    let [file, _] = fixture_forms("objects/linked");
    let copy = scratch.copy(&file, "linked");
    // The loader waits for somebody who writes into its library.
    mkfifo(&scratch.file("plugin.so"), Mode::S_IRWXU).unwrap();
    for line in [
        &["trace", "-enable-all"][..],
        &["trace", "-count"],
        &["trace", "-follow", "-enable-all"],
        &["record", "-fn", "main", "-o", answer.to_str().unwrap()],
    ] {
        let mut command = command(line);
        command.arg("-prog").arg(&copy);
        let mut tool = Talker::spawn(command.stderr(Stdio::null()));
        let program = eventually("the loader waits", || {
            let mut children = process::children(tool.pid()).into_iter();
            children.find(|&pid| {
                process::status(pid, "Name") == "linked" && process::state(pid) == Some('S')
            })
        });
        kill(Pid::from_raw(tool.pid()), Signal::SIGTERM).unwrap();
        // Perhaps by the signal, as soon as that is no longer blocked.
        assert!(!tool.guard().wait().success(), "{line:?}");
        assert_eq!(process::state(program), None, "{line:?}");
    }
}

#[test]
fn missing_files_of_a_program_are_named() {
    let scratch = Scratch::new();
    let plugin = fixture("objects/plugin.so");
    for file in fixture_forms("objects/linked") {
        let copy = scratch.copy(&file, file.file_name().unwrap().to_str().unwrap());
        let library = scratch.copy(&plugin, "plugin.so");
        let target = Talker::start(&copy);
        fs::remove_file(&library).unwrap();
        let info = run(&format!("info -pid {}", target.pid()));
        if process::can_open_map_files() {
            assert_eq!(info.stderr, "");
            assert_eq!(info.answer(), "ping disabled\nplug disabled\n");
        } else {
            let refused = info.failure();
            let why = ", and plugin.so could not be read\nhint: root (outside of containers) ";
            assert!(refused.contains(why), "{refused}");
        }
    }
    for file in fixture_forms("objects/host") {
        let mut target = Talker::start(&file);
        let names = ["a.so", "b.so"].map(|name| scratch.copy(&plugin, name));
        for name in &names {
            target.ask(&format!("load {}", name.display()), "loaded");
            fs::remove_file(name).unwrap();
        }
        let info = run(&format!("info -pid {}", target.pid()));
        let [a, b] = names.map(|name| name.display().to_string());
        let warning = format!(
            "ocaml-probes: warning: skipped: cannot open files that were deleted or replaced: {a}, {b}\n\
             hint: use sudo outside of containers: only root can open such a file, through /proc/PID/map_files\n"
        );
        if process::can_open_map_files() {
            assert_eq!(info.stderr, "")
        } else {
            assert_eq!(info.stderr, warning)
        }
        assert_eq!(
            info.answer().contains("plug disabled"),
            process::can_open_map_files()
        );
    }
}

#[test]
fn programs_of_musl_are_listed_started_and_switched() {
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
        tool.close_input();
        assert!(tool.guard().wait().success());
    }
}

#[test]
fn ps_lists_processes_and_their_enabled_probe_counts() {
    let [host, other] = hosts();
    let dot1 = Talker::start(&fixture("gen_ocaml_dot1.pie"));
    run(&format!("attach -pid {} -enable plug", host.pid())).answer();
    let plain = run("ps").answer();
    let assert_line = |target: &Talker, rest: &str| {
        let start = format!("{} ", target.pid());
        let found = plain.lines().find(|line| line.starts_with(&start));
        let found = found.unwrap_or_else(|| panic!("{start}: {plain}"));
        let end = format!(" {rest} {}", program_of(target));
        assert!(found.ends_with(&end), "{found}");
    };
    assert_line(&host, "ocaml_2 3 1");
    assert_line(&other, "ocaml_2 3 0");
    assert_line(&dot1, "ocaml.1 2 0");
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
    assert_eq!(of_host["providers"], serde_json::json!(["ocaml_2"]));
    assert_eq!(
        (&of_host["probes"], &of_host["enabled"]),
        (&3.into(), &1.into())
    );
    assert_eq!(of_host["uid"], nix::unistd::getuid().as_raw());
    assert!(json["denied"].is_u64());

    let table = run("ps -format table").answer();
    assert!(
        table.contains("| providers | probes | enabled | program "),
        "{table}"
    );
}
