//! `latency`: times between probes of running programs, in all formats.

use std::ffi::OsStr;

use nix::sys::signal::Signal;
use serde_json::Value;
use test_support::{Talker, program_forms};

use crate::count::{end, start_observing, start_observing_with};
use crate::count_functions;
use crate::support::{both_forms, command, image, is_observed, object, run, run_command};

#[test]
fn pairs_are_timed_until_interrupted_then_all_restored() {
    for mut target in both_forms("timed") {
        let pid = target.pid();
        let before = image(pid);
        for signal in [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP] {
            let tool = start_observing("latency -quiet -pair start,stop -pair stop,stop", pid);
            target.ask("do (.)((.)..)))(", "done");
            let lines = end(tool, signal);
            let fields: Vec<Vec<&str>> =
                lines.iter().map(|line| line.split(' ').collect()).collect();
            let [pair, same] = &fields[..] else {
                panic!("{lines:?}");
            };
            let numbers: Vec<u64> = pair[..7].iter().map(|word| word.parse().unwrap()).collect();
            let [count, mean, p50, p90, p99, p999, max] = numbers[..] else {
                panic!("{lines:?}");
            };
            assert_eq!(count, 3);
            assert!(mean >= 1_000_000 && mean <= max, "{lines:?}");
            assert!([p50, p90, p99, p999, max].is_sorted(), "{lines:?}");
            assert!(max >= 3_000_000, "{lines:?}");
            // One start and two stops are unmatched. A pair is within another, both in the frame of a loop.
            assert_eq!(
                pair[7..].join(" "),
                "1 2 0 start,stop interleaved 1 untrusted"
            );
            assert_eq!(
                (same[0], &same[7..]),
                ("4", &["1", "1", "0", "stop,stop"][..])
            );
            assert!(!is_observed(pid));
        }
        assert_eq!(before.len(), image(pid).len());
    }
}

#[test]
fn json_is_per_interval_and_svg_is_final() {
    let scratch = test_support::Scratch::new();
    for mut target in both_forms("timed") {
        let picture = scratch.file("times.svg");
        let line = "latency -quiet -json -interval 1ms -pair start,stop -svg";
        let words = line.split(' ').map(OsStr::new);
        let words = words.chain([picture.as_os_str()]);
        let mut tool = start_observing_with(words, target.pid());
        let first = object(&tool.line().unwrap());
        assert_eq!(
            (&first["pid"], &first["version"]),
            (&target.pid().into(), &1.into())
        );
        assert!(first["at"].as_f64().unwrap() > 0.0);
        for _ in 0..7 {
            target.ask("do (.)", "done");
        }
        let lines = end(tool, Signal::SIGINT);
        let last = object(lines.last().unwrap());
        assert_eq!(last["at"], Value::Null);
        let pair = &last["pairs"][0];
        assert_eq!(
            (&pair["start"], &pair["stop"]),
            (&"start".into(), &"stop".into())
        );
        assert_eq!(pair["count"], 7);
        let buckets = pair["buckets"].as_array().unwrap();
        let sum: u64 = buckets.iter().map(|it| it["count"].as_u64().unwrap()).sum();
        assert_eq!(sum, 7);
        assert!(
            buckets
                .iter()
                .all(|it| it["from_ns"].as_u64() < it["to_ns"].as_u64())
        );
        let svg = std::fs::read_to_string(&picture).unwrap();
        assert!(
            svg.starts_with("<svg ") && svg.ends_with("</svg>\n"),
            "{svg}"
        );
        assert!(svg.contains(">start to stop</text>") && svg.contains("7 latencies: mean "));
        assert_eq!(svg.matches("fill=\"#c60\"").count(), buckets.len());
    }
}

#[test]
fn times_are_printed_before_a_failing_picture() {
    for target in both_forms("timed") {
        let pid = target.pid();
        let line = format!("latency -quiet -for 1ms -pair start,stop -svg /dev/full -pid {pid}");
        let run = run(&line);
        assert_eq!(run.code, Some(1));
        assert_eq!(run.stdout, "0 0 0 0 0 0 0 0 0 0 start,stop\n");
        let why = "ocaml-probes: cannot write /dev/full: No space left on device\n";
        assert_eq!(run.stderr, why);
        assert!(!is_observed(pid));
    }
}

