//! `watch`: hits of running programs, one by one, with their arguments.

use std::io::Read;
use std::process::{Command, Stdio};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use test_support::{Guard, Talker, eventually, program_forms};

use crate::compound::assert_shown;
use crate::count::{end, start_observing};
use crate::support::{both_forms, command, image, is_observed, object, run};

/// The name and the arguments in a line of plain output: the arguments are the words after the
/// source file and line.
fn arguments(line: &str) -> (&str, Vec<&str>) {
    let mut words = line.split(' ');
    let (time, thread, name) = (
        words.next().unwrap(),
        words.next().unwrap(),
        words.next().unwrap(),
    );
    assert!(time.len() == 15 && time.matches(':').count() == 2, "{line}");
    assert!(thread.parse::<i32>().is_ok(), "{line}");
    assert!(words.next().unwrap().starts_with("0x"), "{line}");
    let _function = words.next().unwrap();
    let _source = words.next().unwrap();
    (name, words.collect())
}

#[test]
fn each_hit_is_a_line_with_its_arguments() {
    for mut target in both_forms("arguments") {
        let pid = target.pid();
        let before = image(pid);
        let tool = start_observing("watch -quiet -regexp .", pid);
        target.hits();
        let lines = end(tool, Signal::SIGINT);
        let hits: Vec<(&str, Vec<&str>)> = lines.iter().map(|line| arguments(line)).collect();
        let expected = [
            ("places", vec!["1000", "-1", "\"hello\""]),
            ("places", vec!["3.25", "3.25"]),
            ("widths", vec!["-7", "-7", "-7", "200"]),
            ("registers", vec!["0", "1", "2", "3", "4", "5"]),
            ("silent", vec![]),
        ];
        for hit in expected {
            assert!(hits.contains(&hit), "{hit:?} in {lines:#?}");
        }
        assert_eq!(hits.len(), 6);
        assert!(!is_observed(pid));
        assert_eq!(before.len(), image(pid).len());
    }
}

