//! Plans patches of arbitrary bytes that are taken for code. The tests of the library check the corpus in the same way.

#![no_main]

use libfuzzer_sys::fuzz_target;
use probes_lib::{Code, CodeRange, FileAddr, LoadBias, PatchPlanner};

include!("code_input.rs");

fuzz_target!(|bytes: &[u8]| {
    let Some((code, ranges)) = code_input(bytes) else {
        return;
    };
    let planner = PatchPlanner::new(code, &ranges, &ranges[ranges.len() / 2..], []);
    for function in &ranges {
        let plan = planner.function(*function);
        let exits = plan.exits.iter().flat_map(|it| it.sites.iter().chain([&it.entry]));
        for site in plan.entry.iter().flatten().chain(exits) {
            assert!(!site.displaced().is_empty());
            let to = site.trampolines(LoadBias::NONE).start;
            if site.writes(LoadBias::NONE, to).is_some() {
                let _ = site.copy_at(LoadBias::NONE, to);
            }
        }
        for reason in plan.entry.err().iter().chain(plan.exits.err().iter()) {
            // Writing the message must not panic.
            drop(reason.to_string());
        }
    }
});
