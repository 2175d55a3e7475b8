//! `trace -count`, `-latency`, `-watch`: programs observed from their first instruction to their last.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use test_support::tmux::Terminal;
use test_support::{Scratch, Talker, eventually, fixture, fixture_forms, program, program_forms};

use crate::support::{Run, command, object, run_command, run_with_input};

/// Runs the tool with `flags` on a program that gets `words` on standard input.
pub(crate) fn trace(file: &std::path::Path, flags: &str, words: &str) -> Run {
    let mut trace = command(["trace", "-prog"]);
    run_with_input(words, trace.arg(file).args(flags.split(' ')))
}

/// The first and the last word of each line.
fn ends(text: &str) -> Vec<(&str, &str)> {
    let words = |line| {
        let mut words = str::split_ascii_whitespace(line);
        let first = words.next().unwrap();
        (first, words.next_back().unwrap_or(first))
    };
    text.lines().map(words).collect()
}

#[test]
fn hits_are_counted_from_first_to_last() {
    for file in program_forms("terminating") {
        let plain = run_command(&mut Command::new(&file));
        let counted = trace(&file, "-count", "");
        assert_eq!(counted.code, Some(0));
        // Its own output is the same as without us: no handler has run.
        assert_eq!(counted.stdout, plain.stdout);
        let hits = [
            ("112", "collatz"),
            ("5", "fooia"),
            ("2", "foobar"),
            ("1", "finished"),
        ];
        assert_eq!(ends(&counted.stderr), hits, "{}", counted.stderr);
        // The hits of enabled probes are counted as well.
        let enabled = trace(&file, "-count -enable-all", "");
        assert!(enabled.stdout != plain.stdout);
        assert_eq!(ends(&enabled.stderr), hits);
    }
}

// promise: Observations: A started program that executes another one is observed until then, which a warning says (`trace`, `record`)
#[test]
fn exec_of_an_observed_program_is_told() {
    let scratch = Scratch::new();
    let errors = scratch.file("errors");
    for file in fixture_forms("exec_self") {
        for flags in ["trace -count", "trace -watch ping", "record -probe ping"] {
            let mut tool = command(flags.split(' '));
            if flags.starts_with("record") {
                tool.arg("-o").arg(scratch.file("timeline.json"));
            }
            tool.arg("-prog").arg(&file);
            let mut tool = Talker::spawn(tool.stderr(fs::File::create(&errors).unwrap()));
            assert_eq!(tool.line().unwrap(), "ready");
            assert_eq!(tool.ask("exec", "ready"), "ready");
            eventually("the exec is seen", || {
                let said = fs::read_to_string(&errors).unwrap();
                let warning =
                    "warning: the program has executed a new one, which is not observed: seen ";
                said.contains(warning).then_some(())
            });
            tool.close_input();
            assert!(tool.guard().wait().success(), "{flags}");
        }
    }
}

// promise: Observations: `trace -count -by` has the keys of all hits from the first instruction to the last, beside times (2 programs)
#[test]
fn keys_are_counted_from_first_to_last() {
    for file in fixture_forms("timed") {
        let words = "do (.)(.)\ndo (\nquit\n";
        let flags = "-count -by probe,arg0 -latency start,stop";
        let run = trace(&file, flags, words);
        let lines: Vec<&str> = run.stderr.lines().collect();
        let [keys @ .., other, untyped, times, note] = &lines[..] else {
            panic!("{}", run.stderr);
        };
        let names = keys.iter().map(|line| {
            let mut words = line.split(' ');
            let hits: u64 = words.next().unwrap().parse().unwrap();
            (words.nth(1).unwrap(), hits)
        });
        let names: Vec<(&str, u64)> = names.collect();
        let sum = |name| -> u64 {
            let of_name = names.iter().filter(|(other, _)| *other == name);
            of_name.map(|(_, hits)| hits).sum()
        };
        assert_eq!((sum("start"), sum("stop")), (3, 2), "{}", run.stderr);
        assert!(
            other.starts_with("0 ") && other.ends_with(" other"),
            "{other}"
        );
        assert!(
            untyped.starts_with("0 ") && untyped.ends_with(" untyped"),
            "{untyped}"
        );
        assert!(times.starts_with("2 "), "{times}");
        assert!(note.starts_with("start,stop: if events interleave"));
        let json = trace(&file, &format!("{flags} -json"), words);
        let objects: Vec<_> = json.stderr.lines().map(object).collect();
        let counted = objects.iter().find(|it| it["type"] == "keyed_count");
        assert_eq!(counted.unwrap()["by"], serde_json::json!(["probe", "arg0"]));
    }
}

