//! Several threads and processes update one target at the same time: each update is done whole, or
//! refused because somebody else is at it.

use std::path::Path;
use std::process::Stdio;

use probes_lib::{Action, Denial, ErrorKind, State, Target};
use test_support::process::Image;
use test_support::{Guard, Talker, fixture_forms, program_forms};

use crate::alone::{again, role};
use crate::session::{Session, all, busy, named, patient};

const UPDATES: u16 = 50;

/// Enables `name` as often as is wanted, each time until nobody is in the way; says how often
/// somebody was.
fn enable_again_and_again(pid: i32, name: &str) -> usize {
    let target = Target::open(pid).unwrap();
    let mut in_the_way = 0;
    for _ in 0..UPDATES {
        while let Err(error) = target.update_with(&named(Action::Enable, name), patient()) {
            match error.kind() {
                ErrorKind::Denied {
                    denial: Denial::Traced { tracer, name },
                    ..
                } => {
                    // The test binary, whichever of its processes.
                    assert!(*tracer > 0 && !name.is_empty(), "{error}");
                    in_the_way += 1;
                }
                _ => panic!("{error}"),
            }
        }
    }
    in_the_way
}

#[test]
fn two_threads_and_two_processes_update_one_target_and_every_update_counts() {
    // The part of the other processes.
    if let Some((pid, name)) = role().as_deref().and_then(|role| role.split_once(' ')) {
        enable_again_and_again(pid.parse().unwrap(), name);
        return;
    }
    let _busy = busy();
    let this_test = || ();
    let crowd = |file: &Path, args: &[&str], name: &str| {
        let session = Session::of(Talker::start_with(file, args));
        let pid = session.pid();
        let text = Image::of(pid).text();
        let helper = |session: &Session| {
            let mut command = again(&this_test, &format!("{} {name}", session.pid()));
            Guard::spawn(command.stdout(Stdio::null()))
        };
        let mut helpers = [helper(&session), helper(&session)];
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| enable_again_and_again(pid, name));
            }
        });
        for helper in &mut helpers {
            assert!(helper.wait().success());
        }
        assert_eq!(session.states()[name], (4 * UPDATES, State::Enabled));
        for left in (0..4 * UPDATES).rev() {
            let report = session.apply(&named(Action::Disable, name)).unwrap();
            assert_eq!(report.changed[0].after, left);
        }
        Image::of(pid)
            .text()
            .assert_same(&text, "the text at the end");
        session.assert_all((0, State::Disabled));
        session.apply(&all(Action::Enable)).unwrap();
    };
    for file in fixture_forms("gen_ocaml_2") {
        crowd(&file, &[], "plain");
    }
    for file in fixture_forms("threads_spin") {
        crowd(&file, &["2"], "ping");
    }
    for file in program_forms("service") {
        crowd(&file, &["1"], "cache_miss");
    }
}
