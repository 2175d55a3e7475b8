//! Reads all that is known of the functions of a file whose tables have arbitrary bytes: where they are, their names and
//! source lines, and how they can be patched. The tests of the library check the corpus in the same way.

#![no_main]

mod memory_file;

use libfuzzer_sys::fuzz_target;
use probes_lib::{FunctionSelector, Functions, LoadBias};

include!("sections_input.rs");

fuzz_target!(|bytes: &[u8]| {
    let Some(file) = sections_input(bytes) else {
        return;
    };
    let functions = match Functions::of_file(memory_file::file_with(&file)) {
        Ok(functions) => functions,
        // Writing the message must not panic.
        Err(error) => return drop(error.to_string()),
    };
    let lines = FunctionSelector::Line {
        file: "a.c".into(),
        line: 3,
    };
    if let Err(error) = functions.select(&[lines]) {
        drop(error.to_string());
    }
    let object = &functions.objects()[0];
    let planner = object.patch_planner();
    let sources = object.source_map();
    for function in object.table().functions() {
        function.names().for_each(drop);
        function.first_call();
        if let Ok(sources) = &sources {
            sources.line(function.address());
        }
        let Ok(planner) = &planner else {
            continue;
        };
        let plan = planner.function(function.range());
        let exits = plan.exits.iter();
        let exits = exits.flat_map(|it| it.sites.iter().chain([&it.entry]));
        for site in plan.entry.iter().flatten().chain(exits) {
            let to = site.trampolines(LoadBias::NONE).start;
            if site.writes(LoadBias::NONE, to).is_some() {
                let _ = site.copy_at(LoadBias::NONE, to);
            }
        }
    }
});
