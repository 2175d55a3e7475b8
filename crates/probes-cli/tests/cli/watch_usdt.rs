//! `watch -usdt`: the sites of USDT probes of other providers, one by one, with their arguments.

use test_support::{Talker, fixture_forms};

use crate::count_functions::{counting, start_observing};
use crate::support::{is_observed, object, run};
use crate::trace_observe::trace;
use crate::usdt::semaphore;

/// The hits of a round of `usdt_arguments` in a function of this provider, but for addresses.
fn round(provider: &str, number: usize) -> [String; 5] {
    let half = match number % 2 {
        0 => format!("{}.", number / 2),
        _ => format!("{}.5", number / 2),
    };
    [
        format!("registers {number} {number} \"round text\" {number} {half} 2"),
        format!("stack {number} \"round text\" -5 513 {half} -77"),
        format!("indexed {number} 1111 -2222 -3333 13 10"),
        "constants 7 -1 4096 255 ? ?".to_owned(),
        "edge 1 0x 16843009 0x 72340172838076673 0x".to_owned(),
    ]
    .map(|line| {
        let (name, arguments) = line.split_once(' ').unwrap();
        format!("{provider}:{name} in {provider}_round {arguments}")
    })
}

/// A line without the digits of addresses.
fn without_addresses(line: &str) -> String {
    let words = line.split(' ');
    let words = words.map(|word| if word.starts_with("0x") { "0x" } else { word });
    words.collect::<Vec<_>>().join(" ")
}

// promise: Observations: Arguments of USDT probes in every documented form are shown as they are, also where the x87 unit is in use, and
//    memory that is not mapped is not read (2 programs, 30 arguments, 1 and 4 threads)
#[test]
fn arguments_of_every_form_are_shown() {
    for file in fixture_forms("usdt_arguments") {
        let mut target = Talker::start(&file);
        let pid = target.pid();
        target.ask("form 4 1", "formed");
        for (providers, threads, rounds) in [(&["forms", "x87"][..], 1, 20), (&["forms"], 4, 20)] {
            let globs: Vec<String> = providers.iter().map(|it| format!("{it}:*")).collect();
            let flags = format!("-fields name,args -usdt {}", globs.join(","));
            let tool = start_observing("watch", &flags, pid);
            target.ask(&format!("form {threads} {rounds}"), "formed");
            let watched = tool.end();
            // Some sites of `x87`, and of `forms` in the one program, have their nop overwritten, because the
            // instructions after it cannot be replaced.
            let note = "do not attach bpftrace or perf to ";
            let mut lines = watched.stderr.lines();
            assert!(lines.all(|line| line.starts_with(note)));
            let has_note = watched.stderr.contains("x87:stack in x87_round");
            assert_eq!(has_note, providers.contains(&"x87"));
            let mut shown: Vec<String> = watched.stdout.lines().map(without_addresses).collect();
            shown.sort();
            let each = (1..=rounds).flat_map(|number| {
                let rounds = providers
                    .iter()
                    .map(move |provider| round(provider, number));
                rounds.flatten()
            });
            let each: Vec<String> = each.collect();
            let mut expected = vec![each; threads].concat();
            expected.sort();
            let differing = |lines: &[String], others: &[String]| -> Vec<String> {
                let differing = lines.iter().filter(|it| !others.contains(it));
                differing.cloned().collect()
            };
            let differing = (differing(&shown, &expected), differing(&expected, &shown));
            assert_eq!(differing, (vec![], vec![]), "shown, and expected, alone");
            assert!(
                shown == expected,
                "{} lines were shown, {} expected",
                shown.len(),
                expected.len(),
            );
        }
        assert!(!is_observed(pid));
        target.ask("form 4 10", "formed");
    }
}

#[test]
fn hits_behind_the_lock_are_shown_or_dropped() {
    for file in fixture_forms("usdt_arguments") {
        let mut target = Talker::start(&file);
        let tool = start_observing("watch", "-fields args -usdt x87:registers", target.pid());
        target.ask("form 4 500", "formed");
        let watched = tool.end();
        let dropped = watched.stderr.lines().filter_map(|line| {
            let line = line.replace(" hit was ", " hits were ");
            let number = line
                .split(" hits were dropped")
                .next()?
                .rsplit(' ')
                .next()?;
            number.parse::<usize>().ok()
        });
        let shown = watched.stdout.lines().count();
        assert_eq!(shown + dropped.sum::<usize>(), 2000, "{}", watched.stderr);
        target.ask("form 1 1", "formed");
    }
}

// promise: Observations: Arguments in the frame of a function are read in threads that have just begun, whose stacks
//    no table has yet (2 programs, 100 threads)
#[test]
fn frames_of_young_threads_are_read() {
    for file in fixture_forms("usdt_arguments") {
        let mut target = Talker::start(&file);
        let pid = target.pid();
        for (point, expression) in [
            ("forms:stack", "arg0==1&&arg2==-5&&arg3==513&&arg5==-77"),
            ("x87:stack", "arg0==1&&arg2==-5&&arg3==513&&arg5==-77"),
        ] {
            let tool = counting(&format!("-usdt {point} -where {expression}"), pid);
            target.ask("young 100", "formed");
            let counted = tool.end().answer();
            let words: Vec<&str> = counted.split_whitespace().collect();
            assert_eq!(
                (words[0], words[words.len() - 1]),
                ("100", "0"),
                "{counted}"
            );
        }
        let tool = counting("-usdt forms:stack -by arg0,arg2 -json", pid);
        target.ask("young 100", "formed");
        let json = object(&tool.end().answer());
        assert_eq!(json["untyped"], 0, "{json}");
        assert_eq!(json["keys"][0]["hits"], 100, "{json}");
    }
}

