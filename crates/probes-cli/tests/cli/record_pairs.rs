//! `record` of pairs: pairs that interleave, slices by key, and the warnings about them.

use std::fs;
use std::time::Duration;

use test_support::{Scratch, Talker, program, program_forms};

use crate::record::{FORMATS, figure, read, record_command, recording, slices, span};
use crate::support::{is_observed, object, run_command};

// promise: Time lines: Pairs that interleave in a thread are said to be wrong in the file, in each format of the summary and in a warning
//    (3 formats of 2 programs)
#[test]
fn pairs_that_interleave_are_untrusted() {
    let scratch = Scratch::new();
    let file = scratch.file("pairs.json");
    for program in program_forms("requests") {
        let mut target = Talker::start(&program);
        for format in ["plain", "table", "json"] {
            let flags = ["-pair", "start,stop", "-format", format];
            let tool = recording(target.pid(), &flags, &file);
            target.ask("flight 5 20", "flight");
            let done = tool.end();
            if format == "json" {
                let pair = &object(&done.stdout)["pairs"][0];
                assert_eq!(pair["trusted"], false, "{pair}");
                assert_eq!(pair["count"], 25, "{pair}");
            } else {
                assert!(done.stdout.contains("untrusted"), "{done:?}");
            }
            let text = "start,stop: no time can be trusted: pairs of a thread seem to interleave";
            assert!(done.stderr.contains(text), "{done:?}");
            assert!(done.stderr.contains("give -key EXPR"), "{done:?}");
            assert!(done.stderr.contains("`latency -key EXPR`"), "{done:?}");
            let timeline = read(&file);
            let instants = timeline["instants"].as_array().unwrap();
            let mut doubts = instants
                .iter()
                .filter(|it| it["name"] == "times of pairs may be wrong");
            let said = doubts.next().unwrap()["args"]["pair"].as_str().unwrap();
            assert!(said.starts_with(text), "{said}");
        }
        // Pairs that nest are trusted.
        let tool = recording(target.pid(), &["-pair", "start,stop"], &file);
        target.ask("flight 1 20", "flight");
        let done = tool.end();
        assert!(!done.stderr.contains("trusted"), "{done:?}");
        assert!(!done.stdout.contains("untrusted"), "{done:?}");
    }
}

#[test]
fn untrusted_pairs_do_not_end_the_recording() {
    let scratch = Scratch::new();
    let file = scratch.file("pairs.json");
    let mut target = Talker::start(&program("requests"));
    let flags = ["-pair", "start,stop", "-over", "1ms", "-last", "1s"];
    let tool = recording(target.pid(), &flags, &file);
    // 64 requests are under way, and one ends every 20 us: a wrong pair may last much longer than the 1 ms of -over.
    target.ask("flight 64 2000", "flight");
    let done = tool.end();
    assert!(!done.stderr.contains("start,stop took"), "{done:?}");
    assert!(
        done.stderr.contains("no time can be trusted"),
        "{}",
        done.stderr
    );
}

#[test]
fn shortest_bound_waits_for_a_slice() {
    let scratch = Scratch::new();
    let file = scratch.file("over.json");
    for (flags, took) in [
        (["-pair", "start,stop"], "start,stop took "),
        (["-fn", "Requests.*"], "Requests."),
    ] {
        let mut target = Talker::start(&program("requests"));
        let flags = [&flags[..], &["-over", "0"]].concat();
        let idle = [&flags[..], &["-for", "500ms"]].concat();
        let done = recording(target.pid(), &idle, &file).until_end();
        assert!(!done.stderr.contains(" took "), "{done:?}");
        let tool = recording(target.pid(), &flags, &file);
        target.ask("flight 1 1", "flight");
        let done = tool.until_end();
        let mut lines = done.stderr.lines();
        let said = lines.find(|line| line.contains(" took "));
        assert!(said.is_some_and(|it| it.contains(took)), "{done:?}");
        assert!(figure(&done.answer(), "slices") > 0);
    }
}

#[test]
fn probe_of_a_regular_expression_ends_the_recording() {
    let scratch = Scratch::new();
    let file = scratch.file("until.json");
    for flags in [
        &["-regexp", "st"][..],
        &["-regexp", "st", "-pair", "start,stop"],
    ] {
        let mut target = Talker::start(&program("requests"));
        let until = |name| [flags, &["-until", name]].concat();
        let tool = recording(target.pid(), &until("stop"), &file);
        target.ask("flight 1 1", "flight");
        let done = tool.until_end();
        assert!(done.stderr.contains("stop was hit"), "{done:?}");
        let instants = read(&file)["instants"].as_array().unwrap().len();
        assert!(instants >= 2, "{done:?}");
        done.answer();
        let mut missing = record_command(target.pid(), &until("stopped"), &file);
        let missing = run_command(&mut missing).failure();
        assert!(missing.contains("no probe"), "{missing}");
    }
}

