//! Programs that discard their own copies of patched pages: their sites are observed no more, and the results
//! say so.

use probes_lib::{Action, DiscardedPatches, Observation, Observer, Selector, Target};
use test_support::{Talker, eventually, fixture, fixture_forms};

use crate::observe::options;
use crate::session::all;
use crate::watch::launch_observed;

fn observe_counts(pid: i32) -> Observer {
    let observation = Observation::new().count(Selector::All);
    let target = Target::open(pid).unwrap();
    target.observe(&observation, options()).unwrap()
}

fn names(discarded: &DiscardedPatches) -> Vec<&str> {
    discarded.probes().collect()
}

fn wait_until_found(observer: &Observer) {
    eventually("the discarded patches are found", || {
        observer.check().unwrap();
        (observer.discarded().patches() == 2).then_some(())
    });
}

// promise: Observations: If the process discards patched pages, the results name the probes whose figures are
//    too low (2 × 2 ways)
#[test]
fn results_name_probes_with_discarded_patches() {
    for file in fixture_forms("discarding") {
        for how in ["discard", "map"] {
            let mut talker = Talker::start(&file);
            let mut observer = observe_counts(talker.pid());
            talker.hits();
            talker.ask(how, "discarded");
            talker.hits();
            let report = observer.remove().unwrap();
            let hits = |name| report.counts.hits(name).unwrap();
            assert_eq!((hits("guarded"), hits("free")), (2, 2));
            assert_eq!(report.discarded.patches(), 2);
            assert_eq!(names(&report.discarded), ["guarded"]);
            // A new observation patches the page again.
            let mut observer = observe_counts(talker.pid());
            talker.hits();
            let report = observer.remove().unwrap();
            assert_eq!(report.counts.hits("guarded"), Some(2));
            assert_eq!(names(&report.discarded), [""; 0]);
        }
    }
}

#[test]
fn discarded_patches_are_found_while_it_runs() {
    for file in fixture_forms("discarding") {
        let mut talker = Talker::start(&file);
        let mut observer = observe_counts(talker.pid());
        observer.counts().unwrap();
        assert_eq!(observer.discarded().patches(), 0);
        talker.ask("discard", "discarded");
        eventually("the discarded patches are found", || {
            observer.counts().unwrap();
            (observer.discarded().patches() == 2).then_some(())
        });
        // They stay known after the process has exited.
        drop(talker);
        assert!(observer.remove().unwrap_err().is_gone());
        assert_eq!(names(&observer.discarded()), ["guarded"]);
    }
}

#[test]
fn results_of_an_exited_program_name_discarded_patches() {
    for file in fixture_forms("discarding") {
        let observation = Observation::new().count(Selector::All);
        let (mut talker, mut observer) = launch_observed(&file, observation);
        talker.expect("ready");
        talker.hits();
        talker.ask("discard", "discarded");
        wait_until_found(&observer);
        talker.send("quit");
        talker.guard().wait();
        let report = observer.remove().unwrap();
        assert_eq!(report.counts.hits("guarded"), Some(2));
        assert_eq!(names(&report.discarded), ["guarded"]);
    }
}

#[test]
fn switched_or_unloaded_sites_are_not_discarded() {
    for file in fixture_forms("objects/host") {
        let mut talker = Talker::start(&file);
        let plugin = fixture("objects/plugin.so");
        talker.ask(&format!("load {}", plugin.display()), "loaded");
        let mut observer = observe_counts(talker.pid());
        let other = Target::open(talker.pid()).unwrap();
        other.update_with(&all(Action::Enable), options()).unwrap();
        talker.hits();
        observer.counts().unwrap();
        talker.ask("unload 0", "unloaded");
        other.update_with(&all(Action::Disable), options()).unwrap();
        let report = observer.remove().unwrap();
        assert_eq!(report.discarded.patches(), 0);
        talker.hits();
    }
}