#[test]
fn table_has_a_chart_for_each_pair() {
    for mut target in both_forms("timed") {
        let tool = start_observing(
            "latency -quiet -format table -pair start,stop -pair stop,start",
            target.pid(),
        );
        target.ask("do (.)", "done");
        let text = end(tool, Signal::SIGINT).join("\n");
        assert!(text.contains(" start | stop  | 1     | "), "{text}");
        assert!(text.contains("\nstart to stop:\n"), "{text}");
        assert!(text.contains(&format!("1 |{}|", "@".repeat(50))), "{text}");
        // The other pair has no times.
        assert!(!text.contains("stop to start:"), "{text}");
    }
}

/// What is said of pairs in each format.
struct Caution<'c> {
    /// What the program does.
    command: &'c str,
    plain: &'c str,
    json: [Value; 3],
    table: &'c str,
    text: &'c str,
}

fn assert_reported(caution: &Caution<'_>) {
    let scratch = test_support::Scratch::new();
    let picture = scratch.file("times.svg");
    for file in program_forms("interleaved") {
        let mut target = Talker::start(&file);
        let mut answer = |format: &str| {
            let line = format!("latency -quiet -format {format} -pair start,stop -svg");
            let words = line.split(' ').map(OsStr::new);
            let tool = start_observing_with(words.chain([picture.as_os_str()]), target.pid());
            let (name, _) = caution.command.split_once(' ').unwrap();
            target.ask(caution.command, name);
            end(tool, Signal::SIGINT)
        };
        let plain = answer("plain");
        assert!(plain[0].ends_with(caution.plain), "{plain:?}");
        assert_eq!(plain.len(), 1);
        let json = object(&answer("json")[0]);
        let fields = ["interleaved", "doubtful", "trusted"];
        let found = fields.map(|field| json["pairs"][0][field].clone());
        assert_eq!(found, caution.json);
        let table = answer("table").join("\n");
        assert!(table.contains(" | count | trusted "), "{table}");
        assert!(
            table.contains(&format!(" | {} | ", caution.table)),
            "{table}"
        );
        let svg = std::fs::read_to_string(&picture).unwrap();
        assert!(svg.contains(&format!(">{}<", caution.text)), "{svg}");
    }
}

#[test]
fn interleaving_pairs_are_untrusted_in_every_format() {
    assert_reported(&Caution {
        // 14 pairs in 4 bursts; in each burst, one stop has its own start.
        command: "bursts 4",
        plain: " 0 0 0 start,stop interleaved 10 untrusted",
        json: [10.into(), 10.into(), false.into()],
        table: "no: 10 interleaved",
        text: "no time can be trusted: pairs of a thread seem to interleave (shown by 10 stops)",
    });
}

#[test]
fn pairs_that_may_interleave_are_doubtful() {
    assert_reported(&Caution {
        command: "always_open 4",
        plain: " 1 0 0 start,stop doubtful 4",
        json: [0.into(), 4.into(), Value::Null],
        table: "unknown: 4 doubtful",
        text: "either pairs of a thread interleave, and no time can be trusted, or exceptions skip stops, and some times may be wrong: \
               at 4 stops, an earlier start of the stack frame waited",
    });
}

// promise: Observations: Requests that start in one thread and stop in another are untrusted in every format, and a warning names -key (2)
#[test]
fn requests_that_move_are_untrusted() {
    for file in program_forms("requests") {
        let mut target = Talker::start(&file);
        let mut answer = |format: &str| {
            let flags = format!("-format {format} -pair start,stop");
            let tool = count_functions::start_observing("latency", &flags, target.pid());
            target.ask("moving 100", "moving");
            tool.end()
        };
        let done = answer("plain");
        let words: Vec<&str> = done.stdout.trim_end().split(' ').collect();
        let [.., "start,stop", "moved", moved, "untrusted"] = words[..] else {
            panic!("{done:?}");
        };
        // Four threads start 100 each, and four stop them.
        assert_eq!((words[0], moved), ("0", "396"));
        let text = "start,stop: no time can be trusted: events seem to start in one thread and stop in another";
        assert!(done.stderr.contains(text), "{}", done.stderr);
        assert!(done.stderr.contains("give -key EXPR"), "{}", done.stderr);
        let json = object(&answer("json").stdout);
        let pair = &json["pairs"][0];
        let fields = ["moved", "trusted", "interleaving"].map(|field| pair[field].clone());
        assert_eq!(fields, [Value::from(396), false.into(), "seen".into()]);
        let table = answer("table").stdout;
        assert!(table.contains(" | no: 396 moved | "), "{table}");
    }
}

