//! `watch -sample` and `trace -watch -sample`: every Nth hit.

use serde_json::Value;
use test_support::{Talker, fixture_forms, program_forms};

use crate::count_functions::start_observing;
use crate::support::{Run, is_observed, object};
use crate::trace_observe::trace;

/// What the lines of hits and of what is missing say: how many hits have these names, and the sums of lost and
/// skipped ones.
fn reported<'l>(lines: impl Iterator<Item = &'l str>, names: &[&str]) -> (Vec<usize>, u64, u64) {
    let lines: Vec<Value> = lines.map(object).collect();
    let sum = |field: &str| lines.iter().filter_map(|line| line[field].as_u64()).sum();
    let of = |name: &&str| lines.iter().filter(|line| line["name"] == **name).count();
    (names.iter().map(of).collect(), sum("lost"), sum("skipped"))
}

/// How many hits notes say were skipped.
fn skipped(run: &Run) -> usize {
    let notes = run.stderr.lines().map(|line| {
        let line = line.replace(" hit was ", " hits were ");
        let number = line.strip_prefix("ocaml-probes: ").unwrap_or(&line);
        let number = number.strip_suffix(" hits were skipped");
        number
            .unwrap_or_else(|| panic!("{line}"))
            .parse::<usize>()
            .unwrap()
    });
    notes.sum()
}

// promise: Observations: With `-sample 1/N`, exactly every Nth hit of each site and function is shown, and the number of all others is
//    known (2 programs of OCaml, 1, 4 and 16 threads)
#[test]
fn every_nth_hit_of_ocaml_is_shown() {
    for file in program_forms("shown") {
        let mut target = Talker::start(&file);
        let pid = target.pid();
        for (threads, every) in [(1, 7), (4, 7), (16, 12), (1, 1), (1, 1000)] {
            let names = ["ints", "numbered", "Shown.takes_ints", "Shown.takes_texts"];
            let flags = "-json -probe ints,numbered -fn Shown.takes_ints,Shown.takes_texts";
            let flags = format!("{flags} -sample 1/{every}");
            let tool = start_observing("watch", &flags, pid);
            target.ask(&format!("threads {threads} 25"), "done");
            target.ask(&format!("pass {threads} 25"), "done");
            let run = tool.end();
            // All lines fit into a pipe.
            let hits = 25 * threads;
            let shown = hits / every;
            let left = 4 * (hits - shown) as u64;
            assert_eq!((run.code, &*run.stderr), (Some(0), ""), "{threads}");
            assert_eq!(
                reported(run.stdout.lines(), &names),
                (vec![shown; 4], 0, left)
            );
        }
        assert!(!is_observed(pid));
        target.ask("threads 4 10", "done");
    }
}

// promise: Functions: With `-sample 1/N`, exactly every Nth call of each C function is shown, and the number of all others is
//    known (2 programs, 1, 4 and 16 threads)
#[test]
fn every_nth_call_of_c_is_shown() {
    for file in fixture_forms("passing") {
        for threads in [1, 4, 16] {
            let mut target = Talker::start(&file);
            let pid = target.pid();
            let tool = start_observing("watch", "-fields args -fn numbers -sample 1/3", pid);
            target.ask(&format!("pass {threads} 50"), "passed");
            let run = tool.end();
            let (hits, shown) = (50 * threads, 50 * threads / 3);
            let expected = "0 -1 9223372036854775808 5 120 0";
            assert!(run.stdout.lines().all(|line| line == expected));
            assert_eq!(
                (run.stdout.lines().count(), skipped(&run)),
                (shown, hits - shown)
            );
            assert!(!is_observed(pid));
            target.ask(&format!("pass {threads} 50"), "passed");
        }
    }
}

#[test]
fn sample_leaves_counts_and_times_whole() {
    for file in fixture_forms("timed") {
        let flags = "-json -count -latency start,stop -watch start -sample 1/9";
        let run = trace(&file, flags, "pairs 4 100\nquit\n");
        let ours: Vec<String> = run.said().iter().map(Value::to_string).collect();
        let reported = reported(ours.iter().map(String::as_str), &["start"]);
        assert_eq!(reported, (vec![44], 0, 356));
        let of = |kind: &str| {
            run.said()
                .into_iter()
                .find(|it| it["type"] == kind)
                .unwrap()
        };
        assert_eq!(of("count")["probes"][0]["hits"], 400);
        assert_eq!(of("latency")["pairs"][0]["count"], 400);
    }
}
