//! `count` of several processes: one answer.

use std::collections::BTreeMap;
use std::thread::sleep;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use test_support::{Talker, program_forms};

use crate::count_functions::start_observing_several;
use crate::support::{is_observed, object, run};

/// `-pid` flags for all these processes but the first.
pub(crate) fn other_pid_flags(targets: &[Talker]) -> String {
    let others = targets[1..].iter();
    others.map(|it| format!(" -pid {}", it.pid())).collect()
}

pub(crate) fn targets(name: &str) -> Vec<Talker> {
    let files = program_forms(name).into_iter().chain(program_forms(name));
    files.take(3).map(|file| Talker::start(&file)).collect()
}

/// The hits by key; a key is its parts as JSON, separated by spaces.
fn hits(json: &Value) -> BTreeMap<String, u64> {
    let keys = json["keys"].as_array().unwrap().iter();
    let one = |it: &Value| {
        let parts = it["key"].as_array().unwrap().iter();
        let parts = parts.map(|part| {
            part.as_object()
                .unwrap()
                .values()
                .next()
                .unwrap()
                .to_string()
        });
        (
            parts.collect::<Vec<_>>().join(" "),
            it["hits"].as_u64().unwrap(),
        )
    };
    keys.map(one).collect()
}

pub(crate) fn run_all(targets: &mut [Talker]) {
    for (rounds, target) in (1..).zip(targets) {
        target.ask(&format!("run 2 {}", 100 * rounds), "calls");
    }
}

/// Checks that rates are over the time for which each process was observed: the first one is observed for longest.
fn check_rates(json: &Value, pids: &[i32]) {
    let seconds = |pid: i32| {
        let mut keys = json["keys"].as_array().unwrap().iter();
        let counted = keys.find(|it| it["key"][0]["process"] == pid).unwrap();
        counted["hits"].as_f64().unwrap() / counted["rate"].as_f64().unwrap()
    };
    let [first, second, third] = [0, 1, 2].map(|index| seconds(pids[index]));
    assert!(first > second && second > third, "{json}");
    assert!(third >= json["seconds"].as_f64().unwrap() - 1e-6, "{json}");
}

// promise: Functions: Calls of several processes are counted in one answer, to the last one, together and by process (3 processes, 4
//    ways)
#[test]
fn calls_of_several_processes_add_up() {
    let mut targets = targets("calls");
    let pids: Vec<i32> = targets.iter().map(Talker::pid).collect();
    // 100, 200 and 300 rounds of 2 threads; a round calls `leaf` once or twice, and `raises` once.
    let (leaves, raises) = ([300, 600, 900], [200, 400, 600]);
    let of = |by_pid: [u64; 3], name: &str| -> Vec<(String, u64)> {
        let each = pids.iter().zip(by_pid);
        each.map(|(pid, hits)| (format!("{pid} {name}"), hits))
            .collect()
    };
    let names = ["\"Calls.leaf\"", "\"Calls.raises\""];
    // Of `leaf`, two thirds of the arguments are even, and half of those of `raises`.
    let expected: [BTreeMap<String, u64>; 4] = [
        [(names[0].to_owned(), 1800), (names[1].to_owned(), 1200)].into(),
        of(leaves, names[0])
            .into_iter()
            .chain(of(raises, names[1]))
            .collect(),
        of([300, 600, 900], "0")
            .into_iter()
            .chain(of([200, 400, 600], "1"))
            .collect(),
        [("0".to_owned(), 1800), ("1".to_owned(), 1200)].into(),
    ];
    let ways = ["", "-by pid ", "-by pid,arg0&1 ", "-by arg0&1 "];
    for (way, expected) in ways.into_iter().zip(expected) {
        let flags = format!(
            "{way}-json -fn Calls.leaf,Calls.raises{}",
            other_pid_flags(&targets)
        );
        let tool = start_observing_several("count", &flags, pids[0], 3);
        run_all(&mut targets);
        let json = object(&tool.end().answer());
        assert_eq!(hits(&json), expected, "{flags}");
        let processes = json["processes"].as_array().unwrap();
        assert_eq!((&json["pid"], processes.len()), (&Value::Null, 3));
        if way == "-by pid " {
            check_rates(&json, &pids);
        }
        assert!(!pids.iter().any(|pid| is_observed(*pid)));
    }
}

