//! `hist` of several processes: one answer.

use serde_json::{Value, json};
use test_support::{Scratch, Talker};

use crate::count_functions::start_observing_several;
use crate::count_several::{other_pid_flags, run_all, targets};
use crate::support::{command, is_observed, object, run_command};

/// The name, the pid, the count and the sum of each histogram.
fn figures(json: &Value) -> Vec<(&str, Option<i64>, u64, u64)> {
    let all = json["histograms"].as_array().unwrap().iter();
    let figures = all.map(|it| {
        let number = |field: &str| it[field].as_u64().unwrap();
        let buckets = it["buckets"].as_array().unwrap().iter();
        let counts = buckets.map(|it| it["count"].as_u64().unwrap());
        assert_eq!(counts.sum::<u64>(), number("count"));
        let name = it["name"].as_str().unwrap();
        (name, it["pid"].as_i64(), number("count"), number("sum"))
    });
    figures.collect()
}

/// The sum of the arguments of `raises`, which two threads call with each number of a round.
fn sum(rounds: u64) -> u64 {
    rounds * (rounds + 1)
}

// promise: Functions: Histograms of several processes have all their values, together and by process (3 processes, 2 ways)
#[test]
fn values_of_several_processes_add_up() {
    let mut targets = targets("calls");
    let pids: Vec<i32> = targets.iter().map(Talker::pid).collect();
    let others = other_pid_flags(&targets);
    let sums = [sum(100), sum(200), sum(300)];
    for way in ["", " -by pid"] {
        let flags = format!("-json -fn Calls.raises -of arg0{way}{others}");
        let tool = start_observing_several("hist", &flags, pids[0], 3);
        run_all(&mut targets);
        let json = object(&tool.end().answer());
        if way.is_empty() {
            let expected = [("Calls.raises", None, 1200, sums.iter().sum())];
            assert_eq!(figures(&json), expected);
            assert_eq!(
                (&json["histograms"][0]["min"], &json["histograms"][0]["max"]),
                (&json!(1), &json!(300))
            );
        } else {
            let of = |process: usize, count| {
                let pid = Some(pids[process].into());
                ("Calls.raises", pid, count, sums[process])
            };
            assert_eq!(figures(&json), [of(2, 600), of(1, 400), of(0, 200)]);
        }
        let processes = json["processes"].as_array().unwrap();
        assert_eq!((&json["pid"], processes.len()), (&Value::Null, 3));
        assert!(!pids.iter().any(|pid| is_observed(*pid)));
    }
}

#[test]
fn histograms_of_exited_processes_stay() {
    let mut targets = targets("calls");
    let pids: Vec<i32> = targets.iter().map(Talker::pid).collect();
    let flags = format!(
        "-by pid -fn Calls.raises -of arg0{}",
        other_pid_flags(&targets)
    );
    let tool = start_observing_several("hist", &flags, pids[0], 3);
    run_all(&mut targets);
    let mut gone = targets.remove(1);
    gone.close_input();
    assert!(gone.guard().wait().success());
    targets[1].ask("run 1 50", "calls");
    let answer = tool.end().answer();
    let line = |pid: i32| {
        answer
            .lines()
            .find(|it| it.ends_with(&format!(" {pid} Calls.raises")))
    };
    assert!(line(pids[0]).unwrap().starts_with("count 200 "), "{answer}");
    assert!(line(pids[2]).unwrap().starts_with("count 650 "), "{answer}");
    let scratch = Scratch::new();
    let picture = scratch.file("picture.svg");
    let line = format!(
        "hist -pid {} -pid {} -by pid -fn Calls.raises -of arg0 -for 50ms -svg",
        pids[0], pids[2]
    );
    let drawn = run_command(command([] as [&str; 0]).args(line.split(' ')).arg(&picture));
    assert_eq!(drawn.code, Some(0), "{drawn:?}");
    let drawn = std::fs::read_to_string(picture).unwrap();
    for pid in [pids[0], pids[2]] {
        assert!(
            drawn.contains(&format!("{pid} Calls.raises, arg0")),
            "{drawn}"
        );
    }
    assert!(![pids[0], pids[2]].iter().any(|pid| is_observed(*pid)));
}