// promise: Observations: OCaml values are shown as OCaml prints them (2)
#[test]
fn ocaml_values_are_shown_as_in_ocaml() {
    for file in program_forms("shown") {
        let mut program = Talker::start(&file);
        let tool = start_observing("watch -quiet -regexp .", program.pid());
        program.ask("hit 1", "done");
        let lines = end(tool, Signal::SIGINT);
        let of = |name: &str| {
            let mut hits = lines.iter().map(|line| arguments(line));
            let hit = hits.find(|(one, _)| *one == name);
            let words = hit.unwrap_or_else(|| panic!("{name} in {lines:#?}")).1;
            let values = words.iter().map(|word| match word.split_once('=') {
                Some((named, value))
                    if named.chars().all(|it| it == '_' || it.is_alphanumeric()) =>
                {
                    value
                }
                _ => word,
            });
            values.collect::<Vec<_>>().join(" ")
        };
        let (most, least) = (i64::MAX >> 1, i64::MIN >> 1);
        let ints = format!("zero=0 one=1 minus_one=-1 answer=42 max_int={most} min_int={least}");
        assert!(lines.iter().any(|line| line.ends_with(&ints)), "{lines:#?}");
        assert_eq!(of("ints"), format!("0 1 -1 42 {most} {least}"));
        assert_eq!(of("floats"), "0.1 -0. infinity nan 1e300 5e-324");
        assert!(
            of("strings").starts_with("\"\" \"hello\" \"8 bytes.\" "),
            "{lines:#?}"
        );
        assert!(of("strings").contains("\"..."), "{lines:#?}");
        let texts = [
            r#""one\ntwo\ttab\r\n""#,
            r#""caf\233 \255\254""#,
            r#""a\000b\000""#,
            r#""\"\\ \027[31m\127 café \u{9b}31m\u{202e}""#,
            &format!(r#""{}"..."#, "a".repeat(63)),
            r#""bytes""#,
        ];
        assert_eq!(of("texts"), texts.join(" "));
        assert!(of("customs").starts_with(
            "5000000000L -9223372036854775808L -7l 99n <custom _chan> <custom _mutex>"
        ));
        let blocks = r#"(1, "two") [1; 2; 3] (3) ("origin", 0, 0) (1, 2, 3) <1>("blue")"#;
        assert_eq!(of("blocks"), blocks);
        let first: Vec<String> = (0..21).map(|it: u32| it.to_string()).collect();
        let first = first.join(", ");
        let arrays = format!("(1, 2, 3) <0:0> ({first}, ...) [|1.5; 2.5|] [|1.; -1.|] (7)");
        assert_eq!(of("arrays"), arrays);
        let code = "<closure> <closure> <closure> <lazy> <object> (5)";
        assert_eq!(of("code"), code);
        // Unmapped memory is not read.
        assert!(of("naked").starts_with("0x0 0x10 "), "{lines:#?}");
        assert_eq!(of("nothing"), "");
        program.ask("hit 1", "done");
    }
}

// promise: Observations: Values that are made of others are shown one level deep: exceptions, Bigarrays, lists, also one in a circle (2)
#[test]
fn compound_values_are_shown_one_level_deep() {
    for file in program_forms("compound") {
        let mut program = Talker::start(&file);
        let pid = program.pid();
        assert_shown(&mut program, pid);
    }
}

// promise: Observations: Values one level deep are those of the hit, though they are collected and moved all the time (2 programs,
//    20,000 hits of 4 threads, 200 compactions)
#[test]
fn fields_are_those_of_the_hit() {
    for file in program_forms("shown") {
        let mut command = Command::new(&file);
        // Small minor heaps, so that values are moved all the time.
        command.env("OCAMLRUNPARAM", "v=0,s=4k");
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut program = Talker::of(Guard::spawn(&mut command));
        let line = "watch -quiet -json -probe numbered -sample 1/50";
        let tool = start_observing(line, program.pid());
        program.ask("threads 4 5000", "done");
        program.ask("collect 200", "done");
        let lines = end(tool, Signal::SIGINT);
        let (mut compared, mut lost) = (0, 0);
        for line in &lines {
            let hit = object(line);
            lost += hit["lost"].as_u64().unwrap_or(0);
            let arguments = &hit["arguments"];
            let (Some(thread), Some(number)) =
                (arguments[0]["int"].as_i64(), arguments[1]["int"].as_i64())
            else {
                continue;
            };
            let list = &arguments[4];
            // Memory that was just mapped is not read yet.
            if list["unread"].is_string() {
                continue;
            }
            let expected = serde_json::json!([{"int": number}, {"int": thread}]);
            assert_eq!(list["list"]["elements"], expected, "{line}");
            compared += 1;
        }
        assert!(compared > 0 && compared + lost <= 404, "{compared} {lost}");
    }
}

#[test]
fn json_hits_are_objects() {
    for mut target in both_forms("arguments") {
        let mut tool = start_observing("watch -quiet -json -probe places", target.pid());
        target.hits();
        let first = object(&tool.line().unwrap());
        assert_eq!(
            (&first["version"], &first["name"]),
            (&1.into(), &"places".into())
        );
        assert_eq!(first["thread"], target.pid());
        let time = first["time"].as_str().unwrap();
        let time = humantime::parse_rfc3339(time).unwrap();
        assert!(time.elapsed().unwrap().as_secs() < 600);
        let arguments = &first["arguments"];
        assert_eq!(arguments[1]["int"], -1);
        assert_eq!(arguments[2]["string"]["text"], "hello");
        assert_eq!(arguments[2]["string"]["is_whole"], true);
        assert_eq!(end(tool, Signal::SIGINT).len(), 1);
    }
}

#[test]
fn watch_ends_at_the_requested_number_of_hits() {
    for mut target in both_forms("arguments") {
        let pid = target.pid();
        let mut tool = start_observing("watch -quiet -regexp . -limit 8", pid);
        target.hits();
        target.hits();
        target.hits();
        let lines: Vec<String> = std::iter::from_fn(|| tool.line()).collect();
        assert_eq!(tool.guard().wait().code(), Some(0));
        assert_eq!(lines.len(), 8);
        assert!(!is_observed(pid));
    }
}

#[test]
fn chosen_fields_are_shown_in_their_order() {
    for mut target in both_forms("arguments") {
        let line = "watch -quiet -probe silent,widths -fields args,name,source";
        let tool = start_observing(line, target.pid());
        target.hits();
        let lines = end(tool, Signal::SIGINT);
        let source = |line: u32| format!("arguments.S:{line}");
        let expected = [
            format!("-7 -7 -7 200 widths {}", source(40)),
            format!("silent {}", source(77)),
        ];
        assert_eq!(lines, expected);
    }
}

#[test]
fn table_format_has_aligned_columns() {
    for mut target in both_forms("arguments") {
        let line = "watch -quiet -format table -regexp . -fields name,function,args";
        let tool = start_observing(line, target.pid());
        target.hits();
        let lines = end(tool, Signal::SIGINT);
        assert!(lines[0].starts_with(" name"), "{lines:#?}");
        assert!(lines[1].starts_with("-----"), "{lines:#?}");
        let columns = |line: &str, separator: char| -> Vec<usize> {
            line.match_indices(separator).map(|(at, _)| at).collect()
        };
        let expected = columns(&lines[1], '+');
        assert_eq!(expected.len(), 2);
        for line in [&lines[..1], &lines[2..]].concat() {
            assert_eq!(columns(&line, '|'), expected, "{lines:#?}");
        }
        assert_eq!(lines.len(), 2 + 6);
        assert!(
            lines.contains(&" widths    | Args.widths    | -7 -7 -7 200".to_owned()),
            "{lines:#?}"
        );
    }
}

#[test]
fn source_paths_are_full_on_request() {
    for mut target in both_forms("arguments") {
        let tool = start_observing(
            "watch -quiet -probe silent -fields source -paths full",
            target.pid(),
        );
        target.hits();
        let lines = end(tool, Signal::SIGINT);
        assert!(lines[0].starts_with('/'), "{lines:?}");
        assert!(lines[0].ends_with("/fixtures/arguments.S:77"), "{lines:?}");
    }
}

#[test]
fn rate_spreads_over_each_second() {
    let mut program = Talker::start(&test_support::program("shown"));
    let tool = start_observing("watch -json -probe numbered -rate 40", program.pid());
    // So few that none is overwritten before the tool reads it.
    program.ask("hit numbered 1000", "done");
    let lines = end(tool, Signal::SIGINT);
    let hits: Vec<u64> = lines
        .iter()
        .filter_map(|line| object(line)["arguments"][1]["int"].as_u64())
        .collect();
    assert!((40..1000).contains(&hits.len()), "{hits:?}");
    assert!(hits.is_sorted(), "{hits:?}");
    let latest = hits.iter().filter(|&&number| number > 500).count();
    assert!(latest > 0 && latest < hits.len(), "{hits:?}");
}

#[test]
fn skipped_hits_are_reported() {
    for mut target in both_forms("timed") {
        let tool = start_observing("watch -json -probe start -rate 1", target.pid());
        target.ask("pairs 1 1000", "pairs");
        let lines = end(tool, Signal::SIGINT);
        let lines = lines.iter().map(|line| object(line));
        let lines: Vec<Value> = lines.collect();
        let (reported, shown): (Vec<Value>, Vec<Value>) =
            lines.into_iter().partition(|line| line["skipped"].is_u64());
        let sum = |field: &str| -> u64 {
            reported
                .iter()
                .map(|line| line[field].as_u64().unwrap())
                .sum()
        };
        assert!((1..=3).contains(&shown.len()), "{shown:?}");
        assert_eq!(sum("skipped") + sum("lost") + shown.len() as u64, 1000);
    }
}

#[test]
fn skipped_hits_are_reported_below_the_head() {
    let mut program = Talker::start(&test_support::program("shown"));
    let tool = command(["watch", "-format", "table", "-rate", "1", "-limit", "2"]);
    let mut together = Command::new("sh");
    together.args(["-c", "exec \"$@\" 2>&1", "sh"]);
    together.arg(tool.get_program()).args(tool.get_args());
    together.args(["-probe", "numbered", "-pid", &program.pid().to_string()]);
    let mut tool = Guard::spawn(together.stdout(Stdio::piped()));
    while tool.is_running() {
        program.ask("hit numbered 10", "done");
    }
    let mut shown = String::new();
    let stdout = tool.child().stdout.as_mut().unwrap();
    stdout.read_to_string(&mut shown).unwrap();
    let head = shown.find("| thread").unwrap();
    let skipped = shown.find(" hits were skipped").unwrap();
    assert!(head < skipped, "{shown}");
}

// promise: Observations: What a killed tool has left is reported, and removed with `observe -clean`
//    (2)
#[test]
fn clean_removes_a_killed_watch() {
    for mut target in both_forms("arguments") {
        let pid = target.pid();
        let mut tool = start_observing("watch -quiet -regexp .", pid);
        kill(Pid::from_raw(tool.pid()), Signal::SIGKILL).unwrap();
        tool.guard().wait();
        target.hits();
        assert!(is_observed(pid));
        let line = format!("observe -clean -pid {pid}");
        assert_eq!(run(&line).answer(), format!("{pid} 6\n"));
        assert!(!is_observed(pid));
        assert_eq!(run(&line).answer(), format!("{pid} 0\n"));
        let json = run(&format!("{line} -json")).json();
        assert_eq!((&json["pid"], &json["sites"]), (&pid.into(), &0.into()));
        target.hits();
    }
}

#[test]
fn watch_ends_although_its_output_is_unread() {
    for mut target in both_forms("timed") {
        let pid = target.pid();
        for how in ["-quiet", "-quiet -for 4s"] {
            let mut tool = start_observing(&format!("watch {how} -probe start"), pid);
            // More than a pipe holds.
            target.ask("pairs 1 5000", "pairs");
            tool.line().unwrap();
            if how == "-quiet" {
                kill(Pid::from_raw(tool.pid()), Signal::SIGTERM).unwrap();
            }
            assert_eq!(tool.guard().wait().code(), Some(0));
            assert!(!is_observed(pid));
        }
    }
}

// promise: Observations: If `watch -for` ends while nobody reads its output, its last line is
//    whole, and each hit is shown or counted as dropped (2)
#[test]
fn lines_are_whole_when_time_is_over() {
    for file in program_forms("shown") {
        let mut program = Talker::start(&file);
        let pid = program.pid();
        let words = [
            "watch", "-quiet", "-json", "-probe", "numbered", "-for", "2s",
        ];
        let mut tool = command(words);
        tool.args(["-pid", &pid.to_string()]);
        // More than a pipe holds, which nobody reads until the observation is over.
        let mut tool = Guard::spawn(tool.stdout(Stdio::piped()));
        let mut output = tool.child().stdout.take().unwrap();
        // Not by its maps: sites are patched last.
        eventually("its sites are observed, or the tool has exited", || {
            let info = run(&format!("info -pid {pid}"));
            (info.stderr.contains("observed") || !tool.is_running()).then_some(())
        });
        program.ask("hit numbered 2000", "done");
        eventually("it is not observed", || (!is_observed(pid)).then_some(()));
        let mut lines = String::new();
        output.read_to_string(&mut lines).unwrap();
        assert!(tool.wait().success());

        let (mut shown, mut last, mut lost) = (0, 0, 0);
        for line in lines.lines() {
            let line = object(line);
            lost += line["lost"].as_u64().unwrap_or(0);
            if let Some(number) = line["arguments"][1]["int"].as_u64() {
                assert!(number > last, "{number} after {last}");
                (shown, last) = (shown + 1, number);
            }
        }
        assert_eq!(shown + lost, last);
    }
}