#[test]
fn no_hits_of_several_are_an_answer() {
    let targets = targets("calls");
    let pids = format!("-pid {}{}", targets[0].pid(), other_pid_flags(&targets));
    let rows = |way: &str, format: &str| {
        let line = format!("count {pids} -fn Calls.leaf{way} -for 10ms -format {format}");
        let answer = run(&line).answer();
        let words = |line: &str| {
            line.replace('|', " ")
                .split_whitespace()
                .collect::<Vec<_>>()
                .join(" ")
        };
        answer.lines().map(words).collect::<Vec<String>>()
    };
    let mut pids: Vec<i32> = targets.iter().map(Talker::pid).collect();
    pids.sort_unstable();
    let by_pid: Vec<String> = pids.iter().map(|pid| format!("{pid} Calls.leaf")).collect();
    let of = |keys: &[&str]| keys.iter().map(ToString::to_string).collect::<Vec<_>>();
    for (way, keys) in [
        (" -by pid", by_pid),
        (" -by pid -top 2", of(&["of 3 keys"])),
        (" -by pid,arg0", of(&["other", "untyped"])),
        ("", of(&["Calls.leaf"])),
    ] {
        let plain: Vec<String> = keys.iter().map(|key| format!("0 0.0 {key}")).collect();
        assert_eq!(rows(way, "plain"), plain, "{way}");
        let table = rows(way, "table");
        let cells: Vec<String> = keys.iter().map(|key| format!("{key} 0 0")).collect();
        assert_eq!(table[2..], cells, "{way}: {table:?}");
        let json = object(&rows(way, "json")[0]);
        assert_eq!(
            (&json["keys"], &json["other"], &json["untyped"]),
            (&json!([]), &json!(0), &json!(0))
        );
    }
}

#[test]
fn exited_and_missing_processes_keep_others_counted() {
    let mut targets = targets("calls");
    let pids: Vec<i32> = targets.iter().map(Talker::pid).collect();
    let flags = format!(
        "-by pid -json -fn Calls.raises{} -pid 4194305",
        other_pid_flags(&targets)
    );
    let tool = start_observing_several("count", &flags, pids[0], 3);
    run_all(&mut targets);
    // The last reading before its exit may have seen none, some or all of its hits.
    let mut gone = targets.remove(1);
    gone.close_input();
    assert!(gone.guard().wait().success());
    let exited = Instant::now();
    targets[1].ask("run 1 50", "calls");
    // The age of its last reading does not grow with what the others are observed for.
    sleep(Duration::from_secs(5));
    let observed = exited.elapsed();
    let run = tool.end();
    assert_eq!(run.code, Some(1), "{run:?}");
    match run.stderr.split_once("the last reading is ") {
        Some((_, age)) => {
            let age: u64 = age.split(' ').next().unwrap().parse().unwrap();
            assert!(u128::from(age) < observed.as_millis(), "{run:?}");
        }
        None => assert!(run.stderr.contains("it was not read before"), "{run:?}"),
    }
    assert!(run.stderr.contains("the others were observed"), "{run:?}");
    let json: Value = run.stdout.lines().last().unwrap().parse().unwrap();
    let found = hits(&json);
    let of = |pid: i32| {
        found
            .get(&format!("{pid} \"Calls.raises\""))
            .copied()
            .unwrap_or(0)
    };
    assert_eq!([of(pids[0]), of(pids[2])], [200, 650]);
    assert!(of(pids[1]) <= 400, "{found:?}");
    assert!(![pids[0], pids[2]].iter().any(|pid| is_observed(*pid)));
}

#[test]
fn flags_for_one_process_are_refused() {
    let targets = targets("calls");
    let pids = format!("-pid {}{}", targets[0].pid(), other_pid_flags(&targets));
    for (flags, why) in [
        ("-sites", "-sites is for one process"),
        ("-fn Calls.leaf -by caller", "-by caller is for one process"),
    ] {
        let refused = run(&format!("count {pids} {flags}"));
        assert!(refused.stderr.contains(why), "{refused:?}");
        assert_eq!(refused.code, Some(2));
    }
    assert!(!targets.iter().any(|it| is_observed(it.pid())));
}

// promise: Death of the tool: A tool that is killed while it counts several processes leaves them running; the next one counts all
//    (3 processes)
#[test]
fn next_count_replaces_orphaned_observations() {
    let mut targets = targets("calls");
    let flags = format!("-json -fn Calls.raises{}", other_pid_flags(&targets));
    let pid = targets[0].pid();
    start_observing_several("count", &flags, pid, 3).kill();
    run_all(&mut targets);
    let tool = start_observing_several("count", &flags, pid, 3);
    run_all(&mut targets);
    let json = object(&tool.end().answer());
    assert_eq!(hits(&json)["\"Calls.raises\""], 1200);
    assert!(!targets.iter().any(|it| is_observed(it.pid())));
}
