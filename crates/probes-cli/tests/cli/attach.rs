//! `attach`: counters, each kind of flag, `-force`, and that an update is made whole or not at all.

use serde_json::{Value, json};
use test_support::{Talker, fixture, program, program_forms};

use crate::support::{
    Run, both_forms, command, image, number, poke, probe, run, run_command, states,
};

fn attach(target: &Talker, actions: &str) -> Run {
    run(&format!("attach -pid {} {actions}", target.pid()))
}

fn counter(target: &Talker, name: &str) -> Value {
    let json = run(&format!("info -json -quiet -pid {}", target.pid())).json();
    probe(&json, name)["counter"].clone()
}

#[test]
fn handlers_run_while_their_probes_are_enabled() {
    for file in program_forms("many") {
        let mut target = Talker::start(&file);
        assert_eq!(target.ask("run", "round"), "round 1 hits=0");
        attach(&target, "-enable-all").answer();
        assert_eq!(target.ask("run", "round"), "round 2 hits=220");
        attach(&target, "-disable many_000,many_001 -disable many_002").answer();
        assert_eq!(target.ask("run", "round"), "round 3 hits=216");
        attach(&target, "-disable-all").answer();
        assert_eq!(target.ask("run", "round"), "round 4 hits=0");
    }
}

#[test]
fn blanks_in_comma_lists_are_ignored() {
    let target = Talker::start(&program("twolibs"));
    let pid = target.pid().to_string();
    let run = |line: &str, list: &str| {
        let words = line.split(' ').chain(["-pid", &pid]);
        run_command(command(words).arg(list))
    };
    for (flags, list, answer) in [
        (
            "attach",
            "-enable= shared , main_only ",
            "shared 0 -> 1, 3 sites\nmain_only 0 -> 1, 1 site\n",
        ),
        (
            "attach",
            "-disable=shared, main_only",
            "shared 1 -> 0, 3 sites\nmain_only 1 -> 0, 1 site\n",
        ),
        (
            "attach",
            "-enable-pair=shared, main_only",
            "main_only 0 -> 1, 1 site\nshared 0 -> 1, 3 sites\n",
        ),
        ("watch -for 1ms -probe shared", "-fields=time, name", ""),
    ] {
        assert_eq!(run(flags, list).answer(), answer, "{list}");
    }
    let counted = run("count -for 1ms", "-probe=shared, main_only").answer();
    assert_eq!(counted.lines().count(), 2, "{counted}");
    for list in ["-enable=shared, ", "-enable= ", "-enable= ,shared"] {
        let error = run("attach", list);
        assert_eq!(error.code, Some(2));
        assert!(
            error.stderr.contains("a name in the comma list is empty"),
            "{}",
            error.stderr
        );
    }
}

#[test]
fn service_prints_what_its_handlers_see() {
    let mut target = Talker::start_with(&program("service"), ["5"]);
    attach(&target, "-enable req_start").answer();
    target.expect("probe req_start request=");
    attach(&target, "-enable tick -disable req_start").answer();
    target.expect("probe tick n=");
    attach(&target, "-disable tick").answer();
    assert_eq!(states(target.pid()).matches(" disabled").count(), 4);
}

#[test]
fn answer_lists_the_changes_in_every_format() {
    let target = Talker::start(&program("twolibs"));
    let run = attach(&target, "-enable shared,main_only");
    assert!(
        run.stderr.starts_with("stopped ") && run.stderr.ends_with(" us\n"),
        "{run:?}"
    );
    assert_eq!(
        run.answer(),
        "shared 0 -> 1, 3 sites\nmain_only 0 -> 1, 1 site\n"
    );

    let run = attach(&target, "-json -enable shared");
    let json = run.json();
    let keys: Vec<_> = json
        .as_object()
        .unwrap()
        .keys()
        .map(String::as_str)
        .collect();
    assert_eq!(
        keys,
        [
            "changed",
            "passed_over",
            "pid",
            "stopped_us",
            "type",
            "version"
        ]
    );
    assert_eq!(
        (&json["type"], &json["version"]),
        (&json!("changed"), &json!(1))
    );
    assert_eq!(json["pid"], target.pid());
    let changed = json!([{"name": "shared", "before": 1, "after": 2, "sites": 0}]);
    assert_eq!(json["changed"], changed);
    assert!(json["stopped_us"].is_u64());

    let table = attach(&target, "-format table -disable main_only").answer();
    assert!(
        table.contains(" main_only | 1      | 0     | 1     \n"),
        "{table}"
    );
}