// promise: Observations: Where nothing tells events apart, a note and each form of the answer say that interleaving may not be seen (2 × 7)
#[test]
fn unseen_interleaving_is_reported() {
    let scratch = test_support::Scratch::new();
    let note = "if events interleave in a thread, that may not be seen";
    let answer = |target: &mut Talker, flags: &str, command: &str| {
        let flags = format!("-pair start,stop {flags}");
        let tool = count_functions::start_observing("latency", &flags, target.pid());
        let expected = command.replace("do ", "done ");
        target.ask(command, expected.split(' ').next().unwrap());
        tool.end()
    };
    let interleaving = |json: &str| object(json)["pairs"][0]["interleaving"].clone();
    for file in program_forms("requests") {
        let mut target = Talker::start(&file);
        for (flags, command, expected) in [
            ("-json", "flight 1 20", "not_seen"),
            ("-json", "flight 5 20", "seen"),
            ("-json -key number", "flight 5 20", "not_seen"),
        ] {
            let done = answer(&mut target, flags, command);
            assert_eq!(interleaving(&done.stdout), expected, "{flags} {command}");
            assert!(!done.stderr.contains(note), "{done:?}");
        }
        let done = answer(&mut target, "-format plain", "flight 1 20");
        assert!(!done.stderr.contains(note), "{done:?}");
    }
    for mut target in both_forms("timed") {
        for (flags, is_noted, words) in [
            ("-format plain", true, " 0 0 0 start,stop may interleave\n"),
            (
                "-format table",
                true,
                " | 3     | unknown: may interleave | ",
            ),
            (
                "-json",
                false,
                "\"trusted\":null,\"interleaving\":\"unknown\"",
            ),
            ("-format plain -over 0", true, " start,stop may interleave "),
            (
                "-format table -over 0",
                true,
                " start,stop (may interleave) ",
            ),
            ("-json -over 0", false, ",\"trusted\":null,\"started\""),
        ] {
            let done = answer(&mut target, flags, "do (.)(.)(.)");
            assert_eq!(done.stderr.contains(note), is_noted, "{done:?}");
            assert!(done.stdout.contains(words), "{flags}: {}", done.stdout);
        }
        let picture = scratch.file("times.svg");
        let line = "latency -quiet -pair start,stop -svg".split(' ');
        let words = line.map(OsStr::new).chain([picture.as_os_str()]);
        let tool = start_observing_with(words, target.pid());
        target.ask("do (.)", "done");
        end(tool, Signal::SIGINT);
        let svg = std::fs::read_to_string(&picture).unwrap();
        assert!(svg.contains(&format!(">{note}")), "{svg}");
    }
}