// promise: Observations: With `count` and `watch`, `-where` can ask for arguments of USDT probes, also for those that may be
//    anywhere in memory (2 programs, 10 expressions)
#[test]
fn expressions_ask_for_arguments() {
    for file in fixture_forms("usdt_arguments") {
        let mut target = Talker::start(&file);
        let pid = target.pid();
        target.ask("form 1 1", "formed");
        for (probe, expression, hits) in [
            ("forms:registers", "arg0>15&&arg3==arg0&&arg4>8.", 4),
            (
                "forms:stack",
                "arg0>15&&arg2==-5&&arg3==513&&arg4>8.&&arg5==-77",
                4,
            ),
            ("x87:stack", "arg0==7&&arg2<0", 1),
            ("forms:indexed", "arg1==1111&&arg2==-2222&&arg3==-3333", 20),
            (
                "forms:constants",
                "arg0==7&&arg1==-1&&arg2==4096&&arg3==255",
                20,
            ),
            ("forms:constants", "arg0==8", 0),
            ("forms:indexed", "arg4==13&&arg5==10", 20),
            ("x87:indexed", "arg4==13&&arg5==10", 20),
            ("forms:edge", "arg0==1&&arg2==16843009", 20),
            ("forms:edge", "arg4==72340172838076673", 20),
        ] {
            let flags = format!("-usdt {probe} -where {expression}");
            let tool = counting(&flags, pid);
            target.ask("form 1 20", "formed");
            let counted = tool.end().answer();
            let words: Vec<&str> = counted.split_whitespace().collect();
            assert_eq!(words[0], hits.to_string(), "{flags}: {counted}");
            assert_eq!(words[words.len() - 2..], ["untyped", "0"], "{flags}");
            let tool = start_observing("watch", &flags, pid);
            target.ask("form 1 20", "formed");
            let watched = tool.end();
            assert_eq!(
                (watched.stdout.lines().count(), &*watched.stderr),
                (hits, "")
            );
        }
        // These arguments are in a page that is not mapped, or reach into one.
        for argument in ["arg1", "arg3", "arg5"] {
            let tool = counting(&format!("-usdt forms:edge -where {argument}==0"), pid);
            target.ask("form 1 20", "formed");
            let counted = tool.end().answer();
            let words: Vec<&str> = counted.split_whitespace().collect();
            assert_eq!(words[0], "0", "{argument}: {counted}");
            assert_eq!(words[words.len() - 2..], ["untyped", "20"], "{argument}");
        }
        for (by, key) in [("arg4,arg5", "13 10"), ("arg1", "1111")] {
            let tool = counting(&format!("-usdt forms:indexed -by {by}"), pid);
            target.ask("form 1 20", "formed");
            let counted = tool.end().answer();
            let of_key = |line: &str| line.starts_with("20 ") && line.ends_with(&format!(" {key}"));
            assert!(counted.lines().any(of_key), "{by}: {counted}");
        }
        assert!(!is_observed(pid));
    }
}

// promise: Observations: `watch -usdt` raises semaphores meanwhile, and what a killed one has raised is lowered by the next tool (2)
#[test]
fn semaphores_are_raised_while_watched() {
    for file in fixture_forms("usdt") {
        let mut target = Talker::start(&file);
        let pid = target.pid();
        let tool = start_observing("watch", "-fields args -usdt demo:guarded", pid);
        assert_eq!(semaphore(pid), "2");
        target.ask("fire 1 4", "fired");
        let shown = tool.end().answer();
        assert_eq!(
            shown,
            "0 \"round\"\n1 \"round\"\n1 \"round\"\n2 \"round\"\n3 \"round\"\n3 \"round\"\n"
        );
        assert_eq!(semaphore(pid), "0");
        start_observing("watch", "-usdt demo:guarded", pid).kill();
        assert_eq!(semaphore(pid), "2");
        assert_eq!(run(&format!("observe -clean -pid {pid}")).code, Some(0));
        assert_eq!(semaphore(pid), "0");
        target.ask("fire 1 1", "fired");
    }
}

// promise: Observations: USDT probes of a program that is started are counted and shown from the first hit (2, with 4 threads)
#[test]
fn started_program_is_observed_from_first_hit() {
    for file in fixture_forms("usdt") {
        let counted = trace(&file, "-count -usdt demo:*", "fire 4 1000\nquit\n");
        assert!(
            counted.stdout.contains("fired open=4000 guarded=6000"),
            "{counted:?}"
        );
        let mut hits: Vec<&str> = counted.stderr.lines().collect();
        hits.sort_unstable();
        let hits: Vec<&str> = hits
            .iter()
            .map(|line| line.split(' ').next().unwrap())
            .collect();
        assert_eq!(hits, ["2000", "4000", "4000", "4000"], "{counted:?}");
        let flags = "-fields args -watch -usdt demo:guarded -where arg0>1";
        let watched = trace(&file, flags, "fire 1 4\nquit\n");
        assert!(
            watched.stdout.contains("fired open=4 guarded=6"),
            "{watched:?}"
        );
        let numbers = watched
            .stderr
            .lines()
            .map(|line| line.split(' ').next().unwrap());
        assert_eq!(numbers.collect::<Vec<_>>(), ["2", "3", "3"], "{watched:?}");
    }
}

#[test]
fn site_without_arguments_may_be_observed_beside_it() {
    for file in fixture_forms("usdt") {
        let mut target = Talker::start(&file);
        // Between a comparison and the jump that uses its flags.
        let tool = start_observing("watch", "-fields name -usdt demo:between", target.pid());
        target.ask("fire 1 3", "fired");
        assert_eq!(
            tool.end().answer(),
            "demo:between in usdt_round\n".repeat(3)
        );
    }
}