#[test]
fn sites_change_at_first_enable_and_last_disable() {
    for target in both_forms("gen_ocaml_2") {
        assert_eq!(
            attach(&target, "-enable plain").answer(),
            "plain 0 -> 1, 1 site\n"
        );
        assert_eq!(
            attach(&target, "-enable plain").answer(),
            "plain 1 -> 2, 0 sites\n"
        );
        let run = attach(&target, "-disable plain");
        assert!(
            run.stderr
                .contains("still enabled, because others have enabled them too: plain (1)\nhint: "),
            "{run:?}"
        );
        assert_eq!(run.answer(), "plain 2 -> 1, 0 sites\n");
        assert!(states(target.pid()).contains("plain enabled"));
        assert_eq!(
            attach(&target, "-disable plain").answer(),
            "plain 1 -> 0, 1 site\n"
        );
        assert!(states(target.pid()).contains("plain disabled"));
    }
}

#[test]
fn disabling_a_named_disabled_probe_changes_nothing() {
    for target in both_forms("gen_ocaml_2") {
        let before = image(target.pid());
        let error = attach(&target, "-enable watched -disable plain").failure();
        let expected = "ocaml-probes: probe \"plain\" is not enabled; nothing was changed\nhint: ";
        assert!(error.starts_with(expected), "{error}");
        assert!(image(target.pid()) == before);
    }
}

#[test]
fn group_selectors_skip_disabled_probes_and_report_them() {
    let target = Talker::start(&program("service"));
    attach(&target, "-enable req_end").answer();
    let run = attach(&target, "-disable-regexp req_");
    assert!(
        run.stderr
            .starts_with("skipped, already disabled: req_start\n"),
        "{run:?}"
    );
    assert_eq!(run.answer(), "req_end 1 -> 0, 1 site\n");
    let run = attach(&target, "-disable-pair req_start,req_end -quiet");
    assert_eq!((run.stderr.as_str(), run.stdout.as_str()), ("", ""));
    assert_eq!(run.code, Some(0));
    let json = attach(&target, "-disable-all -json").json();
    let names = json!(["cache_miss", "req_end", "req_start", "tick"]);
    assert_eq!(
        (&json["passed_over"], &json["changed"]),
        (&names, &json!([]))
    );

    let target = Talker::start(&program("many"));
    let run = attach(&target, "-disable-all");
    assert!(run.stderr.contains("many_007 and 192 more\n"), "{run:?}");
}

#[test]
fn regexp_matches_from_the_start_of_a_name() {
    let target = Talker::start(&program("service"));
    let answer = attach(&target, "-enable-regexp req_(start|end)").answer();
    assert_eq!(answer.lines().count(), 2);
    let error = attach(&target, "-enable-regexp start").failure();
    assert!(
        error.contains("no probe in service.exe matches \"start\""),
        "{error}"
    );
    let hint = format!(
        "hint: `ocaml-probes info -pid {}` lists the names",
        target.pid()
    );
    assert!(error.contains(&hint), "{error}");
    assert_eq!(
        attach(&target, "-disable-regexp .*end").answer(),
        "req_end 1 -> 0, 1 site\n"
    );
}

#[test]
fn pair_enables_stop_first_and_disables_start_first() {
    let target = Talker::start(&program("service"));
    let answer = attach(&target, "-enable-pair req_start,req_end").answer();
    assert_eq!(answer, "req_end 0 -> 1, 1 site\nreq_start 0 -> 1, 1 site\n");
    let answer = attach(&target, "-disable-pair req_start,req_end").answer();
    assert_eq!(answer, "req_start 1 -> 0, 1 site\nreq_end 1 -> 0, 1 site\n");
}

#[test]
fn unknown_name_gets_a_suggestion_and_changes_nothing() {
    let target = Talker::start(&fixture("gen_ocaml_2.pie"));
    let before = image(target.pid());
    let error = attach(&target, "-enable watched,plian").failure();
    let of_glob = attach(&target, "-enable pla?n,pli*").failure();
    let expected = "no probe \"pla?n\" in gen_ocaml_2.pie; did you mean \"plain\"?";
    assert!(of_glob.contains(expected), "{of_glob}");
    assert!(
        of_glob.contains("hint: names of probes are not globs; "),
        "{of_glob}"
    );
    let expected = "no probe \"plian\" in gen_ocaml_2.pie; did you mean \"plain\"?";
    assert!(error.contains(expected), "{error}");
    assert!(error.contains("nothing was changed"), "{error}");
    assert!(error.contains("hint: `ocaml-probes info -pid"), "{error}");
    assert!(image(target.pid()) == before);
}

