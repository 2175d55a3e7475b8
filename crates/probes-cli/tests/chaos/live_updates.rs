//! Code that is changed while threads execute it: they execute only whole
//! instructions.

use std::path::{Path, PathBuf};

use probes_lib::{Action, Options, Target};
use test_support::{fixture_forms, program_forms};

use crate::case::Case;
use crate::subject::{Subject, all, patient_options};

/// How often the probes of each program are switched in a round; the short form (without
/// CHAOS_SECONDS) is one round.
const UPDATES: usize = 1000;

fn update_repeatedly(case: &mut Case, file: &Path) {
    let mut subject = Subject::start(file, ["2"]);
    let target = Target::open(subject.pid()).unwrap();
    let options = Options {
        live: true,
        ..patient_options()
    };
    let actions = [Action::Enable, Action::Disable];
    for action in actions.into_iter().cycle().take(UPDATES) {
        let report = target.update_with(&all(action), options).unwrap();
        assert!(report.stopped.is_zero());
        let opcodes: usize = report.changed.iter().map(|change| change.sites).sum();
        case.add("opcodes changed under running threads", opcodes as u64);
    }
    // Nothing else in the code has changed.
    assert_eq!(subject.states_in_memory().len(), 2);
    subject.assert_released();
    // Every thread still executes its sites, of which `threads_spin` has four.
    let sites = if file.to_string_lossy().contains("threads_spin") {
        subject.wait_for_round();
        4 * subject.rounds().iter().sum::<u64>()
    } else {
        0
    };
    case.add("sites executed meanwhile, by two threads", sites);
    subject.end();
}

// promise: Live updates: Threads execute only whole instructions (12,000 opcodes changed, during
//    some hundred million executions)
#[test]
fn threads_run_on_while_their_code_is_changed() {
    let mut case = Case::begin("switched without a stop", 6);
    let mut files: Vec<PathBuf> = fixture_forms("threads_spin").into();
    files.extend(program_forms("threads"));
    let mut rounds = 0;
    while case.has_another_round(rounds, 1) {
        for file in &files {
            update_repeatedly(&mut case, file);
        }
        rounds += 1;
    }
}