#[test]
fn ends_of_pairs_are_instants_if_selected() {
    let scratch = Scratch::new();
    let file = scratch.file("ends.json");
    for probes in [["-probe", "start"], ["-regexp", "sta"]] {
        let mut target = Talker::start(&program("requests"));
        let flags = [&["-pair", "start,stop"], &probes[..]].concat();
        let tool = recording(target.pid(), &flags, &file);
        target.ask("flight 1 4", "flight");
        tool.end().answer();
        let timeline = read(&file);
        let instants = timeline["instants"].as_array().unwrap();
        assert_eq!(instants.len(), 5, "{instants:?}");
        assert!(instants.iter().all(|it| it["name"] == "start"));
        assert_eq!(slices(&timeline, "start,stop").len(), 5);
    }
}

/// Parses an answer of `requests`: how many requests there were, and two sums of their times by the program's own
/// clock, in nanoseconds. The first is measured around both probes, the second between them.
fn requested(answer: &str) -> (usize, u64, u64) {
    let numbers: Vec<u64> = (answer.split(' ').skip(1))
        .map(|number| number.parse().unwrap())
        .collect();
    let [count, outer, inner] = numbers[..] else {
        panic!("{answer}");
    };
    (count as usize, outer, inner)
}

// promise: Time lines: With -key, requests that interleave in a thread, or move between threads, are slices from each start to its own
//    stop, as long as the program says (3 formats of 2 programs, 3 keys)
#[test]
fn requests_by_key_are_slices() {
    let scratch = Scratch::new();
    for program in program_forms("requests") {
        let mut target = Talker::start(&program);
        for (format, key) in
            FORMATS
                .into_iter()
                .zip(["number", "str(text)", "number & 0xffff, str(text)"])
        {
            for command in ["flight 5 100", "moving 100"] {
                let file = scratch.file(format);
                let flags = ["-pair", "start,stop", "-key", key];
                let tool = recording(target.pid(), &flags, &file);
                let answer = target.ask(command, command.split(' ').next().unwrap());
                let done = tool.end();
                assert!(!done.stderr.contains("warning"), "{done:?}");
                assert!(!done.stdout.contains("pair "), "{done:?}");
                let timeline = read(&file);
                let found = slices(&timeline, "start,stop");
                let (count, outer, inner) = requested(&answer);
                assert_eq!(found.len(), count, "{key} {command}");
                let mut lasted = 0;
                let mut moved = 0;
                for slice in &found {
                    let both = ["begin_args", "end_args"].map(|args| &slice[args]);
                    for name in ["number", "text"] {
                        assert_eq!(both[0][name], both[1][name], "{slice}");
                    }
                    // Slices of a track do not overlap.
                    assert_eq!(slice["depth"], 0, "{slice}");
                    assert!(slice["args"]["ended"].is_null(), "{slice}");
                    moved += usize::from(!both[1]["thread"].is_null());
                    let (begin, end) = span(slice);
                    lasted += end - begin;
                }
                // The clock of the program has microseconds.
                let slack = 2_000 * count as u64;
                let possible = inner - slack..=outer + slack;
                assert!(possible.contains(&lasted), "{lasted}: {answer}");
                assert_eq!(
                    moved,
                    if command.starts_with("moving") {
                        count
                    } else {
                        0
                    }
                );
                let figures = ["slices", "without_stop", "unmatched_stops", "without_key"];
                let figures = figures.map(|name| figure(&done.stdout, name));
                assert_eq!(figures, [count as u64, 0, 0, 0]);
            }
        }
        assert!(!is_observed(target.pid()));
    }
}

#[test]
fn slow_requests_by_key_end_the_recording() {
    let scratch = Scratch::new();
    let file = scratch.file("slow.json");
    let mut target = Talker::start(&program("requests"));
    let flags = "-pair start,stop -key number -over 1s -last 60s";
    let flags: Vec<&str> = flags.split(' ').collect();
    let tool = recording(target.pid(), &flags, &file);
    target.ask("start 1000 3", "start");
    // Meanwhile others of the same thread are short.
    target.ask("flight 1 100", "flight");
    std::thread::sleep(Duration::from_millis(1100));
    target.ask("stop", "stop");
    let done = tool.until_end();
    let said = done.stderr.lines();
    let mut took = said.filter_map(|line| line.split_once("start,stop took "));
    assert!(took.any(|(_, time)| time.ends_with(" s")), "{done:?}");
    let timeline = read(&file);
    let found = slices(&timeline, "start,stop");
    let long = found
        .iter()
        .filter(|it| span(it).1 - span(it).0 >= 1_000_000_000);
    let long: Vec<i64> = long
        .map(|it| it["args"]["number"].as_i64().unwrap())
        .collect();
    assert_eq!(long, [1000, 1001, 1002]);
}

