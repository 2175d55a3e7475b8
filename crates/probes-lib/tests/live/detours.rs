//! Signals that come while a thread is sent to map or unmap memory, and what the process does then.

use std::collections::BTreeMap;

use probes_lib::{Observation, Selector, Target};
use test_support::process::Image;
use test_support::{Talker, fixture_forms};

use crate::observe::{options, strange_code};

/// The numbers by name in a line.
fn numbers(line: &str) -> BTreeMap<String, u64> {
    let words = line.split_ascii_whitespace();
    let both = words.filter_map(|word| word.split_once('='));
    both.map(|(name, number)| (name.to_owned(), number.parse().unwrap()))
        .collect()
}

#[test]
fn memory_that_the_process_has_mapped_meanwhile_is_neither_written_nor_unmapped() {
    for file in fixture_forms("squatter") {
        let mut talker = Talker::start(&file);
        let before = Image::of(talker.pid()).text();
        let target = Target::open(talker.pid()).unwrap();
        let observation = Observation::new().count(Selector::All);
        for _ in 0..10 {
            talker.ask("squat 3", "squatting");
            loop {
                // It looks for another place when somebody has come to be in the first.
                let observer = target.observe(&observation, options()).unwrap();
                talker.hits();
                assert_eq!(observer.remove().unwrap().counts.total(), 4);
                let squatted = numbers(&talker.ask("squatted", "squatted"));
                assert_eq!(squatted["spoilt"], 0);
                if squatted["left"] == 0 {
                    break;
                }
            }
        }
        before.assert_same(&Image::of(talker.pid()).text(), "the program");
        assert_eq!(strange_code(talker.pid()), [""; 0]);
    }
}
