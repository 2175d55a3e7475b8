//! Searching all processes of the machine for probes; many run the same files, and some exit
//! meanwhile.

use std::collections::BTreeMap;
use std::process::{Command, Stdio};

use nix::unistd::pipe;
use probes_lib::{Action, Selector, SurveyedProcess, survey};
use test_support::process::settle;
use test_support::{Guard, fixture_forms, program_forms};

use crate::session::{Session, all, named};

/// How many processes of each file.
const PROCESSES_PER_FILE: usize = 12;

/// The processes with these ids that the survey finds, by id.
fn found(pids: &[i32]) -> BTreeMap<i32, SurveyedProcess> {
    let all = survey().unwrap().processes.into_iter();
    let ours = all.filter(|one| pids.contains(&one.pid));
    ours.map(|one| (one.pid, one)).collect()
}

// promise: Objects that come and go: `ps` finds every process with probes once, while others exit
//    (48 processes of 4 files, half of which exit)
#[test]
fn all_processes_with_probes_are_found_once() {
    // The programs wait for a line of input, which never comes.
    let (input, write_end) = pipe().unwrap();
    let mut processes: Vec<Guard> = Vec::new();
    let files = [fixture_forms("gen_ocaml_2"), program_forms("init")].concat();
    for _ in 0..PROCESSES_PER_FILE {
        for file in &files {
            let mut command = Command::new(file);
            let input = Stdio::from(input.try_clone().unwrap());
            processes.push(Guard::spawn(command.stdin(input).stdout(Stdio::null())));
        }
    }
    let pids: Vec<i32> = processes.iter().map(Guard::pid).collect();
    // The kernel sets up a program after `spawn` has returned; until then, the process has no probes.
    pids.iter().copied().for_each(settle);
    let before = found(&pids);
    assert_eq!(before.keys().copied().collect::<Vec<_>>(), sorted(&pids));
    for (index, pid) in pids.iter().enumerate() {
        let file = &files[index % files.len()];
        assert_eq!(before[pid].program, file.canonicalize().unwrap());
    }

    // The processes with an even pid exit, one after the other: meanwhile each of them may be found
    // or not, but those that stay are always found.
    let (mut ending, staying): (Vec<_>, Vec<_>) =
        processes.into_iter().partition(|one| one.pid() % 2 == 0);
    let staying_pids: Vec<i32> = staying.iter().map(Guard::pid).collect();
    let killer = std::thread::spawn(move || {
        for one in &mut ending {
            one.child().kill().unwrap();
            one.wait();
        }
    });
    let mut rounds = 0;
    while !killer.is_finished() || rounds == 0 {
        let now = found(&pids);
        for pid in &staying_pids {
            let (now, before) = (&now[pid], &before[pid]);
            assert_eq!((&now.program, now.probes), (&before.program, before.probes));
        }
        rounds += 1;
    }
    killer.join().unwrap();
    let left = found(&pids).into_keys().collect::<Vec<_>>();
    assert_eq!(left, sorted(&staying_pids));
    drop(write_end);
}

fn sorted(pids: &[i32]) -> Vec<i32> {
    let mut pids = pids.to_vec();
    pids.sort_unstable();
    pids
}

#[test]
fn enabled_probes_are_counted_for_each_process_alone() {
    for file in fixture_forms("gen_ocaml_2") {
        let sessions = [(); 3].map(|()| Session::start(&file));
        sessions[1].apply(&named(Action::Enable, "plain")).unwrap();
        sessions[2].apply(&all(Action::Enable)).unwrap();
        let pids: Vec<i32> = sessions.iter().map(Session::pid).collect();
        let found = found(&pids);
        let on = |pid: &i32| (found[pid].probes, found[pid].enabled);
        let on: Vec<_> = pids.iter().map(on).collect();
        assert_eq!(on, [(3, 0), (3, 1), (3, 3)]);
        sessions[2].update(Action::Disable, Selector::All, |_| true);
    }
}