#[test]
fn results_of_an_exited_program_are_printed() {
    for file in fixture_forms("timed") {
        let words = "do (.)(.)\ndo (\nquit\n";
        let run = trace(&file, "-latency start,stop -watch stop", words);
        assert_eq!(run.code, Some(0));
        let lines: Vec<&str> = run.stderr.lines().collect();
        let [one, other, times, note] = lines[..] else {
            panic!("{}", run.stderr);
        };
        assert!(one.ends_with(" 0") && one.contains(" stop 0x"), "{one}");
        assert!(other.ends_with(" 0") && other > one, "{other}");
        assert!(
            times.starts_with("2 ") && times.ends_with(" 1 0 0 start,stop may interleave"),
            "{times}"
        );
        assert!(note.starts_with("start,stop: if events interleave"));
    }
}

#[test]
fn collector_of_ocaml_4_is_not_reported() {
    let is_ocaml_5 = program("terminating").with_file_name("ocaml5/events.exe");
    if is_ocaml_5.exists() {
        return;
    }
    let why = "has written no runtime events\n\
               hint: only programs of OCaml 5 write them; `ocaml-probes gc -prog ";
    for (file, flags) in [
        ("terminating", "-gc"),
        ("calls", "-gc"),
        ("terminating", "-gc -count"),
    ] {
        let said = trace(&program(file), flags, "run 1 2\n");
        assert_eq!(said.code, Some(1), "{flags}: {said:?}");
        assert!(said.stderr.contains(why), "{}", said.stderr);
    }
    // Of a script, it is not known before.
    let script = trace(Path::new("sh"), "-gc", "echo run\n");
    assert_eq!(
        (script.code, &*script.stdout),
        (Some(1), "run\n"),
        "{script:?}"
    );
    assert!(
        script.stderr.contains("sh has written no runtime events"),
        "{script:?}"
    );
    let hint = "-latency -gc minor,slice";
    let timed = trace(&program("terminating"), hint, "");
    assert_eq!(timed.code, Some(0), "{timed:?}");
    let following = trace(&program("terminating"), "-gc -follow", "");
    assert_eq!(following.code, Some(2), "{}", following.stderr);
}

#[test]
fn table_is_shown_where_results_go() {
    let terminal = Terminal::open(80, 20);
    let scratch = Scratch::new();
    let errors = scratch.file("errors");
    let tool = env!("CARGO_BIN_EXE_ocaml-probes");
    let file = fixture("timed.pie");
    let count = format!("echo quit | {tool} trace -count -prog {}", file.display());
    terminal.type_line(&format!("clear; {count} > /dev/null"));
    terminal.wait_for(" | hits/s");
    terminal.type_line(&format!(
        "clear; {count} 2> '{}'; echo do''ne",
        errors.display()
    ));
    terminal.wait_for("done");
    let errors = std::fs::read_to_string(errors).unwrap();
    assert!(errors.contains("0 0.0 start\n"), "{errors}");
}

#[test]
fn chosen_fields_of_hits_are_shown() {
    for file in fixture_forms("timed") {
        let run = trace(&file, "-watch start -fields name,args", "do (.)\nquit\n");
        assert_eq!(run.stderr, "start 0 1\n");
    }
}

