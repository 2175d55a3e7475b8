//! `latency -pair` of several processes: one answer.

use serde_json::Value;
use test_support::Talker;

use crate::count_functions::observing_several;
use crate::count_several::{others, targets};
use crate::support::{is_observed, object, run};

// promise: Observations: Pairs of several processes are timed in one answer, every one, together and by process (3 processes, 3 ways)
#[test]
fn pairs_of_several_processes_add_up() {
    let mut targets = targets("requests");
    let pids: Vec<i32> = targets.iter().map(Talker::pid).collect();
    let mut measure = |flags: &str| {
        let flags = format!("-pair start,stop -key number {flags}{}", others(&targets));
        let tool = observing_several("latency", &flags, pids[0], 3);
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
fn interleaving_in_one_of_several_is_said() {
    let mut targets = targets("requests");
    let pids: Vec<i32> = targets.iter().map(Talker::pid).collect();
    let flags = format!("-pair start,stop -by pid -json{}", others(&targets));
    let tool = observing_several("latency", &flags, pids[0], 3);
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
    for (flags, why) in [
        ("-fn Requests.start", "-fn and -gc are for one process"),
        ("-pair start,stop -over 1ms", "-over is for one process"),
    ] {
        let refused = run(&format!(
            "latency -pid {}{} {flags}",
            pids[0],
            others(&targets)
        ));
        assert!(refused.stderr.contains(why), "{refused:?}");
        assert_eq!(refused.code, Some(2));
    }
}
