//! `watch` of several processes: their hits in one stream.

use serde_json::Value;
use test_support::Talker;

use crate::count_functions::start_observing_several;
use crate::count_several::{other_pid_flags, run_all, targets};
use crate::support::{is_observed, object, run};

// promise: Observations: The hits of several processes are shown in one stream, every one, each with its process (3 processes)
#[test]
fn hits_of_several_say_their_process() {
    let mut targets = targets("calls");
    let pids: Vec<i32> = targets.iter().map(Talker::pid).collect();
    let flags = format!("-fn Calls.leaf -json{}", other_pid_flags(&targets));
    let tool = start_observing_several("watch", &flags, pids[0], 3);
    run_all(&mut targets);
    let answer = tool.end();
    let lines: Vec<Value> = answer.stdout.lines().map(object).collect();
    assert!(lines.iter().all(|it| it["type"] == "hit"), "{answer:?}");
    for (pid, hits) in pids.iter().zip([300, 600, 900]) {
        let of = lines.iter().filter(|line| line["pid"] == *pid);
        assert_eq!(of.count(), hits, "{pid}: {}", answer.stderr);
    }
    assert!(!pids.iter().any(|pid| is_observed(*pid)));
}

#[test]
fn columns_of_several_have_the_pid() {
    let mut targets = targets("calls");
    let pids: Vec<i32> = targets.iter().map(Talker::pid).collect();
    for (flags, place) in [("", 1), (" -fields name,pid", 1), (" -fields pid", 0)] {
        let flags = format!(
            "-fn Calls.leaf -limit 3{flags}{}",
            other_pid_flags(&targets)
        );
        let tool = start_observing_several("watch", &flags, pids[0], 3);
        targets[1].ask("run 1 100", "calls");
        let answer = tool.until_end().answer();
        let words = answer.lines().map(|line| line.split(' ').nth(place));
        let words: Vec<_> = words.map(Option::unwrap).collect();
        let pid = pids[1].to_string();
        assert_eq!(words, [&*pid; 3], "{answer}");
    }
    // The pid of a single process is shown if it is asked for.
    let tool = start_observing_several("watch", "-fn Calls.leaf -limit 1 -fields pid", pids[2], 1);
    targets[2].ask("run 1 100", "calls");
    assert_eq!(tool.until_end().answer(), format!("{}\n", pids[2]));
}

// promise: Observations: A process that exits while several are watched keeps its hits, and the others are still
//    watched (3 processes)
#[test]
fn others_are_watched_when_one_exits() {
    let mut targets = targets("calls");
    let pids: Vec<i32> = targets.iter().map(Talker::pid).collect();
    let flags = format!("-fn Calls.leaf -fields pid{}", other_pid_flags(&targets));
    let mut tool = start_observing_several("watch", &flags, pids[0], 3);
    targets[0].ask("run 1 1", "calls");
    assert_eq!(tool.line(), Some(pids[0].to_string()));
    drop(targets.remove(0));
    targets[1].ask("run 1 1", "calls");
    // A round calls it once or twice.
    while tool.line() != Some(pids[2].to_string()) {}
    let ended = tool.end();
    assert!(
        ended.stderr.contains(&format!("process {} ", pids[0])),
        "{ended:?}"
    );
    assert_eq!(ended.code, Some(0), "{ended:?}");
    // Nothing is watched if none can be.
    let refused = run(&format!(
        "watch -pid {} -fn Calls.leaf -name no_such_program",
        pids[0]
    ));
    assert_eq!(refused.code, Some(1), "{refused:?}");
}
