//! Processes that may not read the time stamp counter: their hits can be counted, but not timed.

use probes_lib::{Effect, ErrorKind, Observation, ObserveError, Selector, Target, TscDenial};
use test_support::process::{Image, threads};
use test_support::{Talker, fixture_forms};

use crate::observe::{anonymous_code, options};

/// Observations that need times.
fn timed() -> [Observation; 2] {
    [
        Observation::new().time("ping", "pong"),
        Observation::new().watch(Selector::All),
    ]
}

// promise: Observations: A process of which a thread may not read the time stamp counter
//    (prctl(PR_SET_TSC), strict seccomp) is counted, not timed: the error names the thread
#[test]
fn process_with_tsc_denied_is_not_timed() {
    for (mode, denial) in [
        ("main", TscDenial::Prctl),
        ("worker", TscDenial::Prctl),
        ("strict", TscDenial::StrictSeccomp),
    ] {
        for file in fixture_forms("no_tsc") {
            let mut talker = Talker::start_with(&file, [mode]);
            let pid = talker.pid();
            let target = Target::open(pid).unwrap();
            let before = Image::of(pid).text();
            let denied = match mode {
                "main" => pid,
                _ => threads(pid).into_iter().find(|&tid| tid != pid).unwrap(),
            };
            for observation in timed() {
                let Err(error) = target.observe(&observation, options()) else {
                    panic!("{mode}: it is timed");
                };
                let ErrorKind::Observe(ObserveError::TscDenied { tid, denial: found }) =
                    error.kind()
                else {
                    panic!("{mode}: {error}");
                };
                assert_eq!((*tid, *found), (denied, denial));
                assert_eq!(error.effect(), Effect::NothingChanged);
                before.assert_same(&Image::of(pid).text(), "the program");
                assert_eq!(anonymous_code(pid), [""; 0]);
            }
            let counted = Observation::new().count(Selector::All);
            let mut observer = target.observe(&counted, options()).unwrap();
            talker.hits();
            assert!(observer.remove().unwrap().counts.total() > 0);
        }
    }
}

#[test]
fn tsc_access_is_checked_for_each_observation() {
    for file in fixture_forms("no_tsc") {
        let mut talker = Talker::start_with(&file, ["later"]);
        let target = Target::open(talker.pid()).unwrap();
        for observation in timed() {
            let mut observer = target.observe(&observation, options()).unwrap();
            talker.hits();
            observer.remove().unwrap();
        }
        talker.ask("forbid", "forbidden");
        assert!(
            timed()
                .iter()
                .all(|one| target.observe(one, options()).is_err())
        );
        talker.hits();
    }
}