#[test]
fn interleaving_pairs_of_a_program_are_reported() {
    for file in program_forms("interleaved") {
        let run = trace(&file, "-latency start,stop", "bursts 4\n");
        let lines: Vec<&str> = run.stderr.lines().collect();
        let [times, warning, hint] = lines[..] else {
            panic!("{}", run.stderr);
        };
        assert!(
            times.ends_with(" start,stop interleaved 10 untrusted"),
            "{times}"
        );
        assert_eq!(
            warning,
            "ocaml-probes: warning: start,stop: no time can be trusted: pairs of a thread seem to interleave (shown by 10 stops)"
        );
        assert!(hint.starts_with("hint: "), "{hint}");
        let run = trace(&file, "-json -latency start,stop", "bursts 4\n");
        let said: Vec<_> = run.stderr.lines().map(object).collect();
        let times = said.iter().find(|it| it["type"] == "latency").unwrap();
        let pair = &times["pairs"][0];
        assert_eq!(
            (&pair["interleaved"], &pair["trusted"]),
            (&10.into(), &false.into())
        );
        assert!(said.iter().any(|it| it["kind"] == "interleaved"));
    }
}

#[test]
fn unprinted_results_fail_a_successful_program() {
    let file = fixture("job.pie");
    for flags in ["-count", "-json -count"] {
        for (words, code) in [("exit 0\n", 1), ("exit 7\n", 7)] {
            let run = trace(&file, &format!("{flags} -o /dev/full"), words);
            assert_eq!(run.code, Some(code), "{flags}: {run:?}");
            assert!(run.stderr.contains("cannot write the output"), "{run:?}");
        }
    }
}

#[test]
fn results_are_kept_if_json_cannot_be_written() {
    let flags = "trace -json -count -watch start -o /dev/full -prog";
    let mut tool = command(flags.split(' '));
    let mut tool = tool
        .arg(fixture("timed.pie"))
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut input = tool.stdin.take().unwrap();
    std::io::Write::write_all(&mut input, b"do (.)\n").unwrap();
    drop(input);
    let output = tool.wait_with_output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    let said: Vec<_> = said.lines().map(object).collect();
    let counted = said.iter().find(|it| it["type"] == "count").unwrap();
    assert_eq!(counted["probes"][0]["hits"], 1, "{said:?}");
    let error = said.iter().find(|it| it["kind"] == "output").unwrap();
    let why = "cannot write the output to /dev/full: No space left on device";
    assert_eq!(error["message"], why);
}

#[test]
fn json_has_everything_in_order() {
    for file in fixture_forms("timed") {
        let flags = "-json -count -latency start,stop -watch start";
        let run = trace(&file, flags, "run\nquit\n");
        assert_eq!(run.code, Some(0));
        let ours = run.said();
        let [started, hit, counts, times] = &ours[..] else {
            panic!("{}", run.stdout);
        };
        assert_eq!(started["changed"].as_array().unwrap().len(), 0);
        assert_eq!(
            (&hit["name"], &hit["thread"]),
            (&"start".into(), &started["pid"])
        );
        assert_eq!(counts["probes"].as_array().unwrap().len(), 2);
        assert!(
            counts["probes"]
                .as_array()
                .unwrap()
                .iter()
                .all(|it| it["hits"] == 1)
        );
        assert_eq!(times["pairs"][0]["count"], 1);
        assert!(run.stdout.lines().any(|line| line.starts_with("hits ")));
        assert_eq!(ours.len(), run.stderr.lines().count(), "{run:?}");
    }
}

// promise: Observations: The results for a program that is killed are printed (2)
#[test]
fn results_of_a_killed_program_are_printed() {
    for file in fixture_forms("job") {
        let run = trace(&file, "-count", "run\nraise 9\n");
        assert_eq!(run.code, Some(128 + 9));
        assert_eq!(
            ends(&run.stderr),
            [("3", "ping"), ("1", "pong")],
            "{}",
            run.stderr
        );
    }
}

#[test]
fn program_that_cannot_be_observed_is_not_started() {
    for file in fixture_forms("timed") {
        for (flags, why) in [
            ("-watch nothing", "no probe \"nothing\" in "),
            ("-latency start,nothing", "no probe \"nothing\" in "),
            ("-count -follow", "-count and -follow cannot be combined"),
            ("-latency start", "-latency: \"start\" is not two names"),
        ] {
            let run = trace(&file, flags, "run\n");
            assert!(matches!(run.code, Some(1 | 2)), "{flags}");
            assert_eq!(run.stdout, "");
            assert!(run.stderr.contains(why), "{}", run.stderr);
        }
    }
}