#[test]
fn requests_by_key_are_shown_in_every_format() {
    for file in program_forms("requests") {
        let mut target = Talker::start(&file);
        let mut answer = |flags: &[&str]| {
            let words = ["latency", "-pair", "start,stop"];
            let words = words.iter().chain(flags).map(OsStr::new);
            let tool = start_observing_with(words, target.pid());
            target.ask("flight 5 100", "flight");
            end(tool, Signal::SIGINT)
        };
        let plain = answer(&["-key", "number"]);
        assert!(plain[0].starts_with("105 "), "{plain:?}");
        assert!(plain[0].ends_with(" 0 0 0 start,stop"), "{plain:?}");
        let even = ["-key", "str(text)", "-where", "number & 1 == 0"];
        let json = object(&answer(&[&even[..], &["-json"]].concat())[0]);
        let pair = &json["pairs"][0];
        let fields = ["count", "by_key", "trusted", "untyped"].map(|field| pair[field].clone());
        let expected = [Value::from(53), true.into(), true.into(), 0.into()];
        assert_eq!(fields, expected);
        let untyped = ["-key", "str(number)", "-format"];
        let plain = answer(&[&untyped[..], &["plain"]].concat());
        assert!(plain[0].ends_with(" start,stop untyped 210"), "{plain:?}");
        let table = answer(&[&untyped[..], &["table"]].concat()).join("\n");
        assert!(table.contains(" | untyped"), "{table}");
        let json = object(&answer(&["-quiet", "-key", "tid", "-json"])[0]);
        let pair = &json["pairs"][0];
        assert_eq!(
            (&pair["doubtful"], &pair["trusted"]),
            (&4.into(), &Value::Null)
        );
    }
}

#[test]
fn impossible_keys_of_pairs_are_refused() {
    for file in program_forms("requests") {
        let target = Talker::start(&file);
        let pid = target.pid();
        let refused = |flags: &[&str]| {
            let pid = pid.to_string();
            let words = ["latency", "-pid", &pid];
            run_command(&mut command(words.iter().chain(flags)))
        };
        for (code, flags, why) in [
            (
                2,
                &["-fn", "Stdlib.List.*", "-key", "arg0"][..],
                "-key needs -pair START,STOP: it says which STOP belongs to which START",
            ),
            (
                1,
                &["-pair", "start,stop", "-key", "probe"],
                "this is not the same at the start and the stop of a pair",
            ),
            (
                1,
                &["-pair", "start,stop", "-key", "arg2"],
                "probe stop has no arg2: it has arg0 and arg1; nothing was changed",
            ),
            (
                1,
                &["-pair", "start,stop", "-where", "str(arg1) > 1"],
                "str(arg1) > 1",
            ),
        ] {
            let refused = refused(flags);
            assert_eq!(refused.code, Some(code), "{refused:?}");
            assert!(refused.stderr.contains(why), "{refused:?}");
        }
        assert!(!is_observed(pid));
    }
}

#[test]
fn latency_ends_after_its_duration_or_the_process() {
    for mut target in both_forms("timed") {
        let pid = target.pid();
        let line = format!("latency -quiet -for 1ms -pair start,stop -pid {pid}");
        assert_eq!(run(&line).answer(), "0 0 0 0 0 0 0 0 0 0 start,stop\n");
        let mut tool = start_observing("latency -interval 1ms -pair start,stop", pid);
        tool.line().unwrap();
        target.send("quit");
        while tool.line().is_some() {}
        assert_eq!(tool.guard().wait().code(), Some(0));
    }
}

#[test]
fn impossible_pairs_are_refused_before_any_change() {
    for target in both_forms("timed") {
        let pid = target.pid();
        let failure = run(&format!("latency -pid {pid} -pair start,nothing")).failure();
        assert!(failure.contains("no probe \"nothing\" in "), "{failure}");
        assert!(failure.contains("nothing was changed"), "{failure}");
        let line = format!("latency -pid {pid} -pair start,stop -svg /nowhere/x.svg");
        let failure = run(&line).failure();
        let why = "cannot write /nowhere/x.svg: No such file or directory";
        assert!(failure.contains(why), "{failure}");
        assert!(!is_observed(pid));
        // An existing picture stays unchanged.
        let picture = std::env::temp_dir().join(format!("ocaml-probes-{pid}.svg"));
        std::fs::write(&picture, "there").unwrap();
        let line = format!(
            "latency -pid {pid} -pair start,x -svg {}",
            picture.display()
        );
        run(&line).failure();
        assert_eq!(std::fs::read_to_string(&picture).unwrap(), "there");
        std::fs::remove_file(picture).unwrap();
        let many: Vec<String> = (0..65).map(|n| format!("-pair start,stop{n}")).collect();
        let failure = run(&format!("latency -pid {pid} {}", many.join(" "))).failure();
        assert!(
            failure.contains("65 pairs were asked for; at most 64 are possible"),
            "{failure}"
        );
    }
}
