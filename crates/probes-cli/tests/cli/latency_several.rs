//! `latency -pair` of several processes: one answer.

use serde_json::Value;
use test_support::Talker;

use crate::count_functions::start_observing_several;
use crate::count_several::{other_pid_flags, run_all, targets};
use crate::support::{is_observed, object, run};

// promise: Observations: Pairs of several processes are timed in one answer, every one, together and by process (3 processes, 3 ways)
#[test]
fn pairs_of_several_processes_add_up() {
    let mut targets = targets("requests");
    let pids: Vec<i32> = targets.iter().map(Talker::pid).collect();
    let mut measure = |flags: &str| {
        let flags = format!(
            "-pair start,stop -key number {flags}{}",
            other_pid_flags(&targets)
        );
        let tool = start_observing_several("latency", &flags, pids[0], 3);
        for (many, target) in [95, 195, 295].into_iter().zip(&mut targets) {
            target.ask(&format!("flight 5 {many}"), "flight");
        }
        tool.end().answer()
    };
    let figures = |json: &Value| -> Vec<(Option<i64>, u64)> {
        let pairs = json["pairs"].as_array().unwrap().iter();
        let figures = pairs.map(|pair| {
            assert_eq!((&pair["trusted"], &pair["lost"]), (&true.into(), &0.into()));
            (pair["pid"].as_i64(), pair["count"].as_u64().unwrap())
        });
        figures.collect()
    };
    let together = object(&measure("-json"));
    assert_eq!(figures(&together), [(None, 600)]);
    assert_eq!(together["processes"].as_array().unwrap().len(), 3);
    let by_pid = object(&measure("-by pid -json"));
    let each = pids.iter().map(|pid| Some(i64::from(*pid)));
    let each: Vec<_> = each.zip([100, 200, 300]).collect();
    assert_eq!(figures(&by_pid), each);
    let plain = measure("-by pid");
    for (line, (pid, count)) in plain.lines().zip(&each) {
        assert!(line.starts_with(&format!("{count} ")), "{plain}");
        let end = format!(" 0 0 0 {} start,stop", pid.unwrap());
        assert!(line.ends_with(&end), "{plain}");
    }
    assert!(!pids.iter().any(|pid| is_observed(*pid)));
}

#[test]
fn interleaving_in_one_of_several_is_reported() {
    let mut targets = targets("requests");
    let pids: Vec<i32> = targets.iter().map(Talker::pid).collect();
    let flags = format!(
        "-pair start,stop -by pid -json{}",
        other_pid_flags(&targets)
    );
    let tool = start_observing_several("latency", &flags, pids[0], 3);
    targets[1].ask("flight 5 100", "flight");
    targets[2].ask("flight 1 100", "flight");
    let run_ended = tool.end();
    let json = run_ended.stdout.lines().last().map(object).unwrap();
    let trusted = |index: usize| json["pairs"][index]["trusted"].clone();
    assert_eq!([trusted(0), trusted(1), trusted(2)], [true, false, true]);
    assert!(
        run_ended
            .stderr
            .contains(&format!("{} start,stop: no time", pids[1])),
        "{run_ended:?}"
    );
    let flags = format!("{}{}", pids[0], other_pid_flags(&targets));
    let refused = run(&format!(
        "latency -pid {flags} -fn Requests.start -by caller"
    ));
    assert!(
        refused.stderr.contains("-by caller is for one process"),
        "{refused:?}"
    );
    assert_eq!(refused.code, Some(2));
}