#[test]
fn inconsistent_probes_are_repaired_with_force() {
    for target in both_forms("interrupted") {
        let pid = target.pid();
        let before = image(pid);
        let error = attach(&target, "-enable part").failure();
        assert!(
            error.contains("1 of 3 sites of \"part\" are enabled"),
            "{error}"
        );
        let hint = format!("hint: `ocaml-probes attach -pid {pid} -force -enable part`");
        assert!(error.contains(&hint), "{error}");
        assert!(image(pid) == before);

        attach(&target, "-force -enable part,counter -disable site").answer();
        let expected = "counter enabled\npart enabled\nsite disabled\nwhole disabled\n";
        assert_eq!(states(pid), expected);
        assert_eq!(counter(&target, "part"), 1);
    }
}

#[test]
fn force_sets_counters_to_one_or_zero() {
    for target in both_forms("multi_semaphore") {
        for _ in 0..3 {
            attach(&target, "-enable many").answer();
        }
        assert_eq!(counter(&target, "many"), 3);
        let forced = attach(&target, "-force -enable-all");
        assert!(!forced.stderr.contains("still enabled"), "{forced:?}");
        assert_eq!(
            (counter(&target, "many"), counter(&target, "single")),
            (json!(1), json!(1))
        );
        attach(&target, "-enable many").answer();
        attach(&target, "-force -disable-regexp m").answer();
        assert_eq!(counter(&target, "many"), 0);
        attach(&target, "-force -disable many,single").answer();
        assert!(!states(target.pid()).contains("enabled"));
        attach(&target, "-force -enable-pair many,single").answer();
        assert!(!states(target.pid()).contains("disabled"));
    }
}

#[test]
fn forced_change_of_one_counter_is_undone() {
    for target in both_forms("multi_semaphore") {
        let pid = target.pid();
        attach(&target, "-enable many").answer();
        let counters = || {
            let json = run(&format!("info -json -quiet -pid {pid}")).json();
            probe(&json, "many")["semaphores"].clone()
        };
        // As another tool does that counts at one of its sites.
        poke(pid, &counters()[0]["address"], &[3, 0]);
        let before = counters();
        assert_eq!(before[0]["value"], 3, "{before}");
        let undone = attach(&target, "-force -enable many -for 1ms");
        assert!(!undone.stderr.contains("nothing was changed"), "{undone:?}");
        assert_eq!(counters(), before);
        assert!(!run(&format!("info -pid {pid}")).stderr.contains("killed"));
    }
}

#[test]
fn breakpoint_on_a_site_keeps_everything_unchanged() {
    for target in both_forms("gen_ocaml_2") {
        let pid = target.pid();
        let json = run(&format!("info -json -pid {pid}")).json();
        let address = &probe(&json, "plain")["sites"][0]["address"];
        let opcode_address = json!(format!("{:#x}", number(address) + 1));
        for (bytes, why, what) in [
            (
                0xcc,
                "a breakpoint or uprobe (gdb, perf, bpftrace) is there",
                "remove the breakpoint",
            ),
            (
                0x0f,
                "the process does not have the bytes of the file",
                "something else has changed this code",
            ),
        ] {
            poke(pid, &opcode_address, &[bytes]);
            let before = image(pid);
            let error = attach(&target, "-enable watched,plain").failure();
            assert!(error.contains(address.as_str().unwrap()), "{error}");
            assert!(error.contains(why), "{error}");
            assert!(error.contains(&format!("hint: {what}")), "{error}");
            assert!(image(pid) == before);
        }
    }
}

#[test]
fn full_counter_is_refused_with_a_hint() {
    for target in both_forms("gen_ocaml_2") {
        attach(&target, "-enable plain").answer();
        let json = run(&format!("info -json -pid {}", target.pid())).json();
        let semaphore = &probe(&json, "plain")["semaphores"][0]["address"];
        poke(target.pid(), semaphore, &[0xff, 0xff]);
        let error = attach(&target, "-enable plain").failure();
        assert!(error.contains("65535"), "{error}");
        assert!(error.contains("-force -enable plain"), "{error}");
    }
}

#[test]
fn threads_run_on_after_each_change() {
    let mut target = Talker::start_with(&program("threads"), ["4"]);
    for _ in 0..20 {
        attach(&target, "-enable-all").answer();
        attach(&target, "-disable-all").answer();
    }
    target.send("report");
    assert!(target.expect("thread 0").contains("worker="));
    target.expect("report end");
    assert!(target.guard().is_running());
}
