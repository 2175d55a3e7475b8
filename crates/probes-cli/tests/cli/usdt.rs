//! `count -usdt`: USDT probes of other providers than OCaml's, and their semaphores.

use std::fs;
use std::path::Path;
use std::process::Command;

use test_support::{Scratch, Talker, eventually, fixture, fixture_forms, output};

use crate::count_functions::{counting, start_observing};
use crate::list_usdt::{libstdcxx, without_function_names};
use crate::objects::{damage_messages, damaged_plugin};
use crate::support::{is_observed, object, run};

/// The two bytes of the semaphore of `demo:guarded`, which gdb reads.
#[track_caller]
pub(crate) fn semaphore(pid: i32) -> String {
    let mut gdb = Command::new("gdb");
    gdb.args(["-nx", "-batch", "-p", &pid.to_string(), "-ex"]);
    let shown = output(gdb.arg(r#"printf "= %u\n", *(unsigned short *)&demo_guarded_semaphore"#));
    let shown = String::from_utf8(shown.stdout).unwrap();
    let value = shown.lines().find_map(|line| line.strip_prefix("= "));
    value.unwrap_or_default().to_owned()
}

/// The hits of each place, by its name, as `count` prints them.
fn hits(counted: &str) -> Vec<(u64, String)> {
    let lines = counted.lines().map(|line| {
        let mut fields = line.splitn(3, ' ');
        let hits = fields.next().unwrap().parse().unwrap();
        (hits, fields.nth(1).unwrap().to_owned())
    });
    lines.collect()
}

/// How often the program says that its code came to each probe.
fn fired(answer: &str) -> [u64; 2] {
    let mut numbers = answer.split('=').skip(1).map(|rest| {
        let digits = rest.split(' ').next().unwrap();
        digits.parse().unwrap()
    });
    [numbers.next().unwrap(), numbers.next().unwrap()]
}

#[test]
fn function_with_a_probe_at_entry_is_refused() {
    for file in fixture_forms("usdt") {
        let mut talker = Talker::start(&file);
        let pid = talker.pid();
        let why = "usdt_round has a probe site at +0x0, which cannot be moved";
        let tool = counting("-usdt demo:* -fn *_round", pid);
        let [open, _] = fired(&talker.ask("fire 1 100", "fired"));
        let counted = tool.end();
        assert!(counted.stderr.contains(why), "{}", counted.stderr);
        let of_open = (open, "demo:open in usdt_round".to_owned());
        assert!(
            hits(&counted.stdout).contains(&of_open),
            "{}",
            counted.stdout
        );
        let refused = run(&format!("count -pid {pid} -usdt demo:open -fn usdt_round")).failure();
        assert!(refused.contains(why), "{refused}");
    }
}

// promise: Observations: USDT probes of other providers are counted to the last hit, also those that are
//    passed only while their semaphore is raised (2, with 4 threads)
#[test]
fn usdt_probes_are_counted_and_semaphores_raised() {
    for file in fixture_forms("usdt") {
        let mut talker = Talker::start(&file);
        let pid = talker.pid();
        assert_eq!(fired(&talker.ask("fire 4 1000", "fired")), [4000, 0]);
        let tool = counting("-usdt demo:*", pid);
        assert_eq!(semaphore(pid), "2");
        let info = run(&format!("info -pid {pid}")).stderr;
        assert!(info.contains("4 USDT sites are "), "{info}");
        let [open, guarded] = fired(&talker.ask("fire 4 1000", "fired"));
        let counted = tool.end();
        assert_eq!((open, guarded), (8000, 6000));
        let name = |name: &str| format!("demo:{name} in usdt_round");
        let mut found = hits(&counted.stdout);
        found.sort();
        // The second site of `guarded` is passed in every second round.
        let expected = [
            (2000, name("guarded")),
            (4000, name("between")),
            (4000, name("guarded")),
            (4000, name("open")),
        ];
        assert_eq!(found, expected, "{}", counted.stderr);
        assert_eq!(semaphore(pid), "0");
        assert_eq!(fired(&talker.ask("fire 1 10", "fired")), [8010, 6000]);
    }
}

/// Takes the breakpoint at `$site` 40 times as the kernel does for uprobes: goes on after the `nop` that is there.
const AS_UPROBE: &str = "\
break *$site
set $hits = 0
while $hits < 40
continue
set $pc = $pc + 1
set $hits = $hits + 1
end
delete
detach
";

// promise: Observations: While a USDT probe is observed, bpftrace and perf, which set a breakpoint at its site, find the `nop` that they
//    expect there (2)
#[test]
fn other_tools_find_nops_at_observed_sites() {
    let scratch = Scratch::new();
    let script = scratch.file("script");
    fs::write(&script, AS_UPROBE).unwrap();
    for file in fixture_forms("usdt") {
        let mut talker = Talker::start(&file);
        let pid = talker.pid();
        let listed = run(&format!("list -json -provider any -pid {pid}"));
        let probes = object(&listed.stdout)["probes"].clone();
        let mut probes = probes.as_array().unwrap().iter();
        let open = probes.find(|it| it["name"] == "open").unwrap();
        let site = open["sites"][0]["address"].as_str().unwrap();
        let tool = counting("-usdt demo:open", pid);
        let mut gdb = Command::new("gdb");
        gdb.args(["-nx", "-batch", "-p", &pid.to_string()]);
        let mut gdb = Talker::spawn(
            gdb.args(["-ex", &format!("set $site = {site}"), "-x"])
                .arg(&script),
        );
        while !gdb.line().unwrap().starts_with("Breakpoint 1 at") {}
        talker.send("fire 1 40");
        while gdb.line().is_some() {}
        assert_eq!(fired(&talker.line().unwrap()), [40, 0]);
        let counted = tool.end();
        assert_eq!(hits(&counted.stdout)[0].0, 40, "{counted:?}");
    }
}

// promise: Observations: That requests interleave in a thread is noticed by the numbers that USDT probes of C pass at both ends, without
//    `-key` (2 programs, 5 ways)
#[test]
fn interleaving_requests_of_c_are_noticed() {
    for file in fixture_forms("usdt_requests") {
        let mut talker = Talker::start(&file);
        for (key, line, answer, trusted) in [
            ("", "serve 100 1", "served", None),
            ("", "serve 100 2", "served", Some(false)),
            ("", "serve 100 5", "served", Some(false)),
            (" -key arg0", "serve 100 5", "served", Some(true)),
            // From before the observation to its end, each hit is followed by one of the other probe.
            ("", "turn 101", "turned", Some(false)),
        ] {
            if answer == "turned" {
                talker.ask("open 3", "opened");
            }
            let flags = format!("-json -usdt request:begin,request:end{key}");
            let tool = start_observing("latency", &flags, talker.pid());
            talker.ask(line, answer);
            let run = tool.end();
            let pair = &object(run.stdout.trim_end())["pairs"][0];
            // The notes of C do not say that the numbers have one name.
            assert_eq!(
                (&pair["count"], &pair["trusted"]),
                (&100.into(), &trusted.into()),
                "{line}{key}: {run:?}"
            );
            assert_eq!(
                run.stderr.contains("seem to interleave"),
                trusted == Some(false),
                "{run:?}"
            );
        }
    }
}

#[test]
fn pairs_without_room_are_reported() {
    let mut talker = Talker::start(&fixture_forms("usdt_requests")[0]);
    for (requests, has_room) in [(5, true), (80, false)] {
        let flags = "-json -usdt request:begin,request:end";
        let tool = start_observing("latency", flags, talker.pid());
        talker.ask(&format!("serve 100 {requests}"), "served");
        let run = tool.end();
        let pair = &object(run.stdout.trim_end())["pairs"][0];
        assert_eq!(pair["lost"] == 0, has_room, "{run:?}");
        let is_said = run.stderr.contains("there was no room for a start");
        assert_eq!(is_said, !has_room, "{run:?}");
    }
}

// promise: Observations: Pairs of USDT probes of other providers are timed, each of them, with their semaphores raised, also by key and by
//    their times (2 programs, 4 threads)
#[test]
fn usdt_probes_are_timed_as_pairs() {
    for file in fixture_forms("usdt") {
        let mut talker = Talker::start(&file);
        let pid = talker.pid();
        for (flags, count, unmatched) in [
            ("demo:open,demo:guarded", 4000, 2000),
            ("demo:open,demo:guarded -where arg0>=500", 2000, 2000),
            ("demo:open,demo:guarded -where elapsed>100s", 0, 2000),
            ("demo:open,demo:guarded -by tid", 4000, 2000),
            ("demo:open,demo:open -key tid", 3996, 4),
        ] {
            let tool = start_observing("latency", &format!("-json -usdt {flags}"), pid);
            talker.ask("fire 4 1000", "fired");
            let run = tool.end();
            let json = object(run.stdout.trim_end());
            let pair = &json["pairs"][0];
            assert_eq!(pair["count"], count, "{flags} {run:?}");
            assert_eq!(pair["unmatched_stops"], unmatched, "{flags} {pair}");
            assert_eq!(pair["start"], "demo:open");
            assert_eq!(semaphore(pid), "0");
        }
        for (flags, why) in [
            ("demo:*,demo:open", "is a glob"),
            ("demo:open", "is not two names"),
            ("demo:open,demo:none", "demo:none"),
        ] {
            let refused = run(&format!("latency -pid {pid} -usdt {flags}"));
            assert_ne!(refused.code, Some(0));
            assert!(refused.stderr.contains(why), "{refused:?}");
        }
        assert!(!is_observed(pid));
    }
}

// promise: Observations: Slow pairs of USDT probes are shown one by one with the arguments of both ends, in every documented form, also
//    with a key or a condition, where the x87 unit is in use, and in 4 threads (4 programs)
#[test]
fn slow_usdt_pairs_are_shown_with_arguments() {
    for file in fixture_forms("usdt_arguments") {
        let mut target = Talker::start(&file);
        let pid = target.pid();
        target.ask("form 4 1", "formed");
        for (flags, provider, threads, numbers) in [
            ("", "forms", 4, 1..=20),
            ("", "x87", 1, 1..=20),
            ("-key arg0", "forms", 1, 1..=20),
            ("-where arg0>15", "forms", 1, 16..=20),
        ] {
            let pair = match flags {
                "-key arg0" => format!("{provider}:registers,{provider}:stack"),
                _ => format!("{provider}:stack,{provider}:indexed"),
            };
            let flags = format!("-format plain -over 0 -usdt {pair} {flags}");
            let tool = start_observing("latency", flags.trim_end(), pid);
            target.ask(&format!("form {threads} 20"), "formed");
            let run = tool.end();
            let lines = run.stdout.lines();
            let (slow, figures): (Vec<&str>, Vec<&str>) =
                lines.partition(|line| line.starts_with("slow "));
            assert_eq!(figures.len(), 1, "{run:?}");
            let mut shown: Vec<String> = slow
                .iter()
                .map(|line| line.split(' ').skip(4).collect::<Vec<_>>().join(" "))
                .collect();
            shown.sort();
            let doubt = if flags.contains("-key") {
                ""
            } else {
                " may interleave"
            };
            let ends = |number: usize| {
                let half = match number % 2 {
                    0 => format!("{}.", number / 2),
                    _ => format!("{}.5", number / 2),
                };
                let stack = format!("{number} \"round text\" -5 513 {half} -77");
                let indexed = format!("{number} 1111 -2222 -3333 13 10");
                let registers = format!("{number} {number} \"round text\" {number} {half} 2");
                if pair.ends_with(":stack") {
                    format!("{pair}{doubt} {registers} -> {stack}")
                } else {
                    format!("{pair}{doubt} {stack} -> {indexed}")
                }
            };
            let each = numbers.flat_map(|number| vec![ends(number); threads]);
            let mut expected: Vec<String> = each.collect();
            expected.sort();
            assert_eq!(shown, expected, "{flags}");
        }
        // Its code is long, but not because of the expression.
        let flags = "-format plain -over 0 -usdt forms:edge,forms:edge -where arg0==1";
        let tool = start_observing("latency", flags, pid);
        target.ask("form 1 20", "formed");
        let run = tool.end();
        let edges = "1 0x 16843009 0x 72340172838076673 0x";
        let is_it = |line: &&str| {
            let words = line
                .split(' ')
                .map(|it| if it.starts_with("0x") { "0x" } else { it });
            let line = words.skip(4).collect::<Vec<_>>().join(" ");
            line == format!("forms:edge,forms:edge {edges} -> {edges}")
        };
        assert_eq!(run.stdout.lines().filter(is_it).count(), 19, "{run:?}");
        assert!(!is_observed(pid));
        target.ask("form 4 10", "formed");
    }
}

// promise: Observations: Where a USDT site is counted at another instruction, nothing is asked of its arguments, also not as a key
//    (2 programs, 4 questions)
#[test]
fn arguments_of_moved_sites_are_refused() {
    for file in fixture_forms("usdt_arguments") {
        let mut talker = Talker::start(&file);
        let pid = talker.pid();
        let tool = counting("-usdt moved:round", pid);
        talker.ask("form 1 10", "formed");
        assert_eq!(hits(&tool.end().stdout)[0].0, 10);
        let tool = counting("-usdt moved:round -by tid", pid);
        talker.ask("form 1 10", "formed");
        let counted = tool.end().stdout;
        assert!(counted.starts_with("10 "), "{counted}");
        for asked in [
            "count -usdt moved:round -where arg0>5",
            "count -usdt moved:round -by arg0",
            "count -usdt moved:round -by tid,arg0",
            "hist -of tid -usdt moved:round -by arg0",
        ] {
            let refused = run(&format!("{asked} -pid {pid} -for 1ms"));
            assert_eq!(refused.code, Some(1), "{asked}: {refused:?}");
            let why = "needs processor flags that a trampoline would change, at +0x";
            assert!(refused.stderr.contains(why), "{asked}: {refused:?}");
            let hint = format!("list -pid {pid} -provider any -sites` shows where");
            assert!(refused.stderr.contains(&hint), "{asked}: {refused:?}");
        }
        assert!(!is_observed(pid));
    }
}

// promise: Observations: A site that is in no known function is left out beside others, also those of its probe, with a warning (2)
#[test]
fn sites_outside_functions_are_left_out() {
    for file in fixture_forms("usdt_arguments") {
        let mut talker = Talker::start(&file);
        let pid = talker.pid();
        for (names, warning) in [
            ("outside:*", "2 of 3 places cannot be counted: outside:"),
            (
                "outside:known",
                "1 of 2 places cannot be counted: outside:known at 0x",
            ),
        ] {
            let mut tool = counting(&format!("-usdt {names}"), pid);
            talker.ask("form 1 10", "formed");
            tool.expect_said(warning);
            let ended = tool.end();
            let hint = "hint: all others are counted, so figures of outside:known are too low; -v";
            assert!(ended.stderr.contains(hint), "{ended:?}");
            assert_eq!(
                hits(&ended.stdout),
                [(10, "outside:known in outside_round".to_owned())]
            );
        }
        let refused = run(&format!("count -usdt outside:lost -pid {pid}"));
        assert_eq!(refused.code, Some(1));
        assert!(
            refused.stderr.contains("is in no known function"),
            "{refused:?}"
        );
    }
}

// promise: Observations: Of the probes of a glob, those with an argument that cannot be read are left out with a warning if that is asked
//    for (2)
#[test]
fn unread_arguments_are_left_out_of_globs() {
    for file in fixture_forms("usdt_arguments") {
        let mut talker = Talker::start(&file);
        let pid = talker.pid();
        let mut tool = counting("-usdt forms:* -by probe,arg5", pid);
        talker.ask("form 1 10", "formed");
        tool.expect_said("forms:constants in forms_round at 0x");
        let counted = tool.end().stdout;
        assert!(
            counted.contains(" forms:registers in forms_round 2\n"),
            "{counted}"
        );
        assert!(!counted.contains("forms:constants"), "{counted}");
        // If it is named, that is an error.
        let refused = run(&format!(
            "count -usdt forms:constants -by probe,arg5 -pid {pid}"
        ));
        assert_eq!(refused.code, Some(1));
        let why = "arg5 of USDT probe forms:constants cannot be asked for";
        assert!(refused.stderr.contains(why), "{refused:?}");
    }
}

// promise: Observations: No message names a library that has only data (1)
#[test]
fn libraries_of_data_are_left_out_in_silence() {
    let scratch = Scratch::new();
    let (source, library) = (scratch.file("data.s"), scratch.file("libdata.so"));
    fs::write(&source, ".text\nnop\n.data\n.quad 1\n").unwrap();
    let mut gcc = Command::new("gcc");
    gcc.args(["-nostdlib", "-shared", "-s", "-o"]);
    assert!(gcc.arg(&library).arg(&source).status().unwrap().success());
    let mut program = Command::new(fixture("usdt.pie"));
    // A relative path, because the directory's path has a space in it, which would end a name in LD_PRELOAD.
    program
        .current_dir(scratch.path())
        .env("LD_PRELOAD", "./libdata.so");
    let mut target = Talker::spawn(&mut program);
    target.expect("ready");
    let said = |flags: &str| {
        let flags = format!("{flags} -for 200ms");
        counting(&flags, target.pid()).until_end().stderr
    };
    let skipped = "skipped: ";
    assert!(!said("-usdt demo:open").contains(skipped));
    let of_functions = said("-usdt demo:open -fn fixture_command");
    assert!(!of_functions.contains(skipped), "{of_functions}");
}

// promise: Observations: USDT sites in parts of functions that the compiler has moved away are counted, also by their arguments
//    (2 programs, and stripped, with 1 and 4 threads)
#[test]
fn sites_in_cold_parts_are_counted() {
    let scratch = Scratch::new();
    for file in fixture_forms("usdt_cold") {
        let stripped = scratch.file(file.file_name().unwrap().to_str().unwrap());
        let mut strip = Command::new("strip");
        strip.arg("-o").arg(&stripped).arg(&file);
        assert!(strip.status().unwrap().success());
        let name = "demo:rare in cold_round.cold";
        // In a stripped file, this part looks like a function, where flags may be in use that are not. A filter may
        // need the registers that are saved under a lock: with several threads, some hits would be untyped.
        for (file, flags, name, threads, expected) in [
            (&file, "", name, 4, 1000),
            (&file, " -where arg0>=500", name, 1, 125),
            (&stripped, "", "demo:rare", 4, 1000),
        ] {
            let mut talker = Talker::start(file);
            let tool = counting(&format!("-usdt demo:rare{flags}"), talker.pid());
            let answer = talker.ask(&format!("fire {threads} 1000"), "fired");
            let rare = format!("rare={}", threads * 250);
            assert!(answer.ends_with(&rare), "{answer}");
            let counted = tool.end();
            let line = counted.stdout.trim_end().split(" untyped").next().unwrap();
            assert_eq!(hits(line), [(expected, name.to_owned())], "{counted:?}");
        }
    }
}

// promise: Observations: By its name, a process without OCaml probes is found, too, if none are asked for (5 commands)
#[test]
fn processes_without_probes_are_selected_by_name() {
    let scratch = Scratch::new();
    let name = format!("unprobed-{}", std::process::id());
    let file = scratch.copy(&fixture("usdt.pie"), &name);
    let talkers = [Talker::start(&file), Talker::start(&file)];
    for asked in [
        "count -usdt demo:open",
        "count -fn fixture_command",
        "hist -of tid -usdt demo:open",
        "latency -fn fixture_command",
        "watch -usdt demo:open",
    ] {
        let found = run(&format!("{asked} -name {name} -for 1ms"));
        assert_eq!(found.code, Some(0), "{asked}: {found:?}");
        let stops = found.stderr.matches("stopped ").count();
        assert_eq!(stops, talkers.len(), "{asked}: {found:?}");
        let none = run(&format!("{asked} -name {name}-none -for 1ms"));
        assert_eq!(none.code, Some(1), "{asked}: {none:?}");
        let why = format!("no process runs a program whose name matches \"{name}-none\"");
        assert!(none.stderr.contains(&why), "{asked}: {none:?}");
    }
    // For probes, those without are left out.
    let none = run(&format!("count -probe open -name {name}"));
    let why = "no process with OCaml probes runs a program whose name matches";
    assert!(none.stderr.contains(why), "{none:?}");
}

// promise: Observations: A killed observer's raised semaphores are lowered by the next tool (2 × 2)
#[test]
fn semaphores_of_a_killed_observer_are_lowered() {
    for file in fixture_forms("usdt") {
        let mut talker = Talker::start(&file);
        let pid = talker.pid();
        counting("-usdt demo:guarded", pid).kill();
        assert_eq!(semaphore(pid), "2");
        assert_eq!(run(&format!("observe -clean -pid {pid}")).code, Some(0));
        assert_eq!(semaphore(pid), "0");
        assert!(!is_observed(pid));
        // The next observer takes over what is left, and raises them again.
        counting("-usdt demo:guarded", pid).kill();
        let tool = counting("-usdt demo:guarded", pid);
        assert_eq!(semaphore(pid), "2");
        talker.ask("fire 1 10", "fired");
        let counted = hits(&tool.end().stdout);
        assert_eq!(counted.iter().map(|(hits, _)| hits).sum::<u64>(), 15);
        assert_eq!(semaphore(pid), "0");
    }
}

// promise: Observations: A semaphore that cannot be raised is an error, and nothing is changed (2)
#[test]
fn full_semaphore_is_refused() {
    for file in fixture_forms("usdt") {
        let mut talker = Talker::start(&file);
        let pid = talker.pid();
        talker.ask("fill", "filled");
        let error = run(&format!("count -usdt demo:guarded -for 1s -pid {pid}")).failure();
        let start = format!("ocaml-probes: process {pid} has the semaphore of a USDT probe at 0x");
        assert!(error.starts_with(&start), "{error}");
        let end = "at its highest value: it cannot be raised; nothing was changed";
        assert!(error.lines().next().unwrap().ends_with(end), "{error}");
        assert_eq!(semaphore(pid), "65535");
        eventually("it is not observed", || (!is_observed(pid)).then_some(()));
        assert_eq!(fired(&talker.ask("fire 1 10", "fired")), [10, 15]);
    }
}

#[test]
fn unknown_usdt_probe_is_refused_with_suggestion() {
    let file = &fixture_forms("usdt")[0];
    let talker = Talker::start(file);
    let pid = talker.pid();
    let error = run(&format!("count -usdt demo:garded -pid {pid}")).failure();
    let expected = "matches demo:garded; did you mean \"demo:guarded\"";
    assert!(error.contains(expected), "{error}");
    let before = fs::read_link(Path::new(&format!("/proc/{pid}/exe"))).unwrap();
    assert_eq!(before, file.canonicalize().unwrap());
    assert!(!is_observed(pid));
    let usage = run(&format!("count -usdt guarded -pid {pid}"));
    assert_eq!(usage.code, Some(2));
    assert!(
        usage.stderr.contains("\"guarded\" is not PROVIDER:NAME"),
        "{}",
        usage.stderr
    );
}

// promise: Objects that come and go: A library whose notes are damaged is named once, and the USDT probes of the others are
//    counted (2)
#[test]
fn damaged_library_is_named_and_others_counted() {
    let scratch = Scratch::new();
    let damaged = damaged_plugin(&scratch);
    let [why, hint] = damage_messages(&damaged);
    for file in fixture_forms("objects/host") {
        let mut target = Talker::spawn(Command::new(&file).env("LD_PRELOAD", libstdcxx()));
        target.expect("ready");
        let pid = target.pid();
        for how in ["load", "isolate"] {
            target.ask(&format!("{how} {}", damaged.display()), "loaded");
        }
        let counted = run(&format!("count -usdt libstdcxx:throw -for 1s -pid {pid}"));
        let warning = format!("ocaml-probes: warning: skipped: {why}\n{hint}");
        let after = counted.stderr.strip_prefix(&warning);
        assert!(
            after.is_some_and(|it| !it.contains("skipped")),
            "{}",
            counted.stderr
        );
        assert!(counted.answer().contains(" libstdcxx:throw "));
        let unknown = run(&format!("count -usdt demo:nothing -pid {pid}")).stderr;
        let unread = "matches demo:nothing, and plugin.so could not be read; nothing was changed\n";
        assert!(unknown.contains(unread), "{unknown}");
    }
}

#[test]
fn damaged_library_without_probes_beside_is_named() {
    let scratch = Scratch::new();
    let damaged = damaged_plugin(&scratch);
    let [why, _] = damage_messages(&damaged);
    for file in fixture_forms("usdt") {
        let mut target = Talker::spawn(
            Command::new(&file)
                .env("LD_LIBRARY_PATH", damaged.parent().unwrap())
                .env("LD_PRELOAD", damaged.file_name().unwrap()),
        );
        target.expect("ready");
        let counted = run(&format!("count -usdt demo:* -for 1s -pid {}", target.pid()));
        assert_eq!(
            counted.stderr.matches(&why).count(),
            1,
            "{}",
            counted.stderr
        );
        assert!(counted.answer().contains(" demo:open "));
    }
}

#[test]
fn probes_of_ocaml_are_not_counted_as_usdt() {
    let target = Talker::start(&fixture("objects/host.pie"));
    let error = run(&format!("count -usdt *:ping -pid {}", target.pid())).failure();
    assert!(
        error.contains(
            " matches *:ping, except OCaml's; nothing was changed\nhint: give -probe NAME "
        ),
        "{error}"
    );
}

#[test]
fn libraries_are_counted_if_program_is_unreadable() {
    let scratch = Scratch::new();
    for file in fixture_forms("usdt") {
        let target = Talker::start(&without_function_names(&scratch, &file));
        let pid = target.pid();
        let missing = |line: &str| {
            let error = run(&format!("{line} -pid {pid}")).stderr;
            let text = error.split_once(" or its ").unwrap().1;
            text.split_once(" matches").unwrap().0.to_owned()
        };
        let expected = missing("list -provider nobody");
        assert!(expected.ends_with(" libraries"), "{expected}");
        assert_eq!(missing("list -functions no_such_function"), expected);
        assert_eq!(missing("count -usdt no:such"), expected);
    }
}