// promise: Functions: Calls of several processes are timed in one answer, every one, together and by process, and so are self times (3
//    processes, 3 ways)
#[test]
fn timed_calls_of_several_processes_add_up() {
    let mut targets = targets("calls");
    let pids: Vec<i32> = targets.iter().map(Talker::pid).collect();
    // Of 100, 200 and 300 rounds of 2 threads: a round calls `leaf` once or twice, and `raises` once, whose calls are
    // unwound half the time.
    let (leaves, raises) = ([300, 600, 900], [200, 400, 600]);
    let mut measure = |flags: &str| {
        let flags = format!(
            "-fn Calls.leaf,Calls.raises {flags}{}",
            other_pid_flags(&targets)
        );
        let tool = start_observing_several("latency", &flags, pids[0], 3);
        run_all(&mut targets);
        tool.end()
    };
    let figures = |json: &Value| -> Vec<(Option<i64>, String, u64)> {
        let functions = json["functions"].as_array().unwrap().iter();
        let mut figures: Vec<_> = functions
            .map(|it| {
                let number = |field: &str| it[field].as_u64().unwrap();
                // Lost calls and unmatched exits would be a defect. A call that was unwound last is noticed only when
                // its stack is used again.
                assert_eq!((number("lost"), number("unmatched_exits")), (0, 0), "{it}");
                assert_eq!(it["address"].is_null(), it["pid"].is_null(), "{it}");
                let calls = number("count") + number("unwound") + number("running");
                (
                    it["pid"].as_i64(),
                    it["name"].as_str().unwrap().to_owned(),
                    calls,
                )
            })
            .collect();
        figures.sort();
        figures
    };
    let (leaf, raising) = ("Calls.leaf".to_owned(), "Calls.raises".to_owned());
    let together = [(None, leaf.clone(), 1800), (None, raising.clone(), 1200)];
    for way in ["-json", "-json -self"] {
        let json = object(&measure(way).answer());
        assert_eq!(figures(&json), together, "{way}");
        assert_eq!(json["processes"].as_array().unwrap().len(), 3);
    }
    let mut expected: Vec<_> = pids
        .iter()
        .zip(leaves.into_iter().zip(raises))
        .flat_map(|(&pid, (leaves, raises))| {
            let pid = Some(i64::from(pid));
            [(pid, leaf.clone(), leaves), (pid, raising.clone(), raises)]
        })
        .collect();
    expected.sort();
    assert_eq!(
        figures(&object(&measure("-by pid -json").answer())),
        expected
    );
    let measured = measure("-by pid");
    // The name is that of three processes.
    let note = "calls of Calls.raises can end with a jump";
    assert!(measured.stderr.contains(note), "{measured:?}");
    let plain = measured.answer();
    for pid in &pids {
        assert!(plain.contains(&format!(" {pid} Calls.leaf\n")), "{plain}");
    }
    assert!(!pids.iter().any(|pid| is_observed(*pid)));
}

// promise: Observations: Slow pairs and calls of several processes are shown one by one, each with its process (3 processes, 2 ways)
#[test]
fn slow_pairs_of_several_say_their_process() {
    let mut targets = targets("requests");
    let pids: Vec<i32> = targets.iter().map(Talker::pid).collect();
    for (what, kind) in [
        ("-pair start,stop -key number", "slow_pair"),
        ("-fn Requests.flight", "slow_call"),
    ] {
        let flags = format!("{what} -over 0 -json{}", other_pid_flags(&targets));
        let tool = start_observing_several("latency", &flags, pids[0], 3);
        for (many, target) in [5, 15, 25].into_iter().zip(&mut targets) {
            target.ask(&format!("flight 5 {many}"), "flight");
        }
        let answer = tool.end();
        let lines: Vec<Value> = answer.stdout.lines().map(object).collect();
        let (last, slow) = lines.split_last().unwrap();
        let of = |pid: i32| slow.iter().filter(|it| it["pid"] == pid).count() as u64;
        assert!(slow.iter().all(|it| it["type"] == kind), "{answer:?}");
        let shown: u64 = pids.iter().map(|pid| of(*pid)).sum();
        assert_eq!(shown, slow.len() as u64);
        let counted = match kind {
            "slow_pair" => &last["pairs"][0]["count"],
            _ => &last["functions"][0]["count"],
        };
        assert_eq!(counted.as_u64(), Some(shown), "{answer:?}");
        assert!(pids.iter().all(|pid| of(*pid) > 0), "{answer:?}");
    }
    let flags = format!(
        "-pair start,stop -key number -over 0{}",
        other_pid_flags(&targets)
    );
    let tool = start_observing_several("latency", &flags, pids[0], 3);
    targets[2].ask("flight 5 5", "flight");
    let plain = tool.end().answer();
    let slow = plain.lines().filter(|line| line.starts_with("slow "));
    let pid = pids[2].to_string();
    for line in slow {
        assert_eq!(line.split(' ').nth(2), Some(&*pid), "{line}");
    }
}