// promise: Time lines: Starts with the key of another, and ends of pairs without a key, are said in the file, in each format of the summary
//    and in a warning (3 formats)
#[test]
fn doubtful_keys_of_pairs_are_reported() {
    let scratch = Scratch::new();
    let file = scratch.file("keys.json");
    let mut target = Talker::start(&program("requests"));
    for (key, warning, plain, figures) in [
        (
            "tid",
            "either several events under way have one key",
            "pair start,stop doubtful 4\n",
            [("without_stop", 4), ("without_key", 0)],
        ),
        (
            "str(number)",
            "210 ends of pairs have no key: no slice is drawn for them",
            "without_key 210 ",
            [("without_stop", 0), ("without_key", 210)],
        ),
    ] {
        for format in ["plain", "table", "json"] {
            let flags = ["-pair", "start,stop", "-key", key, "-format", format];
            let tool = recording(target.pid(), &flags, &file);
            target.ask("flight 5 100", "flight");
            let done = tool.end();
            assert!(done.stderr.contains(warning), "{done:?}");
            match format {
                "plain" => assert!(done.stdout.contains(plain), "{done:?}"),
                "table" => {
                    let row = plain.split(' ').nth(usize::from(key == "tid")).unwrap();
                    assert!(done.stdout.contains(&row.replace('_', " ")), "{done:?}");
                }
                _ => {
                    let report = object(&done.stdout);
                    for (name, figure) in figures {
                        assert_eq!(report[name], figure, "{report}");
                    }
                    assert_eq!(report["pairs"][0]["by_key"], true);
                }
            }
            let timeline = read(&file);
            let instants = timeline["instants"].as_array().unwrap().iter();
            let mut said = instants.filter_map(|it| it["args"]["pair"].as_str());
            assert!(said.any(|it| it.contains(warning)), "{timeline}");
            let ended = slices(&timeline, "start,stop");
            let ended = ended
                .iter()
                .filter(|it| it["args"]["ended"] == "without a stop: the next start has its key");
            assert_eq!(ended.count() as u64, figures[0].1);
        }
    }
}

#[test]
fn too_many_keys_are_reported() {
    let scratch = Scratch::new();
    let file = scratch.file("many.perfetto-trace");
    let mut target = Talker::start(&program("requests"));
    let flags = ["-pair", "start,stop", "-key", "number", "-json"];
    let mut record = |pause: Duration| {
        let tool = recording(target.pid(), &flags, &file);
        for batch in 0..160 {
            target.ask(&format!("start {} 500", 500 * batch), "start");
            // The ring has room for 4,096.
            std::thread::sleep(pause);
        }
        let done = tool.end();
        let report = object(&done.stdout);
        let drawn = report["slices"].as_u64().unwrap();
        let lost_hits = report["lost_hits"].as_u64().unwrap();
        assert_eq!(drawn + lost_hits, 80_000, "{done:?}");
        (done, report, drawn)
    };
    // A busy machine loses hits, unless they come more slowly.
    let pauses = [10, 40, 160].map(Duration::from_millis).into_iter();
    let enough = pauses
        .map(&mut record)
        .find(|(_, _, drawn)| *drawn > 65_536);
    let (done, report, drawn) = enough.expect("more starts than there is room for");
    let number = |name: &str| report[name].as_u64().unwrap();
    let lost = number("lost_starts");
    assert_eq!(lost, drawn - 65_536);
    assert_eq!(number("without_stop"), drawn);
    let warning = format!("{lost} starts were forgotten");
    assert!(done.stderr.contains(&warning), "{done:?}");
    let timeline = read(&file);
    let found = slices(&timeline, "start,stop");
    let early = found
        .iter()
        .filter(|it| it["args"]["ended"] == "too many starts wait: lasted longer");
    assert_eq!(early.count() as u64, lost);
    let instants = timeline["instants"].as_array().unwrap().iter();
    let mut said = instants.filter_map(|it| it["args"]["pair"].as_str());
    assert!(said.any(|it| it.starts_with(&warning)), "{done:?}");
}

#[test]
fn keys_that_are_not_recorded_are_refused() {
    let scratch = Scratch::new();
    let file = scratch.file("old.json");
    fs::write(&file, "old").unwrap();
    let target = Talker::start(&program("requests"));
    for (code, flags, why) in [
        (
            2,
            &["-probe", "start", "-key", "number"][..],
            "-key needs -pair START,STOP: it says which STOP belongs to which START",
        ),
        (
            1,
            &["-pair", "start,stop", "-key", "len(text)"],
            "this is not recorded of each hit: of the first 6 arguments, ints, strings and ints in fields are, and tid; nothing was changed",
        ),
        (
            1,
            &["-pair", "start,stop", "-key", "number,str(text.0)"],
            "this is not recorded of each hit",
        ),
        (
            1,
            &["-pair", "start,stop", "-key", "arg2"],
            "probe stop has no arg2: it has arg0 and arg1; nothing was changed",
        ),
    ] {
        let refused = run_command(&mut record_command(target.pid(), flags, &file));
        assert_eq!(refused.code, Some(code), "{refused:?}");
        assert!(refused.stderr.contains(why), "{refused:?}");
    }
    assert_eq!(fs::read_to_string(&file).unwrap(), "old");
    assert!(!is_observed(target.pid()));
}
