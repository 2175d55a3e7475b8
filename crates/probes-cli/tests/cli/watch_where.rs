//! `watch -where` and `trace -watch -where`: only the hits for which an expression is true.

use serde_json::Value;
use test_support::{Talker, fixture_forms, program_forms};

use crate::count_functions::start_observing;
use crate::support::{is_observed, object};
use crate::trace_observe::trace;

/// The sum of a number in all lines.
fn sum(lines: &[Value], field: &str) -> u64 {
    lines.iter().filter_map(|line| line[field].as_u64()).sum()
}

// promise: Observations: `watch -where` shows exactly the hits for which the expression is true, and counts those for which it is
//    neither true nor false (2 programs, 7 expressions, 1, 4 and 16 threads)
#[test]
fn expressions_choose_the_hits_shown() {
    for file in program_forms("shown") {
        let mut target = Talker::start(&file);
        let pid = target.pid();
        for threads in [1, 4, 16] {
            // All lines fit into a pipe.
            let hits = 4 * threads;
            for (flags, shown, untyped) in [
                ("-probe numbered -where number>2", 2 * threads, 0),
                ("-probe numbered -where thread==1&&number<=3", 3, 0),
                ("-probe strings,ints -where probe==\"ints\"", hits, 0),
                ("-probe strings -where arg1==\"hello\"", hits, 0),
                ("-probe numbered -where int(text)==1", 0, hits),
                ("-fn Shown.takes_ints -where arg0>2", 2 * threads, 0),
                (
                    "-fn Shown.takes_texts -where arg0^=\"hell\"&&arg1!=3",
                    3 * threads,
                    0,
                ),
            ] {
                let tool = start_observing("watch", &format!("-json {flags}"), pid);
                target.ask(&format!("threads {threads} 4"), "done");
                target.ask(&format!("pass {threads} 4"), "done");
                let run = tool.end();
                assert_eq!((run.code, &*run.stderr), (Some(0), ""), "{flags}");
                let lines: Vec<Value> = run.stdout.lines().map(object).collect();
                let are_shown = lines.iter().filter(|line| line["type"] == "hit").count();
                assert_eq!(are_shown, shown, "{flags}");
                assert_eq!(sum(&lines, "untyped"), untyped as u64, "{flags}");
                assert_eq!(sum(&lines, "lost") + sum(&lines, "skipped"), 0);
            }
        }
        assert!(!is_observed(pid));
        target.ask("threads 4 10", "done");
    }
}

// promise: Functions: `watch -where` shows exactly the calls of C functions for which the expression is true, also of functions
//    that use the x87 unit, and counts those for which it is neither true nor false (2 programs, 1 and 4 threads)
#[test]
fn expressions_choose_the_calls_of_c() {
    for file in fixture_forms("passing") {
        for threads in [1, 4] {
            let mut target = Talker::start(&file);
            let pid = target.pid();
            for (flags, words, shown) in [
                (
                    "numbers -where int(arg3)==5&&arg1<0",
                    "0 -1 9223372036854775808 5 120 0",
                    true,
                ),
                ("numbers -where int(arg3)!=5", "", false),
                ("scales -where arg0==4", "4", true),
                ("scales -where arg0!=4||arg0+arg0!=8", "", false),
                ("floats -where arg0*arg0==4", "2", true),
            ] {
                let tool = start_observing("watch", &format!("-fields args -fn {flags}"), pid);
                target.ask(&format!("pass {threads} 20"), "passed");
                let run = tool.end();
                assert_eq!(run.stderr, "", "{flags}");
                let lines: Vec<&str> = run.stdout.lines().collect();
                let expected = if shown { 20 * threads } else { 0 };
                assert_eq!(lines, vec![words; expected], "{flags}");
            }
            assert!(!is_observed(pid));
            target.ask(&format!("pass {threads} 20"), "passed");
        }
    }
}

#[test]
fn sample_is_taken_of_what_is_true() {
    for file in program_forms("shown") {
        let mut target = Talker::start(&file);
        let flags = "-json -probe numbered -fn Shown.takes_ints -where arg1>5||arg0>5 -sample 1/4";
        let tool = start_observing("watch", flags, target.pid());
        target.ask("threads 4 20", "done");
        target.ask("pass 4 20", "done");
        let lines: Vec<Value> = tool.end().stdout.lines().map(object).collect();
        let shown = lines.iter().filter(|line| line["type"] == "hit").count();
        assert_eq!((shown, sum(&lines, "skipped")), (30, 90));
        assert_eq!(sum(&lines, "untyped"), 0);
    }
}

#[test]
fn hits_left_out_take_no_room() {
    for file in fixture_forms("timed") {
        let mut target = Talker::start(&file);
        let flags = "-probe start,stop -where probe==\"other\"";
        let tool = start_observing("watch", flags, target.pid());
        target.ask("pairs 4 100000", "pairs");
        let run = tool.end();
        assert_eq!((&*run.stdout, &*run.stderr), ("", ""));
    }
}

#[test]
fn expression_is_of_counts_and_hits_alike() {
    for file in fixture_forms("timed") {
        let flags = "-json -count -latency start,stop -watch start,stop -where probe==\"start\"";
        let run = trace(&file, flags, "pairs 4 25\nquit\n");
        let said = run.said();
        let hits = said.iter().filter(|line| line["type"] == "hit");
        let names: Vec<&Value> = hits.map(|line| &line["name"]).collect();
        assert_eq!(names, vec!["start"; 100]);
        let of = |kind: &str| said.iter().find(|it| it["type"] == kind).unwrap();
        let counted = of("count")["probes"].as_array().unwrap();
        let hits: Vec<(&Value, &Value)> = counted
            .iter()
            .map(|it| (&it["name"], &it["hits"]))
            .collect();
        assert!(hits.contains(&(&"start".into(), &100.into())), "{hits:?}");
        assert!(hits.contains(&(&"stop".into(), &0.into())), "{hits:?}");
        assert_eq!(of("latency")["pairs"][0]["count"], 100);
    }
}

#[test]
fn histogram_and_hits_have_an_expression_each() {
    for file in program_forms("shown") {
        for (of, values, untyped) in [("number", 4, 0), ("len(number)", 0, 4)] {
            let flags = format!("-json -hist numbered -watch numbered -of {of} -where number>2");
            let said = trace(&file, &flags, "threads 2 4\n").said();
            let shown = said.iter().filter(|line| line["type"] == "hit").count();
            let histogram = said.iter().find(|it| it["type"] == "histogram").unwrap();
            let of = &histogram["histograms"][0];
            assert_eq!(
                (shown, &of["count"], &of["untyped"]),
                (4, &values.into(), &untyped.into())
            );
        }
    }
}
